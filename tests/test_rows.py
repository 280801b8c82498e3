"""Errors of sampled rows against those of all rows."""

from itertools import pairwise

import pytest
import torch

from calibrate.curves.row_errors import row_errors
from calibrate.proof import rows as rows_module
from calibrate.proof.rows import drawn_tiles, evenly_drawn, exact_rows, sampled_rows
from s2o_runtime.reference.dense import exact_attention


def tensors(q_len, kv_len, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    q, k, v, noise = (
        torch.randn(1, heads, length, 16, generator=generator)
        for heads, length in ((6, q_len), (2, kv_len), (2, kv_len), (6, q_len))
    )
    return q.to(dtype), k.to(dtype), v.to(dtype), noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("q_len", [48, 7], ids=["whole prompt", "continued"])
def test_all_rows_are_as_exact_attention_has_them(q_len, dtype):
    q, k, v, noise = tensors(q_len, 48, dtype)
    truth = exact_attention(q, k, v, scale=0.2)
    out = (truth + 0.1 * noise).to(dtype)
    sampled = sampled_rows(q, k, v, out, torch.arange(q_len), 0.2)
    assert sampled.mse == pytest.approx(float((out.float() - truth).square().mean()), rel=1e-4)
    assert sampled.power == pytest.approx(float(truth.square().mean()), rel=1e-4)
    torch.testing.assert_close(sampled.off, row_errors(out, truth)[0], rtol=1e-3, atol=1e-5)


def test_some_rows_are_those_rows():
    q, k, v, noise = tensors(48, 48)
    truth = exact_attention(q, k, v)
    rows = torch.tensor([0, 5, 47])
    sampled = sampled_rows(q, k, v, truth + noise, rows, None)
    assert sampled.mse == pytest.approx(float(noise[:, :, rows].square().mean()), rel=1e-4)
    assert sampled.off.shape == (6, 3)


def test_rows_are_drawn_one_from_each_part():
    generator = torch.Generator().manual_seed(0)
    for first, end in ((0, 100), (64, 164), (10, 74)):
        rows = evenly_drawn(first, end, 8, generator)
        edges = [first + part * (end - first) // 8 for part in range(9)]
        assert [int(((rows >= low) & (rows < high)).sum()) for low, high in pairwise(edges)] == [1] * 8
    assert evenly_drawn(5, 9, 8, generator).tolist() == [5, 6, 7, 8]
    drawn = torch.cat([evenly_drawn(0, 32, 8, generator) for _ in range(500)])
    counts = torch.bincount(drawn, minlength=32)
    assert counts.min() > 80  # 125 are expected of each row, with a deviation of 10
    assert counts.max() < 170


@pytest.mark.parametrize("q_len", [48, 7], ids=["whole prompt", "continued"])
def test_rows_are_exact_however_few_are_computed_together(q_len, monkeypatch):
    q, k, v, _ = tensors(q_len, 48)
    rows = torch.tensor([0, 3, 4, 6])
    monkeypatch.setattr(rows_module, "SCORES", 3 * 48)  # one row of the three heads of a group
    torch.testing.assert_close(exact_rows(q, k, v, rows, 0.3), exact_attention(q, k, v, scale=0.3)[:, :, rows])


def test_tiles_are_whole_and_from_all_parts():
    generator = torch.Generator().manual_seed(0)
    rows = drawn_tiles(1000, 8, 80, generator)
    tiles = rows.view(10, 8)
    assert torch.equal(tiles - tiles[:, :1], torch.arange(8).expand(10, 8))
    assert (tiles[:, 0] % 8 == 0).all()
    assert (rows.diff() > 0).all()
    assert rows.max() < 1000
    parts = [int((tiles[:, 0] // 8 * 10 // 125 == part).sum()) for part in range(10)]
    assert max(parts) <= 2  # 125 tiles in 10 parts, whose edges are rounded down
    assert torch.equal(drawn_tiles(80, 8, 80, generator), torch.arange(80))
