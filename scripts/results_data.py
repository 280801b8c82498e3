"""Raw JSON of docs/results, checked, and what follows from it: fronts, times at equal error."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from benching import ATTENTION, BY_METHOD, DENSE, METHODS, PREFILL

from s2o_runtime.errors import InputError

BUDGETS, EVALUATION, OTHER = "study_budgets", "s2o-eval", "other"  # the first two name no format: their keys tell
CALIBRATED = BY_METHOD["s2o"]
ANY = BY_METHOD["auto"]  # which may be S2O in every head, so it is nobody's rival
NEAR = 1e-3  # the rel_mse at which times are broken down
TIE = 0.01  # times or errors that differ by less are equal
LEAST = 1e-12  # errors below are as good as none, and have a logarithm
EVERYTHING = 0.9999  # densities from here on are dense attention by another name

# what a kind's records must have, by the place in them
ORIGIN, QUALITY = ("device", "versions"), ("density", "mse", "rel_mse", "worst")
NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    METHODS: {
        "": ("date", "settings", "results", *ORIGIN),
        "settings": ("data", "batch", "error_rows"),
        "results": ("length", "rows"),
        "results.rows": (*("method", "setting", "seconds", "selecting_seconds", "layers"), *QUALITY),
    },
    ATTENTION: {
        "": ("date", "settings", "results", *ORIGIN),
        "settings": ("heads", "head_dim", "batch", "dtype", "data", "segment", "grain"),
        "results": ("length", "rows", "dense", "tile", "tile_name"),
        "results.rows": ("target", "density", "seconds", "rate", "prefill_rate", "rel_mse"),
    },
    PREFILL: {
        "": ("date", "settings", "results", *ORIGIN),
        "results": ("model", "length", "rows"),
        "results.rows": ("name", "density", "seconds", "share"),
    },
    BUDGETS: {
        "": ("model", "length", "rows", *ORIGIN),
        "rows": ("budget", "worst_rows", "needles", "density", "rel_mse", "kl", "attention_seconds"),
    },
    EVALUATION: {
        "": ("model", "retrieval", *ORIGIN),
        "retrieval": ("task", "variant", "length", "asked", "found", "dense_found", "density"),
    },
}
MAKES = {
    METHODS: "python scripts/bench_attention.py --methods --out docs/results/bench-methods-GPU.json",
    ATTENTION: "python scripts/bench_attention.py --out docs/results/bench-attention-GPU.json",
    PREFILL: "python scripts/bench_prefill.py --out docs/results/bench-prefill-GPU.json",
    BUDGETS: "python scripts/study_budgets.py --out docs/results/study-budgets-GPU.json",
    EVALUATION: "s2o-eval --model demo --tasks multi --lengths 32768 --profile FILE --setting TEXT --out FOLDER",
}

Row = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """A raw file: its name, the kind of measurement, what it holds, and what a reader must know about it."""

    name: str
    kind: str
    record: dict[str, Any]
    note: str = ""

    @property
    def link(self) -> str:
        return f"[{self.name}](results/{self.name})"


@dataclass(frozen=True)
class Bench:
    """One length of a methods' bench."""

    source: Source
    length: int
    rows: list[Row]

    @property
    def dense(self) -> float:
        """Seconds of dense attention; what is relative is relative to it."""
        return next(row["seconds"] for row in self.rows if row["method"] == DENSE)

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(row["method"] for row in self.rows))

    def of(self, method: str) -> list[Row]:
        return [row for row in self.rows if row["method"] == method]


def read(folder: Path) -> list[Source]:
    """The raw files by name. Raises InputError if one cannot be read or lacks what its kind has."""
    return [_source(path) for path in sorted(folder.glob("*.json"))]


def _source(path: Path) -> Source:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise InputError(f"{path.name} cannot be read ({reason}): measure again or take it away") from None
    if not isinstance(record, dict):
        raise InputError(f"{path.name} holds a {type(record).__name__}, expected an object: take it away")
    note = path.with_suffix(".note.txt")
    text = note.read_text(encoding="utf-8") if note.exists() else ""
    source = Source(path.name, kind_of(record), record, " ".join(text.split()))
    for place, names in NEEDED.get(source.kind, {}).items():
        _check(source, place, names)
    return source


def kind_of(record: dict[str, Any]) -> str:
    if "format" in record:
        return record["format"] if record["format"] in NEEDED else OTHER
    if {"plan", "variants", "retrieval"} <= record.keys():
        return EVALUATION
    return BUDGETS if {"model", "length", "rows"} <= record.keys() else OTHER


