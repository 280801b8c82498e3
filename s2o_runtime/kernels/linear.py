"""The linear tail: all keys behind a segment's first chunk, to first order in the queries (docs/method.md).

A head with a linear tail computes its window and the first chunk of its order. With w the softmax weights of the
segment's representative c over the other keys of the prefix, mu and a the means of keys and values under w and C their
covariance, a query q has of these keys the log-sum-exp of c plus (q - c) mu, and the mean value a + (q - c) C. Three
kernels: the scores of what the first chunk holds become -inf; one pass over the prefix, in its natural order, sums up
the rest for each segment; and after the prefill every row merges its estimate into its output and log-sum-exp.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from s2o_runtime.kernels.call import Call
from s2o_runtime.kernels.launch import launch, strides
from s2o_runtime.kernels.primitives import LINEAR, LN2, LOG2E, RCP_LN2, log_sum_exp, sequence, window_start
from s2o_runtime.kernels.rank.order import Ranked

MASK_STEPS = 256  # that a program of `_mask_visited` marks at once
MASK_WARPS = 4
SUM_SCORES = 1024  # of which a program of `_linear_sums` takes the largest at once
SUM_STAGES = 2
ADD_ROWS = 64  # which divides every segment
ADD_COLUMNS = 64
# In base 2, for a weight that its score in float16 promised to be near 1 or below.
LARGEST_WEIGHT = tl.constexpr(64.0)


class Linear(NamedTuple):
    """What the keys behind the first chunk are to each segment of a slice of rows; N' counts its segments.

    log_mass: float32 [B, Hq, N'], the log-sum-exp in base 2 of the representative's scores, -inf without such a key;
    key, value: float32 [B, Hq, N', D], the means under the representative's weights;
    covariance: [B, Hq, N', D, D], of keys (first) and values under these weights, in the type `covariance_type` gives.
    Only entries of heads with a linear tail are written, and of segments without such a key only `log_mass`.
    """

    log_mass: Tensor
    key: Tensor
    value: Tensor
    covariance: Tensor


@triton.jit(do_not_specialize=["q_len", "offset", "row_begin", "rows_end", "chunk"])
def _mask_visited(
    SCORE, ORDER, KV_START, CU_Q, CU_K, SEGMENT, FLAGS, q_len, offset, row_begin, rows_end, chunk,
    stride_sb, stride_sh, stride_sn, stride_ib, stride_ih, stride_in,
    STEPS: tl.constexpr, BN: tl.constexpr, GRAIN: tl.constexpr, HAS_START: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """SCORE[b, h, n, g] = -inf for the steps g in the first chunk of the order of segment n, of heads with LINEAR.

    Programs: (N', Hq, B). N' counts the segments of the slice of rows row_begin .. rows_end. chunk: tiles of BN keys; a
    shorter prefix is masked as a whole. STEPS: steps at once.

        SCORE               float16 [B, Hq, N', P / GRAIN], strides s: as `scores._scores` wrote it
        ORDER               int32 [B, Hq, N', P / GRAIN], strides i: as `order._order` wrote it
        KV_START            int64 or int32 [B]: the first key that counts (HAS_START)
        CU_Q, CU_K          int32 [B + 1]: where packed sequences begin (PACKED)
        SEGMENT, FLAGS      int32 [Hq]: as in `call.HeadTables`
    """
    n = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2)
    segment = tl.load(SEGMENT + h)
    start = tl.load(KV_START + b).to(tl.int32) if HAS_START else 0
    _, _, q_len, offset = sequence(b, CU_Q, CU_K, q_len, offset, PACKED)
    inside = row_begin + n * segment < tl.minimum(rows_end, q_len)
    if (segment > 0) & ((tl.load(FLAGS + h) & LINEAR) != 0) & inside:
        first = window_start(row_begin // tl.maximum(segment, 1) + n, segment, offset, start, BN)
        visited = tl.minimum(first - start, chunk * BN) // GRAIN
        score = SCORE + b.to(tl.int64) * stride_sb + h.to(tl.int64) * stride_sh + n.to(tl.int64) * stride_sn
        order = ORDER + b.to(tl.int64) * stride_ib + h.to(tl.int64) * stride_ih + n.to(tl.int64) * stride_in
        for i in range(0, visited, STEPS):
            at = i + tl.arange(0, STEPS)
            key = tl.load(order + at, mask=at < visited, other=0)
            nothing = tl.full([STEPS], float("-inf"), SCORE.dtype.element_ty)
            tl.store(score + (key - start) // GRAIN, nothing, mask=at < visited)


@triton.jit(do_not_specialize=["q_len", "offset", "row_begin", "rows_end", "segments", "parts"])
def _linear_sums(
    REP, LOG_SUM, K, V, SCORE, LOG_MASS, MEAN_KEY, MEAN_VALUE, COVARIANCE, KV_START, CU_Q, CU_K, SEGMENT, FLAGS,
    q_len, offset, row_begin, rows_end, segments, parts,
    stride_rb, stride_rh, stride_rn, stride_kb, stride_kh, stride_kl, stride_vb, stride_vh, stride_vl,
    stride_sb, stride_sh, stride_sn,
    GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, SCORES: tl.constexpr, BN: tl.constexpr,
    GRAIN: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, HAS_START: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The sums of `Linear` for a segment and BD of its value columns, over the prefix's steps whose SCORE is not -inf.

    With s_j = REP . k_j and w_j = 2^(s_j - most): LOG_MASS = most + log2 W, W = sum w_j; MEAN_KEY = sum w_j k_j / W;
    MEAN_VALUE = sum w_j v_j / W; COVARIANCE = sum w_j k_j v_j^T / W - MEAN_KEY MEAN_VALUE^T. `most` is the largest
    score that is left, so that no weight overflows. Products are of keys less the mean of BK keys that lie evenly in
    the prefix, so that what all keys have in common is not rounded; rounded products make up both terms of the
    covariance.

    Programs: (N' * D / BD, the last segments first; Hq; B), for heads with LINEAR. N' counts the segments of the slice
    of rows row_begin .. rows_end. BK: keys at once; SCORES: scores at once; STAGES: of Triton's pipeline. T is the
    input type. Products of float16 are in TF32, which has as many digits, and room for the weights.

        REP                 T [B, Hq, parts, D], strides r: as `means._representatives` wrote it, in base 2
        LOG_SUM             float32 [B, Hq, parts]: as `scores._log_sums` wrote it
        K, V                T [B, Hkv, Lk, D], strides k and v
        SCORE               float16 [B, Hq, N', P / GRAIN], strides s: as `_mask_visited` left it
        LOG_MASS            float32 [B, Hq, N']
        MEAN_KEY            float32 [B, Hq, N', D]
        MEAN_VALUE          float32 [B, Hq, N', D]
        COVARIANCE          T or float32 [B, Hq, N', D, D]
        KV_START            int64 or int32 [B]: the first key that counts (HAS_START)
        CU_Q, CU_K          int32 [B + 1]: where packed sequences begin (PACKED)
        SEGMENT, FLAGS      int32 [Hq]: as in `call.HeadTables`
    """
    BLOCKS: tl.constexpr = D // BD
    # keys whose entries the program's threads hold at once, 8 each: sums over further ones need no shuffle
    KEY_SUMS: tl.constexpr = 256 * WARPS // D
    VALUE_SUMS: tl.constexpr = 256 * WARPS // BD
    # long prefixes first
    n = (tl.num_programs(0) - 1 - tl.program_id(0)) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    h = tl.program_id(1)
    b = tl.program_id(2)
    segment = tl.load(SEGMENT + h)
    start = tl.load(KV_START + b).to(tl.int32) if HAS_START else 0
    _, k_first, q_len, offset = sequence(b, CU_Q, CU_K, q_len, offset, PACKED)
    inside = row_begin + n * segment < tl.minimum(rows_end, q_len)
    if (segment > 0) & ((tl.load(FLAGS + h) & LINEAR) != 0) & inside:
        of_call = row_begin // tl.maximum(segment, 1) + n
        prefix = window_start(of_call, segment, offset, start, BN) - start
        steps = prefix // GRAIN
        of_head = (b * tl.num_programs(1) + h).to(tl.int64)
        of_slice = of_head * segments + n
        score = SCORE + b.to(tl.int64) * stride_sb + h.to(tl.int64) * stride_sh + n.to(tl.int64) * stride_sn
        best = tl.full([SCORES], float("-inf"), tl.float32)
        for i in range(0, steps, SCORES):
            step = i + tl.arange(0, SCORES)
            s = tl.load(score + step, mask=step < steps, other=float("-inf"))
            best = tl.maximum(best, s.to(tl.float32))
        highest = tl.max(best, 0)
        if highest == float("-inf"):
            tl.store(LOG_MASS + of_slice, highest)
        else:
            most = highest + tl.load(LOG_SUM + of_head * parts + of_call)
            offs_d = tl.arange(0, D)
            offs_c = block * BD + tl.arange(0, BD)
            offs_k = tl.arange(0, BK)
            rep = REP + b.to(tl.int64) * stride_rb + h.to(tl.int64) * stride_rh + of_call.to(tl.int64) * stride_rn
            r = tl.load(rep + offs_d).to(tl.float32)
            row = (k_first + start).to(tl.int64)
            key = K + b.to(tl.int64) * stride_kb + (h // GROUP).to(tl.int64) * stride_kh + row * stride_kl
            value = V + b.to(tl.int64) * stride_vb + (h // GROUP).to(tl.int64) * stride_vh + row * stride_vl
            sampled = (offs_k.to(tl.int64) * prefix // BK)[None, :]
            middle = tl.sum(tl.load(key + sampled * stride_kl + offs_d[:, None]).to(tl.float32), 1) / BK
            at_middle = tl.sum(r * middle, 0) - most

            mass = tl.zeros([BK], tl.float32)
            keys = tl.zeros([D, KEY_SUMS], tl.float32)
            values = tl.zeros([VALUE_SUMS, BD], tl.float32)
            products = tl.zeros([D, BD], tl.float32)
            for t0 in tl.range(0, prefix, BK, num_stages=STAGES):
                t = t0 + offs_k
                there = t < prefix
                k = tl.load(key + t[None, :].to(tl.int64) * stride_kl + offs_d[:, None], mask=there[None, :], other=0.0)
                v = tl.load(
                    value + t[:, None].to(tl.int64) * stride_vl + offs_c[None, :], mask=there[:, None], other=0.0
                )
                left = tl.load(score + t // GRAIN, mask=there, other=float("-inf")).to(tl.float32)
                away = k.to(tl.float32) - middle[:, None]
                s = tl.sum(away * r[:, None], 0) + at_middle
                w = tl.where(left > float("-inf"), tl.exp2(tl.minimum(s, LARGEST_WEIGHT)), 0.0)
                away *= w[None, :]
                if K.dtype.element_ty == tl.bfloat16:
                    rounded = away.to(tl.bfloat16)
                    products = tl.dot(rounded, v, products)
                    away = rounded.to(tl.float32)
                elif K.dtype.element_ty == tl.float16:
                    products = tl.dot(away, v.to(tl.float32), products, input_precision="tf32")
                else:
                    products = tl.dot(away, v.to(tl.float32), products, input_precision="ieee")
                mass += w
                keys += tl.sum(tl.reshape(away, [D, BK // KEY_SUMS, KEY_SUMS]), 1)
                values += tl.sum(tl.reshape(w[:, None] * v.to(tl.float32), [BK // VALUE_SUMS, VALUE_SUMS, BD]), 0)

            total = tl.sum(mass, 0)
            mean_key = tl.sum(keys, 1) / total
            mean_value = tl.sum(values, 0) / total
            tl.store(MEAN_VALUE + of_slice * D + offs_c, mean_value)
            covariance = products / total - mean_key[:, None] * mean_value[None, :]
            out = COVARIANCE + of_slice * (D * D) + offs_d[:, None] * D + offs_c[None, :]
            tl.store(out, covariance.to(COVARIANCE.dtype.element_ty))
            if block == 0:
                tl.store(LOG_MASS + of_slice, most + tl.log2(total))
                tl.store(MEAN_KEY + of_slice * D + offs_d, middle + mean_key)


@triton.jit(do_not_specialize=["q_len", "offset", "row_begin", "segments", "stride_eb", "stride_eh"])
def _add_linear(
    Q, REP, LOG_MASS, MEAN_KEY, MEAN_VALUE, COVARIANCE, OUT, LSE, KV_START, CU_Q, CU_K, SEGMENT, FLAGS,
    qk_scale, q_len, offset, row_begin, segments,
    stride_qb, stride_qh, stride_ql, stride_rb, stride_rh, stride_rn, stride_ob, stride_oh, stride_ol,
    stride_eb, stride_eh,
    D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr, HAS_START: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Merge the linear tail of BM rows into OUT and LSE, for heads with LINEAR.

    With d = Q * qk_scale - REP, in base 2, the keys that are left have for a row the mass 2^(LOG_MASS + d MEAN_KEY) and
    the mean value MEAN_VALUE + d COVARIANCE ln 2. Rows before the first key that counts stay as they are, and so do all
    of a segment without such keys.

    Programs: (rows of the slice / BM, Hq, B). The slice of rows begins at row_begin, its segments are N'. BD: columns
    at once; STAGES: of Triton's pipeline. T is the input type.

        Q, OUT              T [B, Hq, Lq, D], strides q and o
        REP                 T [B, Hq, parts, D], strides r: as `means._representatives` wrote it
        LOG_MASS            float32 [B, Hq, N']: as `_linear_sums` wrote it
        MEAN_KEY            float32 [B, Hq, N', D]: likewise
        MEAN_VALUE          float32 [B, Hq, N', D]: likewise
        COVARIANCE          T or float32 [B, Hq, N', D, D]: likewise
        LSE                 float32 [B, Hq, Lq], strides e: log-sum-exp of each row's scores
        KV_START            int64 or int32 [B]: the first key that counts (HAS_START)
        CU_Q, CU_K          int32 [B + 1]: where packed sequences begin (PACKED)
        SEGMENT, FLAGS      int32 [Hq]: as in `call.HeadTables`
    """
    h = tl.program_id(1)
    b = tl.program_id(2)
    row0 = row_begin + tl.program_id(0) * BM
    segment = tl.load(SEGMENT + h)
    start = tl.load(KV_START + b).to(tl.int32) if HAS_START else 0
    q_first, _, q_len, offset = sequence(b, CU_Q, CU_K, q_len, offset, PACKED)
    if (segment > 0) & ((tl.load(FLAGS + h) & LINEAR) != 0) & (row0 < q_len):
        n = row0 // tl.maximum(segment, 1)
        of_slice = (b * tl.num_programs(1) + h).to(tl.int64) * segments + n - row_begin // tl.maximum(segment, 1)
        log_mass = tl.load(LOG_MASS + of_slice)
        if log_mass > float("-inf"):
            offs_d = tl.arange(0, D)
            offs_row = tl.arange(0, BM)
            rows = row0 + offs_row
            real = (rows < q_len) & (offset + rows >= start)
            head_row = (q_first + row0).to(tl.int64)
            q_base = Q + b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh + head_row * stride_ql
            q = tl.load(q_base + offs_row[:, None] * stride_ql + offs_d[None, :], mask=real[:, None], other=0.0)
            rep = REP + b.to(tl.int64) * stride_rb + h.to(tl.int64) * stride_rh + n.to(tl.int64) * stride_rn
            away = q.to(tl.float32) * qk_scale - tl.load(rep + offs_d).to(tl.float32)[None, :]
            added = log_mass + tl.sum(away * tl.load(MEAN_KEY + of_slice * D + offs_d)[None, :], 1)
            lse = LSE + b.to(tl.int64) * stride_eb + h.to(tl.int64) * stride_eh + head_row + offs_row
            old = tl.load(lse, mask=real, other=0.0) * RCP_LN2
            most = tl.maximum(old, added)
            before = tl.exp2(old - most)
            mass = tl.exp2(added - most)
            total = before + mass
            tl.store(lse, log_sum_exp(most, total), mask=real)
            share = mass / total
            kept = before / total
            out = OUT + b.to(tl.int64) * stride_ob + h.to(tl.int64) * stride_oh + head_row * stride_ol
            for c in tl.range(0, D, BD, num_stages=STAGES):
                offs_c = c + tl.arange(0, BD)
                cov = tl.load(COVARIANCE + of_slice * (D * D) + offs_d[:, None] * D + offs_c[None, :])
                if Q.dtype.element_ty == tl.bfloat16:
                    moved = tl.dot(away.to(tl.bfloat16), cov)
                elif Q.dtype.element_ty == tl.float16:
                    moved = tl.dot(away, cov, input_precision="tf32")
                else:
                    moved = tl.dot(away, cov, input_precision="ieee")
                mean = tl.load(MEAN_VALUE + of_slice * D + offs_c)[None, :] + moved * LN2
                at = out + offs_row[:, None] * stride_ol + offs_c[None, :]
                o = tl.load(at, mask=real[:, None], other=0.0).to(tl.float32)
                o = o * kept[:, None] + mean * share[:, None]
                tl.store(at, o.to(OUT.dtype.element_ty), mask=real[:, None])


def mask_visited(ranked: Ranked, call: Call, rows: range) -> None:
    """Set the scores of what heads with a linear tail visit, the first chunk of each order, to -inf, in place.

    Args:
        ranked: as `order` gave it for these rows; nothing else may want the scores of such heads any more.
        call: the call.
        rows: query rows; they begin at a multiple of every segment.
    """
    shape, tables, score = call.shape, call.tables, ranked.score
    launch(
        _mask_visited,
        (score.shape[2], shape.query_heads, shape.batch),
        {
            "SCORE": score, "ORDER": ranked.order, **call.starts, "SEGMENT": tables.segment, "FLAGS": tables.flags,
            "q_len": shape.q_len, "offset": shape.offset, "row_begin": rows.start, "rows_end": rows.stop,
            "chunk": call.config.tile.chunk, **strides("bhn", s=score, i=ranked.order),
        },
        {
            "STEPS": MASK_STEPS, "BN": call.config.tile.block_n, "GRAIN": call.config.grain,
            "HAS_START": call.padded, "PACKED": call.packed,
        },
        num_warps=MASK_WARPS,
    )  # fmt: skip


def linear_sums(
    representative: Tensor, log_sum: Tensor, k: Tensor, v: Tensor, ranked: Ranked, call: Call, rows: range
) -> Linear:
    """What the unvisited keys are to all segments of heads with a linear tail that begin in `rows`.

    Args:
        representative: [B, Hq, parts, D], as `means.representatives` gave its rows, in q's type.
        log_sum: float32 [B, Hq, parts], as `scores.log_sums` gave it.
        k, v: [B, Hkv, Lk, D], not in pages.
        ranked: of these rows, as `mask_visited` left it.
        call: the call.
        rows: query rows; they begin at a multiple of every segment.
    """
    shape, tables, score = call.shape, call.tables, ranked.score
    size, head_dim = score.shape[:3], shape.head_dim
    log_mass = torch.empty(size, dtype=torch.float32, device=k.device)
    key, value = (torch.empty(*size, head_dim, dtype=torch.float32, device=k.device) for _ in range(2))
    covariance = torch.empty(*size, head_dim, head_dim, dtype=covariance_type(k.dtype), device=k.device)
    columns = sum_columns(head_dim)
    launch(
        _linear_sums,
        (size[2] * (head_dim // columns), shape.query_heads, shape.batch),
        {
            "REP": representative, "LOG_SUM": log_sum, "K": k, "V": v, "SCORE": score, "LOG_MASS": log_mass,
            "MEAN_KEY": key, "MEAN_VALUE": value, "COVARIANCE": covariance, **call.starts,
            "SEGMENT": tables.segment, "FLAGS": tables.flags, "q_len": shape.q_len, "offset": shape.offset,
            "row_begin": rows.start, "rows_end": rows.stop, "segments": size[2], "parts": log_sum.shape[2],
            **strides("bhn", r=representative, s=score), **strides("bhl", k=k, v=v),
        },
        {
            "GROUP": shape.group, "D": head_dim, "BD": columns, "BK": sum_keys(head_dim, k.dtype), "SCORES": SUM_SCORES,
            "BN": call.config.tile.block_n, "GRAIN": call.config.grain, "WARPS": sum_warps(head_dim),
            "STAGES": SUM_STAGES, "HAS_START": call.padded, "PACKED": call.packed,
        },
        num_warps=sum_warps(head_dim),
    )  # fmt: skip
    return Linear(log_mass, key, value, covariance)


def add_linear(
    q: Tensor, representative: Tensor, linear: Linear, out: Tensor, lse: Tensor, call: Call, rows: range
) -> None:
    """Merge the linear tails of the query rows in `rows` into what the prefill wrote, in place.

    Args:
        q: [B, Hq, Lq, D].
        representative: [B, Hq, parts, D], as `means.representatives` gave its rows.
        linear: of these rows, as `linear_sums` gave it.
        out, lse: as `prefill.prefill` wrote them; of packed sequences one batch entry.
        call: the call.
        rows: query rows; they begin at a multiple of every segment.
    """
    shape, tables = call.shape, call.tables
    one_entry = {"stride_ob": 0, "stride_eb": 0} if call.packed else {}
    launch(
        _add_linear,
        (-(-len(rows) // ADD_ROWS), shape.query_heads, shape.batch),
        {
            "Q": q, "REP": representative, "LOG_MASS": linear.log_mass, "MEAN_KEY": linear.key,
            "MEAN_VALUE": linear.value, "COVARIANCE": linear.covariance, "OUT": out, "LSE": lse, **call.starts,
            "SEGMENT": tables.segment, "FLAGS": tables.flags, "qk_scale": call.scale * LOG2E, "q_len": shape.q_len,
            "offset": shape.offset, "row_begin": rows.start, "segments": linear.log_mass.shape[2],
            **strides("bhl", q=q, o=out), **strides("bhn", r=representative), **strides("bh", e=lse), **one_entry,
        },
        {
            "D": shape.head_dim, "BM": ADD_ROWS, "BD": min(ADD_COLUMNS, shape.head_dim),
            "STAGES": add_stages(q.dtype), "HAS_START": call.padded, "PACKED": call.packed,
        },
        num_warps=add_warps(shape.head_dim),
    )  # fmt: skip


def sum_keys(head_dim: int, dtype: torch.dtype) -> int:
    """Keys of `dtype` that a program of `_linear_sums` adds at once; products in TF32 take twice the registers."""
    return 64 if head_dim <= (128 if dtype == torch.bfloat16 else 64) else 32


def sum_columns(head_dim: int) -> int:
    """Value columns of a program of `_linear_sums`: as many as registers hold sums of."""
    return head_dim if head_dim <= 128 else 64


def sum_warps(head_dim: int) -> int:
    """Warps of `_linear_sums`."""
    return 4 if head_dim <= 64 else 8


def add_warps(head_dim: int) -> int:
    """Warps of `_add_linear`."""
    return 4 if head_dim <= 128 else 8


def add_stages(dtype: torch.dtype) -> int:
    """Stages of the pipeline of `_add_linear`: shared memory holds two of covariances in bfloat16, one in float32."""
    return 2 if dtype == torch.bfloat16 else 1


def covariance_type(dtype: torch.dtype) -> torch.dtype:
    """The type of the covariances for inputs of `dtype`; float16 has no room for products of keys and values."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def linear_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Workspace of one segment's sums, for inputs of `dtype`."""
    return head_dim**2 * covariance_type(dtype).itemsize + 2 * head_dim * 4 + 4
