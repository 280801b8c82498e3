"""The certificate without a model: certified shares, what prompts certify, and what fresh ones refute."""

import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from calibrate.prompts.prompt import Prompt
from calibrate.proof import certify
from calibrate.proof.adjust import ProofResult, find_lost_retrieval, find_slower_layers, judge
from calibrate.proof.bounds import BUDGET_SEQUENCE, SPEND_FRACTIONS, bound_mean, compute_attempt_confidence
from calibrate.proof.certify import (
    HOPELESS,
    MeanCertifier,
    PromptScorer,
    TextGroups,
    build_certificate,
    make_slower_dense,
    remeasure,
    run_fixed_sequence_test,
    without_slower_layers,
    without_slower_lengths,
)
from calibrate.proof.layers import PromptAgreement
from calibrate.proof.recheck import compare_certificate
from calibrate.proof.state import TAU_FOR_ERROR, ProblemKind
from calibrate.proof.verify import LengthProof
from calibrate.recipe import Budget
from calibrate.record import Certificate, CertifiedLength
from calibrate.report.sections import describe_certificate, list_claims, make_certificate_tables
from calibrate.search.choice import CalibrationDense
from support.candidates import CHECKS, LENGTHS, RECIPE, candidate, proof_of, proofs_of

FACTORS = (0.8, 1.0, 1.25, 0.9, 1.1)  # of the mean error, by prompt
DOMAINS = ("code", "prose", "code", "prose", "code")
BUDGET = Budget("mse", 1e-4)
GROUPS = TextGroups(((0,), (1,), (2,), (3,), (4,)), ("text",) * 5)
PROMPTS = dict.fromkeys((*LENGTHS, *CHECKS), ())
BEGUN = candidate()
PER_PROMPT = replace(BEGUN, recipe=replace(RECIPE, per_prompt=True))
TIMES = st.floats(0, 3) | st.just(math.nan)


def pretended(prove):
    """A prover of which only `prove` is called."""
    prover = SimpleNamespace(prove=prove, executor=None, journal=None)
    prover.show_progress = lambda *_: nullcontext(prover)
    return prover


def expected_ladder(errors, limit):
    """The shares that are tried of a layer with these mean errors, the share that it keeps, and the bound for that."""
    tried, share, first = [], 1.0, None
    for mean in errors:
        tried.append(share)
        confidence = compute_attempt_confidence(share, RECIPE, 2)
        bound = bound_mean([mean * factor for factor in FACTORS], GROUPS.kinds, confidence)
        first = bound if first is None else first
        if bound <= limit:
            return tried, share, bound
        hopeful = [step for step in SPEND_FRACTIONS[:-1] if step < share and step * first <= HOPELESS * limit]
        if share == SPEND_FRACTIONS[-1]:
            return tried, 0.0, 0.0
        share = [*hopeful, SPEND_FRACTIONS[-1]][0]
    raise AssertionError("more attempts than there are fractions")


