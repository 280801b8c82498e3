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


SHAPES = {  # how errors of one kind are drawn, their mean, and how often of 1000 a bound of 97.5% holds at least
    "normal": (lambda rng, n: 1 + 0.2 * rng.standard_normal(n), 1.0, 960),
    "lognormal, spread 0.2": (lambda rng, n: rng.lognormal(-0.02, 0.2, n), 1.0, 950),
    "lognormal, spread 0.5": (lambda rng, n: rng.lognormal(-0.125, 0.5, n), 1.0, 925),
    "lognormal, spread 1": (lambda rng, n: rng.lognormal(-0.5, 1.0, n), 1.0, 830),
    "5 of 100 ten times as large": (lambda rng, n: np.where(rng.random(n) < 0.05, 10.0, 1.0), 1.45, 700),
    "3 of 100 thirty times as large": (lambda rng, n: np.where(rng.random(n) < 0.03, 30.0, 1.0), 1.87, 510),
    "Pareto, 2": (lambda rng, n: 1 + rng.pareto(2.0, n), 2.0, 750),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_how_often_the_mean_is_below_its_bound(shape):
    """Of 32 prompts in four kinds that differ widely: as often as it says where errors of a kind are about normal."""
    draw, mean, least = SHAPES[shape]
    rng, kinds, scales = np.random.default_rng(0), [*"abcd"] * 8, np.array([0.5, 1.0, 1.5, 5.0] * 8)
    draws = [draw(rng, 32) * scales for _ in range(1000)]
    held = sum(mean_bound(values, kinds, 0.975) >= 2.0 * mean for values in draws)
    assert least <= held <= 990
    lower = sum(mean_lower_bound(values, kinds, 0.975) <= 2.0 * mean for values in draws)
    assert lower >= 955


def test_the_bound_is_students():
    values = [1.0, 2.0, 4.0, 8.0, 9.0, 3.0]
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)  # two-sided
    one_kind = ["text"] * 6
    assert mean_bound(values, one_kind, 0.975) == pytest.approx(expected.high)
    assert mean_lower_bound(values, one_kind, 0.975) == pytest.approx(expected.low)
    # two kinds: half the difference of one kind and the other's negative, by Welch's test
    two_kinds = ["code", "code", "code", "prose", "prose", "prose"]
    welch = stats.ttest_ind(values[:3], [-value for value in values[3:]], equal_var=False).confidence_interval(0.95)
    assert mean_bound(values, two_kinds, 0.975) == pytest.approx(welch.high / 2)
    assert mean_bound(values, [*"aaaaab"], 0.975) == pytest.approx(expected.high)  # a kind with one prompt


def test_kinds_count_alike_and_what_differs_between_them_is_no_doubt():
    values, kinds = [1.0, 1.1, 0.9, 9.0, 9.9], ["code"] * 3 + ["chat"] * 2
    assert 5.2 < mean_bound(values, kinds, 0.9) < mean_bound(values, ["text"] * 5, 0.9)
    assert mean_lower_bound(values, kinds, 0.9) > mean_lower_bound(values, ["text"] * 5, 0.9)
    assert mean_bound([1.0, 1.0, 5.0, 5.0], ["code", "code", "chat", "chat"], 0.975) == 3.0


def test_one_value_bounds_nothing():
    assert mean_bound([0.0], ["code"], 0.95) == mean_bound([], [], 0.95) == mean_bound([0.0] * 3, [*"aab"], 0.95) == 0.0
    assert mean_bound([3.0], ["code"], 0.95) == math.inf
    assert mean_lower_bound([3.0], ["code"], 0.95) == mean_lower_bound([], [], 0.95) == 0.0
    assert mean_lower_bound([0.0, 0.0, 9.0], ["code"] * 3, 0.95) == 0.0  # no mean error is negative


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
