"""The tail's tables: what the keys that a row tile skips would bring, by the weights that ranked them.

For every segment and for every second bucket of its order: the sum of the weights of all steps in this bucket and
behind it, and of weights times mean values (docs/how-it-works.md). Steps are read where they lie, none is gathered: it
is a matrix product of [segments x buckets, steps] with [steps, D]. Where segments are few, several programs share the
steps of one, and the last of them to end adds up what all found.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...call import Call
from ...sequences import Starts
from ..groups import Ranking, Strides
from ..launch import group_strides, launch
from ..primitives import GRAIN, TAIL, find_window_start, head_pointer, load_sequence
from .order import BUCKETS, Ordered

EDGES = 16  # of the order's buckets every second one
TAIL_SEGMENTS = 4, 8  # at once, of few and of many: more read the mean values less often, and are fewer programs
MANY_SEGMENTS = 64
# A program takes 0.4 us for 64 steps whatever else runs (H200), so the last of few programs are waited for.
TAIL_PROGRAMS = 512  # that many fill a GPU, and their sums of parts are 34 MB at most
TAIL_SPLITS = 8  # of the steps, at most
FEWEST_STEPS = 512  # of a split of the longest prefix


@triton.jit(
    do_not_specialize=["q_len", "offset", "lookback", "row_begin", "rows_end", "segments", "splits", "split_size"]
)
def _tail(
    SCORE, EDGE, VALUES, MASS, SUMS, ARRIVED, STARTS: Starts, SEGMENT, FLAGS, q_len, offset, lookback, row_begin,
    rows_end, segments, splits, split_size, stride_s: Strides, stride_v: Strides,
    GROUP: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, EDGES: tl.constexpr, BUCKETS: tl.constexpr,
    BK: tl.constexpr, BN: tl.constexpr, IEEE: tl.constexpr, HAS_START: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Sum 2^SCORE over the steps from edge e on to MASS[b, h, n, e], and 2^SCORE * VALUES to SUMS[b, h, n, e].

    Programs: (splits of segments of the slice / BS, the last ones first; Hq; B), for heads with a tail. Each of a
    segment's `splits` programs adds up a part of the steps, and writes MASS and SUMS its number times split_size
    elements further on. They count themselves in the first of their segments' ARRIVED; the last adds up the parts, in
    the order of the splits. Every second entry of EDGE is an edge. BK: steps at once; IEEE: products in float32.
    """
    # long prefixes first
    block = (tl.num_programs(0) - 1 - tl.program_id(0)) // splits
    split = tl.program_id(0) % splits
    h = tl.program_id(1)
    b = tl.program_id(2)
    segment = tl.load(SEGMENT + h)
    start = tl.load(STARTS.kv_start + b).to(tl.int32) if HAS_START else 0
    _, _, q_len, offset = load_sequence(b, STARTS.cu_q, STARTS.cu_k, q_len, offset, PACKED)
    n = block * BS + tl.arange(0, BS)
    inside = (row_begin + n * segment < tl.minimum(rows_end, q_len)) & (n < segments)
    if (segment > 0) & ((tl.load(FLAGS + h) & TAIL) != 0) & (tl.max(inside.to(tl.int32), 0) > 0):
        first = find_window_start(row_begin // segment + n, segment, offset, lookback, start, BN)
        steps = tl.where(inside, (first - start) // GRAIN, 0)
        at = (b * tl.num_programs(1) + h).to(tl.int64) * segments + block * BS
        row = tl.arange(0, BS)
        edge = EDGE + (at + row)[:, None] * BUCKETS + tl.arange(0, EDGES)[None, :] * (BUCKETS // EDGES)
        highest = tl.load(edge, mask=(steps > 0)[:, None], other=0.0)  # nothing is ranked without steps
        score = head_pointer(SCORE, stride_s, b, h) + n[:, None].to(tl.int64) * stride_s.row
        value = head_pointer(VALUES, stride_v, b, h // GROUP)
        offs_d = tl.arange(0, D)
        acc = tl.zeros([BS * EDGES, D], tl.float32)
        mass = tl.zeros([BS * EDGES, 16], tl.float32)  # a product with ones: every column is the sum
        last = tl.max(steps, 0)
        size = tl.cdiv(tl.cdiv(last, BK), splits) * BK
        last = tl.minimum(last, (split + 1) * size)
        for t in range(split * size, last, BK):
            step = t + tl.arange(0, BK)
            s = tl.load(score + step[None, :], mask=step[None, :] < steps[:, None], other=float("-inf")).to(tl.float32)
            v = tl.load(
                value + step[:, None].to(tl.int64) * stride_v.row + offs_d[None, :],
                mask=step[:, None] < last,
                other=0.0,
            )
            w = tl.where(s[:, None, :] <= highest[:, :, None], tl.exp2(s)[:, None, :], 0.0)
            w = tl.reshape(w, [BS * EDGES, BK])
            if IEEE:  # float16 cannot hold the weights
                acc = tl.dot(w, v.to(tl.float32), acc, input_precision="ieee")
                mass = tl.dot(w, tl.full([BK, 16], 1.0, tl.float32), mass, input_precision="ieee")
            else:
                acc = tl.dot(w.to(v.dtype), v, acc)
                mass = tl.dot(w.to(v.dtype), tl.full([BK, 16], 1.0, v.dtype), mass)
        total = tl.max(mass, 1)
        entry = tl.arange(0, BS * EDGES)
        exists = tl.broadcast_to(inside[:, None], [BS, EDGES])
        exists = tl.reshape(exists, [BS * EDGES])
        to_mass = MASS + at * EDGES + entry
        to_sums = SUMS + at * (EDGES * D) + (entry[:, None] * D + offs_d[None, :])
        further = tl.multiple_of(split.to(tl.int64) * split_size, 16)  # there are 16 edges
        tl.store(to_mass + further, total, mask=exists)
        tl.store(to_sums + further, acc, mask=exists[:, None])
        if splits > 1:
            tl.debug_barrier()  # all threads have written before one of them says so
            if tl.atomic_add(ARRIVED + at, 1, sem="acq_rel") == splits - 1:
                total = tl.zeros([BS * EDGES], tl.float32)
                acc = tl.zeros([BS * EDGES, D], tl.float32)
                for other in range(splits):
                    further = tl.multiple_of(other * split_size.to(tl.int64), 16)
                    # from L2, where other SMs' writes are
                    total += tl.load(to_mass + further, mask=exists, other=0.0, cache_modifier=".cg")
                    acc += tl.load(to_sums + further, mask=exists[:, None], other=0.0, cache_modifier=".cg")
                tl.store(to_mass, total, mask=exists)
                tl.store(to_sums, acc, mask=exists[:, None])


def sum_tails(ordered: Ordered, scores: Tensor, values: Tensor, call: Call, rows: range) -> Ranking:
    """Sum the tails of all segments that begin in `rows`; scores, values: SCORE of these rows, and VALUES."""
    shape, tables = call.shape, call.tables
    size = *scores.shape[:3], EDGES
    count = math.prod(size)
    at_once = count_tail_segments(size[2], shape.head_dim)
    blocks = -(-size[2] // at_once)
    splits = count_tail_splits(blocks * shape.query_heads * shape.batch, scores.shape[3])
    # of each split the sums, and behind them their masses; those of the first become those of all
    parts = scores.new_empty(splits, count * (shape.head_dim + 1), dtype=torch.float32)
    sums, mass = parts[0].split([count * shape.head_dim, count])
    launch(
        _tail,
        (blocks * splits, shape.query_heads, shape.batch),
        {
            "SCORE": scores, "EDGE": ordered.edge, "VALUES": values, "MASS": mass, "SUMS": sums,
            "ARRIVED": ordered.arrived, "STARTS": call.starts, "SEGMENT": tables.segment, "FLAGS": tables.flags,
            "q_len": shape.q_len, "offset": shape.offset, "lookback": call.config.lookback,
            "row_begin": rows.start, "rows_end": rows.stop, "segments": size[2], "splits": splits,
            "split_size": parts.shape[1], **group_strides(s=scores, v=values),
        },
        {
            "GROUP": shape.group, "D": shape.head_dim, "BS": at_once, "EDGES": EDGES, "BUCKETS": BUCKETS,
            "BK": count_tail_steps(at_once, shape.head_dim), "BN": call.config.tile.block_n,
            "IEEE": values.dtype != torch.bfloat16, "HAS_START": call.kv_start is not None, "PACKED": call.packed,
        },
        num_warps=at_once,
    )  # fmt: skip
    return Ranking(ordered.order, ordered.first, mass.view(size), sums.view(*size, shape.head_dim))


def count_tail_splits(programs: int, steps: int) -> int:
    """Count the programs that the steps of the longest prefix are split among, given how many there are without."""
    return max(1, min(TAIL_PROGRAMS // programs, steps // FEWEST_STEPS, TAIL_SPLITS))


def count_tail_segments(segments: int, head_dim: int) -> int:
    """Count the segments, of so many, that a program of `_tail` adds up at once."""
    few, many = TAIL_SEGMENTS
    return many if segments >= MANY_SEGMENTS and head_dim <= 128 else few


def count_tail_steps(at_once: int, head_dim: int) -> int:
    """Count the steps that a program of `_tail` adds at once, of so many segments."""
    return 16 * at_once if head_dim <= 128 else 8 * at_once


def count_tail_bytes(head_dim: int) -> int:
    """Count the bytes of workspace of one segment's sums, edges and count of arrivals."""
    return EDGES * (head_dim + 1) * 4 + 2 * BUCKETS * 4 + 4
