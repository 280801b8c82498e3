"""The result files: what the benches and studies write, and what docs/results.md is made from.

Each file is one JSON object, stated by a dataclass. `write` stores it and `read` returns it. A field that older files
lack has a default, and keys that no field names are ignored.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from s2o_runtime.errors import InputError
from s2o_runtime.files import write_atomically

DENSE = "dense (cuDNN)"
FLASH = "dense (FlashAttention-2)"
ONE_TAU = "S2O, one tau"
PUBLISHED = "S2O as published"
LINEAR_TAILS = "S2O, linear tails"
OF_FORM = {
    PUBLISHED: ", as published",
    LINEAR_TAILS: ", linear tails",
}  # behind the names of its rows
CALIBRATED = {  # what the methods' bench calls a profile, by its s2o-calibrate --method
    "s2o": "S2O, calibrated",
    "flash-prefill": "FlashPrefill, calibrated",
    "prism": "Prism, calibrated",
    "pbs": "PBS-Attn, calibrated",
    "sparge": "SpargeAttn, calibrated",
    "skip-softmax": "skip-softmax, calibrated",
    "auto": "the cheapest for each head, calibrated",
}

T = TypeVar("T")


@dataclass(frozen=True)
class Spread:
    """The quartiles of a time in seconds."""

    p25: float
    median: float
    p75: float


@dataclass(frozen=True, kw_only=True)
class ResultFile:
    """What all files state: when, where and with which versions they were measured.

    program: the command, without its options, that measures such a file. device: a `DeviceIdentity`, or only the
    device's name.
    """

    program: ClassVar[str]

    device: dict[str, Any] | str
    versions: dict[str, str]
    date: str = "not recorded"
    python: str | None = None
    cuda: str | None = None
    cudnn: int | None = None


@dataclass(frozen=True)
class AttentionRow:
    """One density of one form of S2O, `ONE_TAU`'s with a tau for each head, `PUBLISHED` or one with linear tails.

    target: the wanted density, "never stop" (tau = 0), "lowest" where window and first chunk are more than wanted, or
        "one chunk" with linear tails.
    seconds, prefill_seconds: the whole call, and the call without its ranking (None without the kernels).
    rate, prefill_rate: density x dense time / time; 1 means that a computed pair costs what it costs cuDNN.
    """

    target: float | str
    density: float
    seconds: Spread
    prefill_seconds: Spread | None
    rate: float
    prefill_rate: float | None
    rel_mse: float
    density_of_heads: list[float]
    tau_of_heads: list[float]
    form: str = "S2O"


@dataclass(frozen=True)
class DenseTime:
    """Dense attention on the same tensors: the SDPA backend that ran, its time, its error."""

    backend: str
    seconds: Spread
    rel_mse: float


@dataclass(frozen=True)
class RankTime:
    """The ranking alone."""

    seconds: Spread
    share_of_dense: float


@dataclass(frozen=True)
class AttentionEntry:
    """One length and tile of the attention bench; tile: the fields of a `TileConfig`."""

    length: int
    tile: dict[str, Any]
    tile_name: str
    dense: DenseTime
    rank: RankTime | None
    rows: list[AttentionRow]
    published_rank: RankTime | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionFile(ResultFile):
    """The attention bench. settings: its options."""

    program: ClassVar[str] = "python -m scripts.bench.attention"

    format: str = "s2o-bench-attention/1"
    settings: dict[str, Any] = field(
        metadata={"needs": ("heads", "head_dim", "batch", "dtype", "data", "segment", "grain")}
    )
    results: list[AttentionEntry]
    cold_l2: bool = True
    error: str = (
        "rel_mse on error_rows query rows of all heads, one at random in each equal part of the sequence, against "
        "float32 dense attention on the same q, k, v"
    )


@dataclass(frozen=True)
class Int8Row:
    """One density of one kind of scores, `LayerConfig.scores`, with one tile.

    target: the density that was wanted of scores in the inputs' type, "never stop" (tau = 0), or "dense" (all heads
    dense). dense_seconds, seconds, prefill_seconds: medians that took turns, of cuDNN, of the whole call and of the
    call without its ranking. rate: density x dense time / seconds.
    """

    scores: str
    tile: str
    target: str
    density: float
    dense_seconds: float
    seconds: float
    prefill_seconds: float | None
    rate: float
    rel_mse: float


@dataclass(frozen=True)
class Int8Entry:
    """One shape and length. rank_seconds, keys_seconds: of the ranking, and of rounding the keys in it, by form."""

    length: int
    heads: list[int]
    head_dim: int
    dense_seconds: float
    dense_rel_mse: float
    rank_seconds: dict[str, float]
    keys_seconds: dict[str, float]
    rows: list[Int8Row]


@dataclass(frozen=True, kw_only=True)
class Int8File(ResultFile):
    """Int8 scores against those in the inputs' type.

    checks: how far kernels are off the reference, by call; failures: what could not be checked or measured, and why.
    """

    program: ClassVar[str] = "python -m scripts.bench.int8"

    format: str = "s2o-bench-int8/1"
    settings: dict[str, Any]
    checks: dict[str, float]
    results: list[Int8Entry]
    failures: dict[str, str]


@dataclass(frozen=True)
class LayerRow:
    """One setting of one method on one layer.

    mse, rel_mse: means over the sampled rows, against float32 dense attention. worst: `row_errors.worst_of`
    of the rows' relative errors. selecting_seconds: ranking or choosing blocks.
    """

    layer: int
    density: float
    mse: float
    rel_mse: float
    worst: float
    seconds: float
    selecting_seconds: float


@dataclass(frozen=True)
class MethodRow:
    """One setting of one method on all layers: times are sums, errors and densities means, `worst` is the largest."""

    method: str
    setting: str
    seconds: float
    selecting_seconds: float
    speedup: float | None
    density: float
    mse: float
    rel_mse: float
    worst: float
    layers: list[LayerRow]


@dataclass(frozen=True)
class MethodsEntry:
    """One length of the methods' bench."""

    length: int
    rows: list[MethodRow]


