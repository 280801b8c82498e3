"""Errors of rows against dense attention, and rows of exact attention."""

import math

import pytest
import torch

from calibrate.curves.curves import compute_row_errors, select_worst
from calibrate.proof.layers import measure_row_errors
from s2o_runtime.reference.dense import exact_attention
from scripts.bench import inputs


def tensors(q_len, kv_len, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    q, k, v, noise = (
        torch.randn(1, heads, length, 16, generator=generator)
        for heads, length in ((6, q_len), (2, kv_len), (2, kv_len), (6, q_len))
    )
    return q.to(dtype), k.to(dtype), v.to(dtype), noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_errors_of_rows_are_those_of_the_tensors(dtype):
    dense, _, _, noise = tensors(48, 48)
    out, dense = (dense + 0.1 * noise).to(dtype), dense.to(dtype)
    squares, relative = measure_row_errors(out, dense)
    for first in (0, 42):
        mse, power = squares[:, first:].mean(1).tolist()
        assert mse == pytest.approx(float((out.float() - dense.float())[:, :, first:].square().mean()), rel=1e-4)
        assert power == pytest.approx(float(dense.float()[:, :, first:].square().mean()), rel=1e-4)
    torch.testing.assert_close(relative, compute_row_errors(out, dense)[0])


@pytest.mark.parametrize("count", [1, 2, 51, 100, 101, 128, 1000])
def test_the_worst_are_one_of_the_errors_at_the_nearest_rank(count):
    """Counted from a sorted list: between two of them there would be no error, and no root of squares be the same."""
    errors = torch.rand(2, count, 3, generator=torch.Generator().manual_seed(count))
    expected = errors.sort(1).values[:, math.floor(0.99 * (count - 1) + 0.5)]
    assert torch.equal(select_worst(errors, 1), expected.double())
    assert torch.equal(select_worst(errors[0].T), expected[0].double())
    torch.testing.assert_close(select_worst(errors.square(), 1).sqrt(), expected.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("q_len", [48, 7], ids=["whole prompt", "continued"])
def test_rows_are_exact_however_few_are_computed_together(q_len, monkeypatch):
    q, k, v, _ = tensors(q_len, 48)
    rows = torch.tensor([0, 3, 4, 6])
    monkeypatch.setattr(inputs, "SCORES", 3 * 48)  # one row of the three heads of a group
    q, k, v = (torch.cat([tensor, tensor.flip(2)]) for tensor in (q, k, v))
    torch.testing.assert_close(inputs.exact_rows(q, k, v, rows), exact_attention(q, k, v)[:, :, rows])
