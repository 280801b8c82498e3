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

from markupsafe import Markup, escape

from calibrate.machine import MARK
from calibrate.report import certified, sections
from calibrate.report.contents import Report
from calibrate.report.head_maps import colours, head_maps
from calibrate.report.plots import CAPTIONS
from calibrate.report.templates import FOLDER, environment, in_markdown
from calibrate.tables import Number, printable

WIDE = 16  # heads; maps with more have cells without visible numbers


def markdown_page(report: Report, profile_path: Path, pictures: Mapping[str, str]) -> str:
    """The page in Markdown.

    Args:
        report: what it says.
        profile_path: where the profile is, or would be if one had been written.
        pictures: the file of each picture, a name beside the page, by the pictures' names.
    """
    return in_markdown("page.j2", **_said(report, profile_path), form="form.md.j2", pictures=pictures)


def html_page(report: Report, profile_path: Path, pictures: Mapping[str, str]) -> str:
    """The page in HTML, in which all text is escaped; `pictures` are SVG elements, all else as in `markdown_page`."""
    return in_html("page.j2", **_said(report, profile_path), pictures=pictures, maps=head_maps(report), wide=WIDE)


def in_html(body: str, **names: Any) -> str:
    """Return the text of a template as a page of HTML, in which all text is escaped; `title` is one of its names."""
    templates = environment(autoescape=True)
    templates.filters |= {"text": printable, "anchor": _anchor, "nested": _nested, "sorted_by": _sorted_by}
    templates.filters |= {"whole_words": _whole_words, "with_options": _with_options}
    return templates.get_template("page.html.j2").render(
        names,
        body=body,
        form="form.html.j2",
        mark=MARK,
        headings=[],
        levels=colours(),
        style=(FOLDER / "page.css").read_text("utf-8"),
        script=(FOLDER / "page.js").read_text("utf-8"),
    )


def _said(report: Report, profile_path: Path) -> dict[str, Any]:
    """The names of page.j2."""
    return {
        "report": report,
        "title": f"S2O profile of {report.model}",
        "earlier": profile_path.name if profile_path.exists() else "",
        "captions": CAPTIONS,
        "sections": sections,
        "certified": certified,
        "patch_call": patch_call,
    }


def patch_call(profile: str) -> str:
    """The line of Python that deploys a profile."""
    return f"s2o_runtime.patch(model, {json.dumps(profile)})"


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


def _whole_words(command: str) -> Markup:
    """A command whose words are not cut where lines end."""
    return Markup("\n").join(
        Markup(" ").join(Markup("<span>{}</span>").format(word) for word in line.split(" "))
        for line in command.split("\n")
    )


def _with_options(sentence: str) -> Markup:
    """A sentence whose options (--lengths) are set as code, and not cut where lines end."""
    return Markup(re.sub(r"--[a-z][a-z-]*", r"<code>\g<0></code>", str(escape(printable(sentence)))))


def _sorted_by(cell: str) -> Markup:
    """The attribute with what a cell is sorted by; nothing where that is its text."""
    return Markup(' data-value="{}"').format(repr(cell.value)) if isinstance(cell, Number) else Markup("")
