"""Paired comparison: against published numbers, brute force and simulation."""

import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.evaluation.paired import compare_answers, design_effect, score_interval, sign_flip_test

COUNTS = st.integers(0, 300)


def pairs_of(both, lost, gained, neither):
    """One answer a prompt of two models, by how many pairs there are of each kind."""
    dense = [[True]] * (both + lost) + [[False]] * (gained + neither)
    other = [[True]] * both + [[False]] * lost + [[True]] * gained + [[False]] * neither
    return dense, other


def test_test_and_interval_are_those_of_a_published_example():
    """Airway hyper-responsiveness before and after a transplantation, in Fagerland, Lydersen and Laake, "Recommended
    tests and confidence intervals for paired binomial proportions", Statistics in Medicine 33, 2014: McNemar's exact
    conditional test 0.0703, Tango's interval -0.517 to -0.026."""
    row = compare_answers(*pairs_of(1, 7, 1, 12))
    assert (row["lost"], row["gained"]) == (7, 1)
    assert row["difference"] == pytest.approx(-6 / 21)
    assert (row["low"], row["high"]) == pytest.approx((-0.517, -0.026), abs=5e-4)
    assert row["p"] == pytest.approx(0.0703, abs=5e-5)
    assert row["p_by_prompt"] == pytest.approx(row["p"])


def test_models_that_never_differ_have_an_interval_and_no_evidence():
    row = compare_answers(*pairs_of(60, 0, 0, 40))
    assert (row["difference"], row["p"], row["p_by_prompt"]) == (0, 1, 1)
    square = 1.959964**2
    assert (row["low"], row["high"]) == pytest.approx((-square / (100 + square), square / (100 + square)), rel=1e-5)


@given(COUNTS, COUNTS, COUNTS)
def test_an_interval_holds_its_estimate_and_turns_with_the_models(lost, gained, equal):
    pairs = max(1, lost + gained + equal)
    low, high = score_interval(lost, gained, pairs)
    assert -1 <= low <= (gained - lost) / pairs <= high <= 1
    assert score_interval(gained, lost, pairs) == pytest.approx((-high, -low), abs=1e-6)


@given(st.lists(st.integers(-5, 5), max_size=9))
def test_signs_are_flipped_in_every_way(nets):
    sums = [sum(map(int.__mul__, nets, signs)) for signs in product((1, -1), repeat=len(nets))]
    assert sign_flip_test(nets) == pytest.approx(sum(abs(total) >= abs(sum(nets)) for total in sums) / len(sums))


def test_answers_that_fail_together_count_as_one():
    """Answers that are lost eight at a time say as much as one answer for each prompt."""
    dense = [[True] * 8] * 40
    other = [[False] * 8] * 4 + [[True] * 8] * 36
    grouped, single = compare_answers(dense, other), compare_answers(*pairs_of(36, 4, 0, 0))
    assert design_effect(32, 0, [-8] * 4 + [0] * 36, [8] * 40) == pytest.approx(8, rel=0.03)
    assert (grouped["low"], grouped["high"]) == pytest.approx((single["low"], single["high"]), abs=2e-3)
    assert grouped["p"] < 1e-6
    assert grouped["p_by_prompt"] == single["p"] == 2 * 0.5**4


def test_the_interval_holds_the_true_difference_as_often_as_it_says():
    """Answers of one prompt share its luck: in 95% of evaluations the interval still holds the true difference."""
    rng = random.Random(1)
    held = 0
    for _ in range(400):
        dense, other = [], []
        for _ in range(40):
            luck = rng.choice((0.0, 0.2))  # of a prompt: how often an answer is lost; on average 0.1
            dense.append([rng.random() < 0.8 for _ in range(8)])
            other.append([right and rng.random() >= luck for right in dense[-1]])
        row = compare_answers(dense, other)
        held += row["low"] <= -0.08 <= row["high"]
    assert held >= 0.92 * 400
