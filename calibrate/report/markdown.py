"""The report as one page of Markdown, beside the profile."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from calibrate.profiles.certified import domain_table, sentences, statement, table
from calibrate.report.contents import LengthReport, Report
from calibrate.report.sections import closing_notes, layer_ranges, layer_table, length_notes, overview_table
from calibrate.tables import Table, bullets, escaped, markdown

CAPTIONS = {
    "density": "The share of query-key pairs that every head computes, as calibrated; a cross marks dense heads.",
    "frontier": "Error against density of every layer: curves are predicted for other budgets, circles are what was "
    "chosen, on the prompts that layers were adjusted on.",
    "time": "Time of every layer's attention before that of dense attention; predicted where there was no GPU.",
}


def page(report: Report, profile_path: Path, pictures: Mapping[str, str]) -> str:
    """The report in Markdown.

    Args:
        report: What it says.
        profile_path: Where the profile is, or would be if one had been written.
        pictures: The file of each picture, a name beside the page, by the keys of `CAPTIONS`.
    """
    budget = report.budget
    scope = "of every layer" if budget.scope == "layer" else "in the mean over the layers"
    parts = [
        f"# S2O profile of {escaped(report.model)}",
        f"Sparse attention for {escaped(report.model)} ({escaped(report.architecture)}), calibrated on "
        f"{escaped(report.device)} to at most {budget.value:g} {budget.kind} {scope} against dense attention.",
        *_verdict(report, profile_path),
        *_certificate(report),
        *_usage(report),
        "## Target against achieved",
        markdown(overview_table(report)),
        "Error, density and needles are those of the prompts that layers were adjusted on. "
        "Attention and prefill are speedups over dense.",
        bullets(closing_notes(report)),
        "## How it was made",
        markdown(Table(("", ""), _facts(report), align="l")),
    ]
    for length in report.lengths:
        parts += [f"## {length.label}", markdown(layer_table(report, length))]
        parts.append(bullets([*length_notes(report, length), *_shared_studies(length)]))
    parts.append("## Plots")
    parts += [f"![{name}]({quote(file)})\n\n{CAPTIONS[name]}" for name, file in pictures.items()]
    parts += ["## What was not shown", bullets(_not_shown(report))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _verdict(report: Report, profile_path: Path) -> list[str]:
    if report.met and report.out:
        return [f"**{statement(report.certificate, report.adjusted_on)}**"]
    subject = "the profile is" if report.out else "no profile was written, and what follows is"
    parts = [f"**Not proven**: {subject} not known to be within its budget.", bullets(report.problems)]
    if not report.out and profile_path.exists():
        parts.append(f"`{profile_path.name}` beside this file is of an earlier run.")
    return parts


def _certificate(report: Report) -> list[str]:
    """The certificate's tables and sentences; nothing of a run without one."""
    tables = [one for one in (table(report.certificate), domain_table(report.certificate)) if one is not None]
    if not tables:
        return []
    return ["## Certified", *(markdown(one) for one in tables), bullets(sentences(report.certificate))]


def _usage(report: Report) -> list[str]:
    parts = []
    if report.out:
        call = f"s2o_runtime.patch(model, {json.dumps(report.out)})"
        parts += ["## Use", f"```python\nimport s2o_runtime\n{call}\n```"]
    if report.command:
        parts += ["Made by", f"```sh\n{report.command}\n```"]
    return parts


def _facts(report: Report) -> list[tuple[str, str]]:
    """How the profile was made, by name."""
    phases = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in report.phases.items())
    return [
        ("model", f"{report.model} ({report.architecture})"),
        ("weights", "random" if report.random_weights else "the model's"),
        ("hardware", report.device),
        ("versions", ", ".join(f"{name} {version}" for name, version in report.versions.items())),
        ("data", report.data),
        ("seed", str(report.seed)),
        ("lengths", ", ".join(str(length.length) for length in report.lengths if length.calibrated)),
        ("worst row", "not limited" if report.worst_rows is None else f"at most {report.worst_rows:g}"),
        ("time", f"{report.calibration_seconds:.0f} s ({phases})"),
        ("trials", f"{report.trials}, of which {report.failed_trials} failed"),
        ("journal", f"{report.journal.path}, {report.journal.reused} measurements reused"),
    ]


def _shared_studies(length: LengthReport) -> list[str]:
    shared = [layer_ranges(group) for group in length.groups if len(group) > 1]
    return [f"shared a study: {'; '.join(shared)}"] if shared else []


def _not_shown(report: Report) -> list[str]:
    """What a reader might take for shown although it is not."""
    lengths = report.lengths
    calibrated = [length.length for length in lengths if length.calibrated]
    checked = [str(length.length) for length in lengths if not length.calibrated]
    notes = [f"{sentence[:1].upper()}{sentence[1:]}." for sentence in report.not_proven]
    if not report.met:
        notes.append("That the error is within the budget: see the problems at the top.")
    if report.random_weights:
        notes.append(
            "Anything about the trained model: the weights were random, so its errors and densities are others."
        )
    if checked:
        notes.append(
            f"That {', '.join(checked)} tokens are served as well as they could be: the settings there come from "
            "other lengths."
        )
    if any(length.attention_seconds is None for length in lengths):
        notes.append("How fast it is: there was no GPU, and a CPU runs the plain reference.")
    if any(length.needles is None for length in lengths):
        notes.append("Whether needles are found: the prompts of some lengths ask for none.")
    if report.worst_rows is None:
        notes.append("A limit on the worst rows: only means are limited.")
    if calibrated:
        notes.append(f"Prompts below {min(calibrated)} tokens: they stay dense.")
    longest = max(length.length for length in lengths)
    return [*notes, f"Prompts beyond {longest} tokens, and text unlike the held-out prompts."]
