"""The public attention op: checks the call, picks a backend, and says why."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, get_args, overload

import torch
from torch import Tensor

from s2o_runtime.config import HEAD_DIMS, LayerConfig
from s2o_runtime.dense import dense_attention
from s2o_runtime.errors import InputError
from s2o_runtime.gpu import MIN_CAPABILITY
from s2o_runtime.reference import s2o_attention_reference
from s2o_runtime.shapes import CallShape, call_shape, check_heads, density

Backend = Literal["auto", "triton", "reference", "dense"]
KERNEL_TYPES = (torch.bfloat16, torch.float16)

log = logging.getLogger("s2o_runtime")


class Choice(NamedTuple):
    """A backend and the reason it was picked."""

    backend: str
    reason: str


@dataclass(frozen=True)
class AttentionStats:
    """What one call did.

    backend, reason: which code ran, and why it was chosen.
    visited: int32 [B, Hq, row tiles], prefix keys each row tile computed; None when the call was dense.
    """

    backend: str
    reason: str
    config: LayerConfig
    shape: CallShape
    kv_start: Tensor | None
    visited: Tensor | None

    @property
    def density(self) -> Tensor:
        """Query-key pairs computed over causal pairs, window included: float64 [Hq]; dense is 1.0."""
        if self.visited is None:
            return torch.ones(self.shape.query_heads, dtype=torch.float64)
        return density(self.visited, self.config, self.shape, self.kv_start)


@overload
def s2o_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: LayerConfig,
    *,
    scale: float | None = ...,
    kv_start: Tensor | None = ...,
    backend: Backend = ...,
    return_stats: Literal[False] = ...,
) -> Tensor: ...
@overload
def s2o_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: LayerConfig,
    *,
    scale: float | None = ...,
    kv_start: Tensor | None = ...,
    backend: Backend = ...,
    return_stats: Literal[True],
) -> tuple[Tensor, AttentionStats]: ...
def s2o_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: LayerConfig,
    *,
    scale: float | None = None,
    kv_start: Tensor | None = None,
    backend: Backend = "auto",
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, AttentionStats]:
    """Causal attention that computes only the part of the prefix that counts.

    q: [B, Hq, Lq, D]; k, v: [B, Hkv, Lk, D] with Lq <= Lk, one floating type, one device; query i stands at
        position Lk - Lq + i, and query head h reads KV head h // (Hq / Hkv).
    config: one `HeadConfig` per query head; with tau = 0 the result is dense attention.
    scale: multiplies the scores; default D ** -0.5, must be positive.
    kv_start: integers [B], the first key of each sequence that counts (left padding).
    backend: "triton", "reference" (plain torch, any device), "dense", or "auto", which picks the first that
        can do the call and keeps the reason in the stats.
    Returns the output [B, Hq, Lq, D] in q's dtype, rows before `kv_start` zero; with `return_stats` also an
    `AttentionStats`. Raises InputError for tensors that do not fit, ConfigError for an illegal config.

    >>> q, k, v = (torch.randn(1, heads, 256, 64) for heads in (4, 2, 2))
    >>> s2o_attention(q, k, v, LayerConfig.uniform(4, tau=0.5, segment=128)).shape
    torch.Size([1, 4, 256, 64])
    """
    shape = call_shape(q, k, v, kv_start)
    check_heads(config.validate(), shape)
    if scale is None:
        scale = shape.head_dim**-0.5
    elif not scale > 0:
        raise InputError(f"scale is {scale}: expected a positive number")
    choice = choose_backend(q, k, v, config, shape, backend)
    visited: Tensor | None = None
    if choice.backend == "dense":
        out = dense_attention(q, k, v, scale=scale, kv_start=kv_start)
    elif choice.backend == "reference":
        out, visited = s2o_attention_reference(q, k, v, config, scale=scale, kv_start=kv_start)
    else:
        from s2o_runtime.kernels.prefill import s2o_prefill  # imports triton

        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        out, visited = s2o_prefill(q, k, v, config, shape, scale, kv_start)
    if return_stats:
        return out, AttentionStats(choice.backend, choice.reason, config, shape, kv_start, visited)
    return out


def choose_backend(q: Tensor, k: Tensor, v: Tensor, config: LayerConfig, shape: CallShape, backend: Backend) -> Choice:
    """The backend for a call, and why. Raises InputError if the one asked for cannot do it."""
    if backend not in get_args(Backend):
        raise InputError(f"backend {backend!r} is not known: use one of {get_args(Backend)}")
    if backend in ("dense", "reference"):
        return Choice(backend, "asked for")
    obstacle = _kernel_obstacle(q, k, v, config, shape)
    if backend == "triton":
        if obstacle:
            raise InputError(f'{obstacle}: run with backend="auto"')
        return Choice("triton", "asked for")
    choice = _automatic(q, config, shape, obstacle)
    _log_once(choice)
    return choice


def _automatic(q: Tensor, config: LayerConfig, shape: CallShape, obstacle: str | None) -> Choice:
    if config.is_dense:
        return Choice("dense", "every head of the layer is dense")
    if not has_prefix(config, shape):
        return Choice("dense", "the whole prompt fits one segment")
    if q.device.type == "cpu":
        return Choice("reference", "the tensors are on the cpu, the kernel needs a GPU")
    if obstacle is None:
        return Choice("triton", "the kernel supports this call")
    return Choice("dense", obstacle)


def has_prefix(config: LayerConfig, shape: CallShape) -> bool:
    """Whether any segment of any head has keys before it."""
    shortest = min((head.segment for head in config.heads if head.mode == "s2o"), default=shape.q_len)
    return shape.offset > 0 or shape.q_len > shortest


def _kernel_obstacle(q: Tensor, k: Tensor, v: Tensor, config: LayerConfig, shape: CallShape) -> str | None:
    """Why the kernel cannot do a call, or None if it can."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        return "the kernel has no backward pass and gradients are enabled"
    if shape.head_dim not in HEAD_DIMS:
        return f"head_dim {shape.head_dim} is not supported by the kernel {HEAD_DIMS}"
    if interpreted():
        return "the specialised kernel cannot be interpreted" if config.tile.specialized else None
    if q.device.type != "cuda":
        return f"the tensors are on {q.device.type}, the kernel needs a GPU"
    if q.dtype not in KERNEL_TYPES:
        return f"{q.dtype} is not supported by the kernel (bfloat16, float16)"
    capability = torch.cuda.get_device_capability(q.device)
    if capability < MIN_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is older than 8.0"
    if config.tile.specialized and capability != (9, 0):
        return f"tile {config.tile} is for sm_90, this GPU is sm_{capability[0]}{capability[1]}"
    return None


def interpreted() -> bool:
    """Whether Triton kernels run in its interpreter (TRITON_INTERPRET=1), for tests without a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache(maxsize=64)
def _log_once(choice: Choice) -> None:
    log.info("attention backend %s: %s", choice.backend, choice.reason)
