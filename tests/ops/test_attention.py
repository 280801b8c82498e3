"""The op: its backends, when it goes dense, what it refuses, and what it gives beside its output."""

import logging
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from s2o_runtime.attention.api import s2o_attention, s2o_attention_varlen
from s2o_runtime.attention.backend import find_dense_reason
from s2o_runtime.attention.warmup import warmup
from s2o_runtime.config import HeadConfig, LayerConfig, TileConfig
from s2o_runtime.dense_reason import DenseReason
from s2o_runtime.devices import is_interpreted
from s2o_runtime.errors import ConfigError, InputError
from s2o_runtime.logs import log_once
from s2o_runtime.reference.attention import s2o_attention_reference
from s2o_runtime.reference.dense import log_sum_exp
from s2o_runtime.sequences import CallShape
from support.naive import naive_attention

TILE = TileConfig(64, 32, 2, 4, 1)
FASTER = "dense is faster on this GPU"


def inputs(heads=2, kv_heads=1, q_len=150, kv_len=150, head_dim=64):
    sizes = (heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len)
    return tuple(torch.randn(1, *size, head_dim) for size in sizes)


def config(heads=2, tau=2.0, **kwargs):
    return LayerConfig.uniform(heads, tau=tau, segment=64, tile=TILE, **kwargs)


def test_where_sequences_start_may_be_a_column_of_something_larger():
    q, k, v = (t.repeat(2, 1, 1, 1) for t in inputs(heads=1, q_len=70, kv_len=70))
    starts = torch.tensor([[0, 5], [0, 40]])[:, 1]
    for backend in ("reference", *["triton"] * is_interpreted()):
        out = s2o_attention(q, k, v, config(1), kv_start=starts, backend=backend)
        expected = s2o_attention_reference(q, k, v, config(1), kv_start=starts.clone())[0]
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_auto_on_a_cpu_is_the_reference_and_more_than_its_output_is_three_fields():
    q, k, v = inputs()
    expected = s2o_attention_reference(q, k, v, config())
    stats_only = s2o_attention(q, k, v, config(), return_stats=True)
    assert torch.equal(stats_only.out, expected.out)
    assert stats_only.lse is None
    assert torch.equal(stats_only.density, stats_only.stats.density)
    assert torch.equal(stats_only.stats.visited, expected.visited)
    assert (stats_only.stats.backend, stats_only.stats.reason) == ("reference", "reference backend, no GPU")
    lse_only = s2o_attention(q, k, v, config(), backend="reference", return_lse=True)
    assert torch.equal(lse_only.lse, expected.lse)
    assert lse_only.stats is None
    with pytest.raises(InputError, match="pass return_stats=True for its density"):
        _ = lse_only.density


def short_tail(**tile):
    return LayerConfig.uniform(2, tau=2.0, segment=64, tile=replace(TILE, **tile))


@pytest.mark.parametrize(
    ("layer", "queries", "keys", "why_dense"),
    [
        (config(mode="dense"), 150, 150, "every head of the layer is dense"),
        (config(), 64, 64, "the prompt so far fits one segment"),
        (short_tail(), 1, 150, FASTER),  # a decode step
        (short_tail(), 2, 150, None),
        (short_tail(min_queries=40), 39, 150, FASTER),
        (short_tail(min_queries=40), 40, 150, None),
        (short_tail(min_queries=400), 150, 150, None),  # a whole prompt is no tail
        (short_tail(dense_below=150), 150, 150, None),
        (short_tail(dense_below=150), 80, 182, None),  # 11400 pairs, where a prompt of 150 has 11325
        (short_tail(dense_below=151), 80, 182, FASTER),  # and one of 151 has 11476
        (short_tail(dense_below=400, min_queries=40, tail_keys=150), 75, 150, None),  # measured for such tails
        (short_tail(dense_below=100, min_queries=10, tail_keys=400), 45, 110, None),  # 3960 pairs, where 10 of 400
        (short_tail(dense_below=100, min_queries=10, tail_keys=400), 44, 110, FASTER),  # have 3955, and this has 3894
        (short_tail(dense_below=100, min_queries=4, tail_keys=400), 40, 99, FASTER),  # no prompt so short is sparse
        (short_tail(dense_below=400, min_queries=40, tail_keys=150), 76, 150, FASTER),  # a prompt with a short prefix
    ],
)
def test_a_call_is_dense_where_nothing_can_be_skipped_or_gained(layer, queries, keys, why_dense):
    q, k, v = inputs(q_len=queries, kv_len=keys)
    out, lse, stats = s2o_attention(q, k, v, layer, return_stats=True, return_lse=True)
    assert stats.backend == ("dense" if why_dense else "reference")
    if why_dense:
        torch.testing.assert_close(lse, log_sum_exp(q, k), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out.double(), naive_attention(q, k, v), rtol=1e-5, atol=1e-5)
        assert why_dense in stats.reason


