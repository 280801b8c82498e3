"""Algorithm 1: rank the prefix of every segment.

Four kernels: the representatives, the logarithm of each one's softmax denominator, what every step of adjacent keys
weighs, and a coarse order. A full sort would cost more than it saves, so steps are put into `BUCKETS` buckets by
score and nearly keep their positions inside a bucket, which is also kind to memory. The buckets' edges are
quantiles of a sample of the row, finer where scores are high, because most heads stop early.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from s2o_runtime.gpu import capability, interpreted
from s2o_runtime.kernels.call import Call
from s2o_runtime.kernels.launch import launch
from s2o_runtime.kernels.layout import LOG2E, sequence, window_start

ORDER_WARPS = 8
MAX_REGISTERS = 255  # as in prefill.py
REPRESENTATIVE_WARPS = 4
REPRESENTATIVE_STAGES = tl.constexpr(3)
LOG_SUM_KEYS = 64
LOG_SUM_WARPS = 4
SCORE_STAGES = 2
ROW_ALIGNMENT = 16
SAMPLES = 1024
BUCKETS = 32  # one for each lane of a warp
FINEST, COARSEST = 1 / 256, 3 / 4  # shares of the row before the end of the first and of the last but one bucket
RANK_BYTES = 6  # of workspace for each step of a row: a float16 score and an int32 index
SCORE_LIMIT = 60000.0

# Lane i of a warp holds one key, in `bucket` the key's bucket, and a counter for bucket i.
# `peers` becomes the set of lanes whose key belongs to bucket i: one ballot for each of the bucket's five bits, and
# one that leaves out what has the sixth bit, which belongs to no bucket.
_PEERS = """
    .reg .pred p;
    .reg .b32 lane, peers, votes, bit, flip;
    mov.u32 lane, %laneid;
    and.b32 bit, bucket, 32;
    setp.eq.u32 p, bit, 0;
    vote.sync.ballot.b32 peers, p, 0xffffffff;
""" + "".join(
    f"""
    and.b32 bit, bucket, {1 << j};
    setp.ne.u32 p, bit, 0;
    vote.sync.ballot.b32 votes, p, 0xffffffff;
    bfe.u32 flip, lane, {j}, 1;
    sub.u32 flip, flip, 1;
    xor.b32 votes, votes, flip;
    and.b32 peers, peers, votes;
