"""What a calibration's report says: a finished run as typed, plain values.

`report_of` makes a `Report` from a finished calibration. The tables, the sentences, the pictures and the JSON file
(`<profile>.report.json`) are all made from it, so nothing is shown that is not in the file. The names of the fields are
the names in the file.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from calibrate.curves.curves import dense_power
from calibrate.pipeline import Result
from calibrate.proof.verify import LayerProof, LengthProof
from calibrate.recipe import Recipe
from calibrate.report.plan import option_lines
from calibrate.report.summary import head_counts
from calibrate.search.choice import Choice, search_constraints
from calibrate.versions import versions
from s2o_runtime.config import Tail
from s2o_runtime.profile.record import BudgetKind, Certificate, ErrorUnit

FRONTIER = tuple(10 ** (step / 2) for step in range(-4, 5))  # multiples of a layer's budget


@dataclass(frozen=True)
class HeadReport:
    """What one query head does, and what it is predicted to do.

    `cost` is its attention's time divided by the time of dense attention, and `error` is in the budget's unit.
    """

    mode: str
    tau: float
    representatives: int
    tail: Tail
    density: float
    cost: float
    error: float


@dataclass(frozen=True)
class LayerReport:
    """One layer at one length.

    Errors and `limit` are in the budget's unit, times in seconds. `density`, `error`, `worst` and the fields named
    `held_out` come from the proof; the fields named `predicted` from the measured curves.

    Attributes:
        tau_min: the smallest threshold of the heads that have one; None without such heads.
        tau_max: their largest threshold.
        tails: how many heads estimate what the keys behind the stop would bring.
        representatives: how many heads have each number of representatives, which is the key.
        why_dense: why the whole layer was made dense; None if it was not.
        error_over_limit: `error` divided by `limit`.
        binds: which of its two limits `limit` is (`Recipe.binds`); None of a budget without a ceiling.
        tightened: how often the proof made the layer more careful.
        predicted_seconds: None if nothing was timed or the length was only checked, as for all that was predicted.
        seconds: the measured time of the layer's attention; None on a CPU, as `dense_seconds`.
        heads: empty at a length that was only checked.
        frontier: (density, error) that other budgets would give, by rising budget.
    """

    layer: int
    tau_min: float | None
    tau_max: float | None
    dense_heads: int
    tails: int
    representatives: dict[str, int]
    segment: int
    scores: str
    tile: str
    why_dense: str | None
    density: float
    error: float
    limit: float
    error_over_limit: float
    predicted_error: float | None
    held_out_mse: float
    held_out_rel_mse: float
    worst: float
    tightened: int
    predicted_seconds: float | None
    seconds: float | None
    dense_seconds: float | None
    heads: tuple[HeadReport, ...]
    frontier: tuple[tuple[float, float], ...] | None
    binds: ErrorUnit | None = None


@dataclass(frozen=True)
class UniformReport:
    """The best single setting for all heads of all layers, to compare with; `cost` and `seconds` as in `HeadReport`."""

    tau: float
    segment: int
    representatives: int
    tail: Tail
    cost: float
    seconds: float | None


@dataclass(frozen=True)
class LengthReport:
    """One prompt length.

    Attributes:
        length: in tokens.
        calibrated: whether settings were chosen for this length; otherwise it was only checked.
        kl: KL(dense, patched) of the next token in nats, the mean over all positions of the held-out prompts.
        top1: the share of positions at which both models find the same token most likely.
        needles: how many needles the patched model keeps of those that the dense one finds, and how many those are;
            None if the prompts ask for none.
        uniform: None at a length that was only checked, or if no single setting is within the budget.
        cost: the predicted time of all layers' attention divided by that of dense attention.
        attention_seconds: of all layers; None on a CPU, as `dense_attention_seconds`.
        groups: layers that shared one study.
    """

    length: int
    calibrated: bool
    kl: float
    top1: float
    needles: tuple[int, int] | None
    prefill_seconds: float
    dense_prefill_seconds: float
    uniform: UniformReport | None
    cost: float | None
    attention_seconds: float | None
    dense_attention_seconds: float | None
    groups: tuple[tuple[int, ...], ...]
    layers: tuple[LayerReport, ...]

    @property
    def label(self) -> str:
        """The length, and whether it was only checked."""
        return f"{self.length} tokens{self.remark}"

    @property
    def has_heads(self) -> bool:
        """Whether anything is known of single heads; it is not at a length that was only checked."""
        return all(layer.heads for layer in self.layers)

    @property
    def remark(self) -> str:
        return "" if self.calibrated else " (checked only)"


@dataclass(frozen=True)
class BudgetReport:
    """The error that was allowed: `kind` is mse, rel_mse or kl, `scope` is layer or model, `ceiling` the largest
    rel_mse beside an mse."""

    kind: BudgetKind
    value: float
    scope: str
    ceiling: float | None = None

    @property
    def unit(self) -> ErrorUnit:
        """The unit of the layers' errors and limits."""
        return self.kind


