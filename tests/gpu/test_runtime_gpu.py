"""Tests of what a patched layer costs on a GPU beside its attention: bookkeeping and the drift check."""

import statistics
from functools import partial

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from s2o_runtime import DriftCheck, LayerConfig, TileConfig, s2o_attention
from s2o_runtime.huggingface import hf
from s2o_runtime.huggingface.explanation import explain_layers
from s2o_runtime.huggingface.layers import LayerState, attach
from s2o_runtime.monitor.counters import SAMPLES, Meter
from s2o_runtime.monitor.drift import DriftMonitor, ErrorLimits

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
TILE = TileConfig(64, 64, 2, 4, 2)
CONFIG = LayerConfig.uniform(HEADS, tau=0.5, segment=512, tile=TILE)
HOST_MICROSECONDS = 25.0  # of bookkeeping beside the op's 45; a few on an idle host, tests may share theirs


def inputs(length, batch=1, seed=0):
    """q, k and v in bf16, laid out as transformers hands them over."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.randn(batch, length, heads, HEAD_DIM, generator=generator, device="cuda").bfloat16().transpose(1, 2)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


@pytest.fixture
def layer():
    """One attention module that runs S2O, and its state."""
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
    config = LlamaConfig(hidden_size=256, attn_implementation="s2o", **sizes)
    hf.register()
    module = LlamaAttention(config, layer_idx=0).eval()  # in training mode it is dense
    state = LayerState(0, lambda length: CONFIG, min_length=0)
    attach(module, state)
    return module, state


def prefill(module, length):
    """A prefill of the layer, and its q, k and v."""
    q, k, v = inputs(length)
    sizes = {"batch_size": 1, "q_length": length, "kv_length": length, "q_offset": 0}
    mask = hf.s2o_mask(**sizes, attention_mask=None, device="cuda")
    return partial(hf.s2o_attention_forward, module, q, k, v, mask), (q, k, v)


def milliseconds(call, rounds=10):
    """The median of single calls, on the device."""
    times = []
    for _ in range(rounds + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[3:])[rounds // 2]


@torch.no_grad()
def test_the_table_has_the_ops_density_and_time(layer):
    module, state = layer
    call, qkv = prefill(module, 8192)
    for _ in range(12):
        call()
    [row] = explain_layers([state])
    _, _, stats = s2o_attention(*qkv, CONFIG, return_stats=True)
    assert (row["path"], row["reason"], row["calls"]) == ("s2o", "the kernel supports this call", 12)
    assert row["density"] == pytest.approx(float(stats.density.mean()), rel=1e-9)
    # calls in a row wait for the host as well, so this is a bound and no equality
    assert row["ms"] == pytest.approx(milliseconds(call), rel=0.5)


@torch.no_grad()
def test_bookkeeping_takes_little_time_on_the_host(layer, monkeypatch, capsys, alone, time_host):
    module, _ = layer
    call, qkv = prefill(module, 1024)
    op = partial(s2o_attention, *qkv, CONFIG, return_stats=True)
    for _ in range(SAMPLES + 4):
        call()
        op()
    torch.cuda.synchronize()
    kept, bare = (statistics.median(time_host(timed, 30, 20)) for timed in (call, op))
    monkeypatch.setattr(Meter, "begin", lambda *_: None)
    unmetered = statistics.median(time_host(call, 30, 20))
    with capsys.disabled():
        print(f"\nhost microseconds: the op {bare:.1f}, a layer {unmetered:.1f}, and with its meter {kept:.1f}")
    assert kept - unmetered < HOST_MICROSECONDS


@torch.no_grad()
def test_a_sampled_call_does_not_wait_for_the_device(layer):
    """Every call of the first ones is sampled, with the drift check besides; torch raises where something waits."""
    module, state = layer
    state.drift = DriftMonitor(DriftCheck(every=1), 0, ErrorLimits("rel_mse", {4096: 1e3}))
    call, _ = prefill(module, 4096)
    for _ in range(4):  # compiles, records, makes generators
        call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert state.drift.checks == 8
    assert 0 < state.drift.numbers().mean < 1


@torch.no_grad()
def test_what_the_drift_check_costs_at_32k(layer, capsys):
    module, state = layer
    call, _ = prefill(module, 32768)
    without = milliseconds(call)
    state.drift = DriftMonitor(DriftCheck(every=1), 0, ErrorLimits("rel_mse", {32768: 1e3}))
    checked = milliseconds(call)
    share = (checked - without) / DriftCheck().every / without
    with capsys.disabled():
        print(
            f"\n32768 tokens, a layer's attention: {without:.2f} ms, {checked:.2f} ms with a check; "
            f"every {DriftCheck().every} calls that is {100 * share:.2f}%"
        )
    assert share < 0.02


@torch.no_grad()
@pytest.mark.parametrize("calls_before", [1, SAMPLES + 4], ids=["recorded", "warm"])
def test_a_cuda_graph_captures_a_patched_layer(layer, calls_before):
    """With meter and drift check on; its replays compute what an eager call does."""
    module, state = layer
    state.drift = DriftMonitor(DriftCheck(every=1), 0, ErrorLimits("rel_mse", {2048: 1e3}))
    call, qkv = prefill(module, 2048)
    for _ in range(calls_before):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = call()
    for tensor, other in zip(qkv, inputs(2048, seed=1), strict=True):
        tensor.copy_(other)
    graph.replay()
    eager, _ = call()
    torch.cuda.synchronize()
    assert torch.equal(out, eager)
    assert [row["calls"] for row in explain_layers([state])] == [calls_before + 2]
    assert state.drift.checks == calls_before + 1
