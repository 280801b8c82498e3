"""Error and density against threshold for every head: what calibration measures, and decides by.

One pass over the prefix gives the whole threshold axis: on a GPU the trace kernel (`kernel_pass.py`), elsewhere plain
torch (`plain_pass.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from calibrate.capture import Captured
from calibrate.journal import pack, unpack
from calibrate.worst import WORST
from s2o_runtime.baselines.settings import Baseline, parse
from s2o_runtime.config import TileConfig

TAUS = tuple(float(f"{10.0 ** (exponent / 5):.4g}") for exponent in range(-15, 16))  # 1e-3 .. 1e3, five a decade


@dataclass(frozen=True)
class Method:
    """What decides in which order a head visits its keys; the fields are those of HeadConfig and LayerConfig."""

    segment: int
    representatives: int = 1
    grain: int = 1


@dataclass(frozen=True)
class Shape:
    """What, beside tau, decides where a head stops: the tile height and the keys between two checks."""

    block_m: int
    stride: int

    @classmethod
    def of(cls, tile: TileConfig) -> Shape:
        return cls(tile.block_m, tile.stride)


Way = Method | Baseline  # how a head may attend: in S2O's order, or as another method does


@dataclass(frozen=True)
class Curve:
    """Errors and density of every head at every threshold of `TAUS`; of another method, which has none, at one point.

    mse, tail_mse: mean squared error; worst, tail_worst: of the row tiles' worst rows the `WORST` quantile, a row's
    error over its norm (worst.py); density: all float64 [Hq, len(TAUS)]; thresholds of the kind "rest", rows reduced
    by mean. The tail does not change where a head stops, so one density belongs to both errors.
    dense_power: mean square of the layer's dense output.
    cost: float64 [Hq, 1], of another method a head's time over its dense time; None where it was not measured.
    """

    mse: Tensor
    tail_mse: Tensor
    worst: Tensor
    tail_worst: Tensor
    density: Tensor
    dense_power: float
    cost: Tensor | None = None

    def stacked(self) -> Tensor:
        """All but the power, in the order of the fields: float32 [5, Hq, len(TAUS)]."""
        return torch.stack([self.mse, self.tail_mse, self.worst, self.tail_worst, self.density]).float()


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The curve of several prompts together.

    A mean squared error is the mean plus one standard deviation over the prompts: heads whose error depends on the
    prompt must stay within their budget on prompts that were not seen. Of worst rows the worst counts.
    """

    def each(name: str) -> Tensor:
        return torch.stack([getattr(curve, name) for curve in curves])

    def careful(name: str) -> Tensor:
        return each(name).mean(0) + each(name).std(0, correction=0)

    costs = [curve.cost for curve in curves if curve.cost is not None]
    return Curve(
        careful("mse"),
        careful("tail_mse"),
        each("worst").amax(0),
        each("tail_worst").amax(0),
        each("density").mean(0),
        sum(curve.dense_power for curve in curves) / len(curves),
        torch.stack(costs).mean(0) if costs else None,
    )


def measure(prompt: Captured, methods: Sequence[Method], shapes: Sequence[Shape]) -> dict[tuple[Method, Shape], Curve]:
    """One prompt's curves at one layer for some ways to rank, all of one segment length, and for every tile shape."""
    from calibrate import kernel_pass, plain_pass

    if kernel_pass.supports(prompt):
        return kernel_pass.measure(prompt, methods, shapes)
    return plain_pass.measure(prompt, methods, shapes)


def head_norms(dense: Tensor) -> Tensor:
    """The mean squared norm of a head's rows, float32 [Hq], of a dense output [1, Hq, L, D]."""
    return torch.stack([head.float().square().sum(-1).mean() for head in dense[0]])


def worst_of(of_tiles: Tensor) -> Tensor:
    """The `WORST` quantile over row tiles: [..., tiles, T] -> float64 [..., T]."""
    tiles = of_tiles.shape[-2]
    place = min(tiles, int(WORST * (tiles - 1) + 0.5) + 1)  # kthvalue counts from 1
    return of_tiles.kthvalue(place, -2).values.double()


def window_pairs(length: int, segment: int, step: int) -> int:
    """Causal pairs in the windows of one head; a window begins at a multiple of `step` keys, before its segment."""
    total = 0
    for begin in range(0, length, segment):
        size = min(segment, length - begin)
        total += size * (size + 1) // 2 + size * (begin % step)
    return total


def packed(curves: Mapping[tuple[Way, Shape | None], Curve]) -> list[dict[str, Any]]:
    """Curves as JSON, in float32."""
    entries = []
    for (way, shape), curve in curves.items():
        entry: dict[str, Any] = {"power": curve.dense_power, "curve": pack(curve.stacked())}
        if isinstance(way, Method):
            assert shape is not None
            entry |= {"method": astuple(way), "shape": astuple(shape)}
        else:
            entry |= {"blocks": str(way), "cost": None if curve.cost is None else pack(curve.cost.float())}
        entries.append(entry)
    return entries


def unpacked(entries: list[dict[str, Any]]) -> dict[tuple[Way, Shape | None], Curve]:
    """What `packed` made."""
    found: dict[tuple[Way, Shape | None], Curve] = {}
    for entry in entries:
        mse, tail_mse, worst, tail_worst, density = unpack(entry["curve"]).double()
        cost = None if entry.get("cost") is None else unpack(entry["cost"]).double()
        curve = Curve(mse, tail_mse, worst, tail_worst, density, float(entry["power"]), cost)
        if "blocks" in entry:
            found[parse(entry["blocks"]), None] = curve
        else:
            found[Method(*entry["method"]), Shape(*entry["shape"])] = curve
    return found
