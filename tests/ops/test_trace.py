"""The trace kernel in the interpreter: at every threshold and spacing, what running the kernels there gives."""

from dataclasses import replace

import pytest
import torch

from s2o_runtime.config import LayerConfig, TileConfig
from s2o_runtime.kernels.prefill import run_prefill
from s2o_runtime.kernels.trace import STRIDES, trace
from s2o_runtime.reference.dense import exact_attention
from support.kernels import call_of, inputs
from support.marks import INTERPRETED

pytestmark = INTERPRETED

SLOW = pytest.mark.slow(reason="runs the kernels in Triton's interpreter at every threshold and spacing")
EXHAUSTIVE = pytest.mark.exhaustive(reason="further settings of that, half a minute each")
TILE = TileConfig(block_m=64, block_n=32, chunk=1, num_warps=4, num_stages=1)
TAUS = [0.01, 2.0, 0.3, 50.0]


@pytest.mark.parametrize(
    ("length", "segment", "representatives", "softcap", "sinks", "scores", "taus"),
    [
        pytest.param(170, 64, 16, 4.0, [2.0, 4.0], "input", TAUS[:2], marks=SLOW, id="cap-sinks"),
        pytest.param(450, 128, 1, None, None, "input", TAUS, marks=EXHAUSTIVE, id="S128"),
        pytest.param(301, 64, 16, None, None, "input", TAUS, marks=EXHAUSTIVE, id="S64-r16"),
        pytest.param(301, 64, 16, None, [2.0, 4.0], "int8", TAUS, marks=EXHAUSTIVE, id="int8"),
    ],
)
def test_a_trace_is_every_run_at_once(length, segment, representatives, softcap, sinks, scores, taus):
    q, k, v = inputs(1, 2, 1, length, length, 64)
    k = k * torch.rand(length, 1).square() * 3  # some keys matter, most do not
    kind = {"segment": segment, "representatives": representatives, "scores": scores}
    config = LayerConfig.uniform(2, tail="mean", tile=TILE, **kind)
    sinks = None if sinks is None else torch.tensor(sinks)
    features = {"softcap": softcap, "sinks": sinks}
    truth = exact_attention(q, k, v, scale=0.125, **features)
    norms = truth.square().sum(-1)
    floor = norms.mean(-1)[0]
    slices = list(trace(call_of(q, k, v, config, **features), truth, floor, torch.tensor(taus)))
    assert [each.rows for each in slices] == [range(length)]
    traced = slices[0]
    (part,) = trace(call_of(q, k, v, config, **features), truth, floor, torch.tensor(taus), [range(segment, length)])
    for ours, whole in zip(part[1:], traced[1:], strict=True):  # of some rows it is what it is of all
        assert torch.equal(ours, whole[:, :, segment // TILE.block_m :])
    tiles = -(-length // TILE.block_m)
    size = torch.maximum(norms, floor[:, None])
    distinct = set()
    for s in range(STRIDES):
        for t, tau in enumerate(taus):
            for tail in ("none", "mean"):
                run = LayerConfig.uniform(2, tau=tau, tail=tail, tile=replace(TILE, chunk=1 << s), **kind)
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
