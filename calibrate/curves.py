"""Error against threshold for every head, from one pass over the prefix.

For one segment length the prefix is visited once, in order, in steps of `STEP` keys. Of every row it is kept
how much each step added to l and what the error would be after it. That is enough to know, without running
anything again, where any tile height, stride and threshold would stop, and what it would cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from calibrate.capture import Captured
from s2o_runtime.config import HeadConfig, TileConfig
from s2o_runtime.reference import dense_window, rank, segment_representative

STEP = 128
TAUS = tuple(float(f"{10.0 ** (exponent / 6):.4g}") for exponent in range(-24, 13))  # 1e-4 .. 1e2, six a decade


@dataclass(frozen=True)
class Shape:
    """What, beside tau, decides where a head stops: the tile height and the keys between two checks."""

    block_m: int
    stride: int

    @classmethod
    def of(cls, tile: TileConfig) -> Shape:
        return cls(tile.block_m, tile.stride)


@dataclass(frozen=True)
class Curve:
    """Mean squared error and density of every head at every threshold of `TAUS`.

    mse, density: float64 [Hq, len(TAUS)]; thresholds in units of the uniform share, rows reduced by mean.
    dense_power: mean square of the layer's dense output.
    """

    mse: Tensor
    density: Tensor
    dense_power: float


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The curve of several prompts together."""
    return Curve(
        torch.stack([curve.mse for curve in curves]).mean(0),
        torch.stack([curve.density for curve in curves]).mean(0),
        sum(curve.dense_power for curve in curves) / len(curves),
    )


@torch.no_grad()
def measure(prompt: Captured, segment: int, shapes: Sequence[Shape]) -> dict[Shape, Curve]:
    """One prompt's curves at one layer for one segment length, for every tile shape.

    Every shape's stride must be a multiple of `STEP`, and `segment` of its height.
    """
    heads, length = prompt.q.shape[1], prompt.q.shape[2]
    group = heads // prompt.k.shape[1]
    squared = {shape: torch.zeros(heads, len(TAUS), dtype=torch.float64) for shape in shapes}
    visited = {shape: torch.zeros(heads, len(TAUS), dtype=torch.float64) for shape in shapes}
    power = 0.0
    for h in range(heads):
        q = prompt.q[0, h].float() * prompt.scale
        k, v = (t[0, h // group].float() for t in (prompt.k, prompt.v))
        for begin in range(0, length, segment):
            rows = slice(begin, min(begin + segment, length))
            trace = _trace(q[rows], k, v, begin)
            power += float(trace.dense.square().sum())
            for shape in shapes:
                errors, keys = _stops(trace, shape)
                squared[shape][h] += errors.cpu()
                visited[shape][h] += keys.cpu()
    pairs = length * (length + 1) / 2
    window = _window_pairs(length, segment)
    return {
        shape: Curve(
            squared[shape] / (length * prompt.q.shape[3]),
            (visited[shape] + window) / pairs,
            power / (heads * length * prompt.q.shape[3]),
        )
        for shape in shapes
    }


@dataclass(frozen=True)
class _Trace:
    """One segment: l and squared error of every row after every step; column 0 is the window alone."""

    l: Tensor  # [S, T + 1]
    error: Tensor  # [S, T + 1], summed over the head dimension
    prefix: int
    dense: Tensor  # [S, D]


def _trace(q: Tensor, k: Tensor, v: Tensor, begin: int) -> _Trace:
    """q [S, D] scaled, the segment's queries; k, v [L, D]; begin: position of the first query."""
    prefix = begin // STEP * STEP  # the keys cut off here join the window, as in the kernel
    steps = prefix // STEP
    last_key = torch.arange(begin - prefix, begin - prefix + len(q), device=q.device)
    end = begin + len(q)
    window = dense_window(q[None], k[prefix:end], v[prefix:end], last_key[None])
    if steps == 0:
        return _Trace(window.l.T, torch.zeros_like(window.l.T), 0, window.output()[0])
    order = rank(segment_representative(q, begin, 0), k[:prefix])
    scores = q @ k[order].T
    m = torch.maximum(scores.amax(-1), window.m[0])[:, None]
    weights = (scores - m).exp_().view(len(q), steps, STEP)
    decay = (window.m[0][:, None] - m).exp()
    l = torch.cat([window.l[0][:, None] * decay, weights.sum(-1)], 1).cumsum_(1)
    values = torch.bmm(weights.transpose(0, 1), v[order].view(steps, STEP, -1))  # [T, S, D]
    acc = torch.cat([(window.acc[0] * decay)[None], values]).cumsum_(0)
    out = acc.div_(l.T[..., None])
    dense = out[-1].clone()
    return _Trace(l, out.sub_(dense).square_().sum(-1).T, prefix, dense)


def _stops(trace: _Trace, shape: Shape) -> tuple[Tensor, Tensor]:
    """Summed squared error and visited pairs at every threshold, each float64 [len(TAUS)]."""
    per_chunk = shape.stride // STEP
    steps = trace.l.shape[1] - 1
    ends = torch.tensor([*range(0, steps, per_chunk), steps], device=trace.l.device)
    l, error = trace.l[:, ends], trace.error[:, ends]
    keys = ends * STEP
    tiles = -(-len(l) // shape.block_m)
    rows = torch.arange(len(l), device=l.device) // shape.block_m
    count = torch.bincount(rows, minlength=tiles)
    error_of = l.new_zeros(tiles, len(ends)).index_add_(0, rows, error)
    stop = torch.zeros(tiles, len(TAUS), dtype=torch.int64, device=l.device)
    if steps:
        gain = l[:, 1:] / l[:, :-1] - 1
        tile_gain = l.new_zeros(tiles, len(ends) - 1).index_add_(0, rows, gain) / count[:, None]
        share = tile_gain * trace.prefix / (keys[1:] - keys[:-1])
        lowest = share.cummin(1).values
        taus = torch.tensor(TAUS, dtype=l.dtype, device=l.device)
        # the chunk whose gain falls below tau is kept, so it is the number of chunks before it, plus one
        stop = ((lowest[:, :, None] >= taus).sum(1) + 1).clamp_max(len(ends) - 1)
    pairs = keys[stop] * count[:, None]
    return error_of.gather(1, stop).double().sum(0), pairs.double().sum(0)


def _window_pairs(length: int, segment: int) -> int:
    """Causal pairs inside the windows of one head."""
    total = 0
    for begin in range(0, length, segment):
        size = min(segment, length - begin)
        total += size * (size + 1) // 2 + size * (begin % STEP)
    return total


def head_config(tau: float | None, segment: int) -> HeadConfig:
    """The configuration of a head at one point of its curve; None is dense."""
    if tau is None:
        return HeadConfig(segment=segment, mode="dense")
    return HeadConfig(tau=tau, segment=segment, threshold="share")
