"""Means: what a call's ranking needs of all queries and values before it meets a key (Algorithm 1, line 7).

One kernel with two kinds of programs. A program of a segment averages the queries of each of its parts, and then knows
the logarithm of the softmax denominator of each mean, from a sample of the keys. The others average the values of each
step, for tails.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import config
from ...call import Call
from ...sequences import Starts
from ..groups import Strides
from ..launch import group_strides, launch
from ..primitives import GRAIN, LOG2E, cap_scores, find_window_start, head_pointer, load_cache_rows, load_sequence

MEAN_WARPS = 4
MEAN_STAGES = 5  # a program's loads are all that it waits for, and few programs run beside it
POOL_STEPS = 32
LOG_SUM_KEYS = 64
# A denominator moves all scores of a representative alike, so it only says what representatives count against one
# another: from 256, 512, 2048 or all of 8192 keys the first tenth of the order holds the same mass to 0.003 of 0.53 (32
# representatives, the mean of 48 segments of the demo model).
LOG_SUM_SAMPLE = 512
NOTHING = tl.constexpr(-1e30)  # the score of a key that does not count: finite, so that differences are numbers


class Means(NamedTuple):
    """The means of one call: REP, LOG_SUM and, for a tail, VALUES of `groups`."""

    representatives: Tensor
    log_sums: Tensor
    values: Tensor | None


@triton.jit
def _pool(
    VALUES, V, pages, stretch, k_first, start, kv_len, steps, page_shift, page_rows, stride_vl,
    D: tl.constexpr, STEPS: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Write to row g of VALUES the mean value of the GRAIN keys of step g, from the first key that counts on.

    A program averages STEPS steps, the stretch. VALUES, V: pointers to the first step and to key 0 of the cache or
    tensor, of one KV head.
    """
    step = stretch * STEPS + tl.arange(0, STEPS)
    offs_d = tl.arange(0, D)
    total = tl.zeros([STEPS, D], tl.float32)
    for i in tl.static_range(GRAIN):
        t = start + step * GRAIN + i
        row = k_first + t
        if PAGED:
            row = load_cache_rows(tl.where(t < kv_len, t, 0), pages, page_shift, page_rows)
        rows = V + row[:, None].to(tl.int64) * stride_vl
        total += tl.load(rows + offs_d[None, :], mask=t[:, None] < kv_len, other=0.0).to(tl.float32)
    out = VALUES + step[:, None].to(tl.int64) * D + offs_d[None, :]
    tl.store(out, (total / GRAIN).to(VALUES.dtype.element_ty), mask=step[:, None] < steps)


