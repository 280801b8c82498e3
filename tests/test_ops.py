"""The op as torch sees it: its fake agrees with it, and compiled code is one graph with the eager result."""

import pytest
import torch

from s2o_runtime import ConfigError, LayerConfig, ops, s2o_attention
from s2o_runtime.config import numbered_config

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
    run = ops.register(lambda q, k, v, where, number, scale: s2o_attention(q, k, v, CONFIG, scale=scale))
    torch.library.opcheck(torch.ops.s2o.attention.default, (*inputs(), None, run, 0, 0.125))


def test_a_config_is_found_by_its_number_while_it_lives():
    config = LayerConfig.uniform(1, tau=0.125)
    number = config.number
    assert numbered_config(number) is config
    del config
    with pytest.raises(ConfigError, match=f"config {number} is gone"):
        numbered_config(number)