def _check(source: Source, place: str, names: Iterable[str]) -> None:
    some: list[Any] = [source.record]
    for step in filter(None, place.split(".")):
        some = [each for one in some for each in (one[step] if isinstance(one[step], list) else [one[step]])]
    for name in names:
        if not all(isinstance(each, dict) and name in each for each in some):
            where = f"{place}.{name}" if place else name
            raise InputError(f"{source.name} lacks {where}: make it again ({MAKES[source.kind]})")


def benches(sources: Iterable[Source]) -> list[Bench]:
    """All lengths of the methods' benches, short ones first. Raises InputError if one has no dense attention."""
    every = [
        Bench(source, entry["length"], entry["rows"])
        for source in sources
        if source.kind == METHODS
        for entry in source.record["results"]
    ]
    for bench in every:
        if DENSE not in bench.methods:
            raise InputError(f"{bench.source.name} has no {DENSE} at {bench.length} tokens: measure it with the others")
    return sorted(every, key=lambda bench: (bench.length, bench.source.name))


def beats(one: Row, other: Row, tie: float = 0.0) -> bool:
    """No slower and no less exact, and by more than a tie faster or more exact."""
    pairs = [(one[name], other[name]) for name in ("seconds", "rel_mse")]
    return all(mine <= its for mine, its in pairs) and any(mine < its * (1 - tie) for mine, its in pairs)


def on_front(row: Row, rows: Sequence[Row]) -> bool:
    return not any(beats(other, row, TIE) for other in rows)


def is_dense(row: Row) -> bool:
    return bool(row["density"] >= EVERYTHING)


def is_sparse(rows: Sequence[Row]) -> bool:
    return not all(is_dense(row) for row in rows)


@dataclass(frozen=True)
class Time:
    """Time over dense at an error. bound: the method's fastest setting, which is more exact than that."""

    value: float
    bound: bool = False

    def __str__(self) -> str:
        return f"≤{three(self.value)}" if self.bound else three(self.value)


def at_error(rows: Sequence[Row], error: float) -> Time | None:
    """Seconds of a method at an error: log-log between the two settings around it that none of its others beats.

    None where no setting is so exact. Settings that compute everything are no part of a method's curve; what has no
    others is dense attention, and as fast at every error.
    """
    if not is_sparse(rows):
        return Time(min(row["seconds"] for row in rows))
    curve = sorted({(max(row["rel_mse"], LEAST), row["seconds"]) for row in useful(rows)})
    for (low, slow), (high, fast) in pairwise(curve):
        if low <= error <= high:
            return Time(slow * (fast / slow) ** (math.log(error / low) / math.log(high / low)))
    return Time(curve[-1][1], bound=True) if curve[-1][0] <= error else None


def useful(rows: Sequence[Row]) -> list[Row]:
    """The settings of one method that compute less than everything and that none of its others beats."""
    sparse = [row for row in rows if not is_dense(row)]
    return [row for row in sparse if not any(beats(other, row) for other in sparse)]


def nearest(rows: Sequence[Row], error: float) -> Row:
    """The useful setting whose error is nearest, by its logarithm; of dense attention the one there is."""
    return min(
        useful(rows) or rows, key=lambda row: (abs(math.log(max(row["rel_mse"], LEAST) / error)), row["seconds"])
    )


def relative_at(bench: Bench, error: float) -> dict[str, Time]:
    """Time over dense at an error, of every method that has settings so exact."""
    found = {method: at_error(bench.of(method), error) for method in bench.methods}
    return {method: replace(time, value=time.value / bench.dense) for method, time in found.items() if time is not None}


def fastest(times: Mapping[str, Time]) -> list[str]:
    """The winner first, then what ties with it."""
    best = min(time.value for time in times.values())
    ties = [method for method, time in times.items() if time.value * (1 - TIE) <= best]
    return sorted(ties, key=lambda method: times[method].value)


def attending(row: Row) -> float:
    return max(0.0, float(row["seconds"] - row["selecting_seconds"]))


def three(value: float) -> str:
    """Three significant digits, without an exponent."""
    rounded = float(f"{value:.3g}")
    digits = 2 - math.floor(math.log10(abs(rounded))) if rounded else 0
    return f"{rounded:.{max(0, digits)}f}"


def ms(seconds: float) -> str:
    return three(1e3 * seconds)


def small(value: float) -> str:
    return f"{value:.1e}"