@dataclass(frozen=True, kw_only=True)
class MethodsFile(ResultFile):
    """The methods' bench. settings: its options."""

    program: ClassVar[str] = "python -m scripts.bench.methods"

    format: str = "s2o-bench-methods/1"
    settings: dict[str, Any] = field(metadata={"needs": ("data", "batch", "error_rows")})
    results: list[MethodsEntry]


@dataclass(frozen=True)
class PrefillRow:
    """A whole prefill. attention_seconds, share: what the layers' attention takes of it."""

    name: str
    density: float
    seconds: Spread
    attention_seconds: float
    share: float


@dataclass(frozen=True)
class PrefillEntry:
    """One model at one length; peak_bytes: the most GPU memory in use, None on a CPU."""

    model: str
    length: int
    rows: list[PrefillRow]
    peak_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class PrefillFile(ResultFile):
    """The prefill bench. settings: its options."""

    program: ClassVar[str] = "python -m scripts.bench.prefill"

    format: str = "s2o-bench-prefill/1"
    settings: dict[str, Any]
    results: list[PrefillEntry]


@dataclass(frozen=True)
class RehearsedLength:
    """What the proof and the certificate of a rehearsal say of one length.

    s2o_layers: layers of full attention that are not dense. density, density_of_layers, rel_mse_of_layers, kl: on the
    adjust prompts. prefill_seconds, dense_prefill_seconds: all decoder layers on one of them. certified: whether the
    certificate holds. largest_bound: of a layer's mean error, in the budget's unit; next_kl: what the next prompt
    keeps below; None without a certificate.
    """

    length: int
    s2o_layers: int
    density: float
    density_of_layers: list[float]
    rel_mse_of_layers: list[float]
    kl: float
    prefill_seconds: float
    dense_prefill_seconds: float
    certified: bool
    certify_prompts: int
    largest_bound: float | None
    next_kl: float | None


