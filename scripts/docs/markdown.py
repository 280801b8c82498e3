"""Markdown tables whose cells are Markdown already, such as links."""

from __future__ import annotations

from collections.abc import Sequence

from calibrate.tables import Markup, Table, markdown


def table(names: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """A Markdown table.

    Args:
        names: of the columns.
        rows: their cells, which are Markdown already.
        align: one letter for each column, l (left), r (right) or c (centre); the last holds for all that follow.
    """
    return markdown(Table(tuple(names), [tuple(map(Markup, row)) for row in rows], align=align))
