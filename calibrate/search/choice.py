"""What was chosen for a layer at one length, and how it follows from the layer's curves, a budget and a search point.

A search point fixes what all heads of a layer share: segment, grain and tile. Each head's threshold, representatives
and tail then follow from its curves and the budget, exactly (`allocate.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from calibrate.curves.curves import Curve, Curves, Method, Shape, dense_power, methods
from calibrate.recipe import Recipe
from calibrate.search.allocate import Allocation, Allowed, allocate, allocate_together
from calibrate.timing import Timing
from s2o_runtime.config import LayerConfig, TileConfig


class SearchPoint(NamedTuple):
    """What a trial of the search names."""

    segment: int
    grain: int
    tile: TileConfig


@dataclass(frozen=True)
class Choice:
    """What was chosen for one layer at one length, and what it is predicted to do.

    Attributes:
        segment, grain, tile: of the whole layer.
        curves: of every method that a head could choose.
        budget_mse: what the heads may spend, as mean squared error.
        allocation: each head's settings.
        timing: of the layer's attention; None on a CPU, and after the allocation changed.
        why_dense: why the layer was made dense as a whole; None if it was not.
    """

    segment: int
    grain: int
    tile: TileConfig
    curves: Mapping[Method, Curve]
    budget_mse: float
    allocation: Allocation
    timing: Timing | None = None
    why_dense: str | None = None

    @property
    def point(self) -> SearchPoint:
        """What the heads share."""
        return SearchPoint(self.segment, self.grain, self.tile)

    @property
    def config(self) -> LayerConfig:
        """The layer as the runtime takes it."""
        return LayerConfig(self.allocation.heads, self.tile, grain=self.grain).validate()

    @property
    def cost(self) -> float:
        """What the search minimises: seconds, or without a GPU the predicted share of dense attention's time."""
        return self.allocation.cost if self.timing is None else self.timing.seconds

    @property
    def seconds(self) -> float | None:
        """What the layer's attention will take; None where it was not timed."""
        if self.timing is None:
            return None
        return self.timing.dense_seconds if self.config.is_dense else self.timing.seconds

    def spending(self, budget_mse: float, allowed: Allowed) -> Choice:
        """The same search point with another budget."""
        return replace(self, budget_mse=budget_mse, allocation=allocate(self.curves, budget_mse, allowed), timing=None)

    def as_dense(self, why: str) -> Choice:
        """The same layer with every head dense."""
        return replace(self, allocation=self.allocation.as_dense(), why_dense=why)

    def settled(self) -> Choice:
        """The same choice, made dense where it gains nothing over dense attention."""
        if self.config.is_dense:
            return replace(self, why_dense="no head gains anything within the budget")
        timing = self.timing
        if timing is not None and timing.seconds >= timing.dense_seconds:
            return self.as_dense(f"{timing.seconds * 1e3:.2f} ms against {timing.dense_seconds * 1e3:.2f} ms dense")
        if timing is None and self.cost >= 1.0:
            return self.as_dense("predicted no faster than dense")
        return self


def default_segment(segments: Sequence[int]) -> int:
    """The segment that is tried first: the second shortest, because the shortest ranks most often."""
    return segments[min(1, len(segments) - 1)]


def allowed(recipe: Recipe) -> Allowed:
    """What a recipe lets heads choose."""
    return Allowed(recipe.tails, recipe.worst_rows or None, recipe.allows_s2o)


def budget_mse(curves: Curves, recipe: Recipe) -> float:
    """What a layer's calibration may spend, as mean squared error: the recipe's budget without its margin."""
    spent = recipe.budget.value * recipe.margin
    return spent if recipe.budget.kind == "mse" else spent * dense_power(curves)


def choice_at(point: SearchPoint, curves: Curves, recipe: Recipe) -> Choice:
    """A layer's budget spent at one search point, not timed."""
    of_point = methods(curves, point.segment, point.grain, Shape.of(point.tile))
    budget = budget_mse(curves, recipe)
    return Choice(*point, of_point, budget, allocate(of_point, budget, allowed(recipe)))


def shared(choices: Sequence[Choice], powers: Sequence[float], recipe: Recipe) -> tuple[list[Choice], list[float]]:
    """One budget over all layers, spent where it saves most.

    Args:
        choices: of every layer; those that are dense for a reason take no part.
        powers: the mean square of every layer's dense output.
        recipe: its budget is what the mean over all layers may be.

    Returns:
        The layers' choices, and the limit of each: what it spends, with the margin given back, in the budget's unit.
    """
    units = [1.0 if recipe.budget.kind == "mse" else 1.0 / power for power in powers]
    live = [layer for layer, choice in enumerate(choices) if choice.why_dense is None]
    if not live:
        return list(choices), [recipe.budget.value] * len(choices)
    budget = recipe.budget.value * recipe.margin * len(choices) / len(live)
    allocations = allocate_together(
        [choices[layer].curves for layer in live], [units[layer] for layer in live], budget, allowed(recipe)
    )
    after, limits = list(choices), [0.0] * len(choices)
    for layer, allocation in zip(live, allocations, strict=True):
        new = replace(after[layer], allocation=allocation, budget_mse=allocation.mse, timing=None)
        after[layer] = replace(new, why_dense="other layers gain more") if new.config.is_dense else new
        limits[layer] = allocation.mse * units[layer] / recipe.margin
    return after, limits
