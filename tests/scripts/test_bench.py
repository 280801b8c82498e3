"""The benches of the kernel and of whole prefills, at tiny sizes."""

import json
from functools import partial

import pytest
import torch

from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.config import LayerConfig, TileConfig
from s2o_runtime.reference.dense import dense_attention
from scripts.bench import attention as bench
from scripts.bench import breakdown, prefill
from scripts.bench.calls import kernel_parts
from scripts.bench.schema import AttentionFile, PrefillFile, read

EXHAUSTIVE = pytest.mark.exhaustive(reason="runs a whole benchmark")

TINY = "--heads 2/1 --head-dim 64 --dtype float32 --segment 64 --lengths 1024,768 "
TINY += "--densities 0.01,0.6,0.7 --rounds 2 --device cpu"
TILE = TileConfig(64, 32, 1, 4, 2)
PREFILL = "--models demo --lengths 1024 --densities 0.8 --rounds 1 --device cpu"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Two lengths with the reference backend."""
    out = tmp_path_factory.mktemp("bench") / "new" / "b.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "device_tile", lambda *_: TILE)
        assert bench.main([*TINY.split(), "--out", str(out)]) == 0
    return read(AttentionFile, json.loads(out.read_text()))


@EXHAUSTIVE
def test_densities_are_reached_and_rates_follow(measured):
    for entry in measured.results:
        rows, dense = entry.rows, entry.dense.seconds.median
        assert [row.target for row in rows] == ["never stop", 0.7, 0.6, "lowest"]
        assert rows[0].density == 1.0
        for row in rows[1:3]:  # a stop decision is one chunk of 32 keys for 64 rows; the shortest prompt has 12 tiles
            assert row.density == pytest.approx(row.target, rel=0.1)
        assert rows[3].density < rows[2].density
        for row in rows:
            assert 0 < row.seconds.p25 <= row.seconds.median <= row.seconds.p75
            assert row.rate == pytest.approx(row.density * dense / row.seconds.median)
            assert sum(row.density_of_heads) / 2 == pytest.approx(row.density)
            assert len(row.tau_of_heads) == 2
        errors = [row.rel_mse for row in rows]
        assert errors == sorted(errors)
        assert max(errors[0], entry.dense.rel_mse) < 1e-10 < errors[1]  # float32 rounding, then what was left out


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the kernels on CPU tensors, in Triton's interpreter")
def test_the_parts_make_the_whole():
    """A call that is timed without the ranking computes what the whole call computes."""
    q, k, v = torch.randn(1, 1, 128, 64), torch.randn(1, 1, 128, 64), torch.randn(1, 1, 128, 64)
    config = LayerConfig.uniform(1, tau=1e6, segment=64, tile=TILE)
    rank, (prefill,) = kernel_parts(q, k, v, [config])
    rank()
    expected = s2o_attention(q, k, v, config, backend="triton")
    assert torch.equal(prefill(), expected)
    assert not torch.equal(expected, dense_attention(q, k, v))


@EXHAUSTIVE
def test_a_model_is_timed_dense_and_at_a_density(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(prefill, "SEGMENT", 128)
    out = tmp_path / "p.json"
    assert prefill.main([*PREFILL.split(), "--out", str(out)]) == 0
    (entry,) = read(PrefillFile, json.loads(out.read_text())).results
    assert (entry.model, entry.length) == ("demo", 1024)
    dense, sparse = entry.rows
    assert (dense.name, dense.density) == ("dense, cuDNN", 1.0)
    assert sparse.name == "S2O, density 0.8"
    assert 0.5 < sparse.density < 1.0  # a window is an eighth of the prompt
    for row in (dense, sparse):
        assert row.attention_seconds == pytest.approx(row.share * row.seconds.median)
        assert row.share > 0.0
    assert "attention" in capsys.readouterr().out


def test_a_layer_taken_apart_counts_what_is_computed():
    q, k, v = (torch.randn(1, heads, 512, 64) for heads in (2, 1, 1))
    config = LayerConfig.uniform(2, tau=1e6, segment=128, tile=TileConfig(64, 64, 1, 4, 1))
    row = breakdown.layer_row((q, k, v), partial(s2o_attention, q, k, v, config), 1)
    density = s2o_attention(q, k, v, config, return_stats=True).density.mean()
    assert row["density"] == pytest.approx(float(density))
    assert row["even"] == pytest.approx(row["density"] * row["dense"])
    window = 4 * 128 * 129 / (512 * 513)  # of four segments
    assert row["window"] == pytest.approx(window * row["dense"])
    assert min(row["total"], row["host"]) > 0
