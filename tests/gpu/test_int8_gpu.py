"""Int8 scores on a GPU in bf16 and fp16, against the reference and against float32 dense attention."""

from dataclasses import replace

import pytest
import torch

from s2o_runtime import LayerConfig, TileConfig, s2o_attention, s2o_attention_varlen
from s2o_runtime.call import Call
from s2o_runtime.config import HeadConfig
from s2o_runtime.kernels.keys import read_keys
from s2o_runtime.quantisation import quantise_keys
from s2o_runtime.reference.dense import exact_attention
from s2o_runtime.tiles import list_candidate_tiles
from support.gpu import SHAPES, SHAPES_256, drawn, inputs, relative_error
from support.marks import pairwise

PLAIN = TileConfig(128, 32, 4, 8, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("kv_len", "head_dim", "starts"), [(5000, 128, None), (777, 64, [0, 300]), (64, 256, [64, 5])])
def test_keys_are_rounded_as_the_rule_says(kv_len, head_dim, starts, dtype, nan_filled):
    batch = 1 if starts is None else 2
    q, k, _, kv_start = drawn((batch, 4, 2, kv_len, kv_len, head_dim, starts), dtype)
    config = LayerConfig.uniform(4, scores="int8")
    rows, unit, middle = read_keys(Call.from_tensors(q, k, k, config, kv_start=kv_start))
    for b in range(batch):
        start = 0 if starts is None else starts[b]
        for h in range(2):
            expected = quantise_keys(k[b, h], start)
            torch.testing.assert_close(unit[b, h], expected.unit, rtol=1e-5, atol=0)
            torch.testing.assert_close(middle[b, h], expected.middle)
            off = (rows[b, h, start:].int() - expected.levels[start:].int()).abs()
            assert off.numel() == 0 or off.amax() <= 1
            assert off.sum() <= 1e-3 * off.numel() + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES + SHAPES_256)
def test_never_stopping_is_the_reference(shape, dtype, nan_filled):
    q, k, v, kv_start = drawn(shape, dtype)
    k = k + 2 * k[:, :, -1:]
    kinds = (HeadConfig(0.0, 128), HeadConfig(0.0, 256, representatives=16), HeadConfig(0.0, 128, "dense"))
    config = LayerConfig(tuple(kinds[h % 3] for h in range(shape[1])), PLAIN, scores="int8")
    options = {"kv_start": kv_start, "return_lse": True}
    expected, expected_lse, _ = s2o_attention(q, k, v, config, backend="reference", **options)
    for tile in {replace(tile, chunk=2) for tile in list_candidate_tiles(shape[5], torch.cuda.get_device_capability())}:
        ours, lse, _ = s2o_attention(q, k, v, config.with_tile(tile), backend="triton", **options)
        # bf16 weights and output, 2^-8 each, and a query between two levels that is rounded to the other one
        assert relative_error(ours, expected.float()) <= 8e-3, tile
        torch.testing.assert_close(lse, expected_lse, rtol=0, atol=2e-2)
    truth = exact_attention(q, k, v, kv_start=kv_start)
    assert relative_error(expected, truth) <= 0.05


@pytest.mark.parametrize(("head_dim", "tau"), pairwise([64, 128, 256], [0.3, 1.0]))
def test_every_tile_stops_where_the_plain_kernel_does(head_dim, tau, nan_filled):
    q, k, v = inputs(1, 4, 2, 3000, 3000, head_dim, torch.bfloat16)
    kinds = (HeadConfig(tau, 256, representatives=16, tail="mean"), HeadConfig(tau, 128), HeadConfig(mode="dense"))
    heads = tuple(kinds[h % 3] for h in range(4))
    for tile in {replace(tile, chunk=2) for tile in list_candidate_tiles(head_dim, torch.cuda.get_device_capability())}:
        config = LayerConfig(heads, tile, scores="int8")
        warps = 4 if tile.block_m == 64 and head_dim <= 128 else 8
        plain = config.with_tile(TileConfig(tile.block_m, tile.block_n, 2, warps, 1))
        options = {"backend": "triton", "return_stats": True, "return_lse": True}
        ours, lse, stats = s2o_attention(q, k, v, config, **options)
        theirs, expected_lse, expected = s2o_attention(q, k, v, plain, **options)
        assert (stats.visited != expected.visited).float().mean() <= 0.01, tile
        same = (stats.visited == expected.visited).repeat_interleave(tile.block_m, 2)[:, :, :3000]
        torch.testing.assert_close(lse[same], expected_lse[same], rtol=0, atol=1e-3)
        assert relative_error(ours[same], theirs[same].float()) <= 6e-3, tile


def test_sinks_packed_sequences_and_plans(nan_filled):
    lengths = [700, 0, 1, 1300]
    q, k, v = (tensor[0].transpose(0, 1) for tensor in inputs(1, 4, 2, sum(lengths), sum(lengths), 128, torch.bfloat16))
    cu = torch.tensor([0, 700, 700, 701, 2001], dtype=torch.int32, device="cuda")
    sinks = torch.tensor([1.0, 4.0, -2.0, 0.0], device="cuda")
    config = LayerConfig.uniform(4, segment=128, tau=0.0, tile=PLAIN, scores="int8")
    tiles = [PLAIN, *list_candidate_tiles(128, torch.cuda.get_device_capability())[:1]]
    arguments, options = (q, k, v, cu, cu, 1300, 1300), {"sinks": sinks, "return_lse": True}
    expected = s2o_attention_varlen(*arguments, config, backend="reference", **options)
    for tile in tiles:
        for _ in range(4):  # the second call is recorded, those after it replayed
            out, lse, _ = s2o_attention_varlen(*arguments, config.with_tile(tile), backend="triton", **options)
            assert relative_error(out, expected.out.float()) <= 8e-3
            torch.testing.assert_close(lse, expected.lse, rtol=0, atol=2e-2)


def test_many_keys_cost_less_memory_than_they_have(nan_filled):
    """Keys in 8 bits beside the others: half their bytes."""
    q, k, v = inputs(1, 4, 2, 4096, 4096, 128, torch.bfloat16)
    config = LayerConfig.uniform(4, mode="dense", tile=PLAIN, scores="int8")
    out = s2o_attention(q, k, v, config, backend="triton")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = s2o_attention(q, k, v, config, backend="triton")
    extra = torch.cuda.max_memory_allocated() - before - out.nbytes
    assert extra < 0.75 * k.nbytes
