import pytest
import torch

from s2o_runtime.reference import dense
from s2o_runtime.reference.dense import dense_attention, exact_attention
from support.naive import naive_attention

CASES = [
    pytest.param(1, 2, 2, 70, 70, None, id="square"),
    pytest.param(2, 4, 2, 33, 90, None, id="q33-kv90"),
    pytest.param(2, 4, 1, 1, 40, None, id="decode"),
    pytest.param(3, 2, 1, 60, 60, [0, 25, 59], id="left-padded"),
    pytest.param(2, 2, 1, 20, 60, [50, 60], id="padded-chunk"),
]


@pytest.mark.parametrize(("batch", "heads", "kv_heads", "q_len", "kv_len", "starts"), CASES)
@pytest.mark.parametrize("function", [dense_attention, exact_attention])
def test_equals_naive_attention(function, batch, heads, kv_heads, q_len, kv_len, starts, monkeypatch):
    monkeypatch.setattr(dense, "EXACT_ROWS", 16)
    q = torch.randn(batch, heads, q_len, 32)
    k, v = torch.randn(batch, kv_heads, kv_len, 32), torch.randn(batch, kv_heads, kv_len, 32)
    kv_start = None if starts is None else torch.tensor(starts)
    out = function(q, k, v, scale=0.3, kv_start=kv_start)
    expected = naive_attention(q, k, v, scale=0.3, kv_start=kv_start)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_exact_attention_keeps_float64_and_raises_half_types():
    q, k, v = (torch.randn(1, 1, 8, 16, dtype=torch.float16) for _ in range(3))
    assert exact_attention(q, k, v).dtype == torch.float32
    out = exact_attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(out, naive_attention(q, k, v), rtol=1e-12, atol=1e-14)
