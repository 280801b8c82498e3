"""Scores of an evaluation, paired with dense, and their intervals."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import chain, product
from typing import Any

from scipy import optimize, stats

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

CONFIDENCE = 0.95
DENSE_CAN = 0.5  # a task of which the dense model answers less says nothing about what a variant loses
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
    text = {task: _score_groups(results, [task], score) for task, score in SCORES.items()}
    asked = (*RETRIEVAL, PROMPTS)
    pooled = [_score_groups(results, RETRIEVAL, _score_recall), text["agreement"], text["greedy"], text["time"]]
    return {
        "model": plan.model,
        "architecture": str(loaded.geometry),
        "device": str(identify(loaded.weights.device)),
        "random_weights": loaded.random,
        "versions": collect_versions(),
        "plan": json.loads(json.dumps(asdict(plan), default=str)),
        "variants": [{"name": variant.name, "identity": variant.identity} for variant in compared],
        "quality": _join_scores(plan, compared, list(chain(*pooled))),
        "retrieval": [{"task": task} | row for task in asked for row in _score_groups(results, [task], _score_recall)],
        "heat": _map_depths(plan, compared, [row for row in results if row["task"] == "needles"]),
        **text,
        "prompts": results,  # as measured: all other numbers follow from these
    }


def _score_groups(
    results: Sequence[Row], tasks: Sequence[str], score: Callable[[list[Row], list[Row]], Row]
) -> list[Row]:
    """Make a row for each length and variant of the results of some tasks; the user's prompts are in one row.

    results: by rising length, dense first. score: is given a variant's results and dense's, one list for dense itself.
    """
    rows = [row for row in results if row["task"] in tasks]
    longest = max((row["length"] for row in rows), default=0)
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((longest if PROMPTS in tasks else row["length"], row["variant"]), []).append(row)
    scored = []
    for (length, variant), values in groups.items():
        reasons: Counter[str] = Counter()  # the most layers of one prompt that ran dense for each reason
        for value in values:
            reasons |= Counter(value["dense"])
        run = {"density": _mean([value["density"] for value in values]), "dense": dict(reasons)}
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
        "accuracy": _mean(correct),
        "dense_found": sum(dense_correct),
        "dense_accuracy": _mean(dense_correct),
        "dense_can": _mean(dense_correct) >= DENSE_CAN,
        "kept": sum(map(min, dense_correct, correct)),
        "log_likelihood": _mean(list(chain(*(value["log_likelihood"] for value in values)))),
        **({} if values is dense else compare_answers(dense_by_prompt, by_prompt)),
    }


def _score_perplexity(values: list[Row], dense: list[Row]) -> Row:
    tokens = sum(value["tokens"] for value in values)
    own, dense_own = (math.exp(math.fsum(value["nll"] for value in rows) / tokens) for rows in (values, dense))
    return {"tokens": tokens, "perplexity": own, "dense_perplexity": dense_own}


def _score_agreement(values: list[Row], dense: list[Row]) -> Row:
    kl, same, counts = (
        list(map(math.fsum, zip(*(value[name] for value in values), strict=True)))
        for name in ("kl", "same", "positions")
    )

    def average(kl: float, same: float, count: float) -> Row:
        return {"kl": max(0.0, kl / count), "top1": same / count}  # rounding can leave a KL below 0

    return {
        "positions": sum(counts),
        **average(sum(kl), sum(same), sum(counts)),
        "parts": list(map(average, kl, same, counts)),
    }


def _score_greedy(values: list[Row], dense: list[Row]) -> Row:
    """Count the greedy answers that are dense's, and their first tokens that are; dense's own row shows rounding."""
    prefixes, lengths = [value["prefix"] for value in values], [len(value["tokens"]) for value in dense]
    same = _mean([prefix == length for prefix, length in zip(prefixes, lengths, strict=True)])
    return {"answers": len(values), "same": same, "prefix": _mean(prefixes), "answer_tokens": _mean(lengths)}


def _score_time(values: list[Row], dense: list[Row]) -> Row:
    (value,), (dense_value,) = values, dense
    measured = {name: value[name] for name in ("seconds", "fastest", "slowest", "peak_bytes")}
    return measured | {"dense_seconds": dense_value["seconds"], "speedup": dense_value["seconds"] / value["seconds"]}


SCORES = {
    "perplexity": _score_perplexity,
    "agreement": _score_agreement,
    "greedy": _score_greedy,
    "time": _score_time,
}


def _join_scores(plan: EvaluationPlan, compared: Sequence[Variant], scores: Sequence[Row]) -> list[Row]:
    """Join what was measured of each variant at a length: all retrieval tasks together, and the text's results."""
    joined: dict[tuple[str, int], Row] = {}
    for length, variant in product(plan.lengths, compared[1:]):
        row = {"variant": variant.name, "length": length, "budget": variant.budget}
        joined[variant.name, length] = row | {"attention_speedup": variant.attention_speedup(length)}
    for score in scores:
        if row := joined.get((score["variant"], score["length"]), {}):
            row |= {name: value for name, value in score.items() if name not in OF_ONE_TASK}
    return list(joined.values())


