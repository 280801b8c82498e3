"""S2O's backend for SGLang with the real kernels, between a fake of SGLang's classes and a dense backend."""

import pytest
import torch

from s2o_runtime.monitor.counters import Counters
from s2o_runtime.serving.fit import Rank
from support.fake_server import FakeServer
from support.fake_sglang import FakeEngine, Mode
from support.server_batches import alone, dense, joint_density, served_profile, served_tiles


@pytest.mark.parametrize("tile", served_tiles(), ids=str)
def test_mixed_batches_are_each_request_on_its_own(tile, monkeypatch):
    """Sparse rows bit for bit what the op gives on contiguous tensors; the others exact up to bf16."""
    monkeypatch.setattr(Counters, "is_sampled", lambda self, layer: True)
    server = FakeServer(served_profile(tile), Rank(), "cuda", 16384)
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
    rows = engine.counted()
    assert rows == {
        ("dense", "decode"): 3,
        ("dense", "fewer than 200 queries behind a prefix"): 3 * 101,
        ("dense", "shorter than the shortest calibrated length"): 3 * (1000 + 1010),
        ("s2o", "the kernel supports this call"): 3 * (1999 + 1400 + 2000 + 2000),
    }
    # the last sampled call is the run of the two long prompts
    expected = joint_density([(first, 2000), (second, 2000)], config, "triton")
    kept = server.counters.sampled[0].density.cpu()
    torch.testing.assert_close(kept, expected, rtol=1e-9, atol=0)
    assert kept[-1] < 0.8 * kept[0] < 0.8  # heads of a larger tau stop earlier
