"""Curves of the whole model are those of its prompts, and are measured once."""

import sqlite3
from contextlib import closing
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from calibrate.curves import measure
from calibrate.curves.curves import RankingConfig, Shape, combine_curves
from calibrate.curves.measure import PARTS, measure_model
from calibrate.journal import Journal
from calibrate.model import layers
from calibrate.prompts.prompt import Prompt
from calibrate.recipe import Recipe
from calibrate.work.executor import open_local_executor
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
    return Recipe.from_options(options | changes)


@pytest.fixture
def watched(loaded, tmp_path, monkeypatch):
    """Runs of `measure_model`; of the last one (layer, length) for every prompt and segment, and reused entries."""
    watched = SimpleNamespace(path=tmp_path / "journal", measured=[], numbers=set(), reused=0)
    real = measure.measure

    def watch(prompt, rankings, shapes, last_rows=0):
        watched.measured.append((prompt.layer, int(prompt.q.shape[2])))
        watched.numbers.add(prompt.prompt)
        return real(prompt, rankings, shapes, last_rows)

    def run(prompts=None, shapes=SHAPES, **changes):
        def step(text="", count=1, *, known=False):
            steps.append(count)

        watched.measured.clear()
        steps = []
        with Journal.open(watched.path, {}) as journal:
            curves = measure_model(loaded, prompts or make_prompts(), shapes, recipe(**changes), journal, step)
            watched.reused = journal.reused
        assert sum(steps) == 4  # two layers at two lengths
        return curves

    monkeypatch.setattr(measure, "measure", watch)
    watched.run = run
    return watched


def assert_same(first, second):
    assert list(first) == list(second) == list(LENGTHS)
    for length in LENGTHS:
        for mine, theirs in zip(first[length], second[length], strict=True):
            assert list(mine) == list(theirs)
            for key, curve in mine.items():
                assert torch.equal(curve.stacked(torch.float64), theirs[key].stacked(torch.float64))
                assert curve.dense_power == theirs[key].dense_power


def test_the_model_is_measured_as_prompt_by_prompt(loaded, watched):
    prompts = make_prompts()
    curves = watched.run(prompts)
    for length in LENGTHS:
        segments = (64,) if length == 450 else (64, 256)  # at least half of a prompt lies in some prefix
        rankings = [RankingConfig(segment, count) for segment in segments for count in (1, 16)]
        alone = [list(map(list, layers.capture_layers(loaded, [prompt.ids]))) for prompt in prompts[length]]
        for layer in range(2):
            assert set(curves[length][layer]) == {(ranking, shape) for ranking in rankings for shape in SHAPES[length]}
            for key, curve in curves[length][layer].items():
                of_prompts = [measure.measure(prompt[layer][0], key[:1], key[1:])[key] for prompt in alone]
                expected = combine_curves(of_prompts)
                torch.testing.assert_close(curve.stacked(), expected.stacked(), rtol=1e-4, atol=1e-9)
                assert curve.dense_power == pytest.approx(expected.dense_power, rel=1e-5)
            assert max(float(curve.mse.max()) for curve in curves[length][layer].values()) > 1e-4


def test_the_journal_answers_for_what_it_has(watched, monkeypatch):
    """All that is there is not measured again, whatever the budget; one layer that is missing is measured alone."""
    first = watched.run()
    assert watched.reused == 0
    # four prompts, each once for every one of its segments
    assert sorted(watched.measured) == sorted(
        (layer, length) for layer in range(2) for length in (450, 450, 600, 600, 600, 600)
    )
    for layer, length, segments in ((0, 600, "[64,256]"), (1, 450, "[64]")):
        with closing(sqlite3.connect(watched.path)) as database, database:
            where = "json_extract(key, '$.layer') = ? AND json_extract(key, '$.segments') = ?"
            assert database.execute(f"DELETE FROM entries WHERE {where}", (layer, segments)).rowcount == 1
        assert_same(first, watched.run())
        assert (set(watched.measured), watched.reused) == ({(layer, length)}, 3)
    monkeypatch.setattr(layers, "DenseForward", None)
    fewer = watched.run(shapes=SHAPES | {600: SHAPES[600][1:]})  # which curves of more shapes have
    assert torch.equal(*(curves[600][0][RankingConfig(64), SHAPES[600][1]].mse for curves in (first, fewer)))
    changes = {"budget_mse": 1.0, "margin": 0.3, "worst_rows": 0.1, "trials": 3, "seed": 9}
    assert_same(first, watched.run(**changes, tails=(False,), time_limit=9.0, keep_needles=0.0))
    assert (watched.measured, watched.reused) == ([], 4)


def test_workers_share_prompts_and_an_interrupted_run_keeps_their_parts(loaded, watched):
    """Each of two workers measures one prompt of every length; a part is kept until the mean takes its place.

    A prompt's number, by which its windows are chosen, is the same with any number of workers.
    """
    first = watched.run()
    watched.numbers.clear()
    with open_local_executor(loaded) as executor, Journal.open(watched.path.with_name("parts"), {}) as journal:
        executor.size, spread = 2, executor.spread

        def interrupted(tracks):
            assert [len(track) for track in tracks] == [2] * 4
            yield from islice(spread(tracks), 5)  # all workers in the first layer, and one in the second
            raise KeyboardInterrupt

        def remaining(tracks):
            assert sum(map(len, tracks)) == 3
            return spread(tracks)

        executor.spread = interrupted
        with pytest.raises(KeyboardInterrupt):
            measure_model(executor, make_prompts(), SHAPES, recipe(), journal, Mock())
        assert [len(journal.keys(kind)) for kind in ("curves", PARTS)] == [2, 1]
        ((_, [part]),) = journal.entries(PARTS)
        assert all(entry["curve"].dtype == torch.float64 for entry in part)  # only the mean is rounded
        executor.spread = remaining
        assert_same(first, measure_model(executor, make_prompts(), SHAPES, recipe(), journal, Mock()))
        assert [len(journal.keys(kind)) for kind in ("curves", PARTS)] == [4, 0]
        assert watched.numbers == {0, 1}


@SLOW
def test_what_is_not_the_same_measurement_is_made_again(watched):
    watched.run()
    of_600 = {(0, 600), (1, 600)}
    prompts = make_prompts()
    prompts[600] = [prompts[600][0], make_prompts(6)[600][0]]
    watched.run(prompts)
    assert set(watched.measured) == of_600
    watched.run(shapes=SHAPES | {600: (*SHAPES[600], Shape(64, 512))})
    assert set(watched.measured) == of_600
    for change in ({"segments": (64,)}, {"last_rows": 128}, {"lookbacks": (128, 256)}):
        watched.run(**change)
        assert set(watched.measured) >= of_600
    watched.run()
    assert watched.measured == []
