"""What was measured, as plain data: every number of the report and the pictures is in this summary.

It is made from the journal alone, so a run that was interrupted ends with the same summary as one that was not.
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
from calibrate.evaluation.tasks import Asked, Case, cases
from calibrate.evaluation.variants import Variant
from calibrate.journal import Journal
from calibrate.models import LoadedModel
from calibrate.versions import versions
from s2o_runtime.errors import InputError
from s2o_runtime.gpu import identify

DENSE_CAN = 0.5  # a task of which the dense model answers less says nothing about what a variant loses

Row = dict[str, Any]
Summary = dict[str, Any]


def open_journal(plan: Plan, loaded: LoadedModel) -> Journal:
    """The results so far, of the same model, device, software and prompts.

    Raises InputError naming what differs from an earlier run.
    """
    device = identify(loaded.weights.device)
    identity = {
        "model": {"name": loaded.name, "fingerprint": loaded.fingerprint},
        "device": {"kind": device.kind, "name": device.name, "sm_count": device.sm_count},
        "versions": {name: text for name, text in versions().items() if name != "optuna"},
        "seed": plan.seed,
        "needles": plan.needles,
        "prompts": None if plan.prompts is None else digest(plan.prompts),
    }
    try:
        return Journal.open(plan.journal_path, identity)
    except InputError as error:
        raise InputError(str(error).replace("another --journal", "another --out")) from error  # what this run calls it


def summary(
    plan: Plan, loaded: LoadedModel, compared: Sequence[Variant], own: Sequence[Asked], journal: Journal
) -> Summary:  # fmt: skip
    """The outcome, all of it JSON. compared: the variants, dense first."""
    found = _Found(journal, cases(plan, own), compared)
    return {
        "model": plan.model,
        "architecture": str(loaded.geometry),
        "device": str(identify(loaded.weights.device)),
        "random_weights": loaded.random,
        "versions": versions(),
        "plan": plan.record(),
        "variants": [{"name": variant.name, "identity": variant.identity} for variant in compared],
        "retrieval": [row for task in (*RETRIEVAL, PROMPTS) for row in _retrieval(task, found)],
        "heat": _heat(plan, found),
        "perplexity": _perplexity(found),
        "agreement": _agreement(found),
        "time": _time(found),
    }


@dataclass(frozen=True)
class _Found:
    """The results of all cases."""

    journal: Journal
    cases: Sequence[Case]
    compared: Sequence[Variant]

    @property
    def dense(self) -> Variant:
        return self.compared[0]

    def values(self, task: str, variant: Variant, keep: Callable[[Case], bool] = lambda case: True) -> list[Row]:
        """What a variant did in a task, in the order of the cases."""
        keys = (case.key(variant.identity) for case in self.cases if task in case.tasks and keep(case))
        return [value for key in keys if (value := self.journal.get(task, key)) is not None]

    def lengths(self, task: str) -> list[int]:
        return sorted({case.length for case in self.cases if task in case.tasks})


def _retrieval(task: str, found: _Found) -> list[Row]:
    """Answers by variant and length; the user's prompts, of many lengths, together.

    found: answers with all tokens right; kept: those that dense has right too, of the dense_found that it has.
    """
    lengths = found.lengths(task)
    groups = [lengths] if task == PROMPTS and lengths else [[length] for length in lengths]
    rows = []
    for group in groups:
        dense = [ok for value in found.values(task, found.dense, _among(group)) for ok in value["correct"]]
        for variant in found.compared:
            values = found.values(task, variant, _among(group))
            correct = [ok for value in values for ok in value["correct"]]
            likely = [each for value in values for each in value["log_likelihood"]]
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
                    "kept": sum(both and ok for both, ok in zip(dense, correct, strict=True)),
                    "log_likelihood": _mean(likely),
                    **_ran(values),
                }
            )
    return rows


def _heat(plan: Plan, found: _Found) -> list[Row]:
    """For each variant the share of needles found: accuracy[depth][length]."""
    if "needles" not in plan.tasks:
        return []
    heat = []
    for variant in found.compared:
        accuracy = [
            [
                _mean([ok for value in found.values("needles", variant, _at(length, depth)) for ok in value["correct"]])
                for length in plan.lengths
            ]
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


def _perplexity(found: _Found) -> list[Row]:
    rows = []
    for length in found.lengths("perplexity"):
        dense: list[Row] = found.values("perplexity", found.dense, _among([length]))
        for variant in found.compared:
            values = found.values("perplexity", variant, _among([length]))
            nll, tokens, of_dense = _total(values, "nll"), _total(values, "tokens"), _total(dense, "nll")
            rows.append(
                {
                    "variant": variant.name,
                    "length": length,
                    "tokens": sum(tokens),
                    "perplexity": math.exp(sum(nll) / sum(tokens)),
                    "dense_perplexity": math.exp(sum(of_dense) / sum(tokens)),
                    "parts": [
                        {"from": first, "to": last, "nll": mine / count, "dense_nll": theirs / count}
                        for (first, last), mine, theirs, count in zip(
                            _edges(length), nll, of_dense, tokens, strict=True
                        )
                    ],
                    **_ran(values),
                }
            )
    return rows


def _agreement(found: _Found) -> list[Row]:
    rows = []
    for length in found.lengths("agreement"):
        for variant in found.compared[1:]:
            values = found.values("agreement", variant, _among([length]))
            kl, same, counts = (_total(values, name) for name in ("kl", "same", "positions"))
            rows.append(
                {
                    "variant": variant.name,
                    "length": length,
                    "positions": sum(counts),
                    "kl": max(0.0, sum(kl) / sum(counts)),  # rounding can leave less than nothing
                    "top1": sum(same) / sum(counts),
                    "parts": [
                        {"from": first, "to": last, "kl": max(0.0, each / count), "top1": equal / count}
                        for (first, last), each, equal, count in zip(_edges(length), kl, same, counts, strict=True)
                    ],
                    **_ran(values),
                }
            )
    return rows


def _time(found: _Found) -> list[Row]:
    rows = []
    for length in found.lengths("time"):
        (dense,) = found.values("time", found.dense, _among([length]))
        for variant in found.compared:
            (value,) = found.values("time", variant, _among([length]))
            measured = {name: value[name] for name in ("seconds", "fastest", "slowest", "peak_bytes")}
            rows.append(
                {"variant": variant.name, "length": length, **measured}
                | {"dense_seconds": dense["seconds"], "speedup": dense["seconds"] / value["seconds"]}
                | _ran([value])
            )
    return rows


def without_times(summary: Summary) -> Summary:
    """What another run on the same inputs must give to the byte."""
    return {name: value for name, value in summary.items() if name != "time"}


def _among(lengths: Sequence[int]) -> Callable[[Case], bool]:
    return lambda case: case.length in lengths


def _at(length: int, depth: float) -> Callable[[Case], bool]:
    return lambda case: case.length == length and case.depth == depth


def _ran(values: Sequence[Row]) -> Row:
    """The mean density, and why layers were dense in some prompt, with the most layers that were."""
    reasons: dict[str, int] = {}
    for value in values:
        for reason, layers in value["dense"].items():
            reasons[reason] = max(layers, reasons.get(reason, 0))
    return {"density": _mean([value["density"] for value in values]), "dense": reasons}


def _total(values: Iterable[Row], name: str) -> list[float]:
    return [math.fsum(each) for each in zip(*(value[name] for value in values), strict=True)]


def _edges(length: int) -> list[tuple[int, int]]:
    return list(pairwise(bucket_edges(length)))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
