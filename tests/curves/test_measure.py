"""The first pass: curves of the whole model are those of its parts, and are measured once."""

import dataclasses
import shutil
import sqlite3
from pathlib import Path

import pytest
import torch

from calibrate.curves import measure
from calibrate.curves.curves import RankingConfig, Shape, mean_curve
from calibrate.curves.measure import _with_all_shapes, measure_model
from calibrate.journal import Journal
from calibrate.model import layers
from calibrate.prompts.prompt import Prompt
from calibrate.recipe import Recipe
from support.models import save, stream

SLOW = pytest.mark.slow(reason="measures a model several times, or starts a process of its own")

LENGTHS = (450, 600)
SHAPES = {450: (Shape(64, 128),), 600: (Shape(64, 128), Shape(64, 256))}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return stream(save("llama", tmp_path_factory.mktemp("llama")), True)


def make_prompts(seed=5):
    generator = torch.Generator().manual_seed(seed)
    return {length: [Prompt(torch.randint(3, 128, (length,), generator=generator)) for _ in range(2)]
            for length in LENGTHS}  # fmt: skip


def recipe(**changes):
    options = {"model": "tiny", "lengths": LENGTHS, "check_lengths": (), "out": Path("unused"), "segments": (64, 256)}
    return Recipe.of(options | changes)


@dataclasses.dataclass
class Watched:
    """What `measure_model` measures: (layer, length) for every prompt and segment, and its steps."""

    loaded: object
    path: Path
    monkeypatch: pytest.MonkeyPatch
    measured: list = dataclasses.field(default_factory=list)
    steps: list = dataclasses.field(default_factory=list)
    reused: int = 0

    def __post_init__(self):
        real = measure.measure

        def watch(prompt, rankings, shapes, last_rows=0):
            self.measured.append((prompt.layer, int(prompt.q.shape[2])))
            return real(prompt, rankings, shapes, last_rows)

        self.monkeypatch.setattr(measure, "measure", watch)

    def step(self, text="", steps=1, *, known=False):
        self.steps += [known] * steps

    def run(self, prompts=None, shapes=SHAPES, **changes):
        self.measured.clear()
        self.steps.clear()
        with Journal.open(self.path, {}) as journal:
            curves = measure_model(
                self.loaded, prompts or make_prompts(), shapes, recipe(**changes), journal, self.step
            )
            self.reused = journal.reused
        assert len(self.steps) == 4  # two layers at two lengths
        return curves


@pytest.fixture
def watched(loaded, tmp_path, monkeypatch):
    return Watched(loaded, tmp_path / "journal", monkeypatch)


@pytest.fixture(scope="module")
def journal(loaded, tmp_path_factory):
    """The journal of a first run, and the curves."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        first = Watched(loaded, tmp_path_factory.mktemp("first") / "journal", monkeypatch)
        curves = first.run()
    return first.path, curves


@pytest.fixture
def again(journal, watched):
    """What measures with a journal of that run, and its curves."""
    path, curves = journal
    shutil.copy(path, watched.path)
    return watched, curves


def assert_same(one, other):
    assert list(one) == list(other) == list(LENGTHS)
    for length in LENGTHS:
        for mine, theirs in zip(one[length], other[length], strict=True):
            assert list(mine) == list(theirs)
            for key, curve in mine.items():
                assert torch.equal(curve.stacked(), theirs[key].stacked())
                assert curve.dense_power == theirs[key].dense_power


def test_the_model_is_measured_as_prompt_by_prompt(loaded, watched):
    prompts = make_prompts()
    curves = watched.run(prompts)
    for length in LENGTHS:
        segments = (64,) if length == 450 else (64, 256)  # at least half of a prompt lies in some prefix
        methods = [RankingConfig(segment, each) for segment in segments for each in (1, 16)]
        alone = [list(map(list, layers.layers(loaded, [prompt.ids]))) for prompt in prompts[length]]
        for layer in range(2):
            assert set(curves[length][layer]) == {(method, shape) for method in methods for shape in SHAPES[length]}
            for (method, shape), curve in curves[length][layer].items():
                of_prompts = [measure.measure(each[layer][0], [method], [shape])[method, shape] for each in alone]
                expected = mean_curve(of_prompts)
                torch.testing.assert_close(curve.stacked(), expected.stacked(), rtol=1e-4, atol=1e-9)
                assert curve.dense_power == pytest.approx(expected.dense_power, rel=1e-5)
            assert max(float(curve.mse.max()) for curve in curves[length][layer].values()) > 1e-4


def test_the_journal_answers_the_second_time_without_the_model(watched, monkeypatch):
    first = watched.run()
    assert watched.reused == 0
    # four prompts, each once for every one of its segments
    assert sorted(watched.measured) == sorted(
        (layer, length) for layer in range(2) for length in (450, 450, 600, 600, 600, 600)
    )
    monkeypatch.setattr(layers, "DenseForward", None)
    assert_same(first, watched.run())
    assert (watched.measured, watched.reused) == ([], 4)


@pytest.mark.parametrize("missing", [(0, 600), (1, 450)])
def test_only_what_is_missing_is_measured(missing, again):
    watched, first = again
    layer, length = missing
    with sqlite3.connect(watched.path) as database:
        segments = "[64]" if length == LENGTHS[0] else "[64,256]"
        where = "json_extract(key, '$.layer') = ? AND json_extract(key, '$.segments') = ?"
        assert database.execute(f"DELETE FROM entries WHERE {where}", (layer, segments)).rowcount == 1
    database.close()
    assert_same(first, watched.run())
    assert set(watched.measured) == {missing}
    assert watched.reused == 3


@SLOW
def test_what_is_not_the_same_measurement_is_made_again(watched):
    watched.run()
    of_600 = {(0, 600), (1, 600)}
    prompts = make_prompts()
    prompts[600] = [prompts[600][0], make_prompts(6)[600][0]]
    watched.run(prompts)
    assert set(watched.measured) == of_600
    watched.run(shapes=SHAPES | {600: SHAPES[600][:1]})
    assert watched.measured == []  # curves of more shapes have those of fewer
    watched.run(shapes=SHAPES | {600: (*SHAPES[600], Shape(64, 512))})
    assert set(watched.measured) == of_600
    for change in ({"segments": (64,)}, {"last_rows": 128}, {"scores": ("input", "int8")}):
        watched.run(**change)
        assert set(watched.measured) >= of_600
    watched.run()
    assert watched.measured == []


def test_a_budget_is_not_part_of_a_measurement(again):
    watched, first = again
    changes = {"budget_mse": 1.0, "budget_scope": "model", "margin": 0.3, "worst_rows": 0.1, "trials": 3, "seed": 9}
    assert_same(first, watched.run(**changes, tails=(False,), time_limit=9.0, keep_needles=0.0))
    assert watched.measured == []


def test_curves_are_found_with_further_shapes():
    def key(*shapes, layer=0):
        return {"layer": layer, "shapes": [list(shape) for shape in shapes], "prompts": ["p"]}

    small, large = (64, 256), (128, 512)
    there = [key(small, large), key(small), key(large, (128, 1024), small), key(large, layer=1)]
    assert _with_all_shapes(key(small), there) == there[1]  # itself, before others
    assert _with_all_shapes(key(large), there) == there[2]
    assert _with_all_shapes(key(large, (64, 1024)), there) is None
    assert _with_all_shapes(key(small, layer=1), there) is None
    assert _with_all_shapes(key(large) | {"gpu": ["A", 1, 1]}, there) is None
