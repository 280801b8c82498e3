"""Candidates and how they are tightened and judged, without a model: plain results go in, a new candidate comes out."""

import math
from dataclasses import replace

import pytest

from calibrate.proof.adjust import TIGHTEN_TO, TIGHTENINGS, tighten, tighten_layer
from calibrate.proof.judge import judge, slower_than_dense
from calibrate.proof.state import Problem, ProblemKind
from calibrate.search.choice import DenseReason
from support.candidates import CHECKS, LENGTHS, LIMITS, candidate, proof_of, proofs_of


def test_a_checked_length_has_the_longest_buckets_limit_and_what_the_runtime_interpolates():
    begun = candidate()
    for layer in range(2):
        assert begun.limits[768, layer] == begun.limits[1536, layer] == begun.limits[2048, layer] == LIMITS[2048][layer]
        for length in begun.lengths:
            assert begun.configs[length, layer] == begun.profile().layer_config(layer, length)
    assert begun.profile().lengths == LENGTHS


def test_a_layer_within_its_limit_is_accepted():
    begun = candidate()
    assert tighten_layer(begun, 512, 0, proof_of(begun.limits[512, 0])) is None
    dense = replace(begun, dense_lengths=frozenset({768}))
    assert tighten_layer(dense, 768, 0, proof_of(1.0)) is None


def test_a_layer_over_its_limit_spends_less_by_what_it_is_over():
    begun = candidate()
    before, configs = begun.choice(1, 1024), begun.configs
    tightened = tighten_layer(begun, 1024, 1, proof_of(3 * begun.limits[1024, 1]))
    after = tightened.choice(1, 1024)
    assert after.budget_mse == pytest.approx(before.allocation.mse * TIGHTEN_TO / 3)
    assert tightened.layer_config(1, 1024) == after.config != before.config
    assert tightened.tightened[1024, 1].first_error == 3 * begun.limits[1024, 1]
    again = tighten_layer(tightened, 1024, 1, proof_of(2 * begun.limits[1024, 1]))
    assert again.tightened[1024, 1].first_error == 3 * begun.limits[1024, 1]
    assert tightened.choices[1024].choices == [begun.chosen[1024].choices[0], after]
    assert begun.configs == configs  # a candidate never changes
    changed = {place for place in configs if tightened.configs[place] != configs[place]}
    assert changed == {(1024, 1), (768, 1), (1536, 1)}  # what is interpolated follows
    assert tightened.profile().lengths == LENGTHS


def test_a_checked_length_gets_lower_thresholds_and_becomes_a_bucket():
    begun = candidate()
    tightened = tighten_layer(begun, 768, 0, proof_of(2 * begun.limits[768, 0]))
    pairs = zip(begun.layer_config(0, 768).heads, tightened.layer_config(0, 768).heads, strict=True)
    assert all(after.tau < before.tau and replace(after, tau=before.tau) == before for before, after in pairs)
    assert tightened.choice(0, 768) is None
    assert tightened.profile().lengths == tuple(sorted((*LENGTHS, *CHECKS)))
    assert tightened.profile().layer_config(0, 768) == tightened.layer_config(0, 768)


@pytest.mark.parametrize("length", [1024, 768], ids=["calibrated", "checked"])
def test_the_last_tightening_makes_a_layer_dense(length):
    begun = candidate()
    for times in range(1, TIGHTENINGS + 1):
        assert not begun.layer_config(0, length).is_dense
        begun = tighten_layer(begun, length, 0, proof_of(1.01 * begun.limits[length, 0]))
        assert begun.tightened[length, 0].times == times
    assert begun.layer_config(0, length).is_dense
    assert tighten_layer(begun, length, 0, proof_of(1.0)) is None
    if length in LENGTHS:
        assert begun.choices[length].choices[0].why_dense == DenseReason.OVER_LIMIT


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
    assert slower_than_dense(begun, proofs) == (slower,)
    assert slower_than_dense(candidate("cpu"), proofs) == ()


@pytest.mark.parametrize(
    ("lost", "halved", "again"),
    [(512, {512}, {512, 768}), (1024, {1024}, {768, 1024, 1536}), (768, {512, 1024}, {512, 768, 1024, 1536})],
    ids=["shortest", "middle", "checked"],
)
def test_lost_needles_cost_half_the_budget(lost, halved, again):
    begun = candidate()
    proofs = proofs_of(begun)
    proofs[lost] = replace(proofs[lost], needles=(0, 20))
    after, lengths = tighten(begun, judge(begun, proofs), proofs)
    assert lengths == again
    for length in LENGTHS:
        share = 0.5 if length in halved else 1.0
        for old, new in zip(begun.chosen[length].choices, after.chosen[length].choices, strict=True):
            assert new.budget_mse == share * old.budget_mse
