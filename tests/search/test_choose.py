"""From curves to the settings of every layer: groups that share a study, and what each layer may spend."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.compiling import get_kernel_form
from calibrate.curves.curves import Shape, unpack
from calibrate.curves.measure import combine_prompts, measure_prompt
from calibrate.journal import Journal
from calibrate.model.layers import Captured
from calibrate.prompts.prompt import Prompt, PromptSet
from calibrate.recipe import OPTIONS, Recipe
from calibrate.search import choose as choose_module
from calibrate.search.choice import LayerBudget
from calibrate.search.choose import MAX_GROUP_WIDTH, CallTime, CapturedLayers, choose, group_layers
from calibrate.timing import Timing
from s2o_runtime.config import LayerConfig, TileConfig
from s2o_runtime.reference.attention import s2o_attention_reference
from s2o_runtime.reference.dense import exact_attention
from support.executors import CPU, GPU, Pickling, pretended

LENGTH, SEGMENTS = 768, (64, 128)
TILES = (TileConfig(64, 64, 2), TileConfig(64, 64, 4))
MARGIN = OPTIONS["margin"].default * (1 + 1e-3)
SHARPNESS = (0.3, 0.7, 0.3, 1.0)  # of every layer's queries: the first and the third are alike


def make_layers():
    generator = torch.Generator().manual_seed(0)
    q, bias, k, v = (
        torch.randn(1, heads, rows, 16, generator=generator)
        for heads, rows in ((2, LENGTH), (2, 1), (1, LENGTH), (1, LENGTH))
    )
    return [
        Captured((q + 3 * bias) * sharpness, k, v * (1 + layer), 0.25, layer)
        for layer, sharpness in enumerate(SHARPNESS)
    ]


LAYERS = make_layers()
TRUTHS = [exact_attention(layer.q, layer.k, layer.v, scale=layer.scale) for layer in LAYERS]
PROMPTS = PromptSet({LENGTH: [Prompt(torch.arange(LENGTH))]}, {})


def recipe(**changes):
    options = {"model": "tiny", "lengths": (LENGTH,), "out": Path("unused"), "segments": SEGMENTS, "trials": 3}
    budget = {} if "budget_mse" in changes else {"budget_rel_mse": 1e-2}
    return Recipe.from_options(options | {"worst_rows": 0.0} | budget | changes)


@pytest.fixture(scope="module")
def curves():
    shapes = [Shape.from_tile(tile) for tile in TILES]
    return [unpack(combine_prompts([measure_prompt(layer, shapes, recipe())])) for layer in LAYERS]


def run(curves, journal, device=CPU, executor=pretended, **changes):
    texts, made = [], recipe(**changes)
    budgets = [LayerBudget.from_recipe(of_layer, made) for of_layer in curves]
    chosen = choose(
        executor(SimpleNamespace(layers=len(curves)), device),
        {LENGTH: curves},
        {LENGTH: TILES},
        {LENGTH: budgets},
        prompts=PROMPTS,
        recipe=made,
        journal=journal,
        on_trial=texts.append,
    )
    assert list(chosen) == [LENGTH]
    assert len(texts) == chosen[LENGTH].trials
    return chosen[LENGTH]


def true_errors(chosen):
    """(mse, rel mse) of every layer, from the reference."""
    errors = []
    for layer, truth, choice in zip(LAYERS, TRUTHS, chosen.choices, strict=True):
        out, _, _ = s2o_attention_reference(layer.q, layer.k, layer.v, choice.config, scale=layer.scale)
        mse = float((out - truth).square().mean())
        errors.append((mse, mse / float(truth.square().mean())))
    return errors


def test_layers_that_are_alike_share_a_study_and_spend_their_own_budget(curves, journal):
    chosen = run(curves, journal)
    assert chosen.groups[0] == [0, 2]
    assert len(chosen.tried) == len(chosen.groups) > 1
    assert all(1 <= trials <= 3 for trials in chosen.tried)
    first, follower = chosen.choices[0], chosen.choices[2]
    assert follower.point == first.point
    assert follower.budget.mse == pytest.approx(9 * first.budget.mse, rel=1e-3)  # its values are three times as large
    assert chosen.limits == [1e-2] * 4
    errors = [error for _, error in true_errors(chosen)]
    assert 2e-3 < max(errors) <= MARGIN * 1e-2
    assert all(choice.why_dense is None or choice.config.is_dense for choice in chosen.choices)


def test_a_ceiling_holds_beside_an_mse(curves, journal):
    """Layers of small outputs are held by the ceiling, those of large outputs by the mse."""
    mse, ceiling = 4e-3, 1e-2
    chosen = run(curves, journal, budget_mse=mse, ceiling_rel_mse=ceiling)
    powers = [float(truth.square().mean()) for truth in TRUTHS]
    assert powers[0] < mse / ceiling < powers[-1]
    errors, by_unit = true_errors(chosen), zip(*true_errors(chosen), strict=True)
    assert all(max(values) <= MARGIN * limit for values, limit in zip(by_unit, (mse, ceiling), strict=True))
    assert chosen.limits == pytest.approx([min(mse, ceiling * power) for power in powers], rel=1e-3)
    assert errors[0][1] > 0.6 * ceiling  # what it may have is spent, and is less than the mse alone would allow
    assert errors[0][0] < 0.5 * mse


def timings(monkeypatch, seconds_of=lambda layer, config: 0.5):
    """A GPU whose times are made up; what was timed, (layer, config), and what each call compiled, configs."""
    seen, compiled = [], []

    def against_dense(call, dense, device, dense_seconds):
        layer = next(each.layer for each in LAYERS if each.q is call.args[0])
        seen.append((layer, call.args[3]))
        seconds = seconds_of(layer, call.args[3])
        return Timing(seconds, 1.0)

    monkeypatch.setattr(choose_module, "time_against_dense", against_dense)
    monkeypatch.setattr(choose_module, "compile_ahead", lambda calls: compiled.append([call.args[3] for call in calls]))
    monkeypatch.setattr(choose_module, "get_forward", lambda worker, prompts: worker.cached(("walk", prompts), Walk))
    monkeypatch.setattr(choose_module, "measure_free_memory", lambda device: 1 << 30)
    return seen, compiled


class Walk:
    """Like a `DenseForward` through `LAYERS`; `moved` are the layers that any came by."""

    moved: ClassVar[list[int]] = []

    def __init__(self):
        self.next = 0

    def inputs_up_to(self, layer):
        first = self.next if self.next <= layer else 0
        self.next = layer + 1
        for number in range(first, layer + 1):
            Walk.moved.append(number)
            yield LAYERS[number]


def test_layers_that_are_searched_beside_one_another_choose_the_same(curves, journal, tmp_path, monkeypatch):
    """With items from their pickles, and calls that wait in threads; a worker moves through the model once."""
    timings(monkeypatch, lambda layer, config: 0.5 + layer / 10 + config.tile.chunk / 100 + config.segment / 1e4)
    one = run(curves, journal, GPU, trials=8)
    monkeypatch.setattr(Walk, "moved", [])
    with Journal.open(tmp_path / "other", {}) as other:
        many = run(curves, other, GPU, lambda *model: Pickling(pretended(model[0])._worker, model[1]), trials=8)
    assert sorted(Walk.moved) == [0, 1, 2, 3]
    many, one = (
        [(choice.config, choice.timing) for choice in of.choices] + [of.tried, of.failures] for of in (many, one)
    )
    assert many == one


def test_what_is_likely_to_be_timed_is_compiled_at_once(curves, journal, monkeypatch):
    """In a search that is what the first trial of every group needs."""
    seen, compiled = timings(monkeypatch)
    kinds = ({}, {"tail": "mean"}, {"last_rows": 128})
    plain, tail, rows = (LayerConfig.uniform(2, tau=1.0, segment=64, tile=TILES[0], **kind) for kind in kinds)
    worker = pretended(SimpleNamespace(layers=4), GPU)._worker
    for layer, config in enumerate((plain, tail, rows, rows)):
        CallTime(layer, LENGTH, "a", config, TILES, (tail, config.as_dense())).run(worker)
    forms = [{get_kernel_form(config) for config in of_call} for of_call in compiled]
    assert forms == [{get_kernel_form(plain), get_kernel_form(tail)}, {get_kernel_form(rows)}]
    seen.clear()
    compiled.clear()
    chosen = run(curves, journal, GPU, trials=1)
    tiles = {config.tile for configs in compiled for config in configs}
    assert tiles == {TILES[0]}  # the other differs in its stride alone
    first_layers = {group[0] for group in chosen.groups}
    first = {get_kernel_form(config) for layer, config in seen if layer in first_layers and not config.is_dense}
    assert {get_kernel_form(config) for config in compiled[0]} >= first


def captured_of(size):
    q = torch.empty(1, 1, size, 1, dtype=torch.uint8)
    return Captured(q, q[:, :, :1], q[:, :, 1:], 1.0, 0)


def test_the_inputs_kept_are_those_used_last_and_take_a_share_of_the_memory(monkeypatch):
    free = iter([300, 200, 100, 100, 0, 0])
    monkeypatch.setattr(choose_module, "measure_free_memory", lambda device: next(free))
    kept = CapturedLayers()
    for name in "ab":  # 100 of 400 bytes; 200 of 400
        kept.add(name, captured_of(100))
    assert list(kept) == ["b"]
    monkeypatch.setattr(choose_module, "MEMORY_SHARE", 0.75)
    kept.add("c", captured_of(100))  # 200 of 300
    assert kept.find("b") is not None
    kept.add("d", captured_of(100))  # 300 of 400
    assert list(kept) == ["c", "b", "d"]
    kept.add("e", captured_of(100))  # 400 of 400
    assert list(kept) == ["b", "d", "e"]
    kept.add("f", captured_of(1000))  # all others leave it too little
    assert list(kept) == ["f"]
    assert not kept.keep_only("f")


def test_inputs_that_are_kept_make_way_when_memory_runs_out(curves, journal, monkeypatch):
    """A call that needs their memory is not a failure."""
    worker = pretended(SimpleNamespace(layers=4), GPU)._worker

    def seconds_of(layer, config):
        if len(worker.kept["captured"]) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if layer == 3:
            raise torch.OutOfMemoryError("out of memory alone")
        return 0.5

    timings(monkeypatch, seconds_of)
    config = LayerConfig.uniform(2, tau=1.0, segment=64, tile=TILES[0])
    assert CallTime(2, LENGTH, "a", config).run(worker)["seconds"] == 0.5
    assert CallTime(3, LENGTH, "a", config).run(worker) == "out of memory alone"


def test_a_failure_is_dense_in_its_layer_only(curves, journal, monkeypatch):
    def seconds_of(layer, config):
        if layer == 2 or config.tile == TILES[1]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 0.5

    timings(monkeypatch, seconds_of)
    chosen = run(curves, journal, GPU)
    assert [choice.dense_sentence for choice in chosen.choices] == [None, None, "CUDA out of memory", None]
    assert {choice.point.tile for choice in chosen.choices} == {TILES[0]}
    assert set(chosen.failures) <= {"CUDA out of memory"}


tables = st.lists(st.lists(st.floats(0.3, 0.45), min_size=2, max_size=2), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(tables)
def test_layers_share_a_group_exactly_if_no_budget_tells_them_apart(rows):
    """No group is wider than allowed at any segment and budget, and no two groups would fit together."""
    table = torch.tensor(rows, dtype=torch.float64)
    groups = group_layers(rows)
    assert sorted(layer for group in groups for layer in group) == list(range(len(table)))
    assert groups == sorted(sorted(group) for group in groups)

    def width(group):
        costs = table[group]
        return float((costs.amax(0) - costs.amin(0)).max())

    assert all(width(group) < MAX_GROUP_WIDTH + 1e-9 for group in groups)
    assert all(width(first + second) >= MAX_GROUP_WIDTH - 1e-9 for first, second in itertools.combinations(groups, 2))


def test_a_budget_that_is_held_back_says_so(curves, journal, caplog):
    run(curves, journal, budget_mse=1e-4, ceiling_rel_mse=None)
    assert "of their budget" not in caplog.text
    run(curves, journal, budget_mse=1e3, ceiling_rel_mse=None)
    assert "4 of 4 layers at 768 tokens spend less than half of their budget" in caplog.text
