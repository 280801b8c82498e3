"""Bounds with a stated confidence for prompts that will come, from a few prompts, as plain functions.

Texts count as independent draws from what will come, which is as true as they are typical. The claim about errors is
that every layer's mean is within its limit, at every length. A layer whose bound is over its limit is tried with less
of its budget. All attempts at all layers and lengths share the error probability (Bonferroni), so the claim holds for
all that is accepted, together.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from calibrate.recipe import Recipe
from s2o_runtime.fields import group_by_key

CONFIDENCE = 0.95  # of the means' claim, of each share, and of the interval for retrieval
SPEND_FRACTIONS = (1.0, 0.85, 0.7, 0.6, 0.5, 0.35)  # of its budget that a layer is tried with, until its bound holds
USUAL_SPREAD, USUAL_WEIGHT = 0.2, 1  # of prompts of one kind, over their mean; as good as so many values
OWN_VARIANCE = 8  # texts of a kind: with fewer of any, all kinds count with one variance, relative to their means


def compute_attempt_confidence(fraction: float, recipe: Recipe, layers: int) -> float:
    """Return the confidence of a bound at one attempt, with one of `SPEND_FRACTIONS`, at a layer and length.

    recipe: says how many lengths are certified.
    layers: of the model, with full attention.
    """
    # half of the risk is the first attempt's, because most layers need no other
    part = 0.5 if fraction == SPEND_FRACTIONS[0] else 0.5 / (len(SPEND_FRACTIONS) - 1)
    return 1 - part * (1 - CONFIDENCE) / (layers * len(recipe.all_lengths))


def bound_mean(values: Sequence[float], kinds: Sequence[str], confidence: float) -> float:
    """Compute an upper bound for the mean over prompts, kinds of text in equal parts.

    It is the mean of the kinds' means, and above it as many standard errors as Student's distribution has: prompts of
    one kind vary little, so the difference between kinds is no uncertainty of their mean. The degrees of freedom are
    those of F. E. Satterthwaite, "An approximate distribution of estimates of variance components" (1946); kinds with
    few texts share one relative variance and all degrees of freedom. It has the stated confidence where the values of a
    kind are about normal, and for lognormal ones nearly; where a few of a hundred texts have ten times the error of
    all others, it fails often (docs/results/coverage-bounds.txt counts).

    Args:
        values: of each text.
        kinds: the kind of each text. If one kind has a single text, all texts count as of one kind.
        confidence: the probability that the bound is not below the mean.

    Returns:
        The bound; infinity if a single value, which bounds nothing, is above 0, or a value is inf or NaN.
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.inf if any(values) else 0.0
    mean, error, degrees = _compute_mean_and_error(values, kinds)
    return mean + _quantile(degrees, confidence) * error


def compute_mean_of_kinds(values: Sequence[float], kinds: Sequence[str]) -> float:
    """Return the mean of the kinds' means."""
    return statistics.fmean(map(statistics.fmean, _group_values(values, kinds, least=1)))


def bound_mean_below(values: Sequence[float], kinds: Sequence[str], confidence: float) -> float:
    """Compute the lower bound that `bound_mean` is the upper one of: at least 0, which it is for fewer than two values.

    It is infinity where a value is inf or NaN, which no limit allows.
    """
    if not all(map(math.isfinite, values)):
        return math.inf
    if len(values) < 2:
        return 0.0
    mean, error, degrees = _compute_mean_and_error(values, kinds)
    return max(0.0, mean - _quantile(degrees, confidence) * error)


def estimate_mean_bound(values: Sequence[float], kinds: Sequence[str], count: int, confidence: float) -> float:
    """Estimate `bound_mean` for `count` values like these few.

    The variance of a few values tells little about that of many. So their variance, relative to the mean of their kind,
    counts beside a usual one, which is that of `USUAL_WEIGHT` values.

    values: at least one, all at least 0. kinds: as for `bound_mean`; of so many values they are in equal parts, and one
    if there are not two for each. count: at least 2.
    """
    groups = _group_values(values, kinds if count >= 2 * len(set(kinds)) else [""] * len(values), least=1)
    means = [statistics.fmean(group) for group in groups]
    squares = sum((value / mean - 1) ** 2 for group, mean in zip(groups, means, strict=True) if mean for value in group)
    degrees = len(values) - len(groups)
    deviation = math.sqrt((squares + USUAL_WEIGHT * USUAL_SPREAD**2) / (degrees + USUAL_WEIGHT))
    return statistics.fmean(means) * (1 + _quantile(count - len(groups), confidence) * deviation / math.sqrt(count))


def _compute_mean_and_error(values: Sequence[float], kinds: Sequence[str]) -> tuple[float, float, float]:
    """Return the mean of the kinds' means, its standard error, and the degrees of freedom of the latter."""
    groups = _group_values(values, kinds, least=2)
    means, variances = [statistics.fmean(group) for group in groups], [statistics.variance(group) for group in groups]
    freedoms = [len(group) - 1 for group in groups]
    mean, degrees = statistics.fmean(means), float(sum(freedoms))
    if min(freedoms) < OWN_VARIANCE - 1 and all(mean**2 for mean in means):  # the square of a tiny one is 0
        squares = sum(f * variance / m**2 for f, variance, m in zip(freedoms, variances, means, strict=True))
        variances = [max(variance, squares / degrees * m**2) for variance, m in zip(variances, means, strict=True)]
    parts = [variance / (len(groups) ** 2 * len(group)) for variance, group in zip(variances, groups, strict=True)]
    if min(freedoms) >= OWN_VARIANCE - 1:
        spread = sum(part**2 / freedom for part, freedom in zip(parts, freedoms, strict=True))
        degrees = sum(parts) ** 2 / spread if spread else 1.0
    return mean, math.sqrt(sum(parts)), degrees


def _group_values(values: Sequence[float], kinds: Sequence[str], least: int) -> list[list[float]]:
    """Group the values by kind; all together if one kind has fewer than `least`."""
    groups = group_by_key(zip(kinds, values, strict=True))
    return list(groups.values()) if min(map(len, groups.values())) >= least else [list(values)]


def _quantile(degrees: float, probability: float) -> float:
    """Return a quantile of Student's distribution."""
    from scipy.special import stdtrit  # a second to import, which the command line does not have

    return float(stdtrit(degrees, probability))


def bound_share(count: int, above: int, risk: float) -> float:
    """Bound from below the share of texts that keep within a limit, if `above` of `count` do not.

    It is the exact one-sided bound of C. J. Clopper and E. S. Pearson (1934). risk: that the true share is smaller.
    """
    from scipy.special import betaincinv

    return float(betaincinv(count - above, above + 1, risk)) if above < count else 0.0


def compute_excess_probability(above: int, fresh: int, share: float) -> float:
    """Return the probability that `above` or more of `fresh` new texts are over a limit that a share of texts keeps."""
    from scipy.stats import binom

    return float(binom.sf(above - 1, fresh, 1 - share))


def compute_share_interval(successes: int, trials: int, confidence: float) -> tuple[float, float]:
    """Compute the two-sided interval of C. J. Clopper and E. S. Pearson (1934) for a share; (0, 1) without trials."""
    tail = (1 - confidence) / 2
    return bound_share(trials, trials - successes, tail), 1 - bound_share(trials, successes, tail)
