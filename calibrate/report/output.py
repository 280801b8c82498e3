"""Where a report goes: to the terminal, and into files beside the profile."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from calibrate.profiles.certified import domain_table, sentences, statement, table
from calibrate.report.contents import Report
from calibrate.report.markdown import page
from calibrate.report.plots import pictures
from calibrate.report.sections import closing_notes, layer_table, length_notes, overview_table
from calibrate.tables import print_lines, print_table
from s2o_runtime.files import write_atomically


def print_report(report: Report, console: Console) -> None:
    """Print target against achieved: a table and its notes for each length, all lengths together, the certificate."""
    for length in report.lengths:
        print_table(layer_table(report, length), console)
        print_lines([*length_notes(report, length), ""], console)
    if len(report.lengths) > 1:
        print_table(overview_table(report), console)
    print_lines(closing_notes(report), console)
    for certified in (table(report.certificate), domain_table(report.certificate)):
        if certified is not None:
            print_table(certified, console)
    if report.met:
        print_lines([statement(report.certificate, report.adjusted_on), *sentences(report.certificate)], console)
    print_lines([f"not proven: {sentence}" for sentence in (*report.problems, *report.not_proven)], console)


def write_report(report: Report, profile_path: Path) -> list[Path]:
    """Write the report beside a profile, or where one would be.

    Args:
        report: What the files say.
        profile_path: The profile's file, from whose name the others get theirs.

    Returns:
        `<stem>.report.json`, the report as it is; `<stem>.density.png`, `<stem>.frontier.png` and `<stem>.time.png`;
        `<stem>.report.md`, the page that shows them, which is written last.
    """
    profile_path.parent.mkdir(parents=True, exist_ok=True)
    drawn = {f"{name}.png": picture for name, picture in pictures(report).items()}
    contents = {"report.json": (json.dumps(report.to_json(), indent=1) + "\n").encode(), **drawn}
    files = {name: profile_path.with_name(f"{profile_path.stem}.{name}") for name in (*contents, "report.md")}
    beside = {name.removesuffix(".png"): files[name].name for name in drawn}
    contents["report.md"] = page(report, profile_path, beside).encode()
    for name, data in contents.items():
        write_atomically(files[name], data)
    return list(files.values())
