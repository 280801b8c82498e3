"""Paired comparisons: what the same questions say of two models."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import optimize, stats

CONFIDENCE = 0.95
RESAMPLES = 10_000


def bootstrap(groups: Sequence[Sequence[float]]) -> dict[str, float]:
    """Compare two models by their differences on the same prompts, by the paired bootstrap.

    Args:
        groups: for each task, the other model's value less dense's for each prompt, at least one.

    Returns:
        difference: the mean of the tasks' means. low, high: the percentile interval that holds it with `CONFIDENCE`
        when the prompts of each task are drawn anew. p: how often chance alone gives a difference so far from 0.
    """
    rng = np.random.default_rng(0)
    means = np.mean([rng.choice(values, (RESAMPLES, len(values))).mean(1) for values in groups], axis=0)
    low, high = np.quantile(means, (0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2))
    rarer = min((means <= 0).sum(), (means >= 0).sum())
    return {
        "difference": float(np.mean([np.mean(values) for values in groups])),
        "low": float(low),
        "high": float(high),
        "p": min(1.0, 2 * float(rarer + 1) / (RESAMPLES + 1)),
    }


def run_mcnemar(lost: int, gained: int) -> float:
    """Return the p-value of McNemar's exact test for answers that only one of two models has right."""
    return float(stats.binomtest(lost, lost + gained).pvalue) if lost + gained else 1.0


def adjust_holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for their number (S. Holm, Scandinavian Journal of Statistics 6, 1979), in their order."""
    adjusted, least = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = least
    return adjusted


def compare_answers(dense: Sequence[Sequence[bool]], other: Sequence[Sequence[bool]]) -> dict[str, Any]:
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
        "p": run_mcnemar(lost, gained),
        "p_by_prompt": sign_flip_test(nets),
    }


def score_interval(lost: float, gained: float, pairs: float) -> tuple[float, float]:
    """Return the score interval for the difference of two paired shares, gained minus lost.

    It holds the differences that the score test does not reject (T. Tango, "Equivalence test and confidence interval
    for the difference in proportions for the paired-sample design", Statistics in Medicine 17, 1998). lost, gained:
    pairs of which only the first, or only the second is right. pairs: all of them, above 0.
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
    simple method for the analysis of clustered binary data", Biometrics 48, 1992). lost, gained: answers that only one
    of the models has right. nets, sizes: of each prompt, the gained answers less the lost ones, and its answers.
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
