"""The few numbers that the runtime reads in a profile's record, a JSON object that the calibrator writes.

A field that is missing or has another type counts as not recorded. FORMAT.md lists all; `calibrate.record` has types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeVar, get_args

T = TypeVar("T")

ErrorUnit = Literal["mse", "rel_mse"]  # of a layer's error
BudgetKind = Literal["mse", "rel_mse", "kl"]  # "kl": nats per token at the rows that answer
BUDGET_KINDS: tuple[BudgetKind, ...] = get_args(BudgetKind)
Reads = Literal["all", "answers"]  # the rows of a prompt's output that a budget is about, and a caller may read


class AllowedError(NamedTuple):
    """The budget in a record; a field that is not recorded is None. `ceiling` is a rel_mse beside a budget in mse."""

    kind: BudgetKind | None
    value: float | None
    ceiling: float | None


def get_error_unit(kind: BudgetKind) -> ErrorUnit:
    """Return the unit of the layers' errors and limits under a budget of this kind."""
    return "mse" if kind == "mse" else "rel_mse"


def read_budget(record: Mapping[str, Any]) -> AllowedError:
    """Return the error that the calibration was allowed; none of an earlier version's budget of all layers together."""
    budget = get_object(record, "budget")
    if budget.get("scope") == "model":
        return AllowedError(None, None, None)
    kind = next((kind for kind in BUDGET_KINDS if kind == budget.get("kind")), None)
    return AllowedError(kind, _number(budget, "value"), _number(budget, "ceiling_rel_mse"))


def read_limits(record: Mapping[str, Any], layer: int) -> dict[int, float]:
    """Return a layer's limits in `get_error_unit`, by the lengths in tokens at which the proof gives one."""
    limits: dict[int, float] = {}
    for proven in get_list(record, "held_out", dict):
        for proof in get_list(proven, "layers", dict)[layer : layer + 1]:
            length, limit = proven.get("length"), _number(proof, "limit")
            if type(length) is int and limit is not None:
                limits[length] = limit
    return limits


def list_certified(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what is certified of each length; nothing without a certificate."""
    return get_list(get_object(record, "certificate"), "lengths", dict)


def get_object(parent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a field that is an object; an empty one if it is not recorded."""
    value = parent.get(name)
    return value if isinstance(value, dict) else {}


def get_list(parent: Mapping[str, Any], name: str, entries: type[T]) -> list[T]:
    """Return a field that is a list of such entries; an empty one if it is not recorded."""
    value = parent.get(name)
    if not (isinstance(value, list | tuple) and all(isinstance(entry, entries) for entry in value)):
        return []
    return list(value)


def _number(parent: Mapping[str, Any], name: str) -> float | None:
    value = parent.get(name)
    return value if type(value) in (int, float) else None  # true is an int of Python's, and no number of JSON's
