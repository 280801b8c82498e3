"""Plan a calibration of a model before its weights are there: the layers that S2O serves, and how weights are loaded.

All of it follows from the configuration, and from the files of a local folder if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from calibrate.model.estimate import ModelSizes, number_width
from calibrate.model.layers import list_decoder_layers
from calibrate.model.models import is_gguf, resolve
from calibrate.model.weights import INDEX, SINGLE, Checkpoint, build_skeleton, explain_no_streaming, find_quantisation
from s2o_runtime.errors import ModelError
from s2o_runtime.huggingface.layers import expect_obstacle
from s2o_runtime.identity import Geometry, geometry
from s2o_runtime.layer_kinds import CHUNKED, count_visible_keys, list_layer_kinds

GB = 1e9
BITS = {"fp8": 8.0, "finegrained_fp8": 8.0, "fbgemm_fp8": 8.0, "mxfp4": 4.25, "bitnet": 2.0}  # formats of one width
DECOMPRESSED = "compressed-tensors"  # newer transformers make 16-bit weights of it at the first forward pass


class Preflight(NamedTuple):
    """The facts that a calibration will find.

    geometry: the model's sizes. layers: the layers that run S2O, in words. shares: by length in tokens, the share of
    the prefill's attention that is in them. loading: how the weights are loaded and what memory that takes, in words.
    sizes: they decide how long it runs.
    """

    geometry: Geometry
    layers: str
    shares: Mapping[int, float]
    loading: str
    sizes: ModelSizes


def make_preflight(
    name: str, config: Any, *, device: str, lengths: Sequence[int], random_weights: bool, memory: int = 0
) -> Preflight:
    """Predict what a calibration of a model will find, by its transformers configuration alone.

    device: the torch device that it will run on. lengths: of prompts, in tokens. random_weights: whether weights are
    drawn. memory: bytes of a GPU that is not here, which a plan is for. Raises ModelError if S2O cannot do the
    attention of a layer, or transformers cannot make the model.
    """
    model = build_skeleton(config, torch.bfloat16, torch.device("cpu"))
    for layer in list_decoder_layers(model):
        if layer.attention is not None and (obstacle := expect_obstacle(layer.attention, config)) is not None:
            raise ModelError(f"layer {layer.number} cannot run S2O ({obstacle}): the model is not supported")
    shape, sizes = geometry(config), ModelSizes.from_model(model, device, memory)
    layers = f"all {shape.layers} run S2O"
    if shape.others:
        numbers = ", ".join(map(str, shape.layer_numbers))
        layers = f"{shape.layers} of {shape.decoder_layers} run S2O ({numbers}); {shape.other_layers} stay as they are"
    shares = {length: compute_attention_share(config, length) for length in lengths}
    return Preflight(shape, layers, shares, describe_loading(name, config, model, sizes, device, random_weights), sizes)


def compute_attention_share(config: Any, length: int) -> float:
    """Compute the share of a prefill's attention in layers of full attention, by pairs of queries and keys.

    Every layer counts alike, but for those without softmax attention: their time grows with the length alone.
    """
    full = length * (length + 1) / 2
    return geometry(config).layers * full / sum(_count_pairs(kind, length, config) for kind in list_layer_kinds(config))


def _count_pairs(kind: str, length: int, config: Any) -> float:
    """Count the pairs of queries and keys in a layer of this kind, of one head."""
    seen = count_visible_keys(kind, config)
    near = length if seen is None else min(length, seen)
    triangle = near * (near + 1) / 2
    if kind != CHUNKED or not near:
        return triangle + (length - near) * near
    chunks, rest = divmod(length, near)
    return chunks * triangle + rest * (rest + 1) / 2


def describe_loading(name: str, config: Any, model: Any, sizes: ModelSizes, device: str, random_weights: bool) -> str:
    """Describe how the weights of a model, here a skeleton, are loaded and what memory that takes."""
    total = sizes.parameters * number_width(device) / GB
    layer = sizes.largest_layer * number_width(device) / GB
    names = None
    if not random_weights:
        if (method := find_quantisation(config)) is not None:
            size = "of a size that its config does not tell"
            if (bits := _read_bits(config)) is not None:
                size = f"about {sizes.parameters * bits / 8 / GB:.3g} GB"
            if method == DECOMPRESSED:
                size += f", {sizes.parameters * 2 / GB:.3g} GB once it runs"
            return f"as a whole, {size}: {explain_no_streaming(config, model, None)}"
        obstacle: str | None = "GGUF files are read by transformers"
        if not is_gguf(name):
            names = _list_stored_names(name)
            obstacle = explain_no_streaming(config, model, names)
        if obstacle is not None:
            return f"as a whole, {total:.3g} GB: {obstacle}"
    if sizes.resident:
        return f"{total:.3g} GB, which stay on the device"
    streamed = f"layer by layer, {layer:.3g} GB at a time of {total:.3g} GB"
    if random_weights or names is not None:
        return streamed
    return f"{streamed}; as a whole if its files do not hold the model's own tensors"


def _list_stored_names(name: str) -> Any:
    """List the tensors in a local folder's safetensors files; None if there are none here."""
    folder = Path(resolve(name))
    if not any((folder / file).is_file() for file in (SINGLE, INDEX)):
        return None
    return Checkpoint(lambda file: str(folder / file) if (folder / file).is_file() else None).names


def _read_bits(config: Any) -> float | None:
    """Return the bits of a quantised weight; None if the configuration does not say it in a way that is known here."""
    settings = config.quantization_config
    settings = settings if isinstance(settings, Mapping) else settings.to_dict()
    if "bits" in settings:
        return float(settings["bits"])
    if settings.get("load_in_4bit"):
        return 4.5
    if settings.get("load_in_8bit"):
        return 8.0
    groups = (settings.get("config_groups") or {}).values()
    widths = [group.get("weights", {}).get("num_bits") for group in groups if isinstance(group, Mapping)]
    if widths and all(widths):
        return float(max(widths))
    return BITS.get(str(find_quantisation(config)))
