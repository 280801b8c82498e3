"""Measure curves in plain torch, on any device; the trace kernel is compared with this.

For each ranking the prefix is visited once, in order, in steps of `STEP` keys. For every row the pass keeps how much
each step added to l (the online softmax's sum), and the error that would be left after it, with and without a tail.
From that follows where any tile height, stride and threshold would stop, with its error and density.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from calibrate.curves.curves import (
    TAUS,
    Curve,
    Curves,
    RankingConfig,
    Shape,
    compute_head_norms,
    count_pairs,
    count_window_pairs,
    find_prefix_end,
    place_taus,
    select_worst,
)
from calibrate.model.layers import Captured
from s2o_runtime.call import cap_scores
from s2o_runtime.config import KEY_BLOCK, find_first_dense_row
from s2o_runtime.reference.attention import attend_window
from s2o_runtime.reference.ranking import log_weights, make_representatives, order_of

STEP = 64  # keys; the smallest lookback, and the step of segments
GPU_BYTES, CPU_BYTES = 8 << 30, 256 << 20  # workspace of one pass
LIVE_COPIES = 4  # arrays of the size of the scores that exist at once
Stops = defaultdict[tuple[RankingConfig, Shape], list[tuple[Tensor, Tensor]]]  # what `_find_stops` returns


@torch.no_grad()
def measure(prompt: Captured, rankings: Sequence[RankingConfig], shapes: Sequence[Shape], last_rows: int = 0) -> Curves:
    """Measure one prompt's curve at one layer for every ranking, all of one segment length, and every shape.

    shapes: their strides must be multiples of `STEP`, and the segment a multiple of their heights. last_rows: so many
    rows at the prompt's end are dense, whatever the threshold (`LayerConfig.last_rows`).
    """
    length, head_dim = prompt.v.shape[2:]
    size = rankings[0].segment
    dense = prompt.truth()
    norms = compute_head_norms(dense)
    slices: Stops = defaultdict(list)  # of every slice of heads: sums over its rows, and errors of its worst rows
    for heads in _slice_heads(prompt, size):
        group = prompt.q.shape[1] // prompt.k.shape[1]
        kv = torch.arange(heads.start, heads.stop, device=prompt.q.device) // group
        q, k, v = prompt.q[0, heads].float() * prompt.scale, prompt.k[0, kv].float(), prompt.v[0, kv].float()
        sinks = None if prompt.sinks is None else prompt.sinks[heads].float()[:, None]
        stops: Stops = defaultdict(list)  # of every segment
        for begin in range(0, length, size):
            rows = slice(begin, begin + size)
            truth = None if prompt.exact is None else dense[0, heads, rows].float()
            segment: _Segment | None = None
            for ranking in rankings:
                prefix = find_prefix_end(begin, ranking, STEP)
                if segment is None or segment.k.shape[1] != prefix:
                    segment = _attend_segment(q[:, rows], k, v, begin, prefix, prompt.softcap, sinks)
                trace = _trace_prefix(segment, ranking, truth)
                for shape in shapes:
                    sparse = find_first_dense_row(length, last_rows, shape.block_m) - begin
                    stops[ranking, shape].append(_find_stops(trace, shape, norms[heads], sparse))
        for key, segments in stops.items():
            sums, tile_errors = zip(*segments, strict=True)
            worst = select_worst(torch.cat(tile_errors, 2), -2).sqrt()
            slices[key].append((torch.stack(sums).sum(0), worst))
    values, causal = length * head_dim, length * (length + 1) / 2
    curves = {}
    for key, stops_of_slices in slices.items():
        (squared, tail_squared, visited), (row, tail_row) = (
            torch.cat(of_slices, 1).cpu() for of_slices in zip(*stops_of_slices, strict=True)
        )
        sparse = find_first_dense_row(length, last_rows, key[1].block_m)
        density = (visited + count_window_pairs(range(sparse), key[0], STEP) + count_pairs(sparse, length)) / causal
        power = float(norms.mean()) / head_dim
        curves[key] = Curve(squared / values, tail_squared / values, row, tail_row, density, power)
    return curves


def _slice_heads(prompt: Captured, segment: int) -> list[slice]:
    """Split the heads into slices that are measured together: as many as fit the workspace."""
    heads, length, head_dim = prompt.q.shape[1:]
    limit = GPU_BYTES if prompt.q.device.type == "cuda" else CPU_BYTES
    copy = min(segment, length) * length * max(1, head_dim // STEP) * 4
    count = max(1, limit // (LIVE_COPIES * copy))
    begins = range(0, heads, count)
    return [slice(begin, min(begin + count, heads)) for begin in begins]


@dataclass(frozen=True)
class _Segment:
    """A segment of some heads, independent of the order of its prefix.

    weights is exp(scores - m), where m is a row's largest score; l (the sum of weights) and acc (the weighted sum of
    values) are those of the window, relative to the same m.
    """

    q: Tensor  # [H, S, D], scaled
    k: Tensor  # [H, P, D]
    v: Tensor  # [H, P, Dv]
    weights: Tensor  # [H, P, S]
    l: Tensor  # [H, S]
    acc: Tensor  # [H, S, Dv]
    softcap: float | None


def _attend_segment(
    q: Tensor, k: Tensor, v: Tensor, begin: int, prefix: int, softcap: float | None, sinks: Tensor | None
) -> _Segment:  # fmt: skip
    """Compute a segment's window and the weights of its prefix.

    q: [H, S, D], scaled; the first query is at position `begin`. k, v: [H, L, D] and [H, L, Dv]. prefix: keys before
    the window. sinks: [H, 1], part of the window's denominator.
    """
    end = begin + q.shape[1]
    last_key = torch.arange(begin - prefix, end - prefix, device=q.device)
    window = attend_window(q, k[:, prefix:end], v[:, prefix:end], last_key.expand(q.shape[:2]), softcap, sinks)
    k, v = k[:, :prefix], v[:, :prefix]
    if not prefix:
        return _Segment(q, k, v, q.new_zeros(len(q), 0, q.shape[1]), window.l, window.acc, softcap)
    scores = cap_scores(k @ q.transpose(1, 2), softcap)
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
    last: Tensor  # [H, S], the squared error once all keys are visited: 0 unless keys and values are rounded


def _trace_prefix(segment: _Segment, ranking: RankingConfig, truth: Tensor | None) -> _Trace:
    """Visit the whole prefix in the order of one ranking.

    truth: [H, S, Dv], the dense output where keys and values are rounded; None where it is the last of the visit.
    """
    if not segment.k.shape[1]:
        none, out = segment.weights, segment.acc / segment.l[..., None]
        dense = out if truth is None else truth
        return _Trace(segment.l[:, None], none, none, none, none[..., 0], dense, (out - dense).square().sum(-1))
    parts = make_representatives(segment.q, ranking.segment // ranking.representatives)
    log_mass = log_weights(parts, segment.k, KEY_BLOCK, segment.softcap)
    order = order_of(log_mass, KEY_BLOCK)
    weights, v = _order_rows(segment.weights, order), _order_rows(segment.v, order)
    l = torch.cat([segment.l[:, None], weights.sum(2)], 1).cumsum_(1)
    acc = (weights.transpose(2, 3) @ v).cumsum_(1).add_(segment.acc[:, None])  # [H, T, S, D]
    del weights
    out = acc.div_(l[:, 1:, :, None])
    dense = out[:, -1].clone() if truth is None else truth
    x = out.sub_(dense[:, None])
    mass, mean = _sum_left((log_mass - log_mass.amax(-1, keepdim=True)).exp_(), order, v)
    xy = (x @ mean[..., None])[..., 0] - (x * dense[:, None]).sum(-1)
    mean_squared, dense_squared = (output.square().sum(-1) for output in (mean, dense))
    yy = mean_squared[..., None] - 2 * mean @ dense.transpose(1, 2) + dense_squared[:, None]
    xx = x.square_().sum(-1)
    return _Trace(l, xx, xy, yy, mass, dense, xx[:, -1])


def _order_rows(rows: Tensor, order: Tensor) -> Tensor:
    """Return rows [H, P, X] of every head in its own order [H, P], by steps: [H, T, STEP, X]."""
    heads, prefix = order.shape
    indices = order + prefix * torch.arange(heads, device=order.device)[:, None]
    return rows.flatten(0, 1).index_select(0, indices.flatten()).view(heads, -1, STEP, rows.shape[-1])


def _sum_left(mass: Tensor, order: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mass of the keys left around each step [H, T + 1], and their mean value after it [H, T, D].

    mass: [H, P / GRAIN] by position; order: [H, P]; v: [H, T, STEP, D], in that order. See ranking.Ranking.
    """
    key_mass = (mass.gather(1, order // KEY_BLOCK) / KEY_BLOCK).view(v.shape[:3])
    left = _sum_suffixes(key_mass.sum(-1))
    values = _sum_suffixes((key_mass[:, :, None] @ v)[:, :, 0])[:, 1:]
    return left, values / torch.where(left > 0, left, 1.0)[:, 1:, None]


def _sum_suffixes(terms: Tensor) -> Tensor:
    """Return sums over dimension 1 from each entry to the end, and a last entry of 0."""
    return torch.cat([terms.flip(1).cumsum(1).flip(1), torch.zeros_like(terms[:, :1])], 1)


def _find_stops(trace: _Trace, shape: Shape, norms: Tensor, sparse: int) -> tuple[Tensor, Tensor]:
    """Find where each threshold stops a segment, and what follows from it.

    norms: [H], a row's error is taken relative to its own norm or to this, if larger. sparse: rows from this one on are
    dense, without error and prefix. Returns the squared error without a tail, with one, and the visited pairs, float64
    [3, H, len(TAUS)]; and the largest squared error of a row over its squared norm, without and with a tail,
    [2, H, row tiles, len(TAUS)].
    """
    heads, steps, rows = trace.xx.shape
    device = trace.l.device
    tiles = -(-rows // shape.block_m)
    edges = torch.arange(tiles, device=device) * shape.block_m
    kept = (edges < sparse)[:, None]
    sizes = trace.dense.square().sum(-1).maximum(norms[:, None])
    if not steps:
        sums = torch.zeros(3, heads, len(TAUS), dtype=torch.float64, device=device)
        last = trace.last[:, : max(sparse, 0)]
        sums[:2] = last.double().sum(-1)[:, None]
        row_errors = last / sizes[:, : max(sparse, 0)]
        padded = F.pad(row_errors, (0, tiles * shape.block_m - last.shape[1]))
        tile_errors = padded.view(heads, tiles, -1).amax(-1)
        return sums, tile_errors[..., None].expand(2, heads, tiles, len(TAUS))
    steps_of_chunk = shape.stride // STEP
    chunks = -(-steps // steps_of_chunk)
    ends = (torch.arange(chunks + 1, device=device) * steps_of_chunk).clamp_max(steps)
    count = (rows - edges).clamp_max(shape.block_m)

    def split_by_tile(row_errors: Tensor) -> Tensor:  # [H, C, S] -> [H, tiles, C, block_m]
        padded = F.pad(row_errors, (0, tiles * shape.block_m - rows))
        return padded.view(heads, chunks, tiles, shape.block_m).transpose(1, 2)

    l = trace.l[:, ends]
    gain = split_by_tile(l.diff(dim=1) / l[:, :-1]).sum(-1) / count[:, None]
    chunks_left = (steps - ends[1:]) / ends.diff()
    rest = (gain * chunks_left)[..., :-1]  # after the last chunk there is nothing to skip
    lowest = rest.cummin(-1).values.flip(-1)
    # the chunk whose gain falls below tau is kept: it comes after those that do not
    taus = place_taus(device).expand(heads, tiles, -1).contiguous()
    stop = chunks - 1 - torch.searchsorted(lowest, taus)
    pairs = ends[1:][stop] * STEP * count[:, None]
    errors = (trace.xx[:, ends[1:] - 1], _add_tail(trace, ends))
    squared = [split_by_tile(error).sum(-1).gather(2, stop) for error in errors]
    worst = [split_by_tile(error / sizes[:, None]).amax(-1).gather(2, stop) for error in errors]
    squared_and_pairs = (torch.where(kept, tile_errors, 0).double().sum(1) for tile_errors in (*squared, pairs))
    return torch.stack([*squared_and_pairs]), torch.where(kept, torch.stack(worst), 0)


def _add_tail(trace: _Trace, ends: Tensor) -> Tensor:
    """Return the squared error of every row at every chunk's end with a tail, as reference.with_tail: [H, C, S]."""
    begin, end = ends[:-1], ends[1:]
    mass = trace.mass[:, end]
    chunk = trace.mass[:, begin] - mass
    most = (ends[-1] - end) / ends.diff()
    times = torch.where(chunk * most > mass, mass / chunk, most) * (mass > 0)
    l = trace.l[:, end]
    added = times[..., None] * (l - trace.l[:, begin])
    tail = added / (l + added)
    xx, xy, yy = (product[:, end - 1] for product in (trace.xx, trace.xy, trace.yy))
    head = 1 - tail
    return (head.square() * xx + 2 * head * tail * xy + tail.square() * yy).clamp_min_(0)
