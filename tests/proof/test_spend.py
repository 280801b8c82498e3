"""What a layer may spend, from what was measured of it on the adjust prompts; without a model."""

from dataclasses import replace

import pytest

from calibrate.proof.adjust import AIM, CLOSE, ENOUGH, MOST, TRIES, Spending, growth
from calibrate.proof.bounds import expected_mean_bound, look_confidence, mean_bound
from calibrate.proof.certify import with_share
from calibrate.proof.verify import LayerProof
from calibrate.recipe import Budget
from calibrate.search.choice import DenseReason
from support.candidates import candidate

ALIKE, FAR_APART = (0.95, 1.0, 1.05, 1.0), (0.3, 0.4, 0.5, 2.8)


def proof(mean, factors=ALIKE, worst=0.0):
    """Of prompts whose errors are these times the mean."""
    of_prompts = tuple((mean * factor, 1.0) for factor in factors)
    return LayerProof(mean, 1.0, 0.5, worst, of_prompts=of_prompts, kinds=("text",) * len(factors))


def test_a_layer_that_spends_little_is_given_more_until_it_spends_its_margin():
    begun, spending = candidate(), Spending()
    limit = begun.limits[512, 1]
    certain = replace(begun, recipe=replace(begun.recipe, num_certify=0))
    raised = spending.revise(certain, 512, 1, proof(limit / 2))
    margin = begun.recipe.margin
    spent = begun.choice(1, 512).spent
    assert raised.choice(1, 512).budget_mse == pytest.approx(spent * 2 * margin)
    assert raised.choice(1, 512).spent > spent
    assert raised.tightened == {}
    assert {place for place in raised.configs if raised.configs[place] != begun.configs[place]} <= {
        (512, 1), (768, 1)
    }  # fmt: skip
    assert begun.choice(1, 512).spent == spent  # a candidate never changes
    assert spending.revise(raised, 512, 1, proof(margin * limit)) is None


def test_what_the_certificate_will_find_limits_what_is_given():
    recipe = candidate().recipe
    even, uneven = (growth(proof(1e-4, factors), 2e-4, recipe) for factors in (ALIKE, FAR_APART))
    assert 1.0 < even <= 2 * recipe.margin
    errors = [1e-4 * factor for factor in FAR_APART]
    bound = expected_mean_bound(errors, ["text"] * 4, recipe.num_certify, look_confidence(1.0))
    assert uneven == pytest.approx(AIM * 2e-4 / bound)
    assert uneven < even
    without = replace(recipe, num_certify=0)
    assert growth(proof(1e-4, FAR_APART), 2e-4, without) == pytest.approx(2 * recipe.margin)


def test_bounds_of_fewer_certify_prompts_than_enough_decide_nothing():
    recipe = candidate().recipe
    few, enough = (
        growth(proof(1e-4, FAR_APART), 2e-4, replace(recipe, num_certify=number)) for number in (ENOUGH - 1, ENOUGH)
    )
    assert few == pytest.approx(2 * recipe.margin)
    assert enough < few


def test_what_differs_between_kinds_of_text_limits_nothing():
    recipe = candidate().recipe
    apart = proof(1e-4, FAR_APART)
    assert growth(replace(apart, kinds=tuple("abcd")), 2e-4, recipe) > growth(apart, 2e-4, recipe)


def test_what_was_too_much_is_taken_back_but_not_more():
    begun, spending = candidate(), Spending()
    limit, spent = begun.limits[512, 0], begun.choice(0, 512).spent
    too_much = proof(0.7 * limit, FAR_APART)  # its bound would be over the limit
    assert spending.revise(begun, 512, 0, too_much) is None  # nothing was given yet
    raised = Spending()
    more = raised.revise(begun, 512, 0, proof(0.4 * limit))
    assert more.choice(0, 512).spent > spent
    less = raised.revise(more, 512, 0, proof(1.9 * limit, FAR_APART))
    assert less.choice(0, 512) == begun.choice(0, 512)
    assert less.layer_config(0, 512) == begun.layer_config(0, 512)
    assert not less.tightened


def test_what_is_about_right_stays():
    begun = candidate()
    limit = begun.limits[512, 0]
    times = growth(proof(limit), limit, begun.recipe)
    for off in (CLOSE * 0.999, 1 / CLOSE * 1.001):
        assert Spending().revise(begun, 512, 0, proof(limit * times / off)) is None


def test_no_change_is_larger_than_curves_can_be_trusted_and_there_are_few():
    begun, spending = candidate(), Spending()
    spent = begun.choice(0, 512).spent
    much, little = (proof(begun.limits[512, 0] * share) for share in (1.5, 1e-4))
    begun = spending.revise(begun, 512, 0, little)
    assert begun.choice(0, 512).budget_mse == pytest.approx(MOST * spent)
    for _ in range(TRIES - 1):
        begun = spending.revise(begun, 512, 0, much) or begun  # the last one has nothing to take back
    assert spending.tries == {(512, 0): TRIES}
    assert spending.revise(begun, 512, 0, little) is None


def test_what_cannot_or_must_not_change_stays():
    begun = candidate()
    low = proof(1e-9)
    assert Spending().revise(begun, 768, 0, low) is None  # no curves
    dense = begun.with_choice(0, 512, begun.choice(0, 512).as_dense(DenseReason.NO_GAIN))
    assert Spending().revise(dense, 512, 0, low) is None
    tightened = with_share(begun, begun, 512, 0, 0.5)
    assert not tightened.layer_config(0, 512).is_dense
    assert Spending().revise(tightened, 512, 0, low) is None
    in_kl = replace(begun, recipe=replace(begun.recipe, budget=Budget("kl", 1e-2)))
    assert Spending().revise(in_kl, 512, 0, low) is None


def test_rows_that_are_off_too_far_are_no_reason_to_give_and_one_to_take_back():
    begun, spending = candidate(), Spending()
    assert begun.recipe.worst_rows == 0.7
    assert spending.revise(begun, 512, 0, proof(1e-9, worst=0.71)) is None
    assert Spending().revise(begun, 512, 0, proof(1e-9, worst=0.7)) is not None  # at the guard is within it
    raised = spending.revise(begun, 512, 0, proof(1e-9, worst=0.69))
    back = spending.revise(raised, 512, 0, proof(1e-9, worst=0.71))
    assert begun.choice(0, 512).spent < back.choice(0, 512).spent < raised.choice(0, 512).spent


def test_the_expected_bound_is_that_of_many_prompts_like_the_few():
    few, kinds = [1.0, 1.3, 0.7, 4.4, 3.6], [*"aaabb"]
    for of_few in (kinds, ["text"] * 5):
        expected = expected_mean_bound(few, of_few, 40, 0.975)
        bound = mean_bound(few * 8, of_few * 8, 0.975)
        assert expected == pytest.approx(bound, rel=0.1)
        assert mean_bound(few * 8, kinds * 8, 0.5) < expected
    assert expected_mean_bound([2.0], ["a"], 32, 0.975) == pytest.approx(
        2 * expected_mean_bound([1.0], ["b"], 32, 0.975)
    )
    # with fewer than two prompts of a kind the certificate takes all for one kind
    assert expected_mean_bound(few, kinds, 3, 0.975) == expected_mean_bound(few, ["text"] * 5, 3, 0.975)
