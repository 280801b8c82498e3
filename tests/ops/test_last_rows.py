"""The last rows of each sequence run dense: they equal dense attention, and all other rows what they were without."""

from dataclasses import replace

import pytest
import torch

from s2o_runtime import ConfigError, LayerConfig, s2o_attention, s2o_attention_varlen
from s2o_runtime.attention.backend import find_dense_reason
from s2o_runtime.attention.torch_op import read_config
from s2o_runtime.dense_reason import DenseReason
from s2o_runtime.reference.dense import dense_attention, log_sum_exp
from s2o_runtime.sequences import CallShape
from support.kernels import TILE, drawn, mixed_config
from support.layouts import pack, unpacked
from support.marks import INTERPRETED
from support.paging import PagedBatch

BACKENDS = ["reference", pytest.param("triton", marks=INTERPRETED)]
SLOW = pytest.mark.slow(reason="the kernels take seconds in the interpreter")
KEPT = {"return_lse": True, "return_stats": True}
SHAPES = [
    pytest.param((1, 2, 1, 333, 333, 64, None), id="odd-GQA"),
    pytest.param((1, 2, 2, 256, 256, 64, None), id="whole-tiles"),
    pytest.param((1, 2, 1, 190, 301, 64, None), id="chunk"),
    pytest.param((2, 2, 1, 260, 260, 64, [0, 97]), id="left-padded"),
    pytest.param((2, 2, 1, 150, 150, 64, [0, 100]), id="padding-among-the-last-rows"),
    pytest.param((1, 2, 1, 100, 231, 64, None), id="fewer-queries-than-rows"),
    pytest.param((1, 1, 1, 5, 5, 64, None), id="shorter-than-a-tile"),
]
QUICK = ("odd-GQA", "padding-among-the-last-rows", "fewer-queries-than-rows", "shorter-than-a-tile")


def check(q, k, v, config, kv_start=None, **options):
    """Compare a call with the same one without last rows, and its last rows with dense attention."""
    ours, without = (
        s2o_attention(q, k, v, layer, kv_start=kv_start, **KEPT, **options)
        for layer in (config, replace(config, last_rows=0))
    )
    first = config.find_first_dense_row(q.shape[2])
    assert first <= max(0, q.shape[2] - config.last_rows)
    assert torch.equal(ours.out[:, :, :first], without.out[:, :, :first])
    assert torch.equal(ours.lse[:, :, :first], without.lse[:, :, :first])
    dense, logs = dense_attention(q, k, v, kv_start=kv_start), log_sum_exp(q, k, kv_start=kv_start)
    torch.testing.assert_close(ours.out[:, :, first:], dense[:, :, first:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.lse[:, :, first:], logs[:, :, first:].float(), rtol=1e-4, atol=1e-4)
    return ours, without


@pytest.mark.parametrize(
    ("shape", "backend"),
    [
        *(pytest.param(*shape.values, "reference", id=f"{shape.id}-reference") for shape in SHAPES),
        *(
            pytest.param(
                *shape.values,
                "triton",
                id=f"{shape.id}-triton",
                marks=[INTERPRETED] if shape.id in QUICK else [INTERPRETED, SLOW],
            )
            for shape in SHAPES
        ),
    ],
)
def test_the_last_rows_are_dense_and_the_others_as_they_were(shape, backend, nan_filled):
    q, k, v, kv_start = drawn(shape)
    check(q, k, v, replace(mixed_config(shape[1], 20.0), last_rows=128), kv_start, backend=backend)


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=[INTERPRETED, SLOW])])
def test_of_packed_and_paged_sequences_each_has_its_own(backend, nan_filled):
    config = replace(mixed_config(4, 20.0), last_rows=128)
    queries, lengths = [333, 40, 0, 70, 200], [333, 150, 0, 70, 260]
    parts, (q, k, v, cu_q, cu_k) = pack(queries, lengths, 4, 2, 64)
    packed = s2o_attention_varlen(q, k, v, cu_q, cu_k, 333, 333, config, backend=backend, **KEPT)
    outs, logs = unpacked(parts, packed.out), unpacked(parts, packed.lse)
    for part, out, lse in zip(parts, outs, logs, strict=True):
        alone = s2o_attention(*part, config, backend=backend, **KEPT)
        torch.testing.assert_close(out, alone.out[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse, alone.lse[0], rtol=1e-4, atol=1e-4)
    batch = PagedBatch([190, 70], [301, 200])
    in_pages, in_order = (call(config, backend=backend, **KEPT) for call in (batch.paged, batch.packed))
    assert torch.equal(in_pages.out, in_order.out)
    assert torch.equal(in_pages.lse, in_order.lse)
    assert torch.equal(in_pages.density, in_order.density)


@pytest.mark.parametrize("backend", BACKENDS)
def test_density_counts_their_pairs(backend):
    """A head that stops after 64 keys of its prefix: the last 128 rows of 300, from row 128 on, have all pairs."""
    q, k, v, _ = drawn((1, 1, 1, 300, 300, 64, None))
    config = LayerConfig.uniform(1, tau=1e6, segment=64, tile=TILE, last_rows=128)
    row = torch.arange(300)
    pairs = torch.where(row >= 128, row + 1, row % 64 + 1 + (row // 64 * 64).clamp(max=64))
    density = s2o_attention(q, k, v, config, backend=backend, **KEPT).density
    torch.testing.assert_close(density, pairs.sum().double()[None] / (300 * 301 / 2))


def test_a_call_of_nothing_but_last_rows_runs_dense():
    config = LayerConfig.uniform(1, segment=64, tile=TILE, last_rows=256)
    reasons = [find_dense_reason(config, CallShape(1, 1, 1, q_len, 4096, 64, 64), (0, 0)) for q_len in (256, 257)]
    assert [reason and DenseReason.from_sentence(reason) for reason in reasons] == [DenseReason.FEW_QUERIES, None]


def test_the_field_is_checked_and_part_of_a_config():
    config = LayerConfig.uniform(2, segment=64, tile=TILE, last_rows=512)
    assert read_config(config.as_text()) == config != replace(config, last_rows=0)
    assert config.as_dense().last_rows == 0
    with pytest.raises(ConfigError, match=r"last_rows 64 is not supported: use one of \(0, 128, 256, 512\)"):
        LayerConfig.uniform(2, last_rows=64)
