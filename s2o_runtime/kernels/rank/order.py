"""The order: a prefix's steps by falling weight, coarsely (Algorithm 1, line 19), and the tails' sums beside it.

A full sort would cost more than it saves, so steps are put into the buckets of `buckets.py` by score and nearly keep
their positions inside a bucket, which is also kind to memory. The tails' sums need the buckets, not the order: programs
of the same launch compute them, and each kind runs where the other waits for memory.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...call import Call
from ...devices import get_capability, is_interpreted
from ...tiles import Capability
from ...sequences import Starts
from ..groups import Ranking, Strides
from ..launch import group_strides, launch
from ..primitives import GRAIN, TAIL, find_window_start, head_pointer, load_cache_rows, load_sequence
from .buckets import BUCKETS, SAMPLES, bucket_shares, find_buckets
from .means import Means
from .tail import EDGES, TAIL_SEGMENTS, TAIL_STEPS, count_tail_splits, sum_tails

ORDER_WARPS = 16  # few programs, such as those of a chunk, keep a GPU waiting for the longest
RANK_BYTES = 6  # of workspace for each step of a row: a float16 score and an int32 index

# Lane i of a warp holds one step, in `bucket` the step's bucket, and a counter for bucket i.
# `peers` becomes the set of lanes whose step belongs to bucket i: one ballot for each of the bucket's five bits, and
# one that leaves out steps with the sixth bit, which belong to no bucket.
_PEERS = """
    .reg .pred p;
    .reg .b32 lane, peers, votes, bit, flip;
    mov.u32 lane, %laneid;
    and.b32 bit, bucket, 32;
    setp.eq.u32 p, bit, 0;
    vote.sync.ballot.b32 peers, p, 0xffffffff;
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
    "{ .reg .b32 bucket, members; mov.b32 bucket, $1;" + _PEERS + " popc.b32 members, peers; add.u32 $0, $2, members; }"
)
RANK_ASM = tl.constexpr(
    "{ .reg .b32 bucket, base, members, mine, below; mov.b32 bucket, $2; mov.b32 base, $3;"
    + _PEERS
    + """
    shfl.sync.idx.b32 mine, peers, bucket, 31, 0xffffffff;
    shfl.sync.idx.b32 $0, base, bucket, 31, 0xffffffff;
    mov.u32 below, %lanemask_lt;
    and.b32 mine, mine, below;
    popc.b32 mine, mine;
    add.u32 $0, $0, mine;
    popc.b32 members, peers;
    add.u32 $1, base, members; }"""
)


@triton.jit
def _bucket_of(score, highest, per_bin, table, inside, BUCKETS: tl.constexpr):
    """Look up the bucket of each score [W, 32]: a linear bin (bin 0 is above `highest`), then a table.

    table: int32 [W, 32], four bins of 8 bits in a word. A score that is not `inside` gets BUCKETS, which is no bucket.
    """
    position = tl.minimum(tl.maximum((highest - score) * per_bin + 1.25, 0.0), 4.0 * BUCKETS - 1.0).to(tl.int32)
    word = tl.gather(table, position >> 2, 1)
    return tl.where(inside, (word >> ((position & 3) * 8)) & 0xFF, BUCKETS)


@triton.jit
def _count(bucket, count, BUCKETS: tl.constexpr, PORTABLE: tl.constexpr):
    """Add to count [W, BUCKETS] how many of `bucket` [W, 32] belong to each bucket, row by row."""
    if PORTABLE:
        same = bucket[:, :, None] == tl.arange(0, BUCKETS)[None, None, :]
        return count + tl.sum(same.to(tl.int32), 1)
    return tl.inline_asm_elementwise(COUNT_ASM, "=&r,r,r", [bucket, count], tl.int32, is_pure=False, pack=1)


