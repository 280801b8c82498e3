"""Algorithm 1: rank the prefix of every segment.

Three kernels: the representatives, their scores with every key, and a coarse order. A full sort would cost more
than it saves. The better half of the keys is put into `BUCKETS` buckets by score, in their own order inside a
bucket, which is also kind to memory; the other half follows as it stands, from the last to the first. The
buckets' edges are quantiles of a sample of the row, finer where scores are high, because most heads stop early.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from s2o_runtime.gpu import interpreted
from s2o_runtime.kernels.call import Call
from s2o_runtime.kernels.launch import launch
from s2o_runtime.kernels.layout import LOG2E, sequence, window_start

REPRESENTATIVE_ROWS = 64
REPRESENTATIVE_WARPS = 8
ORDER_WARPS = 1
SCORE_REGISTERS = 255  # said aloud, or the compiler spills a few to fit one more program on the SM
SCORE_KEYS = 128
KEY_BLOCKS = 4
ROW_ALIGNMENT = 16
SAMPLES = 512
BUCKETS = 32  # one for each lane of a warp
BINS = 4 * BUCKETS
FINEST, COARSEST = 1 / 256, 1 / 2  # shares of the row before the end of the first and of the last but one bucket
RANK_BYTES = 10  # of workspace for each key of a row: a float16 score and two int32 indices
SCORE_LIMIT = 60000.0

# Lane i of a warp holds one key, in `bucket` the key's bucket, and a counter for bucket i.
# `peers` becomes the set of lanes whose key belongs to bucket i: five ballots, one for each bit of the bucket.
_PEERS = """
    .reg .pred p;
    .reg .b32 lane, peers, votes, bit, flip;
    mov.u32 lane, %laneid;
    mov.u32 peers, 0xffffffff;
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


BEFORE_ASM = tl.constexpr("""{
    .reg .pred p;
    .reg .b32 votes, below;
    setp.ne.u32 p, $2, 0;
    vote.sync.ballot.b32 votes, p, 0xffffffff;
    mov.u32 below, %lanemask_lt;
    and.b32 below, below, votes;
    popc.b32 below, below;
    popc.b32 votes, votes;
    add.u32 below, below, $3;
    add.u32 $1, votes, $3;
    mov.u32 $0, below; }""")


@triton.jit(do_not_specialize=["q_len", "offset"])
def _representatives(
    Q, REP, KV_START, CU_Q, CU_K, SEGMENT, qk_scale, q_len, offset,
    stride_qb, stride_qh, stride_ql, stride_rb, stride_rh, stride_rn,
    D: tl.constexpr, ROWS: tl.constexpr, HAS_START: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """REP[b, h, n] = scaled mean of the queries of segment n that do not stand before kv_start."""
    n = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2)
    segment = tl.load(SEGMENT + h)
    start = tl.load(KV_START + b).to(tl.int32) if HAS_START else 0
    q_first, _, q_len, offset = sequence(b, CU_Q, CU_K, q_len, offset, PACKED)
    begin = n * segment
    end = tl.minimum(begin + segment, q_len)
    begin = tl.maximum(begin, start - offset)
    if (segment > 0) & (n * segment < q_len):
        offs_d = tl.arange(0, D)
        total = tl.zeros([D], tl.float32)
        base = Q + b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
        for row in range(begin, end, ROWS):
            rows = row + tl.arange(0, ROWS)
            q = tl.load(
                base + (q_first + rows)[:, None].to(tl.int64) * stride_ql + offs_d[None, :],
                mask=rows[:, None] < end,
                other=0.0,
            )
            total += tl.sum(q.to(tl.float32), 0)
        mean = total * (qk_scale / tl.maximum(end - begin, 1).to(tl.float32))
        out = REP + b.to(tl.int64) * stride_rb + h.to(tl.int64) * stride_rh + n * stride_rn
        tl.store(out + offs_d, mean.to(REP.dtype.element_ty))


