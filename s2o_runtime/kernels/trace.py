"""The stops of every threshold of a grid, and the errors that they would leave, from one visit of the prefix.

The plain kernel of `prefill.py` with the stop checks turned into measurements, for calibration: a row tile goes on
until the lowest threshold has stopped, at every check spacing of interest at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import Call
from .groups import Ranking, Sizes, Strides
from .launch import group_strides, launch, list_strides
from .prefill import WORKSPACE_BYTES, Ranker, slice_rows
from .primitives import (
    GRAIN,
    LOG2E,
    MAX_REGISTERS,
    WIDE_ELEMENTS,
    attend_gathered,
    attend_window,
    find_diagonal_start,
    find_window_start,
    scale_tail,
    start_softmax,
    sum_remaining_mass,
    weigh_tail,
)
from .rank.order import BUCKETS
from .rank.tail import EDGES

STRIDES = 4  # spacings of the stop checks that one pass follows, each twice the one before
QUANTITIES = 5  # fields of Traced that the kernel writes


class Traced(NamedTuple):
    """The record of each row tile of a slice at each spacing and threshold: float32 [STRIDES, Hq, tiles, T]."""

    rows: range  # the slice
    squared: Tensor  # summed squared error of the tile's rows
    tail_squared: Tensor  # the same with the tail
    visited: Tensor  # prefix keys computed
    worst: Tensor  # the largest squared error of a row over its squared norm
    tail_worst: Tensor


@triton.jit(
    do_not_specialize=[
        "q_len",
        "row_begin",
        "chunk",
        "segment",
        "segments",
        "count",
        "stride_oq",
        "stride_os",
        "lookback",
    ]
)
def _trace(
    Q, K, V, RANKING: Ranking, TRUTH, FLOOR, TAUS, SINKS, TRACED,
    qk_scale, q_len, row_begin, chunk, segment, segments, count,
    stride_q: Strides, stride_k: Strides, stride_v: Strides, stride_t: Strides, stride_ih, stride_in,
    stride_oq, stride_os, lookback,
    SIZES: tl.constexpr, STRIDES: tl.constexpr, T: tl.constexpr,
    HAS_SINKS: tl.constexpr, CAP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Measure `prefill._prefill` on a row tile at every threshold of TAUS and every spacing of the stop check.

    Spacing s checks every chunk * 2^s tiles. The tile's online softmax is that of `_prefill`; where the rest's gain
    first falls below thresholds, TRACED gets what the output would then be off from TRUTH. With o the output so far, o'
    the tail's mean value, d = o - TRUTH and p = tail / (l + tail), the error with a tail is
    |d + p (o' - o)|^2 = |d|^2 + 2 p d . (o' - o) + p^2 |o' - o|^2.

    Programs: (row tiles of the slice, the last ones first; Hq), for one sequence without padding whose heads are alike;
    rows are reduced by their mean and the stop rule is StopRule.REST. `groups` has the pointers of `_prefill`, here of
    one batch entry.

        TRUTH                     as Q, strides t: the dense output
        FLOOR                     float32 [Hq]: a row's squared norm counts at least so much
        TAUS                      float32 [T]: thresholds, ascending; fillers at the end are -1
        TRACED                    float32 [QUANTITIES, STRIDES, Hq, row tiles, T], strides oq and os: fields of `Traced`

    chunk: tiles of BN keys between two checks of the first spacing; segment: queries that share a ranking; segments:
    N'; count: row tiles; lookback: as in `config.LayerConfig`; T: thresholds, a power of two.
    """
    GROUP: tl.constexpr = SIZES.GROUP
    D: tl.constexpr = SIZES.D
    BM: tl.constexpr = SIZES.BM
    BN: tl.constexpr = SIZES.BN
    STAGES: tl.constexpr = SIZES.STAGES
    EDGES: tl.constexpr = SIZES.EDGES
    stride_kl = stride_k.row
    stride_vl = stride_v.row
    if WIDE:
        stride_kl = stride_kl.to(tl.int64)
        stride_vl = stride_vl.to(tl.int64)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    h = tl.program_id(1)
    row0 = row_begin + tile * BM
    n = row0 // segment
    first = find_window_start(n, segment, 0, lookback, 0, BN)
    offs_d = tl.arange(0, D)
    offs_row = tl.arange(0, BM)[:, None]
    rows = row0 + tl.arange(0, BM)
    real = rows < q_len
    head = h.to(tl.int64)
    head_row = row0.to(tl.int64)
    q = tl.load(
        Q + head * stride_q.head + head_row * stride_q.row + offs_row * stride_q.row + offs_d[None, :],
        mask=real[:, None], other=0.0,
    )  # fmt: skip
    truth_row = TRUTH + head * stride_t.head + head_row * stride_t.row
    truth_tile = truth_row + offs_row * stride_t.row + offs_d[None, :]
    k_base = K + (h // GROUP).to(tl.int64) * stride_k.head
    v_base = V + (h // GROUP).to(tl.int64) * stride_v.head

    m, l = start_softmax(SINKS, h, BM, HAS_SINKS)
    acc = tl.zeros([BM, D], tl.float32)
    m, l, acc = attend_window(
        q, k_base, v_base, stride_kl, stride_vl, m, l, acc, qk_scale, first, find_diagonal_start(first, row0, BN),
        tl.minimum(row0 + BM, q_len), q_len, rows, BN, STAGES, CAP,
    )  # fmt: skip

    t = tl.arange(0, T)
    taus = tl.load(TAUS + t)
    least = tl.load(TAUS)
    floor = tl.load(FLOOR + h)
    real_rows = tl.sum(real.to(tl.float32), 0)
    of_slice = n - row_begin // segment  # the segment's number in the slice
    order = RANKING.order + head * stride_ih + of_slice.to(tl.int64) * stride_in
    at = (h * segments + of_slice).to(tl.int64)
    e = tl.arange(0, EDGES)
    s = tl.arange(0, STRIDES)
    tiles = first // BN
    steps = tiles * (BN // GRAIN)
    # of the chunk that each spacing is in: where it begins, and the softmax there
    chunk_begin = tl.zeros([STRIDES], tl.int32)
    m_before = tl.broadcast_to(m[:, None], [BM, STRIDES])
    l_before = tl.broadcast_to(l[:, None], [BM, STRIDES])
    lowest = tl.full([STRIDES], float("inf"), tl.float32)  # the smallest gain of the rest so far
    done = 0
    chunks = 0
    running = tiles > 0
    while running:
        length = tl.minimum(chunk, tiles - done)
        m, l, acc = attend_gathered(
            q, k_base, v_base, order, stride_kl, stride_vl, m, l, acc, qk_scale, done, length, BN, STAGES, CAP
        )
        done += length
        chunks += 1
        ends = ((chunks & ((1 << s) - 1)) == 0) | (done == tiles)
        old = l_before * tl.exp2(m_before - m[:, None])
        added = l[:, None] - old
        gain = tl.sum(tl.where(real[:, None], added / tl.where(real[:, None], old, 1.0), 0.0), 0) / real_rows
        rest_gain = gain * (tiles - done).to(tl.float32) / (done - chunk_begin).to(tl.float32)
        rest_gain = tl.where(done == tiles, -1.0, rest_gain)  # everything has stopped at the end
        now = tl.where(ends, tl.minimum(lowest, rest_gain), lowest)
        stops = (taus[None, :] <= lowest[:, None]) & (taus[None, :] > now[:, None])
        if tl.max(tl.max(stops.to(tl.int32), 1), 0) > 0:
            truth = tl.load(truth_tile, mask=real[:, None], other=0.0).to(tl.float32)
            norm = tl.maximum(tl.sum(truth * truth, 1), floor)
            out = acc / tl.where(real, l, 1.0)[:, None]
            off = tl.where(real[:, None], out - truth, 0.0)
            squared = tl.sum(off * off, 1)
            begins = tl.load(RANKING.first + at * SIZES.BUCKETS + e * (SIZES.BUCKETS // EDGES))
            masses = tl.load(RANKING.mass + at * EDGES + e)
            mass, edge, share = sum_remaining_mass(begins, masses, done * (BN // GRAIN), steps, EDGES)
            mean = weigh_tail(RANKING.sums + at * EDGES * D, edge, share, mass, D, EDGES)
            to_mean = tl.where(real[:, None], mean[None, :] - out, 0.0)
            cross = tl.sum(off * to_mean, 1)
            to_mean_squared = tl.sum(to_mean * to_mean, 1)
            for i in tl.static_range(STRIDES):
                begin = tl.sum(tl.where(s == i, chunk_begin, 0), 0)
                of_chunk = tl.sum(tl.where((s == i)[None, :], added, 0.0), 1)
                before, _, _ = sum_remaining_mass(begins, masses, begin * (BN // GRAIN), steps, EDGES)
                most = (tiles - done).to(tl.float32) / (done - begin).to(tl.float32)
                tail = tl.where(done < tiles, scale_tail(before, mass, most), 0.0) * of_chunk
                part = tail / tl.where(real, l + tail, 1.0)
                tailed = squared + 2 * part * cross + part * part * to_mean_squared
                tailed = tl.maximum(tailed, 0.0, propagate_nan=tl.PropagateNan.ALL)
                stopped = tl.max(tl.where((s == i)[:, None], stops.to(tl.int32), 0), 0) > 0
                to = TRACED + i * stride_os + (head * count + tile) * T + t
                every = tl.zeros([T], tl.float32)
                tl.store(to, tl.sum(squared, 0) + every, mask=stopped)
                tl.store(to + stride_oq, tl.sum(tailed, 0) + every, mask=stopped)
                tl.store(to + 2 * stride_oq, (done * BN).to(tl.float32) + every, mask=stopped)
                tl.store(to + 3 * stride_oq, tl.max(squared / norm, 0) + every, mask=stopped)
                tl.store(to + 4 * stride_oq, tl.max(tailed / norm, 0) + every, mask=stopped)
        lowest = now
        chunk_begin = tl.where(ends, done, chunk_begin)
        m_before = tl.where(ends[None, :], m[:, None], m_before)
        l_before = tl.where(ends[None, :], l[:, None], l_before)
        running = (done < tiles) & (tl.max(lowest, 0) >= least)


def trace(
    call: Call, truth: Tensor, floor: Tensor, taus: Tensor, slices: Sequence[range] | None = None
) -> Iterator[Traced]:
    """Follow every head of a call through its prefix, slice by slice of the queries.

    Args:
        call: one sequence in bfloat16 or float16 whose heads are alike, with a tail; the last dimension of every tensor
            is contiguous. Its tile says block_m, block_n and, with the chunk, the first of the spacings.
        truth: [1, Hq, L, D], the dense output.
        floor: float32 [Hq]; a row's squared norm counts at least so much.
        taus: float32 [T], ascending, above 0, of `StopRule.REST`.
        slices: the rows that are followed, each beginning with a segment; by default all, as memory allows.
    """
    q, k, v = call.q, call.k, call.v
    shape, tile, tables = call.shape, call.config.tile, call.tables
    size = triton.next_power_of_2(len(taus))
    grid = torch.full((size,), -1.0, dtype=torch.float32, device=q.device)
    grid[: len(taus)] = taus
    ranker = Ranker(call)
    for rows in slice_rows(call, WORKSPACE_BYTES) if slices is None else slices:
        ranking = ranker.rank(rows)
        tiles = -(-len(rows) // tile.block_m)
        out = q.new_zeros(QUANTITIES, STRIDES, shape.query_heads, tiles, size, dtype=torch.float32)
        launch(
            _trace,
            (tiles, shape.query_heads, 1),
            {
                "Q": q, "K": k, "V": v, "RANKING": ranking, "TRUTH": truth,
                "FLOOR": floor, "TAUS": grid, "SINKS": call.scoring.sinks, "TRACED": out,
                "qk_scale": call.scale * LOG2E, "q_len": shape.q_len, "row_begin": rows.start, "chunk": tile.chunk,
                "segment": tables.shortest_segment, "segments": ranking.order.shape[2], "count": tiles,
                "lookback": call.config.lookback,
                **group_strides(q=q, k=k, v=v, t=truth), **list_strides("hn", i=ranking.order[0]),
                **list_strides("qs", o=out),
            },
            {
                "SIZES": Sizes(
                    GROUP=shape.group, D=shape.head_dim, BM=tile.block_m, BN=tile.block_n, STAGES=tile.num_stages,
                    EDGES=EDGES, BUCKETS=BUCKETS,
                ),
                "STRIDES": STRIDES, "T": size, "HAS_SINKS": call.scoring.sinks is not None, "CAP": call.cap,
                "WIDE": shape.kv_len * max(k.stride(2), v.stride(2)) >= WIDE_ELEMENTS,
            },
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            maxnreg=MAX_REGISTERS,
        )  # fmt: skip
        yield Traced(rows, *out[..., : len(taus)].unbind())
