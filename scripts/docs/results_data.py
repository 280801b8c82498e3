"""The raw JSON of docs/results, and what is computed from it: Pareto fronts, and times at equal error."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from s2o_runtime.errors import InputError
from scripts.bench.paged import PagedFile
from scripts.bench.schema import (
    CALIBRATED,
    DENSE,
    AttentionFile,
    BudgetsFile,
    CalibrationFile,
    CoverageFile,
    EvaluationFile,
    MethodRow,
    MethodsFile,
    PrefillFile,
    ProfilesFile,
    RehearsalFile,
    ResultFile,
    read,
)
from scripts.bench.serving import ServingFile
from scripts.bench.tails import TailsFile

S2O_CALIBRATED = CALIBRATED["s2o"]
ANY = CALIBRATED["auto"]
NEAR = 1e-3  # the rel_mse at which times are broken down
TIE = 0.01  # times or errors that differ by less are equal
LEAST = 1e-12  # errors below count as this one, so that they have a logarithm
EVERYTHING = 0.9999  # a method of this density computes everything, as dense attention does

FORMATS: dict[str, type[ResultFile]] = {
    cls.format: cls
    for cls in (
        AttentionFile,
        MethodsFile,
        PrefillFile,
        BudgetsFile,
        CoverageFile,
        ProfilesFile,
        RehearsalFile,
        ServingFile,
        TailsFile,
        PagedFile,
    )
}
MAKES: dict[type[ResultFile], str] = {
    MethodsFile: f"{MethodsFile.program} --out docs/results/bench-methods-GPU.json",
    AttentionFile: f"{AttentionFile.program} --out docs/results/bench-attention-GPU.json",
    PrefillFile: f"{PrefillFile.program} --out docs/results/bench-prefill-GPU.json",
    BudgetsFile: f"{BudgetsFile.program} --out docs/results/study-budgets-GPU.json",
    CoverageFile: f"{CoverageFile.program} PROFILE --out docs/results/coverage-MODEL-DEVICE.json",
    ProfilesFile: f"{ProfilesFile.program} PROFILE PROFILE --out docs/results/bench-profiles-MODEL-GPU.json",
    RehearsalFile: f"{RehearsalFile.program} --out docs/results/rehearsals-GPU.json",
    ServingFile: f"{ServingFile.program} --out docs/results/bench-serving-GPU.json",
    TailsFile: f"{TailsFile.program} --out docs/results/bench-tails-GPU.json",
    PagedFile: f"{PagedFile.program} --out docs/results/bench-paged-GPU.json",
    CalibrationFile: "s2o-calibrate --model demo --out build/demo.safetensors, whose report.json is kept",
    EvaluationFile: "s2o-eval --model demo --tasks multi --lengths 32768 --profile FILE --setting TEXT --out FOLDER",
}

MODEL = "demo"  # whose benches the README's tables and the plots are made from

F = TypeVar("F")


@dataclass(frozen=True)
class Source(Generic[F]):
    """A raw file: its name, what it holds (None if it is of no known format), and what a reader must know about it."""

    name: str
    file: F
    note: str = ""

    @property
    def link(self) -> str:
        return f"[{self.name}](results/{self.name})"


Sources = Sequence[Source[ResultFile | None]]


@dataclass(frozen=True)
class Bench:
    """One length of a methods' bench."""

    source: Source[MethodsFile]
    length: int
    rows: list[MethodRow]

    @property
    def data(self) -> str:
        """The model whose queries, keys and values these are."""
        return str(self.source.file.settings["data"])

    @property
    def title(self) -> str:
        return f"{self.length} tokens" + ("" if self.data == MODEL else f" of {Path(self.data).name}")

    @property
    def dense(self) -> float:
        """Seconds of dense attention, to which relative times are relative."""
        return next(row.seconds for row in self.rows if row.method == DENSE)

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(row.method for row in self.rows))

    def of(self, method: str) -> list[MethodRow]:
        return [row for row in self.rows if row.method == method]


def read_sources(folder: Path) -> list[Source[ResultFile | None]]:
    """The raw files by name. Raises InputError if one cannot be read or lacks a field of its format."""
    return [_source(path) for path in sorted(folder.glob("*.json"))]


def _source(path: Path) -> Source[ResultFile | None]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise InputError(f"{path.name} cannot be read ({reason}): measure again or take it away") from None
    if not isinstance(record, dict):
        raise InputError(f"{path.name} holds a {type(record).__name__}, expected an object: take it away")
    note = path.with_suffix(".note.txt")
    text = note.read_text(encoding="utf-8") if note.exists() else ""
    cls = class_of(record)
    try:
        file = None if cls is None else read(cls, record)
    except InputError as error:
        raise InputError(f"{path.name} {error}: make it again ({MAKES[cast(type[ResultFile], cls)]})") from None
    return Source(path.name, file, " ".join(text.split()))


def class_of(record: Mapping[str, Any]) -> type[ResultFile] | None:
    """The class that states a record's fields; some formats have files without a format's name, their keys tell."""
    if "format" in record:
        return FORMATS.get(record["format"])
    if {"plan", "variants", "retrieval"} <= record.keys():
        return EvaluationFile
    if {"calibration_seconds", "lengths"} <= record.keys():
        return CalibrationFile
    return BudgetsFile if {"model", "length", "rows"} <= record.keys() else None


