"""The summary of an evaluation, as JSON: every number of the report and of the pictures is in it.

It is made from the journal alone, so a run that was interrupted ends with the same summary as one that was not. The
names of its fields are read by whoever keeps results (`docs/results/`), so they do not follow renamings in the code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from calibrate.evaluation.own import digest
from calibrate.evaluation.plan import PROMPTS, RETRIEVAL, Plan
from calibrate.evaluation.score import bucket_edges
from calibrate.evaluation.tasks import Case, cases
from calibrate.evaluation.variants import Variant
from calibrate.journal import Journal
from calibrate.model.models import LoadedModel
from calibrate.prompts.prompt import Prompt
from calibrate.versions import versions
from s2o_runtime.devices import identify

DENSE_CAN = 0.5  # a task of which the dense model answers less says nothing about what a variant loses

Row = dict[str, Any]
Summary = dict[str, Any]


def open_journal(plan: Plan, loaded: LoadedModel) -> Journal:
    """The results so far, of the same model, device, software and prompts.

    Raises:
        InputError: If an earlier run in the same folder differs in one of these; the message names it.
        ResourceError: If another run has them open.
    """
    device = identify(loaded.weights.device)
    identity = {
        "model": {"name": loaded.name, "fingerprint": loaded.fingerprint},
        "device": {"kind": device.kind, "name": device.name, "sm_count": device.sm_count},
        "versions": {name: text for name, text in versions().items() if name != "optuna"},
        "tokenizer": plan.tokenizer,
        "seed": plan.seed,
        "needles": plan.needles,
        "prompts": None if plan.prompts is None else digest(plan.prompts),
    }
    return Journal.open(plan.journal_path, identity, option="--out-dir")


def summary(
    plan: Plan,
    loaded: LoadedModel,
    compared: Sequence[Variant],
    user_prompts: Sequence[Prompt],
    journal: Journal,
) -> Summary:
    """The outcome of an evaluation, all of it JSON.

    Args:
        plan: What was measured.
        loaded: The model that was measured.
        compared: The variants, dense first.
        user_prompts: The prompts of the user's own file.
        journal: The results of all of the plan's prompts.
    """
    results = _Results(journal, cases(plan, user_prompts), compared)
    return {
        "model": plan.model,
        "architecture": str(loaded.geometry),
        "device": str(identify(loaded.weights.device)),
        "random_weights": loaded.random,
        "versions": versions(),
        "plan": plan.record(),
        "variants": [{"name": variant.name, "identity": variant.identity} for variant in compared],
        "retrieval": [row for task in (*RETRIEVAL, PROMPTS) for row in _retrieval(task, results)],
        "heat": _heat(plan, results),
        "perplexity": _perplexity(results),
        "agreement": _agreement(results),
        "time": _time(results),
    }


@dataclass(frozen=True)
class _Results:
    """The results of all prompts."""

    journal: Journal
    cases: Sequence[Case]
    compared: Sequence[Variant]

    @property
    def dense(self) -> Variant:
        return self.compared[0]

    def values(self, task: str, variant: Variant, keep: Callable[[Case], bool] = lambda case: True) -> list[Row]:
        """A variant's results in a task, in the order of the prompts."""
        keys = (case.key(variant.identity) for case in self.cases if task in case.tasks and keep(case))
        return [value for key in keys if (value := self.journal.get(task, key)) is not None]

    def correct(self, task: str, variant: Variant, keep: Callable[[Case], bool]) -> list[bool]:
        """Whether each answer of a variant is right."""
        return [right for value in self.values(task, variant, keep) for right in value["correct"]]

    def lengths(self, task: str) -> list[int]:
        return sorted({case.length for case in self.cases if task in case.tasks})


def _retrieval(task: str, results: _Results) -> list[Row]:
    """Answers by variant and length; the user's prompts, of many lengths, together.

    In a row, "found" is how many answers have all their tokens right, "dense_found" how many of dense's do, and "kept"
    how many are right in both.
    """
    lengths = results.lengths(task)
    groups = [lengths] if task == PROMPTS and lengths else [[length] for length in lengths]
    rows = []
    for group in groups:
        dense = results.correct(task, results.dense, _among(group))
        for variant in results.compared:
            values = results.values(task, variant, _among(group))
            correct = results.correct(task, variant, _among(group))
            log_likelihoods = [number for value in values for number in value["log_likelihood"]]
            rows.append(
                {
                    "task": task,
                    "variant": variant.name,
                    "length": group[-1],
                    "shortest": group[0],
                    "asked": len(correct),
                    "found": sum(correct),
                    "accuracy": _mean(correct),
                    "dense_found": sum(dense),
                    "dense_accuracy": _mean(dense),
                    "dense_can": _mean(dense) >= DENSE_CAN,
                    "kept": sum(first and second for first, second in zip(dense, correct, strict=True)),
                    "log_likelihood": _mean(log_likelihoods),
                    **_run_stats(values),
                }
            )
    return rows


