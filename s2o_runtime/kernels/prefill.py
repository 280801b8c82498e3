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

from .. import config
from ..call import Call
from ..devices import Resources, get_resources
from ..sequences import CallShape, Starts
from .groups import Heads, Mode, Ranking, Sizes, Splits, Strides
from .launch import Argument, group_strides, launch
from .primitives import (
    GRAIN,
    LOG2E,
    MAX_REGISTERS,
    REST,
    STOP_RULE_BITS,
    TAIL,
    WIDE_ELEMENTS,
    assign_tile,
    attend_gathered,
    attend_window,
    find_dense_from,
    find_diagonal_start,
    find_window_start,
    head_pointer,
    load_sequence,
    log_sum_exp,
    scale_tail,
    start_softmax,
    sum_remaining_mass,
    weigh_tail,
)
from .rank.means import average
from .rank.order import BUCKETS, RANK_BYTES, order
from .rank.scores import score
from .rank.tail import EDGES, count_tail_bytes, sum_tails
from .splits import allocate_splits, combine, count_key_splits

CACHE_SHARE = 0.7  # of the L2 cache, for the keys and values of the heads that take turns
WORKSPACE_BYTES = 352 << 20  # of one slice; representatives, mean values and logs of a whole call come on top


@triton.jit(
    do_not_specialize=[
        "q_len", "offset", "row_begin", "chunk", "segments", "waves", "page_shift", "page_rows", "stride_cb",
        "stride_ch", "stride_eb", "stride_eh", "stride_pb", "splits", "last_rows", "lookback",
    ]
)  # fmt: skip
def _prefill(
    Q, K, V, RANKING: Ranking, OUT, LSE, VISITED, STARTS: Starts, PAGES, HEADS: Heads,
    SPLITS: Splits, qk_scale, q_len, offset, row_begin, chunk, segments, waves, page_shift, page_rows,
    stride_q: Strides, stride_k: Strides, stride_v: Strides, stride_o: Strides, stride_i: Strides,
    stride_cb, stride_ch, stride_eb, stride_eh,
    stride_pb, splits, last_rows, lookback,  # they stand last: ahead of others they would change the instructions
    SIZES: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Compute S2O attention of one row tile: window, prefix until the stop, tail (Algorithms 2 and 3 of the paper).

    With scores s_ij = q_i . k_j * qk_scale, row i keeps m_i = max_j s_ij, l_i = sum_j 2^(s_ij - m_i) and acc_i = sum_j
    2^(s_ij - m_i) v_j over the keys j it has visited, and returns acc_i / l_i. A soft cap makes scores CAP * tanh(s_ij
    / CAP). A sink is a key without a value that every row has visited from the start. After every chunk of the prefix a
    row's gain is (l_i - l_i') / l_i', where l_i' is its l from before the chunk at the new m_i; the tile's gain is the
    rows' mean. The tile stops when the gain of a tile of the chunk is below the threshold tau (StopRule.PAPER), or the
    gain of a tile times the tiles left is (StopRule.REST). Then the tail adds to l_i what the rest of the order is
    estimated to bring, with its mean value.

    Programs: (row tiles of the slice; Hq; B), with HAS_LAUNCH_ORDER (Hq; row tiles of the slice; B), with HAS_SPLITS
    (Hq * splits; row tiles of the slice; B), each for what `primitives.assign_tile` gives it. With HAS_SPLITS programs
    share the keys of a row tile, as `splits` describes, and `splits.combine` makes one output of theirs. Rows,
    positions, lengths and strides count elements. Letters name the strides that a tensor has; tensors without are
    contiguous. Constants are the fields of SIZES and MODE. `groups` has every other pointer.

        VISITED                int32 [B, Hq, row tiles], strides c: prefix keys that each row tile visited

    With PAGED, B counts the sequences of PACKED too, and the entries of RANKING.order are the steps' first rows.

    chunk: tiles of BN keys between two stop checks; segments: N'; waves: Hq, or Hq * splits, over the heads that take
    turns (HAS_LAUNCH_ORDER); splits: programs of a row tile, a power of two (HAS_SPLITS); last_rows: as in
    `config.LayerConfig`.
    """
    GROUP: tl.constexpr = SIZES.GROUP
    D: tl.constexpr = SIZES.D
    BM: tl.constexpr = SIZES.BM
    BN: tl.constexpr = SIZES.BN
    STAGES: tl.constexpr = SIZES.STAGES
    EDGES: tl.constexpr = SIZES.EDGES
    stride_kl = stride_k.row
    stride_vl = stride_v.row
    if MODE.WIDE:  # a sequence spans 2^31 elements or more
        stride_kl = stride_kl.to(tl.int64)
        stride_vl = stride_vl.to(tl.int64)
    tile, h, b, heads, split = assign_tile(
        HEADS.launch_order, waves, row_begin, q_len, last_rows, splits, BM, MODE.HAS_LAUNCH_ORDER, MODE.HAS_SPLITS
    )
    segment = tl.load(HEADS.segment + h)
    start = tl.load(STARTS.kv_start + b).to(tl.int32) if MODE.HAS_START else 0
    q_max = q_len
    q_first, k_first, q_len, offset = load_sequence(b, STARTS.cu_q, STARTS.cu_k, q_len, offset, MODE.PACKED)
    flags = tl.load(HEADS.flags + h)
    row0 = row_begin + tile * BM
    n = row0 // tl.maximum(segment, 1)
    sparse = (segment > 0) & (row0 < find_dense_from(q_len, last_rows, BM))
    first = tl.where(sparse, find_window_start(n, segment, offset, lookback, start, BN), start)
    prefix = tl.where(row0 < q_len, first - start, 0)
    position0 = offset + row0
    kv_len = offset + q_len

    offs_d = tl.arange(0, D)
    rows = row0 + tl.arange(0, BM)
    position = offset + rows
    real = (rows < q_len) & (position >= start)

    head_row = (q_first + row0).to(tl.int64)
    q_base = head_pointer(Q, stride_q, b, h) + head_row * stride_q.row
    offs_row = tl.arange(0, BM)[:, None]
    q = tl.load(q_base + offs_row * stride_q.row + offs_d[None, :], mask=rows[:, None] < q_len, other=0.0)
    k_base = head_pointer(K, stride_k, b, h // GROUP)
    v_base = head_pointer(V, stride_v, b, h // GROUP)
    pages = PAGES
    if MODE.PAGED:
        pages += b.to(tl.int64) * stride_pb
    elif MODE.PACKED:
        k_base += k_first.to(tl.int64) * stride_kl
        v_base += k_first.to(tl.int64) * stride_vl

    m, l = start_softmax(HEADS.sinks, h, BM, MODE.HAS_SINKS)
    if MODE.HAS_SPLITS and MODE.HAS_SINKS:
        # the first key's decay makes the others' l 0
        m = tl.where(sparse | (split == splits - 1), m, float("-inf"))
    acc = tl.zeros([BM, D], tl.float32)

    # window: whole tiles that every row sees, then the diagonal
    diagonal = find_diagonal_start(first, position0, BN)
    near = tl.where(row0 < q_len, first, diagonal)
    end = tl.minimum(position0 + BM, kv_len)
    if MODE.HAS_SPLITS and not sparse:
        whole = (diagonal - near) // BN  # tiles, in ranges as equal as can be, which may be empty
        diagonal = near + whole * (split + 1) // splits * BN
        end = tl.where(split == splits - 1, end, diagonal)
        near += whole * split // splits * BN
    m, l, acc = attend_window(
        q, k_base, v_base, stride_kl, stride_vl, m, l, acc, qk_scale, near, diagonal, end, kv_len, position, BN,
        STAGES, MODE.CAP, pages, page_shift, page_rows, MODE.PAGED,
    )  # fmt: skip

    # prefix: tiles in order, chunk by chunk
    tiles = prefix // BN
    steps = tiles * (BN // GRAIN)
    tau = tl.load(HEADS.tau + h)
    real_rows = tl.sum(real.to(tl.float32), 0)
    order = head_pointer(RANKING.order, stride_i, b, h)
    of_slice = n - row_begin // tl.maximum(segment, 1)  # the segment's number in the slice
    order += of_slice.to(tl.int64) * stride_i.row
    one = 1.0  # what a tile's gain counts for in the paper's rule
    if MODE.HAS_SPLITS:
        shared = tl.minimum(tiles, 1)  # the first tile, which all splits visit
        # each split counts 1 / splits of what all visit; sums that are relative to a lower m are less
        late = tl.where(sparse, tl.log2(splits.to(tl.float32)), 0.0)
        m -= tl.where(tiles == 0, late, 0.0)
        tiles = shared + tl.cdiv(tl.maximum(tiles - 1 - split, 0), splits)
        one /= splits
    done = 0
    chunk_begin = 0
    added = l  # what the last chunk added to l
    running = tiles > 0
    while running:
        length = tl.minimum(chunk, tiles - done)
        if MODE.HAS_SPLITS:
            length = tl.where(done == 0, 1, length)
        m_before = m
        l_before = l
        m, l, acc = attend_gathered(
            q, k_base, v_base, order, stride_kl, stride_vl, m, l, acc, qk_scale, done, length, BN, STAGES, MODE.CAP,
            split, splits, MODE.HAS_SPLITS,
        )  # fmt: skip
        chunk_begin = done
        done += length
        # the stop: does a tile's gain, or that of all tiles left, reach the threshold?
        old = l_before * tl.exp2(m_before - m)
        added = l - old
        gain = tl.where(real, added / tl.where(real, old, 1.0), 0.0)
        chunk_gain = tl.sum(gain, 0) / real_rows
        times = tl.where((flags & STOP_RULE_BITS) == REST, (tiles - done).to(tl.float32), one)
        reaches = chunk_gain * times >= tau * length.to(tl.float32)
        if MODE.HAS_SPLITS:  # behind the shared tile each visits at least a chunk alone
            m -= tl.where(chunk_begin == 0, late, 0.0)
            reaches |= chunk_begin == 0
        running = (done < tiles) & reaches

    if MODE.HAS_TAIL:  # noqa: SIM102
        if ((flags & TAIL) != 0) & (done < tiles):
            at = ((b * heads + h) * segments + of_slice).to(tl.int64)
            before_chunk, visited = chunk_begin, done
            if MODE.HAS_SPLITS:  # tiles of all splits
                before_chunk, visited = 1 + (chunk_begin - 1) * splits, 1 + (done - 1) * splits
            e = tl.arange(0, EDGES)
            begins = tl.load(RANKING.first + at * SIZES.BUCKETS + e * (SIZES.BUCKETS // EDGES))
            masses = tl.load(RANKING.mass + at * EDGES + e)
            before, edge, share = sum_remaining_mass(begins, masses, before_chunk * (BN // GRAIN), steps, EDGES)
            mass, edge, share = sum_remaining_mass(begins, masses, visited * (BN // GRAIN), steps, EDGES)
            tail = scale_tail(before, mass, (tiles - done) / (done - chunk_begin)) * added
            l += tail
            acc += tail[:, None] * weigh_tail(RANKING.sums + at * EDGES * D, edge, share, mass, D, EDGES)[None, :]

    if MODE.HAS_SPLITS:
        real = real & (l != 0)  # no row of a split without keys
    acc = tl.where(real[:, None], acc / tl.where(real, l, 1.0)[:, None], 0.0)
    visited_at = VISITED + b.to(tl.int64) * stride_cb + h.to(tl.int64) * stride_ch + row0 // BM
    if MODE.HAS_SPLITS:
        split_tile = ((b * splits + split) * heads + h) * tl.num_programs(1) + tile
        split_row = split_tile.to(tl.int64) * BM
        split_lse = tl.where(real, log_sum_exp(m, tl.where(real, l, 1.0)), float("-inf"))
        tl.store(SPLITS.split_lse + split_row + tl.arange(0, BM), split_lse, mask=rows < q_len)
        split_base = SPLITS.split_out + split_row * D
        tl.store(split_base + tl.arange(0, BM)[:, None] * D + offs_d[None, :], acc, mask=rows[:, None] < q_len)
        visited_at = SPLITS.split_visited + split_tile
        done -= tl.where(split == 0, 0, shared)
    else:
        out_base = head_pointer(OUT, stride_o, b, h) + head_row * stride_o.row
        tl.store(
            out_base + offs_row * stride_o.row + offs_d[None, :],
            acc.to(OUT.dtype.element_ty),
            mask=rows[:, None] < q_len,
        )
        if MODE.HAS_LSE:
            lse = tl.where(real, log_sum_exp(m, tl.where(real, l, 1.0)), float("-inf"))
            lse_base = LSE + b.to(tl.int64) * stride_eb + h.to(tl.int64) * stride_eh + head_row
            tl.store(lse_base + tl.arange(0, BM), lse, mask=rows < q_len)
    if row0 < q_max:
        tl.store(visited_at, done * BN)


def run_prefill(call: Call, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute S2O attention with Triton: the function of `reference.s2o_attention_reference`.

    Args:
        call: in bfloat16 or float16, with one of `HEAD_DIMS` for all tensors, whose last dimensions are contiguous.
        out: the output, written and returned, [B, Hq, Lq, D] in q's type, the last dimension contiguous, of packed
            sequences one batch entry; a new tensor by default.

    Returns:
        The output [B, Hq, Lq, D], laid out as [B, Lq, Hq, D]; the prefix keys each row tile computed, int32
        [B, Hq, row tiles]; and with `call.with_lse` the log-sum-exp of each row's scores and sink, float32 [B, Hq, Lq].
    """
    q, shape = call.q, call.shape
    heads = shape.query_heads
    row_tiles = shape.row_tiles(call.config.tile.block_m)
    entries, rows_in_memory = (1, q.shape[2]) if call.packed else (shape.batch, shape.q_len)
    if out is None:
        out = q.new_empty(entries, rows_in_memory, heads, shape.head_dim).transpose(1, 2)
    logs = q.new_empty(entries, heads, rows_in_memory, dtype=torch.float32) if call.with_lse else None
    visited = torch.empty(shape.batch, heads, row_tiles, dtype=torch.int32, device=q.device)
    ranker = Ranker(call) if call.tables.shortest_segment else None
    for rows in slice_rows(call, WORKSPACE_BYTES):
        ranking = None if ranker is None else ranker.rank(rows)
        prefill(call, ranking, out, visited, rows, logs)
    return out, visited, logs


