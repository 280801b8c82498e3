"""Int8 scores: the rule that rounds keys and queries, and what follows it; test_kernels.py has the op."""

from dataclasses import replace

import pytest
import torch

from s2o_runtime.attention.api import s2o_attention, s2o_attention_varlen
from s2o_runtime.config import HeadConfig, LayerConfig
from s2o_runtime.errors import ConfigError, InputError
from s2o_runtime.kernels.keys import read_keys
from s2o_runtime.quantisation import LEVELS, NARROWEST, SMOOTHING, quantise, quantise_keys
from s2o_runtime.reference.attention import s2o_attention_reference
from s2o_runtime.reference.dense import exact_attention
from support.kernels import (
    DEVICE,
    DTYPES,
    ON_GPU,
    PLAIN,
    TILE,
    call_of,
    inputs,
    relative_error,
    starts_of,
)  # fmt: skip
from support.layouts import edges_of
from support.marks import all_but_first

SLOW = pytest.mark.slow(reason="more shapes of the kernels in Triton's interpreter, seconds each")

pytestmark = pytest.mark.usefixtures("nan_filled")


def random_inputs(heads, kv_heads, q_len, kv_len):
    return (torch.randn(1, n, length, 64) for n, length in ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len)))


def test_a_row_is_off_by_half_a_level_at_most():
    rows = torch.randn(50, 64) * torch.logspace(-3, 3, 50)[:, None]
    levels, scale = quantise(rows)
    assert levels.dtype == torch.int8
    assert levels.abs().amax() == LEVELS
    torch.testing.assert_close(scale, rows.abs().amax(1) / LEVELS)
    off = (quantise(rows).restore() - rows).abs() / scale[:, None]
    assert 0.4 < off.amax() <= 0.5 + 1e-3
    zeros = quantise(torch.zeros(3, 8))
    assert torch.equal(zeros.restore(), torch.zeros(3, 8))
    assert torch.all(zeros.scale > 0)


def test_units_follow_the_ranges_of_channels_in_part_and_of_keys_that_count():
    k = torch.rand(200, 4) * 2 - 1
    k[0], k[1] = 1, -1  # the range is all of it
    k = k * torch.tensor([16.0, 4.0, 1.0, 0.0]) + 5
    levels, unit, middle = quantise_keys(k)
    torch.testing.assert_close(middle, torch.full((4,), 5.0))
    parts = torch.tensor([1.0, 1 / 4, 1 / 16, NARROWEST])
    torch.testing.assert_close(unit * LEVELS, 16 * parts**SMOOTHING)
    assert levels.abs().amax(0)[:3].tolist() == (LEVELS * parts[:3] ** (1 - SMOOTHING)).round().tolist()
    assert torch.equal(levels[:, 3], torch.zeros(200, dtype=torch.int8))
    behind_padding = quantise_keys(torch.cat([1e4 * torch.randn(30, 4), k]), 30)
    assert torch.equal(behind_padding.levels[30:], levels)
    assert torch.equal(behind_padding.unit, unit)
    assert torch.equal(behind_padding.middle, middle)
    assert torch.equal(quantise_keys(k, 200).middle, torch.zeros(4))


@pytest.mark.parametrize("hard", ["a common part of all keys", "one large key"])
def test_keys_that_rounding_by_rows_would_lose(hard):
    q, k, v = random_inputs(2, 1, 150, 150)
    if hard == "one large key":
        k[:, :, 0, :3] *= 20
    truth = exact_attention(q, k, v)
    moved = k + 40 * torch.randn(64) if hard.startswith("a common") else k
    out = s2o_attention_reference(q, moved, v, LayerConfig.uniform(2, segment=64, tile=TILE, scores="int8")).out
    assert relative_error(out, truth) < 0.05
    if hard.startswith("a common"):
        by_rows = exact_attention(quantise(q).restore(), quantise(moved).restore(), v)
        assert relative_error(by_rows, truth) > 0.1


def test_never_stopping_is_attention_of_rounded_queries_and_keys():
    q, k, v = (tensor.double() for tensor in random_inputs(2, 2, 100, 170))
    config = LayerConfig.uniform(2, segment=64, tile=TILE, scores="int8")
    out = s2o_attention_reference(q, k, v, config).out
    for h in range(2):
        levels, unit, _ = quantise_keys(k[0, h])
        queries = quantise(q[0, h] * 64**-0.5 * unit).restore()
        expected = exact_attention(queries[None, None], levels[None, None].double(), v[:, h : h + 1], scale=1.0)
        torch.testing.assert_close(out[:, h : h + 1], expected, rtol=1e-5, atol=1e-6)


