"""Where dense attention stops being faster, with times that are made up."""

from dataclasses import replace

import pytest
import torch

from calibrate.compiling import get_kernel_form
from calibrate.journal import Journal
from calibrate.search import tiles
from calibrate.search.tiles import CrossoverKey, Layer
from s2o_runtime.config import MAX_TAU, HeadConfig, LayerConfig, TileConfig
from s2o_runtime.identity import Geometry
from support.executors import GPU, pretended

GEOMETRY = Geometry("llama", 2, 4, 2, 64)
CPU = torch.device("cpu")
KEY = CrossoverKey(TileConfig(), HeadConfig(MAX_TAU, 1024))


def forget():
    for cached in (tiles.find_dense_below, tiles.time_calls):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("faster_from", "density", "expected"),
    [(512, 0.0, 512), (3000, 0.0, 4096), (3000, 0.44, 4096), (3000, 0.46, 1 << 18), (1 << 30, 0.0, 1 << 18)],
)
def test_the_first_length_that_wins(monkeypatch, faster_from, density, expected):
    seen = []

    def medians(calls, device, rounds):
        assert set(calls) == {"dense", "s2o"}
        length = tiles.LENGTHS[len(seen)]
        seen.append(length)
        return {"dense": 1.0, "s2o": 0.5 if length >= faster_from else 1.5}

    monkeypatch.setattr(tiles, "measure_medians", medians)
    monkeypatch.setattr(torch, "randn", lambda *size, **_: torch.empty(1, 1, 1, 1))
    forget()
    config = LayerConfig((HeadConfig(0.1, 256), HeadConfig(0.5, 256, representatives=16, tail="mean")))
    assert tiles.find_dense_below(CrossoverKey.from_layer(config), GEOMETRY, CPU, density) == expected
    assert seen[-1] == min(expected, tiles.LENGTHS[-1])


def test_a_layer_is_timed_with_its_dearest_ranking_even_if_all_dense(monkeypatch):
    calls = []
    monkeypatch.setattr(tiles, "find_dense_below", lambda kind, *_: calls.append(kind) or 7)
    monkeypatch.setattr(tiles, "find_min_queries", lambda kind, *_: calls.append(kind) or 9)
    cheap, dear = HeadConfig(0.1, 256), HeadConfig(0.5, 256, representatives=16, tail="mean")
    dense = HeadConfig(segment=512, mode="dense", representatives=16)
    for heads, timed in (((cheap, dear, dense), dear), ((dense,), HeadConfig(segment=512))):
        config = LayerConfig(heads, TileConfig(dense_below=3, min_queries=4))
        tile = tiles.with_crossover(Layer(config), GEOMETRY, CPU)
        assert tile == TileConfig(dense_below=7, min_queries=9, tail_keys=8192)
        fastest = replace(timed, tau=MAX_TAU)
        assert calls == [
            CrossoverKey(TileConfig(), fastest),
            CrossoverKey(TileConfig(dense_below=7, min_queries=2, tail_keys=8192), fastest),
        ]
        calls.clear()


@pytest.mark.parametrize(("faster_at", "kept"), [(None, 8192), (8192, 8192), (4096, 4096)])
def test_a_layer_does_not_go_dense_where_it_was_faster(monkeypatch, faster_at, kept):
    seen = []
    monkeypatch.setattr(tiles, "find_dense_below", lambda *_: 8192)
    monkeypatch.setattr(tiles, "find_min_queries", lambda kind, *_: seen.append(kind.tile.dense_below) or 16)
    layer = Layer(LayerConfig.uniform(4, tau=0.5), 0.5, faster_at)
    assert tiles.with_crossover(layer, GEOMETRY, CPU).dense_below == kept
    assert seen == [kept]  # shorter calls than these need not pay behind a prefix either


