"""Algorithms 2 and 3 for sm_90: the same function as `prefill.py`, written in Gluon with specialised warps.

A program owns two row tiles that lie side by side in one segment and so share one order. Four producer warps
copy tiles of keys and values into a ring of shared memory, contiguous ones for the window and gathered ones for
the prefix, and run ahead of the consumers: four warps for each row tile. The two row tiles never wait for one
another, so one keeps the tensor cores busy while the other is at its softmax or its stop check; within a row
tile the scores of the next tile are started before the values of this one are added.

The ring has STAGES stages. A stage is full when its copies have arrived (the barrier `ready`) and free when both row
tiles have released it (the barrier `empty`). Tile i of the program's tiles uses stage i % STAGES.

A row tile that stops leaves a mark beside the stage of its last tile and is done. The producers read a stage's marks
when it becomes free, one round of the ring later, and from then on release stages in place of that row tile; when both
are done they end. So a stop costs at most the ring's prefetched tiles. A mark is written at most once, by the thread
that then releases the stage. The producers have read the stage's marks by then, because they copy values into a stage
only after they have read its marks, and the row tile waits for these values.

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

from .. import call
from ..config import StopRule
from ..sequences import Starts
from . import primitives
from .groups import Heads, Ranking, Splits, Strides

# renamed in Triton 3.8, the old name went in 3.9
_load_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

# as in primitives.py
LN2 = gl.constexpr(primitives.LN2.value)
RCP_LN2 = gl.constexpr(primitives.RCP_LN2.value)
STOP_RULE_BITS = gl.constexpr(call.STOP_RULE_BITS)
TAIL = gl.constexpr(call.TAIL)
GRAIN = gl.constexpr(primitives.GRAIN.value)
REST = gl.constexpr(int(StopRule.REST))
ALL_LEFT = gl.constexpr(2)  # in `stop`: a chunk's gain counts for all tiles that are left, not for one
PRODUCER_THREADS = gl.constexpr(128)
CONSUMER_THREADS = gl.constexpr(128)  # of a row tile
CONSUMER_REGISTERS = gl.constexpr(216)
PRODUCER_REGISTERS = gl.constexpr(72)
MAX_REGISTERS = 168  # 64 K registers over the 12 warps; the producers' share goes to the consumers


@gluon.jit
def _await_free(ring, i, STAGES: gl.constexpr):
    """Wait until both row tiles have released the stage that tile i is to have."""
    _, empty, _ = ring
    mbarrier.wait(empty.index(i % STAGES), ((i // STAGES) & 1) ^ 1)


@gluon.jit
def _copy(pointers, ring, i, STAGES: gl.constexpr):
    """Start copying rows of k or v into the free stage of tile i; they signal `ready` when they have arrived."""
    buffer, _, ready = ring
    _load_async(buffer.index(i % STAGES), pointers)
    async_copy.mbarrier_arrive(ready.index(i % STAGES), increment_count=False)


@gluon.jit
def _mark(marks, i, HALF: gl.constexpr, STAGES: gl.constexpr):
    """Mark the stage of tile i, before it is released: row tile HALF is done with its prefix."""
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    # a word for each thread, because only whole warps can store; the word of the thread that releases is the one read
    marks.index(STAGES * HALF + i % STAGES).store(gl.full([CONSUMER_THREADS], 1, gl.int16, THREADS))


@gluon.jit
def _is_marked(marks, i, HALF: gl.constexpr, STAGES: gl.constexpr):
    """Return whether row tile HALF was done when it released the stage that tile i is to have."""
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(marks.index(STAGES * HALF + i % STAGES).slice(0, 1).load(THREADS), 0) != 0


@gluon.jit
def _list_row_offsets(first, stride, STEPS: gl.constexpr, LAYOUT: gl.constexpr, BN: gl.constexpr):
    """List the offsets [BN, 1] of the rows of BN / GRAIN steps that begin at `first`; 8 divides the stride."""
    row = first * stride
    within = gl.arange(0, GRAIN, gl.SliceLayout(0, STEPS)) * stride
    row = gl.multiple_of(gl.reshape(row[:, None] + within[None, :], [BN]), 8)
    return gl.convert_layout(row, gl.SliceLayout(1, LAYOUT))[:, None]


@gluon.jit
def _produce(
    k_base, v_base, order, pages, page_shift, page_rows, stride_kl, stride_vl, first, diagonal, kv_last,
    diagonal_tiles, near, total, split, splits, k_ring, v_ring, marks, SIZES: gl.constexpr,
    MODE: gl.constexpr,
):  # fmt: skip
    """Copy the tiles of keys and values of the program into the ring: diagonal, window, prefix.

    k_base, v_base: T [Lk, D], at key 0 of the sequence and KV head, with PAGED at row 0 of the cache; order: int32 [P /
    GRAIN], the segment's row of ORDER; pages: int32 [M], of the sequence (PAGED). first, diagonal: the window's first
    key and the first key of its diagonal; kv_last: the last key of the sequence; diagonal_tiles, near, total: tiles of
    the diagonal, of diagonal and window, and of all three parts; split, splits: the program's tiles of the order are
    the first, that with the number 1 + split, and from there on every one of so many (HAS_SPLITS).
    k_ring, v_ring: (buffer T [STAGES, BN, D], barriers `empty`, barriers `ready`); marks: int16 [2 * STAGES, threads],
    by row tile and stage.
    """
    D: gl.constexpr = SIZES.D
    BN: gl.constexpr = SIZES.BN
    STAGES: gl.constexpr = SIZES.STAGES
    # a thread holds whole steps, so it reads each entry of the order once
    EVEN: gl.constexpr = gl.BlockedLayout([1, GRAIN, 8], [256 // D, 1, D // 8], [gl.num_warps(), 1, 1], [2, 1, 0])
    STEPS: gl.constexpr = gl.SliceLayout(2, EVEN)
    LAYOUT: gl.constexpr = gl.BlockedLayout([GRAIN, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, BN, gl.SliceLayout(1, LAYOUT))
    offs_d = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))[None, :]
    _, k_empty, _ = k_ring
    _, v_empty, _ = v_ring
    i = 0
    if not MODE.PAGED:
        # This is 0 in a form that the compiler cannot see through: where the first copies wait for a maximum over the
        # warps, or for the pages, the row tiles fall into a rhythm in which the whole is up to 12% faster
        # (docs/results/rhythm-h200.txt).
        THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        i = gl.minimum(gl.max(gl.full([PRODUCER_THREADS], kv_last + 1, gl.int32, THREADS), 0), 0)
    while i < near:
        begin = gl.where(i < diagonal_tiles, diagonal + i * BN, first + (i - diagonal_tiles) * BN)
        row = gl.minimum(begin + rows, kv_last)
        if MODE.PAGED:  # a copy of `primitives.load_cache_rows`, which Gluon code cannot call
            row = gl.load(pages + (row >> page_shift)) * page_rows + (row & ((1 << page_shift) - 1))
        row = row[:, None]
        _await_free(k_ring, i, STAGES)
        _copy(k_base + row * stride_kl + offs_d, k_ring, i, STAGES)
        _await_free(v_ring, i, STAGES)
        _copy(v_base + row * stride_vl + offs_d, v_ring, i, STAGES)
        i += 1
    ENTRIES: gl.constexpr = gl.SliceLayout(1, STEPS)
    entries = gl.arange(0, BN // GRAIN, ENTRIES)
    running = total > near
    if running:
        index = gl.load(order + entries)
        first_done = gl.to_tensor(False)
        second_done = gl.to_tensor(False)
        while running:
            next_tile = gl.minimum(i + 1, total - 1) - near
            if MODE.HAS_SPLITS:
                next_tile = gl.where(next_tile > 0, 1 + split + (next_tile - 1) * splits, 0)
            following = gl.load(order + next_tile * (BN // GRAIN) + entries)
            if first_done | second_done:  # release the stage in place of the row tile that is done
                mbarrier.arrive(k_empty.index(i % STAGES), count=1)
                mbarrier.arrive(v_empty.index(i % STAGES), count=1)
            _await_free(k_ring, i, STAGES)
            _copy(k_base + _list_row_offsets(index, stride_kl, STEPS, LAYOUT, BN) + offs_d, k_ring, i, STAGES)
            _await_free(v_ring, i, STAGES)
            first_done |= _is_marked(marks, i, 0, STAGES)
            second_done |= _is_marked(marks, i, 1, STAGES)
            running = not (first_done & second_done)
            if running:  # the marks are read before values are copied: a row tile waits for these before it marks
                _copy(v_base + _list_row_offsets(index, stride_vl, STEPS, LAYOUT, BN) + offs_d, v_ring, i, STAGES)
            index = following
            i += 1
            running = running & (i < total)
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


# A copy of `primitives.cap_scores`, which Gluon code cannot call, and of what `online_softmax_update` does with it.
@gluon.jit
def _cap_scores(products, qk_scale, CAP: gl.constexpr):
    """Return products and their factor in base 2, whose product scores are, under the soft cap with CAP > 0."""
    if CAP > 0:
        products = CAP - 2 * CAP / (1.0 + gl.exp2(products * (qk_scale * (2 * RCP_LN2 / CAP))))
        qk_scale = 1.0
    return products, qk_scale


# The online softmax of `primitives.online_softmax_update`, without its products, which run asynchronously here.
@gluon.jit
def _weigh_scores(scores, m, l, qk_scale, CAP: gl.constexpr):
    """Do the online softmax of a tile that every row sees: (weights, new m, new l, decay of the sums before)."""
    scores, qk_scale = _cap_scores(scores, qk_scale, CAP)
    m_new = gl.maximum(m, gl.max(scores, 1) * qk_scale)
    weights = gl.exp2(scores * qk_scale - m_new[:, None])
    decay = gl.exp2(m - m_new)
    return weights, m_new, l * decay + gl.sum(weights, 1), decay


# A copy of `primitives.sum_remaining_mass`, which Gluon code cannot call.
@gluon.jit
def _sum_mass(begins, masses, visited, steps, EDGES: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the ranking's mass after `visited` of a segment's `steps`, the edge before it, and the share left."""
    e = gl.arange(0, EDGES, LAYOUT)
    edge = gl.sum((begins <= visited).to(gl.int32), 0) - 1
    begin = gl.sum(gl.where(e == edge, begins, 0), 0)
    end = gl.where(edge == EDGES - 1, steps, gl.sum(gl.where(e == edge + 1, begins, 0), 0))
    share = (end - visited).to(gl.float32) / gl.maximum(end - begin, 1).to(gl.float32)
    after = gl.sum(gl.where(e == edge + 1, masses, 0.0), 0)
    return after + share * (gl.sum(gl.where(e == edge, masses, 0.0), 0) - after), edge, share


