"""What is known of a model before its weights are: which layers S2O serves, what that is worth, and how it is loaded.

All of it follows from the configuration, and from the files of a local folder if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from calibrate.model.estimate import ModelSizes, number_width
from calibrate.model.layers import decoder_layers
from calibrate.model.models import is_gguf, resolve
from calibrate.model.weights import INDEX, SINGLE, Checkpoint, quantisation, skeleton, streaming_obstacle
from s2o_runtime.errors import ModelError
from s2o_runtime.huggingface.layers import foreseen_obstacle
from s2o_runtime.identity import Geometry, geometry
from s2o_runtime.layer_kinds import CHUNKED, layer_kinds, visible_keys

GB = 1e9
BITS = {
    "fp8": 8.0,
    "finegrained_fp8": 8.0,
    "fbgemm_fp8": 8.0,
    "mxfp4": 4.25,
    "bitnet": 2.0,
}  # of formats with one width
DECOMPRESSED = "compressed-tensors"  # newer transformers make 16-bit weights of it at the first forward pass


class Preflight(NamedTuple):
    """What a calibration will find.

    geometry: the model's sizes. layers: which layers run S2O, in words. shares: by length in tokens, the share of the
    prefill's attention that is in them. loading: how the weights are loaded and what memory that takes, in words.
    sizes: what decides how long it runs.
    """

    geometry: Geometry
    layers: str
    shares: Mapping[int, float]
    loading: str
    sizes: ModelSizes


def preflight(
    name: str, config: Any, *, device: str, lengths: Sequence[int], random_weights: bool, memory: int = 0
) -> Preflight:
    """What a calibration will find, by the model's configuration alone.

    Args:
        name: the model, as the user gave it.
        config: its transformers configuration.
        device: the torch device that it will run on.
        lengths: prompt lengths in tokens.
        random_weights: whether weights are drawn.
        memory: bytes of a GPU that is not here, which a plan is for.

    Raises:
        ModelError: S2O cannot do the attention of a layer, or transformers cannot make the model.
    """
    model = check_served(config)
    sizes = ModelSizes.of(model, device, memory)
    return Preflight(
        geometry(config),
        served_layers(config),
        {length: attention_share(config, length) for length in lengths},
        loading(name, config, model, sizes, device, random_weights),
        sizes,
    )


def check_served(config: Any) -> Any:
    """The model's skeleton, once it is clear that S2O can do the attention of its layers of full attention.

    Args:
        config: a transformers configuration.

    Raises:
        ModelError: It cannot; the sentence names the first layer and the reason. Or transformers cannot make the model.
    """
    model = skeleton(config, torch.bfloat16, torch.device("cpu"))
    for layer in decoder_layers(model):
        obstacle = None if layer.attention is None else foreseen_obstacle(layer.attention, config)
        if obstacle is not None:
            raise ModelError(f"layer {layer.number} cannot run S2O ({obstacle}): the model is not supported")
    return model


def served_layers(config: Any) -> str:
    """Which decoder layers run S2O, in words, and how many of other kinds stay what they are."""
    shape = geometry(config)
    if not shape.others:
        return f"all {shape.layers} run S2O"
    numbers = ", ".join(map(str, shape.layer_numbers))
    return f"{shape.layers} of {shape.decoder_layers} run S2O ({numbers}); {shape.other_layers} stay as they are"


def attention_share(config: Any, length: int) -> float:
    """The share of a prefill's attention that is in layers of full attention, by pairs of queries and keys.

    Every layer counts alike. Layers without softmax attention count nothing: their time grows with the length alone.

    Args:
        config: a transformers configuration.
        length: tokens of the prompt.
    """
    full = length * (length + 1) / 2
    pairs = sum(_pairs(kind, length, config) for kind in layer_kinds(config))
    return geometry(config).layers * full / pairs


def _pairs(kind: str, length: int, config: Any) -> float:
    """The pairs of queries and keys in a layer of this kind, of one head."""
    seen = visible_keys(kind, config)
    near = length if seen is None else min(length, seen)
    triangle = near * (near + 1) / 2
    if kind != CHUNKED or not near:
        return triangle + (length - near) * near
    chunks, rest = divmod(length, near)
    return chunks * triangle + rest * (rest + 1) / 2


def loading(name: str, config: Any, model: Any, sizes: ModelSizes, device: str, random_weights: bool) -> str:
    """How the weights of a model with this skeleton and these sizes are loaded and what memory that takes, in words.

    Args:
        name, config, device, random_weights: as `preflight` takes them.
    """
    parameters, width = sizes.parameters, number_width(device)
    total = parameters * width
    if not random_weights and quantisation(config) is not None:
        bits = _bits(config)
        size = (
            "of a size that its config does not tell" if bits is None else f"about {parameters * bits / 8 / GB:.3g} GB"
        )
        if quantisation(config) == DECOMPRESSED:
            size += f", {parameters * 2 / GB:.3g} GB once it runs"
        return f"as a whole, {size}: {streaming_obstacle(config, model, None)}"
    gguf = not random_weights and is_gguf(name)
    obstacle = "GGUF files are read by transformers" if gguf else None
    if not random_weights and not gguf:
        obstacle = streaming_obstacle(config, model, _names(name))
    if obstacle is not None:
        return f"as a whole, {total / GB:.3g} GB: {obstacle}"
    if sizes.resident:
        return f"{total / GB:.3g} GB, which stay on the device"
    streamed = f"layer by layer, {sizes.largest_layer * width / GB:.3g} GB at a time of {total / GB:.3g} GB"
    can_stream = random_weights or _names(name) is not None
    return streamed if can_stream else f"{streamed}; as a whole if its files do not hold the model's own tensors"


def _names(name: str) -> Any:
    """The tensors in a local folder's safetensors files; None if there are none here."""
    folder = Path(resolve(name))
    if not folder.is_dir() or not any((folder / file).is_file() for file in (SINGLE, INDEX)):
        return None
    return Checkpoint(lambda file: str(folder / file) if (folder / file).is_file() else None).names


def _bits(config: Any) -> float | None:
    """The bits of a quantised weight; None if the configuration does not say it in a way that is known here."""
    settings = config.quantization_config
    settings = settings if isinstance(settings, Mapping) else settings.to_dict()
    if "bits" in settings:
        return float(settings["bits"])
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return 4.5 if settings.get("load_in_4bit") else 8.0
    groups = settings.get("config_groups") or {}
    widths = [group.get("weights", {}).get("num_bits") for group in groups.values() if isinstance(group, Mapping)]
    if widths and all(widths):
        return float(max(widths))
    return BITS.get(str(quantisation(config)))
