"""Errors that layers may have for their parts of a budget of answers, whose KL is a known sum of these errors here."""

import logging
import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from calibrate.curves.curves import RankingConfig, Shape, dense_power
from calibrate.prompts.prompt import Prompt
from calibrate.proof import weigh
from calibrate.proof.answers import PromptAnswers
from calibrate.recipe import MAX_REL_MSE, Budget, Recipe
from calibrate.search.allocate import Allocation, allocate, make_dense_point
from s2o_runtime.config import TileConfig
from s2o_runtime.errors import ConfigError
from support.candidates import LENGTHS, candidate, curve_of, error_of
from support.executors import CPU, GPU, pretended

BUDGET = 1e-3
RECIPE = Recipe("m", Budget("kl", BUDGET), (512,), Path("p"), segments=(256,), num_certify=0, tails=(False,)).validate()
PROMPTS = [Prompt(torch.arange(512), domain=domain) for domain in "abcab"]
FACTORS = 0.5, 1.0, 1.5, 1.0, 1.0  # of the mean KL, by prompt


def answers(kl):
    return PromptAnswers((kl,) * 8, (kl,) * 8, 0, 0)


def answer(monkeypatch, kl_of, seen=None):
    """Answers whose mean KL is that of a source of configurations, or of None for the noise."""

    def measure(prover, prompts, sources, noise=False):
        variants = [*sources, *[None] * noise]
        if seen is not None:
            seen.append((prompts, variants))
        return [
            [answers(kl_of(source) * factor) for factor, _ in zip(FACTORS, prompts, strict=False)]
            for source in variants
        ]

    monkeypatch.setattr(weigh, "measure_answers", measure)


falling = st.lists(st.floats(0.01, 3.0), min_size=2, max_size=2)


@given(falling, st.floats(1e-9, 1e3), st.lists(st.floats(1e-10, 1e4), min_size=2, max_size=2))
@example([3.0, 3.0], 1.0, [0.043, 0.046])  # half-way between two measurements
def test_a_budget_is_read_off_a_line_through_what_was_measured(slopes, largest, aims):
    """In logarithms; it is exact at each measurement, and more may be spent for a larger KL."""
    measured = [largest]
    for (more, less), slope in zip(pairwise(weigh.SHARES), slopes, strict=True):
        measured.append(measured[-1] * (less / more) ** slope)
    for share, kl in zip(weigh.SHARES, measured, strict=True):
        assert weigh.interpolate_budget(weigh.SHARES, measured, kl) == pytest.approx(share)
    small, large = (weigh.interpolate_budget(weigh.SHARES, measured, aim) for aim in sorted(aims))
    assert small <= large * (1 + 1e-9)
    for end, slope, times in ((0, slopes[0], 100.0), (-1, slopes[1], 0.01)):  # beyond both ends
        expected = weigh.SHARES[end] * times ** (1 / min(max(slope, weigh.SLOPES[0]), weigh.SLOPES[1]))
        assert weigh.interpolate_budget(weigh.SHARES, measured, times * measured[end]) == pytest.approx(expected)


errors = st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3)
costs = st.lists(st.floats(0.0, 10.0), min_size=3, max_size=3)


@given(st.lists(st.tuples(costs, errors), min_size=1, max_size=4))
def test_weights_make_the_mean_over_layers_the_predicted_kl(layers):
    """But for a head that moves no answer, which counts with a millionth of the mean one."""
    weights = [weigh.weigh_heads(of_layer, len(layers)) for of_layer, _ in layers]
    heads = [Allocation(tuple(make_dense_point(256)._replace(mse=mse) for mse in mses)) for _, mses in layers]
    mean = statistics.fmean(w.layer * w.mean(of_layer) for w, of_layer in zip(weights, heads, strict=True))
    kl = sum(cost * mse for of_layer, mses in layers for cost, mse in zip(of_layer, mses, strict=True))
    assert kl - 1e-9 <= mean <= kl + 2e-6 * sum(sum(of_layer) for of_layer, _ in layers) + 1e-9
    assert all(statistics.fmean(w.heads) == pytest.approx(1.0) for w in weights)


REACH = 10.0, 3.0, 1.0, 1e-4  # what an error of each layer does to the answers' KL; the last one's reaches none
UNDERRATED = 50.0  # times as much as the backward pass predicts


def test_a_budget_goes_to_layers_whose_errors_reach_no_answer(monkeypatch):
    """Measured, the answers spend what they may, for less time than with the same error in every layer."""
    tile, slopes = TileConfig(), (1e-4, 3e-4)
    curves = [{(RankingConfig(256), Shape.from_tile(tile)): curve_of(slopes)}] * 4
    seen = []

    def kl_of(source):
        errors = [error_of(source.layer_config(layer, 512), slopes) for layer in range(4)]
        return UNDERRATED * sum(2 * reach * error for reach, error in zip(REACH, errors, strict=True))

    answer(monkeypatch, kl_of, seen)
    sensitivity = tuple((reach, reach) for reach in REACH)
    budgets = weigh.make_answer_budgets(None, {512: PROMPTS}, {512: curves}, {512: [tile]}, sensitivity, RECIPE)[512]
    ((_, sources),) = seen
    assert len(sources) == len(weigh.SHARES)
    assert {source.layer_config(0, 512).last_rows for source in sources} == {RECIPE.count_last_rows(512)}
    plain = {RankingConfig(256): curve_of(slopes)}
    spent = [allocate(plain, budget.mse, budget.constraints, budget.weights) for budget in budgets]
    kl = UNDERRATED * sum(2 * reach * of_layer.mse for reach, of_layer in zip(REACH, spent, strict=True))
    assert kl == pytest.approx(weigh.AIM * BUDGET, rel=0.2)  # thresholds come in steps
    limits = [budget.limit for budget in budgets]
    assert limits == sorted(limits)
    assert limits[-1] == MAX_REL_MSE  # which no head may exceed, although nothing reads its errors
    assert MAX_REL_MSE / 2 < max(point.mse for point in spent[-1].points) <= MAX_REL_MSE
    assert all(of_layer.mse <= limit for of_layer, limit in zip(spent, limits, strict=True))  # the power is 1
    equal = allocate(plain, kl / UNDERRATED / sum(2 * reach for reach in REACH))
    assert statistics.fmean(of_layer.cost for of_layer in spent) < 0.97 * equal.cost
    # behind the knee no answer reads a single row
    assert [budget.constraints.worst_rows for budget in budgets] == [RECIPE.worst_rows] * 3 + [None]


