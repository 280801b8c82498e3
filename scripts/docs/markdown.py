"""What the writers of documentation share: Markdown tables, and pages with what is written between two lines."""

from __future__ import annotations

from collections.abc import Sequence

from calibrate.tables import Markup, Table, format_markdown


def table(names: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """A Markdown table.

    Args:
        names: of the columns.
        rows: their cells, which are Markdown already.
        align: one letter for each column, l (left), r (right) or c (centre); the last holds for all that follow.
    """
    return format_markdown(Table(tuple(names), [tuple(map(Markup, row)) for row in rows], align=align))


def between(page: str, start: str, end: str, written: str) -> str:
    """A page with `written` between its lines `start` and `end`. Raises ValueError if the page lacks one of them."""
    before, opening, rest = page.partition(start)
    _, closing, after = rest.partition(end)
    if not opening or not closing:
        raise ValueError(f"the page has no lines {start} and {end}: put them where the tables belong")
    return f"{before}{start}\n\n{written}\n\n{end}{after}"
