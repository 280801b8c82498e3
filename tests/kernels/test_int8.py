"""Int8 scores: the rule that rounds keys and queries, and the kernels in the interpreter against the reference."""

from dataclasses import replace

import pytest
import torch

from s2o_runtime.attention.api import s2o_attention, s2o_attention_varlen
from s2o_runtime.config import HeadConfig, LayerConfig, StopRule
from s2o_runtime.errors import ConfigError, InputError
from s2o_runtime.kernels.keys import read_keys
from s2o_runtime.quantisation import LEVELS, NARROWEST, SMOOTHING, quantise, quantise_keys
from s2o_runtime.reference.attention import s2o_attention_reference
from s2o_runtime.reference.dense import exact_attention
from support.kernels import TILE, call_of, drawn, inputs, mixed_config, run_both
from support.marks import INTERPRETED, all_but_first

SLOW = pytest.mark.slow(reason="more shapes of the kernels in Triton's interpreter, seconds each")


def test_a_row_is_off_by_half_a_level_at_most():
    rows = torch.randn(50, 64) * torch.logspace(-3, 3, 50)[:, None]
    levels, scale = quantise(rows)
    assert levels.dtype == torch.int8
    assert levels.abs().amax() == LEVELS
    torch.testing.assert_close(scale, rows.abs().amax(1) / LEVELS)
    off = (quantise(rows).restore() - rows).abs() / scale[:, None]
    assert 0.4 < off.amax() <= 0.5 + 1e-3


def test_a_row_of_zeros_stays_zero():
    rows = quantise(torch.zeros(3, 8))
    assert torch.equal(rows.restore(), torch.zeros(3, 8))
    assert torch.all(rows.scale > 0)


def test_units_follow_the_ranges_of_channels_in_part():
    k = torch.rand(200, 4) * 2 - 1
    k[0], k[1] = 1, -1  # the range is all of it
    levels, unit, middle = quantise_keys(k * torch.tensor([16.0, 4.0, 1.0, 0.0]) + 5)
    torch.testing.assert_close(middle, torch.full((4,), 5.0))
    parts = torch.tensor([1.0, 1 / 4, 1 / 16, NARROWEST])
    torch.testing.assert_close(unit * LEVELS, 16 * parts**SMOOTHING)
    assert levels.abs().amax(0)[:3].tolist() == (LEVELS * parts[:3] ** (1 - SMOOTHING)).round().tolist()
    assert torch.equal(levels[:, 3], torch.zeros(200, dtype=torch.int8))


def test_keys_before_the_start_do_not_count():
    k = torch.randn(90, 16)
    k[:30] *= 1e4
    levels, unit, middle = quantise_keys(k, 30)
    expected = quantise_keys(k[30:])
    assert torch.equal(levels[30:], expected.levels)
    assert torch.equal(unit, expected.unit)
    assert torch.equal(middle, expected.middle)
    assert torch.equal(quantise_keys(k, 90).middle, torch.zeros(16))


def test_a_common_part_of_all_keys_costs_nothing():
    q, k, v = inputs(1, 2, 1, 150, 150, 64)
    common = 40 * torch.randn(64)
    config = LayerConfig.uniform(2, segment=64, tile=TILE, scores="int8")
    moved = s2o_attention_reference(q, k + common, v, config).out
    truth = exact_attention(q, k, v)
    assert float((moved - truth).norm() / truth.norm()) < 0.03
    by_rows = exact_attention(quantise(q).restore(), quantise(k + common).restore(), v)
    assert float((by_rows - truth).norm() / truth.norm()) > 0.1


def test_one_key_may_be_much_larger_than_all_others():
    q, k, v = inputs(1, 2, 1, 150, 150, 64)
    k[:, :, 0, :3] *= 20
    truth = exact_attention(q, k, v)
    out = s2o_attention_reference(q, k, v, LayerConfig.uniform(2, segment=64, tile=TILE, scores="int8")).out
    assert float((out - truth).norm() / truth.norm()) < 0.05


def test_never_stopping_is_attention_of_rounded_queries_and_keys():
    q, k, v = (tensor.double() for tensor in inputs(1, 2, 2, 100, 170, 64))
    config = LayerConfig.uniform(2, segment=64, tile=TILE, scores="int8")
    out = s2o_attention_reference(q, k, v, config).out
    for h in range(2):
        levels, unit, _ = quantise_keys(k[0, h])
        queries = quantise(q[0, h] * 64**-0.5 * unit).restore()
        expected = exact_attention(queries[None, None], levels[None, None].double(), v[:, h : h + 1], scale=1.0)
        torch.testing.assert_close(out[:, h : h + 1], expected, rtol=1e-5, atol=1e-6)


def test_the_log_sum_exp_has_what_keys_lost():
    q, k, v = inputs(1, 1, 1, 90, 90, 64)
    k = k + 3 * torch.randn(64)
    plain = LayerConfig.uniform(1, segment=64, tile=TILE)
    int8 = replace(plain, scores="int8")
    close = s2o_attention_reference(q, k, v, int8).lse - s2o_attention_reference(q, k, v, plain).lse
    assert close.abs().amax() < 0.2
    sinks = torch.tensor([4.0])
    out, sunk = (s2o_attention_reference(q, k, v, config, sinks=sinks).out for config in (plain, int8))
    assert float((out - sunk).norm() / out.norm()) < 0.05


