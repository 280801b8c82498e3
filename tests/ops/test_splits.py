"""Dense heads split over keys: when and how finely, and the kernels against themselves unsplit and the reference."""

import itertools
from dataclasses import replace

import pytest
import torch

from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.attention.replay import forget_plans
from s2o_runtime.attention.warmup import SPLIT_CALL, split_calls, warmup
from s2o_runtime.call import Call
from s2o_runtime.config import HeadConfig, LayerConfig, StopRule
from s2o_runtime.devices import Resources, get_resources
from s2o_runtime.kernels import launch as launch_module
from s2o_runtime.kernels import prefill as prefill_module
from s2o_runtime.kernels.prefill import run_prefill
from s2o_runtime.kernels.splits import DENSITY, FEWEST_KEYS, LAST, SPLIT_BYTES, SPLITS, count_key_splits
from s2o_runtime.reference.attention import s2o_attention_reference
from s2o_runtime.reference.dense import exact_attention
from support.kernels import DEVICE, DTYPE, HOPPER, ON_GPU, PLAIN, TILE, TILES, call_of, drawn, inputs, relative_error
from support.layouts import as_transformers
from support.marks import INTERPRETED, all_but_first, pairwise
from support.paging import PagedBatch

SLOW = pytest.mark.slow(reason="more cases of a kernel in Triton's interpreter, seconds each")
EXHAUSTIVE = pytest.mark.exhaustive(reason="still more of them: `make test` runs some")

pytestmark = pytest.mark.usefixtures("nan_filled")

GPU = Resources(132, 50 << 20)
DENSE, OTHERS = [1, 3], [0, 2]


def config_of(tile, **layer):
    """Two dense heads between others of both stop rules."""
    heads = (
        HeadConfig(1.0, tile.rows, representatives=16, tail="mean"),
        HeadConfig(mode="dense"),
        HeadConfig(0.5, 2 * tile.rows, stop_rule=StopRule.PAPER),
        HeadConfig(mode="dense"),
    )
    return LayerConfig(heads, tile, **layer)


