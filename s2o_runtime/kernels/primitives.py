"""Device code of several kernels: geometry of a call, online softmax, window, gathered prefix, tail.

`prefill.py` and `trace.py` are made of these. Gluon code cannot call functions that
`triton.jit` compiles, so `prefill_hopper.py` has copies of some; a comment at each copy names its original here.

Softmax is in base 2 throughout: `qk_scale` is the scale of the scores times log2(e).
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from .. import call, config
from ..config import StopRule

LOG2E = math.log2(math.e)
LN2 = tl.constexpr(math.log(2))
RCP_LN2 = tl.constexpr(LOG2E)  # the same number for device code
MAX_REGISTERS = 255  # of a thread; without a limit the compiler spills a few to fit one more program on an SM
WIDE_ELEMENTS = 1 << 31  # from here on an offset into one head of k or v needs 64 bits

# the bits of HeadTables.flags, and the one stop rule beside the paper's that kernels know
STOP_RULE_BITS = tl.constexpr(call.STOP_RULE_BITS)
TAIL = tl.constexpr(call.TAIL)
GRAIN = tl.constexpr(config.KEY_BLOCK)
REST = tl.constexpr(int(StopRule.REST))


@triton.jit
def assign_tile(
    LAUNCH_ORDER, waves, row_begin, q_len, last_rows, splits, ROWS: tl.constexpr, HAS_LAUNCH_ORDER: tl.constexpr,
    HAS_SPLITS: tl.constexpr,
):  # fmt: skip
    """Return the work of this program: its row tile, counted in those of a program, head, batch entry and split.

    GPUs start programs in the order of their numbers, the first dimension first. What starts last should be short, or
    it runs while other SMs have nothing left to do: the last tiles, whose prefixes are the longest, come first. In a
    grid (tiles, Hq, B) one head follows another. With HAS_LAUNCH_ORDER it is (Hq, tiles, B): the tiles of last rows,
    which visit all keys, come first, those of all heads; then Hq / waves heads at a time, in the order LAUNCH_ORDER,
    int32 [Hq], take turns at each other tile, because a cache holds the keys of a few heads. Where keys are split
    (`splits`), each of a head's splits counts as a head, and a head's splits follow one another.

    Returns the tile, the head, the batch entry, Hq, and the split.
    """
    split = 0
    if HAS_LAUNCH_ORDER:
        heads = tl.num_programs(0)
        before = tl.cdiv(tl.maximum(find_dense_from(q_len, last_rows, ROWS) - row_begin, 0), ROWS)  # tiles
        before = tl.minimum(before, tl.num_programs(1))
        number = (tl.program_id(1) + before - tl.num_programs(1)) * heads + tl.program_id(0)  # negative: last rows
        per_wave = heads // waves
        of_wave = tl.maximum(before, 1) * per_wave
        wave = tl.maximum(number, 0) // of_wave
        turn = (tl.maximum(number, 0) - wave * of_wave) // per_wave
        tile = tl.where(number < 0, tl.num_programs(1) - 1 - tl.program_id(1), before - 1 - turn)
        entry = tl.where(number < 0, tl.program_id(0), number - wave * (of_wave - per_wave) - turn * per_wave)
        b = tl.program_id(2)
        if HAS_SPLITS:
            heads = heads // splits
            split = entry % splits
            entry = entry // splits
        h = tl.load(LAUNCH_ORDER + entry)
    else:
        tile = tl.num_programs(0) - 1 - tl.program_id(0)
        heads = tl.num_programs(1)
        b = tl.program_id(2)
        h = tl.program_id(1)
    return tile, h, b, heads, split


@triton.jit
def load_sequence(b, CU_Q, CU_K, q_len, offset, PACKED: tl.constexpr):
    """Return the begins of sequence b in q and in k, its number of queries, and the position of its first query.

    Packed sequences lie one behind the other; others have a batch index, one length and one offset. With CU_K for CU_Q
    too, and an offset of 0, the queries are the keys.
    """
    q_first = 0
    k_first = 0
    if PACKED:
        q_first = tl.load(CU_Q + b).to(tl.int32)
        k_first = tl.load(CU_K + b).to(tl.int32)
        q_len = tl.load(CU_Q + b + 1).to(tl.int32) - q_first
        offset = tl.load(CU_K + b + 1).to(tl.int32) - k_first - q_len
    return q_first, k_first, q_len, offset


@triton.jit
def find_dense_from(q_len, last_rows, ROWS: tl.constexpr):
    """Do as `LayerConfig.find_first_dense_row` for programs of ROWS rows."""
    return tl.where(last_rows > 0, tl.maximum(q_len - last_rows, 0) // ROWS * ROWS, q_len)


@triton.jit
def head_pointer(pointer, stride, b, h):
    """Return the pointer to row 0 of head h in batch entry b; stride: `groups.Strides` of the tensor."""
    return pointer + b.to(tl.int64) * stride.batch + h.to(tl.int64) * stride.head


@triton.jit
def load_cache_rows(keys, pages, page_shift, page_rows):
    """Load the rows of a paged k and v that hold these keys of a sequence whose pages are at `pages`, int32 [M].

    page_shift: log2 of a page's keys; page_rows: rows from one page to the next.
    """
    return tl.load(pages + (keys >> page_shift)) * page_rows + (keys & ((1 << page_shift) - 1))


@triton.jit
def find_window_start(n, segment, offset, lookback, start, BN: tl.constexpr):
    """Do as `sequences.find_window_start` for segment n: the prefix before its window is a whole number of tiles."""
    first = tl.maximum(offset + n * segment - lookback, start)
    return start + (first - start) // BN * BN


@triton.jit
def find_diagonal_start(first, position, BN: tl.constexpr):
    """Return the first key of the window that begins at `first` whose tile the row at `position` sees only in part."""
    return first + tl.maximum(position + 1 - first, 0) // BN * BN


@triton.jit
def start_softmax(SINKS, h, BM: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Return m and l of `online_softmax_update` for BM rows before their first key: float32 [BM] each."""
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    if HAS_SINKS:
        m = tl.zeros([BM], tl.float32) + tl.load(SINKS + h).to(tl.float32) * RCP_LN2
        l = tl.full([BM], 1.0, tl.float32)
    return m, l


