"""Predicted errors and densities must be what the reference, run with the same threshold, really gives."""

import json
import statistics
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch

from calibrate.curves import measure as measure_module
from calibrate.curves import torch_pass, trace_pass
from calibrate.curves.curves import (
    TAUS,
    WORST,
    RankingConfig,
    Shape,
    combine_curves,
    compute_row_errors,
    count_window_pairs,
    estimate_overhead,
    fixed_cost,
    tile_worst,
)
from calibrate.curves.measure import RANKING_COST, RankingCost, measure, measure_ranking_cost, read_stored_cost
from calibrate.model.layers import Captured
from calibrate.recipe import Recipe
from s2o_runtime.config import HeadConfig, LayerConfig, StopRule, TileConfig
from s2o_runtime.identity import geometry
from s2o_runtime.reference.attention import s2o_attention_reference
from s2o_runtime.reference.dense import exact_attention
from s2o_runtime.sequences import call_shape, measure_density
from support.executors import GPU, pretended
from support.marks import all_but_first, pairwise
from support.models import CONFIGS

SLOW = pytest.mark.slow(reason="more tiles and rankings of the same")


def prompt(length=1300, heads=4, kv_heads=2, head_dim=16, value_dim=16, **features):
    q = torch.randn(1, heads, length, head_dim) * torch.tensor([0.3, 1.0, 2.0, 4.0])[:heads, None, None]
    q = q + 2 * torch.randn(1, heads, 1, head_dim)  # queries that agree, so that a ranking finds something
    k, v = (torch.randn(1, kv_heads, length, dim) for dim in (head_dim, value_dim))
    return Captured(q, k, v, head_dim**-0.5, **features)


METHODS = [RankingConfig(256), RankingConfig(512, 16), RankingConfig(256, 16), RankingConfig(512, 1, 256)]
TILES = [TileConfig(128, 64, 2), TileConfig(64, 64, 8), TileConfig(128, 128, 3)]


@pytest.mark.parametrize(
    ("method", "features", "tile", "tail", "last_rows"),
    pairwise(
        [
            pytest.param(METHODS[2], {"softcap": 3.0, "sinks": torch.linspace(-1, 5, 4), "value_dim": 24}, id="cap"),
            *(pytest.param(m, {}, id=f"S{m.segment}-R{m.representatives}-L{m.lookback}") for m in METHODS),
        ],
        TILES,
        ["none", "mean"],
        [0],
        mark=SLOW,
        count=3,
    )
    + all_but_first([(METHODS[2], {"length": 1700}, tile, "mean", 256) for tile in TILES[::2]], SLOW),
)
def test_a_curve_predicts_what_the_reference_does(method, features, tile, tail, last_rows):
    """At some thresholds."""
    captured = prompt(**features)
    other = RankingConfig(method.segment, 17 - method.representatives, 384 - method.lookback)
    shape = Shape.from_tile(tile)
    curve = measure(captured, [other, method], [Shape(64, 128), shape], last_rows)[method, shape]  # in one pass
    scoring = captured.scoring.arguments()
    truth = exact_attention(captured.q, captured.k, captured.v, **scoring)
    assert curve.dense_power == pytest.approx(float(truth.square().mean()), rel=1e-5)
    seen = set()
    for index in range(3, len(TAUS), 4):
        head = HeadConfig(TAUS[index], method.segment, "s2o", StopRule.REST, method.representatives, tail)
        config = LayerConfig((head,) * 4, tile, method.lookback, last_rows)
        out, visited, _ = s2o_attention_reference(captured.q, captured.k, captured.v, config, **scoring)
        # a curve's prefix is a whole number of its steps; the kernel's of its tiles, which divide them
        predicted = curve.density[:, index]
        actual = measure_density(visited, config, call_shape(captured.q, captured.k, captured.v))
        torch.testing.assert_close(predicted, actual, rtol=1e-9, atol=1e-9)
        mse = (out - truth).square().mean((0, 2, 3)).double()
        predicted_mse, predicted_worst = (errors[:, index] for errors in curve.errors(tail))
        torch.testing.assert_close(predicted_mse, mse, rtol=1e-3, atol=1e-9)
        worst = tile_worst(compute_row_errors(out, truth), tile.block_m)[0].double()
        expected = worst.sort(-1).values[:, round(WORST * (worst.shape[1] - 1))]
        torch.testing.assert_close(predicted_worst.square(), expected.square(), rtol=2e-3, atol=1e-9)
        seen.add(round(float(actual.mean()), 3))
    assert len(seen) >= 3  # the thresholds tried do differ