def splits_of(q_len, kv_len, dense=2, heads=8, batch=1, gpu=GPU):
    """In a layer with so many dense heads, all others alike, and programs of 128 rows."""
    others = HeadConfig(1.0, HOPPER.rows)
    config = LayerConfig((HeadConfig(mode="dense"),) * dense + (others,) * (heads - dense), HOPPER)
    sizes = (heads, q_len), (heads // 4, kv_len), (heads // 4, kv_len)
    tensors = (torch.empty(1).expand(batch, *size, 128) for size in sizes)
    return count_key_splits(Call.from_tensors(*tensors, config), -(-q_len // HOPPER.rows), gpu)


def test_few_queries_behind_many_keys_are_split():
    assert [splits_of(2048, 1 << power) for power in range(11, 18)] == [1, 1, 4, 8, 16, 16, 16]
    assert splits_of(4096, 131072) == 8
    assert splits_of(8192, 131072) == 1  # a dense program takes 0.6 times the mean work of an SM
    assert splits_of(2048, 131072, dense=0) == 1
    assert splits_of(2048, 131072, dense=8, heads=32) == 1
    assert splits_of(2048, 131072, dense=4, heads=32) == 8
    assert splits_of(2048, 131072, batch=4) == 1  # whose programs are enough
    assert splits_of(2048, 131072, gpu=Resources(1, 0)) == 1


@pytest.mark.parametrize(("dense", "heads"), [(1, 4), (2, 8), (1, 32), (4, 32), (16, 32)])
@pytest.mark.parametrize("batch", [1, 3])
def test_splits_are_few_enough_and_short_enough(dense, heads, batch):
    fewest, most = SPLITS
    for q_len, kv_len in itertools.product((1, 100, 500, 1000, 2048, 5000), (3000, 9000, 33000, 131072, 1 << 20)):
        splits = splits_of(q_len, kv_len, dense, heads, batch) if q_len <= kv_len else 1
        if splits == 1:
            continue
        assert splits in (4, 8, 16)
        assert fewest <= splits <= most
        assert kv_len >= 2 * q_len
        assert kv_len / splits >= FEWEST_KEYS
        programs = batch * -(-q_len // HOPPER.rows)
        split_bytes = 4 * 128 * dense * programs * HOPPER.rows
        assert splits * split_bytes <= SPLIT_BYTES
        of_sm = programs * (dense + DENSITY * (heads - dense)) / GPU.sm_count
        bounded = splits == most or kv_len / (2 * splits) < FEWEST_KEYS or 2 * splits * split_bytes > SPLIT_BYTES
        assert bounded or 1 / splits <= LAST * of_sm


def test_warming_up_compiles_what_splits():
    for heads, dense in ((4, 1), (8, 2), (64, 32), (128, 64)):
        assert splits_of(*SPLIT_CALL, dense, heads) > 1
    assert split_calls(config_of(TILE)) == [SPLIT_CALL]
    assert split_calls(LayerConfig.uniform(4)) == split_calls(config_of(TILE).as_dense()) == []


def split(monkeypatch, splits):
    """Split every call with dense heads and others; returns a list with a 1 for every combination."""
    combined = []
    combine = prefill_module.combine
    monkeypatch.setattr(prefill_module, "count_key_splits", lambda *_: splits)
    monkeypatch.setattr(prefill_module, "combine", lambda *arguments: combined.append(1) or combine(*arguments))
    return combined


def unsplit(call, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(prefill_module, "count_key_splits", lambda *_: 1)
        return run_prefill(call)


def compare(split_outputs, whole):
    """Hold a split call against the same one whole.

    In 16 bits the other heads run another form of the kernel: a sum may round otherwise, and a stop come a chunk later.
    """
    (out, visited, lse), (whole_out, whole_visited, whole_lse) = split_outputs, whole
    assert out.isfinite().all()
    if out.dtype == torch.float32:
        assert torch.equal(visited, whole_visited)
        assert torch.equal(out[:, OTHERS], whole_out[:, OTHERS])
        assert torch.equal(lse[:, OTHERS], whole_lse[:, OTHERS])
        torch.testing.assert_close(out, whole_out, rtol=1e-4, atol=1e-5)
    else:
        assert int((visited != whole_visited).sum()) <= -(-visited.numel() // 100)
        assert relative_error(out[:, DENSE], whole_out[:, DENSE].float()) <= 4e-3  # two roundings to bf16, each 2^-9
        assert relative_error(out[:, OTHERS], whole_out[:, OTHERS].float()) <= 2e-2
    torch.testing.assert_close(lse[:, DENSE], whole_lse[:, DENSE], rtol=0, atol=1e-4)


CALLS = [
    pytest.param((batch, 4, 2, q_len, kv_len, starts), id=f"B{batch}-q{q_len}-k{kv_len}")
    for batch, q_len, kv_len, starts in (
        [(1, 700, 9001, None), (1, 1, 3000, None), (2, 500, 2500, [2300, 17]), (1, 2048, 20000, None)]
        if ON_GPU
        else [(1, 60, 211, None), (2, 70, 171, [171, 120]), (1, 100, 211, None), (1, 1, 250, None)]
    )
]
FEATURES = ["plain", "sinks", "cap", "int8"]


@SLOW
@pytest.mark.parametrize(
    ("shape", "splits", "features", "tile", "head_dim"),
    pairwise(CALLS, [4, 16], FEATURES, TILES[::2], mark=EXHAUSTIVE, count=5),
)
def test_a_split_call_equals_the_reference(shape, splits, features, tile, head_dim, monkeypatch):
    """With 16 splits of at most 7 tiles, most are empty."""
    q, k, v, kv_start = drawn(shape, head_dim)
    config = config_of(tile, scores="int8" if features == "int8" else "input")
    options = {"sinks": torch.tensor([1.0, 9.0, -2.0, 3.0], device=DEVICE)} if features in ("sinks", "int8") else {}
    options |= {"softcap": 3.0} if features == "cap" else {}
    call = call_of(q, k, v, config, kv_start, lse=True, **options)
    whole = unsplit(call, monkeypatch)
    combined = split(monkeypatch, splits)
    ours = run_prefill(call)
    assert combined == [1]
    compare(ours, whole)
    expected = s2o_attention_reference(q, k, v, config, kv_start=kv_start, **options)
    if ours[0].dtype == torch.float32:
        torch.testing.assert_close(ours[0][:, DENSE], expected.out[:, DENSE], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours[2][:, DENSE], expected.lse[:, DENSE], rtol=1e-4, atol=1e-4)
    else:
        assert relative_error(ours[0][:, DENSE], expected.out[:, DENSE].float()) <= (
            8e-3 if features == "int8" else 6e-3
        )
    alone, _, none = run_prefill(replace(call, with_lse=False))  # whose splits have a log-sum-exp all the same
    assert none is None
    assert relative_error(alone, ours[0].float()) <= 1e-3


@INTERPRETED
def test_fp16_outputs_are_rounded_once(monkeypatch):
    q, k, v = inputs(1, 4, 2, 60, 400, 64, torch.float16)
    split(monkeypatch, 8)
    out, _, _ = run_prefill(call_of(q, k, v, config_of(TILE)))
    expected = s2o_attention_reference(q.double(), k.double(), v.double(), config_of(TILE)).out
    # weights and output are each rounded to 11 bits, relative to values of |v| <= 4
    torch.testing.assert_close(out[:, DENSE].double(), expected[:, DENSE], rtol=2e-3, atol=4 * 2**-10)


@SLOW
@pytest.mark.parametrize(("tile", "head_dim"), all_but_first(TILES[::2], EXHAUSTIVE))
def test_packed_sequences_and_pages_change_nothing(tile, head_dim, monkeypatch):
    """One has no tokens, one so few keys that splits are empty, one no more keys than queries.

    In pages bit for bit, on a GPU also recorded and replayed, as the kernels read the same numbers.
    """
    q_lens, k_lens = ([700, 1, 300, 130], [9000, 40, 300, 2222]) if ON_GPU else ([70, 1, 66], [171, 40, 66])
    batch = PagedBatch(q_lens, k_lens, heads=4, head_dim=head_dim, dtype=DTYPE, device=DEVICE)
    config = config_of(tile)
    forget_plans()
    combined = split(monkeypatch, 8)
    monkeypatch.delattr("s2o_runtime.attention.paged.gather_keys")  # no copy is made
    packed = batch.packed(config, backend="triton", return_lse=True)
    for _ in range(3 if ON_GPU else 1):
        ours = batch.paged(config, total_k=len(batch.k), backend="triton", return_lse=True)
        assert torch.equal(ours.out, packed.out)
        assert torch.equal(ours.lse, packed.lse)
    assert combined
    forget_plans()
    for rows, keys in zip(slices_of(q_lens), slices_of(k_lens), strict=True):
        part = [tensor.transpose(0, 1)[None] for tensor in (batch.q[rows], batch.k[keys], batch.v[keys])]
        whole = unsplit(call_of(*part, config, lse=True), monkeypatch)
        own = packed.out[rows].transpose(0, 1)[None], whole[1], packed.lse[:, rows][None]
        compare(own, whole)


def slices_of(lengths):
    ends = list(itertools.accumulate(lengths))
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


@SLOW
def test_every_slice_of_rows_is_split(monkeypatch):
    q, k, v = inputs(1, 4, 2, 200, 430, 64)
    call = call_of(q, k, v, config_of(TILE), lse=True)
    whole = unsplit(call, monkeypatch)
    combined = split(monkeypatch, 4)
    monkeypatch.setattr(prefill_module, "WORKSPACE_BYTES", 1)
    compare(run_prefill(call), whole)
    assert combined == [1, 1]


@pytest.mark.skipif(not ON_GPU, reason="needs compiled kernels")
@pytest.mark.parametrize("tile", [PLAIN, HOPPER])
def test_nothing_compiles_after_warmup_and_a_replay_is_the_call(tile):
    gpu = get_resources(torch.device("cuda"))
    assert splits_of(128 * max(1, gpu.sm_count // 8), 131072, gpu=gpu) >= 4  # programs of an eighth of this GPU's SMs
    config = config_of(tile)
    warmup(config, kv_heads=2, head_dim=128)
    known = len(launch_module._compiled)
    forget_plans()
    q, k, v = as_transformers(*inputs(1, 4, 2, 700, 60000, 128))
    for _ in range(3):
        s2o_attention(q, k, v, config, backend="triton")
    assert len(launch_module._compiled) == known
    (other,) = as_transformers(q.flip(2))
    replayed = s2o_attention(other, k, v, config, backend="triton")
    forget_plans()
    assert torch.equal(replayed, s2o_attention(other, k, v, config, backend="triton"))
    assert relative_error(replayed[:, DENSE], exact_attention(other, k, v)[:, DENSE]) <= 6e-3
