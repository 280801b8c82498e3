"""Algorithms 2 and 3 for sm_90: the same function as `prefill.py`, written in Gluon with specialised warps.

Four producer warps copy tiles of keys and values into a ring of shared memory, contiguous ones for the window
and gathered ones for the prefix, and run ahead of the eight consumer warps that compute. So a stop check does
not drain the pipeline, and while the weights of one tile are computed, the tensor cores work on the values of
the tile before and the scores of the tile after. A stop costs at most the ring's prefetched tiles.

Tiles are visited in this order: the diagonal, the whole tiles of the window, the prefix.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

PRODUCER_WARPS = gl.constexpr(4)
PRODUCER_THREADS = gl.constexpr(128)
PRODUCER_REGISTERS = gl.constexpr(56)
MAX_REGISTERS = 168  # 64 K registers over the 12 warps; the producers' share goes to the consumers


@gluon.jit
def _tile_index(order, first, diagonal, kv_last, diagonal_tiles, near, total, i, rows, BN: gl.constexpr):
    """Which rows of k and v tile i consists of."""
    if i < near:
        base = gl.where(i < diagonal_tiles, diagonal + i * BN, first + (i - diagonal_tiles) * BN)
        index = gl.minimum(base + rows, kv_last)
    else:
        index = gl.load(order + (i - near) * BN + rows, mask=(i - near) * BN + rows < (total - near) * BN, other=0)
    return index


@gluon.jit
def _copy(source, index, stride, offs_d, ring, i, STAGES: gl.constexpr):
    """Start copying rows of k or v into their ring once a place is free; `ready` is signalled when they are there."""
    buffer, empty, ready = ring
    slot = i % STAGES
    mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
    async_copy.async_copy_global_to_shared(buffer.index(slot), source + index[:, None] * stride + offs_d[None, :])
    async_copy.mbarrier_arrive(ready.index(slot), increment_count=False)


@gluon.jit
def _producer(
    k_base, v_base, order, stride_kl, stride_vl, first, diagonal, kv_last, diagonal_tiles, near, total,
    k_ring, v_ring, stop, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    rows = gl.arange(0, BN, gl.SliceLayout(1, layout))
    offs_d = gl.arange(0, D, gl.SliceLayout(0, layout))
    index = _tile_index(order, first, diagonal, kv_last, diagonal_tiles, near, total, 0, rows, BN)
    i = 0
    running = total > 0
    while running:
        following = _tile_index(order, first, diagonal, kv_last, diagonal_tiles, near, total, i + 1, rows, BN)
        _copy(k_base, index, stride_kl, offs_d, k_ring, i, STAGES)
        _copy(v_base, index, stride_vl, offs_d, v_ring, i, STAGES)
        index = following
        i += 1
        running = (i < total) & (gl.max(stop.load(one), 0) == 0)
    async_copy.wait_group(0)


@gluon.jit
def _start_scores(q, k_ring, i, LAYOUT: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr):
    """Begin q @ k^T for tile i once its keys are there."""
    buffer, _, ready = k_ring
    slot = i % STAGES
    mbarrier.wait(ready.index(slot), (i // STAGES) & 1)
    fence_async_shared()
    zero = gl.zeros([BM, BN], gl.float32, LAYOUT)
    return warpgroup_mma(q, buffer.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _start_values(p, v_ring, acc, i, STAGES: gl.constexpr):
    """Begin acc += p @ v for tile i once its values are there."""
    buffer, _, ready = v_ring
    slot = i % STAGES
    mbarrier.wait(ready.index(slot), (i // STAGES) & 1)
    fence_async_shared()
    return warpgroup_mma(p, buffer.index(slot), acc, is_async=True)


@gluon.jit
def _weights(scores, m, l, qk_scale):
    """Online softmax of a tile that every row sees: (weights, new m, new l, decay of what came before)."""
    m_new = gl.maximum(m, gl.max(scores, 1) * qk_scale)
    weights = gl.exp2(scores * qk_scale - m_new[:, None])
    decay = gl.exp2(m - m_new)
    return weights, m_new, l * decay + gl.sum(weights, 1), decay


@gluon.jit
def _consumer(
    q, k_ring, v_ring, stop, qk_scale, threshold, chunk, diagonal, position0, start, kv_len, diagonal_tiles, near,
    total, D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr,
    ROW_MAX: gl.constexpr,
):  # fmt: skip
    """Returns m, l [BM], acc [BM, D] and the number of prefix tiles computed."""
    _, k_empty, _ = k_ring
    _, v_empty, _ = v_ring
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BN, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O)
    m = gl.full([BM], float("-inf"), gl.float32, ROWS)
    l = gl.zeros([BM], gl.float32, ROWS)
    acc = gl.zeros([BM, D], gl.float32, O)
    position = position0 + gl.arange(0, BM, ROWS)
    real = (position < kv_len) & (position >= start)

    i = 0
    while i < diagonal_tiles:
        s = warpgroup_mma_wait(0, deps=(_start_scores(q, k_ring, i, S, BM, BN, STAGES),))
        mbarrier.arrive(k_empty.index(i % STAGES), count=1)
        keys = diagonal + i * BN + gl.arange(0, BN, gl.SliceLayout(0, S))
        s = gl.where(keys[None, :] <= position[:, None], s, float("-inf"))
        m_new = gl.maximum(m, gl.max(s, 1) * qk_scale)
        # rows that have seen no key yet keep m = -inf; subtract 0 there, not -inf
        m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
        w = gl.exp2(s * qk_scale - m_safe[:, None])
        decay = gl.exp2(m - m_safe)
        l = l * decay + gl.sum(w, 1)
        m = m_new
        acc = acc * gl.convert_layout(decay, O_ROWS)[:, None]
        acc = _start_values(gl.convert_layout(w.to(DTYPE), P), v_ring, acc, i, STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(i % STAGES), count=1)
        i += 1

    if i < total:
        m_before = m
        l_before = l
        begun = i
        edge = gl.where(near > i, near, gl.minimum(near + chunk, total))  # where the current chunk ends
        s = warpgroup_mma_wait(0, deps=(_start_scores(q, k_ring, i, S, BM, BN, STAGES),))
        mbarrier.arrive(k_empty.index(i % STAGES), count=1)
        w, m, l, decay = _weights(s, m, l, qk_scale)
        acc = acc * gl.convert_layout(decay, O_ROWS)[:, None]
        p = gl.convert_layout(w.to(DTYPE), P)
        running = i + 1 < total
        while running:  # p holds the weights of tile i, whose values are still to be added
            if i + 1 == edge:
                if i + 1 > near:
                    old = l_before * gl.exp2(m_before - m)
                    gain = gl.where(real, (l - old) / gl.where(real, old, 1.0), 0.0)
                    rows = gl.sum(real.to(gl.float32), 0)
                    chunk_gain = gl.max(gain, 0) if ROW_MAX else gl.sum(gain, 0) / rows
                    running = chunk_gain >= threshold * (i + 1 - begun)
                m_before = m
                l_before = l
                begun = i + 1
                edge = gl.minimum(edge + chunk, total)
            if running:
                s = _start_scores(q, k_ring, i + 1, S, BM, BN, STAGES)
                acc = _start_values(p, v_ring, acc, i, STAGES)
                s = warpgroup_mma_wait(1, deps=(s,))
                mbarrier.arrive(k_empty.index((i + 1) % STAGES), count=1)
                w, m, l, decay = _weights(s, m, l, qk_scale)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(v_empty.index(i % STAGES), count=1)
                acc = acc * gl.convert_layout(decay, O_ROWS)[:, None]
                p = gl.convert_layout(w.to(DTYPE), P)
                i += 1
                running = i + 1 < total
        # the release of the last tile's values below is what wakes the producers to see this
        stop.store(gl.full([1], 1, gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])))
        acc = warpgroup_mma_wait(0, deps=(_start_values(p, v_ring, acc, i, STAGES),))
        mbarrier.arrive(v_empty.index(i % STAGES), count=1)
        i += 1
    return m, l, acc, gl.maximum(i - near, 0)


@gluon.jit(do_not_specialize=["q_len", "offset", "row_begin", "chunk", "stride_cb", "stride_ch"])
def _prefill_hopper(
    Q, K, V, ORDER, OUT, VISITED, KV_START, TAU, SEGMENT, SHARE, qk_scale, q_len, offset, row_begin, chunk,
    stride_qb, stride_qh, stride_ql, stride_kb, stride_kh, stride_kl, stride_vb, stride_vh, stride_vl,
    stride_ob, stride_oh, stride_ol, stride_ib, stride_ih, stride_in, stride_cb, stride_ch,
    GROUP: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, HAS_START: gl.constexpr, ROW_MAX: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    if WIDE:  # a sequence spans 2^31 elements or more: 64-bit offsets into k and v
        stride_kl = stride_kl.to(gl.int64)
        stride_vl = stride_vl.to(gl.int64)
    DTYPE: gl.constexpr = Q.dtype.element_ty
    # long prefixes first: the last row tiles have the most work
    tile = gl.num_programs(0) - 1 - gl.program_id(0)
    h = gl.program_id(1)
    b = gl.program_id(2)
    segment = gl.load(SEGMENT + h)
    start = gl.load(KV_START + b).to(gl.int32) if HAS_START else 0
    row0 = row_begin + tile * BM
    n = row0 // gl.maximum(segment, 1)
    begin = gl.maximum(offset + n * segment, start)
    first = gl.where(segment > 0, start + (begin - start) // BN * BN, start)
    prefix = first - start
    position0 = offset + row0
    kv_len = offset + q_len
    diagonal = first + gl.maximum(position0 + 1 - first, 0) // BN * BN
    diagonal_tiles = gl.maximum(gl.minimum(position0 + BM, kv_len) - diagonal + BN - 1, 0) // BN
    near = diagonal_tiles + (diagonal - first) // BN
    total = near + prefix // BN
    threshold = gl.load(TAU + h)
    if gl.load(SHARE + h) != 0:
        threshold = threshold * BN / gl.maximum(prefix, 1).to(gl.float32)

    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    rows = gl.arange(0, BM, gl.SliceLayout(1, layout))
    offs_d = gl.arange(0, D, gl.SliceLayout(0, layout))
    inside = (row0 + rows)[:, None] < q_len
    q_base = Q + b.to(gl.int64) * stride_qb + h.to(gl.int64) * stride_qh + row0.to(gl.int64) * stride_ql
    q_tile = gl.load(q_base + rows[:, None] * stride_ql + offs_d[None, :], mask=inside, other=0.0)
    q = gl.allocate_shared_memory(DTYPE, [BM, D], gl.NVMMASharedLayout.get_default_for([BM, D], DTYPE), q_tile)
    KV: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, D], DTYPE)
    k_buffer = gl.allocate_shared_memory(DTYPE, [STAGES, BN, D], KV)
    v_buffer = gl.allocate_shared_memory(DTYPE, [STAGES, BN, D], KV)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(k_empty.index(s), count=1)
        mbarrier.init(v_empty.index(s), count=1)
        mbarrier.init(k_ready.index(s), count=PRODUCER_THREADS)
        mbarrier.init(v_ready.index(s), count=PRODUCER_THREADS)
    stop = gl.allocate_shared_memory(
        gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]), gl.full([1], 0, gl.int32, one)
    )
    fence_async_shared()
    k_ring = (k_buffer, k_empty, k_ready)
    v_ring = (v_buffer, v_empty, v_ready)
    k_base = K + b.to(gl.int64) * stride_kb + (h // GROUP).to(gl.int64) * stride_kh
    v_base = V + b.to(gl.int64) * stride_vb + (h // GROUP).to(gl.int64) * stride_vh
    order = ORDER + b.to(gl.int64) * stride_ib + h.to(gl.int64) * stride_ih
    order += (n - row_begin // gl.maximum(segment, 1)).to(gl.int64) * stride_in
    _, l, acc, visited = gl.warp_specialize(
        [
            (
                _consumer,
                (
                    q, k_ring, v_ring, stop, qk_scale, threshold, chunk, diagonal, position0, start, kv_len,
                    diagonal_tiles, near, total, D, BM, BN, STAGES, DTYPE, ROW_MAX,
                ),
            ),
            (
                _producer,
                (
                    k_base, v_base, order, stride_kl, stride_vl, first, diagonal, kv_len - 1, diagonal_tiles, near,
                    total, k_ring, v_ring, stop, D, BN, STAGES,
                ),
            ),
        ],
        [PRODUCER_WARPS],
        [PRODUCER_REGISTERS],
    )  # fmt: skip
    O_ROWS: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16]))
    l = gl.convert_layout(l, O_ROWS)
    real = row0 + gl.arange(0, BM, O_ROWS) + offset >= start
    acc = gl.where((real & (l > 0))[:, None], acc / gl.where(l > 0, l, 1.0)[:, None], 0.0)
    out_base = OUT + b.to(gl.int64) * stride_ob + h.to(gl.int64) * stride_oh + row0.to(gl.int64) * stride_ol
    gl.store(
        out_base + rows[:, None] * stride_ol + offs_d[None, :], gl.convert_layout(acc.to(DTYPE), layout), mask=inside
    )
    gl.store(VISITED + b.to(gl.int64) * stride_cb + h.to(gl.int64) * stride_ch + row0 // BM, visited * BN)
