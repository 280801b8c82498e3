"""The tail's tables: what the keys that a row tile skips would bring, by the weights that ranked them.

For every segment and for every second bucket of its order: the sum of the weights of all steps in this bucket and
behind it, and of weights times mean values (docs/how-it-works.md). Steps are read where they lie, none is gathered: it
is a matrix product of [segments x buckets, steps] with [steps, D]. Where segments are few, several programs share the
steps of one, and the last of them adds up what all found.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .buckets import BUCKETS, find_buckets, find_highest_scores

EDGES = 16  # of the order's buckets every second one
TAIL_SEGMENTS = 4  # at once: with more, mean values are read less often, but too few registers are left for the order
TAIL_STEPS = 32  # at once
# A program takes 0.4 us for 64 steps whatever else runs (H200), so the last of few programs are waited for.
TAIL_PROGRAMS = 512  # that many fill a GPU, and their sums of parts are 34 MB at most
TAIL_SPLITS = 8  # of the steps, at most
FEWEST_STEPS = 512  # of a split of the longest prefix


@triton.jit
def sum_tails(
    score, values, MASS, SUMS, arrived, SHARE_OF_RANK, n, steps, at, exists, split, splits, split_size, stride_sl,
    stride_vl,
    D: tl.constexpr, SAMPLES: tl.constexpr, BUCKETS: tl.constexpr, EDGES: tl.constexpr, BS: tl.constexpr,
    BK: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Sum 2^score over the steps from edge e on to MASS[b, h, n, e], and 2^score * values to SUMS[b, h, n, e].

    Programs: splits of the segments of the slice / BS, the last ones first. Each of a segment's `splits` programs adds
    up a part of the steps, and writes its sums split_size elements further on for each split before. They count
    themselves in `arrived`, int32 [], which is 0 before and after; the last one adds up all, in the order of the splits.

        score       pointer to the head's scores, rows stride_sl apart
        values      pointer to T [steps, D], rows stride_vl apart: the mean values of the head's steps
        n, steps    int32 [BS]: segments, and the steps of their prefixes, 0 for none; exists: whether they are there
        at          the entry of the first of them in MASS

    BK: steps at once; IEEE: products in float32.
    """
    rows = score + n.to(tl.int64)[:, None] * stride_sl
    highest = tl.zeros([BS, EDGES], tl.float32)
    for i in range(BS):
        is_this = tl.arange(0, BS) == i
        prefix = tl.sum(tl.where(is_this, steps, 0), 0)
        if prefix > 0:
            row = score + tl.sum(tl.where(is_this, n, 0), 0).to(tl.int64) * stride_sl
            edges, best, per_bin = find_buckets(row, prefix, SHARE_OF_RANK, SAMPLES, BUCKETS)
            of_row = find_highest_scores(edges, best, per_bin, BUCKETS, EDGES)
            highest = tl.where(is_this[:, None], of_row[None, :], highest)
    offs_d = tl.arange(0, D)
    acc = tl.zeros([BS * EDGES, D], tl.float32)
    mass = tl.zeros([BS * EDGES, 16], tl.float32)  # a product with ones: every column is the sum
    last = tl.max(steps, 0)
    size = tl.cdiv(tl.cdiv(last, BK), splits) * BK
    last = tl.minimum(last, (split + 1) * size)
    for t in range(split * size, last, BK):
        step = t + tl.arange(0, BK)
        s = tl.load(rows + step[None, :], mask=step[None, :] < steps[:, None], other=float("-inf")).to(tl.float32)
        v = tl.load(
            values + (step[:, None] * stride_vl + offs_d[None, :]), mask=step[:, None] < last, other=0.0
        )
        w = tl.where(s[:, None, :] <= highest[:, :, None], tl.exp2(s)[:, None, :], 0.0)
        w = tl.reshape(w, [BS * EDGES, BK])
        if IEEE:  # float16 cannot hold the weights
            acc = tl.dot(w, v.to(tl.float32), acc, input_precision="ieee")
            mass = tl.dot(w, tl.full([BK, 16], 1.0, tl.float32), mass, input_precision="ieee")
        else:
            acc = tl.dot(w.to(v.dtype), v, acc)
            mass = tl.dot(w.to(v.dtype), tl.full([BK, 16], 1.0, v.dtype), mass)
    total = tl.max(mass, 1)
    entry = tl.arange(0, BS * EDGES)
    exists = tl.reshape(tl.broadcast_to(exists[:, None], [BS, EDGES]), [BS * EDGES])
    to_mass = MASS + at * EDGES + entry
    to_sums = SUMS + at * (EDGES * D) + (entry[:, None] * D + offs_d[None, :])
    further = tl.multiple_of(split.to(tl.int64) * split_size, 16)  # there are 16 edges
    tl.store(to_mass + further, total, mask=exists)
    tl.store(to_sums + further, acc, mask=exists[:, None])
    if splits > 1:
        tl.debug_barrier()  # all threads have written before one of them says so
        if tl.atomic_add(arrived, 1, sem="acq_rel") == splits - 1:
            total = tl.zeros([BS * EDGES], tl.float32)
            acc = tl.zeros([BS * EDGES, D], tl.float32)
            for other in range(splits):
                further = tl.multiple_of(other * split_size.to(tl.int64), 16)
                total += tl.load(to_mass + further, mask=exists, other=0.0, cache_modifier=".cg")
                acc += tl.load(to_sums + further, mask=exists[:, None], other=0.0, cache_modifier=".cg")
            tl.store(to_mass, total, mask=exists)
            tl.store(to_sums, acc, mask=exists[:, None])
            tl.store(arrived, 0)  # for the next slice


def count_tail_splits(programs: int, steps: int) -> int:
    """Count the programs that the steps of the longest prefix are split among, given how many there are without."""
    return max(1, min(TAIL_PROGRAMS // programs, steps // FEWEST_STEPS, TAIL_SPLITS))


def count_tail_bytes(head_dim: int) -> int:
    """Count the bytes of workspace of one segment's sums, and the begins of its buckets."""
    return EDGES * (head_dim + 1) * 4 + BUCKETS * 4
