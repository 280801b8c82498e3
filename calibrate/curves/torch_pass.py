"""Measuring curves in plain torch: what runs on a CPU, and what the trace kernel is compared with.

For each ranking the prefix is visited once, in order, in steps of `STEP` keys. For every row the pass keeps how much
each step added to l (the online softmax's sum), and what the error would be after it, with and without a tail. That is
enough to know, without running anything again, where any tile height, stride and threshold would stop, and what error
and density would follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from calibrate.curves.curves import TAUS, Curve, RankingConfig, Shape, head_norms, pairs_from, window_pairs, worst_of
from calibrate.model.layers import Captured
from s2o_runtime.call import capped
from s2o_runtime.config import GRAIN, dense_from
from s2o_runtime.quantisation import Int8Operands
from s2o_runtime.reference.attention import dense_window
from s2o_runtime.reference.ranking import log_weights, order_of, part_means

STEP = 128
GPU_BYTES, CPU_BYTES = 8 << 30, 256 << 20  # workspace of one pass
LIVE_COPIES = 4  # arrays of the size of the scores that exist at once


@torch.no_grad()
def measure(
    prompt: Captured, rankings: Sequence[RankingConfig], shapes: Sequence[Shape], last_rows: int = 0
) -> dict[tuple[RankingConfig, Shape], Curve]:
    """One prompt's curves at one layer.

    Args:
        prompt: q [1, Hq, L, D], k [1, Hkv, L, D] and v [1, Hkv, L, Dv] of the layer.
        rankings: all of one segment length.
        shapes: their strides must be multiples of `STEP`, and the segment a multiple of their heights.
        last_rows: so many rows at the prompt's end are dense.

    Returns:
        A curve for every ranking and shape.
    """
    length, head_dim = prompt.v.shape[2:]
    size = rankings[0].segment
    keys = [(ranking, shape) for ranking in rankings for shape in shapes]
    dense = prompt.truth()
    norms = head_norms(dense)
    totals: dict[tuple[RankingConfig, Shape], list[Tensor]] = {key: [] for key in keys}  # per slice of heads
    worst: dict[tuple[RankingConfig, Shape], list[Tensor]] = {key: [] for key in keys}
    for heads in _head_slices(prompt, size):
        q, k, v = _heads(prompt, heads)
        sinks = None if prompt.sinks is None else prompt.sinks[heads].float()[:, None]
        stopped: dict[tuple[RankingConfig, Shape], list[_Stopped]] = {key: [] for key in keys}  # segment by segment
        for scores in dict.fromkeys(ranking.scores for ranking in rankings):
            int8 = Int8Operands.of_heads(q, k) if scores == "int8" else None
            same_scores = [ranking for ranking in rankings if ranking.scores == scores]
            for begin in range(0, length, size):
                rows = slice(begin, begin + size)
                if int8 is None:
                    segment = _segment(q[:, rows], k, v, begin, prompt.softcap, sinks)
                    if prompt.exact is not None:
                        segment = replace(segment, truth=dense[0, heads, rows].float())
                else:
                    segment = _segment(int8.q[:, rows], int8.k, v, begin, prompt.softcap, sinks)
                    segment = replace(segment, exact=q[:, rows], int8=int8, truth=dense[0, heads, rows].float())
                for ranking in same_scores:
                    trace = _trace(segment, ranking)
                    for shape in shapes:
                        sparse = dense_from(length, last_rows, shape.block_m) - begin
                        stopped[ranking, shape].append(_stops(trace, shape, norms[heads], sparse))
        for key, segments in stopped.items():
            totals[key].append(torch.stack([segment.sums for segment in segments]).sum(0))
            worst[key].append(worst_of(torch.cat([segment.worst for segment in segments], 2), -2).sqrt())
    values, causal = length * head_dim, length * (length + 1) / 2
    curves = {}
    for key in keys:
        squared, tail_squared, visited = torch.cat(totals[key], 1).cpu()
        sparse = dense_from(length, last_rows, key[1].block_m)
        density = (visited + window_pairs(range(sparse), size, STEP) + pairs_from(sparse, length)) / causal
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


def _heads(prompt: Captured, heads: slice) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of some query heads in float32, each [H, L, D]; q is scaled."""
    group = prompt.q.shape[1] // prompt.k.shape[1]
    kv = torch.arange(heads.start, heads.stop, device=prompt.q.device) // group
    return prompt.q[0, heads].float() * prompt.scale, prompt.k[0, kv].float(), prompt.v[0, kv].float()