@settings(deadline=None, max_examples=80)
@given(st.sampled_from((1024, 768)), st.integers(0, 1), st.lists(TIMES, min_size=5, max_size=5))
@example(1024, 0, [0.5] * 5)
@example(1024, 1, [0.75, 0.75, 0.75, 0.75, 0.1])
@example(1024, 1, [1.0, 0.1, 9.0, 9.0, 9.0])  # what the first bound makes hopeless is passed over
@example(1024, 1, [9.0, 0.05, 9.0, 9.0, 9.0])  # but for the last
@example(768, 1, [9.0] * 5)
@example(1024, 1, [math.nan, 0.05, 9.0, 9.0, 9.0])
def test_a_layer_keeps_the_largest_fraction_whose_bound_holds(length, layer, times):
    """Attempts find mean errors of `times` the limit. Later layers see the layer as it was, whatever is decided."""
    key, limit = (length, layer), BEGUN.limits[length, layer]
    tried, share, bound = expected_ladder([ratio * limit for ratio in times], limit)
    certifier, current = MeanCertifier(BEGUN, length, GROUPS), BEGUN
    for expected, ratio in zip(tried, times, strict=False):
        at = BEGUN.with_share(layer, length, expected) if expected < 1 else BEGUN
        assert current.configs == at.configs
        assert layer not in certifier.layers
        current = certifier.revise(current, length, layer, proof_of(ratio * limit, FACTORS))
    assert current is (None if len(tried) == 1 else BEGUN)
    assert certifier.revise(BEGUN, length, layer, proof_of(1.0, FACTORS)) is None
    assert (certifier.layers[layer].share, certifier.layers[layer].bound) == (share, bound)
    result = certifier.result()
    assert (result is BEGUN) == (share == 1)
    assert result.tightened == {}  # the certificate's doing, not the adjustment's
    changed = {place for place in BEGUN.configs if result.configs[place] != BEGUN.configs[place]}
    assert all(place[1] == layer for place in changed)
    assert (key in changed) == (share < 1)
    assert result.configs[key].is_dense == (share == 0)
    if length in LENGTHS:
        choice, spent = result.chosen[length].choices[layer], BEGUN.chosen[length].choices[layer].spent
        assert share or choice.why_dense == CalibrationDense.OVER_BOUND
        assert share in (0, 1) or choice.budget_mse == pytest.approx(share * spent)
    elif 0 < share < 1:
        pairs = zip(BEGUN.configs[key].heads, result.configs[key].heads, strict=True)
        assert all(new.tau == pytest.approx(old.tau * share ** (1 / TAU_FOR_ERROR)) for old, new in pairs)
        assert result.build_profile().lengths == tuple(sorted(BEGUN.lengths))


@pytest.mark.parametrize(("over", "taken"), [({}, 1.0), ({1.0: 1}, 0.85), ({0.85: 2, 1.0: 0}, 0.7), ({0.5: 1}, 0.5)])
def test_more_and_more_is_spent_from_the_safest_on_until_one_attempt_fails(over, taken, monkeypatch):
    """Of five groups of text none may be over its limits; `over` are so many at a share of what layers spend."""
    begun, seen, shares = BEGUN, [], []

    def measure(prover, at, length, prompts):
        share = BUDGET_SEQUENCE[len(shares)]
        shares.append(share)
        ratios = at.chosen[512].choices[0].budget_mse / begun.chosen[512].choices[0].spent
        assert share == 1.0 or ratios == pytest.approx(share)
        seen.append(length_proof(errors=[2.0 if number < over.get(share, 0) else 0.5 for number in range(5)]))
        return share, seen[-1]

    scale = PromptScorer(begun.recipe, (1e-4, None), math.inf)
    monkeypatch.setattr(certify, "_certify_means", measure)
    share, proof = run_fixed_sequence_test(None, begun, 512, length_proof().prompts, scale)
    assert share == taken
    assert proof is seen[shares.index(taken)]
    assert shares == [one for one in BUDGET_SEQUENCE if one <= min((s for s, n in over.items() if n), default=1.0)]


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
    assert find_slower_layers(begun, proofs) == {(1024, 1)}
    left = without_slower_layers(ProofResult(begun, proofs, ())).candidate
    for (length, layer), config in begun.configs.items():
        assert left.configs[length, layer] == (config.as_dense() if (length, layer) == (1024, 1) else config)
    assert left.chosen[1024].choices[1].why_dense == CalibrationDense.SLOWER_ATTENTION
    assert find_slower_layers(left, proofs) == frozenset()
    untimed = ProofResult(begun, proofs_of(begun), ())
    assert without_slower_layers(untimed) == untimed


