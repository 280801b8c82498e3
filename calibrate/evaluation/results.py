"""The summary of an evaluation, as JSON: every number of the report and of the pictures is in it.

It is made from the journal alone, so a run that was interrupted ends with the same summary as one that was not. The
names of its fields are read from results that were kept (`docs/results/`), so they do not follow renamings in the code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain, product
from typing import Any

from calibrate.evaluation import paired
from calibrate.evaluation.plan import DENSE, PROMPTS, RETRIEVAL, EvaluationPlan
from calibrate.evaluation.score import BUCKETS
from calibrate.evaluation.tasks import cases
from calibrate.evaluation.user_prompts import digest
from calibrate.evaluation.variants import Variant
from calibrate.journal import Journal
from calibrate.model.models import LoadedModel
from calibrate.prompts.prompt import Prompt
from calibrate.versions import versions
from s2o_runtime.devices import identify
from s2o_runtime.identity import split_fingerprint

DENSE_CAN = 0.5  # a task of which the dense model answers less says nothing about what a variant loses

# fields of a row that say nothing of several tasks together
OF_ONE_TASK = ("parts", "density", "dense", "seconds", "fastest", "slowest", "peak_bytes", "dense_seconds")

Row = dict[str, Any]
Summary = dict[str, Any]


def open_journal(plan: EvaluationPlan, loaded: LoadedModel) -> Journal:
    """The results so far, of the same model, device, software and prompts.

    Raises:
        InputError: If an earlier run in the same folder differs in one of these; the message names it.
        ResourceError: If another run has them open.
    """
    device = identify(loaded.weights.device)
    identity = {
        "model": {"name": loaded.name, **split_fingerprint(loaded.fingerprint)},
        "device": {"kind": device.kind, "name": device.name, "sm_count": device.sm_count},
        "versions": {name: text for name, text in versions().items() if name != "optuna"},
        "tokenizer": plan.tokenizer,
        "seed": plan.seed,
        "needles": plan.needles,
        "prompts": None if plan.prompts is None else digest(plan.prompts),
    }
    return Journal.open(plan.journal_path, identity, option="--out-dir")


def summary(
    plan: EvaluationPlan,
    loaded: LoadedModel,
    compared: Sequence[Variant],
    user_prompts: Sequence[Prompt],
    journal: Journal,
) -> Summary:
    """The outcome of an evaluation, all of it JSON.

    Args:
        plan: what was measured.
        loaded: the model that was measured.
        compared: the variants, dense first.
        user_prompts: the prompts of the user's own file.
        journal: the results of all of the plan's prompts.
    """
    results = [
        {"task": task, "variant": variant.name, "length": case.length, "sample": case.sample} | value
        for case in cases(plan, user_prompts)
        for task in case.tasks
        for variant in compared
        if (value := journal.get(task, case.key(variant.identity)))
    ]
    text = {name: _compare(results, [name], compare) for name, compare in _OF_TEXT.items()}
    pooled = [*_compare(results, RETRIEVAL, _recall), *text["agreement"], *text["greedy"], *text["time"]]
    return {
        "model": plan.model,
        "architecture": str(loaded.geometry),
        "device": str(identify(loaded.weights.device)),
        "random_weights": loaded.random,
        "versions": versions(),
        "plan": plan.record(),
        "variants": [{"name": variant.name, "identity": variant.identity} for variant in compared],
        "quality": _quality(plan, compared, pooled),
        "retrieval": [
            {"task": task} | row for task in (*RETRIEVAL, PROMPTS) for row in _compare(results, [task], _recall)
        ],
        "heat": _heat(plan, compared, results),
        **text,
        "prompts": results,  # as measured: all other numbers follow from these
    }


def _compare(results: Sequence[Row], tasks: Sequence[str], compare: Callable[[list[Row], list[Row]], Row]) -> list[Row]:
    """Make a row for each length and variant that has results in some tasks; the user's prompts are in one row.

    Args:
        results: a row for each prompt, task and variant, by rising length and dense first.
        tasks: whose results are taken together.
        compare: makes a row of a variant's results and dense's; they are the same list for dense.
    """
    rows = [row for row in results if row["task"] in tasks]
    longest = max((row["length"] for row in rows), default=0)
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((longest if PROMPTS in tasks else row["length"], row["variant"]), []).append(row)
    return [
        # dense is not compared with itself in agreement, so it may have no rows
        {"variant": variant, "length": length} | compare(values, groups.get((length, DENSE), [])) | _run_stats(values)
        for (length, variant), values in groups.items()
    ]


def _recall(values: list[Row], dense: list[Row]) -> Row:
    """A variant's right answers beside dense's.

    "found" is how many answers have all their tokens right, "dense_found" how many of dense's do, and "kept" how many
    are right in both. The other fields of a variant are those of `paired.compared`.
    """
    by_prompt, dense_by_prompt = ([value["correct"] for value in some] for some in (values, dense))
    correct, dense_correct = list(chain(*by_prompt)), list(chain(*dense_by_prompt))
    return {
        "asked": len(correct),
        "found": sum(correct),
        "accuracy": _mean(correct),
        "dense_found": sum(dense_correct),
        "dense_accuracy": _mean(dense_correct),
        "dense_can": _mean(dense_correct) >= DENSE_CAN,
        "kept": sum(first and second for first, second in zip(dense_correct, correct, strict=True)),
        "log_likelihood": _mean([number for value in values for number in value["log_likelihood"]]),
        **({} if values is dense else paired.compared(dense_by_prompt, by_prompt)),
    }


def _quality(plan: EvaluationPlan, compared: Sequence[Variant], rows: Sequence[Row]) -> list[Row]:
    """Join what was measured of each variant at a length: all retrieval tasks together, and the text's results."""
    return [
        {"variant": variant.name, "length": length, "budget": variant.budget}
        | {"attention_speedup": variant.attention_speedup(length)}
        | {
            name: value
            for row in rows
            if (row["variant"], row["length"]) == (variant.name, length)
            for name, value in row.items()
            if name not in OF_ONE_TASK
        }
        for length, variant in product(plan.lengths, compared[1:])
    ]