@triton.jit(do_not_specialize=["q_len", "offset", "row_begin", "rows_end", "keys"])
def _scores(
    REP, K, SCORE, KV_START, CU_Q, CU_K, SEGMENT, limit, q_len, offset, row_begin, rows_end, keys,
    stride_rb, stride_rh, stride_rn, stride_kb, stride_kh, stride_kl, stride_sb, stride_sh, stride_sn,
    GROUP: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr, BLOCKS: tl.constexpr, BN: tl.constexpr,
    HAS_START: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """SCORE[b, h, n, t] = <REP[b, h, n0 + n], K[t]> in base 2 for the prefix of segment n0 + n, the n-th in the rows.

    Other entries are not written. A program reads its keys once for all query heads of their KV head.
    """
    kv_head = tl.program_id(1)
    b = tl.program_id(2)
    start = tl.load(KV_START + b).to(tl.int32) if HAS_START else 0
    _, k_first, q_len, offset = sequence(b, CU_Q, CU_K, q_len, offset, PACKED)
    kv_len = offset + q_len
    offs_d = tl.arange(0, D)
    key = K + b.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    begin = tl.program_id(0) * BK * BLOCKS
    for t0 in tl.range(begin, tl.minimum(begin + BK * BLOCKS, kv_len), BK, num_stages=2):
        t = t0 + tl.arange(0, BK)
        k = tl.load(
            key + (k_first + t)[None, :].to(tl.int64) * stride_kl + offs_d[:, None], mask=t[None, :] < kv_len, other=0.0
        )
        for member in range(GROUP):
            h = kv_head * GROUP + member
            segment = tl.load(SEGMENT + h)
            if segment > 0:
                before = row_begin // segment
                rep = REP + b.to(tl.int64) * stride_rb + h.to(tl.int64) * stride_rh + before * stride_rn
                out = SCORE + b.to(tl.int64) * stride_sb + h.to(tl.int64) * stride_sh
                last = tl.cdiv(tl.minimum(q_len, rows_end) - row_begin, segment)
                # segments whose prefix ends before these keys have no use for them
                none = tl.maximum(t0 - offset - row_begin, 0) // segment
                for n0 in range(none // BS * BS, last, BS):
                    n = n0 + tl.arange(0, BS)
                    r = tl.load(rep + n[:, None] * stride_rn + offs_d[None, :], mask=n[:, None] < last, other=0.0)
                    score = tl.minimum(tl.maximum(tl.dot(r, k, input_precision="ieee"), -limit), limit)
                    first = window_start(before + n, segment, offset, start, BN)
                    prefix = (t[None, :] >= start) & (t[None, :] < tl.minimum(first, keys)[:, None])
                    tl.store(
                        out + n[:, None].to(tl.int64) * stride_sn + t[None, :],
                        score.to(SCORE.dtype.element_ty),
                        mask=prefix & (n[:, None] < last),
                    )


@triton.jit
def _bucket_of(score, highest, per_bin, table, inside, BUCKETS: tl.constexpr):
    """The bucket of each score [32]: a linear bin (bin 0 is above `highest`), then a table.

    table: int32 [32], four bins of 8 bits in a word. What is not inside counts for the last bucket.
    """
    position = tl.minimum(tl.maximum((highest - score) * per_bin + 1.25, 0.0), 4.0 * BUCKETS - 1.0).to(tl.int32)
    word = tl.gather(table, position >> 2, 0)
    return tl.where(inside, (word >> ((position & 3) * 8)) & 0xFF, BUCKETS - 1)


@triton.jit
def _before(hot, count, PORTABLE: tl.constexpr):
    """How many hot keys stand before each key [32], `count` before the first; and `count` after the last."""
    if PORTABLE:
        return count + tl.cumsum(hot, 0) - hot, count + tl.sum(hot, 0)
    return tl.inline_asm_elementwise(
        BEFORE_ASM, "=&r,=&r,r,r", [hot, count], (tl.int32, tl.int32), is_pure=False, pack=1
    )


@triton.jit
def _count(bucket, count, BUCKETS: tl.constexpr, PORTABLE: tl.constexpr):
    """count [BUCKETS] plus how many of `bucket` [32] belong to each bucket."""
    if PORTABLE:
        same = bucket[:, None] == tl.arange(0, BUCKETS)[None, :]
        return count + tl.sum(same.to(tl.int32), 0)
    return tl.inline_asm_elementwise(COUNT_ASM, "=&r,r,r", [bucket, count], tl.int32, is_pure=False, pack=1)


@triton.jit
def _place(bucket, base, BUCKETS: tl.constexpr, PORTABLE: tl.constexpr):
    """Where each key goes [32], one behind the other from its bucket's base; and base [BUCKETS] after them."""
    if PORTABLE:
        same = (bucket[:, None] == tl.arange(0, BUCKETS)[None, :]).to(tl.int32)
        place = tl.sum(same * (base[None, :] + tl.cumsum(same, 0) - same), 1)
        return place, base + tl.sum(same, 0)
    return tl.inline_asm_elementwise(
        PLACE_ASM, "=&r,=&r,r,r", [bucket, base], (tl.int32, tl.int32), is_pure=False, pack=1
    )


@triton.jit
def _split(
    score, order, spare, s, key, prefix, start, lowest, count, PORTABLE: tl.constexpr
):  # fmt: skip
    """Hot keys to the front of `spare` and their scores to the front of the row, the others to the back of `order`."""
    inside = key < prefix
    hot = (s >= lowest) & inside
    before, count = _before(hot.to(tl.int32), count, PORTABLE)
    tl.store(tl.where(hot, spare + before, order + (prefix - 1 - key + before)), start + key, mask=inside)
    tl.store(score + before, s.to(score.dtype.element_ty), mask=hot)
    return count


@triton.jit(do_not_specialize=["q_len", "offset", "row_begin", "rows_end", "keys"])
def _order(
    SCORE, ORDER, SHARE_OF_RANK, KV_START, CU_Q, CU_K, SEGMENT, q_len, offset, row_begin, rows_end, keys,
    stride_sb, stride_sh, stride_sn, stride_ib, stride_ih, stride_in,
    SAMPLES: tl.constexpr, BUCKETS: tl.constexpr, BN: tl.constexpr,
    HAS_START: tl.constexpr, PACKED: tl.constexpr, PORTABLE: tl.constexpr,
):  # fmt: skip
    """ORDER[b, h, n] = the prefix keys of the n-th segment in the rows: the hot ones by falling bucket, then the rest.

    One warp a row, one key a lane: a few ballots find the places of 32 keys at once, and all loops are free of
    barriers. The hot keys wait in the row's second half, ORDER[b, h, n, keys:], and their scores in the front
    of SCORE[b, h, n], which is lost. Scores are loaded four vectors ahead of the ballots, to hide their latency.
    """
    # long prefixes first
    n = tl.num_programs(0) - 1 - tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2)
    segment = tl.load(SEGMENT + h)
    start = tl.load(KV_START + b).to(tl.int32) if HAS_START else 0
    _, _, q_len, offset = sequence(b, CU_Q, CU_K, q_len, offset, PACKED)
    first = window_start(row_begin // tl.maximum(segment, 1) + n, segment, offset, start, BN)
    prefix = first - start
    if (segment > 0) & (row_begin + n * segment < tl.minimum(rows_end, q_len)) & (prefix > 0):
        score = SCORE + b.to(tl.int64) * stride_sb + h.to(tl.int64) * stride_sh + n.to(tl.int64) * stride_sn + start
        order = ORDER + b.to(tl.int64) * stride_ib + h.to(tl.int64) * stride_ih + n.to(tl.int64) * stride_in
        spare = order + keys

        # edges: sampled quantiles at geometric ranks, finest first
        every = tl.maximum(prefix // SAMPLES, 1)
        sampled = tl.minimum(prefix, SAMPLES)
        index = tl.arange(0, SAMPLES)
        sample = tl.load(score + index * every, mask=index < sampled, other=float("-inf")).to(tl.float32)
        sample = tl.sort(sample, descending=True)
        rank = (tl.load(SHARE_OF_RANK + tl.arange(0, BUCKETS)) * sampled.to(tl.float32)).to(tl.int32)
        edges = tl.gather(sample, tl.minimum(rank, tl.maximum(sampled - 1, 0)), 0)
        highest = tl.max(edges, 0)
        lowest = tl.min(edges, 0)

        lane = tl.arange(0, 32)
        count = tl.zeros([32], tl.int32)
        for t in range(0, prefix, 128):
            key = t + lane
            s0 = tl.load(score + key, mask=key < prefix, other=0.0).to(tl.float32)
            s1 = tl.load(score + key + 32, mask=key + 32 < prefix, other=0.0).to(tl.float32)
            s2 = tl.load(score + key + 64, mask=key + 64 < prefix, other=0.0).to(tl.float32)
            s3 = tl.load(score + key + 96, mask=key + 96 < prefix, other=0.0).to(tl.float32)
            count = _split(score, order, spare, s0, key, prefix, start, lowest, count, PORTABLE)
            count = _split(score, order, spare, s1, key + 32, prefix, start, lowest, count, PORTABLE)
            count = _split(score, order, spare, s2, key + 64, prefix, start, lowest, count, PORTABLE)
            count = _split(score, order, spare, s3, key + 96, prefix, start, lowest, count, PORTABLE)
        hot = tl.max(count, 0)
        tl.debug_barrier()  # what one lane stored, others load

        per_bin = (4.0 * BUCKETS - 2.5) / tl.maximum(highest - lowest, 1e-6)
        bins = tl.arange(0, BUCKETS)[:, None] * 4 + tl.arange(0, 4)[None, :]
        centre = highest - (bins.to(tl.float32) - 0.75) / per_bin
        below = tl.sum((centre[:, :, None] < edges[None, None, :]).to(tl.int32), 2)
        table = tl.sum(tl.minimum(below, BUCKETS - 1) << (tl.arange(0, 4)[None, :] * 8), 1)
        count = tl.zeros([BUCKETS], tl.int32)
        for t in range(0, hot, 64):
            key = t + lane
            s0 = tl.load(score + key, mask=key < hot, other=0.0).to(tl.float32)
            s1 = tl.load(score + key + 32, mask=key + 32 < hot, other=0.0).to(tl.float32)
            count = _count(_bucket_of(s0, highest, per_bin, table, key < hot, BUCKETS), count, BUCKETS, PORTABLE)
            count = _count(_bucket_of(s1, highest, per_bin, table, key + 32 < hot, BUCKETS), count, BUCKETS, PORTABLE)
        base = tl.cumsum(count, 0) - count
        for t in range(0, hot, 64):
            key = t + lane
            s0 = tl.load(score + key, mask=key < hot, other=0.0).to(tl.float32)
            s1 = tl.load(score + key + 32, mask=key + 32 < hot, other=0.0).to(tl.float32)
            k0 = tl.load(spare + key, mask=key < hot, other=0)
            k1 = tl.load(spare + key + 32, mask=key + 32 < hot, other=0)
            bucket = _bucket_of(s0, highest, per_bin, table, key < hot, BUCKETS)
            place, base = _place(bucket, base, BUCKETS, PORTABLE)
            tl.store(order + place, k0, mask=key < hot)
            bucket = _bucket_of(s1, highest, per_bin, table, key + 32 < hot, BUCKETS)
            place, base = _place(bucket, base, BUCKETS, PORTABLE)
            tl.store(order + place, k1, mask=key + 32 < hot)


def representatives(q: Tensor, call: Call) -> Tensor:
    """Algorithm 1, line 7, for all segments of a call: [B, Hq, N, D] in q's dtype, scaled for base-2 scores.

    q: [B, Hq, Lq, D]. Heads with longer segments use fewer than the N rows; dense heads none.
    """
    shape = call.shape
    out = q.new_empty(shape.batch, shape.query_heads, shape.segments(call.tables.shortest), shape.head_dim)
    launch(
        _representatives,
        (out.shape[2], shape.query_heads, shape.batch),
        (q, out, *call.starts, call.tables.segment),
        (call.scale * LOG2E, shape.q_len, shape.offset),
        (*q.stride()[:3], *out.stride()[:3]),
        {"D": shape.head_dim, "ROWS": REPRESENTATIVE_ROWS, "HAS_START": call.padded, "PACKED": call.packed},
        num_warps=REPRESENTATIVE_WARPS,
    )
    return out


def score(representative: Tensor, k: Tensor, call: Call, rows: range) -> Tensor:
    """Algorithm 1, line 17: the scores of the prefixes of all segments that begin in `rows`, in base 2.

    representative: [B, Hq, N, D] of all segments; k: [B, Hkv, Lk, D]; rows begins at a multiple of every segment.
    Returns float16 [B, Hq, N', P]; of a row only the prefix's entries are written. Heads with longer segments use
    fewer than the N' rows; dense heads none.
    """
    shape, shortest = call.shape, call.tables.shortest
    segments = -(-len(rows) // shortest)
    longest = shape.kv_len if call.packed else shape.offset + rows.start + (segments - 1) * shortest
    keys = max(1, -(-longest // ROW_ALIGNMENT)) * ROW_ALIGNMENT  # one compiled kernel for all lengths
    rows_at_once = 64 if segments > 32 else 32 if segments > 16 else 16
    scores = torch.empty(shape.batch, shape.query_heads, segments, keys, dtype=torch.float16, device=k.device)
    launch(
        _scores,
        (-(-keys // (SCORE_KEYS * KEY_BLOCKS)), shape.kv_heads, shape.batch),
        (representative, k, scores, *call.starts, call.tables.segment),
        (SCORE_LIMIT, shape.q_len, shape.offset, rows.start, rows.stop, keys),
        (*representative.stride()[:3], *k.stride()[:3], *scores.stride()[:3]),
        {
            "GROUP": shape.group, "D": shape.head_dim, "BS": rows_at_once, "BK": SCORE_KEYS, "BLOCKS": KEY_BLOCKS,
            "BN": call.config.tile.block_n, "HAS_START": call.padded, "PACKED": call.packed,
        },
        num_warps=score_warps(rows_at_once),
        maxnreg=SCORE_REGISTERS,
    )  # fmt: skip
    return scores


def score_warps(rows_at_once: int) -> int:
    """Warps of the kernel `_scores` for a block of 16, 32 or 64 segments."""
    return 8 if rows_at_once == 64 else 4


def order(scores: Tensor, call: Call, rows: range, portable: bool | None = None) -> Tensor:
    """Algorithm 1, line 19, coarsely: the prefixes' keys by falling score, int32 [B, Hq, N', P].

    scores: [B, Hq, N', P] as `score` gave them, lost. portable: without inline PTX, as it is by default in the
    interpreter and for other vendors. Of a row only the first (prefix length) entries are written: positions in a
    sequence.
    """
    *size, keys = scores.shape
    if portable is None:
        portable = interpreted() or torch.version.cuda is None
    out = torch.empty(*size, 2 * keys, dtype=torch.int32, device=scores.device)
    shape = call.shape
    launch(
        _order,
        (size[2], shape.query_heads, shape.batch),
        (scores, out, bucket_shares(scores.device), *call.starts, call.tables.segment),
        (shape.q_len, shape.offset, rows.start, rows.stop, keys),
        (*scores.stride()[:3], *out.stride()[:3]),
        {
            "SAMPLES": SAMPLES, "BUCKETS": BUCKETS, "BN": call.config.tile.block_n, "HAS_START": call.padded,
            "PACKED": call.packed, "PORTABLE": portable,
        },
        num_warps=ORDER_WARPS,
    )  # fmt: skip
    return out[..., :keys]


def rank(representative: Tensor, k: Tensor, call: Call, rows: range, portable: bool | None = None) -> Tensor:
    """The order of the prefixes of all segments that begin in `rows`: `score`, then `order`."""
    return order(score(representative, k, call, rows), call, rows, portable)


@lru_cache(maxsize=8)
def bucket_shares(device: torch.device) -> Tensor:
    """The share of a row before the end of each bucket but the last, float32 [BUCKETS]; the last repeats."""
    shares = FINEST * (COARSEST / FINEST) ** torch.linspace(0, 1, BUCKETS - 1, dtype=torch.float64)
    return torch.cat((shares, shares[-1:])).to(device, torch.float32)