@pytest.mark.parametrize("slow_layers", [{1}, set()], ids=["a-layer", "no-layer-alone"])
def test_a_length_that_stayed_slower_than_dense_is_no_failure(slow_layers):
    """After the last attempt, when nothing else would make it dense; what is over its limit stays a problem."""
    begun = candidate("cuda")
    proofs = timed(begun, {(1024, number): 3e-3 if number in slow_layers else 2e-3 for number in range(2)})
    proofs[1024] = replace(proofs[1024], prefill_seconds=3.0, dense_prefill_seconds=2.0)
    quick = replace(proofs[1024], prefill_seconds=2.0)
    again = []
    prover = pretended(lambda _, prompts: again.append(set(prompts)) or (begun, {1024: quick}))
    proven = ProofResult(begun, proofs, judge(begun, proofs))
    assert not proven.met
    left = without_slower_lengths(prover, PROMPTS, proven)
    assert left.met
    assert again == [{1024}]
    became_dense = {(1024, layer) for layer in slow_layers or {0, 1}}
    for place, config in begun.configs.items():
        assert left.configs[place] == (config.as_dense() if place in became_dense else config)
    assert without_slower_lengths(prover, PROMPTS, left) is left


def test_a_layer_that_the_certificate_left_slower_than_dense_becomes_dense_too():
    begun = candidate("cuda")
    proofs = timed(begun)
    measured = iter([{512: timed(begun, {(512, 1): 3e-3})[512]}, {512: proofs[512]}])
    prover = pretended(lambda *_: (begun, next(measured)))
    changed, _ = make_slower_dense(begun, {(512, 0)}, frozenset())
    proven = ProofResult(begun, proofs, ())
    left = remeasure(prover, PROMPTS, proven, replace(proven, candidate=changed))
    assert [left.configs[512, layer].is_dense for layer in range(2)] == [True, True]
    assert left.candidate.chosen[512].choices[1].why_dense == CalibrationDense.SLOWER_ATTENTION
    assert left.proofs[512] == proofs[512]  # as it is at the end
    assert next(measured, None) is None


@pytest.mark.parametrize(("needles", "problems"), [((2, 2), 0), ((1, 2), 0), ((0, 2), 1)])
def test_needles_that_the_certificate_lost_are_a_problem(monkeypatch, needles, problems):
    """What is written must pass `s2o-profile verify`, which asks for the needles of the same prompts."""
    begun, proven = BEGUN, ProofResult(BEGUN, {}, ())
    dense, _ = make_slower_dense(begun, set(), frozenset({LENGTHS[0]}))
    changed = replace(proven, candidate=dense)
    measured = {LENGTHS[0]: SimpleNamespace(needles=needles, kl=1e-3)}
    monkeypatch.setattr(certify, "find_slower_lengths", lambda *_: ())
    monkeypatch.setattr(certify, "find_slower_layers", lambda *_: frozenset())
    again = remeasure(pretended(lambda *_: (None, measured)), PROMPTS, proven, changed)
    assert len(again.problems) == problems
    assert all("keeps 0 of the 2 needles" in str(problem) for problem in again.problems)


def length_proof(means=(5e-5, 2e-5), found=4, kept=4, kls=(1e-3, 2e-3, 3e-3, 4e-3, 5e-3), errors=None, groups=""):
    """Five prompts whose layers have these mean errors, or whose first layer has these errors over 1e-4."""
    prompts = tuple(
        Prompt(torch.tensor([number] * 10), ((3, 5),) if found else (), domain, groups and groups[number])
        for number, domain in enumerate(DOMAINS)
    )
    agreements = [
        PromptAgreement(kl, 1 - kl, found if number == 0 else 0, kept if number == 0 else 0)
        for number, kl in enumerate(kls)
    ]
    layers = [proof_of(mean, FACTORS, last=3.0, kinds=DOMAINS) for mean in means]
    if errors is not None:
        layers[0] = proof_of(1e-4, errors, kinds=DOMAINS)
    return LengthProof.from_agreements(layers, agreements, prompts)