@triton.jit
def _average_parts(
    q_base, k_base, REP, LOG_SUM, pages, n, segment, qk_scale, q_len, offset, start, k_first, lookback, page_shift,
    page_rows, stride_ql, stride_kl,
    D: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    CAP: tl.constexpr, SAMPLE: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Write the means of the R parts of segment n of a head to REP, and the logs of their denominators to LOG_SUM.

    A mean is of those queries of the part that count, times qk_scale; 0 if none does. The log-sum-exp in base 2 of its
    scores is from about SAMPLE keys of the prefix; infinite for a part that holds only padding or has no prefix. Scores
    that are NaN or infinite do not count. Pointers are to the head's first row. ROWS, BK: queries and keys at once.
    """
    PARTS: tl.constexpr = R if R > 16 else 16  # rows of a product
    part = segment // R
    member = tl.arange(0, PARTS)
    p = n * R + member
    inside = (member < R) & (p * part < q_len)
    offs_d = tl.arange(0, D)
    begin = tl.maximum(n * segment, start - offset)
    end = tl.minimum((n + 1) * segment, q_len)
    total = tl.zeros([PARTS, D], tl.float32)
    for row0 in tl.range(begin, end, ROWS, num_stages=STAGES):
        rows = row0 + tl.arange(0, ROWS)
        q = tl.load(
            q_base + rows[:, None].to(tl.int64) * stride_ql + offs_d[None, :], mask=rows[:, None] < end, other=0.0
        )
        belongs = (rows // part)[None, :] == p[:, None]
        total = tl.dot(belongs.to(q.dtype), q, total, input_precision="ieee")
    size = tl.minimum((p + 1) * part, q_len) - tl.maximum(p * part, start - offset)
    mean = total * (qk_scale / tl.maximum(size, 1).to(tl.float32))[:, None]
    r = mean.to(REP.dtype.element_ty)
    tl.store(REP + p[:, None].to(tl.int64) * D + offs_d[None, :], r, mask=inside[:, None])

    first = find_window_start(n, segment, offset, lookback, start, BN)
    every = tl.maximum((offset + q_len) // SAMPLE, 1)  # by the sequence, which may be packed with longer ones
    # every column has a sum of its own, so that no thread waits for another before the end
    m = tl.full([PARTS, BK], NOTHING, tl.float32)
    l = tl.zeros([PARTS, BK], tl.float32)
    for t0 in range(start, first, BK * every):
        t = t0 + tl.arange(0, BK) * every
        row = k_first + t
        if PAGED:
            row = load_cache_rows(tl.minimum(t, first - 1), pages, page_shift, page_rows)
        k = tl.load(k_base + row[None, :].to(tl.int64) * stride_kl + offs_d[:, None], mask=t[None, :] < first, other=0)
        s = tl.dot(r, k, input_precision="ieee")
        if CAP > 0:
            s = cap_scores(s, 1.0, CAP)
        s = tl.where((t[None, :] < first) & (tl.abs(s) < float("inf")), s, NOTHING)
        smaller = tl.exp2(-tl.abs(s - m))  # of the two terms, over the larger one
        l = tl.where(s > m, l * smaller + 1.0, l + smaller)
        m = tl.maximum(m, s)
    most = tl.max(m, 1)
    l = tl.sum(l * tl.exp2(m - most[:, None]), 1) * every
    counts = (most > NOTHING) & (offset + (p + 1) * part > start)
    tl.store(LOG_SUM + p, tl.where(counts, most + tl.log2(tl.where(counts, l, 1.0)), float("inf")), mask=inside)


@triton.jit(
    do_not_specialize=[
        "q_len", "offset", "lookback", "parts", "steps", "pools", "page_shift", "page_rows", "stride_pb",
    ]
)  # fmt: skip
def _means(
    Q, K, V, REP, LOG_SUM, VALUES, STARTS: Starts, PAGES, SEGMENT, REPRESENTATIVES, qk_scale, q_len, offset,
    lookback, parts, steps, pools, page_shift, page_rows, stride_q: Strides, stride_k: Strides, stride_v: Strides,
    stride_r: Strides, stride_pb,
    COUNTS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    BK: tl.constexpr, BN: tl.constexpr, CAP: tl.constexpr, SAMPLE: tl.constexpr, STEPS: tl.constexpr,
    HAS_TAIL: tl.constexpr, HAS_START: tl.constexpr, PACKED: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Write REP and LOG_SUM of all segments, and with HAS_TAIL VALUES.

    Programs: (pools + segments, the last ones first; Hq; B). The first `pools` average values: all query heads of a KV
    head share its steps. Reading takes the time, so loads run ahead. COUNTS: the representatives that heads have.
    """
    h = tl.program_id(1)
    b = tl.program_id(2)
    start = tl.load(STARTS.kv_start + b).to(tl.int32) if HAS_START else 0
    q_first, k_first, q_len, offset = load_sequence(b, STARTS.cu_q, STARTS.cu_k, q_len, offset, PACKED)
    pages = PAGES
    if PAGED:
        pages += b.to(tl.int64) * stride_pb
    if HAS_TAIL:  # noqa: SIM102
        if tl.program_id(0) < pools:
            values = VALUES + (b * (tl.num_programs(1) // GROUP) + h // GROUP).to(tl.int64) * steps * D
            v_base = head_pointer(V, stride_v, b, h // GROUP)
            stretch = tl.program_id(0) * GROUP + h % GROUP
            _pool(
                values, v_base, pages, stretch, k_first, start, offset + q_len, steps, page_shift, page_rows,
                stride_v.row, D, STEPS, PAGED,
            )  # fmt: skip
    segment = tl.load(SEGMENT + h)
    n = tl.num_programs(0) - 1 - tl.program_id(0)  # long prefixes first
    if (tl.program_id(0) >= pools) & (segment > 0) & (n * segment < q_len):
        q_base = head_pointer(Q, stride_q, b, h) + q_first.to(tl.int64) * stride_q.row
        k_base = head_pointer(K, stride_k, b, h // GROUP)
        rep = head_pointer(REP, stride_r, b, h)
        log_sum = LOG_SUM + (b * tl.num_programs(1) + h).to(tl.int64) * parts
        for i in tl.static_range(len(COUNTS)):
            if tl.load(REPRESENTATIVES + h) == COUNTS[i]:
                _average_parts(
                    q_base, k_base, rep, log_sum, pages, n, segment, qk_scale, q_len, offset, start, k_first, lookback,
                    page_shift, page_rows, stride_q.row, stride_k.row,
                    D, COUNTS[i], ROWS, STAGES, BK, BN, CAP, SAMPLE, PAGED,
                )  # fmt: skip


def average(call: Call) -> Means:
    """Compute the means of a call with a prefix: of the queries of all parts of all segments, and of values for a tail.

    Heads with longer segments or fewer representatives use fewer entries; dense heads none.
    """
    q, shape, tables = call.q, call.shape, call.tables
    counted = shape.batch, shape.query_heads, -(-shape.q_len // tables.min_rows_per_representative)
    rep = torch.empty(*counted, shape.head_dim, dtype=q.dtype, device=q.device)
    log_sums = torch.empty(counted, dtype=torch.float32, device=q.device)
    steps = pools = 0
    values = None
    if tables.tail:
        steps = -(-shape.kv_len // config.KEY_BLOCK)
        pools = -(-steps // (POOL_STEPS * shape.group))
        values = q.new_empty(shape.batch, shape.kv_heads, steps, shape.head_dim)
    launch(
        _means,
        (pools + -(-shape.q_len // tables.shortest_segment), shape.query_heads, shape.batch),
        {
            "Q": q, "K": call.k, "V": call.v, "REP": rep, "LOG_SUM": log_sums, "VALUES": values,
            "STARTS": call.starts, **call.paging, "SEGMENT": tables.segment, "REPRESENTATIVES": tables.representatives,
            "qk_scale": call.scale * LOG2E, "q_len": shape.q_len, "offset": shape.offset,
            "lookback": call.config.lookback, "parts": counted[2], "steps": steps, "pools": pools,
            **group_strides(q=q, k=call.k, v=call.v, r=rep),
        },
        {
            "COUNTS": tables.representative_counts, "GROUP": shape.group, "D": shape.head_dim,
            "ROWS": count_query_rows(shape.head_dim), "STAGES": MEAN_STAGES, "BK": LOG_SUM_KEYS,
            "BN": call.config.tile.block_n, "CAP": call.cap, "SAMPLE": LOG_SUM_SAMPLE, "STEPS": POOL_STEPS,
            "HAS_TAIL": tables.tail, "HAS_START": call.kv_start is not None,
            "PACKED": call.packed, "PAGED": call.pages is not None,
        },
        num_warps=MEAN_WARPS,
    )  # fmt: skip
    return Means(rep, log_sums, values)


def count_query_rows(head_dim: int) -> int:
    """Count the query rows that a program of `_means` loads at once."""
    return 64 if head_dim <= 128 else 32
