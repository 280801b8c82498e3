"""The loop of the proof, without a model: prove, judge, tighten, and prove again what changed."""

import pytest

from calibrate.proof.adjust import RETRIES, TIGHTENINGS, prove_and_adjust
from calibrate.proof.state import Problem, ProblemKind
from calibrate.search.choice import ChosenDense
from support.candidates import CHECKS, LENGTHS, PretendedProver, candidate, error_of

EVERY = [512, 768, 1024, 1536, 2048]
PROMPTS = dict.fromkeys((*LENGTHS, *CHECKS), ())


def test_what_holds_is_proven_once_and_has_no_problems():
    prover = PretendedProver()
    result = prove_and_adjust(prover, PROMPTS, candidate())
    assert result.met
    assert [lengths for lengths, _ in prover.attempts] == [EVERY]
    assert not result.tightened
    for (length, layer), limit in result.limits.items():
        assert result.proofs[length].layers[layer].mse == error_of(result.configs[length, layer]) <= limit


def test_lost_needles_are_tried_again_with_less_and_then_are_the_problem():
    prover = PretendedProver(needles=lambda candidate, length: (3, 20) if length == 1024 else None)
    result = prove_and_adjust(prover, PROMPTS, candidate())
    assert [lengths for lengths, _ in prover.attempts] == [EVERY] + [[768, 1024, 1536]] * RETRIES
    budgets = [[choice.budget_mse for choice in begun.chosen[1024].choices] for _, begun in prover.attempts]
    for number, of_layers in enumerate(budgets):
        assert of_layers == pytest.approx([budget / 2**number for budget in budgets[0]])
    said = "at 1024 tokens the patched model keeps 3 of the 20 needles that dense finds, 95% are asked for"
    assert result.problems == (Problem(ProblemKind.LOST_NEEDLES, 1024, said),)
    assert not result.met


@pytest.mark.parametrize(
    ("slow", "again", "dense"),
    [(512, [512, 768], {512}), (768, [768], {768}), (2048, [1536, 2048], {1536, 2048})],
    ids=["shortest", "checked", "longest"],
)
def test_lengths_that_are_slower_than_dense_become_dense(slow, again, dense):
    prover = PretendedProver(seconds=lambda candidate, length: 0.2 if length == slow else 0.1)
    result = prove_and_adjust(prover, PROMPTS, candidate("cuda"))
    assert result.met
    assert [lengths for lengths, _ in prover.attempts] == [EVERY, again]
    profile = result.candidate.build_profile()
    for (length, layer), config in result.configs.items():
        assert config.is_dense == (length in dense)  # what is checked below a dense bucket follows it
        assert profile.layer_config(layer, length) == config
    if slow in LENGTHS:
        assert {choice.why_dense for choice in result.chosen[slow].choices} == {ChosenDense.SLOWER_PREFILL}


def times_the_prediction(factor):
    return lambda candidate, length, layer: factor * error_of(candidate.layer_config(layer, length))


@pytest.mark.parametrize("factor", [3.0, 30.0])
def test_a_layer_over_its_limit_is_tightened_by_what_it_is_over(factor):
    """Errors that come out several times as large as predicted: so much less of the budget is what is left."""
    begun = candidate()
    result = prove_and_adjust(PretendedProver(error=times_the_prediction(factor)), PROMPTS, begun)
    assert result.met
    assert result.tightened.keys() >= {(512, 0), (512, 1), (1024, 0)}
    for place, times in result.tightened.items():
        length, layer = place
        assert 1 <= times <= TIGHTENINGS
        assert 0.0 < result.proofs[length].layers[layer].mse <= result.limits[place] < result.first_errors[place]
        pairs = zip(result.configs[place].heads, begun.configs[place].heads, strict=True)
        assert all(mine.mode == "dense" or mine.tau <= theirs.tau for mine, theirs in pairs)
        assert result.configs[place] != begun.configs[place]
        if length in LENGTHS:
            tightened = result.chosen[length].choices[layer]
            over = result.first_errors[place] / result.limits[place]
            assert tightened.allocation.mse <= begun.chosen[length].choices[layer].allocation.mse * 0.9 / over
            assert tightened.config == result.configs[place]
    checked = any(length not in LENGTHS for length, _ in result.tightened)
    assert result.candidate.build_profile().lengths == (tuple(EVERY) if checked else LENGTHS)
