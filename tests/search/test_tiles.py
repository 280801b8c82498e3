"""Tests of which tiles get trials, and where dense attention stops being faster, on a GPU whose times are made up."""

from dataclasses import replace

import pytest
import torch

from calibrate.compiling import get_kernel_form
from calibrate.search import tiles
from calibrate.search.tiles import CPU_TILES, MAX_SLOWDOWN, CrossoverKey, Layer, choose_tiles
from s2o_runtime.config import MAX_TAU, HeadConfig, LayerConfig, TileConfig
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.errors import ConfigError, InputError
from s2o_runtime.identity import Geometry
from s2o_runtime.tiles import list_candidate_tiles
from support.executors import GPU, pretended

GEOMETRY = Geometry("llama", 2, 4, 2, 64)
CANDIDATES = list_candidate_tiles(64, GPU.capability)
SHAPES = list(dict.fromkeys((tile.rows, tile.block_n, tile.num_stages) for tile in CANDIDATES))
LENGTH = 512
CPU, CPU_DEVICE = torch.device("cpu"), DeviceIdentity("cpu", "cpu")
KEY = CrossoverKey(TileConfig(), HeadConfig(MAX_TAU, 1024))


def shape_of(tile):
    return tile.rows, tile.block_n, tile.num_stages


@pytest.fixture
def compiled(monkeypatch):
    """Configurations that each call compiled."""
    calls_compiled = []
    monkeypatch.setattr(tiles, "compile_ahead", lambda calls: calls_compiled.append([call.args[3] for call in calls]))
    return calls_compiled


@pytest.fixture
def timed(monkeypatch, compiled):
    """Tiles in the order in which they were timed; `seconds` says how long each takes, or what it raises."""

    def medians(calls, device, rounds):
        (call,) = calls.values()
        q, k, v, config = call.args
        assert (q.shape[1], k.shape[1], v.shape[1], q.shape[3]) == (4, 2, 2, 64)
        assert {head.tau for head in config.heads} == {0.0}  # the whole prefix, never stopping
        medians.seen.append((config.tile, q.shape[2], config.heads[0].segment))
        result = medians.seconds[SHAPES.index(shape_of(config.tile))]
        if isinstance(result, Exception):
            raise result
        return dict.fromkeys(calls, result)

    medians.seconds, medians.seen = [1.0] * len(SHAPES), []
    monkeypatch.setattr(tiles, "measure_medians", medians)
    return medians


def find(journal, segments=(256, 512), length=LENGTH, geometry=GEOMETRY, device=GPU):
    return choose_tiles(pretended(geometry, device), length=length, segments=segments, journal=journal)


def get_excluded(caplog):
    """Return why tiles get no trial, by their shapes."""
    names = {str(replace(tile, chunk=1)): shape_of(tile) for tile in CANDIDATES}
    return {names[record.args[0]]: record.args[1] for record in caplog.records if "gets no trial" in record.msg}


@pytest.mark.parametrize(
    ("seconds", "kept"),
    [((2.0, 1.98, 1.98 * MAX_SLOWDOWN - 0.01), (0, 2)), ((2.05, 2.0, 3.0), (1,))],
    ids=["a tie of one size", "one of them is faster"],
)
def test_slow_tiles_and_failing_ones_are_left_out_with_the_reason(seconds, kept, timed, journal, caplog):
    caplog.set_level("INFO", "calibrate")
    timed.seconds = [*seconds, RuntimeError("out of shared memory\nmore")]
    assert len({shape[:2] for shape in SHAPES[:3]}) == len(SHAPES) - 2 == len(seconds) - 1
    assert find(journal) == tuple(tile for tile in CANDIDATES if shape_of(tile) in [SHAPES[index] for index in kept])
    reasons = {
        0: "64x128x1 ws s4 has its size and is as fast or faster",
        1: "64x128x1 ws s3 has its size and is as fast or faster",
        2: "1.50 times as slow as the fastest",
        3: "out of shared memory",
    }
    assert get_excluded(caplog) == {SHAPES[index]: reasons[index] for index in reasons if index not in kept}
    seen = [(shape_of(tile), length, segment) for tile, length, segment in timed.seen]
    assert seen == [(shape, LENGTH, 512) for shape in SHAPES]  # once, whatever spacings of the stop check there are
    for arguments in ({"length": 640}, {"segments": (256,)}, {}):  # another length or segment is timed again
        find(journal, **arguments)
    times = [(length, segment) for _, length, segment in timed.seen[:: len(SHAPES)]]
    assert times == [(LENGTH, 512), (640, 512), (LENGTH, 256)]


