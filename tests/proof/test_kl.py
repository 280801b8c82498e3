"""KL of layers by themselves, against a model that is patched as a whole; what follows for weights; and the secant."""

from dataclasses import replace

import pytest

from calibrate.proof.kl import GROUPS, MAX_FACTOR, MIN_SIGNAL, correct_weights, find_scale, group_layers
from calibrate.proof.kl import measure_isolated_kl as measure
from calibrate.search.allocate import ErrorWeights
from calibrate.work.executor import open_executor
from support.candidates import candidate
from support.models import make_profile, patched_kl, stream
from support.streamed import random_prompts

AIM, MOST = 4e-3, 5e-3


def test_each_group_is_the_model_with_only_its_layers_patched(tiny_folder):
    loaded, prompts = stream(tiny_folder, True), random_prompts(320)[320]
    profile = make_profile(loaded.model, 300.0)
    configs = list(profile.layers[0])
    with open_executor(loaded) as executor:
        kls, rounding = measure(executor, prompts, configs)
    assert len(kls) == len(configs) == 2
    for layer, kl in enumerate(kls):
        rows = tuple(config if index == layer else config.as_dense() for index, config in enumerate(configs))
        alone = replace(profile, layers=(rows,) * len(profile.lengths))
        assert kl == pytest.approx(patched_kl(loaded.model, alone, prompts), rel=1e-3)
        assert kl > 1e-5 > 100 * rounding


def test_groups_are_adjacent_and_few():
    assert group_layers(6) == [range(layer, layer + 1) for layer in range(6)]
    for layers in (9, 28, 80):
        groups = group_layers(layers)
        assert len(groups) == GROUPS
        assert [layer for group in groups for layer in group] == list(range(layers))
        assert [len(group) for group in groups[:2]] == [1, 1]
        assert max(map(len, groups[2:])) - min(map(len, groups[2:])) <= 1


def test_weights_become_what_was_measured_less_rounding():
    begun = candidate().chosen[1024]
    choices = [replace(choice, weights=ErrorWeights(40.0, (0.5, 1.5))) for choice in begun.choices]
    begun = replace(begun, choices=choices)
    first, second = (20.0 * choice.spent for choice in choices)  # as predicted

    def factors(*alone):
        after = correct_weights(begun, alone)
        assert [choice.allocation for choice in after.choices] == [choice.allocation for choice in choices]
        return [choice.weights.layer / 40.0 for choice in after.choices]

    assert factors((3 * first, 0.5 * second), 0.0) == pytest.approx([3.0, 0.5])
    assert factors((3 * first, first), first) == pytest.approx([2.0, MIN_SIGNAL * first / second])
    assert factors((1e6 * first, 0.0), 0.0) == [MAX_FACTOR, 1.0]


@pytest.mark.parametrize("factor", [0.3, 1.0, 1.5, 3.6, 12.0])
@pytest.mark.parametrize("power", [0.7, 1.0, 1.3])
def test_three_passes_find_the_scale(factor, power):
    """Sensitivities may be off by a factor, and the KL need not be linear in what is spent."""

    def law(scale):
        return factor * AIM * scale**power

    scale, passes = find_scale(law, AIM, MOST)
    assert law(scale) == pytest.approx(AIM, rel=0.13)
    assert law(scale) <= MOST
    assert passes[0].scale == 1.0
    assert (len(passes) == 1) == (factor == 1.0)


def test_what_is_proven_is_within_the_budget_where_a_pass_was():
    """Of a KL that jumps over the aim, the side below it; where none was below, what the secant says."""
    scale, passes = find_scale(lambda scale: (0.4 if scale < 0.9 else 1.3) * AIM, AIM, MOST)
    assert min(passes, key=lambda trial: abs(trial.kl - AIM)).kl > MOST
    assert scale < 0.9
    scale, passes = find_scale(lambda scale: 2 * MOST * scale**0.1, AIM, MOST)
    assert scale < min(trial.scale for trial in passes)
    assert len(find_scale(lambda scale: 0.99 * MOST, 0.9 * MOST, MOST)[1]) == 1  # near enough, and within
    assert len(find_scale(lambda scale: 1.01 * MOST, MOST, MOST)[1]) == 3
