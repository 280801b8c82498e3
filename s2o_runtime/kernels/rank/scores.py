"""Scores: what every step of a prefix weighs for each segment (Algorithm 1, lines 8 to 17).

A key weighs what it weighs in the softmax of the representative where it weighs most; a step of GRAIN adjacent keys
weighs the sum of theirs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import config
from ...call import Call
from ...sequences import Starts
from ..groups import Strides
from ..launch import group_strides, launch
from ..primitives import (
    GRAIN,
    MAX_REGISTERS,
    cap_scores,
    find_window_start,
    head_pointer,
    load_cache_rows,
    load_sequence,
)
from .means import Means

SCORE_STAGES = 2
SCORE_WARPS = 4
SCORE_KEYS = 1024  # of a program: eight turns of its loop, and few enough that short calls keep all SMs busy
ROW_ALIGNMENT = 16
FEWEST = tl.constexpr(16)  # columns of a product with keys, which tensor cores need
SCORE_LIMIT = 60000.0  # float16 holds it; -inf marks no step


@triton.jit
def _group_rows_by_step(s, WARPS: tl.constexpr):
    """Return scores [32 * WARPS, BS], in the order of rows that `_weigh_keys` has, as [steps, GRAIN, BS]."""
    BS: tl.constexpr = s.shape[1]
    parted = tl.permute(tl.reshape(s, [2, WARPS, 2, 8, BS]), [1, 3, 0, 2, 4])
    return tl.reshape(parted, [32 * WARPS // GRAIN, GRAIN, BS])


@triton.jit
def _weigh_keys(
    k_base, rep, log_sum, score, pages, block, segment, limit, q_len, offset, start, k_first, lookback, row_begin,
    rows_end, t_begin, t_end, page_shift, page_rows, stride_kl, stride_sl,
    D: tl.constexpr, R: tl.constexpr, BS: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, BN: tl.constexpr,
    CAP: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Write the scores of the keys t_begin .. t_end for BS segments of a head with R representatives: see `_scores`.

    The rows of the product with the keys are keys in such an order that the keys of a step belong to one thread, which
    adds them up without a shuffle: of 32 * WARPS rows, written [2, WARPS, 2, 8], a thread holds those that differ in
    the two dimensions of 2. Pointers are to the head's first row.
    """
    BK: tl.constexpr = 32 * WARPS
    before = row_begin // segment
    count = tl.cdiv(tl.minimum(q_len, rows_end) - row_begin, segment)  # segments of the slice
    n = block * BS + tl.arange(0, BS)
    first = tl.where(n < count, find_window_start(before + n, segment, offset, lookback, start, BN), start)
    t_end = tl.minimum(t_end, tl.max(first, 0))
    if t_begin < t_end:
        offs_d = tl.arange(0, D)
        p = (before + block * BS) * R + tl.arange(0, BS * R)
        there = (p < (before + count) * R) & (p * (segment // R) < q_len)
        r = tl.load(rep + p[None, :].to(tl.int64) * D + offs_d[:, None], mask=there[None, :], other=0)
        log_sums = tl.load(log_sum + p, mask=there, other=float("inf"))
        row = tl.arange(0, BK)
        high, low, lane = row // (16 * WARPS), row // 8 % 2, row % 8
        within = (row // 16 % WARPS * 8 + lane) * GRAIN + high * 2 + low
        out = score + n[None, :].to(tl.int64) * stride_sl
        for t0 in tl.range(t_begin, t_end, BK, num_stages=STAGES):
            t = t0 + within
            key_row = k_first + t
            if PAGED:
                key_row = load_cache_rows(tl.minimum(t, t_end - 1), pages, page_shift, page_rows)
            keys = k_base + key_row[:, None].to(tl.int64) * stride_kl + offs_d[None, :]
            s = tl.dot(tl.load(keys, mask=t[:, None] < t_end, other=0), r, input_precision="ieee")
            if CAP > 0:
                s = cap_scores(s, 1.0, CAP)
            s -= log_sums[None, :]
            s = tl.max(tl.reshape(s, [BK, BS, R]), 2) if R > 1 else s
            s = tl.where(s > float("-inf"), tl.minimum(s, limit), limit)  # NaN is not above -inf
            s = _group_rows_by_step(s, WARPS)
            most = tl.max(s, 1)
            s = most + tl.log2(tl.sum(tl.exp2(s - most[:, None, :]), 1))
            step = (t0 - start) // GRAIN + tl.arange(0, BK // GRAIN)[:, None]
            s = tl.maximum(s, -limit).to(score.dtype.element_ty)
            tl.store(out + step, s, mask=step < ((first - start) // GRAIN)[None, :])


@triton.jit(
    do_not_specialize=[
        "q_len", "offset", "lookback", "row_begin", "rows_end", "parts", "stretches", "page_shift", "page_rows",
        "stride_pb",
    ]
)  # fmt: skip
def _scores(
    REP, K, LOG_SUM, SCORE, STARTS: Starts, PAGES, SEGMENT, REPRESENTATIVES, limit, q_len, offset, lookback, row_begin,
    rows_end, parts, stretches, page_shift, page_rows, stride_r: Strides, stride_k: Strides, stride_s: Strides,
    stride_pb,
    COUNTS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, KEYS: tl.constexpr,
    WARPS: tl.constexpr, STAGES: tl.constexpr, BN: tl.constexpr, CAP: tl.constexpr, HAS_START: tl.constexpr,
    PACKED: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Write to SCORE[b, h, n, g] the logarithm in base 2 of the weight of step g for segment n of the slice.

    For the keys t of step g and the representatives r of the segment: log2 sum_t 2^(max_r(r . k_t - LOG_SUM[r])), the
    terms and the sum limited to -limit .. limit, and each product soft-capped with CAP > 0. A term that is NaN or
    infinite is limit: rows that see such a key may be NaN, so it is visited first. Only entries of prefixes are
    written.

    Programs: (blocks of segments * stretches of KEYS keys, Hq, B). A program keeps the representatives of its segments,
    COLUMNS or a quarter as many where a segment has one, but at least FEWEST, and reads its keys once. COUNTS: the
    representatives that heads have.
    """
    block = tl.program_id(0) // stretches
    h = tl.program_id(1)
    b = tl.program_id(2)
    segment = tl.load(SEGMENT + h)
    start = tl.load(STARTS.kv_start + b).to(tl.int32) if HAS_START else 0
    _, k_first, q_len, offset = load_sequence(b, STARTS.cu_q, STARTS.cu_k, q_len, offset, PACKED)
    t_begin = start + tl.program_id(0) % stretches * KEYS
    if (segment > 0) & (t_begin < offset + q_len):
        k_base = head_pointer(K, stride_k, b, h // GROUP)
        rep = head_pointer(REP, stride_r, b, h)
        log_sum = LOG_SUM + (b * tl.num_programs(1) + h).to(tl.int64) * parts
        score = head_pointer(SCORE, stride_s, b, h)
        pages = PAGES
        if PAGED:
            pages += b.to(tl.int64) * stride_pb
        for i in tl.static_range(len(COUNTS)):
            if tl.load(REPRESENTATIVES + h) == COUNTS[i]:
                _weigh_keys(
                    k_base, rep, log_sum, score, pages, block, segment, limit, q_len, offset, start, k_first, lookback,
                    row_begin, rows_end, t_begin, t_begin + KEYS, page_shift, page_rows, stride_k.row, stride_s.row,
                    D, COUNTS[i], max(COLUMNS // max(COUNTS[i], 4), FEWEST // COUNTS[i]), WARPS, STAGES, BN, CAP, PAGED,
                )  # fmt: skip


def score(means: Means, call: Call, rows: range) -> Tensor:
    """Weigh each step of the prefixes of all segments that begin in `rows` (Algorithm 1, line 17).

    rows: they begin at a multiple of every segment. Returns SCORE, of a row of which only the prefix's entries are
    written. Heads with longer segments use fewer of the N' rows; dense heads none.
    """
    k, shape, tables = call.k, call.shape, call.tables
    segments = -(-len(rows) // tables.shortest_segment)
    longest = shape.kv_len if call.packed else shape.offset + rows.start + (segments - 1) * tables.shortest_segment
    # rounded up, so that there is one compiled kernel for all lengths
    steps = max(1, -(-longest // (config.KEY_BLOCK * ROW_ALIGNMENT))) * ROW_ALIGNMENT
    scores = torch.empty(shape.batch, shape.query_heads, segments, steps, dtype=torch.float16, device=k.device)
    representatives = segments * max(4, *tables.representative_counts)
    columns = count_columns(shape.head_dim, representatives)
    stretches = -(-longest // SCORE_KEYS) or 1
    blocks = -(-representatives // columns)
    launch(
        _scores,
        (blocks * stretches, shape.query_heads, shape.batch),
        {
            "REP": means.representatives, "K": k, "LOG_SUM": means.log_sums, "SCORE": scores, "STARTS": call.starts,
            **call.paging, "SEGMENT": tables.segment, "REPRESENTATIVES": tables.representatives, "limit": SCORE_LIMIT,
            "q_len": shape.q_len, "offset": shape.offset, "lookback": call.config.lookback,
            "row_begin": rows.start, "rows_end": rows.stop, "parts": means.log_sums.shape[2], "stretches": stretches,
            **group_strides(r=means.representatives, s=scores, k=k),
        },
        {
            "COUNTS": tables.representative_counts, "GROUP": shape.group, "D": shape.head_dim, "COLUMNS": columns,
            "KEYS": SCORE_KEYS, "WARPS": SCORE_WARPS, "STAGES": SCORE_STAGES, "BN": call.config.tile.block_n,
            "CAP": call.cap, "HAS_START": call.kv_start is not None, "PACKED": call.packed,
            "PAGED": call.pages is not None,
        },
        num_warps=SCORE_WARPS,
        maxnreg=MAX_REGISTERS,
    )  # fmt: skip
    return scores


def count_columns(head_dim: int, representatives: int) -> int:
    """Count the representatives that a program of `_scores` keeps: few segments have few. Each count is a kernel."""
    most = 128 if head_dim <= 128 else 64
    return min(most, next((columns for columns in (int(FEWEST.value), 64) if columns >= representatives), most))
