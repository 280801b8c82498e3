"""Candidates and how they are adjusted and judged, without a model: plain results go in, a new candidate comes out."""

import math
from dataclasses import replace

import pytest

from calibrate.proof.adjust import (
    MAX_ADJUSTMENTS,
    MAX_STEP,
    MIN_TEXTS_FOR_BOUND,
    NO_CHANGE_WITHIN,
    TARGET_SHARE_OF_LIMIT,
    TIGHTENINGS,
    Adjuster,
    compute_allowed_growth,
    find_slower_lengths,
    judge,
    tighten,
    tighten_layer,
)
from calibrate.proof.bounds import SPEND_FRACTIONS, compute_attempt_confidence, estimate_mean_bound, mean_bound
from calibrate.proof.state import Problem, ProblemKind
from calibrate.search.choice import ChosenDense
from support.candidates import CHECKS, LENGTHS, LIMITS, candidate, proof_of, proofs_of


def test_a_checked_length_has_the_longest_buckets_limit_and_what_the_runtime_interpolates():
    begun = candidate()
    for layer in range(2):
        assert begun.limits[768, layer] == begun.limits[1536, layer] == begun.limits[2048, layer] == LIMITS[2048][layer]
        for length in begun.lengths:
            assert begun.configs[length, layer] == begun.build_profile().layer_config(layer, length)
    assert begun.build_profile().lengths == LENGTHS


def test_a_layer_within_its_limit_is_accepted():
    begun = candidate()
    assert tighten_layer(begun, 512, 0, proof_of(begun.limits[512, 0])) is None
    dense = replace(begun, dense_lengths=frozenset({768}))
    assert tighten_layer(dense, 768, 0, proof_of(1.0)) is None


def test_a_layer_over_its_limit_spends_less_by_what_it_is_over():
    begun = candidate()
    before, configs = begun.chosen[1024].choices[1], begun.configs
    tightened = tighten_layer(begun, 1024, 1, proof_of(3 * begun.limits[1024, 1]))
    after = tightened.chosen[1024].choices[1]
    assert after.budget_mse == pytest.approx(before.allocation.mse * begun.recipe.margin / 3)
    assert tightened.layer_config(1, 1024) == after.config != before.config
    assert tightened.first_errors[1024, 1] == 3 * begun.limits[1024, 1]
    again = tighten_layer(tightened, 1024, 1, proof_of(2 * begun.limits[1024, 1]))
    assert again.first_errors[1024, 1] == 3 * begun.limits[1024, 1]
    assert tightened.chosen[1024].choices == [begun.chosen[1024].choices[0], after]
    assert begun.configs == configs  # a candidate never changes
    changed = {place for place in configs if tightened.configs[place] != configs[place]}
    assert changed == {(1024, 1), (768, 1), (1536, 1)}  # what is interpolated follows
    assert tightened.build_profile().lengths == LENGTHS


def test_a_checked_length_gets_lower_thresholds_and_becomes_a_bucket():
    begun = candidate()
    tightened = tighten_layer(begun, 768, 0, proof_of(2 * begun.limits[768, 0]))
    pairs = zip(begun.layer_config(0, 768).heads, tightened.layer_config(0, 768).heads, strict=True)
    assert all(after.tau < before.tau and replace(after, tau=before.tau) == before for before, after in pairs)
    assert (768, 0) in tightened.overrides
    assert tightened.build_profile().lengths == tuple(sorted((*LENGTHS, *CHECKS)))
    assert tightened.build_profile().layer_config(0, 768) == tightened.layer_config(0, 768)


@pytest.mark.parametrize("length", [1024, 768], ids=["calibrated", "checked"])
def test_the_last_tightening_makes_a_layer_dense(length):
    begun = candidate()
    for times in range(1, TIGHTENINGS + 1):
        assert not begun.layer_config(0, length).is_dense
        begun = tighten_layer(begun, length, 0, proof_of(1.01 * begun.limits[length, 0]))
        assert begun.tightened.get((length, 0), 0) == times
    assert begun.layer_config(0, length).is_dense
    assert tighten_layer(begun, length, 0, proof_of(1.0)) is None
    if length in LENGTHS:
        assert begun.chosen[length].choices[0].why_dense == ChosenDense.OVER_LIMIT


@pytest.mark.parametrize(("error", "said"), [(2e-4, "2.00e-04"), (math.nan, "nan")], ids=["over", "nan"])
def test_a_proof_holds_or_says_why_not(error, said):
    begun = candidate("cuda")
    proofs = proofs_of(begun, needles=(19, 20))
    assert judge(begun, proofs) == ()
    layers = (proof_of(error), proofs[512].layers[1])
    bad = {512: replace(proofs[512], layers=layers), 1024: replace(proofs[1024], needles=(18, 20), prefill_seconds=0.2)}
    lost = "at 1024 tokens the patched model keeps 18 of the 20 needles that dense finds, 95% are asked for"
    assert judge(begun, proofs | bad) == (
        Problem(ProblemKind.OVER_LIMIT, 512, f"layer 0 at 512 tokens has an error of {said}, 1.00e-04 is allowed"),
        Problem(ProblemKind.LOST_NEEDLES, 1024, lost),
        Problem(ProblemKind.SLOWER, 1024, "the prefill of 1024 tokens takes 200.0 ms, dense 100.0 ms"),
    )