@triton.jit
def cap_scores(scores, qk_scale, CAP: tl.constexpr):
    """Cap scores softly, in base 2: CAP * tanh(scores * qk_scale / CAP), of products of any shape."""
    return CAP - 2 * CAP / (1.0 + tl.exp2(scores * (qk_scale * (2 * RCP_LN2 / CAP))))


@triton.jit
def online_softmax_update(q, k, v, m, l, acc, qk_scale, visible, MASKED: tl.constexpr, CAP: tl.constexpr = 0.0):
    """Do one step of the online softmax (Algorithm 3, lines 10 to 12): a tile of keys joins the rows' state.

    q: [BM, D]; k: [D, BN]; v: [BN, D]; m: the rows' largest score, l: their sums of 2^(score - m), both float32 [BM];
    acc: float32 [BM, D], values weighted by 2^(score - m); visible: [BM, BN] or what broadcasts to it, with MASKED.
    Returns the new m, l and acc.
    """
    scores = tl.dot(q, k, input_precision="ieee")
    if CAP > 0:
        scores = cap_scores(scores, qk_scale, CAP)
        qk_scale = 1.0
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1) * qk_scale)
    # rows that have seen no key yet keep m = -inf; subtract 0 there, not -inf
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
    weights = tl.exp2(scores * qk_scale - m_safe[:, None])
    decay = tl.exp2(m - m_safe)
    l = l * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return m_new, l, acc


@triton.jit
def attend_window(
    q, k_base, v_base, stride_kl, stride_vl, m, l, acc, qk_scale, first, diagonal, end, kv_len, position,
    BN: tl.constexpr, STAGES: tl.constexpr, CAP: tl.constexpr = 0.0,
    pages=None, page_shift=0, page_rows=0, PAGED: tl.constexpr = False,
):  # fmt: skip
    """Attend in a row tile's window (Algorithm 2): keys first .. diagonal without a mask, diagonal .. end with one.

    q: [BM, D]; k_base, v_base: pointers to key 0 of the head, with PAGED to row 0 of the cache; position: int32 [BM],
    the last key that each row sees. Returns m, l and acc as `online_softmax_update` does.
    """
    offs_n = tl.arange(0, BN)
    offs_d = tl.arange(0, q.shape[1])
    k_tile = k_base + offs_n[None, :] * stride_kl + offs_d[:, None]
    v_tile = v_base + offs_n[:, None] * stride_vl + offs_d[None, :]
    for j in tl.range(first, diagonal, BN, num_stages=STAGES):
        if PAGED:
            row = load_cache_rows(j + offs_n, pages, page_shift, page_rows)
            k = tl.load(k_base + row[None, :] * stride_kl + offs_d[:, None])
            v = tl.load(v_base + row[:, None] * stride_vl + offs_d[None, :])
        else:
            k = tl.load(k_tile + j * stride_kl)
            v = tl.load(v_tile + j * stride_vl)
        m, l, acc = online_softmax_update(q, k, v, m, l, acc, qk_scale, True, False, CAP=CAP)
    for j in tl.range(diagonal, end, BN, num_stages=1):
        keys = j + offs_n
        if PAGED:
            row = load_cache_rows(tl.minimum(keys, kv_len - 1), pages, page_shift, page_rows)
            k_at = k_base + row[None, :] * stride_kl + offs_d[:, None]
            v_at = v_base + row[:, None] * stride_vl + offs_d[None, :]
        else:
            k_at = k_tile + j * stride_kl
            v_at = v_tile + j * stride_vl
        k = tl.load(k_at, mask=keys[None, :] < kv_len, other=0)
        v = tl.load(v_at, mask=keys[:, None] < kv_len, other=0.0)
        visible = keys[None, :] <= position[:, None]
        m, l, acc = online_softmax_update(q, k, v, m, l, acc, qk_scale, visible, True, CAP=CAP)
    return m, l, acc


