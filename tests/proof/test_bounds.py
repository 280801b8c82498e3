"""The bounds of the certificate against simulation: how often they hold is counted, not assumed."""

import math
from pathlib import Path

import pytest
from scipy import stats

from calibrate.proof.bounds import (
    CONFIDENCE,
    SPEND_FRACTIONS,
    bound_mean,
    bound_mean_below,
    bound_share,
    compute_attempt_confidence,
    compute_excess_probability,
    compute_share_interval,
)
from calibrate.recipe import Budget, Recipe
from scripts.study.coverage import SHAPES, cover_answers, covered, grouped

# how often of 50 the means of all cells are within their bounds, at least
LEAST = {"lognormal, spread 0.2": 45, "lognormal, spread 1": 30, "3 of 100 thirty times as large": 20, "Pareto, 2": 40}


@pytest.mark.parametrize("shape", LEAST)
def test_how_often_means_are_within_their_bounds_at_all_layers_and_lengths_at_once(shape):
    """docs/results/coverage-bounds.txt has more rounds: means fail on heavy tails."""
    assert 50 * covered(SHAPES[shape], 32, 50) >= LEAST[shape]


def test_how_often_means_hold_where_few_texts_err_much_and_where_prompts_of_one_novel_count_once():
    """With two texts of each of ten kinds they seldom do."""
    assert covered(SHAPES["1 of 100 a hundred times as large"], 20, 30, kinds=10, layers=28) < 0.5
    by_prompt, by_group = grouped(300)
    assert by_prompt < 0.93 < 0.95 < by_group


@pytest.mark.parametrize("spread", ["0.2", "0.5"])
def test_how_often_the_answers_claim_holds_by_default(spread):
    """With two texts of each of ten kinds; docs/results/coverage-answers.txt has more rounds and heavier tails."""
    each, every = cover_answers(SHAPES[f"lognormal, spread {spread}"], 20, 150)
    assert each >= 0.95
    assert every >= 0.92


def test_the_bound_is_students():
    values = [1.0, 2.0, 4.0, 8.0, 9.0, 3.0]
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)  # two-sided
    one_kind = ["text"] * 6
    assert bound_mean(values, one_kind, 0.975) == pytest.approx(expected.high)
    assert bound_mean_below(values, one_kind, 0.975) == pytest.approx(expected.low)
    # two kinds: half the difference of one kind and the other's negative, by Welch's test
    more = [*values, 2.0, 5.0, 6.0, 7.0, 1.5, 2.5, 6.5, 8.0, 3.0, 4.5]
    two_kinds = ["code"] * 8 + ["prose"] * 8
    welch = stats.ttest_ind(more[:8], [-value for value in more[8:]], equal_var=False).confidence_interval(0.95)
    assert bound_mean(more, two_kinds, 0.975) == pytest.approx(welch.high / 2)
    assert bound_mean(values, [*"aaaaab"], 0.975) == pytest.approx(expected.high)  # a kind with one prompt


def test_kinds_count_alike_and_what_differs_between_them_is_no_doubt():
    values, kinds = [1.0, 1.1, 0.9, 9.0, 9.9], ["code"] * 3 + ["chat"] * 2
    assert 5.2 < bound_mean(values, kinds, 0.9) < bound_mean(values, ["text"] * 5, 0.9)
    assert bound_mean_below(values, kinds, 0.9) > bound_mean_below(values, ["text"] * 5, 0.9)
    assert bound_mean([1.0, 1.0, 5.0, 5.0], ["code", "code", "chat", "chat"], 0.975) == 3.0


def test_one_value_bounds_nothing_and_what_is_no_number_is_over_every_limit():
    assert bound_mean([0.0], ["code"], 0.95) == bound_mean([], [], 0.95) == bound_mean([0.0] * 3, [*"aab"], 0.95) == 0.0
    assert bound_mean([3.0], ["code"], 0.95) == math.inf
    assert 0.0 < bound_mean([1e-300, 2e-300, 3e-300], ["code"] * 3, 0.95) < 1e-299  # the squares are 0
    assert bound_mean_below([3.0], ["code"], 0.95) == bound_mean_below([], [], 0.95) == 0.0
    assert bound_mean_below([0.0, 0.0, 9.0], ["code"] * 3, 0.95) == 0.0  # no mean error is negative
    assert bound_mean([1.0, 1.0, math.nan], [*"aaa"], 0.95) == bound_mean([math.inf] * 3, [*"aaa"], 0.95) == math.inf


def test_kinds_of_few_texts_share_their_relative_variance():
    values, kinds = [1.0, 1.2, 2.0, 2.4, 3.0, 3.6], [*"aabbcc"]
    relative = 0.2**2 / 2 / 1.1**2  # of each kind, with one degree of freedom
    error = math.sqrt(sum((relative * mean**2) / (9 * 2) for mean in (1.1, 2.2, 3.3)))
    assert bound_mean(values, kinds, 0.975) == pytest.approx(2.2 + stats.t.ppf(0.975, 3) * error)
    assert bound_mean([*values[:-1], 4.0], kinds, 0.975) > bound_mean(values, kinds, 0.975) + 0.1
    shared = 0.4**2 / 2 / 2.2**2 / 2  # of two kinds, of which one does not vary
    expected = 1.6 + stats.t.ppf(0.975, 2) * math.sqrt((shared + 0.4**2 / 2) / (4 * 2))
    assert bound_mean([1.0, 1.0, 2.0, 2.4], [*"aabb"], 0.975) == pytest.approx(expected)


def test_the_looks_at_all_layers_and_lengths_share_the_error_probability():
    recipe = Recipe("m", Budget("rel_mse", 1e-3), (1024, 2048), Path("p"), check_lengths=(1536,))
    risks = [1 - compute_attempt_confidence(step, recipe, 6) for step in SPEND_FRACTIONS]
    assert 3 * 6 * sum(risks) == pytest.approx(1 - CONFIDENCE)
    assert risks[0] == pytest.approx(sum(risks[1:]))


@pytest.mark.parametrize(("kept", "found"), [(0, 4), (4, 4), (7, 8), (60, 64)])
def test_shares_are_bounded_and_refuted_by_the_exact_binomial_test(kept, found):
    exact = stats.binomtest(kept, found).proportion_ci(0.95, method="exact")
    assert compute_share_interval(kept, found, 0.95) == pytest.approx((exact.low, exact.high))
    one_sided = stats.binomtest(kept, found, alternative="greater").proportion_ci(0.95, method="exact")
    assert bound_share(found, found - kept, 0.05) == pytest.approx(one_sided.low)
    lost = stats.binomtest(found - kept, found, 0.1, alternative="greater")
    assert compute_excess_probability(found - kept, found, 0.9) == pytest.approx(lost.pvalue)
