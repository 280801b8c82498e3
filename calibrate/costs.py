"""What S2O costs beside the pairs it computes, in units of the time a head's dense attention takes.

All parts grow with the square of the length, as dense attention does, so a share holds at every length.
"""

from __future__ import annotations

from torch import Tensor

from calibrate.curves import Method

# Measured on an H200 at 131072 tokens (docs/results/ranking-h200.txt).
READING = 0.003  # reading queries and keys and writing scores once for every 1024 queries
SCORING_RATE = 0.75  # of dense attention's rate at matrix products: scoring reads each key for few rows
ORDER = 0.017  # ordering a prefix for every 1024 queries, key by key
UNIT_SEGMENT = 1024
TAIL = 24.0  # summing the values once for every segment, as if that many queries attended to them


RIVAL_RATE = 0.7  # of block-sparse attention, as a share of dense attention's
RIVAL_SELECTION = 0.03  # choosing blocks


def rival_cost(density: Tensor) -> Tensor:
    """The time of heads that another method computes over their dense time, where it is not measured."""
    return density / RIVAL_RATE + RIVAL_SELECTION


def overhead(method: Method, tail: bool) -> float:
    """The ranking's time and the tail's, over the head's dense time."""
    scoring = method.representatives / (2 * method.segment) / SCORING_RATE  # q k only, half of dense's products
    passes = (READING + ORDER / method.grain) * UNIT_SEGMENT / method.segment
    return scoring + passes + tail * TAIL / (method.segment * method.grain)
