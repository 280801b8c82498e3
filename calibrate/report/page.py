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

from calibrate.machine import MARK, json_file
from calibrate.recipe import report_paths
from calibrate.report import sections
from calibrate.report.contents import Report
from calibrate.report.figures import CAPTION, CAPTIONS, attempt, colours, elements, head_maps, pictures, tau_element
from calibrate.report.sections import (
    COLUMNS,
    closing_notes,
    gain,
    layer_table,
    length_cells,
    length_notes,
    overview_table,
    sentences,
    statement,
    tables,
    tau_range,
    times,
)
from calibrate.report.summary import head_counts, summary
from calibrate.tables import (
    Number,
    Table,
    bullets,
    escaped,
    formatted,
    integer,
    markdown,
    print_lines,
    print_table,
    printable,
)
from s2o_runtime.config import LayerConfig
from s2o_runtime.files import write_atomically
from s2o_runtime.profile import Profile
from s2o_runtime.profile.record import ProvenLength

FOLDER = Path(__file__).parent


def environment(*, autoescape: bool) -> Environment:
    """Where templates are found; a name that none of them knows is an error."""
    return Environment(
        loader=FileSystemLoader(FOLDER), autoescape=autoescape, undefined=StrictUndefined, keep_trailing_newline=True
    )


def in_markdown(template: str, **names: Any) -> str:
    """A template's text in Markdown, with one blank line between blocks, below a comment that says who wrote it.

    The filter `text` escapes foreign text.
    """
    templates = environment(autoescape=False)
    templates.filters |= {
        "text": escaped,
        "bullets": bullets,
        "markdown": markdown,
        "facts_table": partial(Table, ("", ""), align="l"),
    }
    title, _, text = re.sub(r"\n{3,}", "\n\n", templates.get_template(template).render(names)).strip().partition("\n")
    return f"{title}\n\n<!-- {MARK} -->\n{text}\n"


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
        "sections": sections,
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


def print_report(report: Report, console: Console) -> None:
    """Print the gain, and target against achieved: all lengths, each one's layers with notes, the certificate."""
    print_lines([gain(report), ""], console)
    if len(report.lengths) > 1:
        print_table(overview_table(report), console)
    for length in report.lengths:
        print_table(layer_table(report, length, brief=True), console)
        print_lines([*length_notes(report, length), ""], console)
    print_lines(closing_notes(report), console)
    for table in tables(report.certificate):
        print_table(table, console)
    if report.met:
        print_lines([statement(report.certificate, report.adjusted_on), *sentences(report.certificate)], console)
    print_lines([f"not proven: {sentence}" for sentence in (*report.problems, *report.not_proven)], console)


def write_report(report: Report, profile_path: Path) -> tuple[list[Path], str]:
    """Write the report beside a profile, or where one would be.

    Args:
        report: what the files say.
        profile_path: the profile's file, from whose name the others get theirs.

    Returns:
        `<stem>.report.json`, the report as it is; `<stem>.density.png`, `<stem>.frontier.png` and `<stem>.time.png`;
        `<stem>.report.md`, the page that shows them; `<stem>.report.html`, the same with all pictures inside, which
        is written last. And why there are no pictures, empty if there are.
    """
    profile_path.parent.mkdir(parents=True, exist_ok=True)
    both, failure = attempt(lambda: (pictures(report), elements(report)))
    drawn, svgs = both or ({}, {})
    as_json, *picture_paths, as_markdown, as_html = report_paths(profile_path)
    named = dict(zip(drawn, picture_paths, strict=False))
    page = markdown_page(report, profile_path, {name: path.name for name, path in named.items()})
    files = {
        as_json: json_file(report.to_json()),
        **{named[name]: picture for name, picture in drawn.items()},
        as_markdown: page.encode(),
        as_html: html_page(report, profile_path, svgs).encode(),
    }
    for path in set(picture_paths) - set(files):
        path.unlink(missing_ok=True)  # of an earlier run
    for path, data in files.items():
        write_atomically(path, data)
    return list(files), failure