def noisy(monkeypatch, by_length, budget, device=GPU, default=2e-3, name=None):
    """The budget after two dense kernels differed by so much at each length."""
    count = weigh.PROMPTS if budget == default else weigh.NOISE_PROMPTS
    unit = statistics.fmean(FACTORS[:count])  # of which the mean is taken
    seen, prompts = [], {1024: [], **{length: [Prompt(torch.arange(length))] * 5 for length in by_length}}

    def measure(prover, prompts, sources, noise):
        seen.append((prompts[0].length, len(prompts), sources, noise))
        return [[answers(by_length[prompts[0].length] / unit * factor) for factor in FACTORS[: len(prompts)]]]

    monkeypatch.setattr(weigh, "measure_answers", measure)
    prover, lengths = SimpleNamespace(executor=pretended(None, device)), tuple(by_length)
    out = Path(name or f"kl-{budget:g}.safetensors")
    recipe = replace(RECIPE, budget=Budget("kl", budget), lengths=lengths, out=out)
    try:
        checked = weigh.check_noise(prover, prompts, recipe, default)
        assert checked.out == Path(name or f"{checked.budget}.safetensors")
        return checked.budget.value
    finally:
        asked = sorted({lengths[0], lengths[-1]})[: len(seen)]
        assert seen == [(length, count, [], True) for length in asked]
        assert bool(seen) == (device == GPU)


def test_a_budget_below_the_noise_is_refused_where_it_was_named_and_raised_where_not(monkeypatch, caplog):
    raised = [noisy(monkeypatch, {512: noise}, 2e-3) for noise in (0.5e-3, 1e-3, 3e-3)]
    assert raised == pytest.approx([2e-3, 2e-3, 6e-3])
    assert "differ by 3.0e-03 nats: the budget is kl-0.006, the profile kl-0.006.safetensors" in caplog.text
    # at the longest length they differ most
    assert noisy(monkeypatch, {512: 3e-4, 768: 9e-3, 2048: 1.6e-3}, 2e-3) == 3.2e-3
    assert (
        noisy(monkeypatch, {512: 3.14e-3}, 2e-3, name="mine.safetensors") == 6.3e-3
    )  # two digits, as in a file's name
    assert noisy(monkeypatch, {512: 1e-3}, 1.5e-3) == 1.5e-3  # named, and above it
    for noises, length in (({512: 1e-3}, 512), ({512: 1e-4, 2048: 1e-3}, 2048)):
        message = rf"budget_kl 0.0005 is below .* noise, 1.0e-03 .* at {length} .* at least 2.0e-03"
        with pytest.raises(ConfigError, match=message):
            noisy(monkeypatch, noises, 5e-4)
    with caplog.at_level(logging.INFO, "calibrate"):
        assert noisy(monkeypatch, {512: 1e-3}, 1e-9, CPU) == 1e-9
    assert "not known on a CPU" in caplog.text


@pytest.mark.parametrize("over", [0.2, 0.7, 0.97, 1.3, 20.0])
def test_all_layers_spend_more_or_less_until_the_answers_are_where_they_may_be(over, monkeypatch):
    """They share it anew, no more than three times as much in one change; limits follow what each may spend."""
    begun = candidate()
    begun = replace(begun, recipe=replace(begun.recipe, budget=Budget("kl", BUDGET), num_certify=0, check_lengths=()))
    for length in LENGTHS:
        begun = weigh.spend_answers(begun, length, 0.1)
    prompts = {length: [Prompt(torch.arange(length))] * 5 for length in LENGTHS}
    answer(monkeypatch, lambda source: over * weigh.AIM * BUDGET)
    scaled = weigh.scale_to_answers(None, prompts, begun)
    times = min(max(1 / over, 1 / weigh.MAX_STEP), weigh.MAX_STEP)
    if over == 0.97:
        assert scaled is begun
        return
    for length in LENGTHS:
        before, after = begun.chosen[length].choices, scaled.chosen[length].choices
        predicted, spent = (sum(plan.spent for plan in plans) for plans in (before, after))
        assert 0.4 * times * predicted < spent <= times * predicted * (1 + 1e-9)
        for old, plan, limit in zip(before, after, scaled.chosen[length].limits, strict=True):
            if plan is not old:
                assert limit == weigh.limit_layer(plan.allocation, dense_power(plan.curves))
                assert plan.allocation.mse <= limit


def test_layers_that_are_all_dense_have_nothing_to_spend():
    dense = candidate().with_share(0, 512, 0.0).with_share(1, 512, 0.0)
    assert weigh.spend_answers(dense, 512, 2.0) is dense


def test_what_was_tightened_gets_no_more_when_all_get_less():
    tightened = candidate().with_share(0, 512, 0.01)
    pairs = zip(
        tightened.chosen[512].choices, weigh.spend_answers(tightened, 512, 0.9).chosen[512].choices, strict=True
    )
    assert all(less.spent <= before.spent for before, less in pairs)
