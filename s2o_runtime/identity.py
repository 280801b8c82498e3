"""Which model is this: its geometry, and a fingerprint of its weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from s2o_runtime.errors import ModelError

SUPPORTED_ARCHITECTURES = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mistral",
    "mixtral",
    "phi3",
    "gemma2",
    "gemma3_text",
)
SAMPLES_PER_TENSOR = 64
RANDOM = "random-"  # how the fingerprint of random weights starts


@dataclass(frozen=True)
class Geometry:
    """What a profile's tables are shaped by."""

    architecture: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return (
            f"{self.architecture}, {self.layers} layers, {self.query_heads} query heads, {self.kv_heads} KV heads, "
            f"head dim {self.head_dim}"
        )

    def difference(self, other: Geometry) -> str | None:
        """The first field that differs, in words, or None."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                return f"{field.name.replace('_', ' ')} {mine} instead of {theirs}"
        return None


def geometry(config: Any) -> Geometry:
    """The geometry in a transformers configuration, of its text part if it has several.

    Raises ModelError if the architecture is not supported.
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    architecture = str(getattr(config, "model_type", type(config).__name__))
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ModelError(
            f"architecture {architecture!r} is not supported: use a model of type {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    query_heads = int(config.num_attention_heads)
    return Geometry(
        architecture,
        int(config.num_hidden_layers),
        query_heads,
        int(getattr(config, "num_key_value_heads", None) or query_heads),
        int(getattr(config, "head_dim", None) or config.hidden_size // query_heads),
    )


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The model's attention modules in layer order.

    Raises ModelError if they are not one per layer.
    """
    found = [
        (int(module.layer_idx), module)  # type: ignore[arg-type]
        for module in model.modules()
        if hasattr(module, "layer_idx") and hasattr(module, "num_key_value_groups")
    ]
    found.sort(key=lambda pair: pair[0])
    indices, expected = [index for index, _ in found], geometry(model.config).layers
    if indices != list(range(expected)):
        raise ModelError(f"found attention layers {indices} in the model: expected 0 to {expected - 1}")
    return [module for _, module in found]


@torch.no_grad()
def fingerprint(model: nn.Module) -> str:
    """A hash over evenly spaced samples of every parameter, in bfloat16: the same for one checkpoint in any type."""
    parameters = dict(model.named_parameters())

    def sample(name: str, places: range) -> Tensor:
        return parameters[name].reshape(-1)[places.start : places.stop : places.step]

    return sampled_fingerprint({name: each.shape for name, each in parameters.items()}, sample)


def sampled_fingerprint(shapes: Mapping[str, Sequence[int]], sample: Callable[[str, range], Tensor]) -> str:
    """The fingerprint of parameters that need not be in memory.

    sample: given a parameter's name and places in it when it is flat, its values there.
    """
    digest = hashlib.sha256()
    samples = []
    for name, shape in sorted(shapes.items()):
        digest.update(f"{name}{tuple(shape)}".encode())
        numel = math.prod(shape)
        places = range(0, numel, max(1, numel // SAMPLES_PER_TENSOR))[:SAMPLES_PER_TENSOR]
        samples.append(sample(name, places).bfloat16().cpu())
    digest.update(torch.cat(samples).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
