"""What a few prompts say about the ones that will come: bounds with a stated confidence, as plain functions.

Prompts are taken for independent draws from the text that will come, which is as true as the prompts are typical.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from s2o_runtime.config import LayerConfig
from s2o_runtime.profile.record import NextPrompt

CONFIDENCE = 0.95  # of each bound for a layer's mean error, and of the interval for retrieval
FLOOR = 0.1  # of its limit; an error below it counts as this much, so that rounding does not pass for spread
RUNGS = (0.8, 0.65, 0.5, 0.35)  # shares of its budget that a layer over its limit is tried with
PIVOT_POINTS = 1000  # of the integral over a sample's spread
USUAL_SPREAD, USUAL_WEIGHT = 0.35, 1  # of logarithms of errors between prompts; as good as so many values


def mean_bound(values: Sequence[float], confidence: float) -> float:
    """An upper bound for the mean of the distribution that positive values come from, taken for lognormal.

    It is a quantile of the generalised pivot of the mean's logarithm, `m + s Z / (W sqrt(n)) + s^2 / (2 W^2)`, with m
    and s of the values' logarithms, Z standard normal and W^2 chi-squared with n - 1 degrees of freedom over n - 1
    (K. Krishnamoorthy and T. Mathew, "Inferences on the means of lognormal distributions using generalized p-values
    and generalized confidence intervals", 2003). The shorter formula of Cox (`mean_lower_bound`) would hold less often
    than it says: with 19 values and s = 1 in 92 of 100 cases instead of 95.

    Values that are exactly zero are left out, which can only raise the bound: the mean of the others is larger.

    Args:
        values: At least 0 and finite.
        confidence: The probability that the bound is not below the mean.

    Returns:
        The bound; 0 if all values are 0, and infinity if fewer than two are above 0: one value bounds nothing.
    """
    logs = [math.log(value) for value in values if value > 0]
    if len(logs) < 2:
        return math.inf if logs else 0.0
    return _pivot_quantile(len(logs), statistics.fmean(logs), statistics.stdev(logs), confidence)


def expected_mean_bound(values: Sequence[float], count: int, confidence: float) -> float:
    """About where `mean_bound` will come out for `count` values like these few.

    How much a few values vary says little of how much many will. So their variance counts beside a usual one, which is
    that of `USUAL_WEIGHT` values.

    Args:
        values: At least one, all above 0.
        count: At least 2.
        confidence: Of the bound.
    """
    variance = statistics.variance(math.log(value) for value in values) if len(values) > 1 else 0.0
    degrees = len(values) - 1
    deviation = math.sqrt((degrees * variance + USUAL_WEIGHT * USUAL_SPREAD**2) / (degrees + USUAL_WEIGHT))
    return statistics.fmean(values) * _pivot_quantile(count, -(deviation**2) / 2, deviation, confidence)


def mean_lower_bound(values: Sequence[float], confidence: float) -> float:
    """A lower bound for the mean, which holds at least as often as it says; 0 if fewer than two values are above 0.

    The modified Cox method, `exp(m + s^2/2 - t sqrt(s^2/n + s^4/(2(n-1))))` with t a quantile of Student's distribution
    with n - 1 degrees of freedom (U. Olsson, "Confidence intervals for the mean of a log-normal distribution", Journal
    of Statistics Education 13, 2005). Values of 0 count by their share.
    """
    from scipy.special import stdtrit

    logs = [math.log(value) for value in values if value > 0]
    if len(logs) < 2:
        return 0.0
    count, variance = len(logs), statistics.variance(logs)
    spread = math.sqrt(variance / count + variance**2 / (2 * (count - 1)))
    quantile = float(stdtrit(count - 1, confidence))
    return count / len(values) * math.exp(statistics.fmean(logs) + variance / 2 - quantile * spread)


def _pivot_quantile(count: int, middle: float, deviation: float, probability: float) -> float:
    """The exponential of a quantile of the generalised pivot of `count` logarithms with this mean and standard
    deviation: an integral over W, and a bisection."""
    import numpy as np
    from scipy.special import gammaincinv, ndtr  # a second to import, which the command line does not have

    if deviation < 1e-12:
        return math.exp(middle)
    shares = (np.arange(PIVOT_POINTS) + 0.5) / PIVOT_POINTS
    w_squared = 2 * gammaincinv((count - 1) / 2, shares) / (count - 1)
    centres = middle + deviation**2 / (2 * w_squared)
    scales = np.sqrt(w_squared * count) / deviation
    low, high = middle - 40 * deviation, float(centres.max()) + 40 * deviation / math.sqrt(float(w_squared.min()))
    while high - low > 1e-9 * max(1.0, abs(high)):
        half = (low + high) / 2
        if float(ndtr((half - centres) * scales).mean()) < probability:
            low = half
        else:
            high = half
    return math.exp(high) if high < 700 else math.inf


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

    def log_beta(a: float, b: float) -> float:
        return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)

    rest = count + 1 - rank
    return sum(
        math.comb(fresh, number) * math.exp(log_beta(number + rank, fresh - number + rest) - log_beta(rank, rest))
        for number in range(above, fresh + 1)
    )


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


def look_bound(errors: Sequence[float], share: float, limit: float, config: LayerConfig) -> float:
    """The bound of one look for the mean of errors, of all rows or some.

    Logarithms of errors that are next to nothing say nothing about those that matter, and would blow up the bound. So
    errors below `FLOOR` times the limit count as that much, which can only raise their mean.

    Args:
        errors: Of each prompt, in the limit's unit.
        share: Of the layer's budget, by which the look is known (`look_confidence`).
        limit: The error the layer may have.
        config: What it ran. A dense layer's rounding is bounded as it is.
    """
    floor = 0.0 if config.is_dense else FLOOR * limit
    return mean_bound([max(error, floor) for error in errors], look_confidence(share))