def test_measuring_few_heads_at_a_time_changes_nothing(monkeypatch):
    captured, method, shape = prompt(600), RankingConfig(256, 16), Shape(64, 256)
    whole = measure(captured, [method], [shape])[method, shape]
    monkeypatch.setattr(torch_pass, "CPU_BYTES", 1)
    single = measure(captured, [method], [shape])[method, shape]
    torch.testing.assert_close(whole.mse, single.mse, rtol=1e-6, atol=0)
    torch.testing.assert_close(whole.tail_mse, single.tail_mse, rtol=1e-4, atol=0)
    assert torch.equal(whole.density, single.density)


def test_the_curve_of_two_prompts_has_the_larger_error_and_the_mean_density():
    key = (RankingConfig(256), Shape(64, 128))
    first, second = (measure(prompt(400), key[:1], key[1:])[key] for _ in range(2))
    mean = combine_curves([first, second])
    for name in ("mse", "tail_mse", "worst", "tail_worst"):  # the mean plus one deviation, or the worst of all
        larger = torch.maximum(getattr(first, name), getattr(second, name))
        torch.testing.assert_close(getattr(mean, name), larger, rtol=1e-9, atol=1e-12)
    assert torch.equal(mean.density, (first.density + second.density) / 2)
    assert mean.dense_power == (first.dense_power + second.dense_power) / 2


@pytest.mark.parametrize("segment", [256, 320, 2048, 4096])
def test_rows_that_stand_for_a_long_prompt_are_spread_evenly_over_it(segment):
    """And the pairs in windows of its parts add up."""
    ranking = RankingConfig(320, lookback=256)
    parts = [count_window_pairs(range(begin, min(begin + 640, 1900)), ranking, 128) for begin in (0, 640, 1280)]
    assert sum(parts) == count_window_pairs(range(1900), ranking, 128)
    assert trace_pass.sample_rows(16383, segment) is None
    for length, every in ((32768, 4), (131072, 16), (131072 - 999, 15)):
        of_prompts = [trace_pass.sample_rows(length, segment, number) for number in range(every)]
        rows = [torch.tensor([*chain(*windows)]) for windows in of_prompts]
        assert all(window.start % segment == 0 for windows in of_prompts for window in windows)
        assert torch.cat(rows).sort().values.equal(torch.arange(length))  # together these prompts show all rows
        assert float(rows[0].double().mean()) == pytest.approx(length / 2, rel=0.15)


RESULTS = Path(__file__).parents[2] / "docs" / "results"
GEOMETRY = geometry(CONFIGS["llama"])


def recipe():
    return Recipe.from_options({"model": "tiny", "lengths": (8192,), "out": Path("unused"), "budget_rel_mse": 1e-3})


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
    assert 0.95 < (estimate_overhead(RankingConfig(1024), tail="mean") + fixed_cost(length)) / share < most


def test_a_gpus_cost_is_measured_once_and_read_again(journal, monkeypatch):
    measured = iter([0.123])
    monkeypatch.setattr(RankingCost, "run", lambda *_: next(measured))
    for _ in range(2):
        assert measure_ranking_cost(pretended(GEOMETRY, GPU), 8192, recipe(), journal) == 0.123
    assert measure_ranking_cost(pretended(GEOMETRY), 8192, recipe(), journal) == fixed_cost(8192)
    entries = journal.entries(RANKING_COST)
    assert read_stored_cost(entries, GEOMETRY, GPU, 8192, recipe()) == 0.123
    assert read_stored_cost(entries, GEOMETRY, replace(GPU, name="another"), 8192, recipe()) == fixed_cost(8192)
    assert read_stored_cost(entries, GEOMETRY, GPU, 16384, recipe()) == fixed_cost(16384)
    assert read_stored_cost([], GEOMETRY, GPU, 8192, recipe()) == fixed_cost(8192)
    assert [key["heads"] for key, _ in entries] == [[4, 2, 64]]


def test_the_measured_call_stops_as_early_as_it_can(monkeypatch):
    """On a CPU by the reference; the times are made up."""
    ran = []

    def medians(calls, device, rounds):
        ran.extend(call() for call in calls.values())
        return {"s2o": 0.6, "dense": 1.0}

    monkeypatch.setattr(measure_module, "measure_medians", medians)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    executor = pretended(GEOMETRY, GPU)
    cost = executor.submit(RankingCost(1024, 256, (4, 2, 64))).result()
    assert [out.shape for out in ran] == [(1, 4, 1024, 64)] * 2
    density = 0.6 - estimate_overhead(RankingConfig(256), "none") - cost
    assert 0.25 < density < 0.6  # windows of 256 have 0.25 of the pairs; to it comes one chunk for each row tile
