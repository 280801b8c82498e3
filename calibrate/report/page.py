"""The report's HTML page, Markdown and card, and where they are written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from rich.console import Console

from calibrate.machine import MARK, format_json_file
from calibrate.recipe import list_report_paths
from calibrate.record import ProvenLength, read_record
from calibrate.report import figures, sections
from calibrate.report.contents import Report, count_heads, summarise_profile
from calibrate.tables import (
    Number,
    Table,
    escape_markdown,
    format_bullets,
    format_markdown,
    print_lines,
    print_table,
    replace_controls,
)
from s2o_runtime.files import write_atomically
from s2o_runtime.profile import Profile

FOLDER = Path(__file__).parent
WIDE = 16  # heads; maps with more have cells without visible numbers
NOT_RECORDED = "not recorded"
Filters = dict[str, Callable[..., Any]]  # of a template, by name


def _render_template(name: str, names: Mapping[str, Any], filters: Filters, *, autoescape: bool, **more: Any) -> str:
    """Return a template's text; a name in it that is none of `names` and `more` is an error."""
    templates = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=autoescape, undefined=StrictUndefined, keep_trailing_newline=True
    )
    templates.filters |= {"listed": _list_items, **filters}
    return templates.get_template(name).render(names, **more)


def _render_markdown(template: str, **names: Any) -> str:
    """Return a template's text in Markdown, one blank line between blocks, below a comment that says who wrote it."""
    filters: Filters = {"text": escape_markdown, "bullets": format_bullets, "markdown": format_markdown}
    filters["facts_table"] = partial(Table, ("", ""), align="l")
    text = _render_template(template, names, filters, autoescape=False, form="form.md.j2")
    title, _, rest = re.sub(r"\n{3,}", "\n\n", text).strip().partition("\n")
    return f"{title}\n\n<!-- {MARK} -->\n{rest}\n"


def _render_html(body: str, **names: Any) -> str:
    """Return the text of a template as a page of HTML, in which all text is escaped; `title` is one of its names."""
    filters: Filters = {
        "text": replace_controls,
        "anchor": lambda heading: "-".join(re.findall(r"\w+", heading.lower())),
        "nested": _group_indented,
        # the attribute with what a cell is sorted by; nothing where that is its text
        "sorted_by": lambda cell: Markup(f' data-value="{cell.value!r}"') if isinstance(cell, Number) else "",
        "whole_words": _set_as("span", r"[^ \n]+"),
        "with_options": _set_as("code", r"--[a-z][a-z-]*"),
    }
    return _render_template(
        "page.html.j2",
        names,
        filters,
        autoescape=True,
        body=body,
        form="form.html.j2",
        mark=MARK,
        headings=[],
        levels=figures.list_colours(),
        style=(FOLDER / "page.css").read_text("utf-8"),
        script=(FOLDER / "page.js").read_text("utf-8"),
    )


def _list_page_names(report: Report, profile_path: Path) -> dict[str, Any]:
    """Return the names of page.j2."""
    return {
        "report": report,
        "title": f"S2O profile of {report.model}",
        "earlier": profile_path.name if profile_path.exists() else "",
        "calibrated": [length.length for length in report.lengths if length.calibrated],
        "checked": [length.length for length in report.lengths if not length.calibrated],
        "not_proven": [f"{sentence[:1].upper()}{sentence[1:]}." for sentence in report.not_proven],
        "phases": {name: f"{seconds:.0f} s" for name, seconds in report.phases.items()},
        "captions": figures.CAPTIONS,
        "patch_call": patch_call,
        "sections": sections,
    }


def patch_call(profile: str) -> str:
    """Return the line of Python that deploys a profile."""
    return f"s2o_runtime.patch(model, {json.dumps(profile)})"


