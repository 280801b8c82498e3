"""The op as torch sees it: its fake agrees with it, and compiled code is one graph with the eager result."""

import pytest
import torch

from s2o_runtime import LayerConfig, ops, s2o_attention

CONFIG = LayerConfig.uniform(4, tau=0.5, segment=128)


def inputs(length=300):
    return tuple(torch.randn(2, heads, length, 64) for heads in (4, 2, 2))


@pytest.mark.parametrize("kv_start", [None, torch.tensor([0, 30])], ids=["whole", "left-padded"])
def test_compiled_calls_are_one_graph(kv_start):
    def call(q, k, v):
        return s2o_attention(q, k, v, CONFIG, kv_start=kv_start, scale=0.2) * 2

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for length in (300, 400):
        q, k, v = inputs(length)
        torch.testing.assert_close(compiled(q, k, v), call(q, k, v))


def test_the_fake_implementation_is_the_real_one():
    q, k, v = inputs()
    handle = ops.register("test", lambda q, k, v, where, scale: s2o_attention(q, k, v, CONFIG, scale=scale))
    torch.library.opcheck(torch.ops.s2o.attention.default, (q, k, v, None, handle, 0.125))


def test_equal_keys_share_a_handle():
    assert ops.register("one", lambda *_: None) == ops.register("one", lambda *_: None)
    assert ops.register("two", lambda *_: None) != ops.register("one", lambda *_: None)