def of_format(sources: Sources, cls: type[F]) -> list[Source[F]]:
    """The sources whose files are of this class."""
    return [cast(Source[F], source) for source in sources if isinstance(source.file, cls)]


def benches(sources: Sources) -> list[Bench]:
    """All lengths of the methods' benches, short ones first. Raises InputError if one has no dense attention."""
    lengths = [
        Bench(source, entry.length, entry.rows)
        for source in of_format(sources, MethodsFile)
        for entry in source.file.results
    ]
    for bench in lengths:
        if DENSE not in bench.methods:
            raise InputError(f"{bench.source.name} has no {DENSE} at {bench.length} tokens: measure it with the others")
    return sorted(lengths, key=lambda bench: (bench.length, bench.source.name))


def newest(compared: Sequence[Bench]) -> list[Bench]:
    """Of several benches of `MODEL` at one length the one that was measured last, short lengths first."""
    by_length: dict[int, Bench] = {}
    for bench in sorted(compared, key=lambda bench: bench.source.file.date):
        if bench.data == MODEL:
            by_length[bench.length] = bench
    return [by_length[length] for length in sorted(by_length)]


def beats(row: MethodRow, other: MethodRow, tie: float = 0.0) -> bool:
    """Whether a row is no slower and no less exact than another, and by more than a tie faster or more exact."""
    pairs = [(row.seconds, other.seconds), (row.rel_mse, other.rel_mse)]
    return all(mine <= its for mine, its in pairs) and any(mine < its * (1 - tie) for mine, its in pairs)


def on_front(row: MethodRow, rows: Sequence[MethodRow]) -> bool:
    """Whether a row is on the Pareto front of time against rel_mse."""
    return not any(beats(other, row, TIE) for other in rows)


def is_dense(row: MethodRow) -> bool:
    return row.density >= EVERYTHING


def is_sparse(rows: Sequence[MethodRow]) -> bool:
    return not all(is_dense(row) for row in rows)


@dataclass(frozen=True)
class Time:
    """Time over dense at an error. bound: the method's fastest setting, which is more exact than that."""

    value: float
    bound: bool = False

    def __str__(self) -> str:
        return f"≤{three(self.value)}" if self.bound else three(self.value)


def at_error(rows: Sequence[MethodRow], error: float) -> Time | None:
    """Seconds of a method at an error: log-log between the two settings around it that no setting of it beats.

    None where no setting is so exact. Settings that compute everything are no part of a method's curve; a method with
    no other settings is dense attention, and as fast at every error.
    """
    if not is_sparse(rows):
        return Time(min(row.seconds for row in rows))
    curve = sorted({(max(row.rel_mse, LEAST), row.seconds) for row in useful(rows)})
    for (low, slow), (high, fast) in pairwise(curve):
        if low <= error <= high:
            return Time(slow * (fast / slow) ** (math.log(error / low) / math.log(high / low)))
    return Time(curve[-1][1], bound=True) if curve[-1][0] <= error else None


def useful(rows: Sequence[MethodRow]) -> list[MethodRow]:
    """The settings of one method that compute less than everything and that no other setting of it beats."""
    sparse = [row for row in rows if not is_dense(row)]
    return [row for row in sparse if not any(beats(other, row) for other in sparse)]


def nearest(rows: Sequence[MethodRow], error: float) -> MethodRow:
    """The useful setting whose error is nearest, by its logarithm; of dense attention the only setting."""
    return min(useful(rows) or rows, key=lambda row: (abs(math.log(max(row.rel_mse, LEAST) / error)), row.seconds))


def relative_at(bench: Bench, error: float) -> dict[str, Time]:
    """Time over dense at an error, of every method that has settings so exact."""
    times = {method: at_error(bench.of(method), error) for method in bench.methods}
    return {method: replace(time, value=time.value / bench.dense) for method, time in times.items() if time is not None}


def fastest(times: Mapping[str, Time]) -> list[str]:
    """The fastest method first, then those that tie with it."""
    best = min(time.value for time in times.values())
    ties = [method for method, time in times.items() if time.value * (1 - TIE) <= best]
    return sorted(ties, key=lambda method: times[method].value)


def attending(row: MethodRow) -> float:
    """Seconds of a call without its selection."""
    return max(0.0, row.seconds - row.selecting_seconds)


def three(value: float) -> str:
    """Three significant digits, without an exponent."""
    rounded = float(f"{value:.3g}")
    digits = 2 - math.floor(math.log10(abs(rounded))) if rounded else 0
    return f"{rounded:.{max(0, digits)}f}"


def ms(seconds: float) -> str:
    """Milliseconds with three digits."""
    return three(1e3 * seconds)


def small(value: float) -> str:
    """An error with two digits."""
    return f"{value:.1e}"


def missing(cls: type[ResultFile]) -> str:
    """A sentence on what would measure a file that is not there."""
    out = f"Not measured yet: `{MAKES[cls]}` would."
    put = " Its summary.json belongs into docs/results, under a name of its own."
    return out + (put if cls is EvaluationFile else "")