def _heat(plan: Plan, results: _Results) -> list[Row]:
    """For each variant the share of needles found: accuracy[depth][length]."""
    if "needles" not in plan.tasks:
        return []
    heat = []
    for variant in results.compared:
        accuracy = [
            [_mean(results.correct("needles", variant, _at(length, depth))) for length in plan.lengths]
            for depth in plan.depth_values
        ]
        heat.append(
            {
                "variant": variant.name,
                "lengths": list(plan.lengths),
                "depths": list(plan.depth_values),
                "samples": plan.samples,
                "accuracy": accuracy,
            }
        )
    return heat


def _perplexity(results: _Results) -> list[Row]:
    rows = []
    for length in results.lengths("perplexity"):
        dense = results.values("perplexity", results.dense, _among([length]))
        for variant in results.compared:
            values = results.values("perplexity", variant, _among([length]))
            nll, tokens, dense_nll = _totals(values, "nll"), _totals(values, "tokens"), _totals(dense, "nll")
            rows.append(
                {
                    "variant": variant.name,
                    "length": length,
                    "tokens": sum(tokens),
                    "perplexity": math.exp(sum(nll) / sum(tokens)),
                    "dense_perplexity": math.exp(sum(dense_nll) / sum(tokens)),
                    "parts": [
                        {"from": first, "to": last, "nll": part / count, "dense_nll": dense_part / count}
                        for (first, last), part, dense_part, count in zip(
                            _edges(length), nll, dense_nll, tokens, strict=True
                        )
                    ],
                    **_run_stats(values),
                }
            )
    return rows


def _agreement(results: _Results) -> list[Row]:
    rows = []
    for length in results.lengths("agreement"):
        for variant in results.compared[1:]:
            values = results.values("agreement", variant, _among([length]))
            kl, same, counts = (_totals(values, name) for name in ("kl", "same", "positions"))
            rows.append(
                {
                    "variant": variant.name,
                    "length": length,
                    "positions": sum(counts),
                    "kl": max(0.0, sum(kl) / sum(counts)),  # rounding can leave less than nothing
                    "top1": sum(same) / sum(counts),
                    "parts": [
                        {"from": first, "to": last, "kl": max(0.0, part / count), "top1": equal / count}
                        for (first, last), part, equal, count in zip(_edges(length), kl, same, counts, strict=True)
                    ],
                    **_run_stats(values),
                }
            )
    return rows


def _time(results: _Results) -> list[Row]:
    rows = []
    for length in results.lengths("time"):
        (dense,) = results.values("time", results.dense, _among([length]))
        for variant in results.compared:
            (value,) = results.values("time", variant, _among([length]))
            measured = {name: value[name] for name in ("seconds", "fastest", "slowest", "peak_bytes")}
            rows.append(
                {"variant": variant.name, "length": length, **measured}
                | {"dense_seconds": dense["seconds"], "speedup": dense["seconds"] / value["seconds"]}
                | _run_stats([value])
            )
    return rows


def _among(lengths: Sequence[int]) -> Callable[[Case], bool]:
    return lambda case: case.length in lengths


def _at(length: int, depth: float) -> Callable[[Case], bool]:
    return lambda case: case.length == length and case.depth == depth


def _run_stats(values: Sequence[Row]) -> Row:
    """The mean density, and for each reason the most layers that ran dense for it in one prompt."""
    reasons: dict[str, int] = {}
    for value in values:
        for reason, layers in value["dense"].items():
            reasons[reason] = max(layers, reasons.get(reason, 0))
    return {"density": _mean([value["density"] for value in values]), "dense": reasons}


def _totals(values: Iterable[Row], name: str) -> list[float]:
    """For each part of the prompt, the sum over the prompts."""
    return [math.fsum(part) for part in zip(*(value[name] for value in values), strict=True)]


def _edges(length: int) -> list[tuple[int, int]]:
    return list(pairwise(bucket_edges(length)))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
