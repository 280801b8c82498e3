"""What the keys would bring that a row tile skips, from the weights that ranked them (docs/method.md).

For every segment and for every second bucket of its order: the sum of the weights of all steps in this bucket and
behind it, and of weights times mean values. All steps are read in their places, none gathered: a matrix product of
[segments x buckets, steps] with [steps, D].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from s2o_runtime.kernels.call import TAIL, Call
from s2o_runtime.kernels.launch import launch
from s2o_runtime.kernels.layout import sequence, window_start
from s2o_runtime.kernels.rank import BUCKETS, Ranked

EDGES = 16  # of the order's buckets every second one
TAIL_SEGMENTS = 4
TAIL_STEPS = 64
TAIL_WARPS = 4
POOL_STEPS = 32
POOL_WARPS = 4


class Tail(NamedTuple):
    """Sums over each segment's order from every second bucket on; what an `order` without tail gives is never read.

    first: int32 [B, Hq, N', BUCKETS], where the buckets begin; mass: float32 [B, Hq, N', EDGES];
    values: float32 [B, Hq, N', EDGES, D].
    """

    first: Tensor
    mass: Tensor
    values: Tensor


@triton.jit(do_not_specialize=["kv_len", "steps"])
def _pool(
    V, POOLED, KV_START, CU_K, kv_len, steps, stride_vb, stride_vh, stride_vl,
    D: tl.constexpr, GRAIN: tl.constexpr, ROWS: tl.constexpr, HAS_START: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """POOLED[b, h, g] = the mean value of the GRAIN keys of step g, which starts at kv_start; contiguous."""
    h = tl.program_id(1)
    b = tl.program_id(2)
    start = tl.load(KV_START + b).to(tl.int32) if HAS_START else 0
    k_first = 0
    if PACKED:
        k_first = tl.load(CU_K + b).to(tl.int32)
        kv_len = tl.load(CU_K + b + 1).to(tl.int32) - k_first
    step = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offs_d = tl.arange(0, D)
    base = V + b.to(tl.int64) * stride_vb + h.to(tl.int64) * stride_vh
    total = tl.zeros([ROWS, D], tl.float32)
    for i in tl.static_range(GRAIN):
        t = start + step * GRAIN + i
        rows = base + (k_first + t)[:, None].to(tl.int64) * stride_vl
        total += tl.load(rows + offs_d[None, :], mask=t[:, None] < kv_len, other=0.0).to(tl.float32)
    out = POOLED + ((b * tl.num_programs(1) + h).to(tl.int64) * steps + step[:, None]) * D
    tl.store(out + offs_d[None, :], (total / GRAIN).to(POOLED.dtype.element_ty), mask=step[:, None] < steps)


@triton.jit(do_not_specialize=["q_len", "offset", "row_begin", "rows_end", "segments"])
def _tail(
    SCORE, EDGE, VALUES, MASS, SUMS, KV_START, CU_Q, CU_K, SEGMENT, RULE, q_len, offset, row_begin, rows_end, segments,
    stride_sb, stride_sh, stride_sn, stride_vb, stride_vh, stride_vl,
    GROUP: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, EDGES: tl.constexpr, BUCKETS: tl.constexpr,
    BK: tl.constexpr, BN: tl.constexpr, GRAIN: tl.constexpr, TAIL: tl.constexpr, IEEE: tl.constexpr,
    HAS_START: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """MASS[b, h, n, e] and SUMS[b, h, n, e]: weights, and weights times values, of the steps from edge e on.

    VALUES: [B, Hkv, steps, D], one row a step.
    """
    # long prefixes first
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2)
    segment = tl.load(SEGMENT + h)
    start = tl.load(KV_START + b).to(tl.int32) if HAS_START else 0
    _, k_first, q_len, offset = sequence(b, CU_Q, CU_K, q_len, offset, PACKED)
    n = block * BS + tl.arange(0, BS)
    inside = (row_begin + n * segment < tl.minimum(rows_end, q_len)) & (n < segments)
    if (segment > 0) & (tl.load(RULE + h) >= TAIL) & (tl.max(inside.to(tl.int32), 0) > 0):
        first = window_start(row_begin // segment + n, segment, offset, start, BN)
        steps = tl.where(inside, (first - start) // GRAIN, 0)
        of_segment = (b * tl.num_programs(1) + h).to(tl.int64) * segments + n
        e = tl.arange(0, EDGES)
        edge = EDGE + of_segment[:, None] * BUCKETS + e[None, :] * (BUCKETS // EDGES)
        highest = tl.load(edge, mask=inside[:, None], other=0.0)
        score = SCORE + b.to(tl.int64) * stride_sb + h.to(tl.int64) * stride_sh + n[:, None].to(tl.int64) * stride_sn
        value = VALUES + b.to(tl.int64) * stride_vb + (h // GROUP).to(tl.int64) * stride_vh
        if GRAIN == 1:  # not pooled: rows are keys
            value += (k_first + start).to(tl.int64) * stride_vl if PACKED or HAS_START else 0
        offs_d = tl.arange(0, D)
        acc = tl.zeros([BS * EDGES, D], tl.float32)
        mass = tl.zeros([BS * EDGES, 16], tl.float32)  # a product with ones: every column is the sum
        last = tl.max(steps, 0)
        for t in range(0, last, BK):
            step = t + tl.arange(0, BK)
            s = tl.load(score + step[None, :], mask=step[None, :] < steps[:, None], other=float("-inf")).to(tl.float32)
            v = tl.load(
                value + step[:, None].to(tl.int64) * stride_vl + offs_d[None, :], mask=step[:, None] < last, other=0.0
            )
            w = tl.where(s[:, None, :] <= highest[:, :, None], tl.exp2(s)[:, None, :], 0.0)
            w = tl.reshape(w, [BS * EDGES, BK])
            if IEEE:  # float16 cannot hold the weights
                acc = tl.dot(w, v.to(tl.float32), acc, input_precision="ieee")
                mass = tl.dot(w, tl.full([BK, 16], 1.0, tl.float32), mass, input_precision="ieee")
            else:
                acc = tl.dot(w.to(v.dtype), v, acc)
                mass = tl.dot(w.to(v.dtype), tl.full([BK, 16], 1.0, v.dtype), mass)
        row = tl.arange(0, BS * EDGES)
        at = ((b * tl.num_programs(1) + h).to(tl.int64) * segments + block * BS) * EDGES + row
        there = (row_begin + (block * BS + row // EDGES) * segment < tl.minimum(rows_end, q_len)) & (
            block * BS + row // EDGES < segments
        )
        tl.store(MASS + at, tl.max(mass, 1), mask=there)
        tl.store(SUMS + at[:, None] * D + offs_d[None, :], acc, mask=there[:, None])


def pooled_values(v: Tensor, call: Call) -> Tensor:
    """The mean values of the steps, [B, Hkv, steps, D]; v itself where a step is a key. v: [B, Hkv, Lk, D]."""
    shape, grain = call.shape, call.config.grain
    if grain == 1:
        return v
    steps = -(-shape.kv_len // grain)
    out = torch.empty(shape.batch, shape.kv_heads, steps, shape.head_dim, dtype=v.dtype, device=v.device)
    launch(
        _pool,
        (-(-steps // POOL_STEPS), shape.kv_heads, shape.batch),
        (v, out, call.starts[0], call.starts[2]),
        (shape.kv_len, steps),
        v.stride()[:3],
        {
            "D": shape.head_dim, "GRAIN": grain, "ROWS": POOL_STEPS, "HAS_START": call.padded, "PACKED": call.packed,
        },
        num_warps=POOL_WARPS,
    )  # fmt: skip
    return out


def tail_sums(ranked: Ranked, pooled: Tensor, call: Call, rows: range) -> Tail:
    """The sums for all segments that begin in `rows`; pooled: [B, Hkv, steps, D] as `pooled_values` gave it."""
    shape, tables, score = call.shape, call.tables, ranked.score
    assert ranked.first is not None
    assert ranked.edge is not None
    mass = torch.empty(*score.shape[:3], EDGES, dtype=torch.float32, device=score.device)
    values = torch.empty(*score.shape[:3], EDGES, shape.head_dim, dtype=torch.float32, device=score.device)
    launch(
        _tail,
        (-(-score.shape[2] // TAIL_SEGMENTS), shape.query_heads, shape.batch),
        (score, ranked.edge, pooled, mass, values, *call.starts, tables.segment, tables.rule),
        (shape.q_len, shape.offset, rows.start, rows.stop, score.shape[2]),
        (*score.stride()[:3], *pooled.stride()[:3]),
        {
            "GROUP": shape.group, "D": shape.head_dim, "BS": TAIL_SEGMENTS, "EDGES": EDGES, "BUCKETS": BUCKETS,
            "BK": tail_steps(shape.head_dim), "BN": call.config.tile.block_n, "GRAIN": call.config.grain, "TAIL": TAIL,
            "IEEE": pooled.dtype != torch.bfloat16, "HAS_START": call.padded, "PACKED": call.packed,
        },
        num_warps=TAIL_WARPS,
    )  # fmt: skip
    return Tail(ranked.first, mass, values)


def tail_steps(head_dim: int) -> int:
    """Steps that the kernel `_tail` adds at once."""
    return TAIL_STEPS if head_dim <= 128 else TAIL_STEPS // 2


def tail_bytes(head_dim: int) -> int:
    """Workspace of one segment's sums and edges."""
    return EDGES * (head_dim + 1) * 4 + 2 * BUCKETS * 4
