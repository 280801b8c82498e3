"""Scores of an evaluation, paired with dense, and their intervals."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np

from calibrate.evaluation import ruler
from calibrate.evaluation.paired import CONFIDENCE, adjust_holm, compare_paired
from calibrate.evaluation.plan import AGREEMENT, DENSE, PROMPTS, RETRIEVAL, TIME, EvaluationPlan
from calibrate.evaluation.run import Evaluation
from calibrate.evaluation.tasks import list_cases
from calibrate.journal import Journal
from calibrate.model.models import LoadedModel
from calibrate.prompts.documents import read_text
from calibrate.versions import collect_versions
from s2o_runtime.devices import identify
from s2o_runtime.fields import group_by_key
from s2o_runtime.files import DIGEST
from s2o_runtime.identity import split_fingerprint

RULER_JUDGED = 0.2, 0.98  # dense scores of RULER's tasks that tell what a variant loses; outside they are only listed
QUALITY = ("score", "dense_score", "difference", "low", "high", "p", "kl", "worst_kl", "top1", "speedup")

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
        {"task": case.task, "variant": variant.name, "length": case.length, "sample": case.sample} | value
        for case in list_cases(plan, evaluation.user_prompts)
        for variant in compared
        if (value := evaluation.journal.get(case.task, case.key(variant.identity)))
    ]
    tasks = *RETRIEVAL, *ruler.TASKS, PROMPTS
    answers = [row for task in tasks for row in _score_groups(results, task, _score_answers)]
    agreement = _score_groups(results, AGREEMENT, _score_agreement)
    time = _score_groups(results, TIME, _score_time)
    # the tasks of one family are adjusted by Holm and pooled together; the user's prompts are a family of one
    pooled, ruler_pooled, _ = (_pool_tasks(answers, family) for family in (RETRIEVAL, ruler.TASKS, (PROMPTS,)))
    quality: dict[tuple[int, str], Row] = {
        (length, variant.name): {"variant": variant.name, "length": length, "budget": variant.budget}
        | {"attention_speedup": variant.attention_speedup(length)}
        for length, variant in product(plan.lengths, compared[1:])
    }
    for row in (*pooled, *agreement, *time):
        if joined := quality.get((row["length"], row["variant"])):
            joined |= {name: row[name] for name in QUALITY if name in row}
    return {
        "model": plan.model,
        "architecture": str(loaded.geometry),
        "device": str(identify(loaded.weights.device)),
        "random_weights": loaded.random,
        "versions": collect_versions(),
        "plan": json.loads(json.dumps(asdict(plan), default=str)),
        "variants": [{"name": variant.name, "identity": variant.identity} for variant in compared],
        "quality": list(quality.values()),
        "answers": [{name: value for name, value in row.items() if name != "changes"} for row in answers],
        "ruler_pooled": ruler_pooled,
        "agreement": agreement,
        "time": time,
        "prompts": results,  # as measured: all other numbers follow from these
    }


def group_rows(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Return the rows that have equal values of these fields, by the values, in the order in which they first come."""
    return group_by_key((tuple(row[name] for name in names), row) for row in rows)


def _score_groups(results: Sequence[Row], task: str, score: Callable[[list[Row], list[Row]], Row]) -> list[Row]:
    """Make a row for each length and variant of a task's results; the user's prompts are in one row.

    results: by rising length, dense first. score: is given a variant's results and dense's, one list for dense itself.
    """
    rows = [row for row in results if row["task"] == task]
    if task == PROMPTS:
        rows = [row | {"length": max(row["length"] for row in rows)} for row in rows]
    groups, scored = group_rows(rows, "length", "variant"), []
    for (length, variant), values in groups.items():
        reasons: Counter[str] = Counter()  # the most layers of one prompt that ran dense for each reason
        for value in values:
            reasons |= Counter(value["dense"])
        run = {"density": fmean(value["density"] for value in values), "dense": dict(reasons)}
        dense = groups.get((length, DENSE), [])  # dense is not compared with itself in agreement: it has no rows there
        scored.append({"task": task, "variant": variant, "length": length} | score(values, dense) | run)
    return scored


def _score_answers(values: list[Row], dense: list[Row]) -> Row:
    """Compare a variant's scores with dense's, and the right answers' log-likelihoods in nats per token.

    changes: of each prompt, what the variant has more than dense, of both.
    """
    own, other = (
        np.array([(value["score"], value["log_likelihood"] / value["answer_tokens"]) for value in rows]).T
        for rows in (values, dense)
    )
    changes, dense_score = (own - other).tolist(), float(other[0].mean())
    row: Row = {"score": float(own[0].mean()), "dense_score": dense_score, "log_likelihood": float(own[1].mean())}
    row |= {"prompts": len(values), "changes": changes, "judged": True}
    if values[0]["task"] in ruler.TASKS:
        row["judged"] = RULER_JUDGED[0] <= dense_score <= RULER_JUDGED[1]
    return row if values is dense else row | compare_paired(changes[:1]) | {"nats": compare_paired(changes[1:])}


def _pool_tasks(answers: Sequence[Row], tasks: Iterable[str]) -> list[Row]:
    """Adjust the p-values of judged tasks in their rows; return what they say together, by length and variant."""
    rows = [row for row in answers if row["task"] in tasks and row["variant"] != DENSE]
    pooled = []
    for (length, variant), of_tasks in group_rows(rows, "length", "variant").items():
        judged = [row for row in of_tasks if row["judged"]]
        for row, p in zip(judged, adjust_holm([row["p"] for row in judged]), strict=True):
            row["p_holm"] = p
        names = {"judged": judged, "listed": [row for row in of_tasks if not row["judged"]]}
        names["worse"] = [row for row in judged if row["p_holm"] < 1 - CONFIDENCE and row["difference"] < 0]
        pool: Row = {name: [row["task"] for row in group] for name, group in names.items()}
        pool |= {"variant": variant, "length": length, "nats": compare_paired([row["changes"][1] for row in of_tasks])}
        if judged:
            pool |= {name: fmean(row[name] for row in judged) for name in ("score", "dense_score")}
            pool |= compare_paired([row["changes"][0] for row in judged])
        pooled.append(pool)
    return pooled


def _score_agreement(values: list[Row], dense: list[Row]) -> Row:
    def average(kl: float, same: float, count: float) -> Row:
        return {"kl": max(0.0, kl / count), "top1": same / count}  # rounding can leave a KL below 0

    columns = (zip(*(value[name] for value in values), strict=True) for name in ("kl", "same", "positions"))
    sums = [list(map(math.fsum, column)) for column in columns]
    parts = list(map(average, *sums))
    return average(*map(sum, sums)) | {"worst_kl": max(part["kl"] for part in parts), "parts": parts}


def _score_time(values: list[Row], dense: list[Row]) -> Row:
    (value,), (dense_value,) = values, dense
    measured = {name: value[name] for name in ("seconds", "fastest", "slowest", "peak_bytes")}
    return measured | {"speedup": dense_value["seconds"] / value["seconds"]}
