"""The limits of layers under a budget of answers: looser where answers feel less, at the scale that was measured."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from calibrate.curves.curves import Shape, select_rankings
from calibrate.prompts.prompt import Prompt
from calibrate.proof import kl
from calibrate.proof.answers import AnswerKls
from calibrate.proof.kl import MAX_REL_MSE, MIN_REL_MSE, find_answer_limits, interpolate_budget
from calibrate.recipe import Budget
from s2o_runtime.config import TileConfig
from support.candidates import RECIPE, choice, error_of

TILE = TileConfig()
SENSITIVITY = ((4.0, 4.0), (0.4, 0.4), (0.0, 0.0))  # nats per unit of mse of each head: the last layer reaches nothing
PROMPT = Prompt(torch.zeros(1024, dtype=torch.int64))


def find_limits(monkeypatch, budget, factor):
    """The limits of three layers alike, where answers' KL is `factor` times what sensitivities predict."""
    curves = {(ranking, Shape.from_tile(TILE)): curve for ranking, curve in choice(1e-4).curves.items()}
    assert select_rankings(curves, 256, Shape.from_tile(TILE))
    measured = []

    def measure(prover, prompts, sources):
        costs = [sum(heads) / 2 for heads in SENSITIVITY]  # the curves' heads have errors in one proportion
        for source in sources:
            errors = [error_of(source.layer_config(layer, 1024)) for layer in range(3)]
            measured.append(factor * sum(2 * cost * error for cost, error in zip(costs, errors, strict=True)))
        return [[AnswerKls((value,), (value,), (0,))] for value in measured[-len(sources) :]]

    monkeypatch.setattr(kl, "measure_answers", measure)
    recipe = replace(RECIPE, budget=Budget("rel_mse", budget))
    prover = SimpleNamespace()
    return find_answer_limits(prover, [curves] * 3, TILE, SENSITIVITY, [PROMPT], recipe), measured


def test_a_layer_that_answers_feel_less_may_err_more(monkeypatch):
    first, second, last = find_limits(monkeypatch, 1e-4, 1.0)[0]
    assert MIN_REL_MSE <= first < second < last <= MAX_REL_MSE


def test_the_scale_is_measured(monkeypatch):
    """Answers that move nine times as much as is predicted get limits that are nine times as tight."""
    as_predicted, measured = find_limits(monkeypatch, 1e-3, 1.0)
    underrated, more = find_limits(monkeypatch, 1e-3, 9.0)
    assert measured == sorted(measured, reverse=True)
    assert more == pytest.approx([9 * value for value in measured])
    spent = [
        sum(2 * c * limit for c, limit in zip((4.0, 0.4), limits, strict=False))
        for limits in (as_predicted, underrated)
    ]
    assert spent[0] / spent[1] == pytest.approx(9, rel=0.35)  # curves have a point for each tau only


@pytest.mark.parametrize(
    ("measured", "aim", "spent"),
    [
        ((4e-3, 1e-3, 2.5e-4), 1e-3, 2.5e-3),  # as measured at one of them
        ((4e-3, 1e-3, 2.5e-4), 2e-3, 5e-3),  # between two, on a line of slope 1
        ((4e-3, 1e-3, 2.5e-4), 1.25e-4, 3.125e-4),  # below all, the last line goes on
        ((1e-3, 5e-4, 2.5e-4), 2e-3, 4e-2),  # above all, the first one does, of slope 1/2
    ],
)
def test_what_is_spent_is_read_off_between_what_was_run(measured, aim, spent):
    assert interpolate_budget((1e-2, 2.5e-3, 6.25e-4), measured, aim) == pytest.approx(spent, rel=1e-6)
