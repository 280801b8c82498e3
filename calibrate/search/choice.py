"""The settings of a layer at one length, as they follow from its curves, a budget and a search point.

A search point fixes what all heads of a layer share: segment, tile and lookback. Each head's threshold, representatives
and tail then follow from its curves and the budget, exactly (`allocate.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from calibrate.curves.curves import Curve, Curves, RankingConfig, Shape, dense_power, select_rankings
from calibrate.recipe import Recipe
from calibrate.record import PredictedLayer
from calibrate.search.allocate import Allocation, ErrorWeights, SearchConstraints, allocate
from calibrate.timing import Timing
from s2o_runtime.config import LOOKBACK, LayerConfig, Tail, TileConfig
from s2o_runtime.monitor.drift import HEAD_CAP

log = logging.getLogger("calibrate")


class CalibrationDense(Enum):
    """Reasons of a calibration to make a layer dense, with their sentences; `s2o_runtime.dense_reason` is for calls."""

    NO_GAIN = "no head gains anything within the budget"
    PREDICTED_SLOWER = "predicted no faster than dense"
    TIMED_SLOWER = "the layer was timed slower than dense"
    FAILED = "the search point failed"
    NO_TRIAL = "no trial ran"
    WAS_DENSE = "it was dense with no smaller budget"
    NO_CLEAR_GAIN = "it was dense, and is not predicted to win clearly"
    OVER_LIMIT = "the held-out error stayed over the limit"
    OVER_BOUND = "the certified bound stayed over the limit"
    SLOWER_ATTENTION = "attention was measured slower than dense"


class SearchPoint(NamedTuple):
    """Settings shared by all heads of a layer; one Optuna trial."""

    segment: int
    tile: TileConfig
    lookback: int = LOOKBACK


@dataclass(frozen=True)
class LayerBudget:
    """The error that one layer may have at one length, and how its heads may spend it."""

    limit: float  # of the layer's mean error, in the unit of the recipe's budget
    mse: float  # what the heads may spend, as mean squared error with `weights`
    constraints: SearchConstraints
    weights: ErrorWeights = field(default_factory=ErrorWeights)

    @classmethod
    def from_recipe(cls, curves: Curves, recipe: Recipe) -> LayerBudget:
        """Return what a budget of errors allows the layer with these curves."""
        budget, power = recipe.budget, dense_power(curves)
        limit = budget.limit(power)
        # larger where a ceiling allows the layer less than the budget's value
        weights = ErrorWeights(budget.error(1.0, power) * (budget.value / limit))
        return cls(limit, budget.value * recipe.margin / weights.layer, make_constraints(recipe), weights)


@dataclass(frozen=True)
class LayerPlan:
    """The settings of one layer at one length, with their predictions."""

    point: SearchPoint
    curves: Mapping[RankingConfig, Curve]  # of every ranking that a head could choose
    budget: LayerBudget
    allocation: Allocation
    timing: Timing | None = None  # of the layer's attention; None on a CPU, and after the allocation changed
    why_dense: CalibrationDense | None = None  # None if the layer was not made dense as a whole
    measured: str = ""  # on the measurement that made it dense, in place of the reason's own sentence
    last_rows: int = 0  # dense ones at a prompt's end, as the curves were measured

    @property
    def spent(self) -> float:
        """Predicted spending of the heads, in the unit of the budget's `mse`."""
        return self.budget.weights.mean(self.allocation)

    @property
    def config(self) -> LayerConfig:
        """Layer as the runtime takes it."""
        config = LayerConfig(self.allocation.heads, self.point.tile, self.point.lookback)
        return replace(config, last_rows=0 if config.is_dense else self.last_rows).validate()

    @property
    def cost(self) -> float:
        """Objective of the search: seconds, or without a GPU the predicted share of dense attention's time."""
        return self.allocation.cost if self.timing is None else self.timing.seconds

    @property
    def seconds(self) -> float | None:
        """Time that the layer's attention will take; None where it was not timed."""
        if self.timing is None:
            return None
        return self.timing.dense_seconds if self.config.is_dense else self.timing.seconds

    @property
    def dense_sentence(self) -> str | None:
        """Sentence on why the layer is dense as a whole; None if it is not."""
        why = self.why_dense or (CalibrationDense.NO_GAIN if self.config.is_dense else None)
        return self.measured or (why and why.value)

    def spending(self, mse: float) -> LayerPlan:
        """Return the same search point with more or less to spend."""
        allocation = allocate(self.curves, mse, self.budget.constraints, self.budget.weights)
        return replace(self, budget=replace(self.budget, mse=mse), allocation=allocation, timing=None)

    def as_dense(self, why: CalibrationDense, measured: str = "") -> LayerPlan:
        """Return the same layer with every head dense."""
        return replace(self, allocation=self.allocation.as_dense(), why_dense=why, measured=measured)

    def dense_if_no_gain(self) -> LayerPlan:
        """Return the same choice, made dense where it gains nothing over dense attention."""
        if self.why_dense:
            return self
        if self.config.is_dense:
            return self.as_dense(CalibrationDense.NO_GAIN)
        if (timing := self.timing) is None:
            return self.as_dense(CalibrationDense.PREDICTED_SLOWER) if self.cost >= 1.0 else self
        if timing.seconds < timing.dense_seconds:
            return self
        times = f"{timing.seconds * 1e3:.2f} ms against {timing.dense_seconds * 1e3:.2f} ms dense"
        return self.as_dense(CalibrationDense.TIMED_SLOWER, times)

    def predicted(self) -> PredictedLayer:
        """Return a profile's record of it: the curves' predictions, and the times if there are."""
        allocation, timing = self.allocation, self.timing
        return PredictedLayer(
            mse=allocation.mse,
            density=allocation.density,
            cost=allocation.cost,
            seconds=self.seconds,
            dense_seconds=timing.dense_seconds if timing else None,
        )


def make_constraints(recipe: Recipe) -> SearchConstraints:
    """Return a recipe's limits on heads."""
    tails: tuple[Tail, ...] = tuple("mean" if has_tail else "none" for has_tail in recipe.tails)
    return SearchConstraints(tails, recipe.worst_rows or None, HEAD_CAP)


def make_default_point(recipe: Recipe, length: int, tile: TileConfig) -> SearchPoint:
    """Return the point that is tried first at a length in tokens, whatever is predicted of it."""
    segments = recipe.select_segments(length)  # the second shortest of them: the shortest ranks most often
    return SearchPoint(segments[min(1, len(segments) - 1)], tile, recipe.lookbacks[0])


def build_plan(point: SearchPoint, curves: Curves, budget: LayerBudget, last_rows: int = 0) -> LayerPlan:
    """Spend a layer's budget at one search point, without timing it. last_rows: as `LayerPlan.last_rows`."""
    point_curves = select_rankings(curves, point.segment, Shape.from_tile(point.tile), point.lookback)
    return LayerPlan(point, point_curves, budget, Allocation(()), last_rows=last_rows).spending(budget.mse)


def warn_of_unspent(plans: Sequence[LayerPlan], length: int) -> None:
    """Say that layers at a length in tokens cannot spend their budgets, if half of them leave half of it."""
    held = sum(not plan.config.is_dense and plan.spent < 0.5 * plan.budget.mse for plan in plans)
    if 2 * held >= len(plans):
        log.warning(
            "%d of %d layers at %d tokens spend less than half of their budget: the guard on rows holds them back "
            "(--worst-rows), or nothing cheaper was measured", held, len(plans), length,
        )  # fmt: skip
