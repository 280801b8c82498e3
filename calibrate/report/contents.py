"""A finished calibration, and a profile, as plain values: all that tables, sentences, pictures and JSON files show.

The names of a `Report`'s fields are those in `<profile>.report.json`. Errors and limits are in the budget's unit, times
in seconds, costs in times of dense attention.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from calibrate.curves.curves import dense_power
from calibrate.pipeline import Result
from calibrate.proof.verify import LayerProof, LengthProof
from calibrate.recipe import Recipe
from calibrate.record import Certificate, ProvenLength, read_record
from calibrate.report.plan import list_options
from calibrate.search.choice import LayerPlan
from calibrate.versions import collect_versions
from s2o_runtime.config import HeadConfig, Tail
from s2o_runtime.identity import split_fingerprint
from s2o_runtime.profile import Profile
from s2o_runtime.profile.record import BudgetKind, ErrorUnit

FRONTIER = tuple(10 ** (step / 2) for step in range(-4, 5))  # multiples of a layer's budget


@dataclass(frozen=True)
class HeadReport:
    """One query head as chosen, with what its curve predicts."""

    mode: str
    tau: float
    representatives: int
    tail: Tail
    density: float
    cost: float
    error: float


@dataclass(frozen=True)
class LayerReport:
    """One layer at one length, as proven; what is predicted is None where nothing was timed or it was only checked."""

    layer: int
    tau_min: float | None  # of the heads that have a threshold; None without such heads
    tau_max: float | None
    dense_heads: int
    tails: int  # heads that estimate what the keys behind the stop would bring
    representatives: dict[str, int]  # how many heads have each number of them, which is the key
    segment: int
    lookback: int  # keys before a segment that are always visited
    tile: str
    why_dense: str | None  # of the whole layer; None if it is not dense
    density: float
    error: float
    limit: float
    error_over_limit: float
    predicted_error: float | None
    held_out_mse: float
    held_out_rel_mse: float
    worst: float
    tightened: int  # how often the proof made the layer more careful
    predicted_seconds: float | None
    seconds: float | None  # of the layer's attention as measured; None on a CPU, as the next
    dense_seconds: float | None
    heads: tuple[HeadReport, ...]  # empty at a length that was only checked
    frontier: tuple[tuple[float, float], ...] | None  # (density, error) of other budgets, by rising budget
    binds: ErrorUnit | None = None  # which of its two limits `limit` is; None of a budget without a ceiling
    eighths: tuple[float, ...] = ()  # the error over each eighth of the prompts, over the limit
    places: tuple[float, ...] = ()  # over the rows from each of `layers.PLACES` in their segments on, over `error`


@dataclass(frozen=True)
class LengthReport:
    """One prompt length."""

    length: int  # in tokens
    calibrated: bool  # whether settings were chosen for it; otherwise it was only checked
    kl: float  # KL(dense, patched) of the next token in nats, mean over positions of the held-out prompts
    top1: float  # the share of positions at which both models find the same token most likely
    needles: tuple[int, int] | None  # kept by the patched model, of those that the dense one finds; None without any
    prefill_seconds: float
    dense_prefill_seconds: float
    cost: float | None  # as predicted, of all layers
    attention_seconds: float | None  # of all layers; None on a CPU, as the next
    dense_attention_seconds: float | None
    groups: tuple[tuple[int, ...], ...]  # layers that shared one study
    layers: tuple[LayerReport, ...]

    @property
    def label(self) -> str:
        """The length, marked if it was only checked."""
        return f"{self.length} tokens{'' if self.calibrated else ' (checked only)'}"

    @property
    def prefill_speedup(self) -> float | None:
        """Dense seconds of a prefill over the patched model's."""
        return divide(self.dense_prefill_seconds, self.prefill_seconds)

    @property
    def attention_speedup(self) -> float | None:
        """Dense seconds of all layers' attention over the patched model's; as predicted where nothing was timed."""
        if self.attention_seconds is not None:
            return divide(self.dense_attention_seconds, self.attention_seconds)
        return divide(1.0, self.cost)

    @property
    def has_heads(self) -> bool:
        """True if single heads are known; at a length that was only checked they are not."""
        return all(layer.heads for layer in self.layers)


@dataclass(frozen=True)
class BudgetReport:
    """The error that was allowed; `ceiling` is the largest rel_mse beside an mse."""

    kind: BudgetKind
    value: float
    unit: ErrorUnit  # of the layers' errors and limits
    ceiling: float | None = None


@dataclass(frozen=True)
class JournalReport:
    """The journal's file, and how many measurements of earlier runs were in it."""

    path: str
    reused: int


