"""The report as one page of HTML that needs no other file and no network: style, script and pictures are inside."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from calibrate.report.contents import Report
from calibrate.report.head_maps import colours, head_maps
from calibrate.report.page import Block, Heading, Strong, Verbatim
from calibrate.tables import Number, printable

FOLDER = Path(__file__).parent
WIDE = 16  # heads; maps with more have cells without visible numbers


def html_page(report: Report, blocks: Sequence[Block], pictures: Mapping[str, str]) -> str:
    """The page in HTML; `page.html.j2` is its template, in which all text is escaped.

    Args:
        report: What the maps of heads are of.
        blocks: What the page says; the first is its title.
        pictures: Each picture as an SVG element, by the pictures' names.
    """
    environment = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    filters = (plain, anchor, element_name, type_name, nested, sorted_by)
    environment.filters.update({function.__name__: function for function in filters})
    return environment.get_template("page.html.j2").render(
        report=report,
        blocks=blocks,
        pictures=pictures,
        maps=head_maps(report),
        levels=colours(),
        wide=WIDE,
        style=(FOLDER / "page.css").read_text("utf-8"),
        script=(FOLDER / "page.js").read_text("utf-8"),
    )


def plain(text: str) -> str:
    """Text without what does not print."""
    return printable(text)


def anchor(heading: Heading) -> str:
    """A heading's name in links."""
    return "-".join(re.findall(r"\w+", heading.text.lower()))


def element_name(text: str) -> str:
    """The HTML element of a part of a paragraph; empty for plain text."""
    return "strong" if isinstance(text, Strong) else "code" if isinstance(text, Verbatim) else ""


def type_name(block: Block) -> str:
    """What a block is."""
    return type(block).__name__


def nested(lines: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each line of a list with the indented lines below it."""
    items: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith(" ") and items:
            items[-1][1].append(line.lstrip())
        else:
            items.append((line.lstrip(), []))
    return items


def sorted_by(cell: str) -> Markup:
    """The attribute with what a cell is sorted by; nothing where that is its text."""
    return Markup(' data-value="{}"').format(repr(cell.value)) if isinstance(cell, Number) else Markup("")
