"""Marks that several files use, and marks for some of the cases of a parametrised test."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from s2o_runtime.devices import is_interpreted

SLOW_KERNELS = pytest.mark.slow(reason="more cases of a kernel in Triton's interpreter, seconds each")
MORE_CASES = pytest.mark.exhaustive(reason="still more of them: `make test` runs some")
COMPILED = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs compiled kernels")
INTERPRETED = pytest.mark.skipif(not is_interpreted(), reason="a GPU is here, so kernels are compiled")


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


def pairwise(*lists: Iterable[Any], mark: pytest.MarkDecorator | None = None, count: int = 1) -> list[Any]:
    """Rows for `pytest.mark.parametrize` in which every two values of different lists meet at least once.

    Args:
        lists: Values, tuples of values or `pytest.param`s, whose values follow one another in a row.
        mark: For all rows but the first ones.
        count: How many rows stay unmarked.
    """
    lists = [list(values) for values in lists]
    rows = list(itertools.product(*(range(len(values)) for values in lists)))
    unmet = set().union(*map(_meetings, rows))
    chosen = []
    while unmet:
        chosen.append(max(rows, key=lambda row: len(unmet & _meetings(row))))
        unmet -= _meetings(chosen[-1])
    cases = [_joined([values[index] for values, index in zip(lists, row, strict=True)]) for row in chosen]
    return cases if mark is None else all_but_first(cases, mark, count)


def _meetings(row: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(row), 2))


def _joined(parts: list[Any]) -> Any:
    values, names = [], []
    for part in parts:
        of_part = part.values if hasattr(part, "marks") else part if isinstance(part, tuple) else (part,)
        values += of_part
        names.append(getattr(part, "id", None) or ",".join(map(str, of_part)))
    return pytest.param(*values, id="-".join(names))
