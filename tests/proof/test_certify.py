"""The certificate without a model: certified shares, what prompts certify, and what fresh ones refute."""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from calibrate.prompts.prompt import Prompt
from calibrate.proof import certify
from calibrate.proof.bounds import SPEND_FRACTIONS, bound_mean, compute_attempt_confidence
from calibrate.proof.certify import HOPELESS, MeanCertifier, TextGroups, build_certificate, find_lost_retrieval
from calibrate.proof.recheck import CertificateCheck, FreshPrompt, LengthCheck, compare_certificate
from calibrate.proof.state import TAU_FOR_ERROR, ProblemKind
from calibrate.proof.verify import LengthProof
from calibrate.recipe import Budget
from calibrate.record import Certificate, CertifiedLength, CertifiedRetrieval
from calibrate.report.sections import describe_certificate, list_claims, make_certificate_tables, show_certificate
from calibrate.search.choice import CalibrationDense
from support.candidates import LENGTHS, RECIPE, candidate, proof_of, with_proofs

FACTORS = (0.8, 1.0, 1.25, 0.9, 1.1)  # of the mean error, by prompt
DOMAINS = ("code", "prose", "code", "prose", "code")
KLS = (1e-3, 2e-3, 3e-3, 4e-3, 5e-3)
BUDGET = Budget("mse", 1e-4)
GROUPS = TextGroups(((0,), (1,), (2,), (3,), (4,)), ("text",) * 5)
BEGUN = candidate()
TIMES = st.floats(0, 3) | st.just(math.nan)


def expected_ladder(length, layer, times):
    """The shares that are tried of a layer with these mean errors, the share that it keeps, and the bound for that."""

    def config_at(share):
        source = BEGUN if share == 1 else BEGUN.with_share(layer, length, share)
        return source.layer_config(layer, length)

    tried, share, first, limit = [], 1.0, None, BEGUN.limits[length, layer]
    for ratio in times:
        tried.append(share)
        confidence, now = compute_attempt_confidence(share, RECIPE, 2), config_at(share)
        bound = bound_mean([ratio * limit * factor for factor in FACTORS], GROUPS.kinds, confidence)
        first = bound if first is None else first
        if bound <= limit:
            return tried, share, bound
        hopeful = [step for step in SPEND_FRACTIONS[:-1] if step < share and step * first <= HOPELESS * limit]
        lower = [*hopeful, SPEND_FRACTIONS[-1]]
        changing = [step for step in lower if step < share and config_at(step) != now]
        if not changing:
            return tried, 0.0, 0.0
        share = changing[0]
    raise AssertionError("more attempts than there are fractions")


@settings(deadline=None, max_examples=80)
@given(st.sampled_from((1024, 768)), st.integers(0, 1), st.lists(TIMES, min_size=6, max_size=6))
@example(1024, 0, [0.5] * 6)
@example(1024, 1, [0.75, 0.75, 0.75, 0.75, 0.75, 0.1])
@example(1024, 1, [1.0, 0.1, 9.0, 9.0, 9.0, 9.0])  # what the first bound makes hopeless is passed over
@example(1024, 1, [9.0, 0.05, 9.0, 9.0, 9.0, 9.0])  # but for the last
@example(768, 1, [9.0] * 6)
@example(1024, 1, [math.nan, 0.05, 9.0, 9.0, 9.0, 9.0])
def test_a_layer_keeps_the_largest_fraction_whose_bound_holds(length, layer, times):
    """Attempts find mean errors of `times` the limit. Later layers see the layer as it was, whatever is decided."""
    key, limit = (length, layer), BEGUN.limits[length, layer]
    tried, share, bound = expected_ladder(length, layer, times)
    certifier, current = MeanCertifier(BEGUN, length, GROUPS), BEGUN
    for expected, ratio in zip(tried, times, strict=False):
        at = BEGUN.with_share(layer, length, expected) if expected < 1 else BEGUN
        assert current.configs == at.configs
        assert layer not in certifier.layers
        current = certifier.revise(current, length, layer, proof_of(ratio * limit, FACTORS))
    assert current is (None if len(tried) == 1 else BEGUN)
    assert certifier.revise(BEGUN, length, layer, proof_of(1.0, FACTORS)) is None
    assert (certifier.layers[layer].spent, certifier.layers[layer].bound) == (None if share == 1 else share, bound)
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
        assert share in (0, 1) or choice.budget.mse == pytest.approx(share * spent)
    elif 0 < share < 1:
        pairs = zip(BEGUN.configs[key].heads, result.configs[key].heads, strict=True)
        assert all(new.tau == pytest.approx(old.tau * share ** (1 / TAU_FOR_ERROR)) for old, new in pairs)
        assert result.build_profile().lengths == tuple(sorted(BEGUN.lengths))


