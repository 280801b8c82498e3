"""Buckets: the ranges of scores that an order tells apart.

Their edges are quantiles of a sample of the row, finer where scores are high, because most heads stop early.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

SAMPLES = 512  # with 256 or 1024 heads visit about as much; sorting 1024 took up to a third of the kernel's time
BUCKETS = 32  # one for each lane of a warp
FINEST, COARSEST = 1 / 256, 3 / 4  # shares of the row before the end of the first and of the last but one bucket
SCORE_LIMIT = 60000.0  # float16 holds it; -inf marks no step
LIMIT = tl.constexpr(SCORE_LIMIT)  # the score of a step with a key whose score is NaN or infinite
JITTER = tl.constexpr(40503)  # an odd number near 2^16 over the golden ratio: its multiples' middle bits are spread


@triton.jit
def find_buckets(score, prefix, SHARE_OF_RANK, SAMPLES: tl.constexpr, BUCKETS: tl.constexpr):
    """Find the buckets of the scores of `prefix` steps: sampled quantiles at geometric ranks.

    score: pointer to the first. Returns the lowest score of each bucket, float32 [BUCKETS], the highest of these, and
    the linear bins of a unit of score.
    """
    every = tl.cdiv(prefix, SAMPLES)  # rounded up, so that the sample reaches the last keys, which matter most
    sampled = tl.cdiv(prefix, every)
    index = tl.arange(0, SAMPLES)
    # one of each stretch, and not always its first: text may have a period that the stretches share
    at = tl.minimum(index * every + ((index * JITTER) >> 7) % every, prefix - 1)
    sample = tl.load(score + at, mask=index < sampled, other=float("-inf")).to(tl.float32)
    sample = tl.where(sample == LIMIT, -LIMIT, sample)  # no edge: such a step is above all edges, so it comes first
    sample = tl.sort(sample, descending=True)
    rank = (tl.load(SHARE_OF_RANK + tl.arange(0, BUCKETS)) * sampled.to(tl.float32)).to(tl.int32)
    edges = tl.gather(sample, tl.minimum(rank, tl.maximum(sampled - 1, 0)), 0)
    highest = tl.max(edges, 0)
    return edges, highest, (4.0 * BUCKETS - 2.5) / tl.maximum(highest - tl.min(edges, 0), 1e-6)


@triton.jit
def find_highest_scores(edges, highest, per_bin, BUCKETS: tl.constexpr, EDGES: tl.constexpr):
    """Return the score at which every (BUCKETS / EDGES)-th bucket begins, float32 [EDGES]; infinite for the first.

    Arguments are as `find_buckets` returned them. A bucket begins behind the bins of earlier ones: those whose centre
    is not below the edge before, solved for the bin's number.
    """
    bucket = tl.arange(0, EDGES) * (BUCKETS // EDGES)
    before = tl.gather(edges, tl.maximum(bucket - 1, 0), 0)
    earlier = tl.floor((highest - before) * per_bin + 0.75) + 1.0
    earlier = tl.minimum(tl.maximum(earlier, 0.0), 4.0 * BUCKETS)
    return tl.where((bucket > 0) & (earlier > 0.0), highest - (earlier - 1.25) / per_bin, float("inf"))


@lru_cache(maxsize=8)
def bucket_shares(device: torch.device) -> Tensor:
    """Return the share of a row before the end of each bucket but the last, float32 [BUCKETS]; the last repeats."""
    shares = FINEST * (COARSEST / FINEST) ** torch.linspace(0, 1, BUCKETS - 1, dtype=torch.float64)
    return torch.cat((shares, shares[-1:])).to(device, torch.float32)