@gluon.jit
def _consume(
    Q, OUT, LSE, VISITED, FIRST, MASS, SUMS, q_buffer, k_ring, v_ring, marks, qk_scale, sink, tau, stop, chunk,
    row0, q_len, q_max, offset, start, diagonal, stride_ql, stride_ol, diagonal_tiles, near, total, steps,
    first_visited, splits, HALF: gl.constexpr, DTYPE: gl.constexpr, SIZES: gl.constexpr,
    MODE: gl.constexpr,
):  # fmt: skip
    """Compute row tile HALF of the program, from its queries to its output, as `prefill._prefill` does.

    Pointers are those of `_prefill_hopper` at row0, the program's first row, of its head, sequence and segment.

    q_buffer: T [2, BM, D] of shared memory, the queries and at last the output of both row tiles; k_ring, v_ring,
    marks, diagonal, diagonal_tiles, near, total: as for `_produce`. sink: the head's, in base 2 (HAS_SINKS); stop:
    ALL_LEFT where its stop rule is REST, plus TAIL where it has a tail; start: the first key that counts; q_len: rows
    to compute; q_max: rows to report in VISITED. With HAS_SPLITS, the tile that all splits visit counts as one of the
    window; first_visited: its keys in the split that reports them, 0 in others; steps: of the whole order; splits:
    programs that compute the window and share the prefix, 1 where they share all keys; OUT, float32, LSE and VISITED
    are those of `groups.Splits`.
    """
    D: gl.constexpr = SIZES.D
    BM: gl.constexpr = SIZES.BM
    BN: gl.constexpr = SIZES.BN
    STAGES: gl.constexpr = SIZES.STAGES
    EDGES: gl.constexpr = SIZES.EDGES
    _, k_empty, _ = k_ring
    _, v_empty, _ = v_ring
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BN, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])

    copy_rows = HALF * BM + gl.arange(0, BM, gl.SliceLayout(1, COPY))
    copy_d = gl.arange(0, D, gl.SliceLayout(0, COPY))
    inside = (row0 + copy_rows)[:, None] < q_len
    q_tile = gl.load(Q + copy_rows[:, None] * stride_ql + copy_d[None, :], mask=inside, other=0.0)
    q = q_buffer.index(HALF)
    q.store(q_tile)
    fence_async_shared()

    m = gl.full([BM], float("-inf"), gl.float32, ROWS)
    l = gl.zeros([BM], gl.float32, ROWS)
    if MODE.HAS_SINKS:  # as `primitives.start_softmax`
        m = gl.zeros([BM], gl.float32, ROWS) + sink
        l = gl.full([BM], 1.0, gl.float32, ROWS)
    acc = gl.zeros([BM, D], gl.float32, O)
    row = row0 + HALF * BM + gl.arange(0, BM, ROWS)
    position = offset + row
    real = (row < q_len) & (position >= start)

    added = l  # what the last chunk of the prefix added to l, and that chunk's first tile
    chunk_begin = 0
    i = 0
    while i < diagonal_tiles:
        s = warpgroup_mma_wait(0, deps=(_start_scores(q, k_ring, i, S, BM, BN, STAGES),))
        mbarrier.arrive(k_empty.index(i % STAGES), count=1)
        keys = diagonal + i * BN + gl.arange(0, BN, gl.SliceLayout(0, S))
        s, s_scale = _cap_scores(s, qk_scale, MODE.CAP)
        s = gl.where(keys[None, :] <= position[:, None], s, float("-inf"))
        m_new = gl.maximum(m, gl.max(s, 1) * s_scale)
        # rows that have seen no key yet keep m = -inf; subtract 0 there, not -inf
        m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
        w = gl.exp2(s * s_scale - m_safe[:, None])
        decay = gl.exp2(m - m_safe)
        l = l * decay + gl.sum(w, 1)
        m = m_new
        acc = acc * gl.convert_layout(decay, O_ROWS)[:, None]
        acc = _start_values(gl.convert_layout(w.to(DTYPE), P), v_ring, acc, i, STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(i % STAGES), count=1)
        i += 1

    late = 0.0  # what is still to be taken from m
    if MODE.HAS_SPLITS:
        # each split counts 1 / splits of what all visit; sums that are relative to a lower m are less
        late = gl.log2(splits.to(gl.float32))
    if i < total:
        m_before = m
        l_before = l
        current_begin = i  # the first tile of the chunk that is running
        edge = gl.where(near > i, near, gl.minimum(near + chunk, total))  # where the current chunk ends
        s = warpgroup_mma_wait(0, deps=(_start_scores(q, k_ring, i, S, BM, BN, STAGES),))
        mbarrier.arrive(k_empty.index(i % STAGES), count=1)
        w, m, l, decay = _weigh_scores(s, m, l, qk_scale, MODE.CAP)
        acc = acc * gl.convert_layout(decay, O_ROWS)[:, None]
        p = gl.convert_layout(w.to(DTYPE), P)
        running = i + 1 < total
        while running:  # p holds the weights of tile i, whose values are still to be added
            if i + 1 == edge:
                if i + 1 > near:
                    old = l_before * gl.exp2(m_before - m)
                    gain = gl.where(real, (l - old) / gl.where(real, old, 1.0), 0.0)
                    rows = gl.sum(real.to(gl.float32), 0)
                    chunk_gain = gl.sum(gain, 0) / gl.maximum(rows, 1.0)
                    # the stop, as in `_prefill`
                    times = gl.where(stop % 4 == ALL_LEFT, total - i - 1, 1).to(gl.float32)
                    if MODE.HAS_SPLITS:
                        times = gl.where(stop % 4 == ALL_LEFT, times, 1.0 / splits)
                    running = (chunk_gain * times >= tau * (i + 1 - current_begin)) & (rows > 0.0)
                    if MODE.HAS_TAIL:
                        added = l - old
                        chunk_begin = current_begin
                if MODE.HAS_SPLITS:
                    m -= gl.where(i + 1 == near, late, 0.0)
                m_before = m
                l_before = l
                current_begin = i + 1
                edge = gl.minimum(edge + chunk, total)
            if running:
                s = _start_scores(q, k_ring, i + 1, S, BM, BN, STAGES)
                acc = _start_values(p, v_ring, acc, i, STAGES)
                s = warpgroup_mma_wait(1, deps=(s,))
                mbarrier.arrive(k_empty.index((i + 1) % STAGES), count=1)
                w, m, l, decay = _weigh_scores(s, m, l, qk_scale, MODE.CAP)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(v_empty.index(i % STAGES), count=1)
                acc = acc * gl.convert_layout(decay, O_ROWS)[:, None]
                p = gl.convert_layout(w.to(DTYPE), P)
                i += 1
                running = i + 1 < total
        acc = warpgroup_mma_wait(0, deps=(_start_values(p, v_ring, acc, i, STAGES),))
        _mark(marks, i, HALF, STAGES)
        mbarrier.arrive(v_empty.index(i % STAGES), count=1)
        i += 1

    if MODE.HAS_TAIL:  # noqa: SIM102
        # copies of `primitives.scale_tail` and `primitives.weigh_tail`, which Gluon code cannot call
        if (stop >= TAIL) & (i > near) & (i < total):
            before_chunk = chunk_begin - near
            visited = i - near
            if MODE.HAS_SPLITS:  # tiles of all splits
                before_chunk = 1 + before_chunk * splits
                visited = 1 + visited * splits
            else:
                steps = (total - near) * (BN // GRAIN)
            e = gl.arange(0, EDGES, ONE)
            begins = gl.load(FIRST + e * (SIZES.BUCKETS // EDGES))
            masses = gl.load(MASS + e)
            before, edge, share = _sum_mass(begins, masses, before_chunk * (BN // GRAIN), steps, EDGES, ONE)
            mass, edge, share = _sum_mass(begins, masses, visited * (BN // GRAIN), steps, EDGES, ONE)
            most = (total - i) / (i - chunk_begin)
            factor = gl.where((before - mass) * most > mass, mass / (before - mass), most)
            tail = gl.where(mass <= 0, 0.0, factor) * added
            sums = SUMS + edge * D + gl.arange(0, D, gl.SliceLayout(0, O))
            after = gl.where(edge + 1 < EDGES, gl.load(sums + gl.where(edge + 1 < EDGES, D, 0)), 0.0)
            mean = (after + share * (gl.load(sums) - after)) / gl.where(mass <= 0, 1.0, mass)
            l += tail
            acc += gl.convert_layout(tail, O_ROWS)[:, None] * mean[None, :]

    if row0 + HALF * BM < q_max:
        keys_visited = gl.maximum(i - near, 0) * BN
        if MODE.HAS_SPLITS:
            keys_visited += first_visited
        gl.store(VISITED + HALF, keys_visited)
    if MODE.HAS_SPLITS:
        m -= gl.where(total == near, late, 0.0)  # all visit all there is: nothing was taken yet
    if MODE.HAS_LSE or MODE.HAS_SPLITS:
        lse = (m + gl.log2(l)) * LN2
        gl.store(LSE + HALF * BM + gl.arange(0, BM, ROWS), gl.where(real, lse, float("-inf")), mask=row < q_len)
    full = gl.convert_layout(gl.where(real & (l != 0), 1.0 / gl.where(l != 0, l, 1.0), 0.0), O_ROWS)
    if MODE.HAS_SPLITS:
        o_rows = HALF * BM + gl.arange(0, BM, O_ROWS)
        split_out = OUT + o_rows[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, O))[None, :]
        gl.store(split_out, acc * full[:, None], mask=(row0 + o_rows < q_len)[:, None])
    else:
        q.store((acc * full[:, None]).to(DTYPE))  # through shared memory, so that rows are written whole
        gl.store(OUT + copy_rows[:, None] * stride_ol + copy_d[None, :], q.load(COPY), mask=inside)


@gluon.jit
def _find_dense_from(q_len, last_rows, ROWS: gl.constexpr):
    """Do as `primitives.find_dense_from`, which Gluon code cannot call."""
    return gl.where(last_rows > 0, gl.maximum(q_len - last_rows, 0) // ROWS * ROWS, q_len)


@gluon.jit(
    do_not_specialize=[
        "q_len", "offset", "row_begin", "chunk", "segments", "waves", "page_shift", "page_rows", "stride_cb",
        "stride_ch", "stride_eb", "stride_eh", "stride_pb", "splits", "last_rows", "lookback",
    ]
)  # fmt: skip
def _prefill_hopper(
    Q, K, V, RANKING: Ranking, OUT, LSE, VISITED, STARTS: Starts, PAGES, HEADS: Heads,
    SPLITS: Splits, qk_scale, q_len, offset, row_begin, chunk, segments, waves, page_shift, page_rows,
    stride_q: Strides, stride_k: Strides, stride_v: Strides, stride_o: Strides, stride_i: Strides,
    stride_cb, stride_ch, stride_eb, stride_eh,
    stride_pb, splits, last_rows, lookback,  # they stand last: ahead of others they would change the instructions
    SIZES: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """Compute S2O attention of two row tiles: the function of `prefill._prefill`, without MODE.WIDE.

    Programs: as for `_prefill`, of pairs of row tiles, which the members of SPLITS have too. Rows of K and V begin at
    multiples of 16 bytes.
    """
    GROUP: gl.constexpr = SIZES.GROUP
    D: gl.constexpr = SIZES.D
    BM: gl.constexpr = SIZES.BM
    BN: gl.constexpr = SIZES.BN
    STAGES: gl.constexpr = SIZES.STAGES
    EDGES: gl.constexpr = SIZES.EDGES
    DTYPE: gl.constexpr = Q.dtype.element_ty
    split = 0
    if MODE.HAS_LAUNCH_ORDER:  # a copy of `primitives.assign_tile`, which Gluon code cannot call
        heads = gl.num_programs(0)
        before = gl.cdiv(gl.maximum(_find_dense_from(q_len, last_rows, 2 * BM) - row_begin, 0), 2 * BM)
        before = gl.minimum(before, gl.num_programs(1))
        number = (gl.program_id(1) + before - gl.num_programs(1)) * heads + gl.program_id(0)
        per_wave = heads // waves
        of_wave = gl.maximum(before, 1) * per_wave
        wave = gl.maximum(number, 0) // of_wave
        turn = (gl.maximum(number, 0) - wave * of_wave) // per_wave
        tile = gl.where(number < 0, gl.num_programs(1) - 1 - gl.program_id(1), before - 1 - turn)
        entry = gl.where(number < 0, gl.program_id(0), number - wave * (of_wave - per_wave) - turn * per_wave)
        b = gl.program_id(2)
        if MODE.HAS_SPLITS:
            heads = heads // splits
            split = entry % splits
            entry = entry // splits
        h = gl.load(HEADS.launch_order + entry)
    else:
        tile = gl.num_programs(0) - 1 - gl.program_id(0)
        heads = gl.num_programs(1)
        b = gl.program_id(2)
        h = gl.program_id(1)
    segment = gl.load(HEADS.segment + h)
    start = gl.load(STARTS.kv_start + b).to(gl.int32) if MODE.HAS_START else 0
    q_max = q_len
    q_first = gl.to_tensor(0)
    k_first = gl.to_tensor(0)
    if MODE.PACKED:  # a copy of `primitives.load_sequence`, which Gluon code cannot call
        q_first = gl.load(STARTS.cu_q + b).to(gl.int32)
        k_first = gl.load(STARTS.cu_k + b).to(gl.int32)
        q_len = gl.load(STARTS.cu_q + b + 1).to(gl.int32) - q_first
        offset = gl.load(STARTS.cu_k + b + 1).to(gl.int32) - k_first - q_len
    flags = gl.load(HEADS.flags + h)
    # not the flags themselves: with this form ptxas schedules the consumers' loop up to 10% better (H200, Triton 3.6)
    stop = gl.where((flags & STOP_RULE_BITS) == REST, ALL_LEFT, 0) + (flags & TAIL)
    row0 = row_begin + tile * (2 * BM)
    n = row0 // gl.maximum(segment, 1)
    # copies of `primitives.find_window_start` and `find_diagonal_start`
    begin = gl.maximum(offset + n * segment - lookback, start)
    dense_rows = _find_dense_from(q_len, last_rows, 2 * BM)
    sparse = (segment > 0) & (row0 < dense_rows)
    first = gl.where(sparse, start + (begin - start) // BN * BN, start)
    prefix = gl.where(row0 < q_len, first - start, 0)
    position0 = offset + row0
    kv_len = offset + q_len
    diagonal = first + gl.maximum(position0 + 1 - first, 0) // BN * BN
    diagonal_tiles = gl.maximum(gl.minimum(position0 + 2 * BM, kv_len) - diagonal + BN - 1, 0) // BN
    whole = gl.where(row0 < q_len, (diagonal - first) // BN, 0)
    if MODE.HAS_SPLITS:
        has_diagonal = sparse | (split == splits - 1)
        low = gl.where(sparse, 0, whole * split // splits)
        whole = gl.where(sparse, whole, whole * (split + 1) // splits - low)
        first += low * BN
        diagonal_tiles = gl.where(has_diagonal, diagonal_tiles, 0)
    near = diagonal_tiles + whole
    tiles = prefix // BN
    steps = tiles * (BN // GRAIN)
    window = near  # and what all splits visit
    first_visited = 0
    if MODE.HAS_SPLITS:
        window += gl.minimum(tiles, 1)
        first_visited = gl.where(split == 0, (window - near) * BN, 0)
        tiles = gl.cdiv(gl.maximum(tiles - 1 - split, 0), splits)
    total = window + tiles
    tau = gl.load(HEADS.tau + h)
    sink = gl.load(HEADS.sinks + h).to(gl.float32) * RCP_LN2 if MODE.HAS_SINKS else 0.0
    if MODE.HAS_SPLITS and MODE.HAS_SINKS:
        sink = gl.where(has_diagonal, sink, float("-inf"))

    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, D], DTYPE)
    q_buffer = gl.allocate_shared_memory(DTYPE, [2, BM, D], gl.NVMMASharedLayout.get_default_for([BM, D], DTYPE))
    k_buffer = gl.allocate_shared_memory(DTYPE, [STAGES, BN, D], TILE)
    v_buffer = gl.allocate_shared_memory(DTYPE, [STAGES, BN, D], TILE)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(k_empty.index(s), count=2)
        mbarrier.init(v_empty.index(s), count=2)
        mbarrier.init(k_ready.index(s), count=PRODUCER_THREADS)
        mbarrier.init(v_ready.index(s), count=PRODUCER_THREADS)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    marks = gl.allocate_shared_memory(gl.int16, [2 * STAGES, CONSUMER_THREADS], PLAIN)  # by row tile, stage, thread
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for s in gl.static_range(2 * STAGES):
        marks.index(s).store(gl.full([CONSUMER_THREADS], 0, gl.int16, THREADS))
    fence_async_shared()
    k_ring = (k_buffer, k_empty, k_ready)
    v_ring = (v_buffer, v_empty, v_ready)
    b = b.to(gl.int64)
    h = h.to(gl.int64)
    kv_head = h // GROUP
    row = (q_first + row0).to(gl.int64)
    q_base = Q + b * stride_q.batch + h * stride_q.head + row * stride_q.row
    out_base = OUT + b * stride_o.batch + h * stride_o.head + row * stride_o.row
    lse_base = LSE + b * stride_eb + h * stride_eh + row
    visited_base = VISITED + b * stride_cb + h * stride_ch + row0 // BM
    k_base = K + b * stride_k.batch + kv_head * stride_k.head
    v_base = V + b * stride_v.batch + kv_head * stride_v.head
    pages = PAGES
    if MODE.PAGED:
        pages += b * stride_pb
    elif MODE.PACKED:
        k_base += k_first.to(gl.int64) * stride_k.row
        v_base += k_first.to(gl.int64) * stride_v.row
    of_slice = (n - row_begin // gl.maximum(segment, 1)).to(gl.int64)  # the segment's number in the slice
    order = RANKING.order + b * stride_i.batch + h * stride_i.head + of_slice * stride_i.row
    at = (b * heads + h) * segments + of_slice
    first_base = RANKING.first + at * SIZES.BUCKETS
    mass_base = RANKING.mass + at * EDGES
    sums_base = RANKING.sums + at * EDGES * D
    if MODE.HAS_SPLITS:
        split_tile = ((b * splits + split) * heads + h) * gl.num_programs(1) + tile
        out_base = SPLITS.split_out + split_tile * (2 * BM * D)
        lse_base = SPLITS.split_lse + split_tile * (2 * BM)
        visited_base = SPLITS.split_visited + split_tile * 2
        splits = gl.where(sparse, splits, 1)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    q_base, out_base, lse_base, visited_base, first_base, mass_base, sums_base, q_buffer, k_ring,
                    v_ring, marks, qk_scale, sink, tau, stop, chunk, row0, q_len, q_max, offset, start,
                    diagonal, stride_q.row, stride_o.row, diagonal_tiles, window, total, steps, first_visited,
                    splits, 0, DTYPE, SIZES, MODE,
                ),
            ),
            (
                _consume,
                (
                    q_base, out_base, lse_base, visited_base, first_base, mass_base, sums_base, q_buffer, k_ring,
                    v_ring, marks, qk_scale, sink, tau, stop, chunk, row0, q_len, q_max, offset, start,
                    diagonal, stride_q.row, stride_o.row, diagonal_tiles, window, total, steps, first_visited,
                    splits, 1, DTYPE, SIZES, MODE,
                ),
            ),
            (
                _produce,
                (
                    k_base, v_base, order, pages, page_shift, page_rows, stride_k.row, stride_v.row, first, diagonal,
                    kv_len - 1, diagonal_tiles, near, total, split, splits, k_ring, v_ring, marks, SIZES, MODE,
                ),
            ),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
