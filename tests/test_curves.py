"""Predicted errors and densities must be what the reference, run with the same threshold, really gives."""

import pytest
import torch

from calibrate import curves
from calibrate.capture import Captured
from calibrate.curves import TAUS, Shape, head_config, mean_curve, measure
from s2o_runtime.config import LayerConfig, TileConfig
from s2o_runtime.dense import exact_attention
from s2o_runtime.reference import s2o_attention_reference
from s2o_runtime.shapes import call_shape, density


def prompt(length=1900, heads=4, kv_heads=2, head_dim=16):
    q = torch.randn(1, heads, length, head_dim) * torch.tensor([0.3, 1.0, 2.0, 4.0])[:heads, None, None]
    q = q + 2 * torch.randn(1, heads, 1, head_dim)  # queries that agree, so that a ranking finds something
    return Captured(q, *(torch.randn(1, kv_heads, length, head_dim) for _ in range(2)), scale=head_dim**-0.5)


@pytest.mark.parametrize("segment", [256, 512])
@pytest.mark.parametrize("tile", [TileConfig(128, 64, 2), TileConfig(64, 64, 8), TileConfig(128, 128, 3)], ids=str)
def test_a_curve_predicts_what_the_reference_does(segment, tile):
    captured = prompt()
    curve = measure(captured, segment, [Shape(64, 128), Shape.of(tile)])[Shape.of(tile)]
    truth = exact_attention(captured.q, captured.k, captured.v, scale=captured.scale)
    assert curve.dense_power == pytest.approx(float(truth.square().mean()), rel=1e-5)
    seen = set()
    for index in range(1, len(TAUS), 4):
        config = LayerConfig((head_config(TAUS[index], segment),) * 4, tile)
        out, visited, _ = s2o_attention_reference(captured.q, captured.k, captured.v, config, scale=captured.scale)
        # a curve's prefix is a whole number of its steps; the kernel's of its tiles, which divide them
        predicted = curve.density[:, index]
        actual = density(visited, config, call_shape(captured.q, captured.k, captured.v))
        torch.testing.assert_close(predicted, actual, rtol=1e-9, atol=1e-9)
        mse = (out - truth).square().mean((0, 2, 3)).double()
        torch.testing.assert_close(curve.mse[:, index], mse, rtol=1e-3, atol=1e-9)
        seen.add(round(float(actual.mean()), 3))
    assert len(seen) >= 3  # the thresholds tried do differ


def test_measuring_few_heads_at_a_time_changes_nothing(monkeypatch):
    captured, shape = prompt(600), Shape(64, 256)
    whole = measure(captured, 256, [shape])[shape]
    monkeypatch.setattr(curves, "CPU_BYTES", 1)
    single = measure(captured, 256, [shape])[shape]
    torch.testing.assert_close(whole.mse, single.mse, rtol=1e-6, atol=0)
    assert torch.equal(whole.density, single.density)


def test_mean_curve_averages_prompts():
    shape = Shape(64, 128)
    first, second = (measure(prompt(400), 256, [shape])[shape] for _ in range(2))
    mean = mean_curve([first, second])
    assert torch.equal(mean.mse, (first.mse + second.mse) / 2)
    assert mean.dense_power == (first.dense_power + second.dense_power) / 2
