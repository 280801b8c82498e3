"""Calls that are timed: configurations that reach a density, and kernels apart."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from calibrate.evaluation.plan import CPU_TILE
from s2o_runtime.config import LayerConfig, TileConfig
from s2o_runtime.devices import identify
from s2o_runtime.tiles import get_default_tile

if TYPE_CHECKING:
    from s2o_runtime.kernels.groups import Ranking

LOG2_TAU = (-30.0, 19.9)  # where tau is searched, up to MAX_TAU: the most peaked heads need the low end

BISECTIONS = 10  # of the range in which tau is searched

Job = Callable[[], Any]


def device_tile(head_dim: int, device: torch.device) -> TileConfig:
    """The default tile of a GPU; on a CPU one whose rows divide every segment."""
    return get_default_tile(head_dim, identify(device).capability) if device.type == "cuda" else CPU_TILE


def with_taus(config: LayerConfig, taus: list[float]) -> LayerConfig:
    """The config with these taus, one for each head."""
    return replace(config, heads=tuple(replace(head, tau=tau) for head, tau in zip(config.heads, taus, strict=True)))


def bisect(config: LayerConfig, target: float, density: Callable[[LayerConfig], Tensor]) -> LayerConfig:
    """The config with the taus that bring each head's density nearest to `target`, all heads at once.

    Args:
        config: its taus are replaced.
        target: the wanted share of the causal pairs.
        density: measures the density of every head [Hq] under a config. If it gives all heads their mean, they all
            get the same tau.
    """
    low, high = (torch.full((config.num_heads,), edge, dtype=torch.float64) for edge in LOG2_TAU)
    nearest, best = torch.full_like(low, float("inf")), low
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        reached = density(with_taus(config, middle.exp2().tolist()))
        distance = (reached / target).log().abs()
        best, nearest = torch.where(distance < nearest, middle, best), torch.minimum(distance, nearest)
        low, high = torch.where(reached > target, middle, low), torch.where(reached > target, high, middle)
    return with_taus(config, best.exp2().tolist())


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
