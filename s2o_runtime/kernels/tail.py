"""The tail's tables: what the keys that a row tile skips would bring, by the weights that ranked them.

For every segment and for every second bucket of its order: the sum of the weights of all steps in this bucket and
behind it, and of weights times mean values (docs/how-it-works.md). Steps are read where they lie, none is gathered: it
is a matrix product of [segments x buckets, steps] with [steps, D]. Where segments are few, several programs share the
steps of one, and another kernel adds up what they found.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import config
from ..call import Call
from ..sequences import Starts
from .groups import Strides
from .launch import group_strides, launch
from .primitives import GRAIN, TAIL, find_window_start, head_pointer, load_cache_rows, load_sequence
from .rank.order import BUCKETS, Ranked

EDGES = 16  # of the order's buckets every second one
TAIL_SEGMENTS = 4, 8  # at once, of few and of many: more read the mean values less often, and are fewer programs
MANY_SEGMENTS = 64
# A program takes 0.4 us for 64 steps whatever else runs (H200), so the last of few programs are waited for.
TAIL_PROGRAMS = 512  # that many fill a GPU, and their sums of parts are 34 MB at most
TAIL_SPLITS = 8  # of the steps, at most
FEWEST_STEPS = 512  # of a split of the longest prefix
POOL_STEPS = 32
POOL_WARPS = 4
ADD_BLOCK = 1024
ADD_WARPS = 4


class Tail(NamedTuple):
    """Sums over each segment's order from every second bucket on: FIRST, MASS and SUMS of `groups.Ranking`."""

    first: Tensor
    mass: Tensor
    values: Tensor


@triton.jit(do_not_specialize=["kv_len", "steps", "page_shift", "page_rows", "stride_pb"])
def _pool(
    V, POOLED, KV_START, CU_K, PAGES, kv_len, steps, page_shift, page_rows, stride_v: Strides, stride_pb,
    D: tl.constexpr, ROWS: tl.constexpr, HAS_START: tl.constexpr, PACKED: tl.constexpr,
    PAGED: tl.constexpr,
):  # fmt: skip
    """Write to POOLED[b, h, g] the mean value of the GRAIN keys of step g, counted from the first key that counts.

    Programs: (steps / ROWS, Hkv, B). POOLED: T [B, Hkv, steps, D].
    """
    h = tl.program_id(1)
    b = tl.program_id(2)
    start = tl.load(KV_START + b).to(tl.int32) if HAS_START else 0
    k_first, _, kv_len, _ = load_sequence(b, CU_K, CU_K, kv_len, 0, PACKED)
    step = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offs_d = tl.arange(0, D)
    base = head_pointer(V, stride_v, b, h)
    total = tl.zeros([ROWS, D], tl.float32)
    for i in tl.static_range(GRAIN):
        t = start + step * GRAIN + i
        row = k_first + t
        if PAGED:
            row = load_cache_rows(tl.where(t < kv_len, t, 0), PAGES + b.to(tl.int64) * stride_pb, page_shift, page_rows)
        rows = base + row[:, None].to(tl.int64) * stride_v.row
        total += tl.load(rows + offs_d[None, :], mask=t[:, None] < kv_len, other=0.0).to(tl.float32)
    out = POOLED + ((b * tl.num_programs(1) + h).to(tl.int64) * steps + step[:, None]) * D
    tl.store(out + offs_d[None, :], (total / GRAIN).to(POOLED.dtype.element_ty), mask=step[:, None] < steps)


