"""What S2O costs beside the pairs it computes, in units of the time a head's dense attention takes.

The parts of `overhead` grow with the square of the length, as dense attention does, so the same share holds at every
length. `fixed_cost` is what a head's ranking takes besides, whatever its settings: launches, and passes that grow with
the length. Its share falls as prompts get longer. On a GPU it is measured (`ranking_cost.py`).
"""

from __future__ import annotations

from calibrate.curves.curves import RankingConfig
from s2o_runtime.config import GRAIN, Tail

# Measured on an H200 at 131072 tokens (docs/results/ranking-h200.txt).
READING = 0.003  # reading queries and keys and writing scores once for every 1024 queries
SCORING_RATE = 0.75  # of dense attention's rate at matrix products: scoring reads each key for few rows
ORDER = 0.017  # ordering a prefix for every 1024 queries, key by key
UNIT_SEGMENT = 1024
TAIL = 24.0  # summing the values once for every segment, as if that many queries attended to them

# Measured on an H200 for 32 heads: "selecting" of S2O with one tau, less `overhead`, in docs/results, of
# bench-methods-rivals-8k-h200.json (10% of dense attention's time) and bench-methods-rivals-32k-h200.json (2.4%). At
# 131072 tokens they then give 1.6%, where bench-methods-rivals-128k-h200.json has 1.3% for 8 heads: the shares of
# `overhead`, which are nearly all of it there, are of older kernels.
LINEAR = 225.0  # tokens
QUADRATIC = 2036.0  # tokens
RECORDED = 8192  # the shortest length that these are from: shorter ones are taken to have its share


def overhead(ranking: RankingConfig, tail: Tail) -> float:
    """The time of a head's ranking, and of its tail if it has one, over the head's dense time."""
    scoring = ranking.representatives / (2 * ranking.segment) / SCORING_RATE  # q k only, half of dense's products
    passes = (READING + ORDER / GRAIN) * UNIT_SEGMENT / ranking.segment
    sums = TAIL / (ranking.segment * GRAIN) if tail == "mean" else 0.0
    return scoring + passes + sums


def fixed_cost(length: int) -> float:
    """What ranking takes beside `overhead` in a call of this many tokens, over a head's dense time; not measured."""
    tokens = max(length, RECORDED)
    return LINEAR / tokens + (QUADRATIC / tokens) ** 2
