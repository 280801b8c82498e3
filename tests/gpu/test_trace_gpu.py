"""The trace kernel on a GPU: its curves are what the kernels do when they run, and it costs a few dense calls."""

import pytest
import torch

from calibrate.curves import torch_pass as plain_pass
from calibrate.curves import trace_pass as kernel_pass
from calibrate.curves.curves import TAUS, RankingConfig, Shape, compute_head_norms, compute_row_errors
from calibrate.model.layers import Captured
from calibrate.timing import measure_medians
from s2o_runtime import LayerConfig, s2o_attention
from s2o_runtime.config import HeadConfig, StopRule
from s2o_runtime.reference.dense import dense_attention, exact_attention
from s2o_runtime.tiles import list_candidate_tiles
from support.gpu import inputs
from support.marks import pairwise

METHODS = [
    RankingConfig(512),
    RankingConfig(256, 16),
    RankingConfig(1024, 16),
    RankingConfig(256, 16, "int8"),
]


def prompt(length, head_dim, heads=8, kv_heads=2, **features):
    q, k, v = inputs(1, heads, kv_heads, length, length, head_dim, torch.bfloat16)
    return Captured(q, k, v, head_dim**-0.5 / 2, **features)  # flat, so that stopping leaves something out


def tile_of(head_dim, block_m):
    tiles = list_candidate_tiles(head_dim, torch.cuda.get_device_capability())
    return next(tile for tile in tiles if tile.block_m == block_m)


CASES = pairwise(METHODS, [(5000, 128, False), (3333, 64, False), (4096, 96, False)], [64, 128])
CASES += [(RankingConfig(512, 16), 4001, 64, True, 64), (RankingConfig(512, 16), 4001, 128, True, 128)]


@pytest.mark.parametrize(("method", "length", "head_dim", "featured", "block_m"), CASES)
def test_a_curve_is_what_the_kernels_do(method, length, head_dim, featured, block_m):
    """At every fourth threshold: density to the pair, mean error within 3%, the worst tiles' error within 10%."""
    features = {"softcap": 8.0, "sinks": torch.linspace(-2.0, 12.0, 8, device="cuda", dtype=torch.bfloat16)}
    captured = prompt(length, head_dim, **features if featured else {})
    tile = tile_of(head_dim, block_m)
    if method.segment % tile.rows:
        pytest.skip("the tile's rows do not divide the segment")
    curve = kernel_pass.measure(captured, [method], [Shape.from_tile(tile)])[method, Shape.from_tile(tile)]
    truth = exact_attention(captured.q, captured.k, captured.v, **captured.scoring.arguments())
    power = float(truth.square().mean())
    assert curve.dense_power == pytest.approx(power, rel=1e-3)
    compared = 0
    for index in range(0, len(TAUS), 4):
        for tail in ("none", "mean"):
            head = HeadConfig(TAUS[index], method.segment, "s2o", StopRule.REST, method.representatives, tail)
            config = LayerConfig((head,) * 8, tile, scores=method.scores)
            out, _, stats = s2o_attention(
                captured.q, captured.k, captured.v, config, return_stats=True, backend="triton",
                **captured.scoring.arguments(),
            )  # fmt: skip
            torch.testing.assert_close(curve.density[:, index], stats.density.cpu(), rtol=2e-3, atol=1e-3)
            mse = (out.float() - truth).square().mean((0, 2, 3)).cpu().double()
            predicted, worst = (errors[:, index] for errors in curve.errors(tail))
            well_above_rounding = mse > 3e-4 * power  # of the output to bfloat16, 3e-6
            torch.testing.assert_close(predicted[well_above_rounding], mse[well_above_rounding], rtol=0.03, atol=0)
            compared += int(well_above_rounding.sum())
            rows = compute_row_errors(out, truth)[0].amax(-1).cpu()
            assert (worst.square() <= rows.square() * 1.1 + 1e-4).all()  # squares, whose rounding is bounded
    assert compared >= 10


def test_the_plain_pass_agrees():
    """Full sort instead of buckets, full sums instead of edges: nearly the same density, errors within twice."""
    captured, method, shape = prompt(6000, 128), RankingConfig(512, 16), Shape(64, 512)
    ours, plain = (way.measure(captured, [method], [shape])[method, shape] for way in (kernel_pass, plain_pass))
    assert float((ours.density - plain.density).abs().max()) < 0.05
    for name in ("mse", "tail_mse"):
        mine, theirs = getattr(ours, name).mean(0), getattr(plain, name).mean(0)
        seen = theirs > 1e-4 * plain.dense_power
        assert float((mine[seen] / theirs[seen]).log2().abs().max()) < 1, name


def test_a_trace_costs_at_most_four_dense_calls():
    captured = prompt(32768, 128, 32, 8)
    shapes = [Shape(64, stride) for stride in (512, 1024, 2048)]
    dense = dense_attention(captured.q, captured.k, captured.v, scale=captured.scale)
    norms = compute_head_norms(dense)
    calls = {
        "dense": lambda: dense_attention(captured.q, captured.k, captured.v, scale=captured.scale),
        "trace": lambda: kernel_pass.trace_ranking(captured, RankingConfig(1024), shapes, dense, norms),
    }
    seconds = measure_medians(calls, torch.device("cuda"), 5)
    print(f"trace of 32768 tokens: {seconds['trace'] / seconds['dense']:.2f} dense calls")
    assert seconds["trace"] < 4 * seconds["dense"]