@dataclass(frozen=True)
class _Segment:
    """A segment of some heads, and what does not depend on the order of its prefix.

    weights is exp(scores - m), where m is a row's largest score; l (the sum of weights) and acc (the weighted sum of
    values) are those of the window, relative to the same m. Where scores are int8, q and k are those of `int8`, `exact`
    holds the queries that representatives are means of. Where scores, keys or values are rounded, `truth` is what
    errors are taken from.
    """

    q: Tensor  # [H, S, D], scaled
    k: Tensor  # [H, P, D]
    v: Tensor  # [H, P, Dv]
    weights: Tensor  # [H, P, S]
    l: Tensor  # [H, S]
    acc: Tensor  # [H, S, Dv]
    softcap: float | None
    exact: Tensor | None = None  # [H, S, D], scaled
    int8: Int8Operands | None = None
    truth: Tensor | None = None  # [H, S, Dv]; None: what all keys together give


def _segment(
    q: Tensor, k: Tensor, v: Tensor, begin: int, softcap: float | None, sinks: Tensor | None
) -> _Segment:  # fmt: skip
    """A segment of some heads.

    Args:
        q: [H, S, D], scaled, the segment's queries.
        k, v: [H, L, D] and [H, L, Dv].
        begin: position of the first query.
        softcap: bounds the scores; None for no bound.
        sinks: [H, 1]; they are part of the window's denominator. None for none.
    """
    prefix = begin // STEP * STEP  # the keys cut off here join the window, as in the kernel
    end = begin + q.shape[1]
    last_key = torch.arange(begin - prefix, end - prefix, device=q.device)
    window = dense_window(q, k[:, prefix:end], v[:, prefix:end], last_key.expand(q.shape[:2]), softcap, sinks)
    k, v = k[:, :prefix], v[:, :prefix]
    if not prefix:
        return _Segment(q, k, v, q.new_zeros(len(q), 0, q.shape[1]), window.l, window.acc, softcap)
    scores = capped(k @ q.transpose(1, 2), softcap)
    m = torch.maximum(scores.amax(1), window.m)
    decay = (window.m - m).exp_()
    return _Segment(q, k, v, scores.sub_(m[:, None]).exp_(), window.l * decay, window.acc * decay[..., None], softcap)


@dataclass(frozen=True)
class _Trace:
    """A segment after each of the T steps of its prefix, in one order.

    The squared error without a tail is x . x, where x is the output so far less the dense one. A tail moves the output
    towards the mean of the values that are left, as the ranking weighs them; y is that mean less the dense output.
    """

    l: Tensor  # [H, T + 1, S], with the window alone in front
    xx: Tensor  # [H, T, S]
    xy: Tensor  # [H, T, S]
    yy: Tensor  # [H, T, S]
    mass: Tensor  # [H, T + 1], the ranking's weight of the keys left
    dense: Tensor  # [H, S, D]
    last: Tensor  # [H, S], the squared error once all keys are visited: 0 unless scores are rounded


def _trace(segment: _Segment, ranking: RankingConfig) -> _Trace:
    """Visit the whole prefix in the order of one ranking."""
    if not segment.k.shape[1]:
        none, out = segment.weights, segment.acc / segment.l[..., None]
        dense = out if segment.truth is None else segment.truth
        return _Trace(segment.l[:, None], none, none, none, none[..., 0], dense, (out - dense).square().sum(-1))
    parts = part_means(
        segment.q if segment.exact is None else segment.exact, ranking.segment // ranking.representatives
    )
    if segment.int8 is not None:
        parts = segment.int8.representatives(parts)
    log_mass = log_weights(parts, segment.k, GRAIN, segment.softcap)
    order = order_of(log_mass, GRAIN)
    weights, v = _in_order(segment.weights, order), _in_order(segment.v, order)
    l = torch.cat([segment.l[:, None], weights.sum(2)], 1).cumsum_(1)
    acc = (weights.transpose(2, 3) @ v).cumsum_(1).add_(segment.acc[:, None])  # [H, T, S, D]
    del weights
    out = acc.div_(l[:, 1:, :, None])
    dense = out[:, -1].clone() if segment.truth is None else segment.truth
    x = out.sub_(dense[:, None])
    mass, mean = _left((log_mass - log_mass.amax(-1, keepdim=True)).exp_(), order, v)
    xy = (x @ mean[..., None])[..., 0] - (x * dense[:, None]).sum(-1)
    yy = mean.square().sum(-1)[..., None] - 2 * mean @ dense.transpose(1, 2) + dense.square().sum(-1)[:, None]
    xx = x.square_().sum(-1)
    return _Trace(l, xx, xy, yy, mass, dense, xx[:, -1])


