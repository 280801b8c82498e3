"""Explain one head of a profile: its curve, its setting, and what keeps it from a cheaper one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from calibrate.curves.curves import Curves, Shape, dense_power, select_rankings
from calibrate.profiles.stored import calibrate_command, read_recipe, read_stored_curves
from calibrate.recipe import Recipe
from calibrate.search.allocate import Point, list_points
from calibrate.search.choice import make_constraints
from s2o_runtime.config import HeadConfig, LayerConfig, convert_to_json
from s2o_runtime.errors import InputError
from s2o_runtime.profile import Profile
from s2o_runtime.profile.record import read_limits


def explain_head(
    profile: Profile, path: Path, layer: int, head: int, journal: Path | None = None
) -> list[dict[str, Any]]:
    """Explain why a head, named by indices, does what it does.

    Args:
        profile, path: a calibrated profile and its file.
        journal: the measurements; None is where a calibration leaves them, beside the profile.

    Returns:
        For each length the head's settings, the density and error that its curve predicts (None without a curve), and
        under "why" what keeps it from a cheaper setting, or that there is no curve.
    """
    recipe, stored = None, None
    missing = "the journal has no curve of this length and tile, so what it costs is not known"
    try:
        recipe = read_recipe(profile, path)
        stored = read_stored_curves(profile, recipe, journal or recipe.journal_path, calibrate_command(recipe))
    except InputError as error:
        missing = f"its curve is not there: {error}"
    rows = []
    for length, bucket in zip(profile.lengths, profile.layers, strict=True):
        config, settings = bucket[layer], bucket[layer].heads[head]
        row = {"length": length, **convert_to_json(settings), "lookback": config.lookback}
        row |= {"last_rows": config.last_rows} if config.last_rows else {}
        row |= {"tile": str(config.tile), **dict.fromkeys(("density", "error", "unit"))}
        curves = stored.find_curves(layer, length) if stored and recipe and length in recipe.lengths else None
        if settings.mode == "dense" and config.is_dense:
            row["why"] = (
                "dense because its whole layer is: no head gains anything, the layer was not faster than dense, or its "
                "error stayed over the limit"
            )
        elif recipe and curves:
            row |= _explain_curve(curves, config, head, recipe, read_limits(profile.record, layer).get(length))
        else:
            row["why"] = missing
        rows.append(row)
    return rows


def format_head(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines for what `explain_head` returns."""
    for row in rows:
        settings = "dense"
        if row["mode"] != "dense":
            tau = f"tau {row['tau']:.3g} ({row['stop_rule']}), repr. {row['representatives']}, tail {row['tail']}"
            settings = f"{tau}, segment {row['segment']} after {row['lookback']}, tile {row['tile']}"
        yield f"{row['length']} tokens: {settings}"
        if row["density"] is not None:
            yield f"  predicted density {row['density']:.3f}, error {row['error']:.2e} {row['unit']}"
        yield f"  {row['why']}"


def _explain_curve(
    curves: Curves, config: LayerConfig, head: int, recipe: Recipe, limit: float | None
) -> dict[str, Any]:
    """Return a head's density and error as its curve predicts them, and what keeps it from the next cheaper setting.

    limit: of the layer's error; None where the record has none.
    """
    curves_of_methods = select_rankings(curves, config.segment, Shape.from_tile(config.tile), config.lookback)
    power = dense_power(curves_of_methods)
    constraints = make_constraints(recipe)
    guarded = list_points(curves_of_methods, head, constraints)
    free = list_points(curves_of_methods, head, replace(constraints, worst_rows=None))
    here = next((point for point in (*guarded, *free) if _is_same_setting(point.head, config.heads[head])), None)
    if here is None:
        return {
            "why": "its setting is none that its curve was measured at (it was tightened, or taken from other lengths)"
        }

    def error(point: Point) -> str:
        return f"{recipe.budget.error(point.mse, power):.2e}"

    def cheaper(points: Iterable[Point]) -> Point | None:
        return next((point for point in points if point.cost < here.cost), None)

    after, unguarded = cheaper(guarded), cheaper(free)
    spend = recipe.margin * (recipe.budget.limit(power) if limit is None else limit)
    parts = []
    if unguarded is None:
        parts.append("no setting that was measured is cheaper")
    elif after is None or unguarded.mse < after.mse:
        parts.append(
            f"held back by the guard on worst rows: {_format_point(unguarded)} would have an error of "
            f"{error(unguarded)}, but in one row tile of a hundred a row off by {unguarded.worst:.2g}, "
            f"{recipe.worst_rows:g} is allowed"
        )
    if after is not None:
        parts.append(
            f"limited by the budget: the next setting, {_format_point(after)}, would raise its error from "
            f"{error(here)} to {error(after)}, and the layer may spend {spend:.2e} {recipe.budget.unit} in the mean "
            "over heads, of which others make more"
        )
    why = "; ".join(parts)
    return {
        "density": here.density,
        "error": recipe.budget.error(here.mse, power),
        "unit": recipe.budget.unit,
        "why": f"dense because {why}" if here.head.mode == "dense" else why,
    }


def _is_same_setting(head: HeadConfig, other: HeadConfig) -> bool:
    """Return whether two settings are the same once tau has been rounded to float32."""
    if head.mode == other.mode == "dense":
        return True
    return replace(head, tau=other.tau) == other and abs(head.tau - other.tau) <= 1e-6 * other.tau


def _format_point(point: Point) -> str:
    head = point.head
    return f"tau {head.tau:g} (tail {head.tail}, repr. {head.representatives}, density {point.density:.3f})"