@dataclass(frozen=True)
class JournalReport:
    """The journal's file, and how many measurements of earlier runs were found in it."""

    path: str
    reused: int


@dataclass(frozen=True)
class Report:
    """A finished calibration.

    Attributes:
        out: the profile's file; None if none was written.
        met: whether the proof succeeded.
        problems: why it did not.
        worst_rows: the limit on single rows; None if there is none.
        calibration_seconds: the whole run.
        phases: the seconds of each part of it.
        failures: what trials failed of, and how many did.
        data: where the prompts came from.
        command: the command line that made this; None for a run from Python.
        adjusted_on: how many prompts of each length layers were adjusted on.
        certificate: what is certified; None if nothing is.
        not_proven: what a reader might take for shown although it is not, one sentence each.
        plan: every option of the run in words, by its name, whether it was given or not.
    """

    out: str | None
    met: bool
    problems: tuple[str, ...]
    model: str
    architecture: str
    device: str
    random_weights: bool
    budget: BudgetReport
    worst_rows: float | None
    calibration_seconds: float
    phases: dict[str, float]
    trials: int
    failed_trials: int
    failures: dict[str, int]
    journal: JournalReport
    versions: dict[str, str]
    seed: int
    data: str
    lengths: tuple[LengthReport, ...]
    command: str | None = None
    adjusted_on: int | None = None
    certificate: Certificate | None = None
    not_proven: tuple[str, ...] = ()
    plan: dict[str, str] = field(default_factory=dict)

    @property
    def layer_numbers(self) -> list[int]:
        """The layers' numbers in the model; those of layers of other kinds, such as sliding ones, are left out."""
        return [layer.layer for layer in self.lengths[0].layers]

    def to_json(self) -> dict[str, Any]:
        """The report as JSON takes it: what is in `<profile>.report.json`."""
        certificate = None if self.certificate is None else self.certificate.to_json()
        return asdict(replace(self, certificate=None)) | {"certificate": certificate}


def report_of(recipe: Recipe, result: Result, command: str | None = None) -> Report:
    """The report of a finished calibration.

    Args:
        recipe: what was asked for.
        result: what came of it.
        command: the command line that was run, for the reader who wants to run it again.
    """
    failures = sum((chosen.failures for chosen in result.chosen.values()), Counter[str]())
    return Report(
        out=str(recipe.out) if result.written else None,
        met=result.met,
        problems=tuple(map(str, result.problems)),
        model=recipe.model,
        architecture=str(result.profile.geometry),
        device=str(result.device),
        random_weights=recipe.random_weights,
        budget=BudgetReport(recipe.budget.kind, recipe.budget.value, recipe.scope, recipe.budget.ceiling or None),
        worst_rows=recipe.worst_rows or None,
        calibration_seconds=round(sum(result.seconds.values()), 3),
        phases={name: round(seconds, 3) for name, seconds in result.seconds.items()},
        trials=sum(chosen.trials for chosen in result.chosen.values()),
        failed_trials=sum(failures.values()),
        failures=dict(failures),
        journal=JournalReport(str(recipe.journal_path), result.journal_reused),
        versions=versions(),
        seed=recipe.seed,
        data=recipe.prompt_source,
        lengths=tuple(_length(recipe, result, length, proof) for length, proof in sorted(result.proofs.items())),
        command=command,
        adjusted_on=recipe.held_out,
        certificate=result.profile.record.certificate,
        not_proven=result.profile.record.not_proven or (),
        plan=option_lines(recipe),
    )


