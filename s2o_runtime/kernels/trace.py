"""Where every threshold of a grid would stop, and what the error would then be, from one visit of the prefix.

The plain kernel of `prefill.py` with the stop checks turned into measurements, for calibration: a row tile goes on
until the lowest threshold has stopped, at every check spacing of interest at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from s2o_runtime.kernels.call import Call
from s2o_runtime.kernels.launch import launch
from s2o_runtime.kernels.layout import LOG2E, window_start
from s2o_runtime.kernels.prefill import (
    MAX_REGISTERS,
    WIDE_ELEMENTS,
    WORKSPACE_BYTES,
    Ranker,
    _absorb,
    _behind,
    row_slices,
)
from s2o_runtime.kernels.rank import BUCKETS
from s2o_runtime.kernels.tail import EDGES

STRIDES = 4  # spacings of the stop checks that one pass follows, each twice the one before
QUANTITIES = 5


class Traced(NamedTuple):
    """What each row tile of a slice of the queries does at each spacing and threshold: float32 [STRIDES, Hq, tiles, T].

    squared, tail_squared: summed squared error of the tile's rows without and with the tail; visited: prefix keys
    computed; worst, tail_worst: the largest error of a row, relative to its norm.
    """

    rows: range
    squared: Tensor
    tail_squared: Tensor
    visited: Tensor
    worst: Tensor
    tail_worst: Tensor


@triton.jit(do_not_specialize=["q_len", "row_begin", "chunk", "segment", "segments", "count", "stride_oq", "stride_os"])
def _trace(
    Q, K, V, ORDER, FIRST, MASS, SUMS, TRUTH, FLOOR, TAUS, FOUND,
    qk_scale, q_len, row_begin, chunk, segment, segments, count,
    stride_qh, stride_ql, stride_kh, stride_kl, stride_vh, stride_vl, stride_th, stride_tl, stride_ih, stride_in,
    stride_oq, stride_os,
    GROUP: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    GRAIN: tl.constexpr, EDGES: tl.constexpr, BUCKETS: tl.constexpr, STRIDES: tl.constexpr, T: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    if WIDE:
        stride_kl = stride_kl.to(tl.int64)
        stride_vl = stride_vl.to(tl.int64)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    h = tl.program_id(1)
    row0 = row_begin + tile * BM
    n = row0 // segment
    first = window_start(n, segment, 0, 0, BN)
    offs_n = tl.arange(0, BN)
    offs_d = tl.arange(0, D)
    offs_row = tl.arange(0, BM)[:, None]
    rows = row0 + tl.arange(0, BM)
    real = rows < q_len
    head = h.to(tl.int64)
    head_row = row0.to(tl.int64)
    q = tl.load(
        Q + head * stride_qh + head_row * stride_ql + offs_row * stride_ql + offs_d[None, :],
        mask=real[:, None], other=0.0,
    )  # fmt: skip
    truth_tile = TRUTH + head * stride_th + head_row * stride_tl + offs_row * stride_tl + offs_d[None, :]
    k_base = K + (h // GROUP).to(tl.int64) * stride_kh
    v_base = V + (h // GROUP).to(tl.int64) * stride_vh

    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    diagonal = first + (row0 + 1 - first) // BN * BN
    k_tile = k_base + offs_n[None, :] * stride_kl + offs_d[:, None]
    v_tile = v_base + offs_n[:, None] * stride_vl + offs_d[None, :]
    for j in tl.range(first, diagonal, BN, num_stages=STAGES):
        m, l, acc = _absorb(
            q, tl.load(k_tile + j * stride_kl), tl.load(v_tile + j * stride_vl), m, l, acc, qk_scale, True, False
        )
    for j in tl.range(diagonal, tl.minimum(row0 + BM, q_len), BN, num_stages=1):
        keys = j + offs_n
        k = tl.load(k_tile + j * stride_kl, mask=keys[None, :] < q_len, other=0.0)
        v = tl.load(v_tile + j * stride_vl, mask=keys[:, None] < q_len, other=0.0)
        m, l, acc = _absorb(q, k, v, m, l, acc, qk_scale, keys[None, :] <= rows[:, None], True)

    t = tl.arange(0, T)
    taus = tl.load(TAUS + t)
    least = tl.load(TAUS)
    floor = tl.load(FLOOR + h)
    real_rows = tl.sum(real.to(tl.float32), 0)
    row = n - row_begin // segment
    order = ORDER + head * stride_ih + row.to(tl.int64) * stride_in
    at = (h * segments + row).to(tl.int64)
    e = tl.arange(0, EDGES)
    s = tl.arange(0, STRIDES)
    tiles = first // BN
    steps = tiles * (BN // GRAIN)
    # of the chunk that each spacing is in: where it began, and the softmax there
    begun = tl.zeros([STRIDES], tl.int32)
    m_before = tl.broadcast_to(m[:, None], [BM, STRIDES])
    l_before = tl.broadcast_to(l[:, None], [BM, STRIDES])
    lowest = tl.full([STRIDES], float("inf"), tl.float32)  # what the smallest gain so far is against a threshold
    done = 0
    chunks = 0
    running = tiles > 0
    while running:
        length = tl.minimum(chunk, tiles - done)
        for c in tl.range(0, length, num_stages=STAGES):
            index = tl.load(order + ((done + c) * BN + offs_n) // GRAIN) + offs_n % GRAIN
            k = tl.load(k_base + index[None, :] * stride_kl + offs_d[:, None])
            v = tl.load(v_base + index[:, None] * stride_vl + offs_d[None, :])
            m, l, acc = _absorb(q, k, v, m, l, acc, qk_scale, True, False)
        done += length
        chunks += 1
        ends = ((chunks & ((1 << s) - 1)) == 0) | (done == tiles)
        old = l_before * tl.exp2(m_before - m[:, None])
        brought = l[:, None] - old
        gain = tl.sum(tl.where(real[:, None], brought / tl.where(real[:, None], old, 1.0), 0.0), 0) / real_rows
        against = gain * (tiles - done).to(tl.float32) / (done - begun).to(tl.float32)
        against = tl.where(done == tiles, -1.0, against)  # everything has stopped at the end
        now = tl.where(ends, tl.minimum(lowest, against), lowest)
        stops = (taus[None, :] <= lowest[:, None]) & (taus[None, :] > now[:, None])
        if tl.max(tl.max(stops.to(tl.int32), 1), 0) > 0:
            truth = tl.load(truth_tile, mask=real[:, None], other=0.0).to(tl.float32)
            size = tl.maximum(tl.sum(truth * truth, 1), floor)
            out = acc / tl.where(real, l, 1.0)[:, None]
            off = tl.where(real[:, None], out - truth, 0.0)
            squared = tl.sum(off * off, 1)
            begins = tl.load(FIRST + at * BUCKETS + e * (BUCKETS // EDGES))
            masses = tl.load(MASS + at * EDGES + e)
            mass, edge, share = _behind(begins, masses, done * (BN // GRAIN), steps, EDGES)
            sums = SUMS + (at * EDGES + edge) * D + offs_d
            after = tl.load(sums + D, mask=(edge + 1 < EDGES) & (offs_d < D), other=0.0)
            mean = (after + share * (tl.load(sums) - after)) / tl.where(mass > 0, mass, 1.0)
            way = tl.where(real[:, None], mean[None, :] - out, 0.0)  # what the whole way to the tail's mean would add
            cross = tl.sum(off * way, 1)
            long = tl.sum(way * way, 1)
            left = (mass > 0) & (done < tiles)
            for i in tl.static_range(STRIDES):
                began = tl.sum(tl.where(s == i, begun, 0), 0)
                by = tl.sum(tl.where((s == i)[None, :], brought, 0.0), 1)
                before, _, _ = _behind(begins, masses, began * (BN // GRAIN), steps, EDGES)
                most = (tiles - done).to(tl.float32) / (done - began).to(tl.float32)
                factor = tl.where((before - mass) * most > mass, mass / (before - mass), most)
                added = tl.where(left, factor, 0.0) * by
                part = added / tl.where(real, l + added, 1.0)
                tailed = tl.maximum(squared + 2 * part * cross + part * part * long, 0.0)
                here = tl.max(tl.where((s == i)[:, None], stops.to(tl.int32), 0), 0) > 0
                to = FOUND + i * stride_os + (head * count + tile) * T + t
                tl.store(to, tl.sum(squared, 0) + tl.zeros([T], tl.float32), mask=here)
                tl.store(to + stride_oq, tl.sum(tailed, 0) + tl.zeros([T], tl.float32), mask=here)
                tl.store(to + 2 * stride_oq, (done * BN).to(tl.float32) + tl.zeros([T], tl.float32), mask=here)
                tl.store(to + 3 * stride_oq, tl.max(squared / size, 0) + tl.zeros([T], tl.float32), mask=here)
                tl.store(to + 4 * stride_oq, tl.max(tailed / size, 0) + tl.zeros([T], tl.float32), mask=here)
        lowest = now
        begun = tl.where(ends, done, begun)
        m_before = tl.where(ends[None, :], m[:, None], m_before)
        l_before = tl.where(ends[None, :], l[:, None], l_before)
        running = (done < tiles) & (tl.max(lowest, 0) >= least)


def trace(
    q: Tensor, k: Tensor, v: Tensor, truth: Tensor, floor: Tensor, taus: Tensor, call: Call
) -> Iterator[Traced]:  # fmt: skip
    """Follow every head of a call through its prefix, slice by slice of the queries.

    q [1, Hq, L, D]; k, v [1, Hkv, L, D]; truth [1, Hq, L, D], the dense output; floor: float32 [Hq], a row's norm
    counts at least so much; taus: float32 [T], ascending, above 0, of the rule "rest"; call: of heads alike, with a
    tail. Its tile says block_m, block_n and, with the chunk, the first of the spacings.
    """
    shape, tile, tables = call.shape, call.config.tile, call.tables
    size = triton.next_power_of_2(len(taus))
    grid = torch.full((size,), -1.0, dtype=torch.float32, device=q.device)
    grid[: len(taus)] = taus
    ranker = Ranker(q, k, v, call)
    for rows in row_slices(call, WORKSPACE_BYTES):
        ranked, tail = ranker.rank(rows)
        assert tail is not None
        first, mass, sums = tail
        tiles = -(-len(rows) // tile.block_m)
        out = q.new_zeros(QUANTITIES, STRIDES, shape.query_heads, tiles, size, dtype=torch.float32)
        launch(
            _trace,
            (tiles, shape.query_heads, 1),
            (q, k, v, ranked.order, first, mass, sums, truth, floor, grid, out),
            (
                call.scale * LOG2E, shape.q_len, rows.start, tile.chunk, tables.shortest, ranked.order.shape[2], tiles,
            ),
            (
                *q.stride()[1:3], *k.stride()[1:3], *v.stride()[1:3], *truth.stride()[1:3],
                *ranked.order.stride()[1:3],
            ),
            {
                "GROUP": shape.group, "D": shape.head_dim, "BM": tile.block_m, "BN": tile.block_n,
                "STAGES": tile.num_stages, "GRAIN": call.config.grain, "EDGES": EDGES, "BUCKETS": BUCKETS,
                "STRIDES": STRIDES, "T": size,
                "WIDE": shape.kv_len * max(k.stride(2), v.stride(2)) >= WIDE_ELEMENTS,
            },
            out.stride()[:2],
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            maxnreg=MAX_REGISTERS,
        )  # fmt: skip
        yield Traced(rows, *out[..., : len(taus)].unbind())
