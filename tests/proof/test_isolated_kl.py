"""What layers cost by themselves, against a model that is patched as a whole; and what follows for their weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from calibrate.model.models import load
from calibrate.prompts.prompt import Prompt
from calibrate.proof.kl import GROUPS, MAX_FACTOR, MIN_SIGNAL, correct_weights, group_layers, measure_isolated_kl
from calibrate.search.allocate import ErrorWeights
from support.candidates import candidate
from support.models import make_profile, patched_kl

LENGTH = 320


def test_each_group_is_the_model_with_only_its_layers_patched(tiny_folder: Path):
    loaded = load(str(tiny_folder), "cpu")
    generator = torch.Generator().manual_seed(0)
    prompts = [Prompt(torch.randint(3, 90, (LENGTH,), generator=generator)) for _ in range(2)]
    profile = make_profile(loaded.model, 300.0)
    configs = list(profile.layers[0])
    kls, rounding = measure_isolated_kl(loaded, prompts, configs)
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
    predicted = [20.0 * choice.spent for choice in choices]

    def factors(*alone):
        after = correct_weights(begun, alone)
        assert [choice.allocation for choice in after.choices] == [choice.allocation for choice in choices]
        return [choice.weights.layer / 40.0 for choice in after.choices]

    first, second = predicted
    assert factors((3 * first, 0.5 * second), 0.0) == pytest.approx([3.0, 0.5])
    assert factors((3 * first, first), first) == pytest.approx([2.0, MIN_SIGNAL * first / second])
    assert factors((1e6 * first, 0.0), 0.0) == [MAX_FACTOR, 1.0]