def _heat(plan: EvaluationPlan, compared: Sequence[Variant], results: Sequence[Row]) -> list[Row]:
    """For each variant the share of needles found: accuracy[depth][length].

    A depth is where one of at most `BUCKETS` equal parts of the text before the questions begins.
    """
    parts = min(BUCKETS, plan.needles)
    correct: dict[tuple[str, int, int], list[bool]] = {}
    for row in results:
        if row["task"] == "needles":
            for number, right in zip(row["asked"], row["correct"], strict=True):
                correct.setdefault((row["variant"], number * parts // plan.needles, row["length"]), []).append(right)
    return [
        {
            "variant": variant.name,
            "lengths": list(plan.lengths),
            "depths": [part / parts for part in range(parts)],
            "accuracy": [
                [_mean(correct[variant.name, part, length]) for length in plan.lengths] for part in range(parts)
            ],
        }
        for variant in (compared if correct else ())
    ]


def _perplexity(values: list[Row], dense: list[Row]) -> Row:
    tokens = sum(value["tokens"] for value in values)
    perplexity, dense_perplexity = (
        math.exp(math.fsum(value["nll"] for value in some) / tokens) for some in (values, dense)
    )
    return {"tokens": tokens, "perplexity": perplexity, "dense_perplexity": dense_perplexity}


def _agreement(values: list[Row], dense: list[Row]) -> Row:
    kl, same, counts = (
        [math.fsum(part) for part in zip(*(value[name] for value in values), strict=True)]
        for name in ("kl", "same", "positions")
    )
    return {
        "positions": sum(counts),
        "kl": max(0.0, sum(kl) / sum(counts)),  # rounding can leave less than nothing
        "top1": sum(same) / sum(counts),
        "parts": [
            {"kl": max(0.0, part / count), "top1": equal / count}
            for part, equal, count in zip(kl, same, counts, strict=True)
        ],
    }


def _greedy(values: list[Row], dense: list[Row]) -> Row:
    """How many greedy answers are dense's, and how many of their first tokens; dense's own row shows rounding."""
    prefixes, whole = [value["prefix"] for value in values], [len(value["tokens"]) for value in dense]
    return {
        "answers": len(values),
        "same": _mean([prefix == tokens for prefix, tokens in zip(prefixes, whole, strict=True)]),
        "prefix": _mean(prefixes),
        "answer_tokens": _mean(whole),
    }


def _time(values: list[Row], dense: list[Row]) -> Row:
    (value,), (dense_value,) = values, dense
    measured = {name: value[name] for name in ("seconds", "fastest", "slowest", "peak_bytes")}
    return measured | {"dense_seconds": dense_value["seconds"], "speedup": dense_value["seconds"] / value["seconds"]}


_OF_TEXT = {"perplexity": _perplexity, "agreement": _agreement, "greedy": _greedy, "time": _time}


def _run_stats(values: Sequence[Row]) -> Row:
    """The mean density, and for each reason the most layers that ran dense for it in one prompt."""
    reasons: dict[str, int] = {}
    for value in values:
        for reason, layers in value["dense"].items():
            reasons[reason] = max(layers, reasons.get(reason, 0))
    return {"density": _mean([value["density"] for value in values]), "dense": reasons}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
