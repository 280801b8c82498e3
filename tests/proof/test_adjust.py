"""Candidates and how they are adjusted and judged, without a model: plain results go in, a new candidate comes out."""

import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, repeat

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from calibrate.proof.adjust import (
    FIRST_ROWS,
    MAX_ADJUSTMENTS,
    MAX_STEP,
    MIN_TEXTS_FOR_BOUND,
    NO_CHANGE_WITHIN,
    RETRIES,
    TARGET_SHARE_OF_LIMIT,
    TIGHTENINGS,
    adjust_layer,
    compute_allowed_growth,
    judge,
    make_slower_dense,
    prove_and_adjust,
    remeasure,
    tighten,
    tighten_layer,
    widen_layer,
)
from calibrate.proof.bounds import SPEND_FRACTIONS, bound_mean, compute_attempt_confidence, estimate_mean_bound
from calibrate.proof.state import Problem, ProblemKind
from calibrate.proof.verify import LengthProof
from calibrate.recipe import Budget
from calibrate.search.choice import CalibrationDense
from support.candidates import CHECKS, LENGTHS, LIMITS, PROMPTS, candidate, error_of, proof_of, with_proofs

BEGUN = candidate()
EVERY = list(PROMPTS)
ALIKE, FAR_APART = (0.95, 1.0, 1.05, 1.0), (0.3, 0.4, 0.5, 2.8)
ERRORS = st.floats(0, 50) | st.just(math.nan)  # times the limit


def spent(candidate, length, layer):
    """Return what grows with the error that a layer may have: at a bucket its budget, elsewhere a threshold."""
    config = candidate.layer_config(layer, length)
    if config.is_dense:
        return 0.0
    return candidate.chosen[length].choices[layer].budget.mse if length in LENGTHS else config.heads[0].tau


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(EVERY), st.integers(0, 1), st.lists(st.tuples(ERRORS, st.floats(0, 1)), min_size=1, max_size=9))
@example(1024, 0, [(1.01, 0.0)])
@example(768, 1, [(1.01, 0.0)])
@example(512, 1, [(1e-4, 0.0)])
@example(512, 1, [(2.0, 0.0), (1e-4, 0.0)])
@example(512, 1, [(1e-4, 0.0), (0.5, 0.8), (1e-4, 0.0), (2.0, 0.0), (1e-4, 0.0)])
def test_any_sequence_of_errors_ends_within_its_tries(length, layer, measured):
    """A layer over its limit spends less, and no more from then on; the last time it is dense, which is final."""
    current, revisions, key, limit = BEGUN, [], (length, layer), BEGUN.limits[length, layer]
    for ratio, worst in chain(measured, repeat(measured[-1])):
        revised = adjust_layer(current, length, layer, proof_of(ratio * limit, worst=worst))
        if revised is None:
            break
        times = revised.tightened[key]
        assert times == current.tightened[key] + (not ratio <= 1)
        factor = spent(revised, length, layer) / spent(current, length, layer)
        assert factor < 1 if times else factor <= MAX_STEP * 1.001
        assert revised.layer_config(layer, length).is_dense == (times == TIGHTENINGS or math.isnan(ratio))
        before, after = (one.layer_config(layer, length) for one in (current, revised))
        if length in CHECKS and not after.is_dense:  # thresholds alone are lower
            pairs = zip(before.heads, after.heads, strict=True)
            assert all(new.tau < old.tau and replace(new, tau=old.tau) == old for old, new in pairs)
        elif times and not after.is_dense:  # so much less as it is over its limit
            predicted = current.chosen[length].choices[layer].spent
            assert spent(revised, *key) == pytest.approx(predicted * BEGUN.recipe.margin / ratio)
        changed = {place for place in BEGUN.configs if revised.configs[place] != current.configs[place]}
        assert key in changed
        assert all(place == key or (length in LENGTHS and place[0] in CHECKS) for place in changed)
        revisions.append(ratio)
        current = revised
    over = [ratio * limit for ratio in revisions if not ratio <= 1]
    assert len(over) <= TIGHTENINGS
    assert current.first_errors.get(key, 0) == pytest.approx(over[0] if over else 0, nan_ok=True)
    assert current.adjusted[key] == len(revisions) - len(over) <= MAX_ADJUSTMENTS
    if current.layer_config(layer, length).is_dense:
        assert current.with_share(layer, length, 0.5) is current
        assert all(adjust_layer(current, length, layer, proof_of(error)) is None for error in (0.0, 1.0, math.nan))
        assert length in CHECKS or current.chosen[length].choices[layer].why_dense == CalibrationDense.OVER_LIMIT
    profile = current.build_profile()
    assert profile.lengths == (tuple(EVERY) if over and length in CHECKS else LENGTHS)
    assert all(profile.layer_config(place[1], place[0]) == config for place, config in current.configs.items())


