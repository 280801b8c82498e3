"""The raw files of docs/results that tables and pictures are made from."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from s2o_runtime.errors import InputError
from scripts.bench.boards import at_error
from scripts.bench.schema import (
    CALIBRATED,
    DENSE,
    EVERYTHING,
    ONE_SETTING,
    MethodRow,
    MethodsEntry,
    MethodsFile,
    ResultFile,
    read,
)

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
S2O = CALIBRATED

# methods of the benches, and what a reader calls them
METHODS = {
    S2O: "**S2O, calibrated**",
    ONE_SETTING: "S2O, one setting for all heads",
    "flash-prefill": "FlashPrefill",
    "flash-prefill-v2": "FlashPrefill V2",
    "pbs": "PBS-Attn",
    "sparge": "SpargeAttn",
    "xattention": "XAttention",
}

F = TypeVar("F", bound=ResultFile)


@dataclass(frozen=True)
class Bench:
    """One length of a methods' bench of a model."""

    model: str
    entry: MethodsEntry

    @property
    def length(self) -> int:
        return self.entry.length

    @property
    def dense(self) -> float:
        """Seconds of dense attention through cuDNN."""
        return self.of(DENSE)[0].seconds

    def of(self, method: str) -> list[MethodRow]:
        """The rows of a method."""
        return [row for row in self.entry.rows if row.method == method]

    def faster(self, row: MethodRow | None) -> str:
        """Return how many times faster than dense attention a row is; "-" for none."""
        return "-" if row is None else f"{self.dense / row.seconds:.2f}x"

    def faster_between(self, method: str, error: float) -> str:
        """Return how many times faster than dense attention a method is at a rel_mse of `error`, between its settings.

        Time over error is taken for straight on log axes between the two nearest settings of which no other of the
        method is both faster and more exact. "-" where the error is not between two.
        """
        rows = [row for row in self.of(method) if row.density < EVERYTHING]
        best = [row for row in rows if not any(o.rel_mse <= row.rel_mse and o.seconds < row.seconds for o in rows)]
        for exact, fast in pairwise(sorted(best, key=lambda row: row.rel_mse)):
            if exact.rel_mse <= error < fast.rel_mse:
                part = math.log(error / exact.rel_mse) / math.log(fast.rel_mse / exact.rel_mse)
                return f"{self.dense / (exact.seconds ** (1 - part) * fast.seconds**part):.2f}x"
        return "-"

    def within(self, method: str, error: float) -> MethodRow | None:
        """A method's fastest measured setting with a rel_mse of at most `error`; None if there is none.

        What counts is as in `boards.fastest`.
        """
        return at_error(self.of(method), error).get(method)


def benches(name: str, model: str) -> list[Bench]:
    """The lengths of a methods' bench in a raw file, and the model that it is of."""
    return [Bench(model, entry) for entry in result_file(MethodsFile, name).results]


def result_file(cls: type[F], name: str) -> F:
    """A raw file of a bench. Raises InputError if it cannot be read or lacks a field."""
    try:
        return read(cls, raw(name))
    except InputError as error:
        raise InputError(f"{name} {error}: make it again with {cls.program}") from None


def raw(name: str) -> Any:
    """A raw file as JSON. Raises InputError if it cannot be read."""
    try:
        return json.loads((RESULTS / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise InputError(f"{name} cannot be read ({reason}): measure again") from None


def three(value: float) -> str:
    """Three significant digits, without an exponent."""
    rounded = float(f"{value:.3g}")
    digits = 2 - math.floor(math.log10(abs(rounded))) if rounded else 0
    return f"{rounded:.{max(0, digits)}f}"
