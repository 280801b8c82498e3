"""Where a report goes: to the terminal, and into files beside the profile."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from calibrate.report.certified import sentences, statement, tables
from calibrate.report.contents import Report
from calibrate.report.page import html_page, markdown_page
from calibrate.report.plots import elements, pictures
from calibrate.report.sections import closing_notes, gain, layer_table, length_notes, overview_table
from calibrate.tables import print_lines, print_table
from s2o_runtime.files import write_atomically


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


def write_report(report: Report, profile_path: Path) -> list[Path]:
    """Write the report beside a profile, or where one would be.

    Args:
        report: what the files say.
        profile_path: the profile's file, from whose name the others get theirs.

    Returns:
        `<stem>.report.json`, the report as it is; `<stem>.density.png`, `<stem>.frontier.png` and `<stem>.time.png`;
        `<stem>.report.md`, the page that shows them; `<stem>.report.html`, the same with all pictures inside, which
        is written last.
    """
    profile_path.parent.mkdir(parents=True, exist_ok=True)
    drawn = {name: (f"{profile_path.stem}.{name}.png", picture) for name, picture in pictures(report).items()}
    in_markdown = markdown_page(report, profile_path, {name: file for name, (file, _) in drawn.items()})
    files = {
        f"{profile_path.stem}.report.json": (json.dumps(report.to_json(), indent=1) + "\n").encode(),
        **dict(drawn.values()),
        f"{profile_path.stem}.report.md": in_markdown.encode(),
        f"{profile_path.stem}.report.html": html_page(report, profile_path, elements(report)).encode(),
    }
    paths = [profile_path.with_name(name) for name in files]
    for path, data in zip(paths, files.values(), strict=True):
        write_atomically(path, data)
    return paths
