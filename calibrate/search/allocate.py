"""Spending an error budget over heads.

A layer's error is the mean over its heads of each head's error, so heads compete for one sum. Every head may choose
among several curves; their points together are replaced by their lower convex hull, beginning at the dense point. The
steepest steps of all hulls are taken first, which is optimal for the hulls up to the last step (Lagrangian relaxation).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from calibrate.curves.curves import TAUS, Curve, RankingConfig, overhead
from s2o_runtime.config import HeadConfig, Tail


class Point(NamedTuple):
    """One way to run a head.

    Attributes:
        mse: its mean squared error.
        cost: its time over the dense head's.
        density: computed query-key pairs over causal pairs.
        worst: the error of its worst rows, as `Curve.worst`.
        head: its settings.
    """

    mse: float
    cost: float
    density: float
    worst: float
    head: HeadConfig


# a point whose head is not made yet: mse, cost, density, worst, and what the head is made of
_Candidate = tuple[float, float, float, float, RankingConfig, float, Tail]
_MSE_AND_COST = itemgetter(0, 1)


@dataclass(frozen=True)
class SearchConstraints:
    """What a head may be given.

    Attributes:
        tails: which `HeadConfig.tail` it may have.
        worst_rows: the largest `Point.worst` it may have; None does not look at rows.
        head_cap: how many times its equal part of the budget it may spend. A layer whose error lies in one or two
            heads is the first to break on text unlike the calibration's.
    """

    tails: tuple[Tail, ...] = ("none", "mean")
    worst_rows: float | None = None
    head_cap: float = math.inf


@dataclass(frozen=True)
class Allocation:
    """The chosen point of every head, and what the layer then is: means over its heads."""

    points: tuple[Point, ...]

    @property
    def mse(self) -> float:
        return sum(point.mse for point in self.points) / len(self.points)

    @property
    def cost(self) -> float:
        return sum(point.cost for point in self.points) / len(self.points)

    @property
    def density(self) -> float:
        return sum(point.density for point in self.points) / len(self.points)

    @property
    def heads(self) -> tuple[HeadConfig, ...]:
        return tuple(point.head for point in self.points)

    def as_dense(self) -> Allocation:
        """The same heads, all dense."""
        return Allocation(tuple(dense_point(head.segment) for head in self.heads))


def dense_point(segment: int, mse: float = 0.0, worst: float = 0.0) -> Point:
    """A dense head of a layer with this segment; its errors are those of the layer's scores, if these are rounded."""
    return Point(mse, 1.0, 1.0, worst, HeadConfig(segment=segment, mode="dense"))


@dataclass(frozen=True)
class ErrorWeights:
    """What the errors of one layer count.

    Attributes:
        layer: what the mean over its heads is multiplied by to be in the budget's unit.
        heads: what each head's mean squared error counts in that mean; 1 on average. None: all the same.
    """

    layer: float = 1.0
    heads: tuple[float, ...] | None = None

    def mean(self, allocation: Allocation) -> float:
        """The mean over the heads of what their mean squared errors count."""
        if self.heads is None:
            return allocation.mse
        points = allocation.points
        return sum(weight * point.mse for weight, point in zip(self.heads, points, strict=True)) / len(points)


UNWEIGHTED = ErrorWeights()


def allocate(
    curves: Mapping[RankingConfig, Curve],
    budget_mse: float,
    constraints: SearchConstraints = SearchConstraints(),
    weights: ErrorWeights = UNWEIGHTED,
) -> Allocation:
    """The heads' settings of a layer with the least mean cost whose mean error is at most `budget_mse`.

    Args:
        curves: of every ranking that a head may choose.
        budget_mse: mean squared error; with weights of heads their weighted mean.
        constraints: which of their points it may choose.
        weights: of its heads; that of the layer does not count here.
    """
    return allocate_together([curves], [replace(weights, layer=1.0)], budget_mse, constraints)[0]


def allocate_each(
    curves: Mapping[RankingConfig, Curve],
    budgets: Sequence[float],
    constraints: SearchConstraints = SearchConstraints(),
) -> list[Allocation]:
    """`allocate` of one layer with each of several budgets."""
    options = [points_of(curves, head, constraints) for head in range(_heads(curves))]
    equal = [1.0 / len(options)] * len(options)
    return [Allocation(tuple(_spend(options, equal, budget, constraints.head_cap))) for budget in budgets]