@triton.jit
def _rank(bucket, base, BUCKETS: tl.constexpr, PORTABLE: tl.constexpr):
    """Rank each step in the order [W, 32], counting on from its bucket's base; with the new base [W, BUCKETS]."""
    if PORTABLE:
        same = (bucket[:, :, None] == tl.arange(0, BUCKETS)[None, None, :]).to(tl.int32)
        rank = tl.sum(same * (base[:, None, :] + tl.cumsum(same, 1) - same), 2)
        return rank, base + tl.sum(same, 1)
    return tl.inline_asm_elementwise(
        RANK_ASM, "=&r,=&r,r,r", [bucket, base], (tl.int32, tl.int32), is_pure=False, pack=1
    )


@triton.jit
def _load_four(SCORE, first, prefix):
    """Load four scores for each lane, from `first` [W, 32] on, as four tensors of vectors [W, 32]."""
    index = first[:, :, None] + tl.arange(0, 4)[None, None, :]
    scores = tl.load(SCORE + index, mask=index < prefix, other=0.0)
    even, odd = tl.split(tl.reshape(scores, [first.shape[0], first.shape[1], 2, 2]))
    s0, s2 = tl.split(even)
    s1, s3 = tl.split(odd)
    return s0.to(tl.float32), s1.to(tl.float32), s2.to(tl.float32), s3.to(tl.float32)