@pytest.mark.parametrize("budget_kind", ["mse", "kl"])
@pytest.mark.parametrize("length", [512, 768])
def test_a_layer_whose_first_rows_err_most_looks_further_back_until_they_do_not(length, budget_kind):
    """Heads stay as they are, at a length without curves too, and nothing is beyond the longest."""
    current = replace(BEGUN, recipe=replace(BEGUN.recipe, budget=Budget(budget_kind, 1e-4)))
    before, error = current.layer_config(1, length), 0.9 * current.limits[length, 1]
    proof = proof_of(error)
    fine, bad = (replace(proof, places=((times * error, 1.0), (error, 1.0))) for times in (FIRST_ROWS, 3.1))
    assert widen_layer(current, length, 1, proof) is widen_layer(current, length, 1, fine) is None
    widened = adjust_layer(current, length, 1, bad)
    assert widened.layer_config(1, length) == replace(before, lookback=256)
    changed = {place for place in BEGUN.configs if widened.configs[place] != current.configs[place]}
    assert changed <= {(length, 1), (768, 1)}
    assert widened.build_profile().layer_config(1, length) == replace(before, lookback=256)
    assert widen_layer(widened, length, 1, bad) is None
    assert widen_layer(current.with_share(1, length, 0.0), length, 1, bad) is None
    # what layers spend of a budget of answers was measured on all together, so none is given more alone
    given = adjust_layer(current, 512, 1, proof_of(1e-3 * error))
    assert (given is None) == (budget_kind == "kl")


@pytest.mark.parametrize(("error", "said"), [(2e-4, "2.00e-04"), (math.nan, "nan")], ids=["over", "nan"])
def test_a_proof_holds_or_says_why_not(error, said):
    begun = with_proofs(candidate("cuda"), {length: {"needles": (19, 20)} for length in EVERY})
    assert judge(begun) == ()
    layers = (proof_of(error), begun.proofs[512].layers[1])
    bad = {512: {"layers": layers}, 1024: {"needles": (18, 20)}}
    lost = "at 1024 tokens the patched model keeps 18 of the 20 needles that dense finds, 95% are asked for"
    assert judge(with_proofs(begun, bad)) == (
        Problem(ProblemKind.OVER_LIMIT, 512, f"layer 0 at 512 tokens has an error of {said}, 1.00e-04 is allowed"),
        Problem(ProblemKind.LOST_NEEDLES, 1024, lost),
    )
    assert [BEGUN.limits[768, layer] for layer in range(2)] == LIMITS[2048]  # of the longest bucket


@pytest.mark.parametrize(
    ("lost", "halved", "again"),
    [(512, {512}, {512}), (1024, {1024}, {768, 1024}), (768, {1024}, {768, 1024})],
    ids=["shortest", "middle", "checked"],
)
def test_lost_needles_cost_half_the_budget(lost, halved, again):
    """A layer that was tightened at those lengths starts again; at others it stays."""
    begun = BEGUN
    for length in (768, 2048):
        begun = tighten_layer(begun, length, 0, proof_of(2 * begun.limits[length, 0]))
    begun = with_proofs(begun, {lost: {"needles": (0, 20)}})
    after, lengths = tighten(replace(begun, problems=judge(begun)))
    assert lengths == again
    assert after.tightened == dict.fromkeys({(2048, 0)} | {(768, 0)} - {(length, 0) for length in again}, 1)
    assert set(after.overrides) == set(after.tightened) - {(2048, 0)}
    for length in LENGTHS:
        for old, new in zip(begun.chosen[length].choices, after.chosen[length].choices, strict=True):
            assert new.budget.mse == (0.5 if length in halved else 1.0) * old.budget.mse


