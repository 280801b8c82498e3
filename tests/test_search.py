import dataclasses
from pathlib import Path

import pytest
import torch

from calibrate import search as search_module
from calibrate.capture import Captured
from calibrate.curves import Method
from calibrate.recipe import Budget, Recipe
from calibrate.search import CPU_TILES, LayerSearch, as_dense, search
from s2o_runtime.dense import exact_attention
from s2o_runtime.gpu import DeviceIdentity
from s2o_runtime.reference import s2o_attention_reference

CPU = DeviceIdentity("cpu", "cpu")
GPU = DeviceIdentity("cuda", "pretended", (8, 0), 108, 1)  # with tiles small enough for short prompts


def prompts(count=2, length=1024):
    made = []
    for _ in range(count):
        q = torch.randn(1, 2, length, 16) + 3 * torch.randn(1, 2, 1, 16)
        made.append(Captured(q, torch.randn(1, 1, length, 16), torch.randn(1, 1, length, 16), 0.25))
    return made


def recipe(kind="rel_mse", value=1e-2, trials=8):
    return Recipe("demo", Budget(kind, value), (1024,), Path("unused"), trials=trials).validate()


@pytest.mark.parametrize(("kind", "value"), [("rel_mse", 1e-2), ("mse", 1e-3)])
@pytest.mark.parametrize("count", [1, 2])
def test_the_chosen_configuration_keeps_its_promises(kind, value, count):
    made = prompts(count)
    work = LayerSearch(made, recipe(kind, value), CPU)
    trials = []
    choice = search(work, 0, lambda: trials.append(1))
    assert len(trials) == 8
    assert choice.allocation.cost == min(tried.allocation.cost for tried in work.tried.values()) < 0.9
    assert choice.allocation.density < choice.allocation.cost
    errors, powers = [], []
    for prompt in made:
        out, _, _ = s2o_attention_reference(prompt.q, prompt.k, prompt.v, choice.config, scale=prompt.scale)
        truth = exact_attention(prompt.q, prompt.k, prompt.v, scale=prompt.scale)
        errors.append(float((out - truth).square().mean()))
        powers.append(float(truth.square().mean()))
    promised = choice.allocation.mse
    if count == 1:
        assert errors[0] == pytest.approx(promised, rel=1e-3)
    assert sum(errors) / count <= promised * 1.001  # of several prompts the mean and one deviation
    spent = sum(errors) / (sum(powers) if kind == "rel_mse" else count)
    assert spent <= 0.8 * value  # the margin
    tighter = choice.tightened(0.5)
    assert tighter.allocation.mse <= 0.5 * choice.allocation.mse
    assert tighter.allocation.cost >= choice.allocation.cost


def test_every_candidate_is_tried_and_only_what_is_tried_is_measured(monkeypatch):
    made = []
    measure = search_module.measure
    monkeypatch.setattr(search_module, "measure", lambda *call: made.append(call[1]) or measure(*call))
    work = LayerSearch(prompts(1), dataclasses.replace(recipe(trials=24), representatives=(1, 4), grains=(1, 8)), CPU)
    choice = search(work, 0, lambda: None)
    assert {(segment, grain) for segment, grain, _ in work.tried} == {(s, g) for s in (256, 512) for g in (1, 8)}
    assert sorted(made, key=str) == sorted(
        ([Method(segment, each, grain) for each in (1, 4)] for segment in (256, 512) for grain in (1, 8)), key=str
    )
    assert choice.config.grain == choice.grain
    assert {head.representatives for head in choice.config.heads} <= {1, 4}
    lone = LayerSearch(prompts(1), recipe(trials=1), CPU)
    search(lone, 0, lambda: None)
    assert {(method.segment, method.grain) for method, _ in lone.curves} == {(512, 4)}


def test_the_same_seed_chooses_the_same():
    made = prompts()
    first, second = (search(LayerSearch(made, recipe(), CPU), 3, lambda: None) for _ in range(2))
    assert first.config == second.config
    assert first.allocation == second.allocation


def test_on_a_gpu_time_decides_and_slow_layers_go_dense(monkeypatch):
    times = {"dense": 1.0}

    def pretended(calls, device):
        assert set(calls) == {"dense", "s2o"}
        return {**times, "s2o": times["s2o"]()}

    monkeypatch.setattr(search_module, "medians", pretended)
    made = prompts(1)
    counter = iter(range(100))
    times["s2o"] = lambda: 0.5 + next(counter) / 10
    choice = search(LayerSearch(made, recipe(), GPU), 0, lambda: None)
    assert (choice.seconds, choice.dense_seconds) == (0.5, 1.0)
    assert not choice.config.is_dense
    times["s2o"] = lambda: 1.5
    choice = search(LayerSearch(made, recipe(), GPU), 0, lambda: None)
    assert choice.config.is_dense
    assert choice.allocation.mse == 0.0


def test_failed_trials_are_counted_and_all_failing_means_dense(monkeypatch, caplog):
    def broken(calls, device):
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(search_module, "medians", broken)
    work = LayerSearch(prompts(1), recipe(trials=3), GPU)
    choice = search(work, 0, lambda: None)
    assert work.failures == 3
    assert choice.config.is_dense
    assert "out of resource" in caplog.text


def test_as_dense_and_the_candidates():
    choice = search(LayerSearch(prompts(1), recipe(trials=1), CPU), 0, lambda: None)
    assert as_dense(choice).config.is_dense
    assert dataclasses.replace(choice).config == choice.config
    assert all(tile.stride % 128 == 0 for tile in CPU_TILES)
