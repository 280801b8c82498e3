"""The raw files of docs/results that tables and the picture are made from."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from s2o_runtime.errors import InputError
from scripts.bench.boards import at_error
from scripts.bench.schema import CALIBRATED, DENSE, FLASH, ONE_TAU, PROVEN, MethodRow, MethodsFile, ResultFile, read

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
S2O = CALIBRATED
NEEDLE_TASKS = ("needles", "multi")  # s2o-eval's task, and what it was called when older files were written

# methods of the benches, and what a reader calls them; rows of methods that are no longer there are not shown
METHODS = {
    DENSE: "dense, cuDNN",
    FLASH: "dense, FlashAttention-2",
    ONE_TAU: "S2O, one threshold for all heads",
    S2O: "**S2O, calibrated**",
    "flash-prefill": "FlashPrefill",
    "pbs": "PBS-Attn",
    "sparge": "SpargeAttn",
    "xattention": "XAttention",
    "skip-softmax": "skip-softmax (BLASST)",
}

F = TypeVar("F", bound=ResultFile)


@dataclass(frozen=True)
class Bench:
    """One length of a methods' bench, with the methods that there are."""

    name: str
    length: int
    rows: list[MethodRow]

    @property
    def dense(self) -> float:
        """Seconds of dense attention through cuDNN."""
        return self.of(DENSE)[0].seconds

    def of(self, method: str) -> list[MethodRow]:
        """The rows of a method."""
        return [row for row in self.rows if row.method == method]

    def faster(self, row: MethodRow) -> str:
        """How many times faster than dense attention a row is."""
        return f"{self.dense / row.seconds:.2f}x"

    def within(self, method: str, error: float) -> MethodRow | None:
        """A method's fastest measured setting with a rel_mse of at most `error`; None if there is none.

        What counts is as in `boards.fastest`.
        """
        return at_error(self.of(method), error).get(method)


def bench(name: str) -> Bench:
    """The methods' bench in a raw file, which has one length."""
    (entry,) = result_file(MethodsFile, name).results
    return Bench(name, entry.length, [row for row in entry.rows if row.method in METHODS])


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


def retrieving(evaluation: Any, timed: Bench, same_run: bool = False) -> dict[str, MethodRow]:
    """Of each method the fastest timed setting that finds all needles but one in a hundred.

    A profile's needles are joined with the times of the same file, told by its digest, never by its budget's name:
    two calibrations with one budget are two profiles. All other settings are told by their text.

    Args:
        evaluation: the summary.json of s2o-eval, with its task `needles`.
        timed: the bench.
        same_run: the bench is older than digests in benches and is known to be of the evaluation's profiles, so that
            budgets tell them.
    """
    identities = {variant["name"]: variant["identity"] for variant in evaluation["variants"]}
    fastest: dict[str, MethodRow] = {}
    for retrieval in evaluation["retrieval"]:
        if retrieval["task"] not in NEEDLE_TASKS or retrieval["length"] != timed.length:
            continue
        if retrieval["found"] < retrieval["dense_found"] - retrieval["asked"] / 100:
            continue
        variant = retrieval["variant"]
        keys = {identities[variant], _setting(variant) if same_run or variant == identities[variant] else None}
        for row in timed.rows:
            key = row.profile or f"{row.method}:{row.setting.removesuffix(PROVEN)}"
            if key in keys and (row.method not in fastest or row.seconds < fastest[row.method].seconds):
                fastest[row.method] = row
    return fastest


def _setting(variant: str) -> str:
    """A variant of s2o-eval as "method:setting" of the bench; those of profiles are called by their budgets."""
    if variant == "dense":
        return f"{DENSE}:"
    if variant.startswith("rel-mse-"):
        budget, _, guard = variant.removeprefix("rel-mse-").partition("-rows-")
        return f"{S2O}:rel_mse {budget}" + (f", rows {guard}" if guard else "")
    tau, _, options = variant.partition(",")
    return f"{ONE_TAU}:{tau}" if options == "segment=1024,grain=4,tail" else variant


def flags(command: str) -> str:
    """What a command of s2o-calibrate asks for that is off by default, as Markdown; empty if there is nothing."""
    words = command.split()
    names = [f"--scores {value}" for name, value in pairwise(words) if name == "--scores"]
    names += ["--linear-tails"] if "--linear-tails" in words else []
    return f"`{' '.join(names)}`" if names else ""


def three(value: float) -> str:
    """Three significant digits, without an exponent."""
    rounded = float(f"{value:.3g}")
    digits = 2 - math.floor(math.log10(abs(rounded))) if rounded else 0
    return f"{rounded:.{max(0, digits)}f}"