"""
    for j in range(5)
)
COUNT_ASM = tl.constexpr(
    "{ .reg .b32 bucket, found; mov.b32 bucket, $1;" + _PEERS + " popc.b32 found, peers; add.u32 $0, $2, found; }"
)
PLACE_ASM = tl.constexpr(
    "{ .reg .b32 bucket, base, found, mine, below; mov.b32 bucket, $2; mov.b32 base, $3;"
    + _PEERS
    + """
    shfl.sync.idx.b32 mine, peers, bucket, 31, 0xffffffff;
    shfl.sync.idx.b32 $0, base, bucket, 31, 0xffffffff;
    mov.u32 below, %lanemask_lt;
    and.b32 mine, mine, below;
    popc.b32 mine, mine;
    add.u32 $0, $0, mine;
    popc.b32 found, peers;
    add.u32 $1, base, found; }"""
)


@triton.jit(do_not_specialize=["q_len", "offset"])
def _representatives(
    Q, REP, KV_START, CU_Q, CU_K, PART, COUNT, qk_scale, q_len, offset,
    stride_qb, stride_qh, stride_ql, stride_rb, stride_rh, stride_rn,
    D: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, HAS_START: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """REP[b, h, n] = scaled mean of the queries of part n that do not stand before kv_start, 0 if there is none.

    Only heads with R representatives are done, PARTS parts at once: one by a sum, several by a product with ones. What
    takes time is reading the queries, so loads run ahead, and rows are summed across threads only at the end.
    """
    n = tl.program_id(0) * PARTS
    h = tl.program_id(1)
    b = tl.program_id(2)
    part = tl.load(PART + h)
    start = tl.load(KV_START + b).to(tl.int32) if HAS_START else 0
    q_first, _, q_len, offset = sequence(b, CU_Q, CU_K, q_len, offset, PACKED)
    end = tl.minimum((n + PARTS) * part, q_len)
    begin = tl.maximum(n * part, start - offset)
    if (part > 0) & (n * part < q_len) & (tl.load(COUNT + h) == R):
        offs_d = tl.arange(0, D)
        parts = n + tl.arange(0, PARTS)
        total = tl.zeros([PARTS if PARTS > 1 else ROWS, D], tl.float32)
        base = Q + b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
        for row in tl.range(begin, end, ROWS, num_stages=REPRESENTATIVE_STAGES):
            rows = row + tl.arange(0, ROWS)
            q = tl.load(
                base + (q_first + rows)[:, None].to(tl.int64) * stride_ql + offs_d[None, :],
                mask=rows[:, None] < end,
                other=0.0,
            )
            if PARTS == 1:
                total += q.to(tl.float32)
            else:
                belongs = (rows // part)[None, :] == parts[:, None]
                total = tl.dot(belongs.to(q.dtype), q, total, input_precision="ieee")
        if PARTS == 1:
            total = tl.sum(total, 0)[None, :]
        size = tl.minimum((parts + 1) * part, q_len) - tl.maximum(parts * part, start - offset)
        mean = total * (qk_scale / tl.maximum(size, 1).to(tl.float32))[:, None]
        out = REP + b.to(tl.int64) * stride_rb + h.to(tl.int64) * stride_rh + parts[:, None].to(tl.int64) * stride_rn
        tl.store(out + offs_d[None, :], mean.to(REP.dtype.element_ty), mask=(parts * part < q_len)[:, None])


@triton.jit(do_not_specialize=["q_len", "offset", "every", "parts"])
def _log_sums(
    REP, K, LOG_SUM, KV_START, CU_Q, CU_K, SEGMENT, PART, q_len, offset, every, parts,
    stride_rb, stride_rh, stride_rn, stride_kb, stride_kh, stride_kl,
    GROUP: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    HAS_START: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """LOG_SUM[b, h, n] = log-sum-exp in base 2 of part n's scores with every `every`-th key of its prefix.

    [B, Hq, parts], contiguous; infinite for parts that hold only padding or have no prefix.
    """
    # long prefixes first
    n = (tl.num_programs(0) - 1 - tl.program_id(0)) * BR + tl.arange(0, BR)
    h = tl.program_id(1)
    b = tl.program_id(2)
    segment = tl.load(SEGMENT + h)
    part = tl.load(PART + h)
    start = tl.load(KV_START + b).to(tl.int32) if HAS_START else 0
    _, k_first, q_len, offset = sequence(b, CU_Q, CU_K, q_len, offset, PACKED)
    inside = (n * part < q_len) & (segment > 0)
    if tl.max(inside.to(tl.int32), 0) > 0:
        offs_d = tl.arange(0, D)
        rep = REP + b.to(tl.int64) * stride_rb + h.to(tl.int64) * stride_rh + n[:, None].to(tl.int64) * stride_rn
        r = tl.load(rep + offs_d[None, :], mask=inside[:, None], other=0.0)
        first = window_start(n * part // segment, segment, offset, start, BN)
        first = tl.where(inside & (offset + (n + 1) * part > start), first, 0)
        last = tl.max(first, 0)
        key = K + b.to(tl.int64) * stride_kb + (h // GROUP).to(tl.int64) * stride_kh
        m = tl.full([BR], float("-inf"), tl.float32)
        l = tl.zeros([BR], tl.float32)
        for t0 in range(start, last, BK * every):
            t = t0 + tl.arange(0, BK) * every
            k = tl.load(
                key + (k_first + t)[None, :].to(tl.int64) * stride_kl + offs_d[:, None],
                mask=t[None, :] < last,
                other=0.0,
            )
            s = tl.dot(r, k, input_precision="ieee")
            s = tl.where(t[None, :] < first[:, None], s, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            l = l * tl.exp2(m - m_safe) + tl.sum(tl.exp2(s - m_safe[:, None]), 1)
            m = m_new
        out = LOG_SUM + (b * tl.num_programs(1) + h).to(tl.int64) * parts
        l *= every.to(tl.float32)
        tl.store(out + n, tl.where(l > 0, m + tl.log2(tl.where(l > 0, l, 1.0)), float("inf")), mask=inside)


@triton.jit
def _together(s, WARPS: tl.constexpr, GRAIN: tl.constexpr):
    """Scores [32 * WARPS, BS], in rows as `_scores` puts them, as [steps, GRAIN, BS]."""
    BS: tl.constexpr = s.shape[1]
    if GRAIN == 2:
        parted = tl.permute(tl.reshape(s, [2 * WARPS, 2, 8, BS]), [0, 2, 1, 3])
    elif GRAIN == 4:
        parted = tl.permute(tl.reshape(s, [2, WARPS, 2, 8, BS]), [1, 3, 0, 2, 4])
    else:
        parted = tl.permute(tl.reshape(s, [2, WARPS, 2, 4, 2, BS]), [1, 3, 4, 0, 2, 5])
    return tl.reshape(parted, [32 * WARPS // GRAIN, GRAIN, BS])


@triton.jit(do_not_specialize=["q_len", "offset", "row_begin", "rows_end", "parts"])
def _scores(
    REP, K, LOG_SUM, SCORE, KV_START, CU_Q, CU_K, SEGMENT, COUNT, limit, q_len, offset, row_begin, rows_end, parts,
    stride_rb, stride_rh, stride_rn, stride_kb, stride_kh, stride_kl, stride_sb, stride_sh, stride_sn,
    GROUP: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BS: tl.constexpr, WARPS: tl.constexpr, BN: tl.constexpr,
    GRAIN: tl.constexpr, HAS_START: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """SCORE[b, h, n, g] = the logarithm, in base 2, of what step g of the prefix weighs for segment n0 + n.

    n counts from the first segment in the rows; a step is GRAIN keys. Only heads with R representatives are done, and
    only entries of prefixes written. A program reads its keys once for all query heads of their KV head.

    The keys of a step are put into the rows of a product that one thread holds: of 32 * WARPS rows, written
    [2, WARPS, 2, 8], those that differ in the two dimensions of 2.
    """
    BK: tl.constexpr = 32 * WARPS
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    b = tl.program_id(2)
    start = tl.load(KV_START + b).to(tl.int32) if HAS_START else 0
    _, k_first, q_len, offset = sequence(b, CU_Q, CU_K, q_len, offset, PACKED)
    kv_len = offset + q_len
    t0 = start + block * BK
    if t0 < kv_len:
        offs_d = tl.arange(0, D)
        row = tl.arange(0, BK)
        high, low, lane = row // (16 * WARPS), row // 8 % 2, row % 8
        warp_lane = row // 16 % WARPS * 8 + lane
        if GRAIN == 1:
            t = t0 + row
        elif GRAIN == 2:
            t = t0 + (high * WARPS * 8 + warp_lane) * 2 + low
        elif GRAIN == 4:
            t = t0 + warp_lane * 4 + high * 2 + low
        else:
            t = t0 + warp_lane // 2 * 8 + lane % 2 * 4 + high * 2 + low
        key = K + b.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
        k = tl.load(
            key + (k_first + t)[:, None].to(tl.int64) * stride_kl + offs_d[None, :], mask=t[:, None] < kv_len, other=0.0
        )
        step = block * (BK // GRAIN) + tl.arange(0, BK // GRAIN)
        for member in range(GROUP):
            h = kv_head * GROUP + member
            segment = tl.load(SEGMENT + h)
            if (segment > 0) & (tl.load(COUNT + h) == R):
                before = row_begin // segment
                rep = REP + b.to(tl.int64) * stride_rb + h.to(tl.int64) * stride_rh
                log_sum = LOG_SUM + (b * tl.num_programs(1) * GROUP + h).to(tl.int64) * parts
                out = SCORE + b.to(tl.int64) * stride_sb + h.to(tl.int64) * stride_sh
                last = tl.cdiv(tl.minimum(q_len, rows_end) - row_begin, segment)
                # segments whose prefix ends before this block have no use for it
                none = tl.maximum(t0 - offset - row_begin, 0) // segment
                for n0 in range(none // BS * BS, last, BS):
                    p = (before + n0) * R + tl.arange(0, BS * R)
                    there = (p < (before + last) * R) & (p * (segment // R) < q_len)
                    r = tl.load(
                        rep + p[None, :].to(tl.int64) * stride_rn + offs_d[:, None], mask=there[None, :], other=0.0
                    )
                    s = tl.dot(k, r, input_precision="ieee")
                    s -= tl.load(log_sum + p, mask=there, other=float("inf"))[None, :]
                    s = tl.max(tl.reshape(s, [BK, BS, R]), 2) if R > 1 else s
                    s = tl.minimum(tl.maximum(s, -limit), limit)
                    if GRAIN > 1:
                        s = _together(s, WARPS, GRAIN)
                        most = tl.max(s, 1)
                        s = most + tl.log2(tl.sum(tl.exp2(s - most[:, None, :]), 1))
                    n = n0 + tl.arange(0, BS)
                    first = window_start(before + n, segment, offset, start, BN)
                    steps = tl.where(n < last, (first - start) // GRAIN, 0)
                    tl.store(
                        out + n[None, :].to(tl.int64) * stride_sn + step[:, None],
                        s.to(SCORE.dtype.element_ty),
                        mask=step[:, None] < steps[None, :],
                    )


@triton.jit
def _bucket_of(score, highest, per_bin, table, inside, BUCKETS: tl.constexpr):
    """The bucket of each score [W, 32]: a linear bin (bin 0 is above `highest`), then a table.

    table: int32 [W, 32], four bins of 8 bits in a word. What is not inside belongs to no bucket and gets BUCKETS.
    """
    position = tl.minimum(tl.maximum((highest - score) * per_bin + 1.25, 0.0), 4.0 * BUCKETS - 1.0).to(tl.int32)
    word = tl.gather(table, position >> 2, 1)
    return tl.where(inside, (word >> ((position & 3) * 8)) & 0xFF, BUCKETS)


@triton.jit
def _count(bucket, count, BUCKETS: tl.constexpr, PORTABLE: tl.constexpr):
    """count [W, BUCKETS] plus how many of `bucket` [W, 32] belong to each bucket, row by row."""
    if PORTABLE:
        same = bucket[:, :, None] == tl.arange(0, BUCKETS)[None, None, :]
        return count + tl.sum(same.to(tl.int32), 1)
    return tl.inline_asm_elementwise(COUNT_ASM, "=&r,r,r", [bucket, count], tl.int32, is_pure=False, pack=1)


@triton.jit
def _place(bucket, base, BUCKETS: tl.constexpr, PORTABLE: tl.constexpr):
    """Where each key goes, [W, 32], one behind the other from its bucket's base; and base [W, BUCKETS] after them."""
    if PORTABLE:
        same = (bucket[:, :, None] == tl.arange(0, BUCKETS)[None, None, :]).to(tl.int32)
        place = tl.sum(same * (base[:, None, :] + tl.cumsum(same, 1) - same), 2)
        return place, base + tl.sum(same, 1)
    return tl.inline_asm_elementwise(
        PLACE_ASM, "=&r,=&r,r,r", [bucket, base], (tl.int32, tl.int32), is_pure=False, pack=1
    )


