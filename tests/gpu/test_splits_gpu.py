"""Dense heads split over keys on a GPU in bf16: the same as unsplit within rounding, compiled ahead, replayed."""

import itertools

import pytest
import torch

from s2o_runtime import HeadConfig, LayerConfig, TileConfig, s2o_attention, warmup
from s2o_runtime.attention.replay import forget_plans
from s2o_runtime.call import Call, Scoring
from s2o_runtime.devices import get_resources
from s2o_runtime.kernels import launch as launch_module
from s2o_runtime.kernels import prefill as prefill_module
from s2o_runtime.kernels.prefill import run_prefill
from s2o_runtime.kernels.splits import count_key_splits
from s2o_runtime.reference.dense import exact_attention
from s2o_runtime.sequences import CallShape
from support.gpu import drawn, inputs, relative_error
from support.layouts import as_transformers
from support.marks import pairwise
from support.paging import PagedBatch

HOPPER = TileConfig(64, 128, 2, 4, 2, specialized=True)
TILES = [
    pytest.param(TileConfig(64, 64, 2, 4, 2), id="plain"),
    pytest.param(TileConfig(128, 32, 4, 8, 3), id="plain-128"),
    pytest.param(HOPPER, id="hopper"),
    pytest.param(TileConfig(64, 128, 2, 4, 3, specialized=True), id="hopper-3"),
    pytest.param(TileConfig(64, 64, 2, 4, 4, specialized=True), id="hopper-64"),
]
HEADS = (
    HeadConfig(0.3, 256, representatives=16, tail="mean"),
    HeadConfig(mode="dense"),
    HeadConfig(1.0, 512),
    HeadConfig(mode="dense"),
)
TILES_AND_DIMS = [pytest.param(*tile.values, 128, id=tile.id) for tile in TILES]
TILES_AND_DIMS.append(pytest.param(TileConfig(64, 64, 2, 4, 2, specialized=True), 256, id="hopper-D256"))
DENSE, OTHERS = [1, 3, 5, 7], [0, 2, 4, 6]


def config_of(tile, scores="input"):
    return LayerConfig(HEADS * 2, tile, scores=scores)


def both(monkeypatch, call, splits):
    """What the kernels give unsplit and split, each with its keys visited and its log-sum-exp."""
    outputs = []
    for count in (1, splits):
        monkeypatch.setattr(prefill_module, "count_key_splits", lambda *_, count=count: count)
        outputs.append(run_prefill(call))
    return outputs


def same_within_rounding(whole, split, exact=None):
    """Other heads run another form of the kernel: a sum may round otherwise, and then a stop come a chunk later."""
    out, visited, lse = whole
    split_out, split_visited, split_lse = split
    assert split_out.isfinite().all()
    assert relative_error(split_out[:, DENSE], out[:, DENSE].float()) <= 4e-3  # two roundings to bf16, each 2^-9
    assert relative_error(split_out[:, OTHERS], out[:, OTHERS].float()) <= 2e-2
    torch.testing.assert_close(split_lse[:, DENSE], lse[:, DENSE], rtol=0, atol=1e-4)
    assert (split_visited == visited).float().mean() >= 0.99
    if exact is not None:
        unsplit_error = relative_error(out[:, DENSE], exact[:, DENSE])
        assert relative_error(split_out[:, DENSE], exact[:, DENSE]) <= 1.1 * unsplit_error


SHAPES = [(1, 700, 9001, None), (1, 1, 3000, None), (2, 333, 700, None), (2, 500, 2500, [2300, 17])]
SHAPES += [(1, 2048, 20000, None)]


@pytest.mark.parametrize(
    ("batch", "q_len", "kv_len", "starts", "splits", "tile", "head_dim"), pairwise(SHAPES, [4, 16], TILES_AND_DIMS)
)
def test_split_is_unsplit(batch, q_len, kv_len, starts, splits, tile, head_dim, monkeypatch, nan_filled):
    q, k, v, kv_start = drawn((batch, 8, 2, q_len, kv_len, head_dim, starts))
    call = Call.from_tensors(q, k, v, config_of(tile), kv_start=kv_start, with_lse=True)
    exact = exact_attention(q, k, v, kv_start=kv_start)
    same_within_rounding(*both(monkeypatch, call, splits), exact)


