#!/usr/bin/env python3
"""Write the tables of FORMAT.md in s2o_runtime/profile that describe a record, from the fields of its dataclasses.

python -m scripts.docs.profile_format           writes the tables
python -m scripts.docs.profile_format --check   writes nothing, and fails if the tables are not of these fields
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_origin

from s2o_runtime.profile.record import FieldFormat, Part, Record
from scripts.docs.markdown import between

PAGE = Path(__file__).resolve().parents[2] / "s2o_runtime" / "profile" / "FORMAT.md"
START, END = "<!-- record: make profile-format writes what is between these lines -->", "<!-- /record -->"
SECTIONS = ("predicted", "held_out", "certificate", "retiled")  # fields of the record that have a table of their own
ELSEWHERE = ("recipe",)  # described by the calibrator's options

Row = tuple[str, str, str]  # field, unit, meaning


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args(argv).check
    text = PAGE.read_text(encoding="utf-8")
    current = between(text, START, END, tables())
    if check:
        if current != text:
            print(f"profile_format: the tables in {PAGE.name} are not of the record's fields: run make profile-format")
        return int(current != text)
    PAGE.write_text(current, encoding="utf-8")
    return 0


def tables() -> str:
    """Markdown: a table of the record, and one for each of `SECTIONS`."""
    own = [
        row
        for field in Record.formats()
        if field.name not in SECTIONS + ELSEWHERE
        for row in rows_of(field, f"record.{field.key}")
    ]
    parts = [table(own)]
    for field in Record.formats():
        if field.name in SECTIONS:
            path = f"record.{field.key}"
            section = [row for row in rows_of(field, path) if row[0].removesuffix("[]") != path]
            parts += [f"### `{path}`: {field.meaning}", table(section)]
    return "\n\n".join(parts)


def rows_of(field: FieldFormat, path: str) -> Iterator[Row]:
    """The rows of a field and, if it holds parts, of their fields."""
    repeated = get_origin(field.type) is tuple
    if repeated:
        path += "[]"
    inner = get_args(field.type)[0] if repeated else field.type
    is_part = isinstance(inner, type) and issubclass(inner, Part)
    if repeated or not is_part:
        yield path, field.unit, field.meaning
    if is_part:
        for inner_field in inner.formats():
            yield from rows_of(inner_field, f"{path}.{inner_field.key}")


def table(rows: list[Row]) -> str:
    lines = ["| field | unit | meaning |", "|---|---|---|"]
    lines += [f"| `{path}` | {unit} | {meaning} |".replace("|  |", "| |") for path, unit, meaning in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