def test_slow_prefills_are_a_problem_on_a_gpu_only_and_where_not_all_is_dense():
    begun = replace(candidate("cuda"), dense_lengths=frozenset({768}))
    proofs = proofs_of(begun) | {
        length: replace(proof, prefill_seconds=seconds)
        for (length, proof), seconds in zip(proofs_of(begun).items(), (0.101, 0.103, 0.1, 0.103, 0.1), strict=True)
    }
    slower = Problem(ProblemKind.SLOWER, 1024, "the prefill of 1024 tokens takes 103.0 ms, dense 100.0 ms")
    assert find_slower_lengths(begun, proofs) == (slower,)
    assert find_slower_lengths(candidate("cpu"), proofs) == ()


@pytest.mark.parametrize(
    ("lost", "halved", "again"),
    [(512, {512}, {512, 768}), (1024, {1024}, {768, 1024, 1536}), (768, {512, 1024}, {512, 768, 1024, 1536})],
    ids=["shortest", "middle", "checked"],
)
def test_lost_needles_cost_half_the_budget(lost, halved, again):
    begun = candidate()
    proofs = proofs_of(begun)
    proofs[lost] = replace(proofs[lost], needles=(0, 20))
    after, lengths = tighten(begun, judge(begun, proofs))
    assert lengths == again
    for length in LENGTHS:
        share = 0.5 if length in halved else 1.0
        for old, new in zip(begun.chosen[length].choices, after.chosen[length].choices, strict=True):
            assert new.budget_mse == share * old.budget_mse


ALIKE, FAR_APART = (0.95, 1.0, 1.05, 1.0), (0.3, 0.4, 0.5, 2.8)


def test_a_layer_that_spends_little_is_given_more_until_it_spends_its_margin():
    begun, adjusting = candidate(), Adjuster({512: 0})
    limit = begun.limits[512, 1]
    raised = adjusting.revise(begun, 512, 1, proof_of(limit / 2))
    margin = begun.recipe.margin
    spent = begun.chosen[512].choices[1].spent
    assert raised.chosen[512].choices[1].budget_mse == pytest.approx(spent * 2 * margin)
    assert raised.chosen[512].choices[1].spent > spent
    assert raised.tightened.get((512, 1), 0) == 0
    assert {place for place in raised.configs if raised.configs[place] != begun.configs[place]} <= {
        (512, 1), (768, 1)
    }  # fmt: skip
    assert begun.chosen[512].choices[1].spent == spent  # a candidate never changes
    assert adjusting.revise(raised, 512, 1, proof_of(margin * limit)) is None


def test_what_the_certificate_will_find_limits_what_is_given():
    recipe = candidate().recipe
    even, uneven = (
        compute_allowed_growth(proof_of(1e-4, factors), 2e-4, recipe, 2, 32) for factors in (ALIKE, FAR_APART)
    )
    assert 1.0 < even <= 2 * recipe.margin
    errors = [1e-4 * factor for factor in FAR_APART]
    bound = estimate_mean_bound(errors, ["text"] * 4, 32, compute_attempt_confidence(SPEND_FRACTIONS[0], recipe, 2))
    assert uneven == pytest.approx(TARGET_SHARE_OF_LIMIT * 2e-4 / bound)
    assert uneven < even
    assert compute_allowed_growth(proof_of(1e-4, FAR_APART), 2e-4, recipe, 2, 0) == pytest.approx(2 * recipe.margin)


def test_bounds_of_fewer_texts_than_enough_decide_nothing():
    recipe = candidate().recipe
    few, enough = (
        compute_allowed_growth(proof_of(1e-4, FAR_APART), 2e-4, recipe, 2, texts)
        for texts in (MIN_TEXTS_FOR_BOUND - 1, MIN_TEXTS_FOR_BOUND)
    )
    assert few == pytest.approx(2 * recipe.margin)
    assert enough < few


def test_what_differs_between_kinds_of_text_limits_nothing():
    recipe = candidate().recipe
    apart = proof_of(1e-4, FAR_APART)
    assert compute_allowed_growth(replace(apart, kinds=tuple("abcd")), 2e-4, recipe, 2, 32) > compute_allowed_growth(
        apart, 2e-4, recipe, 2, 32
    )


