"""The plain-torch way to measure curves: what runs on a CPU, and what the trace kernel is compared with.

For one way to rank the keys the prefix is visited once, in order, in steps of `STEP` keys. Of every row it is kept
how much each step added to l and what the error would be after it, with and without an estimate of the rest. That is
enough to know, without running anything again, where any tile height, stride and threshold would stop, and what it
would cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from calibrate.capture import Captured
from calibrate.curves import TAUS, Curve, Method, Shape, head_norms, window_pairs, worst_of
from s2o_runtime.dense import dense_attention
from s2o_runtime.ranking import log_weights, order_of, part_means
from s2o_runtime.reference import dense_window

STEP = 128
GPU_BYTES, CPU_BYTES = 8 << 30, 256 << 20  # workspace of one pass
LIVE_COPIES = 4  # arrays of the size of the scores that exist at once


@torch.no_grad()
def measure(prompt: Captured, methods: Sequence[Method], shapes: Sequence[Shape]) -> dict[tuple[Method, Shape], Curve]:
    """One prompt's curves at one layer for some ways to rank, all of one segment length, and for every tile shape.

    Every shape's stride must be a multiple of `STEP`, and the segment of its height.
    """
    length, head_dim = prompt.q.shape[2:]
    size = methods[0].segment
    keys = [(method, shape) for method in methods for shape in shapes]
    dense = dense_attention(prompt.q, prompt.k, prompt.v, scale=prompt.scale)
    norms = head_norms(dense)
    totals: dict[tuple[Method, Shape], list[Tensor]] = {key: [] for key in keys}  # per slice of heads
    worst: dict[tuple[Method, Shape], list[Tensor]] = {key: [] for key in keys}
    for some in _head_slices(prompt, size):
        q, k, v = _heads(prompt, some)
        found: dict[tuple[Method, Shape], list[_Stopped]] = {key: [] for key in keys}
        for begin in range(0, length, size):
            segment = _segment(q[:, begin : begin + size], k, v, begin)
            for method in methods:
                trace = _trace(segment, method)
                for shape in shapes:
                    found[method, shape].append(_stops(trace, shape, norms[some]))
        for key, parts in found.items():
            totals[key].append(torch.stack([part.sums for part in parts]).sum(0))
            worst[key].append(worst_of(torch.cat([part.worst for part in parts], 2)))
    values, causal = length * head_dim, length * (length + 1) / 2
    curves = {}
    for key in keys:
        squared, tail_squared, visited = torch.cat(totals[key], 1).cpu()
        density = (visited + window_pairs(length, size, STEP)) / causal
        row, tail_row = torch.cat(worst[key], 1).cpu()
        power = float(norms.mean()) / head_dim
        curves[key] = Curve(squared / values, tail_squared / values, row, tail_row, density, power)
    return curves


def _head_slices(prompt: Captured, segment: int) -> list[slice]:
    """Heads that are measured together: as many as fit the workspace."""
    heads, length, head_dim = prompt.q.shape[1:]
    limit = GPU_BYTES if prompt.q.device.type == "cuda" else CPU_BYTES
    copy = min(segment, length) * length * max(1, head_dim // STEP) * 4
    count = max(1, limit // (LIVE_COPIES * copy))
    return [slice(begin, min(begin + count, heads)) for begin in range(0, heads, count)]


def _heads(prompt: Captured, some: slice) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of some query heads in float32, each [H, L, D]; q is scaled."""
    group = prompt.q.shape[1] // prompt.k.shape[1]
    kv = torch.arange(some.start, some.stop, device=prompt.q.device) // group
    return prompt.q[0, some].float() * prompt.scale, prompt.k[0, kv].float(), prompt.v[0, kv].float()


@dataclass(frozen=True)
class _Segment:
    """A segment of some heads, and what it computes whatever the order of its prefix.

    weights: exp(scores - m), where m is a row's largest score; l, acc: those of the window, relative to the same m.
    """

    q: Tensor  # [H, S, D], scaled
    k: Tensor  # [H, P, D]
    v: Tensor  # [H, P, D]
    weights: Tensor  # [H, P, S]
    l: Tensor  # [H, S]
    acc: Tensor  # [H, S, D]