class Ranker:
    """Ranks the segments of one call, slice by slice; what all slices need is computed once."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._means = average(call)

    def rank(self, rows: range) -> Ranking:
        """Rank all segments that begin in `rows`, and sum their tails if any head has one."""
        means, call = self._means, self._call
        scores = score(means, call, rows)
        ordered = order(scores, call, rows)
        if means.values is None:
            return Ranking(ordered.order, None, None, None)
        return sum_tails(ordered, scores, means.values, call, rows)


def slice_rows(call: Call, workspace: int) -> list[range]:
    """Cut the query rows into slices of whole segments whose ranking fits so many bytes of workspace.

    A slice is as wide as its longest prefix, so early slices hold more rows.
    """
    shape, tables = call.shape, call.tables
    if not tables.shortest_segment:
        return [range(shape.q_len)]
    key_bytes = shape.batch * shape.query_heads * RANK_BYTES / config.KEY_BLOCK
    keys = int(workspace / key_bytes)  # of all segments of one head together
    sums = shape.query_heads * count_tail_bytes(shape.head_dim) * tables.tail
    tail = int(shape.batch * sums / key_bytes)  # as if a segment had more keys
    slices = []
    begin = 0
    while begin < shape.q_len:
        before = tail + (shape.kv_len if call.packed else shape.offset + begin)
        # the largest number of rows with rows / shortest * (before + rows) <= keys
        fitting = (math.sqrt(before**2 + 4 * keys * tables.shortest_segment) - before) / 2
        end = begin + max(1, int(fitting) // tables.row_multiple) * tables.row_multiple
        slices.append(range(begin, min(end, shape.q_len)))
        begin = end
    return slices


def count_heads_per_wave(shape: CallShape, pair_bytes: int, gpu: Resources) -> int:
    """Count the heads that take turns in a layer whose programs differ in work, as `primitives.assign_tile` has it.

    Programs differ where heads have several modes, and where the prompt's beginning is among the rows; few of them
    keep a GPU waiting for the longest. With many heads in turns that wait is short, so as many take turns as the cache
    holds the keys and values of, and at least those of one KV head (docs/results/order-of-programs-h100.txt). The count
    divides the number of heads. pair_bytes: of an element of k and one of v.
    """
    if shape.offset >= shape.q_len // 2:
        return 1
    cached = int(CACHE_SHARE * gpu.cache_bytes // (shape.kv_len * shape.head_dim * pair_bytes))  # KV heads
    most = min(max(cached, 1) * shape.group, shape.query_heads)
    return next(heads for heads in range(most, 0, -1) if shape.query_heads % heads == 0)


def prefill(
    call: Call, ranking: Ranking | None, out: Tensor, visited: Tensor, rows: range, lse: Tensor | None = None
) -> None:  # fmt: skip
    """Compute window and gathered prefix for the query rows in `rows`, which begin at a multiple of every segment.

    ranking: what `Ranker.rank` gave for these rows; None if no head has a prefix. out, visited, lse: tensors to write,
    as `run_prefill` returns them; of packed sequences one batch entry.
    """
    shape, tile, tables = call.shape, call.config.tile, call.tables
    q, k, v = call.q, call.k, call.v
    sinks = call.scoring.sinks
    rows_apart = k.shape[2] if call.pages is not None else shape.kv_len  # what offsets of one sequence span
    wide = rows_apart * max(k.stride(2), v.stride(2)) >= WIDE_ELEMENTS
    kernel = _prefill
    options = {"maxnreg": MAX_REGISTERS}
    if tile.specialized:
        from . import prefill_hopper as hopper

        kernel = hopper._prefill_hopper
        options = {"maxnreg": hopper.MAX_REGISTERS}
        # no registers are left for 64-bit offsets, and rows are copied 16 bytes at a time: bring a head's together
        if wide or (k.stride(2) * k.element_size() | v.stride(2) * v.element_size()) % 16:
            k, v = k.contiguous(), v.contiguous()
        wide = False
    segments = 0 if ranking is None else ranking.order.shape[2]
    if ranking is None:  # Triton types the code of other heads: any int32 pointer stands in for the order
        ranking = Ranking(tables.segment[None, None], None, None, None)
    stride_eb, stride_eh = (0, 0) if lse is None else lse.stride()[:2]
    one_entry: dict[str, Argument] = {}
    if call.packed:
        one_entry = {"stride_o": Strides(0, *out.stride()[1:3]), "stride_eb": 0}
    programs = -(-len(rows) // tile.rows)
    waves = 1
    parts = Splits(None, None, None)
    grid = (programs, shape.query_heads, shape.batch)
    gpu = get_resources(q.device)
    splits = count_key_splits(call, programs, gpu)
    if ordered := tables.works_unevenly or splits > 1:
        waves = shape.query_heads // count_heads_per_wave(shape, k.element_size() + v.element_size(), gpu)
        grid = (shape.query_heads, programs, shape.batch)
    if splits > 1:
        parts, waves = allocate_splits(call, splits, programs * tile.rows, q.device), splits * shape.query_heads
        grid = (splits * shape.query_heads, programs, shape.batch)
    launch(
        kernel,
        grid,
        {
            "Q": q, "K": k, "V": v, "RANKING": ranking, "OUT": out, "LSE": lse,
            "VISITED": visited, "STARTS": call.starts, **call.paging,
            "HEADS": Heads(tables.tau, tables.segment, tables.flags, tables.launch_order, sinks),
            "SPLITS": parts,
            "qk_scale": call.scale * LOG2E, "q_len": shape.q_len, "offset": shape.offset, "row_begin": rows.start,
            "chunk": tile.count_chunk(splits), "segments": segments,
            "waves": waves, "splits": splits, "last_rows": call.config.last_rows,
            "lookback": call.config.lookback,
            **group_strides(q=q, k=k, v=v, o=out, i=ranking.order), "stride_cb": visited.stride(0),
            "stride_ch": visited.stride(1), "stride_eb": stride_eb, "stride_eh": stride_eh, **one_entry,
        },
        {
            "SIZES": Sizes(
                GROUP=shape.group, D=shape.head_dim, BM=tile.block_m, BN=tile.block_n, STAGES=tile.num_stages,
                EDGES=EDGES, BUCKETS=BUCKETS,
            ),
            "MODE": Mode(
                HAS_TAIL=ranking.sums is not None, HAS_START=call.kv_start is not None, PACKED=call.packed,
                HAS_LSE=lse is not None, HAS_SINKS=sinks is not None, CAP=call.cap,
                HAS_LAUNCH_ORDER=ordered, HAS_SPLITS=splits > 1,
                PAGED=call.pages is not None, WIDE=wide,
            ),
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **options,
    )  # fmt: skip
    if splits > 1:
        combine(parts, out, visited, lse, call, rows)