def test_a_layer_that_spends_little_is_given_more_until_it_spends_its_margin():
    limit, margin, before = BEGUN.limits[512, 1], BEGUN.recipe.margin, BEGUN.chosen[512].choices[1].spent
    raised = adjust_layer(BEGUN, 512, 1, proof_of(limit / 2), {512: 0})
    assert raised.chosen[512].choices[1].budget.mse == pytest.approx(before * 2 * margin)
    assert raised.chosen[512].choices[1].spent > before
    assert adjust_layer(raised, 512, 1, proof_of(margin * limit), {512: 0}) is None
    most = adjust_layer(BEGUN, 512, 1, proof_of(1e-4 * limit))
    assert most.chosen[512].choices[1].budget.mse == pytest.approx(MAX_STEP * before)
    often = replace(BEGUN, adjusted=Counter({(512, 1): MAX_ADJUSTMENTS}))
    assert adjust_layer(often, 512, 1, proof_of(1e-4 * limit)) is None
    assert adjust_layer(BEGUN, 768, 1, proof_of(1e-9)) is None  # no curves
    times = compute_allowed_growth(proof_of(limit), limit, BEGUN.recipe, 2, BEGUN.recipe.num_certify)
    for off in (NO_CHANGE_WITHIN * 0.999, 1 / NO_CHANGE_WITHIN * 1.001):  # about right
        assert adjust_layer(BEGUN, 512, 1, proof_of(limit * times / off)) is None


def growth(factors, texts, **changes):
    return compute_allowed_growth(replace(proof_of(1e-4, factors), **changes), 2e-4, BEGUN.recipe, 2, texts)


def test_what_the_certificate_will_find_limits_what_is_given():
    at_margin = pytest.approx(2 * BEGUN.recipe.margin)
    errors = [1e-4 * factor for factor in FAR_APART]
    confidence = compute_attempt_confidence(SPEND_FRACTIONS[0], BEGUN.recipe, 2)
    bound = estimate_mean_bound(errors, ["text"] * 4, 32, confidence)
    assert growth(FAR_APART, 32) == pytest.approx(TARGET_SHARE_OF_LIMIT * 2e-4 / bound)
    assert growth(FAR_APART, 32) < growth(ALIKE, 32) <= 2 * BEGUN.recipe.margin
    assert growth(FAR_APART, 0) == growth(FAR_APART, MIN_TEXTS_FOR_BOUND - 1) == at_margin  # bounds of few are chance
    assert growth(FAR_APART, MIN_TEXTS_FOR_BOUND) < growth(FAR_APART, 0)
    assert growth(FAR_APART, 32, kinds=tuple("abcd")) > growth(FAR_APART, 32)  # kinds may differ
    less = adjust_layer(BEGUN, 512, 0, proof_of(0.7 * BEGUN.limits[512, 0], FAR_APART))  # its bound would be over
    assert less.chosen[512].choices[0].spent < BEGUN.chosen[512].choices[0].spent
    assert not less.tightened


