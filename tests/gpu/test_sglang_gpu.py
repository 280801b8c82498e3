"""S2O's backend for SGLang with the real kernels, between a fake of SGLang's classes and a dense backend."""

from dataclasses import replace

import pytest
import torch

from s2o_runtime import LayerConfig
from s2o_runtime.config import HeadConfig, TileConfig
from s2o_runtime.devices import identify
from s2o_runtime.identity import Geometry
from s2o_runtime.monitor.counters import Counters
from s2o_runtime.profile import Profile
from s2o_runtime.serving.fit import Rank
from s2o_runtime.tiles import candidate_tiles
from support.fake_sglang import FakeEngine, Mode
from support.fake_vllm import FakeServer
from support.server_batches import alone, dense, joint_density

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 128
FEWEST = 200  # queries


def profile(tile):
    heads = tuple(HeadConfig(0.2 * (1 + index), 256, representatives=8, tail=index % 2 == 0) for index in range(HEADS))
    config = LayerConfig(heads, tile, grain=4)
    device = identify(torch.device("cuda"))
    geometry = Geometry("llama", 2, HEADS, KV_HEADS, HEAD_DIM)
    return Profile("made", geometry, "", device, (1024, 4096), ((config, config),) * 2).validate()


def tiles():
    if not torch.cuda.is_available():
        return [TileConfig()]
    shapes = {
        (tile.block_m, tile.specialized): tile for tile in candidate_tiles(128, torch.cuda.get_device_capability())
    }
    # two tiles between stop checks, so that prefixes of 2000 keys can stop more than once
    return [replace(tile, chunk=2, min_queries=FEWEST) for tile in shapes.values()]


@pytest.mark.parametrize("tile", tiles(), ids=str)
def test_mixed_batches_are_each_request_on_its_own(tile, monkeypatch):
    """Sparse rows bit for bit what the op gives on contiguous tensors; the others exact up to bf16."""
    monkeypatch.setattr(Counters, "is_sampled", lambda self, layer: True)
    server = FakeServer(profile(tile), Rank(), "cuda", 16384)
    engine = FakeEngine(server, slots=32768, width=4112, dtype=torch.bfloat16, device="cuda")
    requests = first, second, decoding, tailing = [engine.add(length) for length in (3000, 3010, 2000, 1501)]
    for _ in range(3):  # kernels are compiled, recorded and replayed
        for request in requests:
            request.done = 0
        engine.feed([(first, 1000), (second, 1010), (decoding, 1999), (tailing, 1400)])
        parts = [(first, 2000, True), (second, 2000, True), (decoding, 1, False), (tailing, 101, False)]
        out = engine.feed([(request, count) for request, count, _ in parts], Mode.MIXED)
        config, begin = server.fit.layers[0].config(3010), 0
        for request, count, sparse in parts:
            ours = out[begin : begin + count]
            if sparse:
                assert torch.equal(ours, alone(request, count, config, "triton").out)
            else:
                torch.testing.assert_close(ours.float(), dense(request, count).float(), rtol=2e-2, atol=2e-2)
            begin += count
    rows = {(path, reason.split(",")[0]): count for (_, path, reason), count in server.counters.rows.items()}
    assert rows == {
        ("dense", "decode"): 3,
        ("dense", f"fewer than {FEWEST} queries behind a prefix"): 3 * 101,
        ("dense", "shorter than the shortest calibrated length"): 3 * (1000 + 1010),
        ("s2o", "the kernel supports this call"): 3 * (1999 + 1400 + 2000 + 2000),
    }
    # the last sampled call is the run of the two long prompts
    expected = joint_density([(first, 2000), (second, 2000)], config, "triton")
    kept = server.counters.sampled[0].density.cpu()
    torch.testing.assert_close(kept, expected, rtol=1e-9, atol=0)
    assert kept[-1] < 0.8 * kept[0] < 0.8  # heads of a larger tau stop earlier