def test_the_log_sum_exp_has_what_keys_lost():
    q, k, v = random_inputs(1, 1, 90, 90)
    k = k + 3 * torch.randn(64)
    plain = LayerConfig.uniform(1, segment=64, tile=TILE)
    both = [
        s2o_attention_reference(q, k, v, config, sinks=torch.tensor([4.0]))
        for config in (plain, replace(plain, scores="int8"))
    ]
    assert (both[1].lse - both[0].lse).abs().amax() < 0.2
    assert relative_error(both[1].out, both[0].out) < 0.05


@pytest.mark.parametrize("dtype", all_but_first(DTYPES, SLOW))
@pytest.mark.parametrize("starts", all_but_first([[0, 70], None, [1300, 1299]], SLOW))
def test_keys_are_rounded_as_the_rule_says(starts, dtype):
    _, k, _ = inputs(2, 1, 1, 1300, 1300, 64, dtype)
    k = k * torch.logspace(-3, 1, 64, device=DEVICE).to(dtype) + k[:, :, -1:]
    call = call_of(k, k, k, LayerConfig.uniform(1, tile=TILE, scores="int8"), starts_of(starts))
    rows, unit, middle = read_keys(call)
    for b in range(2):
        start = 0 if starts is None else starts[b]
        expected = quantise_keys(k[b, 0], start)
        torch.testing.assert_close(unit[b, 0], expected.unit, rtol=1e-5, atol=0)
        torch.testing.assert_close(middle[b, 0], expected.middle)
        off = (rows[b, 0, start:].int() - expected.levels[start:].int()).abs()
        assert off.sum() <= 1e-3 * off.numel() + 1
        assert off.numel() == 0 or off.amax() <= 1


def test_packed_sequences():
    """Each has a middle and units of its own; one is empty, one has a prefix. On a GPU the last calls are replays."""
    edges = edges_of([90, 0, 60]), edges_of([90, 0, 140])
    q, k, v = (tensor[0].transpose(0, 1).clone() for tensor in inputs(1, 2, 1, 150, 230, 64))
    k[90:] = 2 * k[90:] + 3
    heads = (HeadConfig(0.0, 64, representatives=16, tail="mean"), HeadConfig(mode="dense"))
    config = LayerConfig(heads, PLAIN, scores="int8")
    theirs = s2o_attention_varlen(q, k, v, *edges, 90, 140, config, backend="reference", return_lse=True)
    for _ in range(4 if ON_GPU else 1):
        ours = s2o_attention_varlen(q, k, v, *edges, 90, 140, config, backend="triton", return_lse=True)
        assert relative_error(ours.out, theirs.out.float()) <= 8e-3
        torch.testing.assert_close(ours.lse, theirs.lse, rtol=1e-3, atol=2e-2 if ON_GPU else 5e-3)


def test_what_int8_scores_refuse():
    with pytest.raises(ConfigError, match="scores 'int4' are not known"):
        LayerConfig.uniform(1, scores="int4")
    config = LayerConfig.uniform(1, segment=64, tile=PLAIN, scores="int8")
    with pytest.raises(InputError, match="cannot be soft-capped"):
        s2o_attention(*inputs(1, 1, 1, 200, 200, 64), config, softcap=20.0, backend="triton")


def test_a_layer_of_dense_heads_keeps_its_scores():
    """Only without int8 scores is it the same as any other code's dense attention."""
    q, k, v = random_inputs(2, 1, 130, 130)
    config = LayerConfig.uniform(2, mode="dense", tile=TILE, scores="int8")
    assert hash(config) != hash(config.as_dense())
    out, _, stats = s2o_attention(q, k, v, config, return_stats=True)
    assert stats.backend == "reference"
    assert 1e-4 < relative_error(out, exact_attention(q, k, v)) < 0.03
    _, _, plain = s2o_attention(q, k, v, replace(config, scores="input"), return_stats=True)
    assert plain.backend == "dense"
    assert config.as_dense().scores == "input"


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU's memory")
def test_many_keys_cost_less_memory_than_they_have():
    """Keys in 8 bits beside the others: half their bytes."""
    q, k, v = inputs(1, 4, 2, 4096, 4096, 128)
    config = LayerConfig.uniform(4, mode="dense", tile=PLAIN, scores="int8")
    out = s2o_attention(q, k, v, config, backend="triton")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = s2o_attention(q, k, v, config, backend="triton")
    assert torch.cuda.max_memory_allocated() - before - out.nbytes < 0.75 * k.nbytes