def _segment(q: Tensor, k: Tensor, v: Tensor, begin: int) -> _Segment:
    """q [H, S, D] scaled, the segment's queries; k, v [H, L, D]; begin: position of the first query."""
    prefix = begin // STEP * STEP  # the keys cut off here join the window, as in the kernel
    end = begin + q.shape[1]
    last_key = torch.arange(begin - prefix, end - prefix, device=q.device)
    window = dense_window(q, k[:, prefix:end], v[:, prefix:end], last_key.expand(q.shape[:2]))
    k, v = k[:, :prefix], v[:, :prefix]
    if not prefix:
        return _Segment(q, k, v, q.new_zeros(len(q), 0, q.shape[1]), window.l, window.acc)
    scores = k @ q.transpose(1, 2)
    m = torch.maximum(scores.amax(1), window.m)
    decay = (window.m - m).exp_()
    return _Segment(q, k, v, scores.sub_(m[:, None]).exp_(), window.l * decay, window.acc * decay[..., None])


@dataclass(frozen=True)
class _Trace:
    """A segment after every step of its prefix, in one order.

    The error without a tail is x . x, where x is the output so far less the dense one. A tail moves the output
    towards the mean of the values left, as the ranking weighs them; y is that mean less the dense output.
    """

    l: Tensor  # [H, T + 1, S], with the window alone in front
    xx: Tensor  # [H, T, S]
    xy: Tensor  # [H, T, S]
    yy: Tensor  # [H, T, S]
    mass: Tensor  # [H, T + 1], the ranking's weight of the keys left
    dense: Tensor  # [H, S, D]


