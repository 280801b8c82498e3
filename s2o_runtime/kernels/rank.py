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

from s2o_runtime.config import LayerConfig
from s2o_runtime.kernels.layout import LOG2E, window_start
from s2o_runtime.kernels.tables import head_tables
from s2o_runtime.shapes import CallShape

REPRESENTATIVE_ROWS = 64
SCORE_KEYS = 128
ROW_ALIGNMENT = 16
SAMPLES = 1024
BINS = 256
BUCKETS = 32
FINEST = 1 / 256  # share of the row in the first bucket; the shares grow geometrically to 1
ORDER_KEYS = 1024
SCORE_LIMIT = 60000.0


@triton.jit(do_not_specialize=["q_len", "offset", "row_begin"])
def _representatives(
    Q, REP, KV_START, SEGMENT, qk_scale, q_len, offset, row_begin,
    stride_qb, stride_qh, stride_ql, stride_rb, stride_rh, stride_rn,
    D: tl.constexpr, ROWS: tl.constexpr, HAS_START: tl.constexpr,
):  # fmt: skip
    """REP[b, h, n] = scaled mean of the queries of segment n that do not stand before kv_start."""
    n = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2)
    segment = tl.load(SEGMENT + h)
    start = tl.load(KV_START + b).to(tl.int32) if HAS_START else 0
    begin = row_begin + n * segment
    end = tl.minimum(begin + segment, q_len)
    begin = tl.maximum(begin, start - offset)
    if segment > 0:
        offs_d = tl.arange(0, D)
        total = tl.zeros([D], tl.float32)
        base = Q + b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
        for row in range(begin, end, ROWS):
            rows = row + tl.arange(0, ROWS)
            q = tl.load(
                base + rows[:, None].to(tl.int64) * stride_ql + offs_d[None, :], mask=rows[:, None] < end, other=0.0
            )
            total += tl.sum(q.to(tl.float32), 0)
        mean = total * (qk_scale / tl.maximum(end - begin, 1).to(tl.float32))
        out = REP + b.to(tl.int64) * stride_rb + h.to(tl.int64) * stride_rh + n * stride_rn
        tl.store(out + offs_d, mean.to(REP.dtype.element_ty))


