"""The search for the scale at which a model keeps to a budget in KL, as plain numbers: a secant on logarithms.

What sensitivities predict is right up to a factor (errors of rows are correlated, curves are careful, layers are
tightened), so a few measured passes find it: log KL is nearly linear in the logarithm of what is spent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CLOSE = 1.12  # a pass that is within this factor of what is aimed at needs no further one
FURTHEST = 16.0  # a step changes the scale by this factor at most
SLOPES = (0.5, 2.0)  # of log KL over log scale; a secant outside of it is noise, of rounding or of whole steps


@dataclass(frozen=True)
class KlPass:
    """One allocation that was tried.

    scale: How much of the budget without its margin was predicted to be spent. predicted: The KL that sensitivities
    give for the allocation, in nats per token. kl: What was measured on the adjust prompts.
    """

    scale: float
    predicted: float
    kl: float


def next_scale(passes: Sequence[KlPass], aim: float) -> float:
    """The scale at which the KL should be what is aimed at: a secant through the two passes that are nearest to it.

    Args:
        passes: What was measured; the first pass is at a scale of 1.
        aim: Nats per token, above 0.
    """
    if not passes:
        return 1.0
    nearest = sorted(passes, key=lambda one: _distance(one, aim))[:2]
    slope = 1.0
    if len(nearest) == 2 and min(one.kl for one in nearest) > 0 and nearest[0].scale != nearest[1].scale:
        rise = math.log(nearest[0].kl / nearest[1].kl)
        slope = min(max(rise / math.log(nearest[0].scale / nearest[1].scale), SLOPES[0]), SLOPES[1])
    kl = max(nearest[0].kl, 1e-30)
    step = math.exp(math.log(aim / kl) / slope)
    return nearest[0].scale * min(max(step, 1 / FURTHEST), FURTHEST)


def settled(passes: Sequence[KlPass], aim: float, most: float) -> bool:
    """Whether the best pass is close enough to what is aimed at, and within `most`."""
    return any(_distance(one, aim) <= math.log(CLOSE) and one.kl <= most for one in passes)


def best_scale(passes: Sequence[KlPass], aim: float, most: float) -> float:
    """The scale to prove: of the pass nearest to the aim among those within `most`; if none is, the secant's."""
    within = [one for one in passes if one.kl <= most]
    return min(within, key=lambda one: _distance(one, aim)).scale if within else next_scale(passes, aim)


def _distance(one: KlPass, aim: float) -> float:
    return abs(math.log(max(one.kl, 1e-30) / aim))