def test_illegal_tiles_never_reach_timing(timed, journal, caplog, monkeypatch):
    """Rows that do not divide every segment: a tile may not cross a segment's end."""
    caplog.set_level("INFO", "calibrate")
    assert find(journal, segments=(64, 256)) == tuple(tile for tile in CANDIDATES if tile.rows == 64)
    legal = [shape for shape in SHAPES if shape[0] == 64]
    assert [shape_of(tile) for tile, _, _ in timed.seen] == legal != SHAPES
    assert get_excluded(caplog) == dict.fromkeys(set(SHAPES) - set(legal), "its 128 rows do not divide segments of 64")
    timed.seen.clear()
    assert find(journal, device=CPU_DEVICE) == CPU_TILES  # without a GPU nothing is timed
    low = tuple(tile for tile in CPU_TILES if tile.block_m == 64)
    assert find(journal, device=CPU_DEVICE, segments=(64, 128)) == low
    assert not timed.seen
    monkeypatch.setattr(tiles, "CPU_TILES", tuple(tile for tile in CPU_TILES if tile.block_m == 128))
    with pytest.raises(ConfigError, match=r"segments \(64, 128\) fit no tile of this device: use multiples of 128"):
        find(journal, segments=(64, 128), device=CPU_DEVICE)


def test_if_no_tile_runs_that_is_an_error_with_the_first_reason(timed, journal):
    timed.seconds = [RuntimeError("no kernel image")] * len(SHAPES)
    with pytest.raises(InputError, match=r"no tile runs on this GPU \(no kernel image\): leave the model dense"):
        find(journal)
    old = DeviceIdentity("cuda", "pretended", (8, 0), 108, 1)
    with pytest.raises(InputError, match=r"no tile runs on this GPU \(head_dim 256 has none\)"):
        find(journal, geometry=Geometry("llama", 2, 4, 2, 256), device=old)


def test_it_times_real_calls(journal):
    """On a CPU each of them runs the reference."""
    assert {tile.rows for tile in find(journal, segments=(64,), length=128)} == {64}
    ((key, (seconds, failed)),) = journal.entries("tile")
    assert 0 < seconds < 10
    assert (failed, key["length"], key["segment"], key["tile"]["block_m"]) == ("", 128, 64, 64)


@pytest.mark.parametrize(
    ("faster_from", "density", "expected"),
    [(512, 0.0, 512), (3000, 0.0, 4096), (3000, 0.44, 4096), (3000, 0.46, 1 << 18), (1 << 30, 0.0, 1 << 18)],
)
@pytest.mark.parametrize("segment", [256, 1024])
def test_the_first_length_that_wins(monkeypatch, faster_from, density, expected, segment):
    """A prompt of one segment runs dense on both sides, and either could win: it is not compared."""
    lengths, seen = [length for length in tiles.LENGTHS if length > segment], []

    def medians(calls, device, rounds):
        (name,) = calls
        seen.extend(lengths[len(seen) : len(seen) + 1] * (name == "s2o"))
        return {name: 1.0 if name == "dense" else 0.5 if seen[-1] >= faster_from else 1.5}

    monkeypatch.setattr(tiles, "measure_medians", medians)
    monkeypatch.setattr(torch, "randn", lambda *size, **_: torch.empty(1, 1, 1, 1))
    for cached in (tiles.find_dense_below, tiles._time_call):
        cached.cache_clear()
    config = LayerConfig((HeadConfig(0.1, segment), HeadConfig(0.5, segment, representatives=16, tail="mean")))
    expected = max(expected, lengths[0])
    assert tiles.find_dense_below(CrossoverKey.from_layer(config), GEOMETRY, CPU, density) == expected
    assert seen[-1] == min(expected, tiles.LENGTHS[-1])


