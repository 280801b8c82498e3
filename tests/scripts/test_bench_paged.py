"""scripts/bench/paged.py: a cache of shuffled pages, and the whole program at a tiny size."""

import json

import pytest
import torch

from s2o_runtime.errors import InputError
from scripts.bench import paged as bench
from scripts.bench.schema import read


def test_every_key_is_in_its_page():
    k, v = torch.randn(2, 1, 3, 50, 8).unbind(0)
    k_cache, v_cache, table = bench.in_pages(k, v, 16)
    assert k_cache.shape == (6, 16, 3, 8)
    assert table[0].unique().numel() == 4
    for cache, rows in ((k_cache, k), (v_cache, v)):
        assert torch.equal(cache[table[0].long()].flatten(0, 1)[:50], rows[0].transpose(0, 1))


def test_calls_on_a_cpu(tmp_path, capsys):
    out = tmp_path / "p.json"
    arguments = ["--queries", "64,512", "--keys", "256,512", "--heads", "2,1", "--head-dim", "64", "--dense-heads", "1"]
    arguments += ["--segment", "128", "--density", "0.6", "--rounds", "1", "--steps", "2"]
    assert bench.main([*arguments, "--device", "cpu", "--out", str(out)]) == 0
    file = read(bench.PagedFile, json.loads(out.read_text()))
    assert [(point.queries, point.keys) for point in file.points] == [(64, 256), (256, 256), (64, 512), (512, 512)]
    assert file.points[0].copy_bytes == 2 * 256 * 64 * 4
    assert "pages of 16 tokens" in capsys.readouterr().out


def test_another_output_in_place_is_no_result(monkeypatch):
    def wrong(q, *cache, total_k, **call):
        return torch.full_like(q, float(total_k))

    monkeypatch.setattr(bench, "s2o_attention_paged", wrong)
    config = bench.with_dense_heads(bench.LayerConfig.uniform(2, segment=128), 1)
    with pytest.raises(InputError, match="64 queries behind 256 keys: read in place"):
        bench.timed(tuple(torch.randn(1, 2, length, 64) for length in (64, 256, 256)), config, 16, 1)
