"""Why one head of a profile does what it does: its curve, its setting, and what keeps it from a cheaper one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from calibrate.curves.curves import Curves, Shape, dense_power, methods
from calibrate.profiles.stored import calibrate_command, recipe_of, stored_curves
from calibrate.recipe import Recipe
from calibrate.search.allocate import Point, points_of
from calibrate.search.choice import budget_mse, search_constraints, weights_of
from s2o_runtime.config import HeadConfig, LayerConfig, plain
from s2o_runtime.errors import InputError
from s2o_runtime.profile import Profile


def explain_head(
    profile: Profile, path: Path, layer: int, head: int, journal: Path | None = None
) -> list[dict[str, Any]]:
    """Why a head does what it does.

    Args:
        profile, path: a calibrated profile and its file.
        layer, head: indices.
        journal: the measurements; None is where a calibration leaves them, beside the profile.

    Returns:
        For each length the head's settings, the density and error that its curve predicts (None without a curve), and
        under "why" what keeps it from a cheaper setting, or that there is no curve.
    """
    measured: dict[int, Curves] = {}
    missing = "the journal has no curve of this length and tile, so what it costs is not known"
    recipe: Recipe | None = None
    try:
        recipe = recipe_of(profile, path)
        stored = stored_curves(profile, recipe, journal or recipe.journal_path, calibrate_command(recipe))
        for length in set(profile.lengths) & set(recipe.lengths):
            curves = stored.of_layer(layer, length)
            if curves:
                measured[length] = curves
    except InputError as error:
        missing = f"its curve is not there: {error}"
    rows = []
    for length, bucket in zip(profile.lengths, profile.layers, strict=True):
        config, settings = bucket[layer], bucket[layer].heads[head]
        row = {"length": length, **plain(settings), "scores": config.scores}
        row |= {"last_rows": config.last_rows} if config.last_rows else {}
        row |= {"tile": str(config.tile), **dict.fromkeys(("density", "error", "unit"))}
        if settings.mode == "dense" and config.is_dense:
            why = (
                "dense because its whole layer is: no head gains anything, the layer was not faster than dense, or its "
                "error stayed over the limit"
            )
        elif recipe is None or length not in measured:
            why = missing
        else:
            predicted, why = _limits(measured[length], config, head, recipe)
            row |= predicted
        rows.append(row | {"why": why})
    return rows


def head_lines(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """What `explain_head` returns, in lines."""
    for row in rows:
        yield f"{row['length']} tokens: {_settings(row)}"
        if row["density"] is not None:
            yield f"  predicted density {row['density']:.3f}, error {row['error']:.2e} {row['unit']}"
        yield f"  {row['why']}"


def _settings(row: Mapping[str, Any]) -> str:
    if row["mode"] == "dense":
        return "dense"
    setting = f"tau {row['tau']:.3g} ({row['stop_rule']}), repr. {row['representatives']}, tail {row['tail']}, "
    int8 = ", int8 scores" if row["scores"] == "int8" else ""
    return f"{setting}segment {row['segment']}, tile {row['tile']}{int8}"


def _limits(curves: Curves, config: LayerConfig, head: int, recipe: Recipe) -> tuple[dict[str, Any], str]:
    """Density and error of a head as its curve predicts them, and what keeps it from the next cheaper setting."""
    curves_of_methods = methods(curves, config.segment, Shape.of(config.tile), config.scores)
    power = dense_power(curves_of_methods)
    choices = search_constraints(recipe)
    guarded = points_of(curves_of_methods, head, choices)
    free = points_of(curves_of_methods, head, replace(choices, worst_rows=None))
    here = next((point for point in guarded if _alike(point.head, config.heads[head])), None)
    if here is None:
        return {}, "its setting is none that its curve was measured at (it was tightened, or taken from other lengths)"

    def error(point: Point) -> str:
        return f"{recipe.budget.error(point.mse, power):.2e}"

    def cheaper(points: Iterable[Point]) -> Point | None:
        return next((point for point in points if point.cost < here.cost), None)

    unit = recipe.budget.unit
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
        parts.append(
            f"limited by the budget: the next setting, {_point(after)}, would raise its error from {error(here)} to "
            f"{error(after)}, and {_spender(curves, recipe, power)}, of which others make more"
        )
    predicted = {"density": here.density, "error": recipe.budget.error(here.mse, power), "unit": unit}
    why = "; ".join(parts)
    return predicted, f"dense because {why}" if here.head.mode == "dense" else why


def _spender(curves: Curves, recipe: Recipe, power: float) -> str:
    """How much error the layer, or the model, may spend, in words."""
    budget = recipe.budget
    spend = budget.error(budget_mse(weights_of(curves, recipe), recipe), power)
    spender = "the layer" if recipe.scope == "layer" else "all layers in the mean"
    return f"{spender} may spend {spend:.2e} {budget.unit} in the mean over heads"


def _alike(one: HeadConfig, other: HeadConfig) -> bool:
    """Whether two settings are the same once tau has been rounded to float32."""
    if one.mode == other.mode == "dense":
        return True
    return replace(one, tau=other.tau) == other and abs(one.tau - other.tau) <= 1e-6 * other.tau


def _point(point: Point) -> str:
    head = point.head
    return f"tau {head.tau:g} (tail {head.tail}, repr. {head.representatives}, density {point.density:.3f})"