def test_the_largest_eighth_of_the_prompts_is_held_to_half_as_much_again():
    limit, error = BEGUN.limits[512, 0], 0.5 * BEGUN.limits[512, 0]
    within, over = (
        replace(proof_of(error), eighths=((error, 1.0),) * 6 + ((times * limit, 1.0), (0.0, 1.0)))
        for times in (1.499, 1.53)
    )
    assert tighten_layer(BEGUN, 512, 0, within) is None
    tightened = tighten_layer(BEGUN, 512, 0, over)
    assert tightened.first_errors == {(512, 0): pytest.approx(1.02 * limit)}
    assert spent(tightened, 512, 0) == pytest.approx(BEGUN.chosen[512].choices[0].spent * BEGUN.recipe.margin / 1.02)
    assert compute_allowed_growth(within, limit, BEGUN.recipe, 2, 0) < 1  # an eighth keeps the margin too
    (problem,) = judge(with_proofs(BEGUN, {512: {"layers": (over, proof_of(1e-5))}}))
    assert str(problem).endswith("has an error of 1.53e-04 in an eighth of the prompts, 1.50e-04 is allowed there")
    assert math.isnan(replace(over, mse=math.nan).limited_error(BEGUN.recipe))


def test_rows_that_are_off_too_far_are_no_reason_to_give_and_one_to_take_back():
    assert BEGUN.recipe.worst_rows == 0.7
    assert adjust_layer(BEGUN, 512, 0, proof_of(1e-9, worst=0.71)) is None
    raised = adjust_layer(BEGUN, 512, 0, proof_of(1e-9, worst=0.7))  # at the guard is within it
    back = adjust_layer(raised, 512, 0, proof_of(1e-9, worst=0.71))
    assert spent(BEGUN, 512, 0) < spent(back, 512, 0) < spent(raised, 512, 0)


def test_the_expected_bound_is_that_of_many_prompts_like_the_few():
    few, kinds, one_kind = [1.0, 1.3, 0.7, 4.4, 3.6], [*"aaabb"], ["text"] * 5
    for of_few in (kinds, one_kind):
        expected = estimate_mean_bound(few, of_few, 40, 0.975)
        assert expected == pytest.approx(bound_mean(few * 8, of_few * 8, 0.975), rel=0.1)
        assert bound_mean(few * 8, kinds * 8, 0.5) < expected
    one, two = (estimate_mean_bound([value], ["a"], 32, 0.975) for value in (1.0, 2.0))
    assert two == pytest.approx(2 * one)
    # with fewer than two prompts of a kind the certificate takes all for one kind
    assert estimate_mean_bound(few, kinds, 3, 0.975) == estimate_mean_bound(few, one_kind, 3, 0.975)


class PretendedProver:
    """Proves as `verify.Prover` does, without a model: layers have the errors that curves predict, or other ones.

    error: of a layer, from (candidate, length, layer). needles: kept and found, from (candidate, length). seconds: of
    layer 1's attention; dense attention takes 0.1. first_rows: by length, their error over a layer's mean. attempts:
    (lengths, candidate) that each proof began with.
    """

    def __init__(self, error=None, needles=lambda *_: None, seconds=None, first_rows=None):
        self._error = error or (lambda candidate, length, layer: error_of(candidate.layer_config(layer, length)))
        self._needles, self._seconds, self._first_rows, self.attempts = needles, seconds, first_rows or {}, []

    def show_progress(self, title, lengths):
        return nullcontext(self)

    def prove(self, candidate, prompts, revise=None):
        self.attempts.append((sorted(prompts), candidate))
        layers = {length: [] for length in prompts}
        for layer in range(candidate.geometry.layers):
            for length, proofs in layers.items():
                revised = candidate
                while revised is not None:
                    candidate, proof = revised, proof_of(self._error(revised, length, layer), (0.95, 1.05))
                    proof = replace(proof, places=((self._first_rows.get(length, 1.0) * proof.mse, proof.dense_power),))
                    revised = revise and revise(candidate, length, layer, proof)
                seconds = self._seconds if layer else None
                proofs.append(replace(proof, seconds=seconds, dense_seconds=seconds and 0.1))
        return candidate, {
            length: LengthProof(tuple(proofs), 0.0, 1.0, self._needles(candidate, length), 0.1, 0.1)
            for length, proofs in layers.items()
        }


