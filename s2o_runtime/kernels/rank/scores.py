"""Scores: what every step of a prefix weighs for each segment (Algorithm 1, lines 8 to 17).

A key weighs what it weighs in the softmax of the representative where it weighs most; a step of GRAIN adjacent keys
weighs the sum of theirs. Two kernels: the logarithm of every representative's softmax denominator, from a sample of the
keys, and the logarithm of every step's weight.
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

LOG_SUM_KEYS = 64
# A denominator moves all scores of a representative alike, so it only says what representatives count against one
# another: from 256, 512, 2048 or all of 8192 keys the first tenth of the order holds the same mass to 0.003 of 0.53 (32
# representatives, the mean of 48 segments of the demo model).
LOG_SUM_SAMPLE = 512
LOG_SUM_WARPS = 4
NOTHING = tl.constexpr(-1e30)  # the score of a key that does not count: finite, so that differences are numbers
SCORE_STAGES = 2
SCORE_WARPS = 4
SCORE_LIMIT = 60000.0  # float16 holds it; -inf marks no step
ROW_ALIGNMENT = 16


@triton.jit(do_not_specialize=["q_len", "offset", "lookback", "parts", "page_shift", "page_rows", "stride_pb"])
def _log_sums(
    REP, K, LOG_SUM, STARTS: Starts, PAGES, SEGMENT, PART, q_len, offset, lookback, parts, page_shift, page_rows,
    stride_r: Strides, stride_k: Strides, stride_pb,
    GROUP: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, CAP: tl.constexpr,
    SAMPLE: tl.constexpr, HAS_START: tl.constexpr, PACKED: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Write to LOG_SUM[b, h, n] the log-sum-exp in base 2 of part n's scores, from about SAMPLE keys of its prefix.

    It is infinite for parts that hold only padding or have no prefix. Scores that are NaN or infinite do not count.
    Programs: (parts / BR, the last ones first; Hq; B). BK: keys at once; BN: keys of a tile, a multiple of which a
    prefix has.
    """
    # long prefixes first
    n = (tl.num_programs(0) - 1 - tl.program_id(0)) * BR + tl.arange(0, BR)
    h = tl.program_id(1)
    b = tl.program_id(2)
    segment = tl.load(SEGMENT + h)
    part = tl.load(PART + h)
    start = tl.load(STARTS.kv_start + b).to(tl.int32) if HAS_START else 0
    _, k_first, q_len, offset = load_sequence(b, STARTS.cu_q, STARTS.cu_k, q_len, offset, PACKED)
    inside = (n * part < q_len) & (segment > 0)
    if tl.max(inside.to(tl.int32), 0) > 0:
        offs_d = tl.arange(0, D)
        rep = head_pointer(REP, stride_r, b, h) + n[:, None].to(tl.int64) * stride_r.row
        r = tl.load(rep + offs_d[None, :], mask=inside[:, None], other=0)
        first = find_window_start(n * part // segment, segment, offset, lookback, start, BN)
        first = tl.where(inside & (offset + (n + 1) * part > start), first, 0)
        last = tl.max(first, 0)
        every = tl.maximum((offset + q_len) // SAMPLE, 1)  # by the sequence, which may be packed with longer ones
        key = head_pointer(K, stride_k, b, h // GROUP)
        # every column has a sum of its own, so that no thread waits for another before the end
        m = tl.full([BR, BK], NOTHING, tl.float32)
        l = tl.zeros([BR, BK], tl.float32)
        for t0 in range(start, last, BK * every):
            t = t0 + tl.arange(0, BK) * every
            row = k_first + t
            if PAGED:
                row = load_cache_rows(
                    tl.minimum(t, last - 1), PAGES + b.to(tl.int64) * stride_pb, page_shift, page_rows
                )
            k = tl.load(
                key + row[None, :].to(tl.int64) * stride_k.row + offs_d[:, None],
                mask=t[None, :] < last,
                other=0,
            )
            s = tl.dot(r, k, input_precision="ieee")
            if CAP > 0:
                s = cap_scores(s, 1.0, CAP)
            s = tl.where((t[None, :] < first[:, None]) & (tl.abs(s) < float("inf")), s, NOTHING)
            smaller = tl.exp2(-tl.abs(s - m))  # of the two terms, over the larger one
            l = tl.where(s > m, l * smaller + 1.0, l + smaller)
            m = tl.maximum(m, s)
        most = tl.max(m, 1)
        l = tl.sum(l * tl.exp2(m - most[:, None]), 1) * every
        there = most > NOTHING
        out = LOG_SUM + (b * tl.num_programs(1) + h).to(tl.int64) * parts
        tl.store(out + n, tl.where(there, most + tl.log2(tl.where(there, l, 1.0)), float("inf")), mask=inside)


@triton.jit
def _group_rows_by_step(s, WARPS: tl.constexpr):
    """Return scores [32 * WARPS, BS], in the order of rows that `_scores` has, as [steps, GRAIN, BS]."""
    BS: tl.constexpr = s.shape[1]
    parted = tl.permute(tl.reshape(s, [2, WARPS, 2, 8, BS]), [1, 3, 0, 2, 4])
    return tl.reshape(parted, [32 * WARPS // GRAIN, GRAIN, BS])


@triton.jit(
    do_not_specialize=[
        "q_len",
        "offset",
        "lookback",
        "row_begin",
        "rows_end",
        "parts",
        "page_shift",
        "page_rows",
        "stride_pb",
    ]
)
def _scores(
    REP, K, LOG_SUM, SCORE, STARTS: Starts, PAGES, SEGMENT, REPRESENTATIVES, limit, q_len, offset, lookback, row_begin,
    rows_end, parts, page_shift, page_rows, stride_r: Strides, stride_k: Strides, stride_s: Strides, stride_pb,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BS: tl.constexpr, WARPS: tl.constexpr,
    BN: tl.constexpr, CAP: tl.constexpr, HAS_START: tl.constexpr, PACKED: tl.constexpr,
    PAGED: tl.constexpr,
):  # fmt: skip
    """Write to SCORE[b, h, n, g] the logarithm in base 2 of the weight of step g for segment n of the slice.

    For the keys t of step g and the representatives r of the segment: log2 sum_t 2^(max_r(r . k_t - LOG_SUM[r])), each
    term limited to -limit .. limit, and each product soft-capped with CAP > 0. A term that is NaN or infinite is limit:
    rows that see such a key may be NaN, so it is visited first. Programs: (blocks of 32 * WARPS keys,
    Hq / HEADS, B). A program reads its keys once for those of its HEADS query heads, which share a KV head, that have R
    representatives, BS segments at once. Only entries of prefixes are written.

    The rows of the product with the keys are keys in such an order that the keys of a step belong to one thread, which
    adds them up without a shuffle: of 32 * WARPS rows, written [2, WARPS, 2, 8], a thread holds those that differ in
    the two dimensions of 2.
    """
    BK: tl.constexpr = 32 * WARPS
    block = tl.program_id(0)
    head = tl.program_id(1) * HEADS
    heads = tl.num_programs(1) * HEADS
    b = tl.program_id(2)
    start = tl.load(STARTS.kv_start + b).to(tl.int32) if HAS_START else 0
    _, k_first, q_len, offset = load_sequence(b, STARTS.cu_q, STARTS.cu_k, q_len, offset, PACKED)
    kv_len = offset + q_len
    t0 = start + block * BK
    wanted = True
    if HEADS == 1:
        wanted = (tl.load(SEGMENT + head) > 0) & (tl.load(REPRESENTATIVES + head) == R)
    if wanted & (t0 < kv_len):
        offs_d = tl.arange(0, D)
        row = tl.arange(0, BK)
        high, low, lane = row // (16 * WARPS), row // 8 % 2, row % 8
        warp_lane = row // 16 % WARPS * 8 + lane
        t = t0 + warp_lane * GRAIN + high * 2 + low
        key = head_pointer(K, stride_k, b, head // GROUP)
        key_row = k_first + t
        if PAGED:
            key_row = load_cache_rows(
                tl.minimum(t, kv_len - 1), PAGES + b.to(tl.int64) * stride_pb, page_shift, page_rows
            )
        k = tl.load(
            key + key_row[:, None].to(tl.int64) * stride_k.row + offs_d[None, :], mask=t[:, None] < kv_len, other=0
        )
        step = block * (BK // GRAIN) + tl.arange(0, BK // GRAIN)
        for member in range(HEADS):
            h = head + member
            segment = tl.load(SEGMENT + h)
            if (segment > 0) & (tl.load(REPRESENTATIVES + h) == R):
                before = row_begin // segment
                rep = head_pointer(REP, stride_r, b, h)
                log_sum = LOG_SUM + (b * heads + h).to(tl.int64) * parts
                out = head_pointer(SCORE, stride_s, b, h)
                last = tl.cdiv(tl.minimum(q_len, rows_end) - row_begin, segment)
                # segments whose prefix ends before this block have no use for it
                none = tl.maximum(t0 - offset - row_begin + lookback, 0) // segment
                for n0 in range(none // BS * BS, last, BS):
                    p = (before + n0) * R + tl.arange(0, BS * R)
                    there = (p < (before + last) * R) & (p * (segment // R) < q_len)
                    r = tl.load(
                        rep + p[None, :].to(tl.int64) * stride_r.row + offs_d[:, None], mask=there[None, :], other=0
                    )
                    s = tl.dot(k, r, input_precision="ieee")
                    if CAP > 0:
                        s = cap_scores(s, 1.0, CAP)
                    s -= tl.load(log_sum + p, mask=there, other=float("inf"))[None, :]
                    s = tl.max(tl.reshape(s, [BK, BS, R]), 2) if R > 1 else s
                    s = tl.where(tl.abs(s) < float("inf"), tl.minimum(tl.maximum(s, -limit), limit), limit)
                    s = _group_rows_by_step(s, WARPS)
                    most = tl.max(s, 1)
                    s = most + tl.log2(tl.sum(tl.exp2(s - most[:, None, :]), 1))
                    n = n0 + tl.arange(0, BS)
                    first = find_window_start(before + n, segment, offset, lookback, start, BN)
                    steps = tl.where(n < last, (first - start) // GRAIN, 0)
                    tl.store(
                        out + n[None, :].to(tl.int64) * stride_s.row + step[:, None],
                        s.to(SCORE.dtype.element_ty),
                        mask=step[:, None] < steps[None, :],
                    )


def log_sums(r: Tensor, call: Call) -> Tensor:
    """Compute LOG_SUM, from a sample of about LOG_SUM_SAMPLE keys of each prefix: float32 [B, Hq, parts]; r: REP."""
    shape, k = call.shape, call.k
    out = torch.empty(r.shape[:3], dtype=torch.float32, device=k.device)
    rows = 64 if max(call.tables.representative_counts) > 1 else 16
    launch(
        _log_sums,
        (-(-out.shape[2] // rows), shape.query_heads, shape.batch),
        {
            "REP": r, "K": k, "LOG_SUM": out, "STARTS": call.starts, **call.paging, "SEGMENT": call.tables.segment,
            "PART": call.tables.rows_per_representative, "q_len": shape.q_len, "offset": shape.offset,
            "lookback": call.config.lookback, "parts": out.shape[2], **group_strides(r=r, k=k),
        },
        {
            "GROUP": shape.group, "D": shape.head_dim, "BR": rows, "BK": LOG_SUM_KEYS, "BN": call.config.tile.block_n,
            "CAP": call.cap, "SAMPLE": LOG_SUM_SAMPLE, "HAS_START": call.kv_start is not None, "PACKED": call.packed,
            "PAGED": call.pages is not None,
        },
        num_warps=LOG_SUM_WARPS,
    )  # fmt: skip
    return out


def score(r: Tensor, log_sum: Tensor, call: Call, rows: range) -> Tensor:
    """Weigh each step of the prefixes of all segments that begin in `rows` (Algorithm 1, line 17).

    r: REP; log_sum: as `log_sums` gave it; rows: they begin at a multiple of every segment. Returns SCORE, of a row of
    which only the prefix's entries are written. Heads with longer segments use fewer of the N' rows; dense heads none.
    """
    k, shape, tables = call.k, call.shape, call.tables
    segments = -(-len(rows) // tables.shortest_segment)
    longest = shape.kv_len if call.packed else shape.offset + rows.start + (segments - 1) * tables.shortest_segment
    # rounded up, so that there is one compiled kernel for all lengths
    steps = max(1, -(-longest // (config.KEY_BLOCK * ROW_ALIGNMENT))) * ROW_ALIGNMENT
    scores = torch.empty(shape.batch, shape.query_heads, segments, steps, dtype=torch.float16, device=k.device)
    for count in tables.representative_counts:
        at_once = count_segments_at_once(segments, count, shape.head_dim)
        heads = count_heads_at_once(count, shape.group)
        launch(
            _scores,
            (-(-longest // (32 * SCORE_WARPS)) or 1, shape.query_heads // heads, shape.batch),
            {
                "REP": r, "K": k, "LOG_SUM": log_sum, "SCORE": scores, "STARTS": call.starts, **call.paging,
                "SEGMENT": tables.segment, "REPRESENTATIVES": tables.representatives, "limit": SCORE_LIMIT,
                "q_len": shape.q_len, "offset": shape.offset, "lookback": call.config.lookback,
                "row_begin": rows.start, "rows_end": rows.stop, "parts": log_sum.shape[2],
                **group_strides(r=r, s=scores, k=k),
            },
            {
                "GROUP": shape.group, "HEADS": heads, "D": shape.head_dim, "R": count, "BS": at_once,
                "WARPS": SCORE_WARPS, "BN": call.config.tile.block_n, "CAP": call.cap,
                "HAS_START": call.kv_start is not None, "PACKED": call.packed, "PAGED": call.pages is not None,
            },
            num_warps=SCORE_WARPS,
            num_stages=SCORE_STAGES,
            maxnreg=MAX_REGISTERS,
        )  # fmt: skip
    return scores


def count_segments_at_once(segments: int, count: int, head_dim: int) -> int:
    """Count the segments, of so many with `count` representatives, that a program of `_scores` computes at once."""
    if count == 1:
        return 32 if segments > 16 else 16
    return (128 if head_dim <= 128 else 64) // count


def count_heads_at_once(count: int, group: int) -> int:
    """Count the query heads of a KV head that a program of `_scores` computes: all, which share the keys that it reads.

    With several representatives there are few segments at once, so that early keys, which all segments score, would
    keep one program busy for as long as all others together.
    """
    return group if count == 1 else 1
