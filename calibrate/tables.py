"""Tables, lists and lines, on a terminal and as Markdown.

Every text that comes from a file or from a user (a model's name, a profile's record, a compiler's error) passes through
here before anybody sees it: control characters are replaced, and in Markdown what it would read as markup is escaped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import TextIOBase
from typing import IO, Any, Literal, cast

from rich import box
from rich import table as rich_table
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.segment import Segments
from rich.text import Text

from s2o_runtime.logs import emit_line, should_write_json

WIDTH = 120  # columns of a table on a terminal
UNLIMITED = 100_000  # columns: more than any table needs
MARKUP = "|`<>[]*\\"  # the characters that Markdown gives a meaning inside a line

Justify = Literal["left", "right", "center"]
ALIGNMENTS: dict[str, tuple[Justify, str]] = {"l": ("left", ":--"), "r": ("right", "--:"), "c": ("center", ":-:")}


@dataclass(frozen=True)
class Table:
    """A table that can be printed or written as Markdown."""

    names: Sequence[str]  # of the columns; a newline starts a second line on a terminal
    rows: Sequence[Sequence[str]]  # their cells; `Markup` stays as it is in Markdown, `Number` knows its value
    title: str = ""  # a line above the table; printed only
    align: str = "r"  # of each column l (left), r (right) or c (centre); the last letter holds for all that follow
    wrap: str | None = None  # the column whose cells may take several lines on a terminal; no other cell is broken

    @classmethod
    def from_rows(
        cls, rows: Iterable[Any], columns: Mapping[str, Callable[[Any], str]], title: str = "", **layout: Any
    ) -> Table:
        """Return a table with a row for each value, whose cells the columns make; layout: `align` and `wrap`."""
        cells = [tuple(cell(row) for cell in columns.values()) for row in rows]
        return cls(tuple(columns), cells, title, **layout)

    @property
    def titles(self) -> list[str]:
        """The columns' names, each in one line."""
        return [name.replace("\n", " ") for name in self.names]

    def get_alignment(self, column: int) -> str:
        """Return the letter of a column, counted from 0."""
        return self.align[min(column, len(self.align) - 1)]


class Markup(str):
    """Text that is Markdown already, such as a link."""

    __slots__ = ()


class Number(str):
    """A cell that shows a number and knows it unrounded, by which HTML tables are sorted."""

    value: float

    def __new__(cls, text: str, value: float) -> Number:
        cell = super().__new__(cls, text)
        cell.value = value
        return cell


def format_integer(count: int) -> Number:
    """Format a whole number."""
    return Number(str(count), count)


def format_number(value: float | None, form: str) -> str:
    """Format a number with a format of Python's; "-" for None."""
    return "-" if value is None else Number(format(value, form), value)


def format_kept(kept: int, found: int) -> Number:
    """Format how many of those that were found are kept; sorted by the share."""
    return Number(f"{kept} of {found}", kept / found if found else 0.0)


def format_markdown(table: Table) -> str:
    """Return the table in Markdown, without its title."""
    rule = [ALIGNMENTS[table.get_alignment(column)][1] for column in range(len(table.names))]
    return "\n".join(
        f"| {' | '.join(line)} |" for line in (table.titles, rule, *(map(escape_markdown, row) for row in table.rows))
    )


def format_bullets(lines: Iterable[str]) -> str:
    """Return a Markdown list; a line that is indented becomes an item below the one before it."""
    return "\n".join(f"{' ' * (len(line) - len(line.lstrip()))}- {escape_markdown(line.lstrip())}" for line in lines)


def escape_markdown(text: str) -> str:
    """Return the text in Markdown, where it cannot start a cell, a line or markup. `Markup` stays as it is."""
    if isinstance(text, Markup):
        return text
    return "".join(f"\\{character}" if character in MARKUP else character for character in replace_controls(text))


def replace_controls(text: str) -> str:
    """Replace every control character by a space, so that a text can neither move nor colour anything."""
    return "".join(character if character.isprintable() else " " for character in text)


def open_console(*, stderr: bool = False) -> Console:
    """Return what the commands print to, as wide as the terminal or COLUMNS, `WIDTH` where neither says it.

    On standard error each line is one of JSON if the log is.
    """
    stream = sys.stderr if stderr else sys.stdout
    if stderr and should_write_json():
        return Console(file=cast(IO[str], _LogLines()), width=WIDTH)
    return Console(stderr=stderr, width=None if stream.isatty() or "COLUMNS" in os.environ else WIDTH)


class _LogLines(TextIOBase):
    """A text file whose lines become lines of the log."""

    _unfinished = ""

    def write(self, text: str) -> int:
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        for line in lines:
            emit_line("calibrate", line)
        return len(text)


def print_table(table: Table, console: Console) -> None:
    """Print a table; one without rows is left out.

    It is laid out for the console's columns, at most `WIDTH`, and for more where its cells need them, so that nothing
    of it is ever cut off. Its columns stand closer where it is wide. A file gets no spaces at the ends of lines.
    """
    if not table.rows:
        return
    title = Text(replace_controls(table.title)) if table.title else None
    grid = rich_table.Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column, name in enumerate(table.names):
        cells = [*name.split("\n"), *(replace_controls(row[column]) for row in table.rows)]
        wraps = name == table.wrap
        longest = 1 if wraps else max(map(cell_len, cells))  # rich would shorten a cell rather than widen the table
        justify, _ = ALIGNMENTS[table.get_alignment(column)]
        grid.add_column(Text(name), justify=justify, min_width=longest, no_wrap=not wraps, overflow="fold")
    for row in table.rows:
        grid.add_row(*(Text(replace_controls(cell)) for cell in row))
    unlimited, width = console.options.update_width(UNLIMITED), min(WIDTH, console.width)
    if Measurement.get(console, unlimited, grid).maximum > width:
        grid.padding = (0, 0)
    needed = Measurement.get(console, unlimited, grid).minimum
    segments = console.render(grid, console.options.update_width(max(width, needed)))
    if console.is_terminal:
        console.print(Segments(segments), soft_wrap=True, end="")
    else:
        print_lines((line.rstrip() for line in "".join(segment.text for segment in segments).splitlines()), console)


def print_lines(lines: Iterable[str], console: Console) -> None:
    """Print lines as they are; only the terminal itself breaks long ones."""
    for line in lines:
        console.print(replace_controls(line), highlight=False, markup=False, soft_wrap=True)


def print_fields(fields: Mapping[str, object], console: Console) -> None:
    """Print names and values, a line each, with the values below one another."""
    width = max(map(len, fields))
    print_lines((f"{name:<{width}}  {value}" for name, value in fields.items()), console)
