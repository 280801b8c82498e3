"""The bounds of the certificate against simulation: how often they hold is counted, not assumed."""

import math
import random

import numpy as np
import pytest
from scipy import stats

from calibrate.proof.bounds import (
    bound_rank,
    exceedance_probability,
    mean_bound,
    mean_lower_bound,
    next_bound,
    share_interval,
)

ROUNDS = 2000


@pytest.mark.parametrize("count", [5, 19])
def test_the_mean_is_below_its_bound_as_often_as_it_says(count):
    """Of 200 rounds at 90% 180 are expected; a deviation is 4. The lower bound is careful."""
    rng = random.Random(count)
    mean = math.exp(0.5)
    draws = [[rng.lognormvariate(0, 1) for _ in range(count)] for _ in range(200)]
    assert 168 <= sum(mean_bound(values, 0.9) >= mean for values in draws) <= 192
    assert sum(mean_lower_bound(values, 0.9) <= mean for values in draws) >= 170


@pytest.mark.parametrize("confidence", [0.95, 0.975, 1 - 0.025 / 3])
def test_the_bound_is_the_quantile_of_the_pivot(confidence):
    values = [1.0, 2.0, 4.0, 8.0, 9.0, 3.0]
    logs, count = np.log(values), len(values)
    rng = np.random.default_rng(0)
    w_squared = rng.chisquare(count - 1, 300_000) / (count - 1)
    normal = rng.standard_normal(300_000)
    spread = logs.std(ddof=1)
    pivot = logs.mean() + spread * normal / np.sqrt(w_squared * count) + spread**2 / (2 * w_squared)
    assert math.log(mean_bound(values, confidence)) == pytest.approx(np.quantile(pivot, confidence), rel=0.02)


def test_the_lower_bound_is_the_formula():
    values = [1.0, 2.0, 4.0, 8.0]
    logs = np.log(values)
    variance = logs.var(ddof=1)
    below = stats.t.ppf(0.95, 3) * math.sqrt(variance / 4 + variance**2 / 6)
    assert mean_lower_bound(values, 0.95) == pytest.approx(math.exp(logs.mean() + variance / 2 - below))


def test_zeros_raise_no_bound_and_one_value_bounds_nothing():
    assert mean_bound([0.0, 0.0], 0.95) == 0.0
    assert mean_bound([3.0], 0.95) == mean_bound([3.0, 0.0], 0.95) == math.inf
    assert mean_bound([1.0, 2.0, 0.0], 0.95) == mean_bound([1.0, 2.0], 0.95)
    assert mean_lower_bound([3.0], 0.95) == mean_lower_bound([], 0.95) == mean_lower_bound([0.0] * 5, 0.95) == 0.0
    assert mean_lower_bound([1.0, 2.0, 0.0, 0.0], 0.95) == pytest.approx(mean_lower_bound([1.0, 2.0], 0.95) / 2)
    assert mean_bound([2.0] * 4, 0.95) == pytest.approx(2.0)


def test_a_bound_for_the_next_value():
    assert next_bound(range(19), 0.9) == next_bound(range(18, -1, -1), 0.9)
    bound = next_bound([float(value) for value in range(19)], 0.9)
    assert (bound.value, bound.probability) == (17.0, pytest.approx(0.9))
    few = next_bound([3.0, 1.0, 2.0], 0.9)
    assert (few.value, few.probability) == (3.0, 0.75)  # as much as three can give
    assert [bound_rank(count, 0.9) for count in (1, 9, 18, 19, 29)] == [1, 1, 1, 2, 3]


def test_the_next_value_is_below_its_bound_as_often_as_it_says():
    """Whatever the distribution; 1800 of 2000 are expected, a deviation is 13."""
    rng = random.Random(1)
    held = 0
    for _ in range(ROUNDS):
        *values, following = (rng.paretovariate(0.5) for _ in range(20))
        held += following <= next_bound(values, 0.9).value
    assert 1760 <= held <= 1840


@pytest.mark.parametrize(("rank", "count", "fresh"), [(2, 19, 19), (1, 9, 16)])
def test_how_many_exceed_a_bound_is_beta_binomial(rank, count, fresh):
    for above in range(fresh + 1):
        expected = stats.betabinom.sf(above - 1, fresh, rank, count + 1 - rank)
        assert exceedance_probability(above, fresh, rank, count) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("kept", "found"), [(0, 4), (4, 4), (7, 8), (60, 64)])
def test_the_interval_of_a_share(kept, found):
    exact = stats.binomtest(kept, found).proportion_ci(0.95, method="exact")
    assert share_interval(kept, found, 0.95) == pytest.approx((exact.low, exact.high))