def modelled(monkeypatch, ranking):
    """Times of a GPU where dense attention takes 1 for each pair, and S2O `ranking` for each key and segment."""

    def seconds(kind, geometry, device, queries, keys):
        return ranking * keys * -(-queries // kind.head.segment), queries * keys - queries * (queries - 1) / 2

    monkeypatch.setattr(tiles, "time_calls", seconds)


@pytest.mark.parametrize(
    ("ranking", "density", "expected"),
    [
        (0.5, 0.0, 2),  # even 16 queries are worth a ranking
        (100.0, 0.0, 128),
        (100.0, 0.5, 512),  # half of what is saved pays for the keys that are visited
        (100.0, 1.0, 16384),  # nothing is saved
        (500.0, 0.0, 2048),  # 1024 would do, but one query more ranks the prefix once more
    ],
)
def test_the_fewest_queries_that_win_behind_every_prefix(monkeypatch, ranking, density, expected):
    modelled(monkeypatch, ranking)
    assert tiles.find_min_queries(KEY, GEOMETRY, CPU, density) == expected


def test_tails_of_less_work_than_the_shortest_prompt_are_not_compared(monkeypatch):
    """Behind 8192 keys S2O loses up to 4096 queries; calls of less work than a prompt of 8192 never get there."""

    def seconds(kind, geometry, device, queries, keys):
        return (1.0 if queries <= (4096 if keys == 8192 else 512) else 0.0), 0.5

    monkeypatch.setattr(tiles, "time_calls", seconds)
    assert tiles.find_min_queries(KEY, GEOMETRY, CPU, 0.0) == 4097
    assert tiles.find_min_queries(replace(KEY, tile=TileConfig(dense_below=8192)), GEOMETRY, CPU, 0.0) == 1024


def test_the_crossovers_of_many_layers_are_those_of_each(monkeypatch, tmp_path):
    """Layers that differ in their density alone are one item, and the journal answers the second time."""
    monkeypatch.setattr(tiles, "find_dense_below", lambda kind, *_: 1000 + kind.head.segment)
    monkeypatch.setattr(tiles, "find_min_queries", lambda kind, *rest: kind.tile.dense_below + round(100 * rest[-1]))
    layers = {
        name: Layer(LayerConfig.uniform(4, tau=0.5, segment=segment), density, faster_at)
        for name, segment, density, faster_at in [
            ("a", 256, 0.101, None), ("b", 256, 0.2, 2048), ("c", 512, 0.1, None), ("d", 256, 0.099, None),
        ]
    }  # fmt: skip
    with Journal.open(tmp_path / "j", {}) as journal:
        executor = pretended(GEOMETRY, GPU)
        crossed = tiles.measure_crossovers(executor, layers, journal)
        for name, layer in layers.items():
            assert crossed[name] == tiles.with_crossover(layer, GEOMETRY, CPU)
        assert executor.work["crossovers"].items == 2
        assert tiles.measure_crossovers(executor, layers, journal) == crossed
        assert executor.work["crossovers"].items == 2


def test_kernels_of_several_kinds_are_compiled_at_once(monkeypatch, tmp_path):
    """One call for each kernel: strides and representatives make none."""
    monkeypatch.setattr(tiles, "_measure_crossover", lambda *_: (512, 16))
    compiled = []
    monkeypatch.setattr(tiles, "compile_ahead", lambda calls: compiled.append([call.args[3] for call in calls]))
    layers = {
        number: Layer(LayerConfig.uniform(4, tau=0.5, segment=256, tile=TileConfig(64, 64, chunk), **kind))
        for number, (chunk, kind) in enumerate(
            [(2, {}), (4, {}), (2, {"representatives": 16}), (2, {"tail": "mean"}), (2, {"scores": "int8"})]
        )
    }
    with Journal.open(tmp_path / "j", {}) as journal:
        for _ in range(2):  # the second time the journal answers
            tiles.measure_crossovers(pretended(GEOMETRY, GPU), layers, journal)
    (configs,) = compiled
    assert {get_kernel_form(config) for config in configs} == {
        get_kernel_form(layer.config) for layer in layers.values()
    }
    assert len(configs) == 3
    assert {head.tau for config in configs for head in config.heads} == {MAX_TAU}


def test_a_prompt_of_one_segment_is_not_compared(monkeypatch):
    """It runs dense on both sides, and either could win."""
    monkeypatch.setattr(tiles, "measure_medians", lambda *_: {"dense": 1.0, "s2o": 0.9})
    forget()
    assert tiles.find_dense_below(KEY, GEOMETRY, CPU, 0.0) == 2048


def test_keys_that_do_not_fit_the_memory_are_left_out(monkeypatch):
    def seconds(kind, geometry, device, queries, keys):
        if keys > 32768:
            raise torch.OutOfMemoryError
        return (1.0 if queries <= 64 else 0.0), 0.5

    monkeypatch.setattr(tiles, "time_calls", seconds)
    assert tiles.find_min_queries(KEY, GEOMETRY, CPU, 0.0) == 128
