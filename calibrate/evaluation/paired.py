"""Dense and patched answers to the same questions: how many more are right, and what that says of other questions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from scipy import optimize, stats

CONFIDENCE = 0.95


def compared(dense: Sequence[Sequence[bool]], other: Sequence[Sequence[bool]]) -> dict[str, Any]:
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
    pairs = [list(zip(*answers, strict=True)) for answers in zip(dense, other, strict=True)]
    lost = sum(first and not second for prompt in pairs for first, second in prompt)
    gained = sum(second and not first for prompt in pairs for first, second in prompt)
    nets = [sum(second - first for first, second in prompt) for prompt in pairs]
    sizes = [len(prompt) for prompt in pairs]
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
    """The score interval for the difference of two paired shares, gained minus lost.

    It holds the differences that the score test does not reject (T. Tango, "Equivalence test and confidence interval
    for the difference in proportions for the paired-sample design", Statistics in Medicine 17, 1998).

    Args:
        lost, gained: pairs of which only the first, or only the second is right.
        pairs: all of them, above 0.
    """
    quantile = float(stats.norm.ppf(0.5 + CONFIDENCE / 2))
    estimate = (gained - lost) / pairs

    def score(difference: float) -> float:
        """The test's statistic: standard deviations between the estimate and a supposed difference."""
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
    """How many times less the answers of whole prompts say of a difference than as many independent ones, at least 1.

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
    """The share of all choices of signs that make the sum of some whole numbers at least as far from 0 as it is."""
    ways = {0: 1}  # how many choices of signs lead to a sum
    for net in filter(None, nets):
        following: dict[int, int] = {}
        for total, count in ways.items():
            for step in (net, -net):
                following[total + step] = following.get(total + step, 0) + count
        ways = following
    return sum(count for total, count in ways.items() if abs(total) >= abs(sum(nets))) / sum(ways.values())
