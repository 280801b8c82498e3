"""Where dense attention stops being faster, with times that are made up."""

from dataclasses import replace

import pytest
import torch

from calibrate.search import crossover
from s2o_runtime.config import MAX_TAU, HeadConfig, LayerConfig, TileConfig
from s2o_runtime.identity import Geometry

GEOMETRY = Geometry("llama", 2, 4, 2, 64)


@pytest.mark.parametrize(("faster_from", "expected"), [(512, 512), (3000, 4096), (1 << 30, 1 << 18)])
def test_the_first_length_that_wins(monkeypatch, faster_from, expected):
    seen = []

    def medians(calls, device, rounds):
        assert set(calls) == {"dense", "s2o"}
        length = crossover.LENGTHS[len(seen)]
        seen.append(length)
        return {"dense": 1.0, "s2o": 0.5 if length >= faster_from else 1.5}

    monkeypatch.setattr(crossover, "medians", medians)
    monkeypatch.setattr(crossover.torch, "randn", lambda *size, **_: torch.empty(1, 1, 1, 1))
    crossover.dense_below.cache_clear()
    config = LayerConfig((HeadConfig(0.1, 256), HeadConfig(0.5, 256, representatives=8, tail=True)), grain=2)
    tile = crossover.with_crossover(config, GEOMETRY, torch.device("cpu"))
    assert tile == TileConfig(dense_below=expected)
    assert seen[-1] == min(expected, crossover.LENGTHS[-1])


def test_it_times_real_calls(monkeypatch):
    monkeypatch.setattr(crossover, "LENGTHS", (256,))
    crossover.dense_below.cache_clear()
    head = HeadConfig(MAX_TAU, 128, representatives=2, tail=True)
    assert crossover.dense_below(TileConfig(), head, 4, GEOMETRY, torch.device("cpu")) in (256, 512)


def test_a_prompt_of_one_segment_is_not_compared(monkeypatch):
    """It runs dense on both sides, and either could win."""
    monkeypatch.setattr(crossover, "medians", lambda *_: {"dense": 1.0, "s2o": 0.9})
    crossover.dense_below.cache_clear()
    assert crossover.dense_below(TileConfig(), HeadConfig(MAX_TAU, 1024), 1, GEOMETRY, torch.device("cpu")) == 2048


def test_a_layer_is_timed_with_its_dearest_ranking_even_if_all_dense(monkeypatch):
    seen = []
    monkeypatch.setattr(crossover, "dense_below", lambda tile, head, grain, *_: seen.append((tile, head, grain)) or 7)
    cheap, dear = HeadConfig(0.1, 256), HeadConfig(0.5, 256, representatives=8, tail=True)
    dense = HeadConfig(segment=512, mode="dense", representatives=64)
    for heads, timed in (((cheap, dear, dense), dear), ((dense,), HeadConfig(segment=512))):
        crossover.with_crossover(LayerConfig(heads, TileConfig(dense_below=3), grain=2), GEOMETRY, torch.device("cpu"))
        assert seen.pop() == (TileConfig(), replace(timed, tau=MAX_TAU), 2)
