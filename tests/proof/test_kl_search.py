"""How much a budget in KL lets heads spend: the secant on plain numbers, and its passes, with fake proofs."""

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest

from calibrate.proof import kl
from calibrate.proof.adjust import judge, kl_shown_over_budget, tighten
from calibrate.proof.kl import PASSES, best_scale, close_enough, next_scale, within_kl
from calibrate.proof.state import KlTrial, Problem, ProblemKind
from calibrate.proof.verify import LayerProof, LengthProof
from calibrate.recipe import Budget
from calibrate.search.allocate import ErrorWeights
from calibrate.search.choice import HARMLESS
from support.candidates import LENGTHS, RECIPE, candidate

AIM, MOST = 4e-3, 5e-3
WEIGHTS = ErrorWeights(40.0, (0.5, 1.5))  # of each of the two layers: a mean of what they spend times 40 is the KL


def searched(law, aim=AIM, most=MOST, passes=PASSES):
    """What a search ends with where a scale s gives the KL law(s): the scale, and the passes."""
    done = []
    while len(done) < passes and not close_enough(done, aim, most):
        scale = next_scale(done, aim)
        done.append(KlTrial(scale, aim * scale, law(scale)))
    return best_scale(done, aim, most), done


@pytest.mark.parametrize("factor", [0.3, 1.0, 1.5, 3.6, 12.0])
@pytest.mark.parametrize("power", [0.7, 1.0, 1.3])
def test_three_passes_find_the_scale(factor, power):
    """Sensitivities may be off by a factor, and the KL need not be linear in what is spent."""

    def law(scale):
        return factor * AIM * scale**power

    scale, passes = searched(law)
    assert law(scale) == pytest.approx(AIM, rel=0.13)
    assert law(scale) <= MOST
    assert passes[0].scale == 1.0
    assert len(passes) == 1 or factor != 1.0


def test_what_is_proven_is_within_the_budget_where_a_pass_was():
    """Of a KL that jumps over the aim, the side below it; where none was below, what the secant says."""
    below, above = KlTrial(0.5, 1.0, 0.4 * AIM), KlTrial(0.6, 1.0, 1.3 * AIM)
    assert above.kl > MOST
    assert best_scale([below, above], AIM, MOST) == 0.5
    assert not close_enough([above], AIM, MOST)
    assert best_scale([above], AIM, MOST) == pytest.approx(0.6 / 1.3)
    just_above = KlTrial(1.0, 1.0, 0.99 * MOST)
    assert close_enough([just_above], 0.9 * MOST, MOST)
    assert not close_enough([replace(just_above, kl=1.01 * MOST)], MOST, MOST)


@pytest.fixture
def begun():
    recipe = replace(RECIPE, budget=Budget("kl", MOST), scope="model", margin=AIM / MOST).validate()
    begun = replace(candidate(), recipe=recipe)
    chosen = {
        length: replace(of_length, choices=[replace(choice, weights=WEIGHTS) for choice in of_length.choices])
        for length, of_length in begun.chosen.items()
    }
    return replace(begun, chosen=chosen)


def kl_of(config, factor):
    """What a layer of the candidates costs, by other sums than the code's: `factor` times what is predicted."""
    heads = zip((1e-7, 3e-7), config.heads, strict=True)
    mse = [slope * head.tau * (2 if head.tail == "mean" else 1) for slope, head in heads]
    return factor * 20.0 * (0.5 * mse[0] + 1.5 * mse[1]) / 2


def fake_proof(candidate, length, factors):
    """A proof that finds what the layers cost together, each `factors` times what is predicted of it."""
    choices = candidate.choices[length].choices
    kl = sum(kl_of(choice.config, factor) for choice, factor in zip(choices, factors, strict=True))
    layers = tuple(LayerProof(choice.allocation.mse, 1.0, 0.5, 0.0) for choice in choices)
    return LengthProof(layers, kl, 1.0, None, 0.0, 0.0)


