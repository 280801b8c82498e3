"""Where dense attention stops being faster, with times that are made up."""

import pytest
import torch

from calibrate import crossover
from s2o_runtime.config import TileConfig
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
    tile = crossover.with_crossover(TileConfig(), 256, GEOMETRY, torch.device("cpu"))
    assert tile == TileConfig(dense_below=expected)
    assert seen[-1] == min(expected, crossover.LENGTHS[-1])


def test_it_times_real_calls(monkeypatch):
    monkeypatch.setattr(crossover, "LENGTHS", (256,))
    crossover.dense_below.cache_clear()
    assert crossover.dense_below(TileConfig(), 128, GEOMETRY, torch.device("cpu")) in (256, 512)


def test_a_prompt_of_one_segment_is_not_compared(monkeypatch):
    """It runs dense on both sides, and either could win."""
    monkeypatch.setattr(crossover, "medians", lambda *_: {"dense": 1.0, "s2o": 0.9})
    crossover.dense_below.cache_clear()
    assert crossover.dense_below(TileConfig(), 1024, GEOMETRY, torch.device("cpu")) == 2048
