"""The report as one page of HTML that needs no other file and no network: style, script and pictures are inside."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from calibrate.report.contents import LengthReport, Report
from calibrate.report.head_maps import HeadMap, colours, head_maps
from calibrate.report.page import (
    Block,
    Bullets,
    Facts,
    Grid,
    Heading,
    HeadMaps,
    Listing,
    Paragraph,
    Picture,
    Strong,
    Verbatim,
)
from calibrate.tables import Number, Table, printable

STYLE, SCRIPT = (Path(__file__).with_name(name) for name in ("page.css", "page.js"))
# a browser that obeys it loads nothing from anywhere, whatever a model's name or a prompt's path may hold
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
WIDE = 16  # heads; maps with more have cells without visible numbers
DENSE, NO_TAU = "&times;", "&ndash;"  # in cells of maps


def html_page(report: Report, blocks: Sequence[Block], pictures: Mapping[str, str]) -> str:
    """The page in HTML.

    Args:
        report: What the maps of heads are of.
        blocks: What the page says.
        pictures: Each picture as an SVG element, by the pictures' names.
    """
    headings = [block for block in blocks if isinstance(block, Heading)]
    links = [f'<li><a href="#{_anchor(block)}">{_plain(block.text)}</a></li>' for block in headings if block.level > 1]
    body = [_element(block, report, pictures) for block in blocks]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_plain(headings[0].text)}</title>",
            f"<style>\n{STYLE.read_text('utf-8')}{_levels()}\n</style>",
            "</head>",
            "<body>",
            f'<nav aria-label="Sections">\n<ul>\n{_lines(links)}\n</ul>\n</nav>',
            f"<main>\n{_lines(text for text in body if text)}\n</main>",
            f"<script>\n{SCRIPT.read_text('utf-8')}</script>",
            "</body>",
            "</html>\n",
        ]
    )


def _element(block: Block, report: Report, pictures: Mapping[str, str]) -> str:
    match block:
        case Heading(text, level):
            return f'<h{level} id="{_anchor(block)}">{_plain(text)}</h{level}>'
        case Paragraph(parts):
            verdict = _attribute("class", "verdict" if any(isinstance(part, Strong) for part in parts) else None)
            return f"<p{verdict}>{''.join(map(_inline, parts))}</p>"
        case Bullets(lines):
            return _list(lines)
        case Grid(table, caption):
            return _table(table, caption)
        case Facts(rows):
            return _facts(rows)
        case Listing(text, _):
            return f"<pre><code>{escape(text)}</code></pre>"
        case Picture(name, caption):
            return (
                f"<figure>\n{_scrolling(pictures[name], name, 'paper')}\n"
                f"<figcaption>{_plain(caption)}</figcaption>\n</figure>"
            )
        case HeadMaps():
            return _all_maps(report)


def _anchor(heading: Heading) -> str:
    return "-".join(re.findall(r"\w+", heading.text.lower()))


def _inline(text: str) -> str:
    name = "strong" if isinstance(text, Strong) else "code" if isinstance(text, Verbatim) else None
    return f"<{name}>{_plain(text)}</{name}>" if name else _plain(text)


def _list(lines: Sequence[str]) -> str:
    """A list; nothing without lines. Indented lines are a list below the line before them."""
    if not lines:
        return ""
    items: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith(" ") and items:
            items[-1][1].append(line.lstrip())
        else:
            items.append((line.lstrip(), []))
    return f"<ul>\n{_lines(f'<li>{_plain(line)}{_list(below)}</li>' for line, below in items)}\n</ul>"


def _table(table: Table, caption: str) -> str:
    """A table that can be sorted; what a cell is sorted by is in data-value."""
    columns = [_attribute("class", table.alignment(column)) for column in range(len(table.names))]
    head = "".join(
        f'<th scope="col"{column}>{_plain(title)}</th>' for column, title in zip(columns, table.titles, strict=True)
    )
    rows = ("".join(_cell(cell, column) for cell, column in zip(row, columns, strict=True)) for row in table.rows)
    body = _lines(f"<tr>{row}</tr>" for row in rows)
    text = (
        f'<table class="data">\n<caption>{_plain(caption or table.title)}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
    )
    return _scrolling(text, caption or table.title)


def _cell(text: str, column: str) -> str:
    value = f' data-value="{text.value!r}"' if isinstance(text, Number) else ""
    return f"<td{column}{value}>{_plain(text)}</td>"


def _facts(rows: Iterable[tuple[str, str]]) -> str:
    body = _lines(f'<tr><th scope="row">{_plain(name)}</th><td>{_plain(text)}</td></tr>' for name, text in rows)
    return f'<table class="facts">\n<tbody>\n{body}\n</tbody>\n</table>'


def _all_maps(report: Report) -> str:
    """For each length the maps of tau, density and error; a sentence where nothing is known of single heads."""
    maps, parts = head_maps(report), []
    known = [length for length in report.lengths if length.has_heads]
    for length in known:
        parts.append(f"<h3>Heads at {_plain(length.label)}</h3>")
        parts.append('<div class="maps">' + _lines(_map(head_map, length) for head_map in maps) + "</div>")
    others = ", ".join(str(length.length) for length in report.lengths if length not in known)
    if others:
        note = f"Nothing was measured of single heads at {others} tokens: settings there come from other lengths."
        parts.append(f"<p>{note}</p>")
    scope = (
        f"Rows are layers, columns are query heads; {DENSE} is a dense head, {NO_TAU} a head without a threshold. "
        f"Thresholds are as chosen, densities and {report.budget.unit} as predicted for the calibration prompts; "
        "colours mean the same at every length."
    )
    return f"<p>{scope}</p>\n" + _lines(parts)


def _map(head_map: HeadMap, length: LengthReport) -> str:
    heads = max(len(layer.heads) for layer in length.layers)
    classes = "map" if heads <= WIDE else "map dense"
    names = "".join(f'<th scope="col">{_head_number(head, heads)}</th>' for head in range(heads))
    rows = (
        f'<tr><th scope="row">{layer.layer}</th>'
        + "".join(_map_cell(head_map, head_map.value(head), head.mode) for head in layer.heads)
        + "</tr>"
        for layer in length.layers
    )
    ends = [escape(head_map.text(value)) for value in (head_map.low, head_map.high)]
    return (
        "<div>"
        + _scrolling(
            f'<table class="{classes}">\n<caption>{_plain(head_map.name)}</caption>\n'
            f'<thead><tr><th scope="col">layer</th>{names}</tr></thead>\n<tbody>\n{_lines(rows)}\n</tbody>\n</table>',
            f"{head_map.name} by layer and head at {length.label}",
        )
        + f'<p class="scale" aria-hidden="true">{ends[0]}<i></i>{ends[1]}</p></div>'
    )


def _head_number(head: int, heads: int) -> str:
    """Every number is there; of many only every eighth is seen."""
    return str(head) if heads <= WIDE or head % 8 == 0 else f"<span>{head}</span>"


def _map_cell(head_map: HeadMap, value: float | None, mode: str) -> str:
    if value is None:
        return f"<td class=x>{DENSE if mode == 'dense' else NO_TAU}</td>"
    level = head_map.level(value)
    if mode == "dense":
        return f'<td class="x v{level}" data-value={value!r}>{DENSE}</td>'
    return f"<td class=v{level} data-value={value!r}>{escape(head_map.text(value))}</td>"


def _levels() -> str:
    """The style of the maps' cells and of the strip that shows all colours."""
    levels = colours()
    cells = [f".map .v{level} {{ background: {ground}; color: {ink} }}" for level, (ground, ink) in enumerate(levels)]
    strip = ", ".join(ground for ground, _ in levels)
    return _lines([*cells, f".scale i {{ background: linear-gradient(90deg, {strip}) }}"])


def _scrolling(text: str, label: str, extra: str = "") -> str:
    """Something wide that scrolls by itself on a narrow screen, with the keyboard too."""
    classes = f"scroll {extra}".strip()
    return f'<div class="{classes}" tabindex="0" role="region" aria-label="{_plain(label)}">\n{text}\n</div>'


def _plain(text: str) -> str:
    return escape(printable(text))


def _attribute(name: str, value: str | None) -> str:
    return "" if value is None else f' {name}="{escape(value)}"'


def _lines(parts: Iterable[str]) -> str:
    return "\n".join(parts)