def _map_depths(plan: EvaluationPlan, compared: Sequence[Variant], needles: Sequence[Row]) -> list[Row]:
    """Return for each variant the share of needles found: accuracy[depth][length], at most `BUCKETS` depths."""
    parts = min(BUCKETS, plan.needles)
    correct: dict[tuple[str, int, int], list[bool]] = {}
    for row in needles:
        for number, right in zip(row["asked"], row["correct"], strict=True):
            correct.setdefault((row["variant"], number * parts // plan.needles, row["length"]), []).append(right)
    return [
        {
            "variant": variant.name,
            "lengths": list(plan.lengths),
            "depths": [part / parts for part in range(parts)],
            "accuracy": [[_mean(correct[variant.name, part, at]) for at in plan.lengths] for part in range(parts)],
        }
        for variant in (compared if correct else ())
    ]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def compare_answers(dense: Sequence[Sequence[bool]], other: Sequence[Sequence[bool]]) -> Row:
    """Compare two models by the answers that they have right.

    Args:
        dense, other: for each prompt, whether each answer is right; at least one answer in all.

    Returns:
        lost, gained: answers that only dense, or only the other has right. difference: the other's share of right
        answers less dense's. low, high: an interval that holds the true difference with `CONFIDENCE`; the answers of
        one prompt are no independent draws, so it is widened by the design effect of the prompts. p: McNemar's exact
        test, which takes all answers as independent: how often chance alone gives losses and gains so uneven.
        p_by_prompt: the same where chance swaps the two models' answers to a whole prompt, never to a single question;
        it equals `p` if each prompt asks once.
    """
    changes = [[after - before for before, after in zip(*pair, strict=True)] for pair in zip(dense, other, strict=True)]
    lost, gained = (sum(prompt.count(sign) for prompt in changes) for sign in (-1, 1))
    nets, sizes = list(map(sum, changes)), list(map(len, changes))
    effect = design_effect(lost, gained, nets, sizes)
    low, high = score_interval(lost / effect, gained / effect, sum(sizes) / effect)
    return {
        "lost": lost,
        "gained": gained,
        "difference": sum(nets) / sum(sizes),
        "low": low,
        "high": high,
        "p": float(stats.binomtest(lost, lost + gained).pvalue) if lost + gained else 1.0,
        "p_by_prompt": sign_flip_test(nets),
    }


def score_interval(lost: float, gained: float, pairs: float) -> tuple[float, float]:
    """Return the score interval for the difference of two paired shares, gained minus lost.

    It holds the differences that the score test does not reject (T. Tango, "Equivalence test and confidence interval
    for the difference in proportions for the paired-sample design", Statistics in Medicine 17, 1998).

    Args:
        lost, gained: pairs of which only the first, or only the second is right.
        pairs: all of them, above 0.
    """
    quantile = float(stats.norm.ppf(0.5 + CONFIDENCE / 2))
    estimate = (gained - lost) / pairs

    def score(difference: float) -> float:
        """Compute the test's statistic: standard deviations between the estimate and a supposed difference."""
        linear = -gained - lost + (2 * pairs - gained + lost) * difference
        product = -lost * difference * (1 - difference)
        lost_share = (math.sqrt(max(0.0, linear**2 - 8 * pairs * product)) - linear) / (4 * pairs)
        variance = (2 * lost_share + difference * (1 - difference)) / pairs
        return (estimate - difference) / math.sqrt(max(variance, 1e-18))

    def limit(end: float) -> float:
        target = math.copysign(quantile, -end)
        return float(optimize.brentq(lambda difference: score(difference) - target, estimate, end))

    return (-1.0 if estimate == -1 else limit(-1.0)), (1.0 if estimate == 1 else limit(1.0))


def design_effect(lost: int, gained: int, nets: Sequence[int], sizes: Sequence[int]) -> float:
    """Return how many times less answers of whole prompts say of a difference than independent ones, at least 1.

    The variance of the difference between prompts over that of independent answers (J. N. K. Rao and A. J. Scott, "A
    simple method for the analysis of clustered binary data", Biometrics 48, 1992).

    Args:
        lost, gained: answers that only one of the models has right.
        nets: of each prompt, the gained answers less the lost ones.
        sizes: of each prompt, its answers.
    """
    answers, prompts = sum(sizes), len(sizes)
    mean = sum(nets) / answers
    independent = (lost + gained - answers * mean**2) / max(1, answers - 1)
    if prompts < 2 or independent <= 0:
        return 1.0
    between = sum((net - mean * size) ** 2 for net, size in zip(nets, sizes, strict=True)) / (prompts - 1)
    return max(1.0, between * prompts / (independent * answers))


def sign_flip_test(nets: Sequence[int]) -> float:
    """Return the share of all choices of signs that make a sum of whole numbers at least as far from 0 as it is."""
    ways = Counter([0])  # how many choices of signs lead to a sum
    for net in filter(None, nets):
        shifted = (Counter({total + step: count for total, count in ways.items()}) for step in (net, -net))
        ways = sum(shifted, Counter())
    return sum(count for total, count in ways.items() if abs(total) >= abs(sum(nets))) / sum(ways.values())
