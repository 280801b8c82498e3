import pytest
import torch

from s2o_runtime.reference import dense
from s2o_runtime.reference.dense import dense_attention, exact_attention
from support.marks import pairwise
from support.naive import naive_attention

CASES = [
    pytest.param((1, 2, 2, 70, 70, None), id="square"),
    pytest.param((2, 4, 2, 33, 90, None), id="q33-kv90"),
    pytest.param((2, 4, 1, 1, 40, None), id="decode"),
    pytest.param((3, 2, 1, 60, 60, [0, 25, 59]), id="left-padded"),
    pytest.param((2, 2, 1, 20, 60, [50, 60]), id="padded-chunk"),
]


def drawn(shape, value_dim=32):
    """q, k and v of a shape, and where its sequences start."""
    batch, heads, kv_heads, q_len, kv_len, starts = shape
    q = torch.randn(batch, heads, q_len, 32)
    k, v = (torch.randn(batch, kv_heads, kv_len, dim) for dim in (32, value_dim))
    return q, k, v, None if starts is None else torch.tensor(starts)


FUNCTIONS = [pytest.param(function, id=function.__name__) for function in (dense_attention, exact_attention)]


def test_exact_attention_keeps_float64_and_raises_half_types():
    q, k, v = (torch.randn(1, 1, 8, 16, dtype=torch.float16) for _ in range(3))
    assert exact_attention(q, k, v).dtype == torch.float32
    out = exact_attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(out, naive_attention(q, k, v), rtol=1e-12, atol=1e-14)


PLAIN = pytest.param({}, id="plain")
FEATURES = [
    pytest.param({"sinks": True}, id="sinks"),
    pytest.param({"softcap": 1.5}, id="softcap"),
    pytest.param({"sinks": True, "softcap": 1.5}, id="both"),
]


@pytest.mark.parametrize(
    ("shape", "function", "features", "value_dim"),
    pairwise(CASES, FUNCTIONS, [PLAIN], [32]) + pairwise(CASES, FUNCTIONS, [PLAIN, *FEATURES], [24, 48, 32]),
)
def test_equals_naive_attention(function, shape, value_dim, features, monkeypatch):
    monkeypatch.setattr(dense, "EXACT_ROWS", 16)
    q, k, v, kv_start = drawn(shape, value_dim)
    options = {"scale": 0.3, "kv_start": kv_start, **features}
    if "sinks" in features:
        options["sinks"] = torch.randn(shape[1]) * 3
    out = function(q, k, v, **options)
    torch.testing.assert_close(out.double(), naive_attention(q, k, v, **options), rtol=1e-5, atol=1e-5)


def test_a_sink_is_as_exact_in_bfloat16_as_in_float32():
    """Its score is a sum of terms of the type of q: one term alone would be off by 2^-9 of the score."""
    q, k, v = (torch.randn(1, 2, 40, 32, dtype=torch.bfloat16) for _ in range(3))
    sinks = torch.tensor([20.3, -float("inf")])
    out = dense_attention(q * 0.1, k, v, scale=0.3, sinks=sinks)
    expected = naive_attention(q * 0.1, k, v, scale=0.3, sinks=sinks)
    off = (out.double() - expected).norm(dim=(2, 3)) / expected.norm(dim=(2, 3))
    assert float(off.max()) < 0.01  # rounding of weights and output; with a sink of 20.25, which is one term, 0.05