@dataclass(frozen=True)
class RehearsalRun:
    """One prompt of random tokens through the finished model, dense and patched.

    seconds, dense_seconds: of a prefill up to the first token behind the prompt. kl, top1: over its last positions.
    paths: for each layer of `explain` its number, the path it took and why.
    """

    length: int
    dense_seconds: float
    seconds: float
    kl: float
    top1: float
    paths: list[list[Any]]


@dataclass
class RehearsalRow:
    """One model from drawn weights to a patched prompt.

    layers: how many decoder layers of each kind it has; published_layers: how many the published model has. weights:
    their type. weight_bytes: what they take. seconds, peak_bytes: of each stage; peaks are empty on a CPU. met,
    problems: whether proof and certificate hold, and what does not. failed: why it ended early.
    """

    model: str
    layers: dict[str, int]
    published_layers: int
    architecture: str = "-"
    parameters: int = 0
    weights: str = "-"
    weight_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    met: bool = False
    problems: list[str] = field(default_factory=list)
    lengths: list[RehearsedLength] = field(default_factory=list)
    run: RehearsalRun | None = None
    failed: str | None = None


@dataclass(frozen=True, kw_only=True)
class RehearsalFile(ResultFile):
    """Whole calibrations of models with random weights. settings: the bench's options."""

    program: ClassVar[str] = "python -m scripts.bench.rehearsals"

    format: str = "s2o-bench-rehearsals/1"
    settings: dict[str, Any]
    rows: list[RehearsalRow]


@dataclass(frozen=True)
class BudgetRow:
    """What the proof of one calibrated profile measured.

    worst_rows: the guard on worst rows, None for none. needles: kept, and found by the dense model; None if the prompts
    ask for none. attention_seconds, dense_attention_seconds: of all layers; None on a CPU.
    """

    budget: float
    worst_rows: float | None
    needles: list[int] | None
    density: float
    rel_mse: float
    kl: float
    top1: float
    attention_seconds: float | None
    dense_attention_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class BudgetsFile(ResultFile):
    """The study of budgets and of guards on worst rows."""

    program: ClassVar[str] = "python -m scripts.study.budgets"

    format: str = "s2o-study-budgets/1"
    model: str
    length: int
    rows: list[BudgetRow]


@dataclass(frozen=True)
class CoverageCounts:
    """How often fresh prompts are above certified bounds, over some rows of a prompt, in layers that are not dense.

    rows: "all rows", "the last eighth" or "64 new tokens". layers, means_above: layers, and those whose mean over the
    prompts is above its bound. cells, cells_above: the same of single prompts, one cell for each layer and prompt; the
    bounds are for means, so some are to be expected.
    """

    rows: str
    layers: int
    means_above: int
    cells: int
    cells_above: int


@dataclass(frozen=True)
class CoverageLayer:
    """One layer on fresh prompts, in the budget's unit: the mean error, its certified bound, the limit, the largest,
    and, of one kind of text, the error of every prompt."""

    layer: int
    mean: float
    bound: float
    limit: float | None
    largest: float
    errors: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class CoverageRow:
    """One length on fresh prompts of one kind of text, or of "all".

    counts: one entry for each part of a prompt's rows. kl_bound: what is certified
    of the next prompt's KL; kl_above: how many prompts are above it. needles_found, needles_kept: by the dense model,
    and of these by the patched one.
    """

    length: int
    domain: str
    prompts: int
    counts: list[CoverageCounts]
    layers: list[CoverageLayer]
    mean_kl: float
    kl_bound: float | None
    kl_above: int
    top1: float
    needles_found: int
    needles_kept: int

    COLUMNS: ClassVar[tuple[str, ...]] = (
        "tokens", "text", "prompts", "means above", "cells above",
        "last eighth", "continued", "KL", "KL above", "needles",
    )  # fmt: skip

    def cells(self) -> list[str]:
        """One line of a table: how many means, and how many single prompts, are above what is certified."""
        counts = {count.rows: count for count in self.counts}
        whole, last = counts.get("all rows"), counts.get("the last eighth")
        continued = [count for count in self.counts if count.rows.endswith("new tokens")]
        return [
            str(self.length),
            self.domain,
            str(self.prompts),
            "-" if whole is None else f"{whole.means_above} of {whole.layers}",
            "-" if whole is None else f"{whole.cells_above} of {whole.cells}",
            "-" if last is None else f"{last.means_above} of {last.layers}",
            f"{sum(count.means_above for count in continued)} of {sum(count.layers for count in continued)}",
            f"{self.mean_kl:.1e}",
            "-" if self.kl_bound is None else f"{self.kl_above} of {self.prompts}",
            f"{self.needles_kept} of {self.needles_found}",
        ]


