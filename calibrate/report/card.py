"""A profile's card: one page of Markdown, made from the profile alone, so that the same file has the same card.

The report that a calibration writes says more: it is of that run, with its times and plots.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from calibrate.report import certified
from calibrate.report.shown import COLUMNS, length_cells, times
from calibrate.report.summary import summary
from calibrate.report.templates import in_markdown
from calibrate.tables import Table
from s2o_runtime.profile import Profile

NOT_RECORDED = "not recorded"


def card(profile: Profile, file: str, origin: str = "") -> str:
    """The card of a profile that is in `file`, a name beside the card; `origin` says whose weights its model has."""
    summed = summary(profile)
    rows = [(*length_cells(row), times(row["prefill_speedup"])) for row in summed["lengths"]]
    return in_markdown(
        "card.j2",
        summary=summed,
        origin=origin,
        record=profile.record,
        certified=certified,
        not_recorded=NOT_RECORDED,
        call=f"s2o_runtime.patch(model, {json.dumps(file)})",
        lengths=Table((*COLUMNS, "prefill"), rows),
        min_length=profile.min_length,
        facts=_facts(profile, summed),
    )


def _facts(profile: Profile, summed: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How the profile was made, as far as its record says."""
    record = profile.record
    recipe = record.recipe or {}
    return [
        ("objective", _listed(record.objective)),
        ("lengths", f"{_listed(recipe.get('lengths'))}; checked: {_listed(recipe.get('check_lengths')) or 'none'}"),
        ("prompts", _prompt_source(recipe)),
        ("seed", _listed(recipe.get("seed"))),
        *([("tiles", str(summed["retiled"]))] if summed["retiled"] else []),
        ("versions", _listed(record.versions)),
    ]


def _prompt_source(recipe: Mapping[str, Any]) -> str:
    if recipe.get("prompts"):
        return _listed(recipe["prompts"])
    if not recipe.get("domains"):
        return NOT_RECORDED
    return f"built-in {_listed(recipe['domains'])}{', with needles' if recipe.get('hide_needles') else ''}"


def _listed(value: Any) -> str:
    """A recorded value in one line of text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return NOT_RECORDED if value is None else str(value)