@pytest.mark.parametrize("together", [1.0, 2.0], ids=["as by themselves", "more than by themselves"])
def test_each_length_is_passed_until_it_is_close(together, begun, monkeypatch):
    """Layers are weighed by themselves first; what they cost together is found by passes."""
    factors = dict(zip(LENGTHS, ((1.0, 1.0), (9.0, 1.0), (0.5, 0.25)), strict=True))
    passed = []

    def alone(executor, prompts, configs, journal):
        (length,) = prompts
        return tuple(kl_of(config, factor) for config, factor in zip(configs, factors[length], strict=True)), 0.0

    def prove(title, lengths, candidate, revise, timed):
        passed.append((set(lengths), timed))
        assert revise is kl.tighten_layer
        return candidate, {length: proof(candidate, length) for length in lengths}

    def proof(candidate, length):
        return fake_proof(candidate, length, [together * factor for factor in factors[length]])

    monkeypatch.setattr(kl, "isolated_kl", alone)
    held_out = {length: [length] for length in begun.lengths}
    prover = SimpleNamespace(executor=None, held_out=held_out, journal=None, progress=False, prove=prove)
    found, passes = within_kl(prover, begun)
    assert passed[0] == (set(LENGTHS), False)
    assert all(now <= before for (before, _), (now, _) in pairwise(passed))
    assert len(passed) <= (1 if together == 1.0 else PASSES)
    for length, of_layers in factors.items():
        final = proof(found, length)
        assert 0.8 * AIM <= final.kl <= MOST
        assert final.kl in [one.kl for one in passes[length]]
        for one in passes[length]:
            assert one.kl == pytest.approx(together * one.predicted)
        for layer, (choice, of_layer) in enumerate(zip(found.chosen[length].choices, final.layers, strict=True)):
            assert choice.weights.layer == pytest.approx(of_layers[layer] * WEIGHTS.layer)
            spent, harmless = of_layer.mse / begun.recipe.margin, HARMLESS * MOST / choice.weights.layer
            assert found.limits[length, layer] == pytest.approx(max(spent, harmless))
            assert choice.budget_mse == choice.spent == WEIGHTS.mean(choice.allocation)


def test_a_length_over_its_kl_is_tightened_by_as_much(begun):
    proofs = {length: fake_proof(begun, length, (0.0, 0.0)) for length in begun.lengths if length in LENGTHS}
    over = replace(proofs[1024], kl=1.25 * MOST)
    problems = judge(begun, proofs | {1024: over, 768: replace(over, kl=1.0)})  # a checked length has no budget
    sentence = "at 1024 tokens the KL is 6.25e-03 nats per token, 5.00e-03 are allowed"
    assert problems == (Problem(ProblemKind.OVER_KL, 1024, sentence),)
    (undefined,) = judge(begun, proofs | {1024: replace(over, kl=math.nan)})
    assert str(undefined) == sentence.replace("6.25e-03", "nan")
    after, again = tighten(begun, problems, {1024: over})
    assert again == {768, 1024, 1536}
    for length in LENGTHS:
        share = begun.recipe.margin / 1.25 if length == 1024 else 1.0
        for old, new in zip(begun.chosen[length].choices, after.chosen[length].choices, strict=True):
            assert new.budget_mse == pytest.approx(share * old.budget_mse)
            assert length != 1024 or new.spent <= new.budget_mse


def test_certify_prompts_break_a_kl_only_where_they_show_it(begun):
    """A mean that is over the budget by chance does not; a length that is only checked has no budget."""
    near = [MOST * math.exp(deviation / 2) for deviation in range(-3, 4)]
    assert sum(near) / len(near) > MOST
    assert kl_shown_over_budget(1024, near, ["text"] * len(near), begun.recipe) is None
    far = [3 * kl for kl in near]
    sentence = str(kl_shown_over_budget(1024, far, ["text"] * len(far), begun.recipe))
    assert sentence.startswith("at 1024 tokens the mean KL of prompts like these is at least ")
    assert kl_shown_over_budget(768, far, ["text"] * len(far), begun.recipe) is None
    assert kl_shown_over_budget(1024, far, ["text"] * len(far), RECIPE) is None