def certified(seen, begun=None, scale=None, change=lambda layers: layers):
    begun, length = begun or BEGUN, LENGTHS[0]
    means = MeanCertifier(begun, length, TextGroups.from_prompts(seen.prompts))
    for layer, proof in enumerate(seen.layers):
        assert means.revise(begun, length, layer, proof) is None or layer in means.layers
    means.layers = change(means.layers)
    limits = tuple(begun.limits[length, layer] for layer in range(2))
    return build_certificate(length, seen, means, scale or PromptScorer(begun.recipe, limits, 4e-3), 1e-4)


def test_what_prompts_certify():
    outcome = certified(length_proof(kept=3))
    first, second = outcome.layers
    assert (first.mean, first.limit, second.limit) == (pytest.approx(5.05e-5), 1e-4, 2e-4)
    assert (first.spent, second.spent) == (None, None)
    assert first.mean < first.bound <= first.limit
    assert (outcome.prompts, outcome.groups, outcome.tokens) == (5, 5, 5 * 512)
    assert outcome.share == pytest.approx(0.05**0.2)
    assert outcome.error_over_limit == pytest.approx(3 * 1.25 * 5e-5 / 1e-4)  # of the rows that answer
    assert outcome.kl == pytest.approx(outcome.error_over_limit * 4e-3)
    assert (outcome.mean_kl, outcome.top1) == (pytest.approx(3e-3), pytest.approx(1 - 5e-3))  # the lowest
    assert (outcome.retrieval.found, outcome.retrieval.kept, outcome.noise_floor) == (4, 3, 1e-4)
    assert outcome.retrieval.low < 0.75 < outcome.retrieval.high < 1
    code, prose = outcome.domains
    assert [(one.domain, one.prompts, one.groups) for one in outcome.domains] == [("code", 3, 3), ("prose", 2, 2)]
    assert (code.kl, prose.kl) == (pytest.approx(3e-3), pytest.approx(3e-3))
    assert prose.error_over_limit == pytest.approx(0.95 * 5e-5 / 1e-4)
    assert prose.answer_over_limit == pytest.approx(3 * 0.95 * 5e-5 / 1e-4)
    assert CertifiedLength.from_json(outcome.to_json()) == outcome
    of_kl = certified(length_proof(kls=(1e-3, 1.0, 1e-3, 1e-3, 1e-3)))
    assert (of_kl.kl, of_kl.error_over_limit) == (pytest.approx(1.0), pytest.approx(1.0 / 4e-3))  # one joint number


def test_the_claims_in_words():
    outcome = certified(length_proof())
    certificate = Certificate(confidence=0.95, lengths=(outcome,))
    assert describe_certificate(certificate, 4) == (
        "Certified on 5 prompts of each length, of 5 groups of text (2 kinds in equal parts): with 95% "
        "confidence, if errors of a kind vary about normally, the mean error of every layer over prompts like these, "
        "at each of these lengths, is within its limit; over code alone the largest is 52% of it, estimated from 3 "
        "prompts."
    )
    code, prose = outcome.domains
    single = replace(outcome, domains=(code, replace(prose, groups=1)))  # then `bound_mean` does not weigh kinds
    assert "5 groups of text (code, prose): with" in describe_certificate(
        replace(certificate, lengths=(outcome, single)), 4
    )
    assert list_claims(certificate) == [
        "512 tokens: with 95% confidence at this length at least 54.9% of prompts like these keep every layer within "
        "1.88 times its limit, over all rows and over those that answer, and the KL within 7.5e-03 nats, together; "
        "these had a mean KL of 3.0e-03 (two dense implementations: 1.0e-04); 4 of 4 needles kept (39.7% shown, 100% "
        "not refuted)"
    ]


def test_single_prompts_within_their_limits_are_said_to_be():
    outcome = certified(length_proof(means=(2e-5, 2e-5)), PER_PROMPT)
    assert (outcome.error_over_limit, outcome.kl) == (1.0, pytest.approx(4e-3))
    assert outcome.share == pytest.approx(1 - 0.657, abs=1e-3)
    assert "keep every layer within its limit, over" in list_claims(Certificate(confidence=0.95, lengths=(outcome,)))[0]


