"""A profile's card: one page of Markdown, made from the profile alone, so that the same file has the same card.

The report that a calibration writes says more: it is of that run, with its times and plots.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from calibrate.profiles.certified import adjusted_on, sentences, statement, tables
from calibrate.profiles.summary import summary
from calibrate.tables import Table, bullets, escaped, markdown
from s2o_runtime.profile import Profile
from s2o_runtime.profile.record import Record

COLUMNS = ("length", "tau", "dense heads", "tails", "density", "of", "error / limit", "worst row", "needles", "KL")
NOT_RECORDED = "not recorded"
CERTIFIED = (
    "## Certified\n\nUpper bounds for the mean errors of the layers, as shares of their limits: over all rows of a "
    "prompt, over its last eighth, and of calls that bring so many new tokens behind a cached prefix; only the first "
    "is held to the limit. KL and top-1 are the numbers of the sentences below; noise is the KL between two dense "
    "implementations."
)


def card(profile: Profile, file: str) -> str:
    """The card of a profile that is in `file`, a name beside the card."""
    summed = summary(profile)
    call = f"s2o_runtime.patch(model, {json.dumps(file)})"
    rows = [(*length_cells(row), times(row["prefill_speedup"])) for row in summed["lengths"]]
    parts = [
        f"# S2O profile of {escaped(summed['model'])}",
        f"Sparse attention for {escaped(summed['model'])} ({escaped(summed['architecture'])}), made on "
        f"{escaped(summed['device'])} within {escaped(summed['budget'] or 'a budget that is not recorded')} of dense "
        "attention.",
        _proof(profile.record, summed),
        f"```python\nimport s2o_runtime\n\n{call}\n```",
        markdown(Table((*COLUMNS, "prefill"), rows)),
        "Error, worst row, needles and KL are those of the prompts that layers were adjusted on, against the dense "
        f"model; prefill is how many times faster it is. Prompts below {profile.min_length} tokens stay dense.",
        *_certificate(profile.record),
        markdown(Table(("", ""), _facts(profile, summed), align="l")),
    ]
    return "\n\n".join(parts) + "\n"


def _proof(record: Record, summed: Mapping[str, Any]) -> str:
    """What was shown, then what was not."""
    proof = summed["proof"] or NOT_RECORDED
    if not proof.startswith("held out") or summed["problems"]:
        problems = "".join(f"\n- {escaped(problem)}" for problem in summed["problems"])
        return f"**Not proven** ({escaped(proof)})." + (f"\n{problems}" if problems else "")
    where = "" if proof == "held out" else f" Proof: {escaped(proof)}."
    return f"**{escaped(statement(record.certificate, adjusted_on(record)))}**{where}"


def _certificate(record: Record) -> list[str]:
    """The certificate's tables and sentences, and what was not proven; nothing of a profile that has neither."""
    shown = [markdown(one) for one in tables(record.certificate)]
    certified = [CERTIFIED, *shown, bullets(sentences(record.certificate))] if shown else []
    return certified + (["## Not proven", bullets(record.not_proven)] if record.not_proven else [])


def _facts(profile: Profile, summed: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How the profile was made, as far as its record says."""
    record = profile.record
    recipe = record.recipe or {}
    retiled = [("tiles", str(summed["retiled"]))] if summed["retiled"] else []
    return [
        ("weights", f"fingerprint {profile.fingerprint[:16]}"),
        ("objective", _listed(record.objective)),
        ("lengths", f"{_listed(recipe.get('lengths'))}; checked: {_listed(recipe.get('check_lengths')) or 'none'}"),
        ("prompts", _prompt_source(recipe)),
        ("seed", _listed(recipe.get("seed"))),
        *retiled,
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


def length_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of `COLUMNS` for one of `summary`'s lengths."""

    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    tau = (
        "-"
        if row["tau_min"] is None
        else " .. ".join(f"{float(f'{row[end]:.2g}'):g}" for end in ("tau_min", "tau_max"))
    )
    needles = row["needles"]
    return (
        str(row["length"]),
        tau,
        f"{row['dense_heads']} of {row['heads']}",
        f"{row['tails']}+{row['linear_tails']} lin." if row["linear_tails"] else str(row["tails"]),
        shown(row["density"], ".3f"),
        row["density_is"] or "-",
        shown(row["error_over_limit"], ".0%"),
        shown(row["worst"], ".2g"),
        "-" if needles is None else f"{needles[0]} of {needles[1]}",
        shown(row["kl"], ".1e"),
    )


def times(ratio: float | None) -> str:
    """2.0 -> "2.00x"."""
    return "-" if ratio is None else f"{ratio:.2f}x"
