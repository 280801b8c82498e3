"""The linear tail: all keys behind a segment's first chunk, to first order in the queries (docs/how-it-works.md).

A head with a linear tail computes its window and the first chunk of its order. With w the softmax weights of the
segment's representative c over the other keys of the prefix, mu and a the means of keys and values under w and C their
covariance, a query q has of these keys the log-sum-exp of c plus (q - c) mu, and the mean value a + (q - c) C. Five
kernels: the scores of what the first chunk holds become -inf; the weights of the rest are written down, for all
segments that read the same keys at once; for each two segments and each share of their prefixes the products of
weighted keys and values are summed up; of each segment the shares' sums become the covariance; and after the prefill
every row merges its estimate into its output and log-sum-exp. With the weights at hand the products are plain ones,
whose operands come from shared memory and whose weighting takes one multiplication on the way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from s2o_runtime.call import Call, Starts
from s2o_runtime.kernels.groups import Strides
from s2o_runtime.kernels.launch import Argument, launch, stride_groups, strides
from s2o_runtime.kernels.primitives import LN2, LOG2E, RCP_LN2, at_head, dense_from, log_sum_exp, sequence, window_start
from s2o_runtime.kernels.rank.order import Ranked

MASK_STEPS = 256  # that a program of `_mask_visited` marks at once
MASK_WARPS = 4
WEIGHT_BYTES = 4  # of workspace for each key and segment
WEIGHT_SEGMENTS = 16  # of a program of `_weights`
SPANS = 32  # that a prefix is parted in: enough programs for the longest prompts, and short ones' are short
SPAN_KEYS = 256  # at least, of a span
PRODUCT_PROGRAMS = 1024  # of `_products`: fill a GPU, where half of them have no keys
PRODUCT_KEYS = 2048, 32768  # of a share of a prefix, fewest and most: a tile of keys follows the other, 0.6 us each
PRODUCT_BYTES = 96 << 20  # of the products of shares, the first of each segment not counted
SUM_STAGES = 3  # of which the last computes: with two, a tile would be copied when the one before it is done
ADD_ROWS = 64  # which divides every segment
ADD_COLUMNS = 64
COVARIANCE_COLUMNS = 32
COVARIANCE_WARPS = 4
LARGEST_TILE = 256  # keys; what a prefix has is a multiple of its tile's
LARGEST_WEIGHT = tl.constexpr(64.0)  # in base 2; near 0 or below, as far as LOG_SUM is the sum's logarithm
SMALLEST_MASS = tl.constexpr(2.0**-100)  # a share of the representative's, which keys must have to be estimated


class Linear(NamedTuple):
    """What the keys behind the first chunk are to each segment of a slice of rows; N' counts its segments.

    `heads` are those with a linear tail, as `call.HeadTables.linear` has them.
    log_mass: float32 [B, heads, N'], the log-sum-exp in base 2 of the representative's scores, -inf without such a key;
    key, value: float32 [B, heads, N', D], the means under the representative's weights;
    covariance: [B, heads, N', D, D], of keys (first) and values under these weights, in the type `covariance_type`
    gives. Of segments without such a key only `log_mass` is written.
    """

    log_mass: Tensor
    key: Tensor
    value: Tensor
    covariance: Tensor


@triton.jit(do_not_specialize=["q_len", "offset", "row_begin", "rows_end", "chunk"])
def _mask_visited(
    SCORE, ORDER, HEADS, STARTS: Starts, SEGMENT, q_len, offset, row_begin, rows_end, chunk, stride_s: Strides,
    stride_i: Strides,
    STEPS: tl.constexpr, BN: tl.constexpr, GRAIN: tl.constexpr, HAS_START: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """SCORE[b, h, n, g] = -inf for the steps g in the first chunk of the order of segment n, of heads with a
    linear tail.

    Programs: (N', heads, B). N' counts the segments of the slice of rows row_begin .. rows_end, heads those with a
    linear tail. chunk: tiles of BN keys; a shorter prefix is masked as a whole. STEPS: steps at once.

        SCORE               float16 [B, Hq, N', P / GRAIN], strides s: as `scores._scores` wrote it
        ORDER               int32 [B, Hq, N', P / GRAIN], strides i: as `order._order` wrote it
        HEADS               int32 [heads]: as `call.HeadTables.linear`
        STARTS.kv_start     int64 or int32 [B]: the first key that counts (HAS_START)
        STARTS.cu_q, .cu_k  int32 [B + 1]: where packed sequences begin (PACKED)
        SEGMENT             int32 [Hq]: as in `call.HeadTables`
    """
    n = tl.program_id(0)
    h = tl.load(HEADS + tl.program_id(1))
    b = tl.program_id(2)
    segment = tl.load(SEGMENT + h)
    start = tl.load(STARTS.kv_start + b).to(tl.int32) if HAS_START else 0
    _, _, q_len, offset = sequence(b, STARTS.cu_q, STARTS.cu_k, q_len, offset, PACKED)
    if row_begin + n * segment < tl.minimum(rows_end, q_len):
        first = window_start(row_begin // segment + n, segment, offset, start, BN)
        visited = tl.minimum(first - start, chunk * BN) // GRAIN
        score = at_head(SCORE, stride_s, b, h) + n.to(tl.int64) * stride_s.row
        order = at_head(ORDER, stride_i, b, h) + n.to(tl.int64) * stride_i.row
        for i in range(0, visited, STEPS):
            at = i + tl.arange(0, STEPS)
            key = tl.load(order + at, mask=at < visited, other=0)
            nothing = tl.full([STEPS], float("-inf"), SCORE.dtype.element_ty)
            tl.store(score + (key - start) // GRAIN, nothing, mask=at < visited)


@triton.jit(
    do_not_specialize=["q_len", "offset", "row_begin", "rows_end", "segments", "span", "stride_lb", "stride_lh"]
)
def _weights(
    REP, LOG_SUM, K, V, SCORE, WEIGHT, MASS, KEY_SUMS, VALUE_SUMS, HEADS, STARTS: Starts, SEGMENT, q_len, offset,
    row_begin, rows_end, segments, span, stride_r: Strides, stride_lb, stride_lh, stride_k: Strides, stride_v: Strides,
    stride_s: Strides, stride_w: Strides,
    GROUP: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr, SPANS: tl.constexpr, BN: tl.constexpr,
    GRAIN: tl.constexpr, STAGES: tl.constexpr, HAS_START: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """WEIGHT[b, i, n, t] = 2^(REP . k_t - LOG_SUM), 0 where the step's SCORE is -inf, and what they sum up to by spans.

    For key t of the prefix of segment n of the slice, in the i-th head with a linear tail, with REP and LOG_SUM of this
    segment: LOG_SUM is near the logarithm of the sum over all keys, so no weight overflows. Of each span of the prefix
    MASS is the sum of the weights, rounded to T as they are, KEY_SUMS and VALUE_SUMS of weighted keys and values.

    Programs: (SPANS * tiles of BS segments, the last ones first; heads; B). N' counts the segments of the slice of rows
    row_begin .. rows_end, heads those with a linear tail. span: keys, a multiple of the BK that are taken at once.
    STAGES: of Triton's pipeline. T is the input type; weights of float16, which has no room for them, are not rounded,
    and products of it are in TF32, which has as many digits.

        REP                 T [B, Hq, parts, D], strides r: as `means._representatives` wrote it, in base 2
        LOG_SUM             float32 [B, Hq, parts], strides l: as `scores._log_sums` wrote it
        K, V                T [B, Hkv, Lk, D], strides k and v
        SCORE               float16 [B, Hq, N', P / GRAIN], strides s: as `_mask_visited` left it
        WEIGHT              float32 [B, heads, N', P], strides w; P is at least the longest prefix
        MASS                float32 [B, heads, N', SPANS]
        KEY_SUMS            float32 [B, heads, N', SPANS, D]
        VALUE_SUMS          float32 [B, heads, N', SPANS, D]
        HEADS               int32 [heads]: as `call.HeadTables.linear`
        STARTS.kv_start     int64 or int32 [B]: the first key that counts (HAS_START)
        STARTS.cu_q, .cu_k  int32 [B + 1]: where packed sequences begin (PACKED)
        SEGMENT             int32 [Hq]: as in `call.HeadTables`
    """
    n = (tl.num_programs(0) - 1 - tl.program_id(0)) // SPANS * BS + tl.arange(0, BS)
    at = tl.program_id(0) % SPANS
    i = tl.program_id(1)
    b = tl.program_id(2)
    h = tl.load(HEADS + i)
    segment = tl.load(SEGMENT + h)
    start = tl.load(STARTS.kv_start + b).to(tl.int32) if HAS_START else 0
    _, k_first, q_len, offset = sequence(b, STARTS.cu_q, STARTS.cu_k, q_len, offset, PACKED)
    inside = (n < segments) & (row_begin + n * segment < tl.minimum(rows_end, q_len))
    of_call = row_begin // segment + n
    prefix = tl.where(inside, window_start(of_call, segment, offset, start, BN) - start, 0)
    begin = at * span
    end = tl.minimum(begin + span, tl.max(prefix, 0))
    offs_d = tl.arange(0, D)
    offs_k = tl.arange(0, BK)
    rep = at_head(REP, stride_r, b, h) + of_call[:, None].to(tl.int64) * stride_r.row
    r = tl.load(rep + offs_d[None, :], mask=inside[:, None], other=0.0)
    log_sum = LOG_SUM + b.to(tl.int64) * stride_lb + h.to(tl.int64) * stride_lh + of_call
    log_sum = tl.load(log_sum, mask=inside, other=float("inf"))
    row = (k_first + start).to(tl.int64)
    key = at_head(K, stride_k, b, h // GROUP) + row * stride_k.row
    value = at_head(V, stride_v, b, h // GROUP) + row * stride_v.row
    score = at_head(SCORE, stride_s, b, h) + n[:, None].to(tl.int64) * stride_s.row
    weight = at_head(WEIGHT, stride_w, b, i) + n[:, None].to(tl.int64) * stride_w.row

    mass = tl.zeros([BS, BK], tl.float32)
    keys = tl.zeros([BS, D], tl.float32)
    values = tl.zeros([BS, D], tl.float32)
    for t0 in tl.range(begin, end, BK, num_stages=STAGES):
        t = t0 + offs_k
        there = t < end
        k = tl.load(key + t[:, None].to(tl.int64) * stride_k.row + offs_d[None, :], mask=there[:, None], other=0.0)
        v = tl.load(value + t[:, None].to(tl.int64) * stride_v.row + offs_d[None, :], mask=there[:, None], other=0.0)
        left = tl.load(score + (t // GRAIN)[None, :], mask=t[None, :] < prefix[:, None], other=float("-inf"))
        s = tl.dot(r, tl.trans(k), input_precision="ieee") - log_sum[:, None]
        w = tl.where(left > float("-inf"), tl.exp2(tl.minimum(s, LARGEST_WEIGHT)), 0.0)
        if K.dtype.element_ty == tl.bfloat16:
            rounded = w.to(tl.bfloat16)
            keys = tl.dot(rounded, k, keys)
            values = tl.dot(rounded, v, values)
            w = rounded.to(tl.float32)
        elif K.dtype.element_ty == tl.float16:
            keys = tl.dot(w, k.to(tl.float32), keys, input_precision="tf32")
            values = tl.dot(w, v.to(tl.float32), values, input_precision="tf32")
        else:
            keys = tl.dot(w, k, keys, input_precision="ieee")
            values = tl.dot(w, v, values, input_precision="ieee")
        tl.store(weight + t[None, :], w, mask=there[None, :] & (n < segments)[:, None])
        mass += w
    of_span = ((b * tl.num_programs(1) + i).to(tl.int64) * segments + n) * SPANS + at
    tl.store(MASS + of_span, tl.sum(mass, 1), mask=n < segments)
    tl.store(KEY_SUMS + of_span[:, None] * D + offs_d[None, :], keys, mask=(n < segments)[:, None])
    tl.store(VALUE_SUMS + of_span[:, None] * D + offs_d[None, :], values, mask=(n < segments)[:, None])


@triton.jit(do_not_specialize=["q_len", "offset", "row_begin", "rows_end", "segments", "shares", "share"])
def _products(
    K, V, WEIGHT, PRODUCTS, HEADS, STARTS: Starts, SEGMENT, q_len, offset, row_begin, rows_end, segments, shares, share,
    stride_k: Strides, stride_v: Strides, stride_w: Strides,
    GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    HAS_START: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """PRODUCTS[b, i, n, s] = sum of w_j k_j v_j^T over the keys j of a share of the prefix, with the WEIGHT w of each.

    Programs: (pairs of segments of the slice, the last ones first, * shares * D / BD; heads; B). A program takes two
    segments, which share what it reads of keys and values, and BD columns of the values. N' counts the segments of the
    slice of rows row_begin .. rows_end, heads those with a linear tail. share: keys, a multiple of BN; shares: of the
    longest prefix; those behind the end of a prefix are not written. BK: keys at once, a divisor of BN; STAGES: of
    Triton's pipeline. T is the input type. Products of float16 are in TF32, as those of `_weights`.

        K, V                T [B, Hkv, Lk, D], strides k and v
        WEIGHT              float32 [B, heads, N', P], strides w: as `_weights` wrote it, 0 behind the shorter prefix
        PRODUCTS            float32 [B, heads, N', shares, D, D]
        HEADS               int32 [heads]: as `call.HeadTables.linear`
        STARTS.kv_start     int64 or int32 [B]: the first key that counts (HAS_START)
        STARTS.cu_q, .cu_k  int32 [B + 1]: where packed sequences begin (PACKED)
        SEGMENT             int32 [Hq]: as in `call.HeadTables`
    """
    BLOCKS: tl.constexpr = D // BD
    block = tl.program_id(0) % BLOCKS
    at = tl.program_id(0) // BLOCKS % shares
    n = (tl.num_programs(0) - 1 - tl.program_id(0)) // (BLOCKS * shares) * 2
    i = tl.program_id(1)
    b = tl.program_id(2)
    h = tl.load(HEADS + i)
    segment = tl.load(SEGMENT + h)
    start = tl.load(STARTS.kv_start + b).to(tl.int32) if HAS_START else 0
    _, k_first, q_len, offset = sequence(b, STARTS.cu_q, STARTS.cu_k, q_len, offset, PACKED)
    rows_end = tl.minimum(rows_end, q_len)
    if row_begin + n * segment < rows_end:
        of_call = row_begin // segment + n
        first_prefix = window_start(of_call, segment, offset, start, BN) - start
        second = (n + 1 < segments) & (row_begin + (n + 1) * segment < rows_end)
        prefix = tl.where(second, window_start(of_call + 1, segment, offset, start, BN) - start, first_prefix)
        begin = at * share
        end = tl.minimum(begin + share, prefix)
        if begin < end:
            offs_d = tl.arange(0, D)
            offs_c = block * BD + tl.arange(0, BD)
            offs_k = tl.arange(0, BK)
            row = (k_first + start).to(tl.int64)
            key = at_head(K, stride_k, b, h // GROUP) + row * stride_k.row
            value = at_head(V, stride_v, b, h // GROUP) + row * stride_v.row
            weight = at_head(WEIGHT, stride_w, b, i) + n.to(tl.int64) * stride_w.row
            next_weight = weight + tl.where(second, stride_w.row, 0)
            products = tl.zeros([D, BD], tl.float32)
            next_products = tl.zeros([D, BD], tl.float32)
            # the pipeline takes a load of one dimension if it is of 4 bytes and not masked; BK divides the share
            for t0 in tl.range(begin, end, BK, num_stages=STAGES):
                t = t0 + offs_k
                w = tl.load(weight + t)[None, :]
                next_w = tl.load(next_weight + t)[None, :]
                k = tl.load(key + t[None, :].to(tl.int64) * stride_k.row + offs_d[:, None])
                v = tl.load(value + t[:, None].to(tl.int64) * stride_v.row + offs_c[None, :])
                if K.dtype.element_ty == tl.bfloat16:
                    products = tl.dot(k * w.to(tl.bfloat16), v, products)
                    next_products = tl.dot(k * next_w.to(tl.bfloat16), v, next_products)
                elif K.dtype.element_ty == tl.float16:
                    wide, v = k.to(tl.float32), v.to(tl.float32)
                    products = tl.dot(wide * w, v, products, input_precision="tf32")
                    next_products = tl.dot(wide * next_w, v, next_products, input_precision="tf32")
                else:
                    products = tl.dot(k * w, v, products, input_precision="ieee")
                    next_products = tl.dot(k * next_w, v, next_products, input_precision="ieee")
            of_slice = (b * tl.num_programs(1) + i).to(tl.int64) * segments + n
            inside = offs_d[:, None] * D + offs_c[None, :]
            of_share = PRODUCTS + (of_slice * shares + at) * (D * D)
            if begin < first_prefix:
                tl.store(of_share + inside, products)
            if second:
                tl.store(of_share + shares.to(tl.int64) * (D * D) + inside, next_products)


@triton.jit(
    do_not_specialize=[
        "q_len", "offset", "row_begin", "rows_end", "segments", "shares", "share", "stride_lb", "stride_lh",
    ]
)  # fmt: skip
def _covariances(
    PRODUCTS, LOG_SUM, MASS, KEY_SUMS, VALUE_SUMS, LOG_MASS, MEAN_KEY, MEAN_VALUE, COVARIANCE, HEADS, STARTS: Starts,
    SEGMENT, q_len, offset, row_begin, rows_end, segments, shares, share, stride_lb, stride_lh,
    D: tl.constexpr, BD: tl.constexpr, SPANS: tl.constexpr, BN: tl.constexpr, HAS_START: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """What `Linear` has of a segment and BD of its value columns, from the sums of `_weights` and of `_products`.

    With W = sum w_j: LOG_MASS = LOG_SUM + log2 W; MEAN_KEY = sum w_j k_j / W; MEAN_VALUE = sum w_j v_j / W; COVARIANCE
    = sum w_j k_j v_j^T / W - MEAN_KEY MEAN_VALUE^T. What this difference loses of keys far from zero is small: the
    rounding errors of thousands of weighted keys average out.

    Programs: (N' * D / BD, the last segments first; heads; B). N' counts the segments of the slice of rows row_begin ..
    rows_end, heads those with a linear tail. share, shares: as for `_products`. T is the input type.

        PRODUCTS            float32 [B, heads, N', shares, D, D]: as `_products` wrote it
        LOG_SUM             float32 [B, Hq, parts], strides l: as `scores._log_sums` wrote it
        MASS                float32 [B, heads, N', SPANS]: as `_weights` wrote it
        KEY_SUMS            float32 [B, heads, N', SPANS, D]: likewise
        VALUE_SUMS          float32 [B, heads, N', SPANS, D]: likewise
        LOG_MASS            float32 [B, heads, N']
        MEAN_KEY            float32 [B, heads, N', D]
        MEAN_VALUE          float32 [B, heads, N', D]
        COVARIANCE          T or float32 [B, heads, N', D, D]
        HEADS               int32 [heads]: as `call.HeadTables.linear`
        STARTS.kv_start     int64 or int32 [B]: the first key that counts (HAS_START)
        STARTS.cu_q, .cu_k  int32 [B + 1]: where packed sequences begin (PACKED)
        SEGMENT             int32 [Hq]: as in `call.HeadTables`
    """
    BLOCKS: tl.constexpr = D // BD
    n = (tl.num_programs(0) - 1 - tl.program_id(0)) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    i = tl.program_id(1)
    b = tl.program_id(2)
    h = tl.load(HEADS + i)
    segment = tl.load(SEGMENT + h)
    start = tl.load(STARTS.kv_start + b).to(tl.int32) if HAS_START else 0
    _, _, q_len, offset = sequence(b, STARTS.cu_q, STARTS.cu_k, q_len, offset, PACKED)
    if row_begin + n * segment < tl.minimum(rows_end, q_len):
        of_call = row_begin // segment + n
        of_slice = (b * tl.num_programs(1) + i).to(tl.int64) * segments + n
        offs_span = of_slice * SPANS + tl.arange(0, SPANS)
        total = tl.sum(tl.load(MASS + offs_span), 0)
        if total <= SMALLEST_MASS:
            tl.store(LOG_MASS + of_slice, float("-inf"))
        else:  # also if it is NaN
            prefix = window_start(of_call, segment, offset, start, BN) - start
            offs_d = tl.arange(0, D)
            offs_c = block * BD + tl.arange(0, BD)
            inside = offs_d[:, None] * D + offs_c[None, :]
            products = tl.zeros([D, BD], tl.float32)
            of_share = PRODUCTS + of_slice * shares * (D * D) + inside
            for _ in range(tl.cdiv(prefix, share)):
                products += tl.load(of_share)
                of_share += D * D
            mean_key = tl.sum(tl.load(KEY_SUMS + offs_span[:, None] * D + offs_d[None, :]), 0) / total
            mean_value = tl.sum(tl.load(VALUE_SUMS + offs_span[:, None] * D + offs_c[None, :]), 0) / total
            covariance = products / total - mean_key[:, None] * mean_value[None, :]
            tl.store(COVARIANCE + of_slice * (D * D) + inside, covariance.to(COVARIANCE.dtype.element_ty))
            tl.store(MEAN_VALUE + of_slice * D + offs_c, mean_value)
            if block == 0:
                log_sum = tl.load(LOG_SUM + b.to(tl.int64) * stride_lb + h.to(tl.int64) * stride_lh + of_call)
                tl.store(LOG_MASS + of_slice, log_sum + tl.log2(total))
                tl.store(MEAN_KEY + of_slice * D + offs_d, mean_key)


@triton.jit(do_not_specialize=["q_len", "offset", "row_begin", "segments", "stride_eb", "stride_eh", "last_rows"])
def _add_linear(
    Q, REP, LOG_MASS, MEAN_KEY, MEAN_VALUE, COVARIANCE, OUT, LSE, HEADS, STARTS: Starts, SEGMENT, qk_scale, q_len,
    offset, row_begin, segments, stride_q: Strides, stride_r: Strides, stride_o: Strides, stride_eb, stride_eh,
    last_rows,
    D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    HAS_START: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Merge the linear tail of BM rows into OUT and LSE, for the heads with one.

    With d = Q * qk_scale - REP, in base 2, the keys that are left have for a row the mass 2^(LOG_MASS + d MEAN_KEY) and
    the mean value MEAN_VALUE + d COVARIANCE ln 2. Rows before the first key that counts stay as they are, and so do all
    of a segment without such keys and the last rows, which are dense (`config.LayerConfig.dense_from`).

    Programs: (rows of the slice / BM, heads, B). The slice of rows begins at row_begin, its segments are N', heads
    those with a linear tail. BD: columns at once; ROWS: of a program of the prefill; STAGES: of Triton's pipeline. T is
    the input type.

        Q, OUT              T [B, Hq, Lq, D], strides q and o
        REP                 T [B, Hq, parts, D], strides r: as `means._representatives` wrote it
        LOG_MASS            float32 [B, heads, N']: as `_covariances` wrote it
        MEAN_KEY            float32 [B, heads, N', D]: likewise
        MEAN_VALUE          float32 [B, heads, N', D]: likewise
        COVARIANCE          T or float32 [B, heads, N', D, D]: likewise
        LSE                 float32 [B, Hq, Lq], strides e: log-sum-exp of each row's scores
        HEADS               int32 [heads]: as `call.HeadTables.linear`
        STARTS.kv_start     int64 or int32 [B]: the first key that counts (HAS_START)
        STARTS.cu_q, .cu_k  int32 [B + 1]: where packed sequences begin (PACKED)
        SEGMENT             int32 [Hq]: as in `call.HeadTables`
    """
    i = tl.program_id(1)
    b = tl.program_id(2)
    h = tl.load(HEADS + i)
    row0 = row_begin + tl.program_id(0) * BM
    segment = tl.load(SEGMENT + h)
    start = tl.load(STARTS.kv_start + b).to(tl.int32) if HAS_START else 0
    q_first, _, q_len, offset = sequence(b, STARTS.cu_q, STARTS.cu_k, q_len, offset, PACKED)
    if row0 < dense_from(q_len, last_rows, ROWS):
        n = row0 // segment
        of_slice = (b * tl.num_programs(1) + i).to(tl.int64) * segments + n - row_begin // segment
        log_mass = tl.load(LOG_MASS + of_slice)
        if log_mass != float("-inf"):
            offs_d = tl.arange(0, D)
            offs_row = tl.arange(0, BM)
            rows = row0 + offs_row
            real = (rows < q_len) & (offset + rows >= start)
            head_row = (q_first + row0).to(tl.int64)
            q_base = at_head(Q, stride_q, b, h) + head_row * stride_q.row
            q = tl.load(q_base + offs_row[:, None] * stride_q.row + offs_d[None, :], mask=real[:, None], other=0.0)
            rep = at_head(REP, stride_r, b, h) + n.to(tl.int64) * stride_r.row
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
            out = at_head(OUT, stride_o, b, h) + head_row * stride_o.row
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
                at = out + offs_row[:, None] * stride_o.row + offs_c[None, :]
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
        (score.shape[2], len(tables.linear), shape.batch),
        {
            "SCORE": score, "ORDER": ranked.order, "HEADS": tables.linear, "STARTS": call.starts,
            "SEGMENT": tables.segment, "q_len": shape.q_len, "offset": shape.offset, "row_begin": rows.start,
            "rows_end": rows.stop, "chunk": call.config.tile.chunk, **stride_groups(s=score, i=ranked.order),
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
    head_dim, heads, segments = shape.head_dim, len(tables.linear), score.shape[2]
    keys = score.shape[3] * call.config.grain
    size = shape.batch, heads, segments
    at_once, columns = sum_keys(head_dim, k.dtype), product_columns(head_dim, k.dtype)

    def new(*last: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*size, *last, dtype=dtype, device=k.device)

    weight, mass = new(keys), new(SPANS)
    key_sums, value_sums = new(SPANS, head_dim), new(SPANS, head_dim)
    linear = Linear(new(), new(head_dim), new(head_dim), new(head_dim, head_dim, dtype=covariance_type(k.dtype)))
    span = max(SPAN_KEYS, -(-keys // (SPANS * at_once)) * at_once)
    share = share_keys(segments, heads * shape.batch, keys, head_dim)
    shares = -(-keys // share)
    products = new(shares, head_dim, head_dim)
    of_rows: dict[str, Argument] = {
        "HEADS": tables.linear, "STARTS": call.starts, "SEGMENT": tables.segment, "q_len": shape.q_len,
        "offset": shape.offset, "row_begin": rows.start, "rows_end": rows.stop, "segments": segments,
    }  # fmt: skip
    sums = {"LOG_SUM": log_sum, "MASS": mass, "KEY_SUMS": key_sums, "VALUE_SUMS": value_sums}
    read: dict[str, Argument] = {
        "K": k, "V": v, "WEIGHT": weight, **stride_groups(k=k, v=v, w=weight),
    }  # fmt: skip
    always = {
        "D": head_dim, "BN": call.config.tile.block_n, "HAS_START": call.padded, "PACKED": call.packed,
    }  # fmt: skip
    launch(
        _weights,
        (SPANS * -(-segments // WEIGHT_SEGMENTS), heads, shape.batch),
        {
            **of_rows, **sums, **read, "REP": representative, "SCORE": score, "span": span,
            **strides("bh", l=log_sum), **stride_groups(r=representative, s=score),
        },
        {
            **always, "GROUP": shape.group, "SPANS": SPANS, "BS": WEIGHT_SEGMENTS, "BK": at_once,
            "GRAIN": call.config.grain, "STAGES": SUM_STAGES,
        },
        num_warps=sum_warps(head_dim, k.dtype),
    )  # fmt: skip
    launch(
        _products,
        (-(-segments // 2) * shares * (head_dim // columns), heads, shape.batch),
        {**of_rows, **read, "PRODUCTS": products, "shares": shares, "share": share},
        {
            **always, "GROUP": shape.group, "BD": columns, "BK": min(at_once, call.config.tile.block_n),
            "STAGES": SUM_STAGES,
        },
        num_warps=product_warps(head_dim),
    )  # fmt: skip
    launch(
        _covariances,
        (segments * (head_dim // COVARIANCE_COLUMNS), heads, shape.batch),
        {
            **of_rows, **sums, "PRODUCTS": products, "LOG_MASS": linear.log_mass, "MEAN_KEY": linear.key,
            "MEAN_VALUE": linear.value, "COVARIANCE": linear.covariance, "shares": shares, "share": share,
            **strides("bh", l=log_sum),
        },
        {**always, "BD": COVARIANCE_COLUMNS, "SPANS": SPANS},
        num_warps=COVARIANCE_WARPS,
    )  # fmt: skip
    return linear


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
    one_entry: dict[str, Argument] = {}
    if call.packed:
        one_entry = {"stride_o": Strides(0, *out.stride()[1:3]), "stride_eb": 0}
    launch(
        _add_linear,
        (-(-len(rows) // ADD_ROWS), len(tables.linear), shape.batch),
        {
            "Q": q, "REP": representative, "LOG_MASS": linear.log_mass, "MEAN_KEY": linear.key,
            "MEAN_VALUE": linear.value, "COVARIANCE": linear.covariance, "OUT": out, "LSE": lse,
            "HEADS": tables.linear, "STARTS": call.starts, "SEGMENT": tables.segment, "qk_scale": call.scale * LOG2E,
            "q_len": shape.q_len, "offset": shape.offset, "row_begin": rows.start, "segments": linear.log_mass.shape[2],
            "last_rows": call.config.last_rows, **stride_groups(q=q, o=out, r=representative),
            **strides("bh", e=lse), **one_entry,
        },
        {
            "D": shape.head_dim, "BM": ADD_ROWS, "BD": min(ADD_COLUMNS, shape.head_dim), "ROWS": call.config.tile.rows,
            "STAGES": add_stages(q.dtype), "HAS_START": call.padded, "PACKED": call.packed,
        },
        num_warps=add_warps(shape.head_dim),
    )  # fmt: skip


def share_keys(segments: int, heads: int, keys: int, head_dim: int) -> int:
    """Keys of a share of a prefix, which one program of `_products` sums up: a multiple of every tile's keys.

    Args:
        segments: of a head.
        heads: with a linear tail, of all batch entries.
        keys: of the longest prefix.
        head_dim: of keys and values.
    """
    fewest, most = PRODUCT_KEYS
    shares = max(-(-PRODUCT_PROGRAMS // (-(-segments // 2) * heads)), -(-keys // most))
    affordable = 1 + PRODUCT_BYTES // (segments * heads * 4 * head_dim**2)
    share = -(-keys // max(1, min(shares, affordable, keys // fewest)))
    return -(-share // LARGEST_TILE) * LARGEST_TILE


def sum_keys(head_dim: int, dtype: torch.dtype) -> int:
    """Keys of `dtype` that a program of `_weights` or `_products` takes at once; TF32 takes twice the registers."""
    return 64 if dtype == torch.bfloat16 and head_dim <= 128 else 32


def sum_warps(head_dim: int, dtype: torch.dtype) -> int:
    """Warps of `_weights`."""
    return 4 if head_dim <= (128 if dtype == torch.bfloat16 else 64) else 8


def product_warps(head_dim: int) -> int:
    """Warps of `_products`."""
    return 4 if head_dim <= 64 else 8


def product_columns(head_dim: int, dtype: torch.dtype) -> int:
    """Value columns of a program of `_products`: as many as registers hold sums of, of two segments."""
    return 128 if dtype == torch.bfloat16 and head_dim == 128 else 64


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
    """Workspace of one segment's sums, for inputs of `dtype`.

    The weight of each key of its prefix comes on top, and of a call at most PRODUCT_BYTES.
    """
    return head_dim**2 * (4 + covariance_type(dtype).itemsize) + 4 * (2 * head_dim + 1) * (SPANS + 1)
