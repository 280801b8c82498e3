"""Algorithms 2 and 3 in one kernel: the dense window, then the gathered prefix with chunked early stopping.

A program owns `block_m` query rows of one head. Queries are not permuted, so the online softmax of the window
stays in registers and the prefix continues it. The stop check sits in a `while` over chunks around a plain
`for` over the chunk's tiles, which Triton pipelines; a check after every tile is not pipelined at all.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from s2o_runtime.kernels.call import SKIP, TAIL, Call
from s2o_runtime.kernels.launch import launch
from s2o_runtime.kernels.layout import LOG2E, sequence, window_start
from s2o_runtime.kernels.rank import BUCKETS, RANK_BYTES, Ranked, log_sums, order, representatives, score
from s2o_runtime.kernels.tail import EDGES, Tail, pooled_values, tail_bytes, tail_sums

WORKSPACE_BYTES = 352 << 20  # of one slice; representatives and mean values of a whole call come on top
NOT_HERE = tl.constexpr(SKIP)  # the rule of heads that another kernel computes
MAX_REGISTERS = 255  # said aloud, or the compiler spills a few to fit one more program on the SM
WIDE_ELEMENTS = 1 << 31  # beyond this an offset into one head of k or v needs 64 bits


@triton.jit
def _absorb(q, k, v, m, l, acc, qk_scale, visible, MASKED: tl.constexpr):
    """One tile of keys into the online softmax, in base 2: q [BM, D], k [D, BN], v [BN, D]."""
    scores = tl.dot(q, k, input_precision="ieee")
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
def _behind(begins, masses, at, steps, EDGES: tl.constexpr):
    """The mass behind the first `at` of a segment's `steps`: (mass, edge before it, share of that edge's stretch left).

    begins, masses: [EDGES], where the edges lie in the order, and the mass from each on.
    """
    e = tl.arange(0, EDGES)
    edge = tl.sum((begins <= at).to(tl.int32), 0) - 1
    begin = tl.sum(tl.where(e == edge, begins, 0), 0)
    end = tl.where(edge == EDGES - 1, steps, tl.sum(tl.where(e == edge + 1, begins, 0), 0))
    share = (end - at).to(tl.float32) / tl.maximum(end - begin, 1).to(tl.float32)
    after = tl.sum(tl.where(e == edge + 1, masses, 0.0), 0)
    return after + share * (tl.sum(tl.where(e == edge, masses, 0.0), 0) - after), edge, share


@triton.jit(
    do_not_specialize=[
        "q_len", "offset", "row_begin", "chunk", "segments", "stride_cb", "stride_ch", "stride_eb", "stride_eh",
    ]
)  # fmt: skip
def _prefill(
    Q, K, V, ORDER, FIRST, MASS, SUMS, OUT, LSE, VISITED, KV_START, CU_Q, CU_K, TAU, SEGMENT, RULE,
    qk_scale, q_len, offset, row_begin, chunk, segments,
    stride_qb, stride_qh, stride_ql, stride_kb, stride_kh, stride_kl, stride_vb, stride_vh, stride_vl,
    stride_ob, stride_oh, stride_ol, stride_ib, stride_ih, stride_in, stride_cb, stride_ch, stride_eb, stride_eh,
    GROUP: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    GRAIN: tl.constexpr, TAIL: tl.constexpr, EDGES: tl.constexpr, BUCKETS: tl.constexpr,
    HAS_START: tl.constexpr, PACKED: tl.constexpr, HAS_LSE: tl.constexpr, ROW_MAX: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    if WIDE:  # a sequence spans 2^31 elements or more: 64-bit offsets into k and v
        stride_kl = stride_kl.to(tl.int64)
        stride_vl = stride_vl.to(tl.int64)
    # long prefixes first: the last row tiles have the most work
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2)
    segment = tl.load(SEGMENT + h)
    start = tl.load(KV_START + b).to(tl.int32) if HAS_START else 0
    q_max = q_len
    q_first, k_first, q_len, offset = sequence(b, CU_Q, CU_K, q_len, offset, PACKED)
    rule = tl.load(RULE + h)
    q_len = tl.where(rule == NOT_HERE, 0, q_len)
    row0 = row_begin + tile * BM
    n = row0 // tl.maximum(segment, 1)
    first = tl.where(segment > 0, window_start(n, segment, offset, start, BN), start)
    prefix = tl.where(row0 < q_len, first - start, 0)
    position0 = offset + row0
    kv_len = offset + q_len

    offs_n = tl.arange(0, BN)
    offs_d = tl.arange(0, D)
    rows = row0 + tl.arange(0, BM)
    position = offset + rows
    real = (rows < q_len) & (position >= start)

    head_row = (q_first + row0).to(tl.int64)
    q_base = Q + b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh + head_row * stride_ql
    offs_row = tl.arange(0, BM)[:, None]
    q = tl.load(q_base + offs_row * stride_ql + offs_d[None, :], mask=rows[:, None] < q_len, other=0.0)
    k_base = K + b.to(tl.int64) * stride_kb + (h // GROUP).to(tl.int64) * stride_kh
    v_base = V + b.to(tl.int64) * stride_vb + (h // GROUP).to(tl.int64) * stride_vh
    if PACKED:
        k_base += k_first.to(tl.int64) * stride_kl
        v_base += k_first.to(tl.int64) * stride_vl

    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)

    # window: whole tiles that every row sees, then the diagonal
    diagonal = first + tl.maximum(position0 + 1 - first, 0) // BN * BN
    k_tile = k_base + offs_n[None, :] * stride_kl + offs_d[:, None]
    v_tile = v_base + offs_n[:, None] * stride_vl + offs_d[None, :]
    for j in tl.range(first, tl.where(row0 < q_len, diagonal, first), BN, num_stages=STAGES):
        k = tl.load(k_tile + j * stride_kl)
        v = tl.load(v_tile + j * stride_vl)
        m, l, acc = _absorb(q, k, v, m, l, acc, qk_scale, True, False)
    for j in tl.range(diagonal, tl.minimum(position0 + BM, kv_len), BN, num_stages=1):
        keys = j + offs_n
        k = tl.load(k_tile + j * stride_kl, mask=keys[None, :] < kv_len, other=0.0)
        v = tl.load(v_tile + j * stride_vl, mask=keys[:, None] < kv_len, other=0.0)
        m, l, acc = _absorb(q, k, v, m, l, acc, qk_scale, keys[None, :] <= position[:, None], True)

    # prefix: tiles in order, chunk by chunk
    tiles = prefix // BN
    threshold = tl.load(TAU + h)
    if rule % 4 == 1:  # share
        threshold = threshold * BN / tl.maximum(prefix, 1).to(tl.float32)
    real_rows = tl.sum(real.to(tl.float32), 0)
    order = ORDER + b.to(tl.int64) * stride_ib + h.to(tl.int64) * stride_ih
    row = n - row_begin // tl.maximum(segment, 1)
    order += row.to(tl.int64) * stride_in
    done = 0
    begun = 0
    brought = l
    running = tiles > 0
    while running:
        length = tl.minimum(chunk, tiles - done)
        m_before = m
        l_before = l
        for c in tl.range(0, length, num_stages=STAGES):
            index = tl.load(order + ((done + c) * BN + offs_n) // GRAIN) + offs_n % GRAIN
            k = tl.load(k_base + index[None, :] * stride_kl + offs_d[:, None])
            v = tl.load(v_base + index[:, None] * stride_vl + offs_d[None, :])
            m, l, acc = _absorb(q, k, v, m, l, acc, qk_scale, True, False)
        begun = done
        done += length
        old = l_before * tl.exp2(m_before - m)
        brought = l - old
        gain = tl.where(real, brought / tl.where(real, old, 1.0), 0.0)
        chunk_gain = tl.max(gain, 0) if ROW_MAX else tl.sum(gain, 0) / real_rows
        times = tl.where(rule % 4 == 2, tiles - done, 1).to(tl.float32)  # rest: all that is left, not one tile
        running = (done < tiles) & (chunk_gain * times >= threshold * length.to(tl.float32))

    if TAIL > 0:  # noqa: SIM102
        if (rule >= TAIL) & (done < tiles):  # what is left, by the ranking's weights, scaled by what the chunk brought
            at = ((b * tl.num_programs(1) + h) * segments + row).to(tl.int64)
            steps = tiles * (BN // GRAIN)
            e = tl.arange(0, EDGES)
            begins = tl.load(FIRST + at * BUCKETS + e * (BUCKETS // EDGES))
            masses = tl.load(MASS + at * EDGES + e)
            before, edge, share = _behind(begins, masses, begun * (BN // GRAIN), steps, EDGES)
            mass, edge, share = _behind(begins, masses, done * (BN // GRAIN), steps, EDGES)
            most = (tiles - done) / (done - begun)
            factor = tl.where((before - mass) * most > mass, mass / (before - mass), most)
            added = tl.where(mass > 0, factor, 0.0) * brought
            sums = SUMS + (at * EDGES + edge) * D + offs_d
            after = tl.load(sums + D, mask=(edge + 1 < EDGES) & (offs_d < D), other=0.0)
            mean = (after + share * (tl.load(sums) - after)) / tl.where(mass > 0, mass, 1.0)
            l += added
            acc += added[:, None] * mean[None, :]

    acc = tl.where(real[:, None], acc / tl.where(real, l, 1.0)[:, None], 0.0)
    out_base = OUT + b.to(tl.int64) * stride_ob + h.to(tl.int64) * stride_oh + head_row * stride_ol
    tl.store(
        out_base + offs_row * stride_ol + offs_d[None, :], acc.to(OUT.dtype.element_ty), mask=rows[:, None] < q_len
    )
    if HAS_LSE:
        lse = tl.where(real, (m + tl.log2(tl.where(real, l, 1.0))) * 0.6931471805599453, float("-inf"))
        lse_base = LSE + b.to(tl.int64) * stride_eb + h.to(tl.int64) * stride_eh + head_row
        tl.store(lse_base + tl.arange(0, BM), lse, mask=rows < q_len)
    if row0 < q_max:
        tl.store(VISITED + b.to(tl.int64) * stride_cb + h.to(tl.int64) * stride_ch + row0 // BM, done * BN)


def s2o_prefill(q: Tensor, k: Tensor, v: Tensor, call: Call, lse: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """S2O attention with Triton: the same function as `reference.s2o_attention_reference`.

    q: [B, Hq, Lq, D]; k, v: [B, Hkv, Lk, D]; the last dimension contiguous, other strides free. Packed sequences
    lie behind one another along the length of one batch entry, which is expanded to B (stride 0).
    Returns the output [B, Hq, Lq, D], laid out as [B, Lq, Hq, D]; the prefix keys each row tile computed,
    int32 [B, Hq, row tiles]; and with `lse` the log-sum-exp of each row's scores, float32 [B, Hq, Lq].
    """
    shape = call.shape
    entries, rows_in_memory = (shape.batch, shape.q_len) if not call.packed else (1, q.shape[2])
    out = q.new_empty(entries, rows_in_memory, shape.query_heads, shape.head_dim).transpose(1, 2)
    logs = q.new_empty(entries, shape.query_heads, rows_in_memory, dtype=torch.float32) if lse else None
    visited = torch.empty(
        shape.batch, shape.query_heads, shape.row_tiles(call.config.tile.block_m), dtype=torch.int32, device=q.device
    )
    ranker = Ranker(q, k, v, call) if call.tables.shortest else None
    for rows in row_slices(call, WORKSPACE_BYTES):
        prefill(q, k, v, None if ranker is None else ranker.rank(rows), out, visited, call, rows, logs)
    return out, visited, logs


class Ranker:
    """Ranks the segments of one call, slice by slice; what all slices need is made once."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
        self._k, self._call = k, call
        self._representative = representatives(q, call)
        self._log_sum = log_sums(self._representative, k, call)
        self._pooled = pooled_values(v, call) if call.tables.tail else None

    def rank(self, rows: range) -> tuple[Ranked, Tail | None]:
        """The ranking of all segments that begin in `rows`, and their tail sums if any head has a tail."""
        ranked = order(score(self._representative, self._log_sum, self._k, self._call, rows), self._call, rows)
        return ranked, None if self._pooled is None else tail_sums(ranked, self._pooled, self._call, rows)


