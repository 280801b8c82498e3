"""The launcher of a compiled kernel on a GPU, called directly, against Triton's own launch."""

import pytest
import torch
import triton

from s2o_runtime import LayerConfig, TileConfig, s2o_attention
from s2o_runtime.attention.warmup import warmup
from s2o_runtime.kernels import launch as launch_module

HOPPER = TileConfig(64, 128, 2, 4, 2, specialized=True)
TILES = [pytest.param(TileConfig(64, 64, 2, 4, 2), id="plain"), pytest.param(HOPPER, id="hopper")]


@pytest.mark.parametrize("tile", TILES)
def test_a_direct_launch_is_tritons(tile, monkeypatch, nan_filled):
    """Every kernel of a prefill, with tails and several representatives: the same bits both ways.

    It calls the launcher whatever version of Triton is here, so run it to have a version join TESTED_TRITONS.
    """
    config = LayerConfig.uniform(8, tau=1.0, segment=256, representatives=16, tail="mean", tile=tile)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(2, 1500, heads, 128, generator=generator, device="cuda").bfloat16().transpose(1, 2)
        for heads in (8, 2, 2)
    )
    starts = torch.tensor([0, 333], device="cuda")
    launched = []

    def call():
        return s2o_attention(q, k, v, config, kv_start=starts, backend="triton", return_lse=True)

    # no call may become a plan, which would not launch through `launch`, or be recorded, which takes the listener
    monkeypatch.setattr("s2o_runtime.attention.replay.RepeatedCall.make_recorder", lambda repeated, inputs: None)
    monkeypatch.setattr(launch_module, "_compiled", {})
    monkeypatch.setattr(launch_module, "_is_tested", lambda version: False)
    expected = call()
    assert not launch_module._compiled
    monkeypatch.setattr(launch_module, "_is_tested", lambda version: True)
    call()  # through Triton, and kept
    kept = len(launch_module._compiled)
    assert kept >= 6  # means, log-sums, scores, order, pooled values, tail sums, prefill
    monkeypatch.setattr(
        launch_module.observed, "listener", lambda compiled, *rest: launched.append(compiled is not None)
    )
    out = call()
    monkeypatch.setattr(launch_module.observed, "listener", None)
    torch.cuda.synchronize()
    assert launched
    assert all(launched), f"launches of Triton {triton.__version__} went through its binder"
    assert len(launch_module._compiled) == kept
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(out[:2], expected[:2], strict=True))


@pytest.mark.parametrize("tile", TILES)
def test_this_triton_is_tested(tile):
    """Kept kernels are what plans are made of: without them every call pays for Triton's binder."""
    if not launch_module._is_tested(triton.__version__):
        pytest.skip(f"Triton {triton.__version__} is not in TESTED_TRITONS: {launch_module.TESTED_TRITONS}")
    before = len(launch_module._compiled)
    warmup(LayerConfig.uniform(4, tau=0.5, segment=192 if tile.rows == 64 else 384, tile=tile), kv_heads=1, head_dim=64)
    assert len(launch_module._compiled) > before
