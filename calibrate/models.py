"""Finding and loading a model: aliases, local folders, hub ids."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from s2o_runtime.errors import ModelError
from s2o_runtime.identity import Geometry, fingerprint, geometry

DEMO_FOLDER = Path(__file__).parent / "demo" / "model"
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


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be measured."""

    name: str
    model: Any
    tokenizer: Any
    geometry: Geometry
    fingerprint: str


def resolve(name: str) -> str:
    """The folder or hub id behind a name. Raises ModelError with the nearest aliases for an unknown one."""
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


def load_config(name: str) -> Any:
    """The model's configuration, checked to be of a supported architecture."""
    from transformers import AutoConfig

    source = resolve(name)
    try:
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ModelError(f"model {name!r} cannot be loaded from {source}: {_first_line(error)}") from error
    geometry(config)
    return config


def load_tokenizer(name: str) -> Any:
    """The model's tokenizer."""
    from transformers import AutoTokenizer

    source = resolve(name)
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ModelError(f"the tokenizer of {name!r} cannot be loaded: {_first_line(error)}") from error


def load(name: str, device: str) -> LoadedModel:
    """Load the weights: bfloat16 on a GPU, float32 on a CPU."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    source = resolve(name)
    config = load_config(name)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    try:
        model = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=dtype, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise ModelError(f"model {name!r} cannot be loaded from {source}: {_first_line(error)}") from error
    model = model.to(device).eval()
    return LoadedModel(name, model, load_tokenizer(name), geometry(config), fingerprint(model))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