@pytest.mark.parametrize("over", [0, 1])
def test_single_prompts_over_their_limits_at_the_safest_are_a_problem(over, monkeypatch):
    prompts, proof = length_proof().prompts, length_proof(errors=[2.0] * over + [0.5] * (5 - over))
    means = MeanCertifier(PER_PROMPT, 512, TextGroups.from_prompts(prompts))
    for layer, layer_proof in enumerate(length_proof(means=(2e-5, 2e-5)).layers):
        means.revise(PER_PROMPT, 512, layer, layer_proof)
    monkeypatch.setattr(certify, "_certify_means", lambda *_: (means, proof))
    monkeypatch.setattr(certify, "measure_items", lambda *_: [{"kl": None}])
    monkeypatch.setattr(certify, "MIN_GROUPS", 5)
    proven = ProofResult(PER_PROMPT, dict.fromkeys(PROMPTS, length_proof()), ())
    problems = certify.certify(pretended(None), {512: prompts}, proven).problems
    at_512 = [problem for problem in problems if problem.length == 512]
    assert [problem.kind for problem in at_512] == [ProblemKind.NOT_SHOWN] * over
    assert all("at 512 tokens 1 of 5 groups" in str(problem) and "with 50% of" in str(problem) for problem in at_512)


def test_a_group_counts_once_by_its_largest_prompt():
    seen = length_proof(groups=("a", "b", "a", "c", "d"))
    groups = TextGroups.from_prompts(seen.prompts)
    assert (groups.members, groups.kinds) == (((0, 2), (1,), (3,), (4,)), ("code", "prose", "prose", "code"))
    assert groups.mean_per_group([1.0, 2.0, 3.0, 4.0, 5.0]) == [2.0, 2.0, 4.0, 5.0]
    assert groups.max_per_group([1.0, 2.0, 3.0, 4.0, 5.0]) == [3.0, 2.0, 4.0, 5.0]
    assert (certified(seen).groups, certified(seen).share) == (4, pytest.approx(0.05**0.25))
    assert [one.groups for one in certified(seen).domains] == [2, 2]


def test_the_scale_is_that_of_the_adjust_prompts():
    scale = PromptScorer.from_proof(BEGUN, 512, length_proof())
    assert scale.limits == (BEGUN.limits[512, 0], BEGUN.limits[512, 1])
    assert scale.kl_unit == pytest.approx(5e-3 / (3 * 1.25 * 5e-5 / 1e-4))
    assert PromptScorer.from_proof(PER_PROMPT, 512, length_proof()).kl_unit == pytest.approx(2 * scale.kl_unit)
    undefined = length_proof(errors=[math.nan, 1.0, 1.0, 1.0, 1.0], kls=(1e-3, math.nan, 1e-3, 1e-3, 1e-3))
    assert scale.scores(undefined)[:2] == [math.inf, math.inf]


def test_certificates_of_too_few_groups_are_a_problem_that_says_how_many_would_do():
    proven = certify.certify(
        pretended(None), {512: length_proof().prompts[:2]}, ProofResult(BEGUN, proofs_of(BEGUN), ())
    )
    assert proven.certificates == {}
    assert {problem.kind for problem in proven.problems} == {ProblemKind.TOO_FEW}
    assert str(proven.problems[0]) == (
        "at 512 tokens not proven: 2 groups of text to certify on allow no statement, 3 are the fewest, and 29 show "
        "one about 90% of prompts"
    )


