"""The page beside a profile, in Markdown and in HTML.

`page.j2` says what is on it; `form.md.j2` and `form.html.j2` say how that is written. The page in HTML needs no other
file and no network: style, script and pictures are inside.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from calibrate.report import sections
from calibrate.report.certified import STATED, domain_table, sentences, statement, table
from calibrate.report.contents import LengthReport, Report
from calibrate.report.head_maps import colours, head_maps
from calibrate.report.plots import CAPTIONS
from calibrate.report.sections import layer_ranges
from calibrate.tables import Number, Table, bullets, escaped, markdown, printable

FOLDER = Path(__file__).parent
WIDE = 16  # heads; maps with more have cells without visible numbers


def markdown_page(report: Report, profile_path: Path, pictures: Mapping[str, str]) -> str:
    """The page in Markdown.

    Args:
        report: What it says.
        profile_path: Where the profile is, or would be if one had been written.
        pictures: The file of each picture, a name beside the page, by the pictures' names.
    """
    environment = _environment(autoescape=False)
    environment.filters |= {"text": escaped, "bullets": bullets, "markdown": markdown, "facts_table": _facts_table}
    text = environment.get_template("page.j2").render(_said(report, profile_path), form="form.md.j2", pictures=pictures)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def html_page(report: Report, profile_path: Path, pictures: Mapping[str, str]) -> str:
    """The page in HTML, in which all text is escaped; `pictures` are SVG elements, all else as in `markdown_page`."""
    environment = _environment(autoescape=True)
    environment.filters |= {"text": printable, "anchor": _anchor, "nested": _nested, "sorted_by": _sorted_by}
    return environment.get_template("page.html.j2").render(
        _said(report, profile_path),
        form="form.html.j2",
        pictures=pictures,
        headings=[],
        maps=head_maps(report),
        levels=colours(),
        wide=WIDE,
        style=(FOLDER / "page.css").read_text("utf-8"),
        script=(FOLDER / "page.js").read_text("utf-8"),
    )


def _environment(*, autoescape: bool) -> Environment:
    return Environment(
        loader=FileSystemLoader(FOLDER), autoescape=autoescape, undefined=StrictUndefined, keep_trailing_newline=True
    )


def _said(report: Report, profile_path: Path) -> dict[str, Any]:
    """What page.j2 takes its text from."""
    return {
        "report": report,
        "title": f"S2O profile of {report.model}",
        "earlier": profile_path.name if profile_path.exists() else "",
        "stated": STATED,
        "captions": CAPTIONS,
        "statement": statement,
        "sentences": sentences,
        "certificate_tables": lambda certificate: filter(None, (table(certificate), domain_table(certificate))),
        "gain": sections.gain,
        "overview_table": sections.overview_table,
        "layer_table": sections.layer_table,
        "length_notes": sections.length_notes,
        "closing_notes": sections.closing_notes,
        "patch_call": patch_call,
        "facts": _facts,
        "shared_studies": _shared_studies,
        "not_shown": _not_shown,
    }


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


def _facts_table(rows: Sequence[tuple[str, str]]) -> Table:
    return Table(("", ""), list(rows), align="l")


def _anchor(heading: str) -> str:
    """A heading's name in links."""
    return "-".join(re.findall(r"\w+", heading.lower()))


def _nested(lines: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each line of a list with the indented lines below it."""
    items: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith(" ") and items:
            items[-1][1].append(line.lstrip())
        else:
            items.append((line.lstrip(), []))
    return items


def _sorted_by(cell: str) -> Markup:
    """The attribute with what a cell is sorted by; nothing where that is its text."""
    return Markup(' data-value="{}"').format(repr(cell.value)) if isinstance(cell, Number) else Markup("")
