"""Dense heads split over keys: when and how finely, and the kernels in the interpreter against the reference."""

import itertools
from dataclasses import replace

import pytest
import torch

from s2o_runtime.attention.api import s2o_attention_varlen
from s2o_runtime.attention.warmup import SPLIT_CALL, split_calls
from s2o_runtime.call import Call
from s2o_runtime.config import HeadConfig, LayerConfig, StopRule, TileConfig
from s2o_runtime.devices import Resources
from s2o_runtime.kernels import prefill as prefill_module
from s2o_runtime.kernels.prefill import run_prefill
from s2o_runtime.kernels.splits import DENSITY, FEWEST_KEYS, LAST, SPLIT_BYTES, SPLITS, count_key_splits
from s2o_runtime.reference.attention import s2o_attention_reference
from support.kernels import TILE, call_of, drawn, inputs, run_both
from support.layouts import pack, unpacked
from support.marks import INTERPRETED
from support.paging import PagedBatch

SLOW = pytest.mark.slow(reason="more cases of a kernel in Triton's interpreter, seconds each")
EXHAUSTIVE = pytest.mark.exhaustive(reason="still more of them: `make test` runs some")


GPU = Resources(132, 50 << 20)
HOPPER = TileConfig(64, 128, 2, 4, 2, specialized=True)
HEADS = (
    HeadConfig(1.0, 64, representatives=16, tail="mean"),
    HeadConfig(mode="dense"),
    HeadConfig(0.5, 128, stop_rule=StopRule.PAPER),
    HeadConfig(mode="dense"),
)
CONFIG = LayerConfig(HEADS, TILE)
DENSE = [1, 3]


def splits_of(q_len, kv_len, dense=2, heads=8, batch=1, gpu=GPU):
    """In a layer with so many dense heads, all others alike, and programs of 128 rows."""
    others = replace(HEADS[0], segment=HOPPER.rows)
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
    assert split_calls(CONFIG) == [SPLIT_CALL]
    assert split_calls(LayerConfig.uniform(4)) == split_calls(CONFIG.as_dense()) == []


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


def near(ours, expected):
    """Outputs and log-sum-exps that differ by rounding."""
    for tensor, other, atol in zip(ours, expected, (1e-5, 1e-4), strict=True):
        torch.testing.assert_close(tensor, other, rtol=1e-4, atol=atol)


SINKS = torch.tensor([1.0, 9.0, -2.0, 3.0])


@INTERPRETED
@SLOW
@pytest.mark.parametrize(
    ("shape", "features", "splits", "scores"),
    [
        pytest.param((1, 4, 2, 60, 211, 64, None), {}, 4, "input", id="q60-kv211"),
        pytest.param((2, 4, 2, 70, 171, 64, [40, 0]), {}, 8, "int8", id="left-padded"),
        pytest.param((2, 4, 2, 70, 171, 64, [171, 120]), {"sinks": SINKS}, 4, "int8", id="padded-chunk-sinks"),
        pytest.param((1, 4, 2, 100, 211, 64, None), {"sinks": SINKS, "softcap": 3.0}, 16, "input", id="sinks-cap"),
        pytest.param((1, 4, 2, 1, 250, 64, None), {}, 4, "input", id="one-query"),
    ],
)
def test_a_split_call_equals_the_reference(shape, features, splits, scores, monkeypatch, nan_filled):
    """With 16 splits of at most 7 tiles, most are empty."""
    q, k, v, kv_start = drawn(shape)
    config = replace(CONFIG, scores=scores)
    call = call_of(q, k, v, config, kv_start, lse=True, **features)
    whole, visited, whole_lse = unsplit(call, monkeypatch)
    combined = split(monkeypatch, splits)
    (out, split_visited, lse), expected = run_both(q, k, v, config, kv_start, 0.125, **features)
    assert combined == [1]
    assert torch.equal(split_visited, visited)
    others = [head for head in range(4) if head not in DENSE]
    assert torch.equal(out[:, others], whole[:, others])
    assert torch.equal(lse[:, others], whole_lse[:, others])
    near((out, lse), (whole, whole_lse))
    near((out[:, DENSE], lse[:, DENSE]), (expected.out[:, DENSE], expected.lse[:, DENSE]))
    alone, _, none = run_prefill(replace(call, with_lse=False))  # whose splits have a log-sum-exp all the same
    assert none is None
    torch.testing.assert_close(alone, out, rtol=1e-5, atol=1e-6)


@INTERPRETED
def test_fp16_outputs_are_rounded_once(monkeypatch, nan_filled):
    q, k, v = inputs(1, 4, 2, 60, 400, 64, torch.float16)
    split(monkeypatch, 8)
    out, _, _ = run_prefill(call_of(q, k, v, CONFIG))
    expected = s2o_attention_reference(q.double(), k.double(), v.double(), CONFIG, scale=0.125).out
    assert out.dtype == torch.float16
    # weights and output are each rounded to 11 bits, relative to values of |v| <= 4
    torch.testing.assert_close(out[:, DENSE].double(), expected[:, DENSE], rtol=2e-3, atol=4 * 2**-10)


@INTERPRETED
@SLOW
def test_packed_sequences_are_sequences_on_their_own(monkeypatch, nan_filled):
    """One has no tokens, one so few keys that splits are empty, one no more keys than queries."""
    q_lens, k_lens = [70, 0, 1, 66], [171, 0, 40, 66]
    parts, (q, k, v, cu_q, cu_k) = pack(q_lens, k_lens, 4, 2, 64)
    combined = split(monkeypatch, 8)
    out, lse, _ = s2o_attention_varlen(
        q, k, v, cu_q, cu_k, 70, 200, CONFIG, backend="triton", return_stats=True, return_lse=True, scale=0.125
    )
    assert combined == [1]
    for part, ours, our_lse in zip(parts, unpacked(parts, out), unpacked(parts, lse), strict=True):
        expected = s2o_attention_reference(*part, CONFIG, scale=0.125)
        near((ours[DENSE], our_lse[DENSE]), (expected.out[0, DENSE], expected.lse[0, DENSE]))
        whole, _, _ = unsplit(call_of(*part, CONFIG), monkeypatch)
        torch.testing.assert_close(ours, whole[0], rtol=1e-4, atol=1e-5)


@INTERPRETED
@SLOW
def test_pages_change_nothing(monkeypatch, nan_filled):
    """A split of keys in pages is what it is of the same keys one behind another, bit for bit."""
    batch = PagedBatch([70, 1, 66], [171, 40, 66])
    combined = split(monkeypatch, 4)
    monkeypatch.delattr("s2o_runtime.attention.paged.gather_keys")  # no copy is made
    ours = batch.paged(CONFIG, backend="triton", return_lse=True)
    expected = batch.packed(CONFIG, backend="triton", return_lse=True)
    assert combined == [1, 1]
    assert torch.equal(ours.out, expected.out)
    assert torch.equal(ours.lse, expected.lse)


@INTERPRETED
@SLOW
def test_every_slice_of_rows_is_split(monkeypatch, nan_filled):
    q, k, v = inputs(1, 4, 2, 200, 430, 64)
    call = call_of(q, k, v, CONFIG, lse=True)
    whole, _, whole_lse = unsplit(call, monkeypatch)
    combined = split(monkeypatch, 4)
    monkeypatch.setattr(prefill_module, "WORKSPACE_BYTES", 1)
    out, _, lse = run_prefill(call)
    assert combined == [1, 1]
    near((out, lse), (whole, whole_lse))