def allocate_together(
    layers: Sequence[Mapping[RankingConfig, Curve]],
    weights: Sequence[ErrorWeights],
    budget: float,
    constraints: SearchConstraints = SearchConstraints(),
) -> list[Allocation]:
    """The same for several layers with one budget.

    Args:
        layers: the curves of every layer.
        weights: of every layer's mean squared error, and of its heads'.
        budget: the mean over the layers of weight times error is at most this.
        constraints: which points heads may choose.

    Returns:
        An allocation for every layer.
    """
    options = [points_of(curves, head, constraints) for curves in layers for head in range(_heads(curves))]
    weighted = zip(layers, weights, strict=True)
    head_weights = [
        layer_weights.layer * head_weight / _heads(curves)
        for curves, layer_weights in weighted
        for head_weight in layer_weights.heads or (1.0,) * _heads(curves)
    ]
    chosen = iter(_spend(options, head_weights, budget * len(layers), constraints.head_cap))
    return [Allocation(tuple(next(chosen) for _ in range(_heads(curves)))) for curves in layers]


def points_of(curves: Mapping[RankingConfig, Curve], head: int, constraints: SearchConstraints) -> list[Point]:
    """A head's useful points by rising error, the dense one first; each is cheaper than all before it."""
    limit = math.inf if constraints.worst_rows is None else constraints.worst_rows
    candidates: list[_Candidate] = []
    for method, curve in curves.items():
        densities = curve.density[head].tolist()
        for tail in constraints.tails:
            errors, worst = curve.errors(tail)
            extra = overhead(method, tail) + curve.fixed_cost
            by_tau = zip(TAUS, errors[head].tolist(), densities, worst[head].tolist(), strict=True)
            candidates += [
                (mse, density + extra, density, row, method, tau, tail)
                for tau, mse, density, row in by_tau
                if row <= limit
            ]
    points = [dense_point(next(iter(curves)).segment, *rounding_error(curves, head))]
    for mse, cost, density, row, method, tau, tail in sorted(candidates, key=_MSE_AND_COST):
        if cost < points[-1].cost:
            settings = HeadConfig(tau, method.segment, representatives=method.representatives, tail=tail)
            points.append(Point(mse, cost, density, row, settings))
    return points


def rounding_error(curves: Mapping[RankingConfig, Curve], head: int) -> tuple[float, float]:
    """What int8 scores cost a head that visits all keys: its mse, and the error of its worst rows; 0 for others.

    That is the least error of any threshold, with a tail or without, because a low one leaves next to nothing out; no
    point of the head has a smaller one.
    """
    int8 = [curve for method, curve in curves.items() if method.scores == "int8"]
    if not int8:
        return 0.0, 0.0
    return (
        min(float(errors[head].amin()) for curve in int8 for errors in (curve.mse, curve.tail_mse)),
        min(float(errors[head].amin()) for curve in int8 for errors in (curve.worst, curve.tail_worst)),
    )


def _heads(curves: Mapping[RankingConfig, Curve]) -> int:
    return len(next(iter(curves.values())).mse)


def _spend(options: Sequence[Sequence[Point]], weights: Sequence[float], budget: float, head_cap: float) -> list[Point]:
    """One point of every head, such that the sum of their weighted errors is at most the budget.

    Where the first points alone cost more, as those of int8 scores may, it is these.
    """
    chosen = [points[0] for points in options]
    most = head_cap * budget / len(options)
    options = [
        [first, *(point for point in rest if point.mse * weight <= most)]
        for (first, *rest), weight in zip(options, weights, strict=True)
    ]
    left = budget - sum(point.mse * weight for point, weight in zip(chosen, weights, strict=True))
    if left < 0.0:  # rounded scores alone cost more
        return chosen
    steps = []
    for head, points in enumerate(options):
        hull = _hull(points)
        for rank, (near, far) in enumerate(pairwise(hull)):
            steps.append((_slope(near, far) / weights[head], head, rank, near, far))
    blocked: set[int] = set()
    for _, head, _, near, far in sorted(steps, key=lambda step: (-step[0], step[1], step[2])):
        price = (far.mse - near.mse) * weights[head]
        if head not in blocked and price <= left:
            left -= price
            chosen[head] = far
        else:
            blocked.add(head)  # a hull's later steps build on its earlier ones
    for head, points in enumerate(options):  # what is left buys the best single point between hull corners
        affordable = [point for point in points if (point.mse - chosen[head].mse) * weights[head] <= left]
        best = min(affordable, key=lambda point: (point.cost, point.mse))
        if best.cost < chosen[head].cost:
            left -= (best.mse - chosen[head].mse) * weights[head]
            chosen[head] = best
    return chosen


def _hull(points: Sequence[Point]) -> list[Point]:
    """The lower left convex hull of points sorted by error."""
    hull: list[Point] = []
    for point in points:
        while hull and hull[-1].mse == point.mse:
            hull.pop()
        while len(hull) >= 2 and _slope(hull[-2], hull[-1]) <= _slope(hull[-2], point):
            hull.pop()
        hull.append(point)
    return hull


def _slope(near: Point, far: Point) -> float:
    """The cost that is saved for each unit of error."""
    return (near.cost - far.cost) / (far.mse - near.mse)
