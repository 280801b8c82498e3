"""How much of its limit a layer may spend, judged on the adjust prompts.

The search spends what its curves predict on the calibration prompts. On other prompts a layer's error is often less,
and how much it varies between prompts is another matter for every layer. So a layer is given more until one of two
things holds: its mean error is the recipe's margin of its limit, or the bound that the certificate can be expected to
find for it is `AIM` of the limit. What turns out to be too much is taken back, down to what the search chose: less than
that is for `tighten`, and for the certificate itself, whose prompts have no part in this.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass, field

from calibrate.proof.candidate import Candidate, LengthAndLayer
from calibrate.proof.certificate import FLOOR, look_confidence
from calibrate.proof.statistics import expected_mean_bound
from calibrate.proof.verify import LayerProof
from calibrate.recipe import Recipe
from calibrate.search.choice import Choice, allowed

AIM = 0.9  # of its limit: where the bound of a layer's mean error is to come out
CLOSE = 1.05  # a spending that is off by no more than this stays as it is
TRIES = 3  # changes of one layer's spending at one length
MOST = 2.0  # times as much in one change: curves bend
ENOUGH = 4  # certify prompts; where the bounds of fewer come out is chance


@dataclass
class Spending:
    """Gives each layer at each calibrated length what it may spend; it is what a proof revises by, before it tightens.

    tries: How often the spending of a layer at a length was changed.
    """

    tries: Counter[LengthAndLayer] = field(default_factory=Counter)
    _first: dict[LengthAndLayer, Choice] = field(default_factory=dict)  # what the search chose

    def revise(self, candidate: Candidate, length: int, layer: int, proof: LayerProof) -> Candidate | None:
        """The candidate in which a layer spends as much as it may.

        Args:
            candidate: What was proven.
            length: The prompts' length in tokens.
            layer: The layer's index.
            proof: What was measured of the layer.

        Returns:
            What to prove instead; None if the layer spends about as much as it may, or nothing can be changed: it is
            dense, or is at a length without curves. A layer whose first error is over its limit is for `tighten`, and
            a budget in KL is spent by a search of its own.
        """
        key, choice = (length, layer), candidate.choice(layer, length)
        if choice is None or choice.config.is_dense or key in candidate.tightened or candidate.recipe.budget.is_kl:
            return None
        if not self.tries[key] and proof.error(candidate.recipe.budget) > candidate.limits[key]:
            return None
        times = growth(proof, candidate.limits[key], candidate.recipe)
        if proof.worst > (candidate.recipe.worst_rows or math.inf):  # more was given to rows than they bear
            times = min(times, 1 / CLOSE**2 if self.tries[key] else 1.0)
        if 1 / CLOSE <= times <= CLOSE or self.tries[key] == TRIES:
            return None
        self.tries[key] += 1
        first, spent = self._first.setdefault(key, choice), choice.spent * min(times, MOST)
        moved = first if spent <= first.spent else choice.spending(spent, allowed(candidate.recipe))
        if moved.config == choice.config:
            return None
        return candidate.with_choice(layer, length, moved)


def growth(proof: LayerProof, limit: float, recipe: Recipe) -> float:
    """How many times the error that was measured a layer may have.

    Args:
        proof: What was measured of the layer on the adjust prompts.
        limit: The error it may have, in the budget's unit.
        recipe: Its margin, and the number of certify prompts, which says how far a bound is from the mean.
    """
    errors = proof.errors(recipe.budget)
    mean = max(statistics.fmean(errors), proof.error(recipe.budget), FLOOR * FLOOR * limit)
    times = recipe.margin * limit / mean
    if recipe.num_certify >= ENOUGH:
        counted = [max(error, FLOOR * limit) for error in errors]  # as a look at a layer counts them
        times = min(times, AIM * limit / expected_mean_bound(counted, recipe.num_certify, look_confidence(1.0)))
    return times