@pytest.mark.parametrize(("length", "kept", "behind"), [(131072, 8192, 32768), (16384, 8192, 8192), (4096, 4096, 4096)])
def test_a_layer_is_timed_with_its_dearest_ranking_and_is_not_dense_at_its_length(monkeypatch, length, kept, behind):
    """Even if all is dense. Shorter calls than those need not pay behind a prefix either."""
    calls = []
    monkeypatch.setattr(tiles, "find_dense_below", lambda kind, *_: calls.append(kind) or 8192)
    monkeypatch.setattr(tiles, "find_min_queries", lambda kind, *_: calls.append(kind) or 9)
    cheap, dear = HeadConfig(0.1, 256), HeadConfig(0.5, 256, representatives=16, tail="mean")
    dense = HeadConfig(segment=512, mode="dense", representatives=16)
    for heads, slowest in (((cheap, dear, dense), dear), ((dense,), HeadConfig(segment=512))):
        config = LayerConfig(heads, TileConfig(dense_below=3, min_queries=4))
        crossed = TileConfig(dense_below=kept, min_queries=9, tail_keys=behind)
        assert tiles.with_crossover(Layer(config, length, 0.5), GEOMETRY, CPU) == crossed
        timed = TileConfig(), replace(crossed, min_queries=2)
        assert calls == [CrossoverKey(tile, replace(slowest, tau=MAX_TAU)) for tile in timed]
        calls.clear()


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
    """Dense attention takes 1 for each pair, and S2O `ranking` for each key and segment."""

    def seconds(kind, geometry, device, queries, keys):
        return ranking * keys * -(-queries // kind.head.segment), queries * keys - queries * (queries - 1) / 2

    monkeypatch.setattr(tiles, "time_calls", seconds)
    assert tiles.find_min_queries(KEY, GEOMETRY, CPU, density, 131072) == expected


@pytest.mark.parametrize(
    ("length", "below", "most", "expected", "timed_calls"),
    [
        (32768, 0, 1 << 17, 4097, 4),
        (131072, 0, 1 << 17, 1025, 14),  # what it loses behind 8192 keys does not matter
        (131072, 0, 1 << 16, 1024, 15),  # behind 131072 keys nothing fits the memory
        (131072, 32768, 1 << 17, 2, 1),  # calls of less work than a prompt of 32768 never get there
    ],
)
def test_tails_are_timed_behind_the_keys_of_their_bucket(monkeypatch, length, below, most, expected, timed_calls):
    calls, losing = [], {8192: 4096, 32768: 512, 131072: 1024}

    def seconds(kind, geometry, device, queries, keys):
        calls.append((queries, keys))
        if keys > most:
            raise torch.OutOfMemoryError
        return (1.0 if queries <= losing[keys] else 0.0), 0.5

    monkeypatch.setattr(tiles, "time_calls", seconds)
    fewest = tiles.find_min_queries(replace(KEY, tile=TileConfig(dense_below=below)), GEOMETRY, CPU, 0.0, length)
    assert (fewest, len(calls), len({*calls})) == (expected, timed_calls, timed_calls)


def test_the_crossovers_of_many_layers_are_those_of_each(monkeypatch, journal):
    """Layers that differ in bucket and density alone are one item, and the journal answers the second time."""
    monkeypatch.setattr(tiles, "find_dense_below", lambda kind, *_: 1000 + kind.head.segment)
    monkeypatch.setattr(tiles, "find_min_queries", lambda key, *rest: key.tile.dense_below + round(100 * sum(rest[2:])))
    cases = (256, 4096, 0.101), (256, 4096, 0.2), (512, 4096, 0.1), (256, 4096, 0.099), (256, 65536, 0.101)
    layers = {case: Layer(LayerConfig.uniform(4, tau=0.5, segment=case[0]), *case[1:]) for case in cases}
    executor, measured, run = pretended(GEOMETRY, GPU), [], tiles.Crossovers.run
    monkeypatch.setattr(tiles.Crossovers, "run", lambda item, worker: measured.append(item) or run(item, worker))
    for _ in range(2):
        crossed = tiles.measure_crossovers(executor, layers, journal)
        assert crossed == {name: tiles.with_crossover(layer, GEOMETRY, CPU) for name, layer in layers.items()}
        assert len(measured) == 2


def test_kernels_of_several_kinds_are_compiled_at_once(monkeypatch, journal, compiled):
    """One call for each kernel: strides and representatives make none. The second time the journal answers."""
    monkeypatch.setattr(tiles, "_measure_crossover", lambda *_: {"min_queries": 16})
    kinds = [(2, {}), (4, {}), (2, {"representatives": 16}), (2, {"tail": "mean"})]
    layers = {
        number: Layer(LayerConfig.uniform(4, tau=0.5, segment=256, tile=TileConfig(64, 64, chunk), **kind), 8192)
        for number, (chunk, kind) in enumerate(kinds)
    }
    for _ in range(2):
        tiles.measure_crossovers(pretended(GEOMETRY, GPU), layers, journal)
    (configs,) = compiled
    assert {*map(get_kernel_form, configs)} == {get_kernel_form(layer.config) for layer in layers.values()}
    assert len(configs) == 2
    assert {head.tau for config in configs for head in config.heads} == {MAX_TAU}
