"""The Triton kernels in the interpreter, against the reference. bf16 is wrong there: fp32 and fp16 only."""

import pytest
import torch

from s2o_runtime.attention import interpreted
from s2o_runtime.config import HeadConfig, LayerConfig, TileConfig
from s2o_runtime.kernels import prefill as prefill_module
from s2o_runtime.kernels.prefill import row_slices, s2o_prefill
from s2o_runtime.kernels.rank import rank
from s2o_runtime.reference import s2o_attention_reference, segment_representative
from s2o_runtime.shapes import call_shape

pytestmark = pytest.mark.skipif(not interpreted(), reason="a GPU is here, so kernels are compiled: see tests/gpu")

TILE = TileConfig(block_m=64, block_n=32, chunk=2, num_warps=4, num_stages=1)


def inputs(batch, heads, kv_heads, q_len, kv_len, head_dim, dtype=torch.float32):
    q = (torch.randn(batch, heads, q_len, head_dim) * 2).to(dtype)
    k, v = (torch.randn(batch, kv_heads, kv_len, head_dim).to(dtype) for _ in range(2))
    return q, k, v


def mixed_config(heads, tau, threshold="share", row_reduce="mean", tile=TILE):
    kinds = (
        HeadConfig(tau, 64, threshold=threshold),
        HeadConfig(tau / 2, 128, threshold=threshold),
        HeadConfig(tau, 64, mode="dense"),
    )
    return LayerConfig(tuple(kinds[h % 3] for h in range(heads)), tile, row_reduce)


SHAPES = [
    pytest.param(1, 2, 1, 200, 200, 64, None, id="B1-H2-L200-D64"),
    pytest.param(1, 3, 3, 257, 257, 128, None, id="B1-H3-L257-D128"),
    pytest.param(1, 1, 1, 5, 5, 64, None, id="shorter-than-a-tile"),
    pytest.param(1, 1, 1, 1, 100, 64, None, id="one-query"),
    pytest.param(2, 4, 2, 100, 211, 64, None, id="q100-kv211"),
    pytest.param(3, 2, 1, 150, 150, 64, [0, 67, 149], id="left-padded"),
    pytest.param(2, 3, 1, 100, 171, 64, [171, 33], id="padded-chunk"),
]


@pytest.mark.parametrize("tau", [0.0, 1.0, 3.0])
@pytest.mark.parametrize(("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "starts"), SHAPES)
def test_prefill_equals_the_reference(batch, heads, kv_heads, q_len, kv_len, head_dim, starts, tau, nan_filled):
    q, k, v = inputs(batch, heads, kv_heads, q_len, kv_len, head_dim)
    kv_start = None if starts is None else torch.tensor(starts)
    config = mixed_config(heads, tau)
    expected, expected_visited = s2o_attention_reference(q, k, v, config, kv_start=kv_start)
    out, visited = s2o_prefill(q, k, v, config, call_shape(q, k, v, kv_start), head_dim**-0.5, kv_start)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(visited, expected_visited)


@pytest.mark.parametrize(("threshold", "tau"), [("raw", 0.2), ("share", 2.0)])
@pytest.mark.parametrize("row_reduce", ["mean", "max"])
@pytest.mark.parametrize("tile", [TILE, TileConfig(128, 64, 1, 8, 1), TileConfig(64, 128, 3, 4, 1)], ids=str)
def test_rules_and_tiles(threshold, tau, row_reduce, tile, nan_filled):
    q, k, v = inputs(1, 1, 1, 450, 450, 64)
    config = LayerConfig.uniform(1, tau=tau, segment=128, threshold=threshold, tile=tile, row_reduce=row_reduce)
    expected, expected_visited = s2o_attention_reference(q, k, v, config)
    out, visited = s2o_prefill(q, k, v, config, call_shape(q, k, v), 64**-0.5, None)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(visited, expected_visited)


def test_fp16_and_strides_as_transformers_hands_them_over(nan_filled):
    """q, k, v as views of [B, L, H, D]; errors within what fp16 weights and outputs allow."""
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs(1, 4, 2, 190, 190, 64, torch.float16))
    config = mixed_config(4, 0.0)
    out, _ = s2o_prefill(q, k, v, config, call_shape(q, k, v), 0.125, None)
    expected, _ = s2o_attention_reference(q.double(), k.double(), v.double(), config, scale=0.125)
    assert out.dtype == torch.float16
    # weights and output are each rounded to 11 bits, relative to values of |v| <= 4
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=4 * 2**-10)


def test_wide_strides_use_64_bit_offsets(monkeypatch, nan_filled):
    q, k, v = inputs(1, 1, 1, 150, 150, 64)
    config = mixed_config(1, 1.0)
    expected, _ = s2o_attention_reference(q, k, v, config)
    monkeypatch.setattr(prefill_module, "WIDE_ELEMENTS", 1)
    out, _ = s2o_prefill(q, k, v, config, call_shape(q, k, v), 0.125, None)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_slicing_the_rows_changes_nothing(monkeypatch):
    q, k, v = inputs(1, 2, 1, 500, 530, 64)
    config, shape = mixed_config(2, 1.0), call_shape(q, k, v)
    whole = s2o_prefill(q, k, v, config, shape, 0.125, None)
    slices = row_slices(config, shape, workspace=1)
    assert slices == [range(0, 128), range(128, 256), range(256, 384), range(384, 500)]
    monkeypatch.setattr(prefill_module, "WORKSPACE_BYTES", 1)
    sliced = s2o_prefill(q, k, v, config, shape, 0.125, None)
    assert torch.equal(whole[0], sliced[0])
    assert torch.equal(whole[1], sliced[1])


@pytest.mark.parametrize("starts", [None, [30, 0]], ids=["whole", "left-padded"])
def test_rank_scores_and_orders_every_prefix(starts):
    q, k, _ = inputs(2, 2, 1, 230, 300, 64)
    kv_start = None if starts is None else torch.tensor(starts)
    config, shape = LayerConfig.uniform(2, segment=64, tile=TILE), call_shape(q, k, k, kv_start)
    scores, order = rank(q, k, config, shape, kv_start, range(230))
    for b in range(2):
        start = 0 if starts is None else starts[b]
        for h in range(2):
            for n in range(4):
                first = 70 + n * 64
                first -= (first - start) % 32
                mean = segment_representative(q[b, h, n * 64 : (n + 1) * 64], 70 + n * 64, start)
                expected = k[b, 0, start:first] @ mean
                torch.testing.assert_close(scores[b, h, n, start:first], expected, rtol=1e-4, atol=1e-5)
                keys = order[b, h, n, : first - start].long()
                assert sorted(keys.tolist()) == list(range(start, first))
                ranked = scores[b, h, n, keys]
                assert torch.equal(ranked, ranked.sort(descending=True).values)