def _trace(segment: _Segment, method: Method) -> _Trace:
    if not segment.k.shape[1]:
        none = segment.weights
        return _Trace(segment.l[:, None], none, none, none, none[..., 0], segment.acc / segment.l[..., None])
    log_mass = log_weights(part_means(segment.q, method.segment // method.representatives), segment.k, method.grain)
    order = order_of(log_mass, method.grain)
    weights, v = (_in_order(each, order) for each in (segment.weights, segment.v))
    l = torch.cat([segment.l[:, None], weights.sum(2)], 1).cumsum_(1)
    acc = (weights.transpose(2, 3) @ v).cumsum_(1).add_(segment.acc[:, None])  # [H, T, S, D]
    del weights
    out = acc.div_(l[:, 1:, :, None])
    dense = out[:, -1].clone()
    x = out.sub_(dense[:, None])
    mass, mean = _left((log_mass - log_mass.amax(-1, keepdim=True)).exp_(), order, v)
    xy = (x @ mean[..., None])[..., 0] - (x * dense[:, None]).sum(-1)
    yy = mean.square().sum(-1)[..., None] - 2 * mean @ dense.transpose(1, 2) + dense.square().sum(-1)[:, None]
    return _Trace(l, x.square_().sum(-1), xy, yy, mass, dense)


def _in_order(rows: Tensor, order: Tensor) -> Tensor:
    """Rows [H, P, X] of every head in its own order [H, P], by steps: [H, T, STEP, X]."""
    heads, prefix = order.shape
    places = order + prefix * torch.arange(heads, device=order.device)[:, None]
    return rows.flatten(0, 1).index_select(0, places.flatten()).view(heads, -1, STEP, rows.shape[-1])


def _left(mass: Tensor, order: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The mass of the keys left before and after every step [H, T + 1], and their mean value after it [H, T, D].

    mass: [H, P / grain] by position; order: [H, P]; v: [H, T, STEP, D], in that order. See ranking.Ranking.
    """
    grain = order.shape[1] // mass.shape[1]
    of_keys = (mass.gather(1, order // grain) / grain).view(v.shape[:3])
    left = _suffix_sums(of_keys.sum(-1))
    values = _suffix_sums((of_keys[:, :, None] @ v)[:, :, 0])[:, 1:]
    return left, values / torch.where(left > 0, left, 1.0)[:, 1:, None]


def _suffix_sums(terms: Tensor) -> Tensor:
    """Sums over dimension 1 from each entry to the end, and a 0 for behind the end."""
    return torch.cat([terms.flip(1).cumsum(1).flip(1), torch.zeros_like(terms[:, :1])], 1)


@dataclass(frozen=True)
class _Stopped:
    """A segment at every threshold: without a tail, with one.

    sums: float64 [3, H, T], squared error, the same with a tail, and visited pairs; worst: [2, H, row tiles, T], the
    largest relative error of a row.
    """

    sums: Tensor
    worst: Tensor


def _stops(trace: _Trace, shape: Shape, norms: Tensor) -> _Stopped:
    """Where each threshold stops; norms [H]: a row's own counts at least so much."""
    heads, steps, rows = trace.xx.shape
    device = trace.l.device
    tiles = -(-rows // shape.block_m)
    if not steps:
        sums = torch.zeros(3, heads, len(TAUS), dtype=torch.float64, device=device)
        return _Stopped(sums, torch.zeros(2, heads, tiles, len(TAUS), device=device))
    chunks = -(-steps // (shape.stride // STEP))
    ends = (torch.arange(chunks + 1, device=device) * (shape.stride // STEP)).clamp_max(steps)
    count = (rows - torch.arange(tiles, device=device) * shape.block_m).clamp_max(shape.block_m)

    def by_tile(of_rows: Tensor) -> Tensor:
        """[H, C, S] -> [H, tiles, C, block_m]"""
        padded = F.pad(of_rows, (0, tiles * shape.block_m - rows))
        return padded.view(heads, chunks, tiles, shape.block_m).transpose(1, 2)

    l = trace.l[:, ends]
    gain = by_tile(l.diff(dim=1) / l[:, :-1]).sum(-1) / count[:, None]
    rest = (gain * ((steps - ends[1:]) / ends.diff()))[..., :-1]  # after the last chunk there is nothing to skip
    lowest = rest.cummin(-1).values.flip(-1)
    # the chunk whose gain falls below tau is kept: it comes after those that do not
    stop = chunks - 1 - torch.searchsorted(lowest, _taus(device).expand(heads, tiles, -1).contiguous())
    pairs = ends[1:][stop] * STEP * count[:, None]
    size = trace.dense.square().sum(-1).maximum(norms[:, None])[:, None]
    errors = (trace.xx[:, ends[1:] - 1], _with_tail(trace, ends))
    squared = [by_tile(error).sum(-1).gather(2, stop) for error in errors]
    worst = [by_tile(error / size).amax(-1).gather(2, stop) for error in errors]
    return _Stopped(torch.stack([each.double().sum(1) for each in (*squared, pairs)]), torch.stack(worst))


def _with_tail(trace: _Trace, ends: Tensor) -> Tensor:
    """Squared error of every row at the end of every chunk [H, C, S] with the tail added: reference.with_tail."""
    begin, end = ends[:-1], ends[1:]
    mass = trace.mass[:, end]
    chunk = trace.mass[:, begin] - mass
    most = (ends[-1] - end) / ends.diff()
    times = torch.where(chunk * most > mass, mass / chunk, most) * (mass > 0)
    l = trace.l[:, end]
    added = times[..., None] * (l - trace.l[:, begin])
    tail = added / (l + added)
    xx, xy, yy = (each[:, end - 1] for each in (trace.xx, trace.xy, trace.yy))
    return ((1 - tail).square() * xx + 2 * (1 - tail) * tail * xy + tail.square() * yy).clamp_min_(0)


@lru_cache(maxsize=8)
def _taus(device: torch.device) -> Tensor:
    return torch.tensor(TAUS, dtype=torch.float32, device=device)
