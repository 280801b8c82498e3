"""Spending a layer's error budget over its heads.

A layer's error is the mean over its heads of each head's error, so heads compete for one sum. Every head's
curve is replaced by its lower convex hull from the dense point on; the steepest steps of all hulls are taken
first, which is optimal for the hulls up to the last step (Lagrangian relaxation).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from calibrate.curves import TAUS, Curve

DENSE = -1  # the point of a curve where a head computes everything


class Point(NamedTuple):
    """One way to run a head: its error, its density, and the index of its tau (or DENSE)."""

    mse: float
    density: float
    tau: int


@dataclass(frozen=True)
class Allocation:
    """The chosen point of every head and what the layer then costs."""

    points: tuple[Point, ...]

    @property
    def mse(self) -> float:
        return sum(point.mse for point in self.points) / len(self.points)

    @property
    def density(self) -> float:
        return sum(point.density for point in self.points) / len(self.points)

    @property
    def taus(self) -> tuple[float | None, ...]:
        """One threshold per head; None is dense."""
        return tuple(None if point.tau == DENSE else TAUS[point.tau] for point in self.points)


def allocate(curve: Curve, budget_mse: float) -> Allocation:
    """The thresholds with the least mean density whose mean error is at most `budget_mse`."""
    options = [_points(curve, head) for head in range(len(curve.mse))]
    chosen = [points[0] for points in options]
    left = budget_mse * len(options)
    steps = []
    for head, points in enumerate(options):
        hull = _hull(points)
        for rank, (near, far) in enumerate(pairwise(hull)):
            steps.append(((near.density - far.density) / (far.mse - near.mse), head, rank, near, far))
    blocked: set[int] = set()
    for _, head, _, near, far in sorted(steps, key=lambda step: (-step[0], step[1], step[2])):
        if head not in blocked and far.mse - near.mse <= left:
            left -= far.mse - near.mse
            chosen[head] = far
        else:
            blocked.add(head)  # a hull's later steps build on its earlier ones
    for head, points in enumerate(options):  # what is left buys the best single point between hull corners
        affordable = [point for point in points if point.mse - chosen[head].mse <= left]
        best = min(affordable, key=lambda point: (point.density, point.mse))
        if best.density < chosen[head].density:
            left -= best.mse - chosen[head].mse
            chosen[head] = best
    return Allocation(tuple(chosen))


def _points(curve: Curve, head: int) -> list[Point]:
    """A head's useful points by rising error, the dense one first; each is sparser than all before it."""
    pairs = zip(curve.mse[head].tolist(), curve.density[head].tolist(), range(len(TAUS)), strict=True)
    points = [Point(0.0, 1.0, DENSE)]
    for point in sorted(Point(*pair) for pair in pairs):
        if point.density < points[-1].density:
            points.append(point)
    return points


def _hull(points: list[Point]) -> list[Point]:
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
    """Density saved per error spent."""
    return (near.density - far.density) / (far.mse - near.mse)