class Certifying:
    """A prover whose proofs are these, in this order; `attempts` are the candidates that they began with."""

    executor = journal = None

    def __init__(self, *proofs):
        self._proofs, self.attempts = iter(proofs), []

    def show_progress(self, title, lengths):
        return nullcontext(self)

    def prove(self, candidate, prompts, revise, timed=False, compared=True, stage="certifying"):
        self.attempts.append(candidate)
        self.compared = compared
        (length,), proof = prompts, next(self._proofs)
        for layer, layer_proof in enumerate(proof.layers):
            while (candidate := revise(candidate, length, layer, layer_proof)) is not None:
                pass
            candidate = self.attempts[-1]
        return candidate, {length: proof}


def length_proof(means=(5e-5, 2e-5), found=4, kept=4, groups=""):
    """Five prompts whose layers have these mean errors."""
    prompts = tuple(
        Prompt(torch.tensor([number] * 10), ((3, 5),) if found else (), domain, groups and groups[number])
        for number, domain in enumerate(DOMAINS)
    )
    results = [
        {"kl": kl, "top1": 1 - kl, "found": 0 if number else found, "kept": 0 if number else kept}
        for number, kl in enumerate(KLS)
    ]
    layers = [proof_of(mean, FACTORS, kinds=DOMAINS) for mean in means]
    return LengthProof.from_results(layers, results, prompts)


def certified(seen, begun=None):
    begun = begun or BEGUN
    means = MeanCertifier(begun, 512, TextGroups.from_prompts(seen.prompts))
    Certifying(seen).prove(begun, {512: seen.prompts}, means.revise)
    return build_certificate(512, seen, means)


def test_what_prompts_certify():
    outcome = certified(length_proof(kept=3))
    first, second = outcome.layers
    assert (first.mean, first.limit, second.limit) == (pytest.approx(5.05e-5), 1e-4, 2e-4)
    assert (first.spent, second.spent) == (None, None)
    assert first.mean < first.bound <= first.limit
    assert (outcome.prompts, outcome.groups, outcome.tokens) == (5, 5, 5 * 512)
    assert outcome.mean_kl == pytest.approx(3e-3)
    assert (outcome.retrieval.found, outcome.retrieval.kept) == (4, 3)
    assert outcome.retrieval.low < 0.75 < outcome.retrieval.high < 1
    code, prose = outcome.domains
    assert [(one.domain, one.prompts, one.groups) for one in outcome.domains] == [("code", 3, 3), ("prose", 2, 2)]
    assert (code.kl, prose.kl) == (pytest.approx(3e-3), pytest.approx(3e-3))
    assert prose.error_over_limit == pytest.approx(0.95 * 5e-5 / 1e-4)
    assert CertifiedLength.from_json(outcome.to_json()) == outcome


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
        "512 tokens: these prompts had a mean KL of 3.0e-03; 4 of 4 needles kept (39.7% shown, 100% not refuted)"
    ]


def test_fresh_prompts_show_how_likely_chance_gives_what_is_outside():
    of_answers = LengthCheck(512, 9, 7, 0.5, 0, 1e-3, CertifiedRetrieval(found=4, kept=3), (), above=2, chance=0.1234)
    of_prompts = (FreshPrompt("code", "ast", 1e-3, 0.5, None),)
    of_layers = LengthCheck(768, 9, 7, 0.5, 1, 1e-3, None, (), of_prompts=of_prompts)
    _, fresh, table, _ = show_certificate(CertificateCheck((of_answers, of_layers), ()))
    assert fresh.rows == [("code", "ast", "1.0e-03", "50%")]
    columns = dict(zip(table.names, zip(*table.rows, strict=True), strict=True))
    assert (columns["above"], columns["chance"]) == (("2", "-"), ("12.3%", "-"))
    assert columns["kept"] == ("3 of 4", "-")