def row_slices(call: Call, workspace: int) -> list[range]:
    """Cut the query rows into slices of whole segments whose ranking fits the workspace (bytes).

    A slice is as wide as its longest prefix, so early slices hold more rows.
    """
    shape, tables = call.shape, call.tables
    if not tables.shortest:
        return [range(shape.q_len)]
    key_bytes = RANK_BYTES / call.config.grain
    keys = int(workspace / (key_bytes * shape.batch * shape.query_heads))  # of all segments of one head together
    tail = int(tail_bytes(shape.head_dim) / key_bytes) if tables.tail else 0  # as if a segment had more keys
    slices = []
    begin = 0
    while begin < shape.q_len:
        before = tail + (shape.kv_len if call.packed else shape.offset + begin)
        # the largest number of rows with rows / shortest * (before + rows) <= keys
        fitting = (math.sqrt(before**2 + 4 * keys * tables.shortest) - before) / 2
        end = begin + max(1, int(fitting) // tables.unit) * tables.unit
        slices.append(range(begin, min(end, shape.q_len)))
        begin = end
    return slices


def prefill(
    q: Tensor, k: Tensor, v: Tensor, ranking: tuple[Ranked, Tail | None] | None, out: Tensor, visited: Tensor,
    call: Call, rows: range, lse: Tensor | None = None,
) -> None:  # fmt: skip
    """Window and gathered prefix for the query rows in `rows`, with what `Ranker.rank` made for them.

    Writes out, visited and lse; what is packed has batch stride 0.
    """
    shape, tile, tables = call.shape, call.config.tile, call.tables
    wide = shape.kv_len * max(k.stride(2), v.stride(2)) >= WIDE_ELEMENTS
    kernel, switches, options = _prefill, {"WIDE": wide}, {"maxnreg": MAX_REGISTERS}
    if tile.specialized:
        from s2o_runtime.kernels import prefill_hopper as hopper

        kernel, switches, options = hopper._prefill_hopper, {}, {"maxnreg": hopper.MAX_REGISTERS}
        # no registers are left for 64-bit offsets, and rows are copied 16 bytes at a time: bring a head's together
        if wide or (k.stride(2) | v.stride(2)) * k.element_size() % 16:
            k, v = k.contiguous(), v.contiguous()
    # what is not there is never read, but needs a pointer
    ordered, tail = (visited[:, :, None], None) if ranking is None else (ranking[0].order, ranking[1])
    first, mass, sums = tail or (visited, tables.tau, tables.tau)
    launch(
        kernel,
        (-(-len(rows) // tile.rows), shape.query_heads, shape.batch),
        (
            q, k, v, ordered, first, mass, sums, out, visited if lse is None else lse, visited,
            *call.starts, *tables[:3],
        ),
        (call.scale * LOG2E, shape.q_len, shape.offset, rows.start, tile.chunk, ordered.shape[2]),
        (
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], 0 if call.packed else out.stride(0), *out.stride()[1:3],
            *ordered.stride()[:3],
        ),
        {
            "GROUP": shape.group, "D": shape.head_dim, "BM": tile.block_m, "BN": tile.block_n,
            "STAGES": tile.num_stages, "GRAIN": call.config.grain, "TAIL": TAIL * (tail is not None), "EDGES": EDGES,
            "BUCKETS": BUCKETS, "HAS_START": call.padded, "PACKED": call.packed, "HAS_LSE": lse is not None,
            "ROW_MAX": call.config.row_reduce == "max", **switches,
        },
        (
            *visited.stride()[:2],
            0 if call.packed or lse is None else lse.stride(0), 0 if lse is None else lse.stride(1),
        ),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **options,
    )  # fmt: skip
