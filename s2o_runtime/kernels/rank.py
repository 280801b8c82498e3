"""Algorithm 1: rank the prefix of every segment.

Three kernels: the representatives, their scores with every key, and a coarse order. A full sort would cost more
than it saves, so keys are put into `BUCKETS` buckets by score and keep their positions inside a bucket, which
is also kind to memory. The buckets' edges are quantiles of a sample of the row, finer where scores are high,
because most heads stop early.
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

REPRESENTATIVE_WARPS = 8
ORDER_WARPS = 8
UNROLL = 4
SCORE_REGISTERS = 255  # said aloud, or the compiler spills a few to fit one more program on the SM
SCORE_KEYS = 128
ROW_ALIGNMENT = 16
SAMPLES = 1024
BUCKETS = 32  # one for each lane of a warp
FINEST, COARSEST = 1 / 256, 3 / 4  # shares of the row before the end of the first and of the last but one bucket
RANK_BYTES = 6  # of workspace for each key of a row: a float16 score and an int32 index
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
    GROUP: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    HAS_START: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """SCORE[b, h, n, t] = <REP[b, h, n0 + n], K[t]> in base 2 for the prefix of segment n0 + n, the n-th in the rows.

    Other entries are not written. A program reads its keys once for all query heads of their KV head.
    """
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    b = tl.program_id(2)
    start = tl.load(KV_START + b).to(tl.int32) if HAS_START else 0
    _, k_first, q_len, offset = sequence(b, CU_Q, CU_K, q_len, offset, PACKED)
    kv_len = offset + q_len
    if block * BK < kv_len:
        offs_d = tl.arange(0, D)
        t = block * BK + tl.arange(0, BK)
        key = K + b.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
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
                # segments whose prefix ends before this block have no use for it
                none = tl.maximum(block * BK - offset - row_begin, 0) // segment
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
    """The bucket of each score [W, 32]: a linear bin (bin 0 is above `highest`), then a table.

    table: int32 [W, 32], four bins of 8 bits in a word. What is not inside counts for the last bucket.
    """
    position = tl.minimum(tl.maximum((highest - score) * per_bin + 1.25, 0.0), 4.0 * BUCKETS - 1.0).to(tl.int32)
    word = tl.gather(table, position >> 2, 1)
    return tl.where(inside, (word >> ((position & 3) * 8)) & 0xFF, BUCKETS - 1)


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


@triton.jit(do_not_specialize=["q_len", "offset", "row_begin", "rows_end"])
def _order(
    SCORE, ORDER, SHARE_OF_RANK, KV_START, CU_Q, CU_K, SEGMENT, q_len, offset, row_begin, rows_end,
    stride_sb, stride_sh, stride_sn, stride_ib, stride_ih, stride_in,
    SAMPLES: tl.constexpr, BUCKETS: tl.constexpr, WARPS: tl.constexpr, UNROLL: tl.constexpr, BN: tl.constexpr,
    HAS_START: tl.constexpr, PACKED: tl.constexpr, PORTABLE: tl.constexpr,
):  # fmt: skip
    """ORDER[b, h, n] = the prefix keys of the n-th segment in the rows, by falling bucket, ascending inside a bucket.

    A stable counting sort: every warp owns a stretch of the row, every lane one key of a vector of 32 and one
    bucket, so a few ballots find 32 places and the loops are free of barriers. The layout of [W, 32] tensors is one
    element a lane and one row a warp (tests/aot.py checks it).
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
        below = tl.sum((centre[:, :, None] < edges[None, None, :]).to(tl.int32), 2)
        packed = tl.sum(tl.minimum(below, BUCKETS - 1) << (tl.arange(0, 4)[None, :] * 8), 1)
        table = tl.broadcast_to(packed[None, :], [WARPS, BUCKETS])

        # how many keys of each bucket each warp's stretch holds
        stretch = tl.cdiv(prefix, WARPS * BUCKETS * UNROLL) * BUCKETS * UNROLL
        mine = tl.arange(0, WARPS)[:, None] * stretch + tl.arange(0, BUCKETS)[None, :]
        count = tl.zeros([WARPS, BUCKETS], tl.int32)
        for t in range(0, stretch, BUCKETS * UNROLL):
            for u in tl.static_range(UNROLL):
                key = mine + t + u * BUCKETS
                inside = key < prefix
                s = tl.load(score + key, mask=inside, other=0.0).to(tl.float32)
                count = _count(_bucket_of(s, highest, per_bin, table, inside, BUCKETS), count, BUCKETS, PORTABLE)

        # where each warp's share of each bucket begins, then where each key goes
        total = tl.sum(count, 0)
        base = (tl.cumsum(total, 0) - total)[None, :] + tl.cumsum(count, 0) - count
        for t in range(0, stretch, BUCKETS * UNROLL):
            for u in tl.static_range(UNROLL):
                key = mine + t + u * BUCKETS
                inside = key < prefix
                s = tl.load(score + key, mask=inside, other=0.0).to(tl.float32)
                place, base = _place(_bucket_of(s, highest, per_bin, table, inside, BUCKETS), base, BUCKETS, PORTABLE)
                tl.store(order + place, start + key, mask=inside)


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
        {
            "D": shape.head_dim,
            "ROWS": representative_rows(shape.head_dim),
            "HAS_START": call.padded,
            "PACKED": call.packed,
        },
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
        (-(-keys // SCORE_KEYS), shape.kv_heads, shape.batch),
        (representative, k, scores, *call.starts, call.tables.segment),
        (SCORE_LIMIT, shape.q_len, shape.offset, rows.start, rows.stop, keys),
        (*representative.stride()[:3], *k.stride()[:3], *scores.stride()[:3]),
        {
            "GROUP": shape.group, "D": shape.head_dim, "BS": rows_at_once, "BK": SCORE_KEYS,
            "BN": call.config.tile.block_n, "HAS_START": call.padded, "PACKED": call.packed,
        },
        num_warps=score_warps(rows_at_once),
        maxnreg=SCORE_REGISTERS,
    )  # fmt: skip
    return scores


def representative_rows(head_dim: int) -> int:
    """Rows that the kernel `_representatives` loads at once."""
    return 128 if head_dim <= 128 else 64


def score_warps(rows_at_once: int) -> int:
    """Warps of the kernel `_scores` for a block of 16, 32 or 64 segments."""
    return 8 if rows_at_once == 64 else 4


def order(scores: Tensor, call: Call, rows: range, portable: bool | None = None) -> Tensor:
    """Algorithm 1, line 19, coarsely: the prefixes' keys by falling score, int32 [B, Hq, N', P].

    scores: [B, Hq, N', P] as `score` gave them. portable: without inline PTX, as it is by default in the
    interpreter and for other vendors. Of a row only the first (prefix length) entries are written: positions in a
    sequence.
    """
    if portable is None:
        portable = interpreted() or torch.version.cuda is None
    out = torch.empty(scores.shape, dtype=torch.int32, device=scores.device)
    shape = call.shape
    launch(
        _order,
        (scores.shape[2], shape.query_heads, shape.batch),
        (scores, out, bucket_shares(scores.device), *call.starts, call.tables.segment),
        (shape.q_len, shape.offset, rows.start, rows.stop),
        (*scores.stride()[:3], *out.stride()[:3]),
        {
            "SAMPLES": SAMPLES, "BUCKETS": BUCKETS, "WARPS": ORDER_WARPS, "UNROLL": UNROLL,
            "BN": call.config.tile.block_n, "HAS_START": call.padded, "PACKED": call.packed, "PORTABLE": portable,
        },
        num_warps=ORDER_WARPS,
    )  # fmt: skip
    return out


def rank(representative: Tensor, k: Tensor, call: Call, rows: range, portable: bool | None = None) -> Tensor:
    """The order of the prefixes of all segments that begin in `rows`: `score`, then `order`."""
    return order(score(representative, k, call, rows), call, rows, portable)


@lru_cache(maxsize=8)
def bucket_shares(device: torch.device) -> Tensor:
    """The share of a row before the end of each bucket but the last, float32 [BUCKETS]; the last repeats."""
    shares = FINEST * (COARSEST / FINEST) ** torch.linspace(0, 1, BUCKETS - 1, dtype=torch.float64)
    return torch.cat((shares, shares[-1:])).to(device, torch.float32)
