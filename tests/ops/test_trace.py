"""The trace kernel: at every threshold and spacing, what running the kernels there gives; its pass costs little."""

from dataclasses import replace

import pytest
import torch

from calibrate.curves import trace_pass as kernel_pass
from calibrate.curves.curves import TAUS, RankingConfig, Shape, compute_head_norms, compute_row_errors
from calibrate.model.layers import Captured
from calibrate.timing import measure_medians
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.config import HeadConfig, LayerConfig
from s2o_runtime.kernels.prefill import run_prefill
from s2o_runtime.kernels.trace import STRIDES, trace
from s2o_runtime.reference.dense import dense_attention, exact_attention
from s2o_runtime.tiles import list_candidate_tiles
from support.kernels import DTYPE, TILE, call_of, inputs
from support.marks import COMPILED, INTERPRETED, pairwise

SLOW = pytest.mark.slow(reason="runs the kernels in Triton's interpreter at every threshold and spacing")
EXHAUSTIVE = pytest.mark.exhaustive(reason="further settings of that, half a minute each")
CHECKED = replace(TILE, chunk=1)
SOME_TAUS = [0.01, 2.0, 0.3, 50.0]


@INTERPRETED
@pytest.mark.parametrize(
    ("length", "segment", "representatives", "softcap", "sinks", "taus"),
    [
        pytest.param(270, 64, 16, 4.0, [2.0, 4.0], SOME_TAUS[:2], marks=SLOW, id="cap-sinks"),
        pytest.param(450, 128, 1, None, None, SOME_TAUS, marks=EXHAUSTIVE, id="S128"),
    ],
)
def test_a_trace_is_every_run_at_once(length, segment, representatives, softcap, sinks, taus):
    q, k, v = 2 * torch.randn(1, 2, length, 64), torch.randn(1, 1, length, 64), torch.randn(1, 1, length, 64)
    k = k * torch.rand(length, 1).square() * 3  # some keys matter, most do not
    kind = {"segment": segment, "representatives": representatives, "lookback": 64}
    config = LayerConfig.uniform(2, tail="mean", tile=CHECKED, **kind)
    features = {"softcap": softcap, "sinks": None if sinks is None else torch.tensor(sinks)}
    truth = exact_attention(q, k, v, **features)
    norms = truth.square().sum(-1)
    floor = norms.mean(-1)[0]
    (traced,) = trace(call_of(q, k, v, config, **features), truth, floor, torch.tensor(taus))
    assert traced.rows == range(length)
    (part,) = trace(call_of(q, k, v, config, **features), truth, floor, torch.tensor(taus), [range(segment, length)])
    for ours, whole in zip(part[1:], traced[1:], strict=True):  # of some rows it is what it is of all
        assert torch.equal(ours, whole[:, :, segment // CHECKED.block_m :])
    tiles = -(-length // CHECKED.block_m)
    size = torch.maximum(norms, floor[:, None])
    distinct = set()
    for s in range(STRIDES):
        for t, tau in enumerate(taus):
            for tail in ("none", "mean"):
                run = LayerConfig.uniform(2, tau=tau, tail=tail, tile=replace(CHECKED, chunk=1 << s), **kind)
                out, visited, _ = run_prefill(call_of(q, k, v, run, **features))
                off = (out - truth).square().sum(-1)
                filled = torch.nn.functional.pad(torch.stack([off, off / size]), (0, tiles * 64 - length))
                squared, worst = filled.view(2, 2, tiles, 64).unbind()
                assert torch.equal(traced.visited[s, :, :, t], visited[0].float())
                mine = (traced.squared, traced.worst) if tail == "none" else (traced.tail_squared, traced.tail_worst)
                torch.testing.assert_close(mine[0][s, :, :, t], squared.sum(-1), rtol=1e-3, atol=1e-6)
                torch.testing.assert_close(mine[1][s, :, :, t], worst.amax(-1), rtol=1e-3, atol=1e-8)
                distinct.add((tuple(visited.flatten().tolist()), tail))
    assert len(distinct) > len(taus)


def prompt(length, head_dim, heads=8, kv_heads=2, **features):
    q, k, v = inputs(1, heads, kv_heads, length, length, head_dim)
    return Captured(q, k, v, head_dim**-0.5 / 2, **features)  # flat, so that stopping leaves something out


METHODS = [RankingConfig(512), RankingConfig(256, 16, 256), RankingConfig(1024, 16)]
CASES = pairwise(METHODS, [(5000, 128, False), (3333, 64, False), (4096, 96, False)], [64, 128])
CASES += [(RankingConfig(512, 16), 4001, 64, True, 64), (RankingConfig(512, 16), 4001, 128, True, 128)]


@COMPILED
@pytest.mark.parametrize(("method", "length", "head_dim", "featured", "block_m"), CASES)
def test_a_curve_is_what_the_kernels_do(method, length, head_dim, featured, block_m):
    """At every fourth threshold: density to the pair, mean error within 3%, the worst tiles' error within 10%."""
    sinks = torch.linspace(-2.0, 12.0, 8, dtype=DTYPE, device="cuda")
    captured = prompt(length, head_dim, **({"softcap": 8.0, "sinks": sinks} if featured else {}))
    tiles = list_candidate_tiles(head_dim, torch.cuda.get_device_capability())
    tile = next(tile for tile in tiles if tile.block_m == block_m)
    if method.segment % tile.rows:
        pytest.skip("the tile's rows do not divide the segment")
    curve = kernel_pass.measure(captured, [method], [Shape.from_tile(tile)])[method, Shape.from_tile(tile)]
    tensors, scoring = (captured.q, captured.k, captured.v), captured.scoring.arguments()
    truth = exact_attention(*tensors, **scoring)
    power = float(truth.square().mean())
    assert curve.dense_power == pytest.approx(power, rel=1e-3)
    compared = 0
    for index in range(0, len(TAUS), 4):
        for tail in ("none", "mean"):
            head = HeadConfig(TAUS[index], method.segment, representatives=method.representatives, tail=tail)
            config = LayerConfig((head,) * 8, tile, method.lookback)
            out, _, stats = s2o_attention(*tensors, config, return_stats=True, backend="triton", **scoring)
            torch.testing.assert_close(curve.density[:, index], stats.density.cpu(), rtol=2e-3, atol=1e-3)
            mse = (out.float() - truth).square().mean((0, 2, 3)).cpu().double()
            predicted, worst = (errors[:, index] for errors in curve.errors(tail))
            well_above_rounding = mse > 3e-4 * power  # of the output to bfloat16, 3e-6
            torch.testing.assert_close(predicted[well_above_rounding], mse[well_above_rounding], rtol=0.03, atol=0)
            compared += int(well_above_rounding.sum())
            rows = compute_row_errors(out, truth)[0].amax(-1).cpu()
            assert (worst.square() <= rows.square() * 1.1 + 1e-4).all()  # squares, whose rounding is bounded
    assert compared >= 10


@COMPILED
def test_a_trace_costs_at_most_four_dense_calls():
    captured = prompt(32768, 128, 32, 8)
    shapes = [Shape(64, stride) for stride in (512, 1024, 2048)]

    def dense():
        return dense_attention(captured.q, captured.k, captured.v, scale=captured.scale)

    norms, output = compute_head_norms(dense()), dense()
    calls = {"dense": dense}
    calls["trace"] = lambda: kernel_pass.trace_ranking(captured, RankingConfig(1024), shapes, output, norms)
    seconds = measure_medians(calls, torch.device("cuda"), 5)
    assert seconds["trace"] < 4 * seconds["dense"], seconds