def test_each_choice_is_logged_once(caplog):
    log_once.cache_clear()
    q, k, v = inputs()
    with caplog.at_level(logging.INFO, logger="s2o_runtime"):
        for _ in range(3):
            s2o_attention(q, k, v, config())
    assert [record.message for record in caplog.records] == ["attention backend reference: reference backend, no GPU"]


Q, K, V = inputs()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": Q[0]}, "q has 3 dimensions"),
        ({"k": K[:, :, :10], "v": V[:, :, :10]}, "q has 150 rows but there are 10 keys"),
        ({"v": V[:, :, :32]}, r"v has shape \(1, 1, 32, 64\) but k has"),
        ({"k": K.half()}, "k is torch.float16 but q is torch.float32"),
        ({"q": Q.int()}, "q is torch.int32: expected a floating point type"),
        ({"config": config(3)}, "describes 3 query heads but q has 2"),
        ({"q": Q[:, :0]}, "q is empty"),
        ({"q": Q[:, [0, 1, 0]], "k": K[:, [0, 0]], "v": V[:, [0, 0]], "config": config(3)}, "cannot share 2 KV heads"),
        ({"q": Q[[0, 0]]}, "expected batch 2"),
        ({"scale": -1.0}, r"scale is -1\.0"),
        ({"backend": "gpu"}, "backend 'gpu' is not known"),
        ({"kv_start": torch.zeros(3, dtype=torch.int64)}, "kv_start has shape"),
        ({"config": LayerConfig((HeadConfig(tau=-1.0),) * 2)}, "tau -1"),
        ({"softcap": 0.0}, "softcap is 0.0: expected a positive number"),
        ({"sinks": torch.zeros(3)}, r"sinks have shape \(3,\) and type torch.float32: expected .* 2 query heads"),
        ({"sinks": torch.zeros(2, dtype=torch.int64)}, "type torch.int64: expected a floating point number"),
        ({"sinks": torch.zeros(2, device="meta")}, "sinks is a tensor on meta: expected a torch tensor that holds num"),
        ({"q": Q.to(torch.float8_e4m3fn)}, "q is torch.float8_e4m3fn: expected a floating .* of at least 16 bits"),
        ({"q": Q.to("meta"), "k": K.to("meta"), "v": V.to("meta")}, "q is a tensor on meta"),
        ({"q": Q.numpy(), "k": K.numpy(), "v": V.numpy()}, "q is a ndarray: expected a torch"),
        ({"v": None}, "v is a NoneType: expected a torch tensor"),
        ({"kv_start": torch.tensor([-5])}, r"kv_start is \[-5\]: expected numbers of at least 0"),
        ({"scale": math.inf}, "scale is inf: expected a positive number"),
        ({"scale": "0.1"}, "scale is '0.1' and softcap None: expected numbers or None"),
        ({"softcap": [1.0]}, r"scale is None and softcap \[1.0\]: expected numbers or None"),
        ({"config": None}, "config is a NoneType: expected a LayerConfig"),
        ({"is_causal": True}, r"^s2o_attention\(\) has no argument is_causal: help\(s2o_attention\) lists"),
        ({"attn_mask": None, "dropout_p": 0.1}, r"^s2o_attention\(\) has no argument attn_mask, dropout_p"),
        # what the kernel cannot do is refused where it is asked for
        (dict(zip("qkv", inputs(head_dim=264), strict=True), backend="triton"), "head_dim 264 is not supported by"),
        ({"q": Q.clone().requires_grad_(), "backend": "triton"}, "no backward pass"),
    ],
)
def test_bad_input_is_one_sentence_that_names_it(change, message):
    for mode in (torch.enable_grad, torch.no_grad)[: 1 if "backward" in message else 2]:
        with mode(), pytest.raises(ConfigError if "tau" in message else InputError, match=message):
            s2o_attention(**{"q": Q, "k": K, "v": V, "config": config()} | change)


