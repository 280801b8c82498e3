"""Why one head of a profile does what it does: its curve, its setting, and what keeps it from a cheaper one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from calibrate.allocate import Point, points_of
from calibrate.curves import Shape
from calibrate.rebudget import opened, recipe_of, stored_curves
from calibrate.recipe import Recipe
from calibrate.search import Curves, allowed, budget_mse, methods
from s2o_runtime.config import HeadConfig, LayerConfig
from s2o_runtime.errors import InputError
from s2o_runtime.profile import Profile


def explain_head(
    profile: Profile, path: Path, layer: int, head: int, journal: Path | None = None
) -> list[dict[str, Any]]:
    """A head's settings at every length, what its curve predicts of them, and what keeps it from being cheaper.

    Without the journal beside the profile, or without a curve in it, the reason says so.
    """
    measured: dict[int, Curves] = {}
    missing = "the journal has no curve of this length and tile, so what it costs is not known"
    recipe: Recipe | None = None
    try:
        recipe = recipe_of(profile, path)
        with opened(journal or recipe.journal_path, profile, recipe) as kept:
            entries = kept.entries("curves")
        for length in set(profile.lengths) & set(recipe.lengths):
            config = profile.layers[profile.lengths.index(length)][layer]
            curves = stored_curves(entries, layer, length, config, profile, recipe)
            if curves:
                measured[length] = curves
    except InputError as error:
        missing = f"its curve is not there: {error}"
    rows = []
    for length, bucket in zip(profile.lengths, profile.layers, strict=True):
        config, settings = bucket[layer], bucket[layer].heads[head]
        other = None if settings.blocks is None else str(settings.blocks)
        row = {"length": length, **asdict(settings), "blocks": other, "grain": config.grain, "tile": str(config.tile)}
        row |= {"density": None, "error": None, "unit": None}
        if settings.mode == "dense" and config.is_dense:
            why = "dense because its whole layer is: no head gains anything, or the layer was not faster than dense"
        elif recipe is None or length not in measured:
            why = missing
        else:
            found, why = _limits(measured[length], config, head, recipe)
            row |= found
        rows.append(row | {"why": why})
    return rows


def _limits(curves: Curves, config: LayerConfig, head: int, recipe: Recipe) -> tuple[dict[str, Any], str]:
    """Density and error of a head as its curve predicts them, and what keeps it from the next cheaper setting."""
    of_method = methods(curves, config.heads[0].segment, config.grain, Shape.of(config.tile))
    power = next(iter(of_method.values())).dense_power
    what = allowed(recipe)
    guarded = points_of(of_method, head, what)
    free = points_of(of_method, head, replace(what, worst_rows=None))
    here = next((point for point in guarded if _alike(point.head, config.heads[head])), None)
    if here is None:
        return {}, "its setting is none that its curve was measured at (it was tightened, or taken from other lengths)"

    def error(point: Point) -> str:
        return f"{recipe.budget.error(point.mse, power):.2e}"

    def cheaper(points: Iterable[Point]) -> Point | None:
        return next((point for point in points if point.cost < here.cost), None)

    unit = recipe.budget.kind
    spend = recipe.budget.error(budget_mse(curves, recipe), power)
    after, unguarded = cheaper(guarded), cheaper(free)
    parts = []
    if unguarded is None:
        parts.append("no setting that was measured is cheaper")
    elif after is None or unguarded.mse < after.mse:
        parts.append(
            f"held back by the guard on worst rows: {_point(unguarded)} would have an error of {error(unguarded)}, but "
            f"in one row tile of a hundred a row off by {unguarded.worst:.2g}, {recipe.worst_rows:g} is allowed"
        )
    if after is not None:
        of = "the layer" if recipe.scope == "layer" else "all layers in the mean"
        parts.append(
            f"limited by the budget: the next setting, {_point(after)}, would raise its error from {error(here)} to "
            f"{error(after)}, and {of} may spend {spend:.2e} {unit} in the mean over heads, of which others make more"
        )
    found = {"density": here.density, "error": recipe.budget.error(here.mse, power), "unit": unit}
    why = "; ".join(parts)
    return found, f"dense because {why}" if here.head.mode == "dense" else why


def _alike(one: HeadConfig, other: HeadConfig) -> bool:
    """Whether two settings are the same once tau has been rounded to float32."""
    if one.mode == other.mode == "dense":
        return True
    return replace(one, tau=other.tau) == other and abs(one.tau - other.tau) <= 1e-6 * other.tau


def _point(point: Point) -> str:
    head = point.head
    if head.blocks is not None:
        return f"{head.blocks} (density {point.density:.3f})"
    tail = " with a tail" if head.tail else ""
    return f"tau {head.tau:g}{tail} (repr. {head.representatives}, density {point.density:.3f})"
