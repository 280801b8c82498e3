"""Which tiles get trials on a GPU that is pretended: times are made up, everything else is real."""

from dataclasses import replace

import pytest

from calibrate.journal import Journal
from calibrate.search import tiles
from calibrate.search.tiles import CPU_TILES, MAX_SLOWDOWN, choose_tiles
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.errors import ConfigError, InputError
from s2o_runtime.identity import Geometry
from s2o_runtime.tiles import list_candidate_tiles
from support.executors import GPU, pretended

GEOMETRY = Geometry("llama", 2, 4, 2, 64)
CANDIDATES = list_candidate_tiles(64, GPU.capability)
SHAPES = list(dict.fromkeys((tile.rows, tile.block_n, tile.num_stages) for tile in CANDIDATES))
LENGTH = 512


def shape_of(tile):
    return tile.rows, tile.block_n, tile.num_stages


@pytest.fixture
def journal(tmp_path):
    with Journal.open(tmp_path / "j", {}) as journal:
        yield journal


@pytest.fixture
def timed(monkeypatch):
    """Tiles in the order in which they were timed; `seconds` says how long each takes, or what it raises."""
    seen = []

    def medians(calls, device, rounds):
        (call,) = calls.values()
        config = call.args[3]
        q, k, v = call.args[:3]
        assert (q.shape[1], k.shape[1], v.shape[1], q.shape[3]) == (4, 2, 2, 64)
        assert {head.tau for head in config.heads} == {0.0}  # the whole prefix, never stopping
        seen.append((config.tile, q.shape[2], config.heads[0].segment))
        found = medians.seconds[SHAPES.index(shape_of(config.tile))]
        if isinstance(found, Exception):
            raise found
        return dict.fromkeys(calls, found)

    medians.seconds = [1.0] * len(SHAPES)
    medians.seen = seen
    medians.compiled = []
    monkeypatch.setattr(tiles, "compile_ahead", lambda calls: medians.compiled.append([each.args[3] for each in calls]))
    monkeypatch.setattr(tiles, "measure_medians", medians)
    return medians


def find(journal, segments=(256, 512), length=LENGTH, geometry=GEOMETRY, device=GPU):
    return choose_tiles(pretended(geometry, device), length=length, segments=segments, journal=journal)


def get_excluded(caplog):
    """Why tiles get no trial, by their shapes."""
    names = {str(replace(tile, chunk=1)): shape_of(tile) for tile in CANDIDATES}
    return {names[record.args[0]]: record.args[1] for record in caplog.records if "gets no trial" in record.msg}


def test_slow_tiles_and_failing_ones_are_left_out_with_the_reason(timed, journal, caplog):
    caplog.set_level("INFO", "calibrate")
    assert len(SHAPES) == 4
    timed.seconds = [2.0, 2.0 * MAX_SLOWDOWN - 0.01, 3.0, RuntimeError("out of shared memory\nmore")]
    assert find(journal) == tuple(tile for tile in CANDIDATES if shape_of(tile) in SHAPES[:2])
    assert get_excluded(caplog) == {
        SHAPES[2]: "1.50 times as slow as the fastest",
        SHAPES[3]: "out of shared memory",
    }
    assert [(shape_of(tile), length, segment) for tile, length, segment in timed.seen] == [
        (shape, LENGTH, 512) for shape in SHAPES
    ]  # once, however many spacings of the stop check there are


def test_another_length_or_segment_is_timed_again(timed, journal):
    for arguments in ({}, {"length": 640}, {"segments": (256,)}, {}):
        find(journal, **arguments)
    assert [(length, segment) for _, length, segment in timed.seen[:: len(SHAPES)]] == [
        (LENGTH, 512), (640, 512), (LENGTH, 256),
    ]  # fmt: skip


def test_illegal_tiles_never_reach_timing(timed, journal, caplog):
    """Rows that do not divide every segment: a tile may not cross a segment's end."""
    caplog.set_level("INFO", "calibrate")
    tiles = find(journal, segments=(64, 256))
    legal = [shape for shape in SHAPES if shape[0] == 64]
    assert [shape_of(tile) for tile, _, _ in timed.seen] == legal != SHAPES
    assert tiles == tuple(tile for tile in CANDIDATES if tile.rows == 64)
    assert get_excluded(caplog) == dict.fromkeys(set(SHAPES) - set(legal), "its 128 rows do not divide segments of 64")


def test_if_no_tile_runs_that_is_an_error_with_the_first_reason(timed, journal):
    timed.seconds = [RuntimeError("no kernel image")] * len(SHAPES)
    with pytest.raises(InputError, match=r"no tile runs on this GPU \(no kernel image\): leave the model dense"):
        find(journal)
    old = DeviceIdentity("cuda", "pretended", (8, 0), 108, 1)
    with pytest.raises(InputError, match=r"no tile runs on this GPU \(head_dim 256 has none\)"):
        find(journal, geometry=Geometry("llama", 2, 4, 2, 256), device=old)


def test_it_times_real_calls(journal):
    """On a CPU each of them runs the reference."""
    tiles = find(journal, segments=(64,), length=128)
    assert {tile.rows for tile in tiles} == {64}
    ((key, (seconds, failed)),) = journal.entries("tile")
    assert 0 < seconds < 10
    assert failed == ""
    assert (key["length"], key["segment"], key["tile"]["block_m"]) == (128, 64, 64)


def test_without_a_gpu_nothing_is_timed(timed, journal):
    cpu = DeviceIdentity("cpu", "cpu")
    assert find(journal, device=cpu) == CPU_TILES
    legal = find(journal, device=cpu, segments=(64, 128))
    assert legal == tuple(tile for tile in CPU_TILES if tile.block_m == 64)
    assert not timed.seen


def test_segments_that_fit_no_tile_are_refused(journal, monkeypatch):
    monkeypatch.setattr(tiles, "CPU_TILES", tuple(tile for tile in CPU_TILES if tile.block_m == 128))
    with pytest.raises(ConfigError, match=r"segments \(64, 128\) fit no tile of this device: use multiples of 128"):
        find(journal, segments=(64, 128), device=DeviceIdentity("cpu", "cpu"))
