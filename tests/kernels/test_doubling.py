"""Chunks that double from a first one, in the interpreter: against the reference, and without a part of the kernels."""

from dataclasses import replace

import pytest
import torch

from s2o_runtime.attention.api import s2o_attention, s2o_attention_varlen
from s2o_runtime.config import HeadConfig, LayerConfig, StopRule, TileConfig, chunk_ends, next_chunk
from s2o_runtime.kernels.groups import chunk_schedule
from s2o_runtime.kernels.prefill import s2o_prefill
from support.kernels import agree, call_of, drawn, inputs, run_both
from support.layouts import pack, unpacked
from support.marks import INTERPRETED, all_but_first
from support.paging import LAYOUTS, PagedBatch

SLOW = pytest.mark.slow(reason="more cases of a kernel in Triton's interpreter, seconds each")

pytestmark = INTERPRETED

TILE = TileConfig(block_m=64, block_n=32, chunk=4, num_warps=4, num_stages=1, first_chunk=1)
HEADS = (
    HeadConfig(3.0, 64, representatives=4, far="mean"),
    HeadConfig(100.0, 64, far="linear"),
    HeadConfig(0.5, 128, stop_rule=StopRule.PAPER),
    HeadConfig(1.0, 128, far="mean"),
    HeadConfig(mode="dense"),
)


def layer(heads=5, tile=TILE, grain=4, **fields):
    return LayerConfig(HEADS[:heads], tile, grain, **fields)


CASES = [
    pytest.param((1, 5, 1, 230, 450, 64, None), TILE, id="behind-a-prefix-1-4"),
    pytest.param((1, 5, 1, 330, 330, 64, None), replace(TILE, first_chunk=2), id="whole-2-4"),
    pytest.param((1, 5, 1, 330, 330, 64, None), replace(TILE, first_chunk=4), id="whole-4-4"),
    pytest.param((2, 4, 2, 150, 340, 64, [40, 3]), replace(TILE, chunk=5), id="padded-1-5"),
    pytest.param((2, 4, 1, 400, 400, 64, [0, 167]), replace(TILE, chunk=7, first_chunk=3), id="padded-3-7"),
    pytest.param((1, 4, 2, 200, 700, 64, None), TileConfig(64, 64, 8, 4, 1, first_chunk=2), id="tile-64x64-2-8"),
]


@pytest.mark.parametrize(("shape", "tile"), all_but_first(CASES, SLOW))
def test_prefill_equals_the_reference(shape, tile, nan_filled):
    q, k, v, kv_start = drawn(shape)
    ours, expected = run_both(q, k, v, layer(shape[1], tile), kv_start)
    agree(ours, expected)
    prefixes = {int(keys) for keys in ours[1][:, [0, 2, 3]].flatten() if keys}
    # every stop is at the end of a chunk or of the prefix; some are before the first end of equal chunks
    assert tile.first_chunk == tile.chunk or min(prefixes) < tile.stride
    assert int(ours[1][:, 1].max()) == tile.stride  # a head with a linear tail visits a whole chunk


@SLOW
@pytest.mark.parametrize("features", [{"softcap": 3.0}, {"scores": "int8"}], ids=["cap", "int8"])
def test_sinks_caps_and_int8_scores(features, nan_filled):
    config = LayerConfig((HEADS[0], HEADS[2]), TILE, 2, features.get("scores", "input"))
    q, k, v = inputs(1, 2, 1, 140, 330, 64)
    features = {"sinks": torch.tensor([1.0, 3.0]), "softcap": features.get("softcap")}
    ours, expected = run_both(q, k, v, config, **features)
    if config.scores == "int8":  # products of integers are exact, their ranking is the kernels' own
        torch.testing.assert_close(ours[0], expected.out, rtol=1e-3, atol=1e-3)
        assert torch.equal(ours[1], expected.visited)
    else:
        agree(ours, expected)


def test_a_first_chunk_as_long_as_the_others_changes_no_bit(nan_filled):
    q, k, v = inputs(1, 5, 1, 200, 400, 64)
    tile = replace(TILE, chunk=2, first_chunk=0)
    outputs = [
        s2o_prefill(call_of(q, k, v, layer(tile=replace(tile, first_chunk=first)), lse=True)) for first in (0, 2)
    ]
    assert all(torch.equal(one, two) for one, two in zip(*outputs, strict=True))


@SLOW
def test_packed_sequences_and_last_rows(nan_filled):
    config = layer(4, last_rows=128)
    parts, (q, k, v, cu_q, cu_k) = pack([330, 70, 1], [330, 371, 290], 4, 2, 64)
    out, _, stats = s2o_attention_varlen(q, k, v, cu_q, cu_k, 330, 371, config, backend="triton", return_stats=True)
    for b, (part, of_part) in enumerate(zip(parts, unpacked(parts, out), strict=True)):
        own, _, own_stats = s2o_attention(*part, config, backend="triton", return_stats=True)
        torch.testing.assert_close(of_part, own[0], rtol=1e-5, atol=1e-6)
        assert torch.equal(stats.visited[b, :, : own_stats.visited.shape[2]], own_stats.visited[0])
        agree(*run_both(*part, config))


@SLOW
def test_pages(nan_filled):
    batch = PagedBatch([230, 70, 1], [330, 271, 190], 16, LAYOUTS[0])
    ours = batch.paged(layer(4), backend="triton", return_stats=True)
    expected = batch.packed(layer(4), backend="triton", return_stats=True)
    assert torch.equal(ours.out, expected.out)
    assert torch.equal(ours.stats.visited, expected.stats.visited)


@SLOW
def test_a_prompt_in_parts_is_the_prompt(nan_filled):
    """Segments that begin where parts do rank and stop as in the whole prompt."""
    q, k, v = inputs(1, 4, 2, 384, 384, 64)
    whole, visited, _ = s2o_prefill(call_of(q, k, v, layer(4)))
    for begin, end in ((0, 256), (256, 384)):
        part = call_of(q[:, :, begin:end], k[:, :, :end], v[:, :, :end], layer(4))
        out, of_part, _ = s2o_prefill(part)
        torch.testing.assert_close(out, whole[:, :, begin:end], rtol=1e-5, atol=1e-6)
        assert torch.equal(of_part, visited[:, :, begin // 64 : end // 64])


def test_where_chunks_end():
    assert chunk_ends(20, 2, 8) == [2, 4, 8, 16, 20]
    assert chunk_ends(20, 3, 7) == [3, 6, 12, 19, 20]
    assert chunk_ends(5, 8, 8) == chunk_ends(5, 5, 64) == [5]
    for first in (1, 2, 3, 5):
        ends = chunk_ends(1000, first, 5)
        assert all(end - begin <= 5 for begin, end in zip([0, *ends], ends, strict=False))
    assert [next_chunk(done, 4, 4) for done in range(9)] == [4] * 9


@pytest.mark.parametrize("tile", [TILE, replace(TILE, first_chunk=0), replace(TILE, chunk=64, first_chunk=64)])
def test_both_numbers_are_one_argument(tile):
    schedule = chunk_schedule(tile)
    assert 0 < schedule < 1 << 31
    for visited in (0, 1, 2, 5, 1 << 20):
        assert min(schedule & 0xFFFF, max(schedule >> 16, visited)) == next_chunk(
            visited, tile.first_chunk or tile.chunk, tile.chunk
        )
