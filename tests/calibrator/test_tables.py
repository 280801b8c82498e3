"""calibrate/tables.py: a table is the same in Markdown and on a terminal, and foreign text is only text."""

from io import StringIO

import pytest
from rich.console import Console

from calibrate.tables import (
    Markup,
    Table,
    escape_markdown,
    format_bullets,
    format_markdown,
    print_fields,
    print_lines,
    print_table,
)

FOREIGN = "a|b\n# c \x1b[31m[bold]`x`</td>"


def printed(show, *arguments, width=120):
    console = Console(file=StringIO(), width=width, force_terminal=False)
    show(*arguments, console)
    return console.file.getvalue()


def test_a_table_in_markdown():
    table = Table(("name", "error /\nlimit", "tile"), [("q", "9%", "64x64"), ("k", "10%", "8")], "not shown", "lrc")
    rows = ["| name | error / limit | tile |", "| :-- | --: | :-: |", "| q | 9% | 64x64 |", "| k | 10% | 8 |"]
    assert format_markdown(table).splitlines() == rows


def test_foreign_text_is_neither_markup_nor_another_cell_and_moves_no_terminal():
    assert escape_markdown(FOREIGN) == "a\\|b # c  \\[31m\\[bold\\]\\`x\\`\\</td\\>"
    assert format_markdown(Table(("a",), [(FOREIGN,)])).count("\n") == 2
    assert format_bullets(["one", "  two | three"]) == "- one\n  - two \\| three"
    assert format_markdown(Table(("a",), [(Markup("[a](b)"),)])).endswith("| [a](b) |")
    shown = "a|b # c  [31m[bold]`x`</td>"
    assert printed(print_lines, [FOREIGN]) == f"{shown}\n"
    assert printed(print_fields, {"x": FOREIGN, "long": 1}) == f"x     {shown}\nlong  1\n"
    assert shown in printed(print_table, Table(("a",), [(FOREIGN,)], FOREIGN))


@pytest.mark.parametrize("width", [20, 120])
def test_nothing_of_a_table_is_cut_off(width):
    """The column that may wrap does; where that is not enough, the table is wider than the terminal."""
    cells = ("x" * 100, "some words " * 10, "y" * 40)
    text = printed(print_table, Table(("a", "b", "c"), [cells], "a title", "l", wrap="b"), width=width)
    lines = text.splitlines()
    assert lines[0].strip() == "a title"
    assert sum("x" * 100 in line for line in lines) == sum("y" * 40 in line for line in lines) == 1
    assert text.count("some") == text.count("words") == 10
    narrow = printed(print_table, Table(("a", "b"), [("x", "some words " * 20)], wrap="b"), width=width)
    assert max(map(len, narrow.splitlines())) <= 120
    assert printed(print_table, Table(("a",), [], "title")) == ""
