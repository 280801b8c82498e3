"""The order: a prefix's steps by falling weight, coarsely (Algorithm 1, line 19).

A full sort would cost more than it saves, so steps are put into `BUCKETS` buckets by score and nearly keep their
positions inside a bucket, which is also kind to memory. The buckets' edges are quantiles of a sample of the row, finer
where scores are high, because most heads stop early.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...call import Call
from ...devices import is_interpreted
from ...sequences import Starts
from ..groups import Strides
from ..launch import group_strides, launch
from ..primitives import GRAIN, find_window_start, head_pointer, load_cache_rows, load_sequence
from .scores import SCORE_LIMIT

ORDER_WARPS = 4
SAMPLES = 512  # with 256 or 1024 heads visit about as much; sorting 1024 took up to a third of the kernel's time
BUCKETS = 32  # one for each lane of a warp
FINEST, COARSEST = 1 / 256, 3 / 4  # shares of the row before the end of the first and of the last but one bucket
LIMIT = tl.constexpr(SCORE_LIMIT)  # the score of a step with a key whose score is NaN or infinite
JITTER = tl.constexpr(40503)  # an odd number near 2^16 over the golden ratio: its multiples' middle bits are spread
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


@triton.jit(
    do_not_specialize=["q_len", "offset", "lookback", "row_begin", "rows_end", "page_shift", "page_rows", "stride_pb"]
)
def _order(
    SCORE, ORDER, FIRST, EDGE, ARRIVED, SHARE_OF_RANK, STARTS: Starts, PAGES, SEGMENT, q_len, offset, lookback,
    row_begin, rows_end, page_shift, page_rows, stride_s: Strides, stride_i: Strides, stride_pb,
    SAMPLES: tl.constexpr, BUCKETS: tl.constexpr, WARPS: tl.constexpr, BN: tl.constexpr,
    HAS_TAIL: tl.constexpr, HAS_START: tl.constexpr, PACKED: tl.constexpr, PORTABLE: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Write to ORDER[b, h, n] the first keys of the steps of the prefix of segment n of the slice, by falling bucket.

    Programs: (segments of the slice, the last ones first; Hq; B). Only a prefix's entries are read and written. ORDER:
    `order` of `groups.Ranking`; with PAGED it has the rows of those keys in the cache, of whose pages a step lies in
    one. SHARE_OF_RANK: float32 [BUCKETS], as `bucket_shares` gives it.

    A counting sort: every warp owns a stretch of the row, every lane a step of a vector of 32 and one bucket, so a few
    ballots rank 32 steps and the loops are free of barriers. Scores are loaded four to a lane, one turn ahead; the four
    are written out one by one, because Triton tensors cannot be indexed and the assembly wants [W, 32] tensors with one
    element a lane and one row a warp (tests/aot.py checks this layout). Inside a bucket, blocks of 128 steps ascend.
    """
    # long prefixes first
    n = tl.num_programs(0) - 1 - tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2)
    segment = tl.load(SEGMENT + h)
    start = tl.load(STARTS.kv_start + b).to(tl.int32) if HAS_START else 0
    _, _, q_len, offset = load_sequence(b, STARTS.cu_q, STARTS.cu_k, q_len, offset, PACKED)
    at = ((b * tl.num_programs(1) + h) * tl.num_programs(0) + n).to(tl.int64)
    if HAS_TAIL:
        tl.store(ARRIVED + at, 0)
    first = find_window_start(row_begin // tl.maximum(segment, 1) + n, segment, offset, lookback, start, BN)
    prefix = (first - start) // GRAIN
    if (segment > 0) & (row_begin + n * segment < tl.minimum(rows_end, q_len)) & (prefix > 0):
        score = head_pointer(SCORE, stride_s, b, h) + n.to(tl.int64) * stride_s.row
        order = head_pointer(ORDER, stride_i, b, h) + n.to(tl.int64) * stride_i.row
        pages = PAGES + b.to(tl.int64) * stride_pb

        # edges: sampled quantiles at geometric ranks
        every = tl.cdiv(prefix, SAMPLES)  # rounded up, so that the sample reaches the last keys, which matter most
        sampled = tl.cdiv(prefix, every)
        index = tl.arange(0, SAMPLES)
        # one of each stretch, and not always its first: text may have a period that the stretches share
        sampled_at = tl.minimum(index * every + ((index * JITTER) >> 7) % every, prefix - 1)
        sample = tl.load(score + sampled_at, mask=index < sampled, other=float("-inf")).to(tl.float32)
        sample = tl.where(sample == LIMIT, -LIMIT, sample)  # no edge: such a step is above all edges, so it comes first
        sample = tl.sort(sample, descending=True)
        rank = (tl.load(SHARE_OF_RANK + tl.arange(0, BUCKETS)) * sampled.to(tl.float32)).to(tl.int32)
        edges = tl.gather(sample, tl.minimum(rank, tl.maximum(sampled - 1, 0)), 0)
        highest = tl.max(edges, 0)
        lowest = tl.min(edges, 0)
        per_bin = (4.0 * BUCKETS - 2.5) / tl.maximum(highest - lowest, 1e-6)
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
            bucket = tl.arange(0, BUCKETS)
            tl.store(FIRST + at * BUCKETS + bucket, begins)
            # bins of earlier buckets: those whose centre is not below the edge before, solved for the bin's number
            edge_before = tl.gather(edges, tl.maximum(bucket - 1, 0), 0)
            earlier = tl.floor((highest - edge_before) * per_bin + 0.75) + 1.0
            earlier = tl.minimum(tl.maximum(earlier, 0.0), 4.0 * BUCKETS)
            edge = highest - (earlier - 1.25) / per_bin
            tl.store(EDGE + at * BUCKETS + bucket, tl.where((bucket > 0) & (earlier > 0.0), edge, float("inf")))
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


class Ordered(NamedTuple):
    """The order of one slice of rows: ORDER, FIRST, EDGE and ARRIVED of `groups`; all but the first for a tail only."""

    order: Tensor
    first: Tensor | None
    edge: Tensor | None
    arrived: Tensor | None


def order(scores: Tensor, call: Call, rows: range, portable: bool | None = None) -> Ordered:
    """Order the prefixes' steps by falling score, coarsely (Algorithm 1, line 19).

    scores: SCORE of the query rows; portable: without inline PTX, as by default in the interpreter and for other
    vendors.
    """
    if portable is None:
        portable = is_interpreted() or torch.version.cuda is None
    shape, tables = call.shape, call.tables
    segments = scores.shape[:3]
    ordered = Ordered(torch.empty_like(scores, dtype=torch.int32), None, None, None)
    if tables.tail:
        first = scores.new_empty(*segments, BUCKETS, dtype=torch.int32)
        edge = torch.empty_like(first, dtype=torch.float32)
        arrived = scores.new_empty(segments, dtype=torch.int32)
        ordered = Ordered(ordered.order, first, edge, arrived)
    launch(
        _order,
        (segments[2], shape.query_heads, shape.batch),
        {
            "SCORE": scores, "ORDER": ordered.order, "FIRST": ordered.first, "EDGE": ordered.edge,
            "ARRIVED": ordered.arrived, "SHARE_OF_RANK": bucket_shares(scores.device), "STARTS": call.starts,
            **call.paging, "SEGMENT": tables.segment, "q_len": shape.q_len, "offset": shape.offset,
            "lookback": call.config.lookback, "row_begin": rows.start, "rows_end": rows.stop,
            **group_strides(s=scores, i=ordered.order),
        },
        {
            "SAMPLES": SAMPLES, "BUCKETS": BUCKETS, "WARPS": ORDER_WARPS, "BN": call.config.tile.block_n,
            "HAS_TAIL": tables.tail, "HAS_START": call.kv_start is not None, "PACKED": call.packed,
            "PORTABLE": portable, "PAGED": call.pages is not None,
        },
        num_warps=ORDER_WARPS,
    )  # fmt: skip
    return ordered


@lru_cache(maxsize=8)
def bucket_shares(device: torch.device) -> Tensor:
    """Return the share of a row before the end of each bucket but the last, float32 [BUCKETS]; the last repeats."""
    shares = FINEST * (COARSEST / FINEST) ** torch.linspace(0, 1, BUCKETS - 1, dtype=torch.float64)
    return torch.cat((shares, shares[-1:])).to(device, torch.float32)