def test_a_certificate_states_both_units_of_an_mse_and_which_limit_binds():
    begun = replace(candidate(), recipe=replace(RECIPE, budget=replace(BUDGET, ceiling=1e-2)))
    begun = replace(begun, chosen={**begun.chosen, 512: replace(begun.chosen[512], limits=[9e-5, 1e-4])})
    outcome = certified(length_proof(), begun)
    first, second = outcome.layers
    assert [(one.limit, one.binds) for one in outcome.layers] == [(9e-5, "rel_mse"), (1e-4, "mse")]
    assert (first.rel_mse, second.rel_mse) == (pytest.approx(5e-5), pytest.approx(2e-5))  # the power is 1
    half = replace(first, rel_mse=2 * first.mean)  # of outputs with half the mean square
    assert half.rel_bound == pytest.approx(2 * first.bound)
    _, units, _ = make_certificate_tables(Certificate(lengths=(outcome,)))
    assert units.rows == [("512", f"{first.bound:.2e}", f"{first.rel_bound:.2e}", "1 of 2 layers")]
    in_rel_mse = replace(begun, recipe=replace(RECIPE, budget=Budget("rel_mse", 1e-4)))
    assert [one.rel_mse for one in certified(length_proof(), in_rel_mse).layers] == [None] * 2


def test_a_layer_that_became_dense_has_no_error():
    outcome = certified(length_proof(), BEGUN, change=lambda layers: {**layers, 0: certify.CertifiedSpending(0.0)})
    first = outcome.layers[0]
    assert (first.mean, first.bound, first.density, first.spent) == (0.0, 0.0, 1.0, 0.0)
    assert outcome.error_over_limit == pytest.approx(1.875)  # the claim about prompts is of layers as adjusted
    assert outcome.domains[0].error_over_limit == pytest.approx(1.05 * 2e-5 / 2e-4)
    assert "0 layers got less of the budget than was adjusted, and 1 became dense" in list_claims(
        Certificate(lengths=(outcome,))
    )


def test_retrieval_fails_only_where_chance_does_not_explain_it():
    few, many = (certified(length_proof(found=found, kept=kept)).retrieval for found, kept in ((4, 3), (40, 30)))
    assert find_lost_retrieval(512, few, RECIPE) is None
    assert str(find_lost_retrieval(512, many, RECIPE)) == (
        "at 512 tokens the patched model keeps 30 of the 40 needles that dense finds, so with 95% confidence no more "
        "than 87%; 95% are asked for"
    )
    nothing_found = certified(length_proof(found=4, kept=4)).retrieval
    assert find_lost_retrieval(512, replace(nothing_found, found=0), RECIPE) is None
    assert certified(length_proof(found=0)).retrieval is None


def checked(fresh, stated=None):
    profile = BEGUN.build_profile()
    return compare_certificate(profile, RECIPE, {512: certified(stated or length_proof())}, {512: fresh})


def test_fresh_prompts_break_a_mean_only_beyond_chance():
    assert checked(length_proof()).problems == ()
    above = checked(length_proof(means=(1.05e-4, 2e-5)))
    assert (above.lengths[0].means > 1, above.lengths[0].broken) == (True, 0)
    far = checked(length_proof(means=(5e-4, 2e-5)))
    assert far.problems[0] == "layer 0 at 512 tokens: its mean error is 5.05e-04, its limit 1.00e-04"
    assert far.lengths[0].broken == 1


def test_fresh_prompts_break_the_joint_claim_beyond_chance():
    """At least 54.9% are within; that all five or four are not has a chance of 2% and 13%."""
    (problem,) = checked(length_proof(kls=(1.0,) * 5)).problems
    assert problem == (
        "at 512 tokens 5 of 5 groups of text have a prompt with an error over 1.88 times its limit or a KL over "
        "7.5e-03, which chance gives in 1.9% of cases"
    )
    fewer = checked(length_proof(kls=(1.0,) * 4 + (1e-3,)))
    assert (fewer.problems, fewer.lengths[0].above) == ((), 4)
    same = checked(length_proof())
    assert (same.lengths[0].above, same.lengths[0].chance) == (0, 1.0)
