"""What a few prompts say about the ones that will come: bounds with a stated confidence, as plain functions.

Prompts are taken for independent draws from the text that will come, which is as true as the prompts are typical.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from s2o_runtime.profile.record import NextPrompt

CONFIDENCE = 0.95  # of each bound for a layer's mean error, and of the interval for retrieval
RUNGS = (0.85, 0.7, 0.5, 0.35)  # shares of its budget that a layer over its limit is tried with
USUAL_SPREAD, USUAL_WEIGHT = 0.2, 1  # of prompts of one kind, over their mean; as good as so many values


def mean_bound(values: Sequence[float], kinds: Sequence[str], confidence: float) -> float:
    """An upper bound for the mean over prompts, kinds of text in equal parts.

    It is the mean of the kinds' means and so many standard errors above it as Student's distribution says: prompts of
    one kind vary little, so what differs between kinds is no doubt about their mean. The degrees of freedom are those
    of F. E. Satterthwaite, "An approximate distribution of estimates of variance components" (1946). It holds as often
    as it says where the values of a kind are about normal, and for lognormal ones nearly; where a few of a hundred
    prompts have ten times the error of all others, it fails often (tests/proof/test_bounds.py counts).

    Args:
        values: Of each prompt; finite.
        kinds: The kind of text of each prompt. If one kind has a single prompt, all prompts count as of one kind.
        confidence: The probability that the bound is not below the mean.

    Returns:
        The bound; infinity if a single value, which bounds nothing, is above 0.
    """
    if len(values) < 2:
        return math.inf if any(values) else 0.0
    mean, error, degrees = _mean_and_error(values, kinds)
    return mean + _quantile(degrees, confidence) * error


def mean_lower_bound(values: Sequence[float], kinds: Sequence[str], confidence: float) -> float:
    """A lower bound as `mean_bound` is an upper one; at least 0, and 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean, error, degrees = _mean_and_error(values, kinds)
    return max(0.0, mean - _quantile(degrees, confidence) * error)


def expected_mean_bound(values: Sequence[float], kinds: Sequence[str], count: int, confidence: float) -> float:
    """About where `mean_bound` will come out for `count` values like these few.

    How much a few values vary says little of how much many will. So their variance, relative to the mean of their kind,
    counts beside a usual one, which is that of `USUAL_WEIGHT` values.

    Args:
        values: At least one, all at least 0.
        kinds: As for `mean_bound`.
        count: At least 2; the kinds are in equal parts, and of one kind if there are not two for each.
        confidence: Of the bound.
    """
    groups = _groups(values, kinds if count >= 2 * len(set(kinds)) else [""] * len(values), least=1)
    means = [statistics.fmean(group) for group in groups]
    squares = sum((value / mean - 1) ** 2 for group, mean in zip(groups, means, strict=True) if mean for value in group)
    degrees = len(values) - len(groups)
    deviation = math.sqrt((squares + USUAL_WEIGHT * USUAL_SPREAD**2) / (degrees + USUAL_WEIGHT))
    return statistics.fmean(means) * (1 + _quantile(count - len(groups), confidence) * deviation / math.sqrt(count))


def _mean_and_error(values: Sequence[float], kinds: Sequence[str]) -> tuple[float, float, float]:
    """The mean of the kinds' means, its standard error, and the degrees of freedom of the latter."""
    groups = _groups(values, kinds, least=2)
    parts = [statistics.variance(group) / (len(groups) ** 2 * len(group)) for group in groups]
    freedom = sum(part**2 / (len(group) - 1) for part, group in zip(parts, groups, strict=True))
    mean, variance = statistics.fmean(map(statistics.fmean, groups)), sum(parts)
    return mean, math.sqrt(variance), variance**2 / freedom if freedom else 1.0


def _groups(values: Sequence[float], kinds: Sequence[str], least: int) -> list[list[float]]:
    """The values of each kind; all together if one kind has fewer than `least`."""
    groups: dict[str, list[float]] = {}
    for value, kind in zip(values, kinds, strict=True):
        groups.setdefault(kind, []).append(value)
    return list(groups.values()) if min(map(len, groups.values())) >= least else [list(values)]


def _quantile(degrees: float, probability: float) -> float:
    """Of Student's distribution."""
    from scipy.special import stdtrit  # a second to import, which the command line does not have

    return float(stdtrit(degrees, probability))


def next_bound(values: Sequence[float], probability: float) -> NextPrompt:
    """The smallest of the values that bounds the next one with at least this probability, whatever they are drawn from.

    Of n + 1 values in random order the last one is above the k-th largest of the others with a probability of at most
    k / (n + 1) (S. S. Wilks, "Determination of sample sizes for setting tolerance limits", 1941). With 19 values the
    second largest gives 90%.

    Args:
        values: At least one.
        probability: What is asked for.

    Returns:
        The bound and its probability; where so few values cannot give what is asked for, the largest and its n/(n+1).
    """
    rank = bound_rank(len(values), probability)
    return NextPrompt(value=sorted(values, reverse=True)[rank - 1], probability=1 - rank / (len(values) + 1))


def bound_rank(count: int, probability: float) -> int:
    """Which of `count` values bounds the next one with at least this probability: 1 is the largest."""
    return max(1, math.floor((1 - probability) * (count + 1) + 1e-9))


def exceedance_probability(above: int, fresh: int, rank: int, count: int) -> float:
    """How likely `above` or more of `fresh` new values exceed the `rank`-th largest of `count` earlier ones.

    If all are drawn alike, the number that exceeds is beta-binomial with the parameters `rank` and
    `count + 1 - rank`, whatever they are drawn from (E. J. Gumbel and H. von Schelling, "The distribution of the
    number of exceedances", 1950).
    """
    from scipy.stats import betabinom

    return float(betabinom.sf(above - 1, fresh, rank, count + 1 - rank))


def share_interval(successes: int, trials: int, confidence: float) -> tuple[float, float]:
    """The two-sided interval of C. J. Clopper and E. S. Pearson (1934) for a share; (0, 1) without trials."""
    from scipy.special import betaincinv

    tail = (1 - confidence) / 2
    low = float(betaincinv(successes, trials - successes + 1, tail)) if successes else 0.0
    high = float(betaincinv(successes + 1, trials - successes, 1 - tail)) if successes < trials else 1.0
    return low, high


@dataclass(frozen=True)
class Look:
    """One look at a layer: the share of the budget it ran with, and the bound for its mean error."""

    share: float
    bound: float


def look_confidence(share: float) -> float:
    """How certain the bound of one look is: half of the error probability is the first look's, the rungs share half.

    A dense layer has no error but rounding, so the look at it takes no share.
    """
    risk = (1 - CONFIDENCE) / 2
    return 1 - (risk if share == 1.0 else risk / len(RUNGS))


def look_bound(errors: Sequence[float], kinds: Sequence[str], share: float) -> float:
    """The bound of one look for the mean of errors, of all rows or some.

    Args:
        errors: Of each prompt.
        kinds: The kind of text of each prompt.
        share: Of the layer's budget, by which the look is known (`look_confidence`).
    """
    return mean_bound(errors, kinds, look_confidence(share))
