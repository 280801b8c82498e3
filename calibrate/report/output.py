"""Where a report goes: to the terminal, and into files beside the profile."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from calibrate.machine import json_file
from calibrate.recipe import report_paths
from calibrate.report.certified import sentences, statement, tables
from calibrate.report.contents import Report
from calibrate.report.figures import attempt
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