@dataclass(frozen=True)
class Report:
    """A finished calibration."""

    out: str | None  # the profile's file; None if none was written
    met: bool  # whether the proof succeeded
    problems: tuple[str, ...]
    model: str
    architecture: str
    device: str
    random_weights: bool
    budget: BudgetReport
    worst_rows: float | None  # the limit on single rows
    calibration_seconds: float
    phases: dict[str, float]
    trials: int
    failed_trials: int
    failures: dict[str, int]  # how many trials failed of each reason
    journal: JournalReport
    versions: dict[str, str]
    seed: int
    data: str  # where the prompts came from
    lengths: tuple[LengthReport, ...]
    command: str | None = None  # None for a run from Python
    adjusted_on: int | None = None  # prompts of each length
    certificate: Certificate | None = None
    not_proven: tuple[str, ...] = ()  # sentences: what a reader might take for shown
    plan: dict[str, str] = field(default_factory=dict)  # every option in words, given or not

    @property
    def layer_numbers(self) -> list[int]:
        """The layers' numbers in the model; those of layers of other kinds, such as sliding ones, are left out."""
        return [layer.layer for layer in self.lengths[0].layers]

    def to_json(self) -> dict[str, Any]:
        """Return what `<profile>.report.json` holds."""
        certificate = None if self.certificate is None else self.certificate.to_json()
        return asdict(replace(self, certificate=None)) | {"certificate": certificate}


def make_report(result: Result, command: str | None = None) -> Report:
    """Return the report of a finished calibration; `command` is the command line that runs it again."""
    failures = sum((chosen.failures for chosen in result.chosen.values()), Counter[str]())
    recipe, record = result.recipe, read_record(result.profile)
    return Report(
        **_copy_fields(result, "met"),
        **_copy_fields(recipe, "model", "random_weights", "seed"),
        out=str(recipe.out) if result.written else None,
        problems=tuple(map(str, result.problems)),
        architecture=str(result.profile.geometry),
        device=str(result.device),
        budget=BudgetReport(**_copy_fields(recipe.budget, "kind", "value", "unit", "ceiling")),
        worst_rows=recipe.worst_rows or None,
        calibration_seconds=round(sum(result.seconds.values()), 3),
        phases={name: round(seconds, 3) for name, seconds in result.seconds.items()},
        trials=sum(chosen.trials for chosen in result.chosen.values()),
        failed_trials=sum(failures.values()),
        failures=dict(failures),
        journal=JournalReport(str(recipe.journal_path), result.journal_reused),
        versions=collect_versions(),
        data=recipe.prompt_source,
        lengths=tuple(_report_length(result, length, proof) for length, proof in sorted(result.proofs.items())),
        command=command,
        adjusted_on=recipe.held_out,
        certificate=record.certificate,
        not_proven=record.not_proven or (),
        plan=list_options(recipe),
    )


def _report_length(result: Result, length: int, proof: LengthProof) -> LengthReport:
    chosen, layer_number = result.chosen.get(length), result.profile.geometry.get_layer_number
    times = zip(*((layer.seconds, layer.dense_seconds) for layer in proof.layers), strict=True)
    attention, dense_attention = (None if None in seconds else sum(filter(None, seconds), 0.0) for seconds in times)
    return LengthReport(
        **_copy_fields(proof, "kl", "top1", "needles", "prefill_seconds", "dense_prefill_seconds"),
        length=length,
        calibrated=chosen is not None,
        cost=None if chosen is None else fmean(choice.allocation.cost for choice in chosen.choices),
        attention_seconds=attention,
        dense_attention_seconds=dense_attention,
        groups=() if chosen is None else tuple(tuple(map(layer_number, group)) for group in chosen.groups),
        layers=tuple(_report_layer(result, length, index, layer) for index, layer in enumerate(proof.layers)),
    )


def _report_layer(result: Result, length: int, index: int, proof: LayerProof) -> LayerReport:
    recipe, config = result.recipe, result.configs[length, index]
    representatives = Counter(head.representatives for head in config.heads if head.mode == "s2o")
    error, limit = proof.error(recipe.budget), result.limits[length, index]
    return LayerReport(
        layer=result.profile.geometry.get_layer_number(index),
        **count_heads(config.heads),
        **_copy_fields(config, "segment", "lookback"),
        **_copy_fields(proof, "density", "worst", "seconds", "dense_seconds"),
        representatives={str(count): representatives[count] for count in sorted(representatives)},
        tile=str(config.tile),
        error=error,
        limit=limit,
        error_over_limit=error / limit if limit else 0.0,
        binds=recipe.binds(limit),
        **proof.compare_parts(recipe.budget, limit),
        held_out_mse=proof.mse,
        held_out_rel_mse=proof.rel_mse,
        tightened=result.tightened[length, index],
        **_report_prediction(recipe, result.chosen[length].choices if length in result.chosen else (), index),
    )


