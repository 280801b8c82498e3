"""Markdown tables, those of docs/options.md and FORMAT.md from the fields of options and records, and their places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import get_args, get_origin

from calibrate.options import Option, format_flag
from calibrate.record import FieldSpec, Record, RecordNode
from calibrate.tables import Markup, Table, format_markdown
from s2o_runtime.command_line import EXIT_CODES
from s2o_runtime.fields import group_by_key

SECTIONS = ("predicted", "held_out", "certificate", "retiled")  # fields of the record that have a table of their own
ELSEWHERE = ("recipe",)  # described by the calibrator's options

Row = tuple[str, str, str]  # field, unit, meaning


def make_table(names: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """Return a Markdown table of columns by name and cells that are Markdown already.

    align: one letter for each column, l (left), r (right) or c (centre); the last holds for all that follow.
    """
    return format_markdown(Table(tuple(names), [tuple(map(Markup, row)) for row in rows], align=align))


def between(page: str, start: str, end: str, written: str) -> str:
    """Return a page with `written` between its lines `start` and `end`; ValueError if the page lacks one of them."""
    before, opening, rest = page.partition(start)
    _, closing, after = rest.partition(end)
    if not opening or not closing:
        raise ValueError(f"the page has no lines {start} and {end}: put them where the tables belong")
    return f"{before}{start}\n\n{written}\n\n{end}{after}"


def options(stated: Mapping[str, Option]) -> str:
    """A table for each group of options."""
    parts = []
    for group, members in group_by_key((option.group, option) for option in stated.values()).items():
        rows = [(flags(option), str(option.rule), option.shown_default, option.help) for option in members]
        parts.append(f"**{group[0].upper()}{group[1:]}**")
        parts.append(format_markdown(Table(("option", "value", "default", "what it is"), rows, align="l")))
    return "\n\n".join(parts)


def flags(option: Option) -> Markup:
    """Return the flag, and beside that of a switch the one that turns it off."""
    return Markup(f"`{option.flag}`" + f", `{format_flag(f'no_{option.name}')}`" * option.is_switch)


def codes() -> str:
    """A table of the exit codes."""
    rows = [(str(code), meaning) for code, meaning in EXIT_CODES.items()]
    return format_markdown(Table(("code", "meaning"), rows, align="l"))


def record() -> str:
    """Markdown: a table of the record, and one for each of `SECTIONS`."""
    own = [
        row
        for field in Record.list_fields()
        if field.name not in SECTIONS + ELSEWHERE
        for row in rows_of(field, f"record.{field.key}")
    ]
    parts = [table(own)]
    for field in Record.list_fields():
        if field.name in SECTIONS:
            path = f"record.{field.key}"
            section = [row for row in rows_of(field, path) if row[0].removesuffix("[]") != path]
            parts += [f"### `{path}`: {field.meaning}", table(section)]
    return "\n\n".join(parts)


def rows_of(field: FieldSpec, path: str) -> Iterator[Row]:
    """The rows of a field and, if it holds parts, of their fields."""
    repeated = get_origin(field.type) is tuple
    if repeated:
        path += "[]"
    inner = get_args(field.type)[0] if repeated else field.type
    is_part = isinstance(inner, type) and issubclass(inner, RecordNode)
    if repeated or not is_part:
        yield path, field.unit, field.meaning
    if is_part:
        for inner_field in inner.list_fields():
            yield from rows_of(inner_field, f"{path}.{inner_field.key}")


def table(rows: list[Row]) -> str:
    return make_table(("field", "unit", "meaning"), [(f"`{path}`", unit, meaning) for path, unit, meaning in rows], "l")