def test_what_the_certificate_would_find_too_much_is_taken_back_below_what_the_search_chose_too():
    begun, adjusting = candidate(), Adjuster()
    limit, spent = begun.limits[512, 0], begun.chosen[512].choices[0].spent
    less = adjusting.revise(begun, 512, 0, proof_of(0.7 * limit, FAR_APART))  # its bound would be over the limit
    assert less.chosen[512].choices[0].spent < spent
    assert less.tightened.get((512, 0), 0) == 0


def test_single_prompts_and_the_rows_that_answer_are_held_to_the_limit_if_the_recipe_says_so():
    begun = candidate()
    limit = begun.limits[512, 0]
    single = replace(begun, recipe=replace(begun.recipe, per_prompt=True))
    for proof in (proof_of(0.5 * limit, (1.0, 3.0)), proof_of(0.5 * limit, last=3.0)):
        assert proof.limited_error(begun.recipe) == 0.5 * limit
        assert proof.limited_error(single.recipe) == pytest.approx(1.5 * limit, rel=0.06)
        assert tighten_layer(begun, 512, 0, proof) is None
        spent = tighten_layer(single, 512, 0, proof).chosen[512].choices[0].budget_mse
        expected = begun.chosen[512].choices[0].spent * begun.recipe.margin * limit / proof.limited_error(single.recipe)
        assert spent == pytest.approx(expected)


def test_what_is_about_right_stays():
    begun = candidate()
    limit = begun.limits[512, 0]
    times = compute_allowed_growth(proof_of(limit), limit, begun.recipe, 2, begun.recipe.num_certify)
    for off in (NO_CHANGE_WITHIN * 0.999, 1 / NO_CHANGE_WITHIN * 1.001):
        assert Adjuster().revise(begun, 512, 0, proof_of(limit * times / off)) is None


def test_no_change_is_larger_than_curves_can_be_trusted_and_there_are_few():
    begun, adjusting = candidate(), Adjuster()
    spent = begun.chosen[512].choices[0].spent
    little = proof_of(begun.limits[512, 0] * 1e-4)
    begun = adjusting.revise(begun, 512, 0, little)
    assert begun.chosen[512].choices[0].budget_mse == pytest.approx(MAX_STEP * spent)
    for _ in range(MAX_ADJUSTMENTS - 1):
        begun = adjusting.revise(begun, 512, 0, little) or begun  # the last one changes no head
    assert adjusting.adjustments == {(512, 0): MAX_ADJUSTMENTS}
    assert Adjuster().revise(candidate(), 512, 0, little) is not None
    assert adjusting.revise(candidate(), 512, 0, little) is None  # though there would be something to give


def test_what_cannot_or_must_not_change_stays():
    begun = candidate()
    low = proof_of(1e-9)
    assert Adjuster().revise(begun, 768, 0, low) is None  # no curves
    dense = begun.with_share(0, 512, 0.0)
    assert Adjuster().revise(dense, 512, 0, low) is None
    tightened = tighten_layer(begun, 512, 0, proof_of(1.1 * begun.limits[512, 0]))
    assert not tightened.layer_config(0, 512).is_dense
    assert Adjuster().revise(tightened, 512, 0, low) is None


def test_rows_that_are_off_too_far_are_no_reason_to_give_and_one_to_take_back():
    begun, adjusting = candidate(), Adjuster()
    assert begun.recipe.worst_rows == 0.7
    assert adjusting.revise(begun, 512, 0, proof_of(1e-9, worst=0.71)) is None
    assert Adjuster().revise(begun, 512, 0, proof_of(1e-9, worst=0.7)) is not None  # at the guard is within it
    raised = adjusting.revise(begun, 512, 0, proof_of(1e-9, worst=0.69))
    back = adjusting.revise(raised, 512, 0, proof_of(1e-9, worst=0.71))
    assert begun.chosen[512].choices[0].spent < back.chosen[512].choices[0].spent < raised.chosen[512].choices[0].spent


def test_the_expected_bound_is_that_of_many_prompts_like_the_few():
    few, kinds = [1.0, 1.3, 0.7, 4.4, 3.6], [*"aaabb"]
    for of_few in (kinds, ["text"] * 5):
        expected = estimate_mean_bound(few, of_few, 40, 0.975)
        bound = mean_bound(few * 8, of_few * 8, 0.975)
        assert expected == pytest.approx(bound, rel=0.1)
        assert mean_bound(few * 8, kinds * 8, 0.5) < expected
    assert estimate_mean_bound([2.0], ["a"], 32, 0.975) == pytest.approx(
        2 * estimate_mean_bound([1.0], ["b"], 32, 0.975)
    )
    # with fewer than two prompts of a kind the certificate takes all for one kind
    assert estimate_mean_bound(few, kinds, 3, 0.975) == estimate_mean_bound(few, ["text"] * 5, 3, 0.975)