@triton.jit
def attend_gathered(
    q, k_base, v_base, order, stride_kl, stride_vl, m, l, acc, qk_scale, begin, count,
    BN: tl.constexpr, STAGES: tl.constexpr, CAP: tl.constexpr = 0.0,
    split=0, splits=1, HAS_SPLITS: tl.constexpr = False,
):  # fmt: skip
    """Attend to tiles begin .. begin + count of a row tile's order, gathered: a chunk (Algorithm 3, lines 8 to 12).

    order: pointer to int32 [prefix / GRAIN], where the keys of each step begin. With HAS_SPLITS a row tile's order is
    the first tile, that with the number 1 + split, and from there on every one of `splits`. Triton pipelines this plain
    loop.
    """
    offs_n = tl.arange(0, BN)
    offs_d = tl.arange(0, q.shape[1])
    for t in tl.range(0, count, num_stages=STAGES):
        tile = begin + t
        if HAS_SPLITS:
            tile = tl.where(tile == 0, 0, 1 + split + (tile - 1) * splits)
        index = tl.load(order + (tile * BN + offs_n) // GRAIN) + offs_n % GRAIN
        k = tl.load(k_base + index[None, :] * stride_kl + offs_d[:, None])
        v = tl.load(v_base + index[:, None] * stride_vl + offs_d[None, :])
        m, l, acc = online_softmax_update(q, k, v, m, l, acc, qk_scale, True, False, CAP=CAP)
    return m, l, acc


@triton.jit
def sum_remaining_mass(begins, masses, visited, steps, EDGES: tl.constexpr):
    """Sum the ranking's mass after the first `visited` of a segment's `steps`.

    begins: int32 [EDGES], where in the order each edge lies; masses: float32 [EDGES], the mass from each edge on.
    Returns the mass; the last edge at or before `visited`; and the share of that edge's stretch that is left. Between
    two edges the mass is taken to fall evenly.
    """
    e = tl.arange(0, EDGES)
    edge = tl.sum((begins <= visited).to(tl.int32), 0) - 1
    begin = tl.sum(tl.where(e == edge, begins, 0), 0)
    end = tl.where(edge == EDGES - 1, steps, tl.sum(tl.where(e == edge + 1, begins, 0), 0))
    share = (end - visited).to(tl.float32) / tl.maximum(end - begin, 1).to(tl.float32)
    after = tl.sum(tl.where(e == edge + 1, masses, 0.0), 0)
    return after + share * (tl.sum(tl.where(e == edge, masses, 0.0), 0) - after), edge, share


@triton.jit
def scale_tail(before, mass, most):
    """Return the tail's part of l over that of the last chunk: the ratio of their masses, at most `most`.

    before, mass: the ranking's mass behind the chunk's begin and behind its end; most: the tail's keys over the
    chunk's, the ratio if all keys counted alike. 0 where the tail has no mass.
    """
    factor = tl.where((before - mass) * most > mass, mass / (before - mass), most)
    return tl.where(mass <= 0, 0.0, factor)


@triton.jit
def weigh_tail(sums, edge, share, mass, D: tl.constexpr, EDGES: tl.constexpr):
    """Compute the tail's mean value, float32 [D], weighted by the ranking, from what `sum_remaining_mass` returned.

    sums: pointer to float32 [EDGES, D], weights times values from each edge on.
    """
    offs_d = tl.arange(0, D)
    from_edge = sums + edge * D + offs_d
    after = tl.load(from_edge + D, mask=(edge + 1 < EDGES) & (offs_d < D), other=0.0)
    return (after + share * (tl.load(from_edge) - after)) / tl.where(mass <= 0, 1.0, mass)


@triton.jit
def log_sum_exp(m, l):
    """Return the natural log-sum-exp of rows' scores from their state in base 2."""
    return (m + tl.log2(l)) * LN2