@pytest.mark.parametrize("scale", [1, torch.tensor(1.0), np.float32(1.0)])
def test_a_scale_may_be_any_number(scale):
    assert torch.equal(s2o_attention(Q, K, V, config(), scale=scale), s2o_attention(Q, K, V, config(), scale=1.0))


PACKED = {name: tensor[0].transpose(0, 1) for name, tensor in zip("qkv", (Q, K, V), strict=True)}


def edges(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("backend", ["reference", "dense"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens_q": edges(0, 600, 512)}, r"cu_seqlens_q is \[0, 600, 512\]: expected to ascend from 0 to 150"),
        ({"cu_seqlens_k": edges(0, 100, 151)}, r"cu_seqlens_k is \[0, 100, 151\]: expected to ascend from 0 to 150"),
        ({"cu_seqlens_k": edges(-1, 100, 150)}, r"cu_seqlens_k is \[-1, 100, 150\]: expected to ascend from 0 to 150"),
        ({"max_seqlen_q": 70}, "cu_seqlens_q is .* by at most 70 at a time"),
        ({"cu_seqlens_k": edges(0, 40, 140)}, "q has 100 rows but there are 40 keys"),
        ({"cu_seqlens_q": [0, 100, 150]}, "cu_seqlens_q is a list: expected a torch tensor"),
        ({"max_seqlen_k": 100.0}, r"the lengths are 100, 100.0: expected whole numbers"),
        ({"kv_start": None}, r"^s2o_attention_varlen\(\) has no argument kv_start"),
    ],
)
def test_bad_edges_of_packed_sequences_are_named_where_they_are_read(change, message, backend):
    call = PACKED | {"cu_seqlens_q": edges(0, 100, 150), "cu_seqlens_k": edges(0, 100, 150), "config": config()}
    call |= {"max_seqlen_q": 100, "max_seqlen_k": 100, "backend": backend}
    assert s2o_attention_varlen(**call).isfinite().all()
    with pytest.raises(InputError, match=message):
        s2o_attention_varlen(**call | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "cuda:99"}, r"warmup cannot run on cuda:99 \(.*\): give the GPU of the calls"),
        ({"device": "meta"}, "q is a tensor on meta"),
        ({"kv_heads": "2"}, "warmup cannot run on cpu"),
        ({"kv_heads": 3}, "2 query heads cannot share 3 KV heads"),
        ({"dtype": torch.float8_e4m3fn}, "q is torch.float8_e4m3fn: expected a floating .* of at least 16 bits"),
        ({"paded": True}, r"warmup\(\) has no argument paded"),
    ],
)
def test_warmup_says_what_it_cannot_do(change, message):
    with pytest.raises(InputError, match=message):
        warmup(**{"config": config(), "kv_heads": 1, "head_dim": 64, "device": "cpu"} | change)


def test_a_parameter_as_sinks_is_no_gradient_where_none_is_wanted():
    q, k, v = inputs()
    sinks = torch.nn.Parameter(torch.ones(2))
    with torch.no_grad():
        out = s2o_attention(q, k, v, config(), sinks=sinks)
    expected, _, _ = s2o_attention_reference(q, k, v, config(), sinks=sinks.detach())
    assert torch.equal(out, expected)
    if is_interpreted():
        with pytest.raises(InputError, match="no backward pass"):
            s2o_attention(q, k, v, config(), sinks=sinks, backend="triton")


def test_a_call_of_more_last_rows_than_others_runs_dense():
    ending = config(1, last_rows=256)
    reasons = [find_dense_reason(ending, CallShape(1, 1, 1, q_len, 4096, 64, 64), (0, 0)) for q_len in (511, 512)]
    assert [reason and DenseReason.from_sentence(reason) for reason in reasons] == [DenseReason.FEW_QUERIES, None]
