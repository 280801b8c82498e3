"""Spend an error budget over heads.

A layer's error is the mean over its heads of each head's error, so heads compete for one sum. Every head may choose
among several curves; their points together are replaced by their lower convex hull, beginning at the dense point. The
steepest steps of all hulls are taken first, which is optimal for the hulls up to the last step (Lagrangian relaxation).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, pairwise
from typing import NamedTuple

from calibrate.curves.curves import TAUS, Curve, RankingConfig, estimate_overhead
from s2o_runtime.config import HeadConfig, Tail


class Point(NamedTuple):
    """A setting of a head with its predictions."""

    mse: float
    cost: float  # its time over the dense head's
    density: float  # computed query-key pairs over causal pairs
    worst: float  # the error of its worst rows, as `Curve.worst`
    head: HeadConfig


@dataclass(frozen=True)
class SearchConstraints:
    """Limits on the points of a head."""

    tails: tuple[Tail, ...] = ("none", "mean")
    worst_rows: float | None = None  # the largest `Point.worst`; None for no limit
    # times its equal part of the budget that a head may spend: a layer whose error lies in one or two heads is the
    # first to break on text unlike the calibration's
    head_cap: float = math.inf
    head_mse: float = math.inf  # the largest `Point.mse`


@dataclass(frozen=True)
class Allocation:
    """The chosen point of every head, and the layer's means over its heads."""

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
        """Return the same heads, all dense."""
        return Allocation(tuple(make_dense_point(head.segment) for head in self.heads))


def make_dense_point(segment: int) -> Point:
    """Return a dense head of this segment."""
    return Point(0.0, 1.0, 1.0, 0.0, HeadConfig(segment=segment, mode="dense"))


@dataclass(frozen=True)
class ErrorWeights:
    """Weights of a layer's and its heads' errors in the budget."""

    layer: float = 1.0  # converts the mean over its heads to the budget's unit
    heads: tuple[float, ...] | None = None  # of each head's error in that mean, 1 on average; None: all the same

    def mean(self, allocation: Allocation) -> float:
        """Return the weighted mean over the heads of their mean squared errors."""
        points = allocation.points
        heads = self.heads or (1.0,) * len(points)
        return sum(weight * point.mse for weight, point in zip(heads, points, strict=True)) / len(points)


def allocate(
    curves: Mapping[RankingConfig, Curve],
    budget_mse: float,
    constraints: SearchConstraints = SearchConstraints(),
    weights: ErrorWeights = ErrorWeights(),
) -> Allocation:
    """Return the settings of a layer's heads with the least mean cost whose mean error is at most `budget_mse`.

    curves: of every ranking that a head may choose. weights: of its heads; that of the layer does not count here.
    """
    return allocate_together([curves], [replace(weights, layer=1.0)], budget_mse, [constraints])[0]


def allocate_together(
    layers: Sequence[Mapping[RankingConfig, Curve]],
    weights: Sequence[ErrorWeights],
    budget: float,
    constraints: Sequence[SearchConstraints],
) -> list[Allocation]:
    """Allocate one budget to several layers: it is the limit of the mean over them of weight times error.

    constraints: of each layer; the head cap is the first one's.
    """
    counts = [len(next(iter(curves.values())).mse) for curves in layers]  # of heads
    options = [
        list_points(curves, head, of_layer)
        for curves, count, of_layer in zip(layers, counts, constraints, strict=True)
        for head in range(count)
    ]
    head_weights = [
        layer_weights.layer * head_weight / count
        for layer_weights, count in zip(weights, counts, strict=True)
        for head_weight in layer_weights.heads or (1.0,) * count
    ]
    points = iter(_choose_points(options, head_weights, budget * len(layers), constraints[0].head_cap))
    return [Allocation(tuple(islice(points, count))) for count in counts]


def list_points(curves: Mapping[RankingConfig, Curve], head: int, constraints: SearchConstraints) -> list[Point]:
    """Return a head's useful points by rising error, the dense one first; each is cheaper than all before it."""
    limit = math.inf if constraints.worst_rows is None else constraints.worst_rows
    candidates: list[Point] = []
    for ranking, curve in curves.items():
        densities = curve.density[head].tolist()
        for tail in constraints.tails:
            errors, worst = (values[head].tolist() for values in curve.errors(tail))
            extra = estimate_overhead(ranking, tail) + curve.fixed_cost
            by_tau = zip(errors, densities, worst, _list_heads(ranking, tail), strict=True)
            candidates += [
                Point(mse, density + extra, density, row, config)
                for mse, density, row, config in by_tau
                if row <= limit and mse <= constraints.head_mse
            ]
    points = [make_dense_point(next(iter(curves)).segment)]
    for point in sorted(candidates, key=lambda point: point[:2]):
        if point.cost < points[-1].cost:
            points.append(point)
    return points


@lru_cache(maxsize=256)
def _list_heads(ranking: RankingConfig, tail: Tail) -> tuple[HeadConfig, ...]:
    """Return the settings of a head at every threshold of `TAUS`."""
    return tuple(HeadConfig(tau, ranking.segment, representatives=ranking.representatives, tail=tail) for tau in TAUS)


def _choose_points(
    options: Sequence[Sequence[Point]], weights: Sequence[float], budget: float, head_cap: float
) -> list[Point]:
    """Choose a point of every head, such that the sum of their weighted errors is at most the budget."""
    chosen = [points[0] for points in options]
    cap = head_cap * budget / len(options)
    options = [
        [first, *(point for point in rest if point.mse * weight <= cap)]
        for (first, *rest), weight in zip(options, weights, strict=True)
    ]
    left = budget  # the first points are dense
    steps = [
        (_compute_slope(near, far) / weights[head], head, rank, near, far)
        for head, points in enumerate(options)
        for rank, (near, far) in enumerate(pairwise(_build_hull(points)))
    ]
    blocked: set[int] = set()
    for _, head, _, near, far in sorted(steps, key=lambda step: (-step[0], step[1], step[2])):
        price = (far.mse - near.mse) * weights[head]
        if head not in blocked and price <= left:
            left -= price
            chosen[head] = far
        else:
            blocked.add(head)  # a hull's later steps build on its earlier ones
    for head, points in enumerate(options):  # the rest buys the best single point between hull corners
        affordable = [point for point in points if (point.mse - chosen[head].mse) * weights[head] <= left]
        best = min(affordable, key=lambda point: (point.cost, point.mse))
        if best.cost < chosen[head].cost:
            left -= (best.mse - chosen[head].mse) * weights[head]
            chosen[head] = best
    return chosen


def _build_hull(points: Sequence[Point]) -> list[Point]:
    """Return the lower left convex hull of points sorted by error."""
    hull: list[Point] = []
    for point in points:
        while hull and hull[-1].mse == point.mse:
            hull.pop()
        while len(hull) >= 2 and _compute_slope(hull[-2], hull[-1]) <= _compute_slope(hull[-2], point):
            hull.pop()
        hull.append(point)
    return hull


def _compute_slope(near: Point, far: Point) -> float:
    """Return the cost that is saved for each unit of error."""
    return (near.cost - far.cost) / (far.mse - near.mse)
