"""Paired comparisons: what the same prompts say of two models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
RESAMPLES = 10_000


def compare_paired(groups: Sequence[Sequence[float]]) -> dict[str, float]:
    """Compare two models by their differences on the same prompts.

    A prompt counts once, however many questions it asks: these are no independent draws.

    Args:
        groups: for each task, the other model's value less dense's for each prompt, at least one.

    Returns:
        difference: the mean of the tasks' means. low, high: the percentile interval of the paired bootstrap that holds
        it with `CONFIDENCE`, the prompts of each task drawn anew. p: how often chance alone gives a difference so far
        from 0, by McNemar's exact test where prompts are won or lost whole, and by the bootstrap elsewhere.
    """
    rng = np.random.default_rng(0)
    means = np.mean([rng.choice(values, (RESAMPLES, len(values))).mean(1) for values in groups], axis=0)
    low, high = np.quantile(means, (0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2))
    changes = [value for values in groups for value in values if value]
    if {*changes} <= {-1.0, 1.0}:
        p = stats.binomtest(changes.count(1.0), len(changes)).pvalue if changes else 1.0
    else:
        p = min(1.0, 2 * (min((means <= 0).sum(), (means >= 0).sum()) + 1) / (RESAMPLES + 1))
    difference = np.mean([np.mean(values) for values in groups])
    return {"difference": float(difference), "low": float(low), "high": float(high), "p": float(p)}


def adjust_holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for their number (S. Holm, Scandinavian Journal of Statistics 6, 1979), in their order."""
    adjusted, least = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = least
    return adjusted
