"""Finding and loading a model: aliases, local folders, hub ids.

With random weights only the sizes matter: those of an alias come from `architectures/`, prompts are tokenized by the
demo model's tokenizer, and nothing is downloaded.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from calibrate.model.weights import Checkpoint, RandomWeights, Weights, skeleton
from s2o_runtime.errors import ModelError
from s2o_runtime.identity import Geometry, geometry

DEMO_FOLDER = Path(__file__).parents[1] / "demo" / "model"
ARCHITECTURES = Path(__file__).parents[1] / "architectures"
ALIASES = {
    "demo": str(DEMO_FOLDER),
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5-3b": "Qwen/Qwen2.5-3B-Instruct",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen2.5-14b": "Qwen/Qwen2.5-14B-Instruct",
    "qwen2.5-32b": "Qwen/Qwen2.5-32B-Instruct",
    "qwen2.5-72b": "Qwen/Qwen2.5-72B-Instruct",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B-Instruct",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B-Instruct",
}


log = logging.getLogger("calibrate")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be measured.

    name: As the user gave it. model: The transformers model. It can be called like any other if `weights.resident`;
    otherwise its parameters are on the meta device, and `weights` puts them on `weights.device` part by part.
    fingerprint: A hash that names the weights in a profile. random: Whether the weights are random ones.
    """

    name: str
    model: Any
    tokenizer: Any
    geometry: Geometry
    fingerprint: str
    weights: Weights
    random: bool = False


def resolve(name: str) -> str:
    """The folder or hub id behind a name.

    Raises:
        ModelError: The name is not known, or a folder holds no model; it names the nearest aliases.
    """
    if name in ALIASES:
        return ALIASES[name]
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise ModelError(f"folder {name} holds no config.json: give a folder that transformers can load")
        return name
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/"):
        return name
    near = difflib.get_close_matches(name, ALIASES, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known names are {', '.join(ALIASES)}."
    raise ModelError(f"model {name!r} is not known: {hint} A local folder or a hub id (org/name) works too")


def load_config(name: str, *, random_weights: bool = False) -> Any:
    """The model's configuration.

    Args:
        name: An alias, a local folder or a hub id.
        random_weights: Whether only the architecture is needed.

    Raises:
        ModelError: It cannot be loaded, or its architecture, its kind of attention or its number format is not
            supported.
    """
    from transformers import AutoConfig

    shipped = _shipped(name) if random_weights else None
    source = str(shipped or resolve(name))
    with _loading(name, source):
        config = AutoConfig.from_pretrained(source)
    geometry(config)
    unsupported = sorted(_other_attention(config))
    if unsupported:
        raise ModelError(f"model {name!r} has layers of {unsupported[0]}, expected full_attention: use another model")
    if getattr(config, "quantization_config", None) is not None and not random_weights:
        raise ModelError(f"model {name!r} is quantised, expected float weights: use the checkpoint it was made from")
    return config


def _other_attention(config: Any) -> set[str]:
    """The names of all attention in a model that is not full causal attention, which alone can be calibrated."""
    text = config.get_text_config()
    layer_types = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    if not getattr(text, "layer_types", None) and getattr(text, "sliding_window", None) is not None:
        layer_types.add("sliding_attention")
    if getattr(text, "attn_logit_softcapping", None) is not None:
        layer_types.add("soft-capped attention")
    return layer_types


def load_tokenizer(name: str, *, random_weights: bool = False) -> Any:
    """The model's tokenizer; the demo model's if the weights are random and the model has none at hand.

    Raises:
        ModelError: The name is not known, or the tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer

    if random_weights and _shipped(name):
        return AutoTokenizer.from_pretrained(DEMO_FOLDER)
    source = resolve(name)
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        if random_weights:
            log.warning("the tokenizer of %r cannot be loaded: random weights read the demo model's tokens", name)
            return AutoTokenizer.from_pretrained(DEMO_FOLDER)
        raise ModelError(f"the tokenizer of {name!r} cannot be loaded: {_first_line(error)}") from error


def load(
    name: str, device: str, *, random_weights: bool = False, seed: int = 0, resident: bool | None = None
) -> LoadedModel:
    """Load a model: in bfloat16 on a GPU, in float32 on a CPU.

    Args:
        name: An alias, a local folder or a hub id.
        device: A torch device, such as "cuda:0" or "cpu".
        random_weights: Take only the model's architecture, and draw its weights.
        seed: What random weights are drawn from.
        resident: Whether all weights stay on the device, so that `model` can be called; None keeps them if they take
            a quarter of the memory or less.

    Raises:
        ModelError: The model cannot be found, downloaded or read, or is not supported.
    """
    config = load_config(name, random_weights=random_weights)
    tokenizer = load_tokenizer(name, random_weights=random_weights)
    if random_weights and len(tokenizer) > config.vocab_size:
        raise ModelError(
            f"model {name!r} has a vocabulary of {config.vocab_size}, its prompts are made of {len(tokenizer)} tokens: "
            "give it a tokenizer of its own"
        )
    torch_device = torch.device(device)
    model = skeleton(config, torch.bfloat16 if torch_device.type == "cuda" else torch.float32, torch_device)
    source = RandomWeights(model, seed) if random_weights else _checkpoint(name, model)
    weights = Weights(model, source, torch_device, resident)
    return LoadedModel(name, model, tokenizer, geometry(config), weights.fingerprint, weights, random_weights)


def _shipped(name: str) -> Path | None:
    """The configuration of an alias that is part of this package."""
    path = ARCHITECTURES / f"{name}.json"
    return path if name in ALIASES and path.is_file() else None


def _checkpoint(name: str, model: Any) -> Checkpoint:
    """The files with the weights, downloaded if need be; the model gets the generation settings beside them."""
    from transformers import GenerationConfig
    from transformers.utils.hub import cached_file
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    source = resolve(name)

    def find(file: str) -> str | None:
        with _loading(name, source):
            path: str | None = cached_file(source, file, _raise_exceptions_for_missing_entries=False)
        return path

    if find("generation_config.json") is not None:
        with _loading(name, source):
            model.generation_config = GenerationConfig.from_pretrained(source)
    return Checkpoint(find)


@contextmanager
def _loading(name: str, source: str) -> Iterator[None]:
    """Turns what transformers raises into one sentence."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ModelError(f"model {name!r} cannot be loaded from {source}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