@triton.jit(
    do_not_specialize=["q_len", "offset", "lookback", "row_begin", "rows_end", "segments", "splits", "split_size"]
)
def _tail(
    SCORE, EDGE, VALUES, MASS, SUMS, STARTS: Starts, SEGMENT, FLAGS, q_len, offset, lookback, row_begin, rows_end,
    segments, splits, split_size, stride_s: Strides, stride_v: Strides,
    GROUP: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, EDGES: tl.constexpr, BUCKETS: tl.constexpr,
    BK: tl.constexpr, BN: tl.constexpr, IEEE: tl.constexpr, HAS_START: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Sum 2^SCORE over the steps from edge e on to MASS[b, h, n, e], and 2^SCORE * VALUES to SUMS[b, h, n, e].

    Programs: (splits of segments of the slice / BS, the last ones first; Hq; B), for heads with a tail. Each of a
    segment's `splits` programs adds up a part of the steps, and writes MASS and SUMS its number times split_size
    elements further on. Every second entry of EDGE is an edge. VALUES: T [B, Hkv, steps, D], strides v, the steps' mean
    values. BK: steps at once; IEEE: products in float32.
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
        of_segment = (b * tl.num_programs(1) + h).to(tl.int64) * segments + n
        e = tl.arange(0, EDGES)
        edge = EDGE + of_segment[:, None] * BUCKETS + e[None, :] * (BUCKETS // EDGES)
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
        row = tl.arange(0, BS * EDGES)
        at = ((b * tl.num_programs(1) + h).to(tl.int64) * segments + block * BS) * EDGES + row
        exists = (row_begin + (block * BS + row // EDGES) * segment < tl.minimum(rows_end, q_len)) & (
            block * BS + row // EDGES < segments
        )
        further = tl.multiple_of(split.to(tl.int64) * split_size, 16)  # there are 16 edges
        tl.store(MASS + further + at, tl.max(mass, 1), mask=exists)
        tl.store(SUMS + further + at[:, None] * D + offs_d[None, :], acc, mask=exists[:, None])


@triton.jit(do_not_specialize=["splits", "size"])
def _add(SPLITS, OUT, splits, size, BLOCK: tl.constexpr):
    """Write the sums of SPLITS, float32 [splits, size], over its first dimension to OUT. Programs: (size / BLOCK,)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        total += tl.load(SPLITS + split * size.to(tl.int64) + at, mask=at < size, other=0.0)
    tl.store(OUT + at, total, mask=at < size)


def pool_values(v: Tensor, call: Call) -> Tensor:
    """Average the values of each step: [B, Hkv, steps, D] from v [B, Hkv, Lk, D]."""
    shape = call.shape
    steps = -(-shape.kv_len // config.KEY_BLOCK)
    out = torch.empty(shape.batch, shape.kv_heads, steps, shape.head_dim, dtype=v.dtype, device=v.device)
    launch(
        _pool,
        (-(-steps // POOL_STEPS), shape.kv_heads, shape.batch),
        {
            "V": v, "POOLED": out, "KV_START": call.kv_start, "CU_K": call.cu_k, **call.paging, "kv_len": shape.kv_len,
            "steps": steps, **group_strides(v=v),
        },
        {
            "D": shape.head_dim, "ROWS": POOL_STEPS, "HAS_START": call.kv_start is not None, "PACKED": call.packed,
            "PAGED": call.pages is not None,
        },
        num_warps=POOL_WARPS,
    )  # fmt: skip
    return out


def sum_tails(ranked: Ranked, pooled: Tensor, call: Call, rows: range) -> Tail:
    """Sum the tails of all segments that begin in `rows`; pooled: [B, Hkv, steps, D], as `pool_values` gave it."""
    shape, tables, score = call.shape, call.tables, ranked.score
    assert ranked.first is not None
    assert ranked.edge is not None
    sums = math.prod(score.shape[:3]) * EDGES
    at_once = count_tail_segments(score.shape[2], shape.head_dim)
    blocks = -(-score.shape[2] // at_once)
    splits = count_tail_splits(blocks * shape.query_heads * shape.batch, score.shape[3])
    # of each split the sums, and behind them their masses
    parts = torch.empty(splits, sums * (shape.head_dim + 1), dtype=torch.float32, device=score.device)
    launch(
        _tail,
        (blocks * splits, shape.query_heads, shape.batch),
        {
            "SCORE": score, "EDGE": ranked.edge, "VALUES": pooled, "MASS": parts[0, sums * shape.head_dim :],
            "SUMS": parts, "STARTS": call.starts,
            "SEGMENT": tables.segment, "FLAGS": tables.flags, "q_len": shape.q_len, "offset": shape.offset,
            "lookback": call.config.lookback,
            "row_begin": rows.start, "rows_end": rows.stop, "segments": score.shape[2],
            "splits": splits, "split_size": parts.shape[1],
            **group_strides(s=score, v=pooled),
        },
        {
            "GROUP": shape.group, "D": shape.head_dim, "BS": at_once, "EDGES": EDGES, "BUCKETS": BUCKETS,
            "BK": count_tail_steps(at_once, shape.head_dim), "BN": call.config.tile.block_n,
            "IEEE": pooled.dtype != torch.bfloat16, "HAS_START": call.kv_start is not None, "PACKED": call.packed,
        },
        num_warps=at_once,
    )  # fmt: skip
    sums_and_masses = parts[0]
    if splits > 1:
        sums_and_masses = torch.empty_like(sums_and_masses)
        launch(
            _add,
            (-(-len(sums_and_masses) // ADD_BLOCK), 1, 1),
            {"SPLITS": parts, "OUT": sums_and_masses, "splits": splits, "size": len(sums_and_masses)},
            {"BLOCK": ADD_BLOCK},
            num_warps=ADD_WARPS,
        )
    values, mass = sums_and_masses[: sums * shape.head_dim], sums_and_masses[sums * shape.head_dim :]
    return Tail(ranked.first, mass.view(*score.shape[:3], EDGES), values.view(*score.shape[:3], EDGES, shape.head_dim))


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
    """Count the bytes of workspace of one segment's sums and edges."""
    return EDGES * (head_dim + 1) * 4 + 2 * BUCKETS * 4