def _report_prediction(recipe: Recipe, choices: Sequence[LayerPlan], index: int) -> dict[str, Any]:
    """Return the fields of a layer's report that follow from its choice; without choices they are empty."""
    if not choices:
        return dict.fromkeys(("why_dense", "predicted_error", "predicted_seconds", "frontier")) | {"heads": ()}
    choice, power = choices[index], dense_power(choices[index].curves)
    # The frontier is computed here and not by the search, because which choice and which budget a layer ends with is
    # known only after the proof has tightened them.
    allocations = [choice.spending(choice.budget.mse * times).allocation for times in FRONTIER]
    return {
        "why_dense": choice.dense_sentence,
        "predicted_error": recipe.budget.error(choice.allocation.mse, power),
        "predicted_seconds": _predict_seconds(choice, choices),
        "frontier": tuple((other.density, recipe.budget.error(other.mse, power)) for other in allocations),
        "heads": tuple(
            HeadReport(
                **_copy_fields(point.head, "mode", "tau", "representatives", "tail"),
                **_copy_fields(point, "density", "cost"),
                error=recipe.budget.error(point.mse, power),
            )
            for point in choice.allocation.points
        ),
    }


def _predict_seconds(choice: LayerPlan, choices: Sequence[LayerPlan]) -> float | None:
    """Return the seconds that a layer's attention will take; None where it was not timed."""
    if choice.timing is None or choice.seconds is None:
        return None
    # A GPU may be slower for a while, so only the ratio to the dense calls that it was compared with counts.
    # Dense attention takes the same time in every layer: the ratio is applied to the median of its times.
    dense = statistics.median(other.timing.dense_seconds for other in choices if other.timing is not None)
    return dense * choice.seconds / choice.timing.dense_seconds


def _copy_fields(source: object, *names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def summarise_profile(profile: Profile) -> dict[str, Any]:
    """Return what a profile says of itself, as JSON; None where its record has no answer."""
    record, budget = read_record(profile), None
    if record.budget and record.budget.value is not None:
        ceiling = record.budget.ceiling_rel_mse
        within = "" if ceiling is None else f" and rel_mse {ceiling:g}"
        budget = f"{record.budget.kind} {record.budget.value:g}{within}"
    return {
        "model": profile.model_name,
        "architecture": str(profile.geometry),
        "fingerprint": split_fingerprint(profile.fingerprint)["fingerprint"],
        "device": str(profile.device),
        "budget": budget,
        "objective": record.objective,
        "proof": record.proof,
        "problems": list(record.problems or ()),
        "certificate": record.certificate.to_json() if record.certificate else None,
        "not_proven": list(record.not_proven or ()),
        "retiled": record.retiled.note if record.retiled else None,
        "unsupported_heads": profile.unsupported_heads,
        "lengths": [_summarise_length(profile, length) for length in profile.lengths],
    }


def _summarise_length(profile: Profile, length: int) -> dict[str, Any]:
    record, bucket = read_record(profile), profile.layers[profile.lengths.index(length)]
    heads = [head for layer in bucket for head in layer.heads]
    source, densities = record.densities(length, profile.geometry.layers)
    proven, unit = record.find_proven(length) or ProvenLength(), (record.budget and record.budget.unit) or "mse"
    layers = proven.layers or ()
    errors = [error / layer.limit for layer in layers if (error := layer.error(unit)) is not None and layer.limit]
    return {
        "length": length,
        "heads": len(heads),
        **count_heads(heads),
        "density": fmean(densities) if densities else None,
        "density_is": source,
        "layer_densities": densities,
        "error_over_limit": max(errors, default=None),
        "worst": max((layer.worst for layer in layers if layer.worst is not None), default=None),
        "needles": None if proven.needles is None else list(proven.needles),
        "kl": proven.kl,
        "top1": proven.top1,
        "prefill_speedup": divide(proven.dense_prefill_seconds, proven.prefill_seconds),
        "layer_eighths": [layer.eighths or () for layer in layers],
        "layer_places": [layer.places or () for layer in layers],
    }


def count_heads(heads: Sequence[HeadConfig]) -> dict[str, Any]:
    """Return the range of the thresholds, None without any, and how many heads are dense or have a tail."""
    sparse = [head for head in heads if head.mode == "s2o"]
    taus = [head.tau for head in sparse]
    return {
        "tau_min": min(taus, default=None),
        "tau_max": max(taus, default=None),
        "dense_heads": len(heads) - len(sparse),
        "tails": sum(head.tail == "mean" for head in sparse),
    }


def divide(over: float | None, under: float | None) -> float | None:
    """Return the quotient; None unless both are above 0."""
    return over / under if over and under and over > 0 < under else None
