"""Which model is this: its geometry, and a fingerprint of its weights and its rotary embedding (RoPE)."""

from __future__ import annotations

import ctypes
import hashlib
import json
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
ROPE = "+rope-"  # between the hash of the weights and that of the RoPE parameters in a fingerprint
PLAIN_ROPE = "default"  # what transformers calls RoPE without scaling


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


def fingerprint(model: Any) -> str:
    """What names a model's weights and positions in a profile: `with_rope` of the hash of its weights.

    Args:
        model: a transformers model with its parameters in memory, in any floating point type.

    Raises:
        RuntimeError: a parameter is not in memory (on the meta device, as offloaded ones are).
    """
    return with_rope(_weights_hash(model), model.config)


def with_rope(weights_hash: str, config: Any) -> str:
    """A fingerprint: the hash of the weights, then one of the RoPE parameters, which change what the weights compute.

    Args:
        weights_hash: as `sampled_fingerprint` gives it.
        config: the model's transformers configuration; without RoPE parameters the hash stands alone.
    """
    rope = _rope_parameters(config)
    if not rope:
        return weights_hash
    text = json.dumps(rope, sort_keys=True, separators=(",", ":"))
    return f"{weights_hash}{ROPE}{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def fingerprint_mismatch(model_fingerprint: str, profile_fingerprint: str, config: Any) -> str | None:
    """How a model differs from the one a profile was calibrated on, in words, or None if it is the same.

    A profile of an earlier version names no RoPE parameters: it is taken to be of a model without RoPE scaling.

    Args:
        model_fingerprint: the model's, as `fingerprint` gives it.
        profile_fingerprint: the profile's.
        config: the model's transformers configuration.
    """
    (weights, _, rope), (calibrated, _, calibrated_rope) = (
        text.partition(ROPE) for text in (model_fingerprint, profile_fingerprint)
    )
    if weights != calibrated:
        return "the weights are not those"
    same_rope = rope == calibrated_rope if calibrated_rope else not _scales_rope(config)
    return None if same_rope else "the RoPE parameters (rope_parameters in the model's config) are not those"


def offloaded(model: nn.Module) -> str | None:
    """Why a model cannot be compared with a profile: some of its parameters are not in memory. None if all are."""
    missing = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    return None if missing is None else f"the weights are offloaded ({missing} is not in memory) and cannot be compared"


def _rope_parameters(config: Any) -> dict[str, Any]:
    """The RoPE parameters of a configuration's text part, written one way whatever the version of transformers."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            pairs = {name: plain(part) for name, part in value.items() if part is not None}
            return {name: part for name, part in pairs.items() if (name, part) != ("partial_rotary_factor", 1.0)}
        if isinstance(value, (list, tuple)):
            return [plain(part) for part in value]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return float(value) if is_number else value if isinstance(value, bool) else str(value)

    parameters: dict[str, Any] = plain(dict(getattr(config, "rope_parameters", None) or {}))
    return parameters


def _scales_rope(config: Any) -> bool:
    """Whether any layer's RoPE is of another type than transformers' default."""
    parameters = _rope_parameters(config)
    of_layers = [part for part in parameters.values() if isinstance(part, dict)] or [parameters]
    return any(part.get("rope_type", PLAIN_ROPE) != PLAIN_ROPE for part in of_layers)


@torch.no_grad()
def _weights_hash(model: nn.Module) -> str:
    """A hash over evenly spaced samples of every parameter, in bfloat16: the same for one checkpoint in any type."""
    parameters = dict(model.named_parameters())

    def sample(name: str, places: range) -> Tensor:
        return parameters[name].reshape(-1)[places.start : places.stop : places.step]

    return sampled_fingerprint({name: each.shape for name, each in parameters.items()}, sample)


def sampled_fingerprint(shapes: Mapping[str, Sequence[int]], sample: Callable[[str, range], Tensor]) -> str:
    """The hash of parameters that need not be in memory.

    sample: given a parameter's name and places in it when it is flat, its values there.
    """
    digest = hashlib.sha256()
    samples = []
    for name, shape in sorted(shapes.items()):
        digest.update(f"{name}{tuple(shape)}".encode())
        numel = math.prod(shape)
        places = range(0, numel, max(1, numel // SAMPLES_PER_TENSOR))[:SAMPLES_PER_TENSOR]
        samples.append(sample(name, places).bfloat16().cpu())
    digest.update(tensor_bytes(torch.cat(samples)))
    return digest.hexdigest()


def stored_elements(stored: Any, indices: range) -> Tensor:
    """Elements of a vector or matrix in a safetensors file, by their indices in the flattened tensor.

    Args:
        stored: the tensor as `get_slice` of safetensors gives it, of which only what is asked for is read.
        indices: the elements.
    """
    shape = stored.get_shape()
    if len(shape) == 1:
        vector: Tensor = stored[:]
        return vector[indices.start : indices.stop : indices.step]
    cells = (divmod(index, shape[1]) for index in indices)
    return torch.cat([stored[row : row + 1, column : column + 1].reshape(-1) for row, column in cells])


def tensor_bytes(tensor: Tensor) -> bytes:
    """The bytes of a CPU tensor of any shape and dtype, in this machine's order.

    Torch itself hands them to numpy only, which the runtime does without.
    """
    tensor = tensor.detach().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
