"""scripts/bench/tails.py: which default follows from a grid, and the whole program at a tiny size."""

import json

from s2o_runtime.config import TileConfig
from scripts.bench import tails as bench
from scripts.bench.schema import read


def point(queries, keys, kernel_ratio):
    return bench.Point(queries, keys, 1.0, 1.0, 1.0 / kernel_ratio, "dense")


def test_the_default_is_above_every_tail_that_loses():
    points = [point(64, 4096, 0.2), point(256, 4096, 1.5), point(64, 8192, 1.2), point(128, 8192, 0.97)]
    points += [point(256, 8192, 1.1), point(4096, 4096, 0.5)]  # the last is a whole prompt
    assert bench.fewest_that_tie(points, TileConfig()) == 256
    less_work = TileConfig(dense_below=1 << 10)  # 524800 pairs: 128 queries behind 8192 keys have more
    assert bench.fewest_that_tie(points, less_work) == 256
    assert bench.fewest_that_tie(points, TileConfig(dense_below=1500)) == 64
    assert bench.fewest_that_tie([point(64, 4096, 0.2)], TileConfig()) == 128


def test_a_grid_on_a_cpu(tmp_path, capsys):
    out = tmp_path / "t.json"
    arguments = ["--queries", "1,64,512", "--keys", "256,512", "--chunks", "128", "--heads", "2,1", "--head-dim", "64"]
    arguments += ["--segment", "128", "--density", "0.6", "--rounds", "1", "--steps", "2", "--default-tile"]
    assert bench.main([*arguments, "--device", "cpu", "--out", str(out)]) == 0
    file = read(bench.TailsFile, json.loads(out.read_text()))
    sizes = [(entry.queries, entry.keys) for entry in file.points]
    assert sizes == [(1, 256), (64, 256), (1, 512), (64, 512), (512, 512)]
    assert [entry.backend for entry in file.points] == ["dense", "reference", "dense", "reference", "reference"]
    assert [entry.chunk for entry in file.chunks] == [128, 512]
    printed = capsys.readouterr().out
    assert f"least {min(entry.ratio for entry in file.points):.2f}" in printed
    assert "512 tokens in chunks" in printed