@triton.jit
def _four(SCORE, first, prefix):
    """Four scores for each lane, from `first` [W, 32] on, as four tensors of vectors [W, 32]."""
    index = first[:, :, None] + tl.arange(0, 4)[None, None, :]
    scores = tl.load(SCORE + index, mask=index < prefix, other=0.0)
    even, odd = tl.split(tl.reshape(scores, [first.shape[0], first.shape[1], 2, 2]))
    s0, s2 = tl.split(even)
    s1, s3 = tl.split(odd)
    return s0.to(tl.float32), s1.to(tl.float32), s2.to(tl.float32), s3.to(tl.float32)


@triton.jit
def _count_one(s, key, prefix, highest, per_bin, table, count, BUCKETS: tl.constexpr, PORTABLE: tl.constexpr):
    return _count(_bucket_of(s, highest, per_bin, table, key < prefix, BUCKETS), count, BUCKETS, PORTABLE)


@triton.jit
def _place_one(
    s, key, prefix, highest, per_bin, table, base, order, start, GRAIN: tl.constexpr, BUCKETS: tl.constexpr,
    PORTABLE: tl.constexpr,
):  # fmt: skip
    inside = key < prefix
    place, base = _place(_bucket_of(s, highest, per_bin, table, inside, BUCKETS), base, BUCKETS, PORTABLE)
    tl.store(order + place, start + key * GRAIN, mask=inside)
    return base


