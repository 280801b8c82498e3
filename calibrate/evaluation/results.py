"""Scores of an evaluation, paired with dense, and their intervals."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import chain, product
from statistics import fmean
from typing import Any

import numpy as np

from calibrate.evaluation import ruler
from calibrate.evaluation.paired import CONFIDENCE, adjust_holm, bootstrap, compare_answers, run_mcnemar
from calibrate.evaluation.plan import DENSE, PROMPTS, RETRIEVAL, EvaluationPlan
from calibrate.evaluation.run import DIGEST, Evaluation, Variant
from calibrate.evaluation.score import BUCKETS
from calibrate.evaluation.tasks import list_cases
from calibrate.journal import Journal
from calibrate.model.models import LoadedModel
from calibrate.prompts.documents import read_text
from calibrate.versions import collect_versions
from s2o_runtime.devices import identify
from s2o_runtime.identity import split_fingerprint

DENSE_CAN = 0.5  # a task of which the dense model answers less says nothing about what a variant loses
RULER_JUDGED = 0.2, 0.98  # dense scores of RULER's tasks that tell what a variant loses; outside they are only listed
# fields of a row that say nothing of several tasks together
OF_ONE_TASK = ("parts", "density", "dense", "seconds", "fastest", "slowest", "peak_bytes", "dense_seconds")

Row = dict[str, Any]
Summary = dict[str, Any]


def open_journal(plan: EvaluationPlan, loaded: LoadedModel) -> Journal:
    """Open the results so far, of the same model, device, software and prompts.

    Raises InputError if an earlier run in the same folder differs, by name; ResourceError if another has them open.
    """
    device = identify(loaded.weights.device)
    texts = None if plan.prompts is None else "\n".join(map(read_text, plan.prompts))
    identity = {
        "model": {"name": loaded.name, **split_fingerprint(loaded.fingerprint)},
        "device": {"kind": device.kind, "name": device.name, "sm_count": device.sm_count},
        "versions": {name: text for name, text in collect_versions().items() if name != "optuna"},
        "tokenizer": plan.tokenizer,
        "seed": plan.seed,
        "needles": plan.needles,
        "prompts": None if texts is None else hashlib.sha256(texts.encode()).hexdigest()[:DIGEST],
    }
    return Journal.open(plan.journal_path, identity, option="--out-dir")


def summarise(evaluation: Evaluation) -> Summary:
    """Return the outcome of an evaluation, all of it JSON, from a journal that has the results of all prompts."""
    plan, loaded, compared = evaluation.plan, evaluation.loaded, evaluation.compared
    results = [
        {"task": task, "variant": variant.name, "length": case.length, "sample": case.sample} | value
        for case in list_cases(plan, evaluation.user_prompts)
        for task in case.tasks
        for variant in compared
        if (value := evaluation.journal.get(task, case.key(variant.identity)))
    ]
    scores = {"perplexity": _score_perplexity, "agreement": _score_agreement, "time": _score_time}
    text = {task: _score_groups(results, [task], score) for task, score in scores.items()}
    quality: dict[tuple[int, str], Row] = {  # of each variant, all retrieval tasks together, and the text's results
        (length, variant.name): {"variant": variant.name, "length": length, "budget": variant.budget}
        | {"attention_speedup": variant.attention_speedup(length)}
        for length, variant in product(plan.lengths, compared[1:])
    }
    for row in (*_score_groups(results, RETRIEVAL, _score_recall), *text["agreement"], *text["time"]):
        joined = quality.get((row["length"], row["variant"]), {})
        joined |= {name: value for name, value in row.items() if joined and name not in OF_ONE_TASK}
    return {
        "model": plan.model,
        "architecture": str(loaded.geometry),
        "device": str(identify(loaded.weights.device)),
        "random_weights": loaded.random,
        "versions": collect_versions(),
        "plan": json.loads(json.dumps(asdict(plan), default=str)),
        "variants": [{"name": variant.name, "identity": variant.identity} for variant in compared],
        "quality": list(quality.values()),
        "retrieval": [
            {"task": task} | row
            for task in (*RETRIEVAL, PROMPTS)
            for row in _score_groups(results, [task], _score_recall)
        ],
        "heat": _map_depths(plan, compared, results),
        **dict(zip(("ruler", "ruler_pooled"), _summarise_ruler(results), strict=True)),
        **text,
        "prompts": results,  # as measured: all other numbers follow from these
    }


def group_rows(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Return the rows that have equal values of these fields, by the values, in the order in which they first come."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def _score_groups(
    results: Sequence[Row], tasks: Sequence[str], score: Callable[[list[Row], list[Row]], Row]
) -> list[Row]:
    """Make a row for each length and variant of the results of some tasks; the user's prompts are in one row.

    results: by rising length, dense first. score: is given a variant's results and dense's, one list for dense itself.
    """
    rows = [row for row in results if row["task"] in tasks]
    if PROMPTS in tasks:
        rows = [row | {"length": max(row["length"] for row in rows)} for row in rows]
    groups, scored = group_rows(rows, "length", "variant"), []
    for (length, variant), values in groups.items():
        reasons: Counter[str] = Counter()  # the most layers of one prompt that ran dense for each reason
        for value in values:
            reasons |= Counter(value["dense"])
        run = {"density": fmean(value["density"] for value in values), "dense": dict(reasons)}
        dense = groups.get((length, DENSE), [])  # dense is not compared with itself in agreement: it may have no rows
        scored.append({"variant": variant, "length": length} | score(values, dense) | run)
    return scored


def _score_recall(values: list[Row], dense: list[Row]) -> Row:
    """Count a variant's right answers, "found", those of dense, and those that both have right, "kept"."""
    by_prompt, dense_by_prompt = ([value["correct"] for value in rows] for rows in (values, dense))
    correct, dense_correct = list(chain(*by_prompt)), list(chain(*dense_by_prompt))
    return {
        "asked": len(correct),
        "found": sum(correct),
        "accuracy": fmean(correct),
        "dense_found": sum(dense_correct),
        "dense_accuracy": fmean(dense_correct),
        "dense_can": fmean(dense_correct) >= DENSE_CAN,
        "kept": sum(map(min, dense_correct, correct)),
        "log_likelihood": fmean(chain(*(value["log_likelihood"] for value in values))),
        **({} if values is dense else compare_answers(dense_by_prompt, by_prompt)),
    }