@triton.jit
def _order_steps(
    score, order, first_of_bucket, pages, prefix, start, SHARE_OF_RANK, page_shift, page_rows,
    SAMPLES: tl.constexpr, BUCKETS: tl.constexpr, WARPS: tl.constexpr, HAS_TAIL: tl.constexpr, PORTABLE: tl.constexpr,
    PAGED: tl.constexpr,
):  # fmt: skip
    """Write to `order` the first keys of the `prefix` steps of a segment, by falling bucket; see `_order`.

    A counting sort: every warp owns a stretch of the row, every lane a step of a vector of 32 and one bucket, so a few
    ballots rank 32 steps and the loops are free of barriers. Scores are loaded four to a lane, one turn ahead; the four
    are written out one by one, because Triton tensors cannot be indexed and the assembly wants [W, 32] tensors with one
    element a lane and one row a warp (tests/aot.py checks this layout). Inside a bucket, blocks of 128 steps ascend.
    """
    edges, highest, per_bin = find_buckets(score, prefix, SHARE_OF_RANK, SAMPLES, BUCKETS)
    bins = tl.arange(0, BUCKETS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    centre = highest - (bins.to(tl.float32) - 0.75) / per_bin
    below = tl.minimum(tl.sum((centre[:, :, None] < edges[None, None, :]).to(tl.int32), 2), BUCKETS - 1)
    packed = tl.sum(below << (tl.arange(0, 4)[None, :] * 8), 1)
    table = tl.broadcast_to(packed[None, :], [WARPS, BUCKETS])

    # how many steps of each bucket each warp's stretch holds
    TURN: tl.constexpr = 4 * BUCKETS
    stretch = tl.cdiv(prefix, WARPS * TURN) * TURN
    mine = tl.arange(0, WARPS)[:, None] * stretch + tl.arange(0, BUCKETS)[None, :] * 4
    count = tl.zeros([WARPS, BUCKETS], tl.int32)
    four = _load_four(score, mine, prefix)
    for t in range(0, stretch, TURN):
        following = _load_four(score, mine + t + TURN, prefix)
        for i in tl.static_range(4):
            step_bucket = _bucket_of(four[i], highest, per_bin, table, mine + t + i < prefix, BUCKETS)
            count = _count(step_bucket, count, BUCKETS, PORTABLE)
        four = following

    # where each warp's share of each bucket begins, then where each step goes
    total = tl.sum(count, 0)
    begins = tl.cumsum(total, 0) - total
    base = begins[None, :] + tl.cumsum(count, 0) - count
    if HAS_TAIL:
        tl.store(first_of_bucket + tl.arange(0, BUCKETS), begins)
    four = _load_four(score, mine, prefix)
    for t in range(0, stretch, TURN):
        following = _load_four(score, mine + t + TURN, prefix)
        for i in tl.static_range(4):
            step = mine + t + i
            inside = step < prefix
            step_bucket = _bucket_of(four[i], highest, per_bin, table, inside, BUCKETS)
            step_rank, base = _rank(step_bucket, base, BUCKETS, PORTABLE)
            key = start + step * GRAIN
            if PAGED:
                key = load_cache_rows(tl.where(inside, key, 0), pages, page_shift, page_rows)
            tl.store(order + step_rank, key, mask=inside)
        four = following


@triton.jit(
    do_not_specialize=[
        "q_len", "offset", "lookback", "row_begin", "rows_end", "segments", "splits", "split_size", "page_shift",
        "page_rows", "stride_pb",
    ]
)  # fmt: skip
def _order(
    SCORE, ORDER, FIRST, MASS, SUMS, VALUES, ARRIVED, SHARE_OF_RANK, STARTS: Starts, PAGES, SEGMENT, FLAGS, q_len,
    offset, lookback, row_begin, rows_end, segments, splits, split_size, page_shift, page_rows, stride_s: Strides,
    stride_i: Strides, stride_v: Strides, stride_pb,
    GROUP: tl.constexpr, D: tl.constexpr, SAMPLES: tl.constexpr, BUCKETS: tl.constexpr, EDGES: tl.constexpr,
    WARPS: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, IEEE: tl.constexpr,
    HAS_TAIL: tl.constexpr, HAS_START: tl.constexpr, PACKED: tl.constexpr, PORTABLE: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Write to ORDER[b, h, n] the first keys of the steps of the prefix of segment n of the slice, by falling bucket.

    Programs: (segments of the slice, the last ones first, and with HAS_TAIL those of `sum_tails`; Hq; B). Only a
    prefix's entries are read and written. ORDER, FIRST, MASS and SUMS: `groups.Ranking`; with PAGED, ORDER has the rows
    of those keys in the cache, of whose pages a step lies in one. SHARE_OF_RANK: float32 [BUCKETS], as `bucket_shares`
    gives it. VALUES, ARRIVED, splits and split_size: as for `sum_tails`.
    """
    program = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2)
    segment = tl.load(SEGMENT + h)
    start = tl.load(STARTS.kv_start + b).to(tl.int32) if HAS_START else 0
    _, _, q_len, offset = load_sequence(b, STARTS.cu_q, STARTS.cu_k, q_len, offset, PACKED)
    score = head_pointer(SCORE, stride_s, b, h)
    head = (b * tl.num_programs(1) + h).to(tl.int64)
    before = row_begin // tl.maximum(segment, 1)
    last = tl.cdiv(tl.minimum(rows_end, q_len) - row_begin, tl.maximum(segment, 1))  # segments of this head
    if (segment > 0) & (program < segments):
        n = segments - 1 - program  # long prefixes first
        prefix = (find_window_start(before + n, segment, offset, lookback, start, BN) - start) // GRAIN
        if (n < last) & (prefix > 0):
            order = head_pointer(ORDER, stride_i, b, h) + n.to(tl.int64) * stride_i.row
            _order_steps(
                score + n.to(tl.int64) * stride_s.row, order, FIRST + (head * segments + n) * BUCKETS,
                PAGES + b.to(tl.int64) * stride_pb, prefix, start, SHARE_OF_RANK, page_shift, page_rows,
                SAMPLES, BUCKETS, WARPS, HAS_TAIL, PORTABLE, PAGED,
            )  # fmt: skip
    if HAS_TAIL:  # noqa: SIM102
        if (segment > 0) & (program >= segments) & ((tl.load(FLAGS + h) & TAIL) != 0):
            of_tail = tl.num_programs(0) - 1 - program
            block = of_tail // splits
            n = block * BS + tl.arange(0, BS)
            first = find_window_start(before + n, segment, offset, lookback, start, BN)
            steps = tl.where(n < last, (first - start) // GRAIN, 0)
            values = head_pointer(VALUES, stride_v, b, h // GROUP)
            at = head * segments + block * BS
            arrived = ARRIVED + head * tl.cdiv(segments, BS) + block
            if block * BS < last:
                sum_tails(
                    score, values, MASS, SUMS, arrived, SHARE_OF_RANK, n, steps, at, n < segments,
                    of_tail % splits, splits, split_size, stride_s.row, stride_v.row,
                    D, SAMPLES, BUCKETS, EDGES, BS, BK, IEEE,
                )  # fmt: skip


def order(scores: Tensor, means: Means, call: Call, rows: range, portable: bool | None = None) -> Ranking:
    """Order the prefixes' steps by falling score, coarsely (Algorithm 1, line 19), and sum the tails of that order.

    scores: SCORE of the query rows; portable: without inline PTX, as by default in the interpreter and for other
    vendors.
    """
    if portable is None:
        portable = is_interpreted() or torch.version.cuda is None
    shape, tables = call.shape, call.tables
    ranking = Ranking(torch.empty_like(scores, dtype=torch.int32), None, None, None)
    segments, programs, splits, split_size = scores.shape[2], scores.shape[2], 1, 0
    if tables.tail:
        blocks = -(-segments // TAIL_SEGMENTS)
        splits = count_tail_splits(blocks * shape.query_heads * shape.batch, scores.shape[3])
        programs += blocks * splits
        size = *scores.shape[:3], EDGES
        split_size = math.prod(size) * (shape.head_dim + 1)
        # of each split the sums, and behind them their masses; those of the first become those of all
        parts = scores.new_empty(splits, split_size, dtype=torch.float32)
        sums, mass = parts[0].split([math.prod(size) * shape.head_dim, math.prod(size)])
        first = scores.new_empty(*scores.shape[:3], BUCKETS, dtype=torch.int32)
        ranking = Ranking(ranking.order, first, mass.view(size), sums.view(*size, shape.head_dim))
    values = call.v if means.values is None else means.values
    launch(
        _order,
        (programs, shape.query_heads, shape.batch),
        {
            "SCORE": scores, "ORDER": ranking.order, "FIRST": ranking.first, "MASS": ranking.mass, "SUMS": ranking.sums,
            "VALUES": values, "ARRIVED": means.arrived, "SHARE_OF_RANK": bucket_shares(scores.device),
            "STARTS": call.starts, **call.paging, "SEGMENT": tables.segment, "FLAGS": tables.flags,
            "q_len": shape.q_len, "offset": shape.offset, "lookback": call.config.lookback,
            "row_begin": rows.start, "rows_end": rows.stop, "segments": segments, "splits": splits,
            "split_size": split_size, **group_strides(s=scores, i=ranking.order, v=values),
        },
        {
            "GROUP": shape.group, "D": shape.head_dim, "SAMPLES": SAMPLES, "BUCKETS": BUCKETS, "EDGES": EDGES,
            "WARPS": ORDER_WARPS, "BS": TAIL_SEGMENTS, "BK": TAIL_STEPS, "BN": call.config.tile.block_n,
            "IEEE": values.dtype != torch.bfloat16, "HAS_TAIL": tables.tail, "HAS_START": call.kv_start is not None,
            "PACKED": call.packed, "PORTABLE": portable, "PAGED": call.pages is not None,
        },
        num_warps=ORDER_WARPS,
        maxnreg=limit_registers(shape.head_dim, tables.tail, get_capability(scores.device)),
    )  # fmt: skip
    return ranking


def limit_registers(head_dim: int, tail: bool, gpu: Capability) -> int:
    """Return the registers of a thread of `_order`: few, so that two programs, which wait for memory, share an SM.

    Tails' sums fit in them on sm_90 alone, whose products read their operands from shared memory.
    """
    return 64 if not tail or (gpu == (9, 0) and head_dim <= 128) else 128