def test_lost_needles_are_tried_again_with_less_and_then_are_the_problem():
    prover = PretendedProver(needles=lambda candidate, length: (3, 20) if length == 1024 else None)
    result = prove_and_adjust(prover, PROMPTS, BEGUN)
    assert [lengths for lengths, _ in prover.attempts] == [EVERY] + [[768, 1024]] * RETRIES
    budgets = [[choice.budget.mse for choice in begun.chosen[1024].choices] for _, begun in prover.attempts]
    for number, of_layers in enumerate(budgets):
        assert of_layers == pytest.approx([budget / 2**number for budget in budgets[0]])
    assert [(problem.kind, problem.length) for problem in result.problems] == [(ProblemKind.LOST_NEEDLES, 1024)]


def test_a_retry_looks_at_the_first_rows_of_segments_again():
    prover = PretendedProver(needles=lambda _, length: (3, 20) if length == 768 else None, first_rows={768: 3.1})
    result = prove_and_adjust(prover, PROMPTS, BEGUN)
    assert [lengths for lengths, _ in prover.attempts] == [EVERY] + [[768, 1024]] * RETRIES
    assert {result.configs[768, layer].lookback for layer in range(2)} == {256}


@settings(deadline=None, max_examples=12)
@given(st.floats(1.5, 100.0) | st.just(1.0))
@example(1.0)
def test_errors_several_times_as_large_as_predicted_are_adjusted_to_in_one_proof(factor):
    prover = PretendedProver(lambda candidate, length, layer: factor * error_of(candidate.layer_config(layer, length)))
    result = prove_and_adjust(prover, PROMPTS, BEGUN)
    assert result.met
    assert [lengths for lengths, _ in prover.attempts] == [EVERY]  # what holds is proven once
    assert (result.tightened.keys() >= {(512, 0), (512, 1), (1024, 0)}) == (factor > 1)
    for (length, layer), limit in result.limits.items():
        assert result.proofs[length].layers[layer].mse <= limit


def timed(begun, slower=()):
    """Layers' attention takes 1 ms, dense 2 ms; `slower` has the seconds of others by their length and number."""

    def time_layers(length, layers):
        seconds = (dict(slower).get((length, number), 1e-3) for number in range(2))
        return tuple(
            replace(layer, seconds=s2o, dense_seconds=2e-3) for layer, s2o in zip(layers, seconds, strict=True)
        )

    proofs = {
        length: replace(proof, layers=time_layers(length, proof.layers)) for length, proof in begun.proofs.items()
    }
    return replace(begun, proofs=proofs)


def test_layers_that_adjusting_left_slower_than_dense_become_dense():
    slower = {(1024, 1): 2.1e-3, (512, 0): 2.02e-3}  # the latter is a tie
    begun = timed(with_proofs(candidate("cuda")), slower)
    left = make_slower_dense(begun)
    for place, config in begun.configs.items():
        assert left.configs[place] == (config.as_dense() if place == (1024, 1) else config)
    assert left.chosen[1024].choices[1].why_dense == CalibrationDense.SLOWER_ATTENTION
    untimed = with_proofs(BEGUN)
    assert make_slower_dense(left) is left
    assert make_slower_dense(untimed) is untimed


@pytest.mark.parametrize(("needles", "problems"), [(None, 0), ((2, 2), 0), ((1, 2), 0), ((0, 2), 1)])
def test_what_the_certificate_left_slower_becomes_dense_and_needles_it_lost_are_a_problem(needles, problems):
    """A written profile must pass `s2o-profile verify`, which asks for the needles of the same prompts."""
    begun = timed(with_proofs(candidate("cuda")))
    prover = PretendedProver(needles=lambda *_: needles, seconds=0.2)
    left = remeasure(prover, PROMPTS, begun, begun.with_share(0, 1024, 0.0))
    assert [left.configs[1024, layer].is_dense for layer in range(2)] == [True, True]
    assert left.chosen[1024].choices[1].why_dense == CalibrationDense.SLOWER_ATTENTION
    assert [lengths for lengths, _ in prover.attempts] == [[768, 1024]] * 2  # 768 follows the bucket
    assert left.proofs[1024].layers[1].mse == 0.0  # as it is at the end
    assert len([problem for problem in left.problems if "keeps 0 of the 2 needles" in problem.text]) == 2 * problems