@dataclass(frozen=True, kw_only=True)
class CoverageFile(ResultFile):
    """A certified profile on fresh prompts.

    budget: kind and value. seed, num_prompts: what drew the prompts, and how many of each kind of text. prompts: the
    files and folders that they are from, None for built-in text.
    """

    program: ClassVar[str] = "python -m scripts.bench.coverage"

    format: str = "s2o-bench-coverage/1"
    model: str
    profile: str
    budget: str
    seed: int
    num_prompts: int
    prompts: str | None
    rows: list[CoverageRow]


@dataclass(frozen=True)
class ProfileRow:
    """One profile at one length, on fresh prompts.

    density, mean_rel_mse: means over the layers; largest_rel_mse: of the worst. seconds, dense_seconds: attention of
    all layers on one prompt; None on a CPU. kl: in nats. needles: kept by the patched model, found by the dense one.
    """

    profile: str
    length: int
    density: float
    seconds: float | None
    dense_seconds: float | None
    mean_rel_mse: float
    largest_rel_mse: float
    kl: float
    top1: float
    needles: list[int] | None

    COLUMNS: ClassVar[tuple[str, ...]] = (
        "profile", "tokens", "density", "ms", "dense ms", "speed-up", "rel_mse", "largest", "KL", "top-1", "needles",
    )  # fmt: skip

    def cells(self) -> list[str]:
        """The row of a table."""
        seconds, dense = self.seconds, self.dense_seconds
        return [
            self.profile,
            str(self.length),
            f"{self.density:.3f}",
            "-" if seconds is None else f"{1e3 * seconds:.2f}",
            "-" if dense is None else f"{1e3 * dense:.2f}",
            "-" if not seconds or dense is None else f"{dense / seconds:.2f}x",
            f"{self.mean_rel_mse:.1e}",
            f"{self.largest_rel_mse:.1e}",
            f"{self.kl:.1e}",
            f"{self.top1:.1%}",
            "-" if self.needles is None else f"{self.needles[0]} of {self.needles[1]}",
        ]


@dataclass(frozen=True, kw_only=True)
class ProfilesFile(ResultFile):
    """Profiles of one model on the same fresh prompts, which `seed` drew, `num_prompts` of each length."""

    program: ClassVar[str] = "python -m scripts.bench.profiles"

    format: str = "s2o-bench-profiles/1"
    model: str
    seed: int
    num_prompts: int
    rows: list[ProfileRow]


@dataclass(frozen=True)
class CalibratedLayer:
    """One layer of a calibration: what the adjust prompts show of it. Seconds are of attention alone."""

    layer: int
    density: float
    held_out_rel_mse: float
    seconds: float | None
    dense_seconds: float | None


@dataclass(frozen=True)
class CalibratedLength:
    """One length of a calibration, on the adjust prompts. needles: kept, and found by the dense model."""

    length: int
    kl: float
    needles: list[int] | None
    attention_seconds: float | None
    dense_attention_seconds: float | None
    prefill_seconds: float
    dense_prefill_seconds: float
    layers: list[CalibratedLayer]


