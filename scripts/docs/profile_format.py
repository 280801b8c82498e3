"""Tables of FORMAT.md in s2o_runtime/profile that describe a record, from the fields of its dataclasses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args, get_origin

from s2o_runtime.profile.record import FieldFormat, Part, Record

SECTIONS = ("predicted", "held_out", "certificate", "retiled")  # fields of the record that have a table of their own
ELSEWHERE = ("recipe",)  # described by the calibrator's options

Row = tuple[str, str, str]  # field, unit, meaning


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
