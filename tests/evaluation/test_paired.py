"""Paired comparison: against a published example and simulation."""

import numpy as np
import pytest

from calibrate.evaluation.paired import adjust_holm, compare_paired


def test_the_test_of_prompts_that_are_won_or_lost_whole_is_that_of_a_published_example():
    """Airway hyper-responsiveness before and after a transplantation, in Fagerland, Lydersen and Laake, "Recommended
    tests and confidence intervals for paired binomial proportions", Statistics in Medicine 33, 2014: McNemar's exact
    conditional test 0.0703."""
    row = compare_paired([[-1.0] * 7 + [1.0] + [0.0] * 13])
    assert row["difference"] == pytest.approx(-6 / 21)
    assert row["low"] < row["difference"] < row["high"]
    assert row["p"] == pytest.approx(0.0703, abs=5e-5)
    assert compare_paired([[0.0] * 9]) == {"difference": 0.0, "low": 0.0, "high": 0.0, "p": 1.0}


def test_p_values_are_adjusted_by_holm():
    assert adjust_holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert adjust_holm([0.9, 0.8]) == [1.0, 1.0]


def test_the_interval_holds_the_true_difference_as_often_as_it_says(monkeypatch):
    """Of tasks of unlike spread, one with 8 answers of a prompt that share its luck; and p is small for at most as many
    pairs without a difference."""
    monkeypatch.setattr("calibrate.evaluation.paired.RESAMPLES", 400)
    rng = np.random.default_rng(1)
    held = small = 0
    for _ in range(400):
        lost = rng.binomial(8, rng.choice((0.0, 0.2), 100)) / -8  # 0.1 on average
        row = compare_paired([rng.choice((-1, 0, 1), 100, p=(0.12, 0.8, 0.08)), lost])
        held += row["low"] <= -0.07 <= row["high"]
        small += compare_paired([rng.choice((-0.5, 0, 0.5), 100, p=(0.1, 0.8, 0.1))])["p"] < 0.05
    assert held >= 0.92 * 400
    assert small <= 0.08 * 400
