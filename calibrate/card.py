"""A profile's card: one page of Markdown, made from the profile alone, so that the same file has the same card.

The report that a calibration writes says more; it is of that run, with its times and plots.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from calibrate.summary import at, summary
from s2o_runtime.profile import Profile

COLUMNS = ("length", "tau", "dense heads", "tails", "density", "of", "error / limit", "worst row", "needles", "KL")
NOT_RECORDED = "not recorded"


def card(profile: Profile, file: str) -> str:
    """The card of a profile that is in `file`, a name beside the card."""
    found = summary(profile)
    call = f"s2o_runtime.patch(model, {json.dumps(file)})"
    parts = [
        f"# S2O profile of {plain(found['model'])}",
        f"Sparse attention for {plain(found['model'])} ({plain(found['architecture'])}), made on "
        f"{plain(found['device'])} within {plain(found['budget'] or 'a budget that is not recorded')} of dense "
        "attention.",
        _proof(found),
        f"```python\nimport s2o_runtime\n\n{call}\n```",
        table((*COLUMNS, "prefill"), [(*length_cells(row), times(row["prefill_speedup"])) for row in found["lengths"]]),
        "Error, worst row, needles and KL are those of held-out prompts, against the dense model; prefill is how many "
        f"times faster it is. Prompts below {profile.min_length} tokens stay dense.",
        table(("", ""), _facts(profile, found)),
    ]
    return "\n\n".join(parts) + "\n"


def _proof(found: Mapping[str, Any]) -> str:
    proof = found["proof"]
    if isinstance(proof, str) and proof.startswith("held out") and not found["problems"]:
        return "**Proven on held-out prompts.**" if proof == "held out" else f"**Proof: {plain(proof)}.**"
    problems = "".join(f"\n- {plain(each)}" for each in found["problems"])
    return f"**Not proven** ({plain(str(proof or NOT_RECORDED))})." + (f"\n{problems}" if problems else "")


def _facts(profile: Profile, found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How it was made, as far as the record says."""
    record = profile.record

    def said(*path: str) -> str:
        value = at(record, *path)
        if isinstance(value, dict):
            return ", ".join(f"{name} {each}" for name, each in value.items())
        if isinstance(value, list):
            return ", ".join(map(str, value))
        return NOT_RECORDED if value is None else str(value)

    retiled = [("tiles", str(found["retiled"]))] if found["retiled"] else []
    return [
        ("weights", f"fingerprint {profile.fingerprint[:16]}"),
        ("objective", said("objective")),
        ("lengths", f"{said('recipe', 'lengths')}; checked: {said('recipe', 'check_lengths') or 'none'}"),
        ("prompts", f"{at(record, 'recipe', 'prompts') or 'the Python standard library, with needles'}"),
        ("seed", said("recipe", "seed")),
        *retiled,
        ("versions", said("versions")),
    ]


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
        str(row["tails"]),
        shown(row["density"], ".3f"),
        row["density_is"] or "-",
        shown(row["error_over_limit"], ".0%"),
        shown(row["worst"], ".2g"),
        f"{needles[0]} of {needles[1]}" if isinstance(needles, list) and len(needles) == 2 else "-",
        shown(row["kl"], ".1e"),
    )


def times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [names, ["--:" if any(names) else ":--"] * len(names), *(map(plain, row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plain(text: str) -> str:
    """A foreign text that cannot become another cell, another line or markup."""
    printable = "".join(each if each.isprintable() else " " for each in text)
    return "".join(f"\\{each}" if each in "|`<>[]*\\" else each for each in printable)