@dataclass(frozen=True, kw_only=True)
class CalibrationFile(ResultFile):
    """The report of a calibration (`<profile>.report.json`), as far as the results page shows it.

    certificate: a `Certificate` of the profile's record as JSON, None without one.
    """

    program: ClassVar[str] = "s2o-calibrate"

    model: str
    architecture: str
    command: str
    calibration_seconds: float
    lengths: list[CalibratedLength]
    certificate: dict[str, Any] | None = None


@dataclass(frozen=True)
class RetrievalRow:
    """How many of the asked answers a variant and the dense model find, in one task at one length."""

    task: str
    variant: str
    length: int
    asked: int
    found: int
    dense_found: int
    density: float


@dataclass(frozen=True, kw_only=True)
class EvaluationFile(ResultFile):
    """The summary.json that s2o-eval writes, as far as docs/results.md shows it; command: its whole command line."""

    program: ClassVar[str] = "s2o-eval"

    command: str = "s2o-eval"
    model: str
    retrieval: list[RetrievalRow]


@dataclass(frozen=True)
class VariantCurve:
    """Density and rel_mse of every head of a model at every tau, both [taus][heads], of one variant of the method."""

    length: int
    variant: str
    tile: str
    taus: list[float]
    density: list[list[float]]
    rel_mse: list[list[float]]


@dataclass(frozen=True, kw_only=True)
class MethodStudyFile(ResultFile):
    """The study of the method's extensions. rel_mse: how the errors are measured."""

    program: ClassVar[str] = "python -m scripts.study.method"

    format: str = "s2o-study-method/1"
    model: dict[str, Any]
    settings: dict[str, Any]
    tile_name: str
    variants: dict[str, dict[str, Any]]
    curves: list[VariantCurve]
    density_at: list[dict[str, Any]]
    drift: list[dict[str, Any]]
    tiles: list[dict[str, Any]]
    rel_mse: str = (
        "of a head: mean squared error on the sampled rows over the mean square of dense attention there, which is "
        "computed in float32 on the same q, k, v"
    )


def setting_name(kind: str, budget: float, guard: float | None = None) -> str:
    """What the methods' bench calls a calibrated setting; guard: on worst rows, where it is not the profile's own."""
    return f"{kind} {budget:g}" + ("" if guard is None else f", rows {guard:g}")


def write(path: Path, file: ResultFile) -> None:
    """Store a file as JSON."""
    write_atomically(path, (json.dumps(asdict(file), indent=1) + "\n").encode())


def read(cls: type[T], value: Any) -> T:
    """The dataclass that a JSON object states. Raises InputError naming the first field that it lacks."""
    return _read(cls, value, "")


def _read(cls: type[T], value: Any, path: str) -> T:
    hints = get_type_hints(cls)
    arguments = {}
    for entry in fields(cls):  # type: ignore[arg-type]
        name = f"{path}.{entry.name}" if path else entry.name
        if isinstance(value, Mapping) and entry.name in value:
            arguments[entry.name] = _converted(hints[entry.name], value[entry.name], name)
            for key in entry.metadata.get("needs", ()):
                if key not in value[entry.name]:
                    raise InputError(f"lacks {name}.{key}")
        elif entry.default is MISSING and entry.default_factory is MISSING:
            raise InputError(f"lacks {name}")
    return cls(**arguments)


def _converted(hint: Any, value: Any, path: str) -> Any:
    """A field's JSON value as its type: dataclasses, lists of them, or None; everything else as it is."""
    if get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return None
        hint = next((option for option in get_args(hint) if is_dataclass(option)), None)
    if get_origin(hint) is list and is_dataclass(get_args(hint)[0]):
        if not isinstance(value, list):
            raise InputError(f"lacks a list {path}")
        return [_read(get_args(hint)[0], item, path) for item in value]
    return _read(hint, value, path) if isinstance(hint, type) and is_dataclass(hint) else value
