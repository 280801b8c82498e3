"""The ops as torch sees them: their fakes agree with them, and compiled code is one graph with the eager result."""

import json

import pytest
import torch

from s2o_runtime import ConfigError, LayerConfig, TileConfig, s2o_attention
from s2o_runtime.attention.torch_op import read_config
from s2o_runtime.errors import InputError, ModelError
from s2o_runtime.huggingface.hf import prefill_mask, s2o_attention_forward
from s2o_runtime.huggingface.layers import LayerState, attach
from support.kernels import DEVICE, DTYPE, ON_GPU, mixed_config

CONFIG = LayerConfig.uniform(4, tau=0.5, segment=128)
TAU_ZERO = LayerConfig.uniform(4, segment=128)
MIXED = mixed_config(4, 0.3, tile=TileConfig(64, 32, 2, 4, 2, dense_below=4096), lookback=256)


def inputs(length=300):
    return tuple(torch.randn(2, heads, length, 64) for heads in (4, 2, 2))


def test_compiled_calls_are_one_graph():
    kv_start, sinks = torch.tensor([0, 30], device=DEVICE), torch.linspace(-2.0, 9.0, 4, device=DEVICE, dtype=DTYPE)

    def call(q, k, v):
        return s2o_attention(q, k, v, CONFIG, kv_start=kv_start, scale=0.2, softcap=8.0, sinks=sinks) * 2

    compiled = torch.compile(call, backend="inductor" if ON_GPU else "aot_eager", fullgraph=True)
    for length in (1500, 2000) if ON_GPU else (300, 400):
        q, k, v = (tensor.to(DEVICE, DTYPE) for tensor in inputs(length))
        torch.testing.assert_close(compiled(q, k, v), call(q, k, v))


def test_another_config_is_another_graph():
    """One that was never validated, too."""
    compiled = torch.compile(s2o_attention, backend="aot_eager", fullgraph=True)
    q, k, v = inputs()
    for config in (CONFIG, LayerConfig(TAU_ZERO.heads), CONFIG):
        torch.testing.assert_close(compiled(q, k, v, config), s2o_attention(q, k, v, config))


def test_the_fake_implementation_of_a_call_is_the_real_one():
    q, k, v = inputs()
    for values, sinks, softcap in ((v, None, None), (v[..., :24], torch.ones(q.shape[1]), 2.0)):
        arguments = (q, k, values, None, sinks, CONFIG.as_text(), "auto", 0.125, softcap)
        torch.library.opcheck(torch.ops.s2o_runtime.attention.default, arguments)


def test_the_fake_implementation_of_a_layer_is_the_real_one():
    module = torch.nn.Module().eval()
    state = LayerState(0, lambda length: CONFIG, 0)
    attach(module, state)
    mask = prefill_mask(2, 0)
    q, k, v = inputs()
    arguments = (q, k, v, mask, None, state.key, 0.125, None)
    torch.library.opcheck(torch.ops.s2o_runtime.layer_attention.default, arguments)
    out = torch.ops.s2o_runtime.layer_attention(*arguments)
    torch.testing.assert_close(out.transpose(1, 2), s2o_attention_forward(module, q, k, v, mask, 0.125)[0])
    with pytest.raises(InputError, match=r"the attention mask is torch.int64 \(2, 1, 1, 4\): give a boolean one"):
        torch.ops.s2o_runtime.layer_attention(q, k, v, torch.zeros_like(mask), *arguments[4:])
    with pytest.raises(ModelError, match="the model of this compiled graph is gone"):
        torch.ops.s2o_runtime.layer_attention(q, k, v, mask, None, "0" * 32, 0.125, None)


@pytest.mark.parametrize("config", [CONFIG, MIXED], ids=["uniform", "mixed"])
def test_the_text_of_a_config_says_everything(config):
    assert read_config(config.as_text()) == config
    changed = json.loads(config.as_text())
    changed["heads"][0]["tau"] = -1.0
    with pytest.raises(ConfigError, match=r"tau -1\.0"):
        read_config(json.dumps(changed))
