"""What ranking costs at a length, against what was measured."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from calibrate.curves import measure
from calibrate.curves.curves import RankingConfig, fixed_cost, overhead
from calibrate.curves.measure import stored_cost
from calibrate.journal import Journal
from calibrate.recipe import Recipe
from s2o_runtime.identity import geometry
from support.executors import GPU, pretended
from support.models import CONFIGS

RESULTS = Path(__file__).parents[2] / "docs" / "results"
GEOMETRY = geometry(CONFIGS["llama"])


def recipe():
    return Recipe.of({"model": "tiny", "lengths": (8192,), "out": Path("unused"), "budget_rel_mse": 1e-3})


@pytest.mark.parametrize(("file", "length", "most"), [("8k", 8192, 1.05), ("32k", 32768, 1.05), ("128k", 131072, 1.25)])
def test_what_ranking_takes_is_what_an_h200_took(file, length, most):
    """S2O with one tau: segments of 1024, one representative and tails (scripts/bench/methods.py).

    Machines of one kind differ by a few percent. At 131072 tokens nearly all of it is `overhead`, whose constants are
    of older kernels: it is less by now.
    """
    [measured] = json.loads((RESULTS / f"bench-methods-rivals-{file}-h200.json").read_text())["results"]
    dense = next(row["seconds"] for row in measured["rows"] if row["method"] == "dense (cuDNN)")
    selecting = [row["selecting_seconds"] for row in measured["rows"] if row["method"] == "S2O, one tau"]
    share = statistics.median(selecting) / dense
    assert 0.95 < (overhead(RankingConfig(1024), tail="mean") + fixed_cost(length)) / share < most


def test_a_gpus_cost_is_measured_once_and_read_again(tmp_path, monkeypatch):
    measured = iter([0.123])
    monkeypatch.setattr(measure, "_measured", lambda *_: next(measured))
    with Journal.open(tmp_path / "journal", {"model": "tiny"}) as journal:
        for _ in range(2):
            assert measure.ranking_cost(pretended(GEOMETRY, GPU), 8192, recipe(), journal) == 0.123
        assert measure.ranking_cost(pretended(GEOMETRY), 8192, recipe(), journal) == fixed_cost(8192)
        entries = journal.entries(measure.RANKING_COST)
    assert stored_cost(entries, GEOMETRY, GPU, 8192, recipe()) == 0.123
    assert stored_cost(entries, GEOMETRY, replace(GPU, name="another"), 8192, recipe()) == fixed_cost(8192)
    assert stored_cost(entries, GEOMETRY, GPU, 16384, recipe()) == fixed_cost(16384)
    assert stored_cost([], GEOMETRY, GPU, 8192, recipe()) == fixed_cost(8192)
    assert [key["heads"] for key, _ in entries] == [[4, 2, 64]]


def test_the_measured_call_stops_as_early_as_it_can(monkeypatch):
    """On a CPU by the reference; the times are made up."""
    ran = []

    def medians(calls, device, rounds):
        ran.extend(call() for call in calls.values())
        return {"s2o": 0.6, "dense": 1.0}

    monkeypatch.setattr(measure, "medians", medians)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    ranking = RankingConfig(256)
    cost = measure._measured(GEOMETRY, torch.device("cpu"), 1024, ranking)
    assert [out.shape for out in ran] == [(1, 4, 1024, 64)] * 2
    density = 0.6 - overhead(ranking, "none") - cost
    assert 0.25 < density < 0.6  # windows of 256 have 0.25 of the pairs; to it comes one chunk for each row tile