def _length(recipe: Recipe, result: Result, length: int, proof: LengthProof) -> LengthReport:
    chosen, layer_number = result.chosen.get(length), result.profile.geometry.layer_number
    return LengthReport(
        **_copied(proof, "kl", "top1", "needles", "prefill_seconds", "dense_prefill_seconds"),
        length=length,
        calibrated=chosen is not None,
        uniform=None,
        cost=None if chosen is None else statistics.fmean(choice.allocation.cost for choice in chosen.choices),
        attention_seconds=_total(layer.seconds for layer in proof.layers),
        dense_attention_seconds=_total(layer.dense_seconds for layer in proof.layers),
        groups=() if chosen is None else tuple(tuple(map(layer_number, group)) for group in chosen.groups),
        layers=tuple(_layer(recipe, result, length, index, layer) for index, layer in enumerate(proof.layers)),
    )


def _layer(recipe: Recipe, result: Result, length: int, index: int, proof: LayerProof) -> LayerReport:
    config = result.configs[length, index]
    choices = result.chosen[length].choices if length in result.chosen else None
    choice = None if choices is None else choices[index]
    representatives = Counter(head.representatives for head in config.heads if head.mode == "s2o")
    error, limit = proof.error(recipe.budget), result.limits[length, index]
    return LayerReport(
        layer=result.profile.geometry.layer_number(index),
        **head_counts(config.heads),
        **_copied(config, "segment", "scores"),
        **_copied(proof, "density", "worst", "seconds", "dense_seconds"),
        representatives={str(count): representatives[count] for count in sorted(representatives)},
        tile=str(config.tile),
        why_dense=None if choice is None else choice.dense_sentence,
        error=error,
        limit=limit,
        error_over_limit=error / limit if limit else 0.0,
        binds=recipe.binds(limit),
        predicted_error=None if choice is None else _in_unit(recipe, choice, choice.allocation.mse),
        held_out_mse=proof.mse,
        held_out_rel_mse=proof.rel_mse,
        tightened=result.tightened[length, index],
        predicted_seconds=None if choices is None else _predicted_seconds(choices[index], choices),
        heads=() if choice is None else _heads(recipe, choice),
        frontier=None if choice is None else _frontier(recipe, choice),
    )


def _predicted_seconds(choice: Choice, choices: Sequence[Choice]) -> float | None:
    """The seconds that a layer's attention will take; None where it was not timed.

    Every call was timed in turns with dense attention, because a GPU may be slower for a while: what is certain is the
    ratio. Dense attention takes the same time in every layer, so the ratio is applied to the median of its times.
    """
    if choice.timing is None or choice.seconds is None:
        return None
    dense = statistics.median(other.timing.dense_seconds for other in choices if other.timing is not None)
    return dense * choice.seconds / choice.timing.dense_seconds


def _heads(recipe: Recipe, choice: Choice) -> tuple[HeadReport, ...]:
    return tuple(
        HeadReport(
            **_copied(point.head, "mode", "tau", "representatives", "tail"),
            **_copied(point, "density", "cost"),
            error=_in_unit(recipe, choice, point.mse),
        )
        for point in choice.allocation.points
    )


def _frontier(recipe: Recipe, choice: Choice) -> tuple[tuple[float, float], ...]:
    """The (density, error) of the layer at `FRONTIER` times its budget.

    The allocation is computed here and not in the search, because which choice and which budget a layer ends with is
    known only after the proof has tightened them; it is a pure function of curves that are in memory already.
    """
    allocations = [
        choice.spending(choice.budget_mse * times, search_constraints(recipe)).allocation for times in FRONTIER
    ]
    return tuple((allocation.density, _in_unit(recipe, choice, allocation.mse)) for allocation in allocations)


def _in_unit(recipe: Recipe, choice: Choice, mse: float) -> float:
    """A mean squared error in the budget's unit."""
    return recipe.budget.error(mse, dense_power(choice.curves))


def _total(values: Iterable[float | None]) -> float | None:
    """The sum; None if a value is missing."""
    numbers = list(values)
    return None if None in numbers else sum(filter(None, numbers), 0.0)


def _copied(source: object, *names: str) -> dict[str, Any]:
    """What a report has under the same names."""
    return {name: getattr(source, name) for name in names}
