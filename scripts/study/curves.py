"""Curves of density against error: what they say at equal error, and of one tau elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from scripts.bench.schema import VariantCurve

TINY = 1e-30  # stands for an error of zero in logarithms


def density_at(curve: VariantCurve, target: float) -> tuple[Tensor, Tensor, Tensor]:
    """The lowest density of every head with an error of at most `target`.

    Between two taus it is interpolated, log on log.

    Returns:
        The densities, float64 [heads]; the heads that never reach the target, bool [heads], whose density counts as
        1.0; and those that are within it at the largest tau, bool [heads], and could perhaps do with less.
    """
    densities, errors = (torch.tensor(t, dtype=torch.float64) for t in (curve.density, curve.rel_mse))
    met = errors <= target
    taus = len(curve.taus)
    last = taus - 1 - met.flip(0).int().argmax(0)
    pair = torch.stack([last, (last + 1).clamp_max(taus - 1)])
    density, error = (t.clamp_min(TINY).log().gather(0, pair) for t in (densities, errors))
    unreached, lowest = ~met.any(0), met[-1]
    step = torch.where(lowest, 1.0, error[1] - error[0])
    between = (density[0] + (math.log(target) - error[0]) / step * (density[1] - density[0])).exp()
    return torch.where(unreached, 1.0, torch.where(lowest, densities[-1], between)), unreached, lowest


def densities_at(curves: Iterable[VariantCurve], targets: Sequence[float]) -> list[dict[str, Any]]:
    """A row for each length, variant and target: the mean density, and its ratio to the paper's if that is there."""
    rows: list[dict[str, Any]] = []
    papers: dict[tuple[int, float], float] = {}
    for curve in sorted(curves, key=lambda curve: (curve.length, curve.variant != "paper")):
        for target in targets:
            density, unreached, lowest = density_at(curve, target)
            mean = float(density.mean())
            if curve.variant == "paper":
                papers[curve.length, target] = mean
            paper = papers.get((curve.length, target))
            row = {"length": curve.length, "variant": curve.variant, "rel_mse": target, "density": mean}
            row |= {"of_paper": mean / paper if paper else None}
            rows.append(row | {"unreached": int(unreached.sum()), "lowest": int(lowest.sum())})
    return rows


def drift_over_lengths(curves: Iterable[VariantCurve]) -> list[dict[str, Any]]:
    """For each variant and tau, the mean error at every length and the largest ratio between two of them."""
    return _drift(curves, "length")


def drift_over_tiles(curves: Iterable[VariantCurve]) -> list[dict[str, Any]]:
    """The same between the tiles of the variants that ran with several, at the length where they did."""
    groups: dict[tuple[int, str], list[VariantCurve]] = {}
    for curve in curves:
        groups.setdefault((curve.length, curve.variant), []).append(curve)
    return [row for group in groups.values() if len(group) > 1 for row in _drift(group, "tile")]


def _drift(curves: Iterable[VariantCurve], over: str) -> list[dict[str, Any]]:
    rows: dict[tuple[str, float], dict[str, Any]] = {}
    for curve in curves:
        for tau, densities, errors in zip(curve.taus, curve.density, curve.rel_mse, strict=True):
            row = rows.setdefault((curve.variant, tau), {"variant": curve.variant, "tau": tau, "at": []})
            means = {"rel_mse": sum(errors) / len(errors), "density": sum(densities) / len(densities)}
            row["at"].append({over: getattr(curve, over)} | means)
    for row in rows.values():
        for name in ("rel_mse", "density"):
            values = [max(at[name], TINY) for at in row["at"]]
            row[f"{name}_ratio"] = max(values) / min(values)
    return list(rows.values())


def nearest_drift(rows: Sequence[dict[str, Any]], variant: str, target: float) -> dict[str, Any]:
    """Of a variant's drifts, the one whose errors lie nearest to `target`."""

    def distance(row: dict[str, Any]) -> float:
        return abs(sum(math.log(max(at["rel_mse"], TINY) / target) for at in row["at"]) / len(row["at"]))

    return min((row for row in rows if row["variant"] == variant), key=distance)