def test_a_group_counts_once_by_its_largest_prompt():
    seen = length_proof(groups=("a", "b", "a", "c", "d"))
    groups = TextGroups.from_prompts(seen.prompts)
    assert (groups.members, groups.kinds) == (((0, 2), (1,), (3,), (4,)), ("code", "prose", "prose", "code"))
    assert groups.mean_per_group([1.0, 2.0, 3.0, 4.0, 5.0]) == [2.0, 2.0, 4.0, 5.0]
    assert certified(seen).groups == 4
    assert [one.groups for one in certified(seen).domains] == [2, 2]


@pytest.mark.parametrize(("needles", "compared"), [(None, True), ((1, 2), True), ((0, 0), False)])
def test_the_dense_model_reads_no_prompt_where_it_had_found_no_needle(needles, compared):
    prover, proven = Certifying(length_proof()), with_proofs(BEGUN, {512: {"needles": needles}})
    certify.certify(prover, {512: length_proof().prompts}, proven)
    assert prover.compared == compared
    claim = list_claims(Certificate(lengths=(replace(certified(length_proof()), mean_kl=None, retrieval=None),)))[0]
    assert claim.endswith(
        "the dense model, which had found no needle, read none of these prompts; retrieval not proven"
    )


def test_certificates_of_too_few_groups_are_a_problem_that_says_how_many_would_do():
    proven = certify.certify(Certifying(), {512: length_proof().prompts[:2]}, with_proofs(BEGUN))
    assert proven.certificates == {}
    assert {problem.kind for problem in proven.problems} == {ProblemKind.TOO_FEW}
    assert "2 groups of text to certify on allow no statement, 3 are the fewest" in proven.problems[0].text


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
    outcome = certified(length_proof((2e-4, 2e-5)))
    first = outcome.layers[0]
    assert (first.mean, first.bound, first.density, first.spent) == (0.0, 0.0, 1.0, 0.0)
    assert outcome.domains[0].error_over_limit == pytest.approx(1.05 * 2e-5 / 2e-4)
    claims = list_claims(Certificate(lengths=(outcome,)))
    assert "0 layers got less of the budget than was adjusted, and 1 became dense" in claims


def test_retrieval_fails_only_where_chance_does_not_explain_it():
    few, many = (certified(length_proof(found=found, kept=kept)).retrieval for found, kept in ((4, 3), (40, 30)))
    assert find_lost_retrieval(512, few, RECIPE) is None
    assert "30 of the 40 needles" in find_lost_retrieval(512, many, RECIPE).text
    assert find_lost_retrieval(512, replace(many, found=0), RECIPE) is None
    assert certified(length_proof(found=0)).retrieval is None


@pytest.mark.parametrize(
    ("fresh", "problem", "broken"),
    [
        ({}, None, 0),
        ({"means": (1.05e-4, 2e-5)}, None, 0),
        ({"means": (5e-4, 2e-5)}, "layer 0 at 512 tokens: its mean error is 5.05e-04, its limit 1.00e-04", 1),
        ({"means": (math.nan, 2e-5)}, "layer 0 at 512 tokens: its mean error is nan, its limit 1.00e-04", 1),
        ({"found": 40, "kept": 5}, "at 512 tokens 5 of 40 needles are kept, at least 40% is certified", 0),
    ],
    ids=["same", "mean-by-chance", "mean", "nan", "needles"],
)
def test_fresh_prompts_break_a_claim_only_beyond_chance(fresh, problem, broken):
    stated = {512: certified(length_proof())}
    (length,) = compare_certificate(BEGUN.build_profile(), RECIPE, stated, {512: length_proof(**fresh)})
    assert (length.broken, bool(length.problems)) == (broken, problem is not None)
    assert (length.means > 1) == (fresh.get("means", (0.0,))[0] > 1e-4)
    assert problem is None or length.problems[0].startswith(problem)
    largest = [fresh.get("means", (5e-5,))[0] / 1e-4 * factor for factor in FACTORS]  # of layer 0, also where it is NaN
    assert [prompt.error_over_limit for prompt in length.of_prompts] == pytest.approx(largest, nan_ok=True)
    assert [(prompt.domain, prompt.kl) for prompt in length.of_prompts] == [*zip(DOMAINS, KLS, strict=True)]
