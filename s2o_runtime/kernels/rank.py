"""Algorithm 1: rank the prefix of every segment.

Two kernels make the scores, representatives first; torch sorts them. The rows of q are cut into slices of
whole segments, so that the scores of one slice fit a fixed workspace at any length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from s2o_runtime.config import LayerConfig
from s2o_runtime.kernels.layout import window_start
from s2o_runtime.kernels.tables import head_tables
from s2o_runtime.shapes import CallShape

REPRESENTATIVE_ROWS = 64
SCORE_SEGMENTS = 16
SCORE_KEYS = 128
ROW_ALIGNMENT = 16


@triton.jit(do_not_specialize=["q_len", "offset", "row_begin"])
def _representatives(
    Q, REP, KV_START, SEGMENT, q_len, offset, row_begin,
    stride_qb, stride_qh, stride_ql, stride_rb, stride_rh, stride_rn,
    D: tl.constexpr, ROWS: tl.constexpr, HAS_START: tl.constexpr,
):  # fmt: skip
    """REP[b, h, n] = mean of the queries of segment n that do not stand before kv_start."""
    n = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2)
    segment = tl.load(SEGMENT + h)
    start = tl.load(KV_START + b).to(tl.int32) if HAS_START else 0
    begin = row_begin + n * segment
    end = tl.minimum(begin + segment, q_len)
    begin = tl.maximum(begin, start - offset)
    if (segment > 0) & (begin < end):
        offs_d = tl.arange(0, D)
        total = tl.zeros([D], tl.float32)
        base = Q + b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
        for row in range(begin, end, ROWS):
            rows = row + tl.arange(0, ROWS)
            q = tl.load(
                base + rows[:, None].to(tl.int64) * stride_ql + offs_d[None, :], mask=rows[:, None] < end, other=0.0
            )
            total += tl.sum(q.to(tl.float32), 0)
        mean = total / (end - begin).to(tl.float32)
        out = REP + b.to(tl.int64) * stride_rb + h.to(tl.int64) * stride_rh + n * stride_rn
        tl.store(out + offs_d, mean.to(REP.dtype.element_ty))


@triton.jit(do_not_specialize=["kv_len", "offset", "row_begin", "segments", "keys"])
def _scores(
    REP, K, SCORE, KV_START, SEGMENT, kv_len, offset, row_begin, segments, keys,
    stride_rb, stride_rh, stride_rn, stride_kb, stride_kh, stride_kl, stride_sb, stride_sh, stride_sn,
    GROUP: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    HAS_START: tl.constexpr,
):  # fmt: skip
    """SCORE[b, h, n, t] = <REP[b, h, n], K[t]> for the prefix of segment n, -inf elsewhere."""
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
        for n0 in range(0, segments, BS):
            n = n0 + tl.arange(0, BS)
            r = tl.load(rep + n[:, None] * stride_rn + offs_d[None, :], mask=n[:, None] < segments, other=0.0)
            score = tl.dot(r, k, input_precision="ieee")
            first = window_start(row_begin // segment + n, segment, offset, start, BN)
            prefix = (t[None, :] >= start) & (t[None, :] < first[:, None])
            tl.store(
                out + n[:, None].to(tl.int64) * stride_sn + t[None, :],
                tl.where(prefix, score, float("-inf")),
                mask=(n[:, None] < segments) & (t[None, :] < keys),
            )


def rank(
    q: Tensor, k: Tensor, config: LayerConfig, shape: CallShape, kv_start: Tensor | None, rows: range
) -> tuple[Tensor, Tensor]:
    """Scores and order of the prefixes of all segments that begin in `rows`.

    q: [B, Hq, Lq, D]; k: [B, Hkv, Lk, D]; rows begins at a multiple of every segment.
    Returns scores, float32 [B, Hq, N, P], -inf outside a segment's prefix, and the order, int32
    [B, Hq, N, P], indices into k; only the first (prefix length) entries of a row mean anything.
    Heads with longer segments use fewer than the N rows; dense heads none.
    """
    tables = head_tables(config, q.device)
    shortest = min(head.segment for head in config.heads if head.mode == "s2o")
    segments = -(-len(rows) // shortest)
    keys = shape.offset + rows.start + (segments - 1) * shortest
    keys = -(-keys // ROW_ALIGNMENT) * ROW_ALIGNMENT  # one compiled kernel for all lengths
    representative = q.new_zeros(shape.batch, shape.query_heads, segments, shape.head_dim)
    scores = torch.full(
        (shape.batch, shape.query_heads, segments, keys), float("-inf"), dtype=torch.float32, device=q.device
    )
    start = kv_start if kv_start is not None else tables.segment
    _representatives[(segments, shape.query_heads, shape.batch)](
        q, representative, start, tables.segment, shape.q_len, shape.offset, rows.start,
        *q.stride()[:3], *representative.stride()[:3],
        D=shape.head_dim, ROWS=REPRESENTATIVE_ROWS, HAS_START=kv_start is not None,
    )  # fmt: skip
    if keys:
        _scores[(triton.cdiv(keys, SCORE_KEYS), shape.query_heads, shape.batch)](
            representative, k, scores, start, tables.segment, shape.kv_len, shape.offset, rows.start, segments, keys,
            *representative.stride()[:3], *k.stride()[:3], *scores.stride()[:3],
            GROUP=shape.group, D=shape.head_dim, BS=SCORE_SEGMENTS, BK=SCORE_KEYS,
            BN=config.tile.block_n, HAS_START=kv_start is not None,
        )  # fmt: skip
    order = scores.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return scores, order