def _group_indented(lines: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each line of a list with the indented lines below it."""
    items: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith(" ") and items:
            items[-1][1].append(line.lstrip())
        else:
            items.append((line.lstrip(), []))
    return items


def _set_as(element: str, pattern: str) -> Callable[[str], Markup]:
    """Return a filter that sets what matches a pattern as an element, such as code, whose lines are not cut."""
    return lambda text: Markup(re.sub(pattern, rf"<{element}>\g<0></{element}>", str(escape(text))))


def render_card(profile: Profile, file: str, origin: str = "", tasks: Sequence[str] = ()) -> str:
    """Return the card of a profile that is in `file`, a name beside it.

    origin: whose weights its model has. tasks: sentences on what an evaluation of it found.
    """
    return _render_markdown(
        "card.j2", **_list_card_names(profile, file, origin), tasks=tasks, layer_tables=(), pictures={}
    )


def render_readme(name: str, root: Path, profiles: Mapping[Path, Profile]) -> str:
    """Return the README of a folder to publish: its model's hub id, and its profiles, by path, with their cards."""
    cards = {path.relative_to(root).with_suffix(".md"): summarise_profile(profiles[path]) for path in sorted(profiles)}
    return _render_template("publish.j2", {}, {}, autoescape=False, hub_id=name, profiles=cards, mark=MARK)


def render_html_card(profile: Profile, file: str, tasks: Sequence[str] = ()) -> tuple[str, str]:
    """Return the card in HTML with what every layer does, and why it has no picture, empty if it has."""
    picture, failure = figures.try_drawing(lambda: figures.draw_tau_svg(profile))
    layer_tables = [_make_layer_table(profile, length) for length in profile.lengths]
    names = _list_card_names(profile, file)
    names |= {"tasks": tasks, "captions": {"tau": figures.CAPTION}, "layer_tables": layer_tables}
    return _render_html("card.j2", **names, pictures={} if picture is None else {"tau": picture}), failure


def _list_card_names(profile: Profile, file: str, origin: str = "") -> dict[str, Any]:
    """Return the names of card.j2 that both forms have."""
    record, summed = read_record(profile), summarise_profile(profile)
    columns = sections.COLUMNS | {"prefill": sections.show("prefill_speedup", ".2f", "x")}
    return {
        "title": f"S2O profile of {profile.model_name}",
        "summary": summed,
        "origin": origin,
        "record": record,
        "recipe": record.recipe or {},
        "sections": sections,
        "not_recorded": NOT_RECORDED,
        "call": patch_call(file),
        "lengths": Table.from_rows(summed["lengths"], columns),
        "min_length": profile.min_length,
    }


def _make_layer_table(profile: Profile, length: int) -> Table:
    """Return what each layer does at a length, with what was proven of it or else predicted."""
    record, configs = read_record(profile), profile.layers[profile.lengths.index(length)]
    source, densities = record.densities(length, len(configs))
    proven = (record.find_proven(length) or ProvenLength()).layers or ()
    is_proven = len(proven) == len(configs)
    rows = [
        {
            **(vars(proven[index]) if is_proven else {}),
            **count_heads(config.heads),
            "layer": profile.geometry.get_layer_number(index),
            "segment": config.segment,
            "tile": str(config.tile),
            "density": densities[index] if densities else None,
        }
        for index, config in enumerate(configs)
    ]
    columns: sections.Columns = {
        "layer": sections.show("layer", "d"),
        "tau": lambda row: sections.format_taus(row["tau_min"], row["tau_max"]),
        "dense heads": sections.show("dense_heads", "d"),
        "segment": sections.show("segment", "d"),
        "tile": lambda row: row["tile"],
        "density": sections.show("density", ".3f"),
    }
    if is_proven:
        columns |= {name: sections.show(name, ".2e") for name in ("mse", "rel_mse", "limit")}
        columns["worst row"] = sections.show("worst", ".2g")
    title = f"{length} tokens" + (f", densities {source}" if source else "")
    return Table.from_rows(rows, columns, title)


def _list_items(value: Any) -> str:
    """Format a recorded value in one line of text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return NOT_RECORDED if value is None else str(value)


def print_report(report: Report, console: Console) -> None:
    """Print the gain, and target against achieved: all lengths, each one's layers with notes, the certificate."""
    print_lines([sections.describe_gain(report), ""], console)
    if len(report.lengths) > 1:
        print_table(sections.make_overview_table(report), console)
    for length in report.lengths:
        print_table(sections.make_layer_table(report, length, brief=True), console)
        print_lines([*sections.list_length_notes(report, length), ""], console)
    print_lines(sections.list_closing_notes(report), console)
    for table in sections.make_certificate_tables(report.certificate):
        print_table(table, console)
    if report.met:
        statement = sections.describe_certificate(report.certificate, report.adjusted_on)
        print_lines([statement, *sections.list_claims(report.certificate)], console)
    print_lines([f"not proven: {sentence}" for sentence in (*report.problems, *report.not_proven)], console)


def write_report(report: Report, profile_path: Path) -> tuple[list[Path], str]:
    """Write the report beside a profile, or where one would be, with names made of the profile's.

    Returns:
        The files `<stem>.report.json`, the report as it is; `<stem>.summary.png`, `<stem>.density.png` and
        `<stem>.frontier.png`; `<stem>.report.md`, the page that shows them; `<stem>.report.html`, the same with all
        pictures inside, which is written last. And why there are no pictures, empty if there are.
    """
    profile_path.parent.mkdir(parents=True, exist_ok=True)
    both, failure = figures.try_drawing(lambda: (figures.draw_pngs(report), figures.draw_svgs(report)))
    drawn, svgs = both or ({}, {})
    as_json, *picture_paths, as_markdown, as_html = list_report_paths(profile_path)
    named = dict(zip(drawn, picture_paths, strict=False))
    names = _list_page_names(report, profile_path)
    page = _render_markdown("page.j2", **names, pictures={name: path.name for name, path in named.items()})
    html = _render_html("page.j2", **names, pictures=svgs, maps=figures.make_head_maps(report), wide=WIDE)
    files = {as_json: format_json_file(report.to_json()), **{named[name]: picture for name, picture in drawn.items()}}
    files |= {as_markdown: page.encode(), as_html: html.encode()}
    for path in set(picture_paths) - set(files):
        path.unlink(missing_ok=True)  # of an earlier run
    for path, data in files.items():
        write_atomically(path, data)
    return list(files), failure
