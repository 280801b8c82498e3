"""Error against threshold for every head, from one pass over the prefix.

For one segment length the prefix is visited once, in order, in steps of `STEP` keys. Of every row it is kept
how much each step added to l and what the error would be after it. That is enough to know, without running
anything again, where any tile height, stride and threshold would stop, and what it would cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from calibrate.capture import Captured
from s2o_runtime.config import HeadConfig, TileConfig
from s2o_runtime.reference import dense_window, rank, segment_representative

STEP = 128
GPU_BYTES, CPU_BYTES = 8 << 30, 256 << 20  # workspace of one pass
LIVE_COPIES = 4  # arrays of the size of the scores that exist at once
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
    heads, length, head_dim = prompt.q.shape[1:]
    device = prompt.q.device
    squared = {shape: torch.zeros(heads, len(TAUS), dtype=torch.float64, device=device) for shape in shapes}
    visited = {shape: torch.zeros(heads, len(TAUS), dtype=torch.float64, device=device) for shape in shapes}
    power = torch.zeros((), dtype=torch.float64, device=device)
    for some in _head_slices(prompt, segment):
        q, k, v = _heads(prompt, some)
        for begin in range(0, length, segment):
            trace = _trace(q[:, begin : begin + segment], k, v, begin)
            power += trace.dense.double().square().sum()
            for shape in shapes:
                errors, pairs = _stops(trace, shape)
                squared[shape][some] += errors
                visited[shape][some] += pairs
    window = _window_pairs(length, segment)
    mean_power = float(power) / (heads * length * head_dim)
    return {
        shape: Curve(
            squared[shape].cpu() / (length * head_dim),
            (visited[shape].cpu() + window) / (length * (length + 1) / 2),
            mean_power,
        )
        for shape in shapes
    }


def _head_slices(prompt: Captured, segment: int) -> list[slice]:
    """Heads that are measured together: as many as fit the workspace."""
    heads, length = prompt.q.shape[1:3]
    limit = GPU_BYTES if prompt.q.device.type == "cuda" else CPU_BYTES
    count = max(1, limit // (LIVE_COPIES * min(segment, length) * length * 4))
    return [slice(begin, min(begin + count, heads)) for begin in range(0, heads, count)]


def _heads(prompt: Captured, some: slice) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of some query heads in float32, each [H, L, D]; q is scaled."""
    group = prompt.q.shape[1] // prompt.k.shape[1]
    kv = torch.arange(some.start, some.stop, device=prompt.q.device) // group
    return prompt.q[0, some].float() * prompt.scale, prompt.k[0, kv].float(), prompt.v[0, kv].float()


@dataclass(frozen=True)
class _Trace:
    """One segment of some heads: l and squared error of every row after every step; column 0 is the window alone."""

    l: Tensor  # [H, S, T + 1]
    error: Tensor  # [H, S, T + 1], summed over the head dimension
    prefix: int
    dense: Tensor  # [H, S, D]


def _trace(q: Tensor, k: Tensor, v: Tensor, begin: int) -> _Trace:
    """q [H, S, D] scaled, the segment's queries; k, v [H, L, D]; begin: position of the first query."""
    heads, rows, head_dim = q.shape
    prefix = begin // STEP * STEP  # the keys cut off here join the window, as in the kernel
    steps = prefix // STEP
    end = begin + rows
    last_key = torch.arange(begin - prefix, end - prefix, device=q.device)
    window = dense_window(q, k[:, prefix:end], v[:, prefix:end], last_key.expand(heads, rows))
    if steps == 0:
        return _Trace(window.l[..., None], torch.zeros_like(window.l)[..., None], 0, window.output())
    order = rank(segment_representative(q, begin, 0), k[:, :prefix])[..., None].expand(-1, -1, head_dim)
    scores = q @ k.gather(1, order).transpose(1, 2)
    m = torch.maximum(scores.amax(-1), window.m)[..., None]
    weights = scores.sub_(m).exp_().view(heads, rows, steps, STEP)
    decay = (window.m[..., None] - m).exp_()
    l = torch.cat([window.l[..., None] * decay, weights.sum(-1)], 2).cumsum_(2)
    values = weights.transpose(1, 2) @ v.gather(1, order).view(heads, steps, STEP, head_dim)  # [H, T, S, D]
    acc = torch.cat([(window.acc * decay)[:, None], values], 1).cumsum_(1)
    out = acc.div_(l.transpose(1, 2)[..., None])
    dense = out[:, -1].clone()
    return _Trace(l, out.sub_(dense[:, None]).square_().sum(-1).transpose(1, 2), prefix, dense)


def _stops(trace: _Trace, shape: Shape) -> tuple[Tensor, Tensor]:
    """Summed squared error and visited pairs at every threshold, each float64 [H, len(TAUS)]."""
    heads, rows, columns = trace.l.shape
    steps = columns - 1
    device = trace.l.device
    chunks = -(-steps // (shape.stride // STEP))
    ends = (torch.arange(chunks + 1, device=device) * (shape.stride // STEP)).clamp_max(steps)
    l, error = trace.l[..., ends], trace.error[..., ends]
    tiles = -(-rows // shape.block_m)
    tile = torch.arange(rows, device=device) // shape.block_m
    count = (rows - torch.arange(tiles, device=device) * shape.block_m).clamp_max(shape.block_m)
    error_of = l.new_zeros(heads, tiles, chunks + 1).index_add_(1, tile, error)
    stop = torch.zeros(heads, tiles, len(TAUS), dtype=torch.int64, device=device)
    if chunks:
        gain = l[..., 1:] / l[..., :-1] - 1
        tile_gain = l.new_zeros(heads, tiles, chunks).index_add_(1, tile, gain) / count[:, None]
        share = tile_gain * trace.prefix / (ends.diff() * STEP)
        lowest = share.cummin(-1).values
        # the chunk whose gain falls below tau is kept, so it is the number of chunks before it, plus one
        before = chunks - torch.searchsorted(lowest.flip(-1), _taus(device).expand(heads, tiles, -1).contiguous())
        stop = (before + 1).clamp_max(chunks)
    pairs = (ends[stop] * STEP * count[:, None]).double()
    return error_of.gather(2, stop).double().sum(1), pairs.sum(1)


@lru_cache(maxsize=8)
def _taus(device: torch.device) -> Tensor:
    return torch.tensor(TAUS, dtype=torch.float32, device=device)


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
