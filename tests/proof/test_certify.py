"""The certificate without a model: what looks at layers lead to, and what prompts certify."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from calibrate.prompts.prompt import Prompt
from calibrate.proof import certify
from calibrate.proof.adjust import TAU_FOR_ERROR, Proven
from calibrate.proof.again import compared
from calibrate.proof.agreement import PromptAgreement
from calibrate.proof.bounds import CONFIDENCE, RUNGS, Look, look_confidence, mean_bound
from calibrate.proof.certify import (
    Ladder,
    certificate_of,
    proven_again,
    shares_of_limits,
    without_slower_layers,
    without_slower_lengths,
)
from calibrate.proof.judge import judge, retrieval_lost, slower_layers
from calibrate.proof.sample import LayerSample, LengthSample, PromptError
from calibrate.recipe import Budget
from calibrate.report.certified import tables
from calibrate.search.choice import DenseReason
from s2o_runtime.profile.record import Certificate, CertifiedLength, ContinuedBound
from support.candidates import LENGTHS, RECIPE, candidate, proofs_of

FACTORS = (0.8, 1.0, 1.25, 0.9, 1.1)  # of the mean error, by prompt
KINDS = ("text",) * len(FACTORS)
BUDGET = Budget("mse", 1e-4)


def layer_sample(mean, factors=FACTORS, density=0.5):
    """Prompts whose last eighth is off by three times as much, and continued calls by five times."""
    errors = tuple(
        PromptError(mean * factor, 1.0, (3 * mean * factor, 1.0), [(64, 5 * mean * factor, 1.0)], 0.1 * factor, density)
        for factor in factors
    )
    return LayerSample(errors, ("text",) * len(factors))


def down(begun, length, layer, means):
    """What a layer is left with if its looks find these mean errors, and its ladder."""
    ladder, at = Ladder(), begun
    for mean in means:
        revised = ladder.revise(at, length, layer, layer_sample(mean))
        if revised is None:
            return at, ladder.looks[length, layer]
        at = revised
    raise AssertionError(f"more looks than {len(means)}")


def test_the_looks_at_a_layer_share_the_error_probability():
    risks = [1 - look_confidence(share) for share in (1.0, *RUNGS)]
    assert sum(risks) == pytest.approx(1 - CONFIDENCE)
    assert risks[0] == pytest.approx(sum(risks[1:]))


def test_a_bound_within_the_limit_is_accepted_at_the_first_look():
    begun = candidate()
    left, looks = down(begun, 1024, 0, [0.5 * begun.limits[1024, 0]])
    assert left is begun
    expected = mean_bound([0.5 * begun.limits[1024, 0] * factor for factor in FACTORS], KINDS, look_confidence(1.0))
    assert looks == [Look(1.0, expected)]


@pytest.mark.parametrize(
    ("times", "rungs"),
    [
        *(([0.99] * rung + [0.1], RUNGS[:rung]) for rung in range(1, len(RUNGS) + 1)),  # the bound alone is over it
        ([1.9, 0.5], RUNGS[:3]),  # the rungs that the first bound makes hopeless are passed over
        ([9.0, 0.1], RUNGS),  # but the last one
        ([2.0] * (2 + len(RUNGS)), (*RUNGS, 0.0)),  # below it a layer is dense whatever its rounding
    ],
)
def test_a_layer_climbs_down_to_the_first_rung_that_holds(times, rungs):
    """Looks find mean errors of `times` the limit."""
    begun = candidate()
    limit, spent = begun.limits[1024, 1], begun.choice(1, 1024).allocation.mse
    left, looks = down(begun, 1024, 1, [each * limit for each in times])
    assert [look.share for look in looks] == [1.0, *rungs]
    choice = left.choice(1, 1024)
    assert choice.budget_mse == pytest.approx(rungs[-1] * spent) or choice.why_dense == DenseReason.OVER_BOUND
    config = left.layer_config(1, 1024)
    assert config == choice.config or config.is_dense
    assert config.is_dense == choice.config.is_dense == (rungs[-1] == 0.0)
    assert left.tightened[1024, 1].times == 0  # the certificate's doing, not the adjustment's
    changed = {place for place in begun.configs if left.configs[place] != begun.configs[place]}
    assert (1024, 1) in changed
    assert all(layer == 1 for _, layer in changed)


def test_at_a_checked_length_thresholds_are_lowered_from_what_they_were():
    begun = candidate()
    limit = begun.limits[768, 0]
    left, _ = down(begun, 768, 0, [0.9 * limit, 0.9 * limit, 0.1 * limit])
    pairs = zip(begun.layer_config(0, 768).heads, left.layer_config(0, 768).heads, strict=True)
    for before, after in pairs:
        assert after.tau == pytest.approx(before.tau * RUNGS[1] ** (1 / TAU_FOR_ERROR))
    assert left.profile().lengths == tuple(sorted(begun.lengths))
    assert left.profile().layer_config(0, 768) == left.layer_config(0, 768)


def test_a_rung_that_changes_no_head_is_not_looked_at(monkeypatch):
    begun = candidate()
    real = certify.with_share

    def same_at_first(begun, at, length, layer, share):
        return at if share == RUNGS[0] else real(begun, at, length, layer, share)

    monkeypatch.setattr(certify, "with_share", same_at_first)
    limit = begun.limits[512, 0]
    left, looks = down(begun, 512, 0, [limit, 0.1 * limit])
    assert [look.share for look in looks] == [1.0, RUNGS[0], RUNGS[1]]
    assert left.choice(0, 512).budget_mse == pytest.approx(RUNGS[1] * begun.choice(0, 512).allocation.mse)


def timed(begun, slower=()):
    """Proofs whose layers take 1 ms, dense 2 ms; `slower` has the seconds of others by their length and number."""
    return {
        length: replace(
            proof,
            layers=tuple(
                replace(layer, seconds=dict(slower).get((length, number), 1e-3), dense_seconds=2e-3)
                for number, layer in enumerate(proof.layers)
            ),
        )
        for length, proof in proofs_of(begun).items()
    }


def test_layers_that_adjusting_left_slower_than_dense_become_dense():
    begun = candidate("cuda")
    proofs = timed(begun, {(1024, 1): 2.1e-3, (512, 0): 2.02e-3})  # the latter is a tie
    assert slower_layers(begun, proofs) == {(1024, 1)}
    left = without_slower_layers(Proven(begun, proofs, ())).candidate
    for (length, layer), config in begun.configs.items():
        assert left.configs[length, layer] == (config.as_dense() if (length, layer) == (1024, 1) else config)
    assert left.choice(1, 1024).why_dense == DenseReason.SLOWER_ATTENTION
    assert slower_layers(left, proofs) == frozenset()
    untimed = Proven(begun, proofs_of(begun), ())
    assert without_slower_layers(untimed) == untimed


@pytest.mark.parametrize("slow_layers", [{1}, set()], ids=["a-layer", "no-layer-alone"])
def test_a_length_that_stayed_slower_than_dense_is_no_failure(slow_layers):
    """After the last attempt, when nothing else would make it dense; what is over its limit stays a problem."""
    begun = candidate("cuda")
    proofs = timed(begun, {(1024, number): 3e-3 if number in slow_layers else 2e-3 for number in range(2)})
    proofs[1024] = replace(proofs[1024], prefill_seconds=3.0, dense_prefill_seconds=2.0)
    quick = replace(proofs[1024], prefill_seconds=2.0)
    again = []
    prover = SimpleNamespace(prove=lambda _, lengths, *__: again.append(set(lengths)) or (begun, {1024: quick}))
    proven = Proven(begun, proofs, judge(begun, proofs))
    assert not proven.met
    left = without_slower_lengths(prover, proven)
    assert left.met
    assert again == [{1024}]
    became_dense = {(1024, layer) for layer in slow_layers or {0, 1}}
    for place, config in begun.configs.items():
        assert left.configs[place] == (config.as_dense() if place in became_dense else config)
    assert without_slower_lengths(prover, left) is left


def test_a_layer_that_the_certificate_left_slower_than_dense_becomes_dense_too():
    begun = candidate("cuda")
    proofs = timed(begun)
    measured = iter([{512: timed(begun, {(512, 1): 3e-3})[512]}, {512: proofs[512]}])
    prover = SimpleNamespace(prove=lambda *_: (begun, next(measured)))
    changed = certify.with_dense_layers(begun, {(512, 0)}, DenseReason.OVER_BOUND)
    proven = Proven(begun, proofs, ())
    left = proven_again(prover, proven, replace(proven, candidate=changed))
    assert [left.configs[512, layer].is_dense for layer in range(2)] == [True, True]
    assert left.candidate.choice(1, 512).why_dense == DenseReason.SLOWER_ATTENTION
    assert left.proofs[512] == proofs[512]  # as it is at the end
    assert next(measured, None) is None


@pytest.mark.parametrize(("needles", "problems"), [((2, 2), 0), ((1, 2), 0), ((0, 2), 1)])
def test_needles_that_the_certificate_lost_are_a_problem(monkeypatch, needles, problems):
    """What is written must pass `s2o-profile verify`, which asks for the needles of the same prompts."""
    begun = candidate()
    proven = Proven(begun, {}, ())
    dense = certify.with_dense_layers(begun, {(LENGTHS[0], 0), (LENGTHS[0], 1)}, DenseReason.SLOWER_PREFILL)
    changed = replace(proven, candidate=dense)
    measured = {LENGTHS[0]: SimpleNamespace(needles=needles, kl=1e-3)}
    monkeypatch.setattr(certify, "slower_than_dense", lambda *_: ())
    monkeypatch.setattr(certify, "slower_layers", lambda *_: frozenset())
    again = proven_again(SimpleNamespace(prove=lambda *_: (None, measured)), proven, changed)
    assert len(again.problems) == problems
    assert all("keeps 0 of the 2 needles" in str(problem) for problem in again.problems)


def length_sample(means=(5e-5, 2e-5), found=4, kept=4, kls=(1e-3, 2e-3, 3e-3, 4e-3, 5e-3)):
    prompts = tuple(
        Prompt(torch.tensor([number] * 10), answers=((3, 5),) if found else (), domain=domain)
        for number, domain in enumerate(("code", "prose", "code", "prose", "code"))
    )
    agreements = tuple(
        PromptAgreement(kl, 1 - kl, found if number == 0 else 0, kept if number == 0 else 0)
        for number, kl in enumerate(kls)
    )
    return LengthSample(prompts, tuple(map(layer_sample, means)), agreements, 1e-4)


def certified(seen, begun=None):
    begun = begun or candidate()
    length = LENGTHS[0]
    return certificate_of(
        length,
        seen,
        recipe=begun.recipe,
        limits=[begun.limits[length, layer] for layer in range(2)],
        configs=[begun.layer_config(layer, length) for layer in range(2)],
        looks=[[Look(1.0, 7e-5)], [Look(1.0, 3e-4), Look(RUNGS[0], 4e-5)]],
    )


def test_what_prompts_certify():
    made = certified(length_sample(kept=3))
    first, second = made.layers
    assert (first.mean, first.bound, first.first_bound, first.rung) == (pytest.approx(5.05e-5), 7e-5, 7e-5, None)
    assert (second.bound, second.first_bound, second.rung) == (4e-5, 3e-4, RUNGS[0])
    for layer, mean, share in ((first, 5e-5, 1.0), (second, 2e-5, RUNGS[0])):
        errors = [mean * factor for factor in FACTORS]
        assert layer.bound_last == pytest.approx(mean_bound([3 * e for e in errors], KINDS, look_confidence(share)))
        expected = mean_bound([5 * error for error in errors], KINDS, look_confidence(share))
        assert layer.continued == (ContinuedBound(new_tokens=64, bound=pytest.approx(expected)),)
    assert (made.kl.value, made.kl.probability) == (5e-3, pytest.approx(5 / 6))
    assert (made.tokens, first.limit, second.limit) == (5 * 512, 1e-4, 2e-4)
    assert CertifiedLength.from_json(made.to_json()) == made
    assert made.top1.value == pytest.approx(1 - 5e-3)  # the lowest
    assert made.mean_kl == pytest.approx(3e-3)
    assert made.error_over_limit.value == pytest.approx(1.25 * 5e-5 / 1e-4)
    assert made.worst.value == pytest.approx(0.125)
    assert (made.retrieval.found, made.retrieval.kept, made.noise_floor) == (4, 3, 1e-4)
    assert made.retrieval.low < 0.75 < made.retrieval.high < 1
    code, prose = made.domains
    assert [(one.domain, one.prompts) for one in made.domains] == [("code", 3), ("prose", 2)]
    assert (code.kl, prose.kl) == (pytest.approx(3e-3), pytest.approx(3e-3))
    assert prose.error_over_limit == pytest.approx(0.95 * 5e-5 / 1e-4)


def test_a_certificate_states_both_units_of_an_mse_and_which_limit_binds():
    begun = replace(candidate(), recipe=replace(RECIPE, budget=replace(BUDGET, ceiling=1e-2)))
    begun = replace(begun, chosen={**begun.chosen, 512: replace(begun.chosen[512], limits=[6e-5, 1e-4])})
    made = certified(length_sample(), begun)
    first, second = made.layers
    assert [(one.limit, one.binds) for one in made.layers] == [(6e-5, "rel_mse"), (1e-4, "mse")]
    assert (first.rel_mse, second.rel_mse) == (pytest.approx(5.05e-5), pytest.approx(2.02e-5))  # the power is 1
    assert first.rel_bound == pytest.approx(first.bound)
    half = replace(first, rel_mse=2 * first.mean)  # of outputs with half the mean square
    assert half.rel_bound == pytest.approx(2 * first.bound)
    _, units, _ = tables(Certificate(lengths=(made,)))
    assert units.rows == [("512", "7.00e-05", "7.00e-05", "1 of 2 layers")]
    without = certified(length_sample())
    assert [(one.rel_mse is None, one.binds) for one in without.layers] == [(False, None)] * 2
    in_rel_mse = replace(begun, recipe=replace(RECIPE, budget=Budget("rel_mse", 1e-4)))
    assert [one.rel_mse for one in certified(length_sample(), in_rel_mse).layers] == [None] * 2


def test_dense_layers_have_no_share_of_a_limit():
    begun = candidate()
    configs = [begun.layer_config(0, 512).as_dense(), begun.layer_config(1, 512)]
    shares = shares_of_limits(length_sample(), BUDGET, [1e-4, 2e-4], configs)
    assert shares == [[pytest.approx(2e-5 * factor / 2e-4)] for factor in FACTORS]


def test_retrieval_fails_only_where_chance_does_not_explain_it():
    few, many = (certified(length_sample(found=found, kept=kept)).retrieval for found, kept in ((4, 3), (40, 30)))
    assert retrieval_lost(512, few, RECIPE) is None
    assert str(retrieval_lost(512, many, RECIPE)) == (
        "at 512 tokens the patched model keeps 30 of the 40 needles that dense finds, so with 95% confidence no more "
        "than 87%; 95% are asked for"
    )
    nothing_found = certified(length_sample(found=4, kept=4)).retrieval
    assert retrieval_lost(512, replace(nothing_found, found=0), RECIPE) is None
    assert certified(length_sample(found=0)).retrieval is None


def recorded(seen):
    return {512: certified(seen)}


def test_a_broken_bound_is_named():
    """A mean that is a little above its bound is chance; one that is far above is not."""
    seen = length_sample()
    profile = candidate().profile()
    assert compared(profile, BUDGET, recorded(seen), {512: seen}).problems == ()
    above = replace(seen, layers=(layer_sample(8e-5), seen.layers[1]))
    check = compared(profile, BUDGET, recorded(seen), {512: above})
    assert check.problems == ()
    assert [one.what for one in check.lengths[0].bounds if one.mean > one.bound][:1] == ["all rows"]
    far = replace(seen, layers=(layer_sample(5e-4), seen.layers[1]))
    problems = compared(profile, BUDGET, recorded(seen), {512: far}).problems
    assert problems[0] == "layer 0 at 512 tokens, all rows: its mean error is 5.05e-04, 7.00e-05 is certified"
    assert len(problems) == 3  # the last eighth and continued calls too


def test_more_prompts_over_the_kl_than_chance_explains():
    seen = length_sample()
    high = replace(seen, agreements=tuple(replace(one, kl=1.0) for one in seen.agreements))
    (problem,) = compared(candidate().profile(), BUDGET, recorded(seen), {512: high}).problems
    assert problem.startswith("at 512 tokens the KL of 5 of 5 prompts is above the certified 5.0e-03, which chance")
    one = replace(seen, agreements=(replace(seen.agreements[0], kl=1.0), *seen.agreements[1:]))
    assert compared(candidate().profile(), BUDGET, recorded(seen), {512: one}).problems == ()
