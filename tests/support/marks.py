"""Marks for some of the cases of a parametrised test."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def all_but_first(values: Iterable[Any], mark: pytest.MarkDecorator, count: int = 1) -> list[Any]:
    """The values for `pytest.mark.parametrize`, with the mark on all but the first ones.

    Where two lists are crossed, the unmarked cases are those whose values are unmarked in both.

    Args:
        values: Values, tuples of values or `pytest.param`s, which keep their ids and marks.
        mark: `pytest.mark.slow(...)` or `pytest.mark.exhaustive(...)`.
        count: How many stay as they are.
    """
    return [value if index < count else _marked(value, mark) for index, value in enumerate(values)]


def _marked(value: Any, mark: pytest.MarkDecorator) -> Any:
    if hasattr(value, "marks"):  # a pytest.param
        return pytest.param(*value.values, marks=[*value.marks, mark], id=value.id)
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark)