@triton.jit(do_not_specialize=["kv_len", "offset", "row_begin", "segments", "keys"])
def _scores(
    REP, K, SCORE, KV_START, SEGMENT, limit, kv_len, offset, row_begin, segments, keys,
    stride_rb, stride_rh, stride_rn, stride_kb, stride_kh, stride_kl, stride_sb, stride_sh, stride_sn,
    GROUP: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    HAS_START: tl.constexpr,
):  # fmt: skip
    """SCORE[b, h, n, t] = <REP[b, h, n], K[t]> in base 2 for the prefix of segment n; other entries are not written."""
    block = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2)
    segment = tl.load(SEGMENT + h)
    if segment > 0:
        start = tl.load(KV_START + b).to(tl.int32) if HAS_START else 0
        offs_d = tl.arange(0, D)
        t = block * BK + tl.arange(0, BK)
        key = K + b.to(tl.int64) * stride_kb + (h // GROUP).to(tl.int64) * stride_kh
        k = tl.load(key + t[None, :].to(tl.int64) * stride_kl + offs_d[:, None], mask=t[None, :] < kv_len, other=0.0)
        rep = REP + b.to(tl.int64) * stride_rb + h.to(tl.int64) * stride_rh
        out = SCORE + b.to(tl.int64) * stride_sb + h.to(tl.int64) * stride_sh
        # segments whose prefix ends before this block have no use for it
        none = tl.maximum(block * BK - offset - row_begin, 0) // segment
        for n0 in range(none // BS * BS, segments, BS):
            n = n0 + tl.arange(0, BS)
            r = tl.load(rep + n[:, None] * stride_rn + offs_d[None, :], mask=n[:, None] < segments, other=0.0)
            score = tl.minimum(tl.maximum(tl.dot(r, k, input_precision="ieee"), -limit), limit)
            first = window_start(row_begin // segment + n, segment, offset, start, BN)
            prefix = (t[None, :] >= start) & (t[None, :] < tl.minimum(first, keys)[:, None])
            tl.store(
                out + n[:, None].to(tl.int64) * stride_sn + t[None, :],
                score.to(SCORE.dtype.element_ty),
                mask=prefix & (n[:, None] < segments),
            )


@triton.jit
def _bucket(score, highest, per_bin, table, BINS: tl.constexpr):
    """The bucket of each score: a linear bin (bin 0 is everything above `highest`), then a table to buckets."""
    position = tl.minimum(tl.maximum((highest - score) * per_bin + 1.0, 0.0), BINS - 1.0)
    return tl.gather(table, position.to(tl.int32), 0)


@triton.jit(do_not_specialize=["offset", "row_begin", "rows_end"])
def _order(
    SCORE, ORDER, SHARE_OF_RANK, KV_START, SEGMENT, offset, row_begin, rows_end,
    stride_sb, stride_sh, stride_sn, stride_ib, stride_ih, stride_in,
    SAMPLES: tl.constexpr, BINS: tl.constexpr, BUCKETS: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr,
    HAS_START: tl.constexpr,
):  # fmt: skip
    """ORDER[b, h, n] = the prefix keys of segment n by falling bucket, ascending inside a bucket."""
    # long prefixes first
    n = tl.num_programs(0) - 1 - tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2)
    segment = tl.load(SEGMENT + h)
    start = tl.load(KV_START + b).to(tl.int32) if HAS_START else 0
    first = window_start(row_begin // tl.maximum(segment, 1) + n, segment, offset, start, BN)
    prefix = first - start
    if (segment > 0) & (row_begin + n * segment < rows_end) & (prefix > 0):
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
        per_bin = (BINS - 2.0) / tl.maximum(highest - lowest, 1e-6)
        centre = highest - (tl.arange(0, BINS).to(tl.float32) - 0.5) / per_bin
        table = tl.minimum(tl.sum((centre[:, None] < edges[None, :]).to(tl.int32), 1), BUCKETS - 1)

        # how many keys each bucket holds
        offs = tl.arange(0, BLOCK)
        count = tl.zeros([BUCKETS], tl.int32)
        for t in range(0, prefix, BLOCK):
            inside = t + offs < prefix
            s = tl.load(score + t + offs, mask=inside, other=0.0).to(tl.float32)
            bucket = _bucket(s, highest, per_bin, table, BINS)
            count += tl.histogram(bucket, BUCKETS, mask=inside)
        base = tl.cumsum(count, 0) - count

        # where each key goes: its bucket's base, plus the keys of its bucket before it. Four counters of
        # 16 bits share one int64, so one scan ranks four buckets.
        for t in range(0, prefix, BLOCK):
            inside = t + offs < prefix
            s = tl.load(score + t + offs, mask=inside, other=0.0).to(tl.float32)
            bucket = _bucket(s, highest, per_bin, table, BINS)
            lane = (bucket % 4 * 16).to(tl.int64)
            before = tl.zeros([BLOCK], tl.int32)
            for word in tl.static_range(BUCKETS // 4):
                mine = inside & (bucket // 4 == word)
                one = tl.where(mine, (tl.full([BLOCK], 1, tl.int64) << lane), 0)
                ranks = tl.cumsum(one, 0) - one
                before = tl.where(mine, ((ranks >> lane) & 0xFFFF).to(tl.int32), before)
            place = tl.gather(base, bucket, 0) + before
            tl.store(order + place, start + t + offs, mask=inside)
            base += tl.histogram(bucket, BUCKETS, mask=inside)


def rank(
    q: Tensor, k: Tensor, config: LayerConfig, shape: CallShape, kv_start: Tensor | None, rows: range, scale: float
) -> tuple[Tensor, Tensor]:
    """Scores and order of the prefixes of all segments that begin in `rows`.

    q: [B, Hq, Lq, D]; k: [B, Hkv, Lk, D]; rows begins at a multiple of every segment.
    Returns scores in base 2, float16 [B, Hq, N, P], and the order, int32 [B, Hq, N, P], indices into k. Of a row of
    scores only the prefix's entries are written, of a row of the order only the first (prefix length).
    Heads with longer segments use fewer than the N rows; dense heads none.
    """
    tables = head_tables(config, q.device)
    shortest = min(head.segment for head in config.heads if head.mode == "s2o")
    segments = -(-len(rows) // shortest)
    keys = shape.offset + rows.start + (segments - 1) * shortest
    keys = max(1, -(-keys // ROW_ALIGNMENT)) * ROW_ALIGNMENT  # one compiled kernel for all lengths
    size = (shape.batch, shape.query_heads, segments)
    representative = q.new_empty(*size, shape.head_dim)
    scores = torch.empty(*size, keys, dtype=torch.float16, device=q.device)
    order = torch.empty(*size, keys, dtype=torch.int32, device=q.device)
    start = kv_start if kv_start is not None else tables.segment
    grid = (segments, shape.query_heads, shape.batch)
    _representatives[grid](
        q, representative, start, tables.segment, scale * LOG2E, shape.q_len, shape.offset, rows.start,
        *q.stride()[:3], *representative.stride()[:3],
        D=shape.head_dim, ROWS=REPRESENTATIVE_ROWS, HAS_START=kv_start is not None,
    )  # fmt: skip
    _scores[(triton.cdiv(keys, SCORE_KEYS), shape.query_heads, shape.batch)](
        representative, k, scores, start, tables.segment, SCORE_LIMIT, shape.kv_len, shape.offset, rows.start,
        segments, keys, *representative.stride()[:3], *k.stride()[:3], *scores.stride()[:3],
        GROUP=shape.group, D=shape.head_dim, BS=64 if segments > 32 else 32 if segments > 16 else 16,
        BK=SCORE_KEYS, BN=config.tile.block_n, HAS_START=kv_start is not None,
    )  # fmt: skip
    _order[grid](
        scores, order, bucket_shares(q.device), start, tables.segment, shape.offset, rows.start, rows.stop,
        *scores.stride()[:3], *order.stride()[:3],
        SAMPLES=SAMPLES, BINS=BINS, BUCKETS=BUCKETS, BLOCK=ORDER_KEYS, BN=config.tile.block_n,
        HAS_START=kv_start is not None,
    )  # fmt: skip
    return scores, order


@lru_cache(maxsize=8)
def bucket_shares(device: torch.device) -> Tensor:
    """The share of a row before the end of each bucket, float32 [BUCKETS]: geometric from `FINEST` to 1."""
    return (FINEST ** torch.linspace(1, 0, BUCKETS, dtype=torch.float64)).to(device, torch.float32)
