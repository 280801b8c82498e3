"""What the page beside a profile says, as blocks: markdown.py and html.py write the same blocks in their ways."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from calibrate.profiles.certified import STATED, sentences, statement, tables
from calibrate.report.contents import LengthReport, Report
from calibrate.report.sections import closing_notes, gain, layer_ranges, layer_table, length_notes, overview_table
from calibrate.tables import Table


class Strong(str):
    """Text of a paragraph that stands out."""

    __slots__ = ()


class Verbatim(str):
    """Text of a paragraph that is code."""

    __slots__ = ()


@dataclass(frozen=True)
class Heading:
    """A heading. Level 1 is the page's title."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """Plain, `Strong` and `Verbatim` text, one after another."""

    parts: Sequence[str]


@dataclass(frozen=True)
class Bullets:
    """A list; a line that is indented belongs to the one before it."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Grid:
    """A table, and its caption where it has no heading of its own."""

    table: Table
    caption: str = ""


@dataclass(frozen=True)
class Facts:
    """A table of names and texts, without a head."""

    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Listing:
    """Code in the named language."""

    text: str
    language: str


@dataclass(frozen=True)
class Picture:
    """One of the pictures of plots.py, by its name, and what it shows."""

    name: str
    caption: str


@dataclass(frozen=True)
class HeadMaps:
    """What is known of every head. Markdown shows a picture of the densities, HTML maps of tau, density and error."""

    picture: Picture


Block = Heading | Paragraph | Bullets | Grid | Facts | Listing | Picture | HeadMaps

DENSITY = Picture(
    "density", "The share of query-key pairs that every head computes, as calibrated; a cross marks dense heads."
)
FRONTIER = Picture(
    "frontier",
    "Error against density of every layer: curves are predicted for other budgets, circles are what was chosen, on the "
    "prompts that layers were adjusted on.",
)
TIME = Picture(
    "time", "Time of every layer's attention before that of dense attention; predicted where there was no GPU."
)


def page(report: Report, profile_path: Path) -> list[Block]:
    """The page, from its title to what was not shown.

    Args:
        report: What it says.
        profile_path: Where the profile is, or would be if one had been written.
    """
    budget = report.budget
    scope = "of every layer" if budget.scope == "layer" else "in the mean over the layers"
    ceiling = "" if budget.ceiling is None else f" and {budget.ceiling:g} rel_mse"
    blocks = [
        Heading(f"S2O profile of {report.model}", 1),
        Paragraph(
            [
                f"Sparse attention for {report.model} ({report.architecture}), calibrated on {report.device} to at "
                f"most {budget.value:g} {budget.kind}{ceiling} {scope} against dense attention."
            ]
        ),
        Paragraph([gain(report)]),
        *_verdict(report, profile_path),
        *_certificate(report),
        *_usage(report),
        Heading("Target against achieved"),
        Grid(overview_table(report)),
        Paragraph(
            [
                "Error, density and needles are those of the prompts that layers were adjusted on. "
                "Attention and prefill are speedups over dense."
            ]
        ),
        Bullets(closing_notes(report)),
        Heading("How it was made"),
        Facts(_facts(report)),
    ]
    for length in report.lengths:
        blocks += [Heading(length.label), Grid(layer_table(report, length))]
        blocks.append(Bullets([*length_notes(report, length), *_shared_studies(length)]))
    blocks += [Heading("Plots"), HeadMaps(DENSITY), FRONTIER, TIME]
    blocks += [Heading("What was not shown"), Bullets(_not_shown(report))]
    if report.plan:
        blocks += [Heading("Plan"), Paragraph(["Every option of the run, given or by default."])]
        blocks.append(Facts(list(report.plan.items())))
    return blocks


def _verdict(report: Report, profile_path: Path) -> list[Block]:
    if report.met and report.out:
        return [Paragraph([Strong(statement(report.certificate, report.adjusted_on))])]
    subject = "the profile is" if report.out else "no profile was written, and what follows is"
    blocks: list[Block] = [
        Paragraph([Strong("Not proven"), f": {subject} not known to be within its budget."]),
        Bullets(report.problems),
    ]
    if not report.out and profile_path.exists():
        blocks.append(Paragraph([Verbatim(profile_path.name), " beside this file is of an earlier run."]))
    return blocks


def _certificate(report: Report) -> list[Block]:
    """The certificate's tables and sentences; nothing of a run without one."""
    if report.certificate is None:
        return []
    return [
        Heading("Certified"),
        *(Grid(one, one.title) for one in tables(report.certificate)),
        Bullets([STATED, *sentences(report.certificate)]),
    ]


def _usage(report: Report) -> list[Block]:
    blocks: list[Block] = []
    if report.out:
        blocks += [Heading("Use"), Listing(f"import s2o_runtime\n{patch_call(report.out)}", "python")]
    if report.command:
        blocks += [Paragraph(["Made by"]), Listing(report.command, "sh")]
    return blocks


def patch_call(profile: str) -> str:
    """The line of Python that deploys a profile."""
    return f"s2o_runtime.patch(model, {json.dumps(profile)})"


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