@pytest.mark.parametrize(("tile", "head_dim"), TILES_AND_DIMS)
@pytest.mark.parametrize(("scores", "cap"), [("input", None), ("input", 20.0), ("int8", None)])
def test_with_sinks_and_caps_and_int8_scores(cap, scores, tile, head_dim, monkeypatch, nan_filled):
    q, k, v = inputs(1, 8, 2, 600, 5000, head_dim, torch.bfloat16)
    scoring = Scoring(softcap=cap, sinks=torch.linspace(-2.0, 9.0, 8, device="cuda"))
    call = Call.from_tensors(q, k, v, config_of(tile, scores), scoring=scoring, with_lse=True)
    same_within_rounding(*both(monkeypatch, call, 8))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_sequences(head_dim, tile, monkeypatch, nan_filled):
    """Of very different lengths: splits of short ones are empty."""
    q_lens, k_lens = [700, 0, 1, 300, 130], [9000, 0, 40, 300, 2222]
    q, k, v = (
        torch.randn(1, heads, sum(lengths), head_dim, device="cuda").bfloat16()
        for heads, lengths in ((8, q_lens), (2, k_lens), (2, k_lens))
    )
    cu_q, cu_k = (
        torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device="cuda") for lens in (q_lens, k_lens)
    )
    shape = CallShape(5, 8, 2, 700, 9000, head_dim, head_dim)
    batched = [tensor.expand(5, -1, -1, -1) for tensor in (q, k, v)]
    call = Call(*batched, config_of(tile), shape, Scoring(head_dim**-0.5), None, cu_q, cu_k, with_lse=True)
    (out, _, lse), (split_out, _, split_lse) = both(monkeypatch, call, 8)
    assert split_out.isfinite().all()
    assert relative_error(split_out[:, DENSE], out[:, DENSE].float()) <= 4e-3
    assert relative_error(split_out[:, OTHERS], out[:, OTHERS].float()) <= 2e-2
    torch.testing.assert_close(split_lse[:, DENSE], lse[:, DENSE], rtol=0, atol=1e-4)
    for rows, keys in ((slice(0, 700), slice(0, 9000)), (slice(700, 701), slice(9000, 9040))):
        exact = exact_attention(q[:, :, rows], k[:, :, keys], v[:, :, keys])
        assert relative_error(split_out[:, DENSE, rows], exact[:, DENSE]) <= 6e-3  # as of every tile, test_kernels_gpu


@pytest.mark.parametrize(("tile", "head_dim"), TILES_AND_DIMS)
@pytest.mark.parametrize("page_size", [16, 64])
def test_pages_change_nothing(page_size, tile, head_dim, monkeypatch, nan_filled):
    """Bit for bit, compiled, recorded and replayed: the kernels read the same numbers, wherever they lie."""
    sizes = {"heads": 8, "head_dim": head_dim, "dtype": torch.bfloat16, "device": "cuda"}
    batch = PagedBatch([700, 1, 300, 130], [9000, 40, 300, 2222], page_size, **sizes)
    config = config_of(tile)
    forget_plans()
    monkeypatch.setattr(prefill_module, "count_key_splits", lambda *_: 8)
    monkeypatch.delattr("s2o_runtime.attention.paged.gather_keys")  # no copy is made
    for _ in range(3):
        out = torch.full_like(batch.q, float("nan"))
        batch.paged(config, total_k=len(batch.k), backend="triton", out=out)
        assert torch.equal(out, batch.packed(config, backend="triton"))
    forget_plans()
    for rows, keys in ((slice(0, 700), slice(0, 9000)), (slice(700, 701), slice(9000, 9040))):
        exact = exact_attention(*(t.transpose(0, 1)[None] for t in (batch.q[rows], batch.k[keys], batch.v[keys])))
        assert relative_error(out[rows].transpose(0, 1)[None, DENSE], exact[:, DENSE]) <= 6e-3


def test_a_chunk_behind_a_long_prompt_is_split_here():
    """A dense head's programs, one for 128 rows, are an eighth of this GPU's SMs."""
    gpu = get_resources(torch.device("cuda"))
    programs = max(1, gpu.sm_count // 8)
    sizes = (8, 128 * programs), (2, 256 * programs + 131072), (2, 256 * programs + 131072)
    tensors = (torch.empty(1).expand(1, *size, 128) for size in sizes)
    assert count_key_splits(Call.from_tensors(*tensors, config_of(HOPPER)), programs, gpu) >= 4


@pytest.mark.parametrize("tile", [TILES[0], TILES[2]])
def test_nothing_compiles_after_warmup_and_a_replay_is_the_call(tile, nan_filled):
    config = config_of(tile)
    warmup(config, kv_heads=2, head_dim=128)
    known = len(launch_module._compiled)
    forget_plans()
    q, k, v = inputs(1, 8, 2, 700, 60000, 128, torch.bfloat16)
    laid = [as_transformers(q, k, v), as_transformers(q.flip(2), k, v)]
    for _ in range(3):
        s2o_attention(*laid[0], config, backend="triton")
    assert len(launch_module._compiled) == known
    replayed = s2o_attention(*laid[1], config, backend="triton")
    forget_plans()
    assert torch.equal(replayed, s2o_attention(*laid[1], config, backend="triton"))
    truth = exact_attention(*laid[1])
    assert relative_error(replayed[:, DENSE], truth[:, DENSE]) <= 6e-3