CASES = [
    pytest.param((1, 2, 1, 200, 200, 64, None), 1.0, id="B1-H2-L200-D64-1.0"),
    pytest.param((1, 3, 3, 257, 257, 128, None), 0.0, id="B1-H3-L257-D128-0.0"),
    pytest.param((2, 4, 2, 100, 211, 64, None), 1.0, id="q100-kv211-1.0"),
    pytest.param((3, 2, 1, 150, 150, 64, [0, 67, 149]), 0.0, id="left-padded-0.0"),
]


def near(out, lse, expected, of_sums=2e-3):
    """A query between two levels may be rounded to the other one: its scale is multiplied in between."""
    torch.testing.assert_close(out, expected.out, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse, expected.lse, rtol=1e-3, atol=of_sums)


@INTERPRETED
@pytest.mark.parametrize(("shape", "tau"), all_but_first(CASES, SLOW))
def test_the_kernels_equal_the_reference(shape, tau, nan_filled):
    q, k, v, kv_start = drawn(shape)
    k = k + torch.randn(shape[5])
    config = replace(mixed_config(shape[1], tau), scores="int8")
    (out, visited, lse), expected = run_both(q, k, v, config, kv_start)
    near(out, lse, expected)
    assert (visited != expected.visited).float().mean() <= 0.02


@INTERPRETED
@pytest.mark.parametrize("stop_rule", all_but_first([StopRule.REST, StopRule.PAPER], SLOW), ids=str)
def test_sinks_and_dense_heads(stop_rule, nan_filled):
    q, k, v = inputs(1, 2, 1, 200, 200, 64)
    k = k + torch.randn(64)
    heads = (HeadConfig(0.5, 64, stop_rule=stop_rule, representatives=16, tail="mean"), HeadConfig(mode="dense"))
    config = LayerConfig(heads, TILE, scores="int8")
    (out, _, lse), expected = run_both(q, k, v, config, sinks=torch.tensor([2.0, 7.0]))
    near(out, lse, expected)


@INTERPRETED
@pytest.mark.parametrize("starts", [None, [0, 70], [1300, 1299]])
def test_keys_are_rounded_as_the_rule_says(starts, nan_filled):
    _, k, _ = inputs(2, 1, 1, 1300, 1300, 64)
    k = k * torch.logspace(-3, 1, 64) + torch.randn(64)
    config = LayerConfig.uniform(1, tile=TILE, scores="int8")
    kv_start = None if starts is None else torch.tensor(starts)
    rows, unit, middle = read_keys(call_of(k, k, k, config, kv_start))
    for b in range(2):
        start = 0 if starts is None else starts[b]
        expected = quantise_keys(k[b, 0], start)
        torch.testing.assert_close(unit[b, 0], expected.unit)
        torch.testing.assert_close(middle[b, 0], expected.middle)
        off = (rows[b, 0, start:].int() - expected.levels[start:].int()).abs()
        assert off.sum() <= 1e-3 * off.numel()
        assert off.numel() == 0 or off.amax() <= 1


def test_a_layer_names_its_scores():
    with pytest.raises(ConfigError, match="scores 'int4' are not known"):
        LayerConfig.uniform(1, scores="int4")
    config = LayerConfig.uniform(1, scores="int8")
    assert hash(config) != hash(LayerConfig.uniform(1))


@INTERPRETED
def test_caps_are_refused(monkeypatch):
    q, k, v = inputs(1, 1, 1, 200, 200, 64)
    config = LayerConfig.uniform(1, segment=64, tile=TILE, scores="int8")
    with pytest.raises(InputError, match="cannot be soft-capped"):
        s2o_attention(q, k, v, config, softcap=20.0, backend="triton")


@INTERPRETED
def test_packed_sequences(nan_filled):
    """Each has a middle and units of its own; one is empty, one has a prefix from a cache."""
    cu_q = torch.tensor([0, 90, 90, 150], dtype=torch.int32)
    cu_k = torch.tensor([0, 90, 90, 230], dtype=torch.int32)
    q, k, v = torch.randn(150, 2, 64) * 2, torch.randn(230, 1, 64), torch.randn(230, 1, 64)
    k[90:] = 5 * k[90:] + 7
    heads = (HeadConfig(0.0, 64, representatives=16, tail="mean"), HeadConfig(mode="dense"))
    config = LayerConfig(heads, TILE, scores="int8")
    ours, theirs = (
        s2o_attention_varlen(q, k, v, cu_q, cu_k, 90, 140, config, backend=backend, return_lse=True)
        for backend in ("triton", "reference")
    )
    near(ours.out, ours.lse, theirs, of_sums=5e-3)


def test_a_layer_of_dense_heads_keeps_its_scores():
    """Only without int8 scores is it the same as any other code's dense attention."""
    q, k, v = inputs(1, 2, 1, 130, 130, 64)
    config = LayerConfig.uniform(2, mode="dense", tile=TILE, scores="int8")
    out, _, stats = s2o_attention(q, k, v, config, return_stats=True)
    assert stats.backend == "reference"
    truth = exact_attention(q, k, v)
    assert 1e-4 < float((out - truth).norm() / truth.norm()) < 0.03
    _, _, plain = s2o_attention(q, k, v, replace(config, scores="input"), return_stats=True)
    assert plain.backend == "dense"
    assert config.as_dense().scores == "input"