@triton.jit(do_not_specialize=["q_len", "offset", "row_begin", "rows_end"])
def _order(
    SCORE, ORDER, FIRST, EDGE, SHARE_OF_RANK, KV_START, CU_Q, CU_K, SEGMENT, q_len, offset, row_begin, rows_end,
    stride_sb, stride_sh, stride_sn, stride_ib, stride_ih, stride_in,
    SAMPLES: tl.constexpr, BUCKETS: tl.constexpr, WARPS: tl.constexpr, BN: tl.constexpr, GRAIN: tl.constexpr,
    TAIL: tl.constexpr, HAS_START: tl.constexpr, PACKED: tl.constexpr, PORTABLE: tl.constexpr,
):  # fmt: skip
    """ORDER[b, h, n] = the steps of the n-th segment's prefix by falling bucket: where their first keys stand.

    With TAIL also FIRST[b, h, n, bucket], where in the order a bucket begins, and EDGE, the highest score in it,
    [B, Hq, N', BUCKETS]. A counting sort: every warp owns a stretch of the row, every lane a step of a vector of 32
    and one bucket, so a few ballots find 32 places and the loops are free of barriers. Scores are loaded four to a
    lane, one turn ahead. Inside a bucket, blocks of 128 steps ascend. The layout of [W, 32] tensors is one element a
    lane and one row a warp (tests/aot.py checks it).
    """
    # long prefixes first
    n = tl.num_programs(0) - 1 - tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2)
    segment = tl.load(SEGMENT + h)
    start = tl.load(KV_START + b).to(tl.int32) if HAS_START else 0
    _, _, q_len, offset = sequence(b, CU_Q, CU_K, q_len, offset, PACKED)
    first = window_start(row_begin // tl.maximum(segment, 1) + n, segment, offset, start, BN)
    prefix = (first - start) // GRAIN
    if (segment > 0) & (row_begin + n * segment < tl.minimum(rows_end, q_len)) & (prefix > 0):
        score = SCORE + b.to(tl.int64) * stride_sb + h.to(tl.int64) * stride_sh + n.to(tl.int64) * stride_sn
        order = ORDER + b.to(tl.int64) * stride_ib + h.to(tl.int64) * stride_ih + n.to(tl.int64) * stride_in

        # edges: sampled quantiles at geometric ranks
        every = tl.maximum(prefix // SAMPLES, 1)
        sampled = tl.minimum(prefix, SAMPLES)
        index = tl.arange(0, SAMPLES)
        sample = tl.load(score + index * every, mask=index < sampled, other=float("-inf")).to(tl.float32)
        sample = tl.sort(sample, descending=True)
        rank = (tl.load(SHARE_OF_RANK + tl.arange(0, BUCKETS)) * sampled.to(tl.float32)).to(tl.int32)
        edges = tl.gather(sample, tl.minimum(rank, tl.maximum(sampled - 1, 0)), 0)
        highest = tl.max(edges, 0)
        lowest = tl.min(edges, 0)
        per_bin = (4.0 * BUCKETS - 2.5) / tl.maximum(highest - lowest, 1e-6)
        bins = tl.arange(0, BUCKETS)[:, None] * 4 + tl.arange(0, 4)[None, :]
        centre = highest - (bins.to(tl.float32) - 0.75) / per_bin
        below = tl.minimum(tl.sum((centre[:, :, None] < edges[None, None, :]).to(tl.int32), 2), BUCKETS - 1)
        packed = tl.sum(below << (tl.arange(0, 4)[None, :] * 8), 1)
        table = tl.broadcast_to(packed[None, :], [WARPS, BUCKETS])

        # how many steps of each bucket each warp's stretch holds
        TURN: tl.constexpr = 4 * BUCKETS
        stretch = tl.cdiv(prefix, WARPS * TURN) * TURN
        mine = tl.arange(0, WARPS)[:, None] * stretch + tl.arange(0, BUCKETS)[None, :] * 4
        count = tl.zeros([WARPS, BUCKETS], tl.int32)
        s0, s1, s2, s3 = _four(score, mine, prefix)
        for t in range(0, stretch, TURN):
            n0, n1, n2, n3 = _four(score, mine + t + TURN, prefix)
            key = mine + t
            count = _count_one(s0, key, prefix, highest, per_bin, table, count, BUCKETS, PORTABLE)
            count = _count_one(s1, key + 1, prefix, highest, per_bin, table, count, BUCKETS, PORTABLE)
            count = _count_one(s2, key + 2, prefix, highest, per_bin, table, count, BUCKETS, PORTABLE)
            count = _count_one(s3, key + 3, prefix, highest, per_bin, table, count, BUCKETS, PORTABLE)
            s0, s1, s2, s3 = n0, n1, n2, n3

        # where each warp's share of each bucket begins, then where each step goes
        total = tl.sum(count, 0)
        begins = tl.cumsum(total, 0) - total
        base = begins[None, :] + tl.cumsum(count, 0) - count
        if TAIL:
            row = ((b * tl.num_programs(1) + h) * tl.num_programs(0) + n).to(tl.int64) * BUCKETS
            bucket = tl.arange(0, BUCKETS)
            tl.store(FIRST + row + bucket, begins)
            earlier = tl.sum(tl.sum((below[:, :, None] < bucket[None, None, :]).to(tl.int32), 1), 0)
            edge = highest - (earlier.to(tl.float32) - 1.25) / per_bin
            tl.store(EDGE + row + bucket, tl.where(earlier > 0, edge, float("inf")))
        s0, s1, s2, s3 = _four(score, mine, prefix)
        for t in range(0, stretch, TURN):
            n0, n1, n2, n3 = _four(score, mine + t + TURN, prefix)
            key = mine + t
            base = _place_one(s0, key, prefix, highest, per_bin, table, base, order, start, GRAIN, BUCKETS, PORTABLE)
            base = _place_one(
                s1, key + 1, prefix, highest, per_bin, table, base, order, start, GRAIN, BUCKETS, PORTABLE
            )
            base = _place_one(
                s2, key + 2, prefix, highest, per_bin, table, base, order, start, GRAIN, BUCKETS, PORTABLE
            )
            base = _place_one(
                s3, key + 3, prefix, highest, per_bin, table, base, order, start, GRAIN, BUCKETS, PORTABLE
            )
            s0, s1, s2, s3 = n0, n1, n2, n3


class Ranked(NamedTuple):
    """What one slice of rows knows of its prefixes; N' counts its segments.

    order: int32 [B, Hq, N', P / grain], where the keys of a step begin; of a row only the prefix's entries are written.
    score: float16 [B, Hq, N', P / grain], as `score` gave them.
    first, edge: [B, Hq, N', BUCKETS] int32 and float32, where in the order each bucket begins and the highest score
        in it; None unless a head has a tail.
    """

    order: Tensor
    score: Tensor
    first: Tensor | None
    edge: Tensor | None


def representatives(q: Tensor, call: Call) -> Tensor:
    """Algorithm 1, line 7, for all parts of all segments of a call: [B, Hq, N, D] in q's dtype, for base-2 scores.

    q: [B, Hq, Lq, D]. Heads with longer parts use fewer than the N rows; dense heads none.
    """
    shape, tables = call.shape, call.tables
    out = q.new_empty(shape.batch, shape.query_heads, -(-shape.q_len // tables.shortest_part), shape.head_dim)
    for count in tables.counts:
        parts = parts_at_once(count)
        launch(
            _representatives,
            (-(-out.shape[2] // parts), shape.query_heads, shape.batch),
            (q, out, *call.starts, tables.part, tables.representatives),
            (call.scale * LOG2E, shape.q_len, shape.offset),
            (*q.stride()[:3], *out.stride()[:3]),
            {
                "D": shape.head_dim, "R": count, "PARTS": parts, "ROWS": representative_rows(parts, shape.head_dim),
                "HAS_START": call.padded, "PACKED": call.packed,
            },
            num_warps=REPRESENTATIVE_WARPS,
        )  # fmt: skip
    return out


def parts_at_once(count: int) -> int:
    """Parts of a segment with `count` representatives that the kernel `_representatives` does at once."""
    return 1 if count < 8 else 16


def representative_rows(parts: int, head_dim: int) -> int:
    """Rows that the kernel `_representatives` loads at once for so many parts."""
    return (64 if parts == 1 else 128) // (1 if head_dim <= 128 else 2)


def log_sums(representative: Tensor, k: Tensor, call: Call) -> Tensor:
    """The log-sum-exp, in base 2, of each representative's scores with a sample of its prefix: float32 [B, Hq, N].

    representative: [B, Hq, N, D]; k: [B, Hkv, Lk, D]. Every `lse_stride`-th key is taken.
    """
    shape = call.shape
    out = torch.empty(representative.shape[:3], dtype=torch.float32, device=k.device)
    rows = 64 if call.tables.several else 16
    launch(
        _log_sums,
        (-(-out.shape[2] // rows), shape.query_heads, shape.batch),
        (representative, k, out, *call.starts, call.tables.segment, call.tables.part),
        (shape.q_len, shape.offset, lse_stride(shape.kv_len), out.shape[2]),
        (*representative.stride()[:3], *k.stride()[:3]),
        {
            "GROUP": shape.group, "D": shape.head_dim, "BR": rows, "BK": LOG_SUM_KEYS, "BN": call.config.tile.block_n,
            "HAS_START": call.padded, "PACKED": call.packed,
        },
        num_warps=LOG_SUM_WARPS,
    )  # fmt: skip
    return out


def lse_stride(kv_len: int) -> int:
    """Of so many keys `log_sums` reads one."""
    return min(16, max(1, kv_len // 2048))


def score(representative: Tensor, log_sum: Tensor, k: Tensor, call: Call, rows: range) -> Tensor:
    """Algorithm 1, line 17: what the prefixes of all segments that begin in `rows` weigh, as logarithms in base 2.

    representative: [B, Hq, N, D] and log_sum: [B, Hq, N] of all parts; k: [B, Hkv, Lk, D]; rows begins at a multiple
    of every segment. Returns float16 [B, Hq, N', P / grain]; of a row only the prefix's entries are written. Heads
    with longer segments use fewer than the N' rows; dense heads none.
    """
    shape, tables, grain = call.shape, call.tables, call.config.grain
    segments = -(-len(rows) // tables.shortest)
    longest = shape.kv_len if call.packed else shape.offset + rows.start + (segments - 1) * tables.shortest
    steps = max(1, -(-longest // (grain * ROW_ALIGNMENT))) * ROW_ALIGNMENT  # one compiled kernel for all lengths
    scores = torch.empty(shape.batch, shape.query_heads, segments, steps, dtype=torch.float16, device=k.device)
    for count in tables.counts:
        at_once = segments_at_once(segments, count)
        warps = score_warps(count, shape.head_dim)
        launch(
            _scores,
            (-(-longest // (32 * warps)) or 1, shape.kv_heads, shape.batch),
            (representative, k, log_sum, scores, *call.starts, tables.segment, tables.representatives),
            (SCORE_LIMIT, shape.q_len, shape.offset, rows.start, rows.stop, log_sum.shape[2]),
            (*representative.stride()[:3], *k.stride()[:3], *scores.stride()[:3]),
            {
                "GROUP": shape.group, "D": shape.head_dim, "R": count, "BS": at_once, "WARPS": warps,
                "BN": call.config.tile.block_n, "GRAIN": grain, "HAS_START": call.padded, "PACKED": call.packed,
            },
            num_warps=warps,
            num_stages=SCORE_STAGES,
            maxnreg=score_registers(warps, shape.head_dim, *capability(k.device)),
        )  # fmt: skip
    return scores


def segments_at_once(segments: int, count: int) -> int:
    """Segments with `count` representatives each that the kernel `_scores` does at once."""
    if count == 1:
        return 64 if segments > 32 else 32 if segments > 16 else 16
    return 64 // count


def score_warps(count: int, head_dim: int) -> int:
    """Warps of the kernel `_scores`: with several representatives its work is the product, which wants large tiles."""
    return 4 if count == 1 or head_dim > 128 else 8


def score_registers(warps: int, head_dim: int, major: int, minor: int) -> int:
    """Registers of a thread of `_scores`: where it does without more, as many as let two programs share an SM."""
    return 128 if warps == 8 and head_dim <= 128 and (major, minor) == (9, 0) else MAX_REGISTERS


def order(scores: Tensor, call: Call, rows: range, portable: bool | None = None) -> Ranked:
    """Algorithm 1, line 19, coarsely: the prefixes' steps by falling score.

    scores: [B, Hq, N', P / grain] as `score` gave them. portable: without inline PTX, as it is by default in the
    interpreter and for other vendors.
    """
    if portable is None:
        portable = interpreted() or torch.version.cuda is None
    out = torch.empty(scores.shape, dtype=torch.int32, device=scores.device)
    shape = call.shape
    first = edge = None
    if call.tables.tail:
        first = torch.empty(*scores.shape[:3], BUCKETS, dtype=torch.int32, device=scores.device)
        edge = torch.empty(*scores.shape[:3], BUCKETS, dtype=torch.float32, device=scores.device)
    shares = bucket_shares(scores.device)
    launch(
        _order,
        (scores.shape[2], shape.query_heads, shape.batch),
        (
            scores, out, out if first is None else first, shares if edge is None else edge, shares, *call.starts,
            call.tables.segment,
        ),
        (shape.q_len, shape.offset, rows.start, rows.stop),
        (*scores.stride()[:3], *out.stride()[:3]),
        {
            "SAMPLES": SAMPLES, "BUCKETS": BUCKETS, "WARPS": ORDER_WARPS, "BN": call.config.tile.block_n,
            "GRAIN": call.config.grain, "TAIL": call.tables.tail, "HAS_START": call.padded, "PACKED": call.packed,
            "PORTABLE": portable,
        },
        num_warps=ORDER_WARPS,
    )  # fmt: skip
    return Ranked(out, scores, first, edge)


@lru_cache(maxsize=8)
def bucket_shares(device: torch.device) -> Tensor:
    """The share of a row before the end of each bucket but the last, float32 [BUCKETS]; the last repeats."""
    shares = FINEST * (COARSEST / FINEST) ** torch.linspace(0, 1, BUCKETS - 1, dtype=torch.float64)
    return torch.cat((shares, shares[-1:])).to(device, torch.float32)
