"""Calls that are timed: configurations that reach a density, kernels apart, dense kernels."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from s2o_runtime.config import LayerConfig, TileConfig
from s2o_runtime.devices import identify
from s2o_runtime.reference.dense import dense_attention, use_sdpa_backend
from s2o_runtime.tiles import get_default_tile
from scripts.bench.schema import DENSE, FLASH, FLASH_3

if TYPE_CHECKING:
    from s2o_runtime.kernels.groups import Ranking

LOG2_TAU = (-30.0, 19.9)  # where tau is searched, up to MAX_TAU: the most peaked heads need the low end
CPU_TILE = TileConfig(64, 64, 4)

Job = Callable[[], Any]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
AttentionPart = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]


def device_tile(head_dim: int, device: torch.device) -> TileConfig:
    """The default tile of a GPU; on a CPU one whose rows divide every segment."""
    return get_default_tile(head_dim, identify(device).capability) if device.type == "cuda" else CPU_TILE


def with_taus(config: LayerConfig, taus: list[float]) -> LayerConfig:
    """The config with these taus, one for each head."""
    return replace(config, heads=tuple(replace(head, tau=tau) for head, tau in zip(config.heads, taus, strict=True)))


def bisect(config: LayerConfig, target: float, steps: int, density: Callable[[LayerConfig], Tensor]) -> LayerConfig:
    """The config with the taus that bring each head's density nearest to `target`, all heads at once.

    Args:
        config: its taus are replaced.
        target: the wanted share of the causal pairs.
        steps: of the bisection.
        density: measures the density of every head [Hq] under a config. If it gives all heads their mean, they all
            get the same tau.
    """
    low, high = (torch.full((config.num_heads,), edge, dtype=torch.float64) for edge in LOG2_TAU)
    nearest, best = torch.full_like(low, float("inf")), low
    for _ in range(steps):
        middle = (low + high) / 2
        reached = density(with_taus(config, middle.exp2().tolist()))
        distance = (reached / target).log().abs()
        best, nearest = torch.where(distance < nearest, middle, best), torch.minimum(distance, nearest)
        low, high = torch.where(reached > target, middle, low), torch.where(reached > target, high, middle)
    return with_taus(config, best.exp2().tolist())


def list_dense_kernels(device: torch.device) -> Mapping[str, Attention]:
    """Return dense causal attention by each kernel that is here, by its name; shapes are as in `s2o_attention`.

    They take queries behind a prefix too. A CPU has torch's alone.
    """
    if device.type != "cuda":
        return {DENSE: dense_attention}
    third = {FLASH_3: flash_attention_3} if find_spec("flash_attn_interface") else {}
    return {DENSE: cudnn_attention, FLASH: flash_attention, **third}


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute dense causal attention with FlashAttention-2, through SDPA, which splits long keys of few queries."""
    with use_sdpa_backend(SDPBackend.FLASH_ATTENTION):
        return dense_attention(q, k, v)


def flash_attention_3(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute dense causal attention with FlashAttention-3, whose mask ends at the last key as S2O's does."""
    package = import_module("flash_attn_interface")
    answer = package.flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=True)
    out: Tensor = answer[0] if isinstance(answer, tuple) else answer  # by version, with the log-sum-exp
    return out.transpose(1, 2)


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute dense causal attention with cuDNN, behind a prefix in parts that keep all multiprocessors busy."""
    (batch, heads, queries, _), prefix = q.shape, k.shape[2] - q.shape[2]
    if not prefix:
        return dense_attention(q, k, v)
    programs = batch * heads * -(-queries // 128)
    busy = torch.cuda.get_device_properties(q.device).multi_processor_count // programs
    return attend_in_parts(q, k, v, math.gcd(prefix, 1 << busy.bit_length()), run_cudnn)


def run_cudnn(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Run cuDNN and no other kernel: the output, and the log-sum-exp of each row in float32."""
    out, log_sum, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal, False)
    return out, log_sum


def attend_in_parts(q: Tensor, k: Tensor, v: Tensor, parts: int, run: AttentionPart) -> Tensor:
    """Compute dense causal attention behind a prefix by a kernel whose causal mask begins at the first key.

    The prefix, which all queries see, and their own keys are calls of their own, joined by the log-sum-exps. `parts`
    divides the prefix; its parts are a batch of one call.
    """
    batch, queries = len(q), q.shape[2]
    prefix = k.shape[2] - queries
    outs, log_sums = run(q, k[:, :, prefix:], v[:, :, prefix:], True)
    keys, values = (
        t[:, :, :prefix].reshape(batch, -1, parts, prefix // parts, t.shape[3]).transpose(1, 2).flatten(0, 1)
        for t in (k, v)
    )
    others = run(q.repeat_interleave(parts, 0), keys, values, False)
    of_prefix, their_sums = (t.reshape(batch, parts, *q.shape[1:3], -1) for t in others)
    outs = torch.cat([outs[:, None], of_prefix], 1)
    weights = torch.cat([log_sums.reshape(batch, 1, *q.shape[1:3], 1), their_sums], 1).softmax(1)
    return (weights * outs).sum(1).to(q.dtype)


def kernel_parts(q: Tensor, k: Tensor, v: Tensor, configs: list[LayerConfig]) -> tuple[Job, list[Job]]:
    """The two parts of `kernels.prefill.s2o_prefill` as jobs: the ranking, and the prefill kernel of each config.

    The configs differ in tau only, which the ranking does not know, so they share one. The ranking job keeps no slice
    longer than a real call does.
    """
    from s2o_runtime.call import Call
    from s2o_runtime.kernels import prefill as kernel

    calls = [Call.from_tensors(q, k, v, config) for config in configs]
    out, visited, _ = kernel.run_prefill(calls[0])  # the buffers that every call writes
    slices = kernel.slice_rows(calls[0], kernel.WORKSPACE_BYTES)

    def ranked_slices() -> Iterator[Ranking]:
        return map(kernel.Ranker(calls[0]).rank, slices)

    rankings = list(ranked_slices())

    def prefill(call: Call) -> Tensor:
        for rows, ranking in zip(slices, rankings, strict=True):
            kernel.prefill(call, ranking, out, visited, rows)
        return out

    return lambda: deque(ranked_slices(), maxlen=0), [partial(prefill, call) for call in calls]