def _in_order(rows: Tensor, order: Tensor) -> Tensor:
    """Rows [H, P, X] of every head in its own order [H, P], by steps: [H, T, STEP, X]."""
    heads, prefix = order.shape
    indices = order + prefix * torch.arange(heads, device=order.device)[:, None]
    return rows.flatten(0, 1).index_select(0, indices.flatten()).view(heads, -1, STEP, rows.shape[-1])


def _left(mass: Tensor, order: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The mass of the keys left before and after every step [H, T + 1], and their mean value after it [H, T, D].

    mass: [H, P / GRAIN] by position; order: [H, P]; v: [H, T, STEP, D], in that order. See ranking.Ranking.
    """
    key_mass = (mass.gather(1, order // GRAIN) / GRAIN).view(v.shape[:3])
    left = _suffix_sums(key_mass.sum(-1))
    values = _suffix_sums((key_mass[:, :, None] @ v)[:, :, 0])[:, 1:]
    return left, values / torch.where(left > 0, left, 1.0)[:, 1:, None]


def _suffix_sums(terms: Tensor) -> Tensor:
    """Sums over dimension 1 from each entry to the end, and a last entry of 0."""
    return torch.cat([terms.flip(1).cumsum(1).flip(1), torch.zeros_like(terms[:, :1])], 1)


@dataclass(frozen=True)
class _Stopped:
    """A segment at every threshold.

    sums holds the squared error without a tail, the one with a tail, and the visited pairs: float64 [3, H, len(TAUS)].
    worst holds the largest squared error of a row over its squared norm, without and with a tail:
    [2, H, row tiles, len(TAUS)].
    """

    sums: Tensor
    worst: Tensor


def _stops(trace: _Trace, shape: Shape, norms: Tensor, sparse: int) -> _Stopped:
    """Where each threshold stops.

    norms [H]: a row's error is taken relative to its own norm or to this, if larger. sparse: the rows from this one on
    are dense, so they have no error and no prefix.
    """
    heads, steps, rows = trace.xx.shape
    device = trace.l.device
    tiles = -(-rows // shape.block_m)
    kept = (torch.arange(tiles, device=device) * shape.block_m < sparse)[:, None]
    if not steps:
        sums = torch.zeros(3, heads, len(TAUS), dtype=torch.float64, device=device)
        last = trace.last[:, : max(sparse, 0)]
        sums[:2] = last.double().sum(-1)[:, None]
        row_errors = last / trace.dense.square().sum(-1).maximum(norms[:, None])[:, : max(sparse, 0)]
        tile_errors = F.pad(row_errors, (0, tiles * shape.block_m - last.shape[1])).view(heads, tiles, -1).amax(-1)
        return _Stopped(sums, tile_errors[..., None].expand(2, heads, tiles, len(TAUS)))
    chunks = -(-steps // (shape.stride // STEP))
    ends = (torch.arange(chunks + 1, device=device) * (shape.stride // STEP)).clamp_max(steps)
    count = (rows - torch.arange(tiles, device=device) * shape.block_m).clamp_max(shape.block_m)

    def by_tile(row_errors: Tensor) -> Tensor:
        """[H, C, S] -> [H, tiles, C, block_m]"""
        padded = F.pad(row_errors, (0, tiles * shape.block_m - rows))
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
    squared_and_pairs = (torch.where(kept, tile_errors, 0).double().sum(1) for tile_errors in (*squared, pairs))
    return _Stopped(torch.stack([*squared_and_pairs]), torch.where(kept, torch.stack(worst), 0))


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
    xx, xy, yy = (product[:, end - 1] for product in (trace.xx, trace.xy, trace.yy))
    return ((1 - tail).square() * xx + 2 * (1 - tail) * tail * xy + tail.square() * yy).clamp_min_(0)


@lru_cache(maxsize=8)
def _taus(device: torch.device) -> Tensor:
    return torch.tensor(TAUS, dtype=torch.float32, device=device)
