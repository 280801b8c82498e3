"""Which model is this: its geometry, and a fingerprint of its weights."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from s2o_runtime.errors import ModelError

SUPPORTED_ARCHITECTURES = ("llama", "qwen2")
SAMPLES_PER_TENSOR = 64


@dataclass(frozen=True)
class Geometry:
    """What a profile's tables are shaped by."""

    architecture: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int

    def difference(self, other: Geometry) -> str | None:
        """The first field that differs, in words, or None."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                return f"{field.name.replace('_', ' ')} {mine} instead of {theirs}"
        return None


def geometry(config: Any) -> Geometry:
    """The geometry in a transformers configuration. Raises ModelError if the architecture is not supported."""
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
    found = {
        int(module.layer_idx): module  # type: ignore[arg-type]
        for module in model.modules()
        if hasattr(module, "layer_idx") and hasattr(module, "num_key_value_groups")
    }
    expected = geometry(model.config).layers
    if sorted(found) != list(range(expected)):
        raise ModelError(f"found attention layers {sorted(found)} in the model: expected 0 to {expected - 1}")
    return [found[index] for index in range(expected)]


@torch.no_grad()
def fingerprint(model: nn.Module) -> str:
    """A hash over evenly spaced samples of every parameter, in bfloat16: the same for one checkpoint in any type."""
    digest = hashlib.sha256()
    samples = []
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        flat = parameter.reshape(-1)
        samples.append(flat[:: max(1, flat.numel() // SAMPLES_PER_TENSOR)][:SAMPLES_PER_TENSOR].bfloat16())
    digest.update(torch.cat([sample.cpu() for sample in samples]).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