def _summarise_ruler(results: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return rows of each task of RULER, and of all judged tasks together for each length and variant but dense."""
    rows = [{"task": task} | row for task in ruler.TASKS for row in _score_groups(results, [task], _score_ruler)]
    pooled = []
    for (length, variant), of_tasks in group_rows(rows, "length", "variant").items():
        changes, nats = ([row.pop(name) for row in of_tasks] for name in ("changes", "nats"))
        if variant == DENSE:
            continue
        judged = [row for row in of_tasks if row["judged"]]
        for row, p in zip(judged, adjust_holm([row["p"] for row in judged]), strict=True):
            row["p_holm"] = p
        names = {"judged": judged, "listed": [row for row in of_tasks if not row["judged"]]}
        names["worse"] = [row for row in judged if row["p_holm"] < 1 - CONFIDENCE and row["difference"] < 0]
        pool: Row = {name: [row["task"] for row in group] for name, group in names.items()}
        pool |= {"variant": variant, "length": length, "nats": bootstrap(nats)}
        if judged:
            pool |= {name: fmean(row[name] for row in judged) for name in ("score", "dense_score")}
            pool |= bootstrap([values for values, row in zip(changes, of_tasks, strict=True) if row["judged"]])
        pooled.append(pool)
    return rows, pooled


def _score_ruler(values: list[Row], dense: list[Row]) -> Row:
    """Compare a variant's scores with dense's, and the right answers' log-likelihoods in nats per token.

    changes, nats: of each prompt, what the variant has more than dense.
    """
    own, other = (
        np.array([(value["score"], value["log_likelihood"] / value["answer_tokens"]) for value in rows]).T
        for rows in (values, dense)
    )
    score, dense_score = float(own[0].mean()), float(other[0].mean())
    changes, nats = (own - other).tolist()
    row: Row = {"asked": len(values), "score": score, "dense_score": dense_score, "changes": changes, "nats": nats}
    row["judged"] = RULER_JUDGED[0] <= dense_score <= RULER_JUDGED[1]
    if values is not dense:
        row |= bootstrap([changes]) | {"log_likelihood": bootstrap([nats])}
        if {*own[0], *other[0]} <= {0.0, 1.0}:
            row["p"] = run_mcnemar(changes.count(-1.0), changes.count(1.0))
    return row


def _score_perplexity(values: list[Row], dense: list[Row]) -> Row:
    tokens = sum(value["tokens"] for value in values)
    own, dense_own = (math.exp(math.fsum(value["nll"] for value in rows) / tokens) for rows in (values, dense))
    return {"tokens": tokens, "perplexity": own, "dense_perplexity": dense_own}


def _score_agreement(values: list[Row], dense: list[Row]) -> Row:
    def average(kl: float, same: float, count: float) -> Row:
        return {"kl": max(0.0, kl / count), "top1": same / count}  # rounding can leave a KL below 0

    columns = (zip(*(value[name] for value in values), strict=True) for name in ("kl", "same", "positions"))
    sums = [list(map(math.fsum, column)) for column in columns]
    parts = list(map(average, *sums))
    return {"positions": sum(sums[2]), **average(*map(sum, sums)), "parts": parts}


def _score_time(values: list[Row], dense: list[Row]) -> Row:
    (value,), (dense_value,) = values, dense
    measured = {name: value[name] for name in ("seconds", "fastest", "slowest", "peak_bytes")}
    return measured | {"dense_seconds": dense_value["seconds"], "speedup": dense_value["seconds"] / value["seconds"]}


def _map_depths(plan: EvaluationPlan, compared: Sequence[Variant], results: Sequence[Row]) -> list[Row]:
    """Return for each variant the share of needles found: accuracy[depth][length], at most `BUCKETS` depths."""
    parts = min(BUCKETS, plan.needles)
    answers = [
        row | {"part": number * parts // plan.needles, "right": right}
        for row in results
        if row["task"] == "needles"
        for number, right in zip(row["asked"], row["correct"], strict=True)
    ]
    shares = {
        key: fmean(answer["right"] for answer in group)
        for key, group in group_rows(answers, "variant", "part", "length").items()
    }
    return [
        {
            "variant": variant.name,
            "lengths": list(plan.lengths),
            "depths": [part / parts for part in range(parts)],
            "accuracy": [[shares[variant.name, part, length] for length in plan.lengths] for part in range(parts)],
        }
        for variant in (compared if shares else ())
    ]
