"""A profile's card: one page of Markdown, made from the profile alone, so that the same file has the same card.

In HTML it has every layer's settings too. The report that a calibration writes says more: it is of that run, with its
times, what single heads cost and what other budgets would give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from calibrate.report import certified
from calibrate.report.figures import attempt
from calibrate.report.page import in_html, patch_call
from calibrate.report.shown import COLUMNS, length_cells, tau_range, times
from calibrate.report.summary import head_counts, summary
from calibrate.report.tau_plot import CAPTION, tau_element
from calibrate.report.templates import in_markdown
from calibrate.tables import Table, formatted, integer
from s2o_runtime.config import LayerConfig
from s2o_runtime.profile import Profile
from s2o_runtime.profile.record import ProvenLength

NOT_RECORDED = "not recorded"


def card(profile: Profile, file: str, origin: str = "") -> str:
    """Return the card of a profile that is in `file`, a name beside it; `origin` says whose weights its model has."""
    return in_markdown("card.j2", **_contents(profile, file, origin), form="form.md.j2", layer_tables=(), pictures={})


def html_card(profile: Profile, file: str) -> tuple[str, str]:
    """Return the card in HTML with what every layer does, and why it has no picture, empty if it has."""
    picture, failure = attempt(lambda: tau_element(profile))
    tables = [_layer_table(profile, length) for length in profile.lengths]
    contents = _contents(profile, file) | {"captions": {"tau": CAPTION}}
    contents["pictures"] = {} if picture is None else {"tau": picture}
    return in_html("card.j2", **contents, layer_tables=tables), failure


def _contents(profile: Profile, file: str, origin: str = "") -> dict[str, Any]:
    """The names of card.j2 that both forms have."""
    summed = summary(profile)
    rows = [(*length_cells(row), times(row["prefill_speedup"])) for row in summed["lengths"]]
    return {
        "title": f"S2O profile of {profile.model_name}",
        "summary": summed,
        "origin": origin,
        "record": profile.record,
        "certified": certified,
        "not_recorded": NOT_RECORDED,
        "call": patch_call(file),
        "lengths": Table((*COLUMNS, "prefill"), rows),
        "min_length": profile.min_length,
        "facts": _facts(profile, summed),
    }


def _layer_table(profile: Profile, length: int) -> Table:
    """What each layer does at a length, with what was proven of it or else predicted."""
    source, densities = profile.record.densities(length, profile.geometry.layers)
    proven = (profile.record.proven_at(length) or ProvenLength()).layers or ()
    columns: dict[str, Callable[[tuple[int, LayerConfig]], str]] = {
        "layer": lambda row: integer(profile.geometry.layer_number(row[0])),
        "tau": lambda row: tau_range(*(head_counts(row[1].heads)[name] for name in ("tau_min", "tau_max"))),
        "dense heads": lambda row: integer(head_counts(row[1].heads)["dense_heads"]),
        "segment": lambda row: integer(row[1].segment),
        "tile": lambda row: str(row[1].tile),
        "density": lambda row: formatted(densities[row[0]] if densities else None, ".3f"),
    }
    if len(proven) == profile.geometry.layers:
        columns |= {
            "mse": lambda row: formatted(proven[row[0]].mse, ".2e"),
            "rel_mse": lambda row: formatted(proven[row[0]].rel_mse, ".2e"),
            "limit": lambda row: formatted(proven[row[0]].limit, ".2e"),
            "worst row": lambda row: formatted(proven[row[0]].worst, ".2g"),
        }
    rows = enumerate(profile.layers[profile.lengths.index(length)])
    return Table.of(rows, columns, f"{length} tokens" + (f", densities {source}" if source else ""))


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
