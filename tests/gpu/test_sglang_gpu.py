"""S2O's backend for SGLang with the real kernels, between a fake of SGLang's classes and a dense backend."""

import pytest
import torch

from s2o_runtime.monitor.counters import Counters
from s2o_runtime.serving.fit import Rank
from support.fake_server import FakeServer
from support.fake_sglang import FakeEngine, Mode
from support.server_batches import check_last_rows, check_mixed_batches, served_profile, served_tiles


@pytest.mark.parametrize("tile", served_tiles(), ids=str)
def test_mixed_batches_are_each_request_on_its_own(tile, monkeypatch):
    monkeypatch.setattr(Counters, "is_sampled", lambda self, layer, is_prompt: True)
    server = FakeServer(served_profile(tile), Rank(), "cuda", 16384)
    engine = FakeEngine(server, slots=32768, width=4112, dtype=torch.bfloat16, device="cuda")
    order = "first", "second", "decoding", "tailing"
    check_mixed_batches(engine, order, lambda parts: engine.feed(parts, Mode.MIXED))


@pytest.mark.parametrize("tile", served_tiles(), ids=str)
def test_last_rows_are_exact(tile):
    server = FakeServer(served_profile(tile, last_rows=256), Rank(), "cuda", 16384)
    engine = FakeEngine(server, slots=32768, width=4112, dtype=torch.bfloat16, device="cuda", ends=True)
    check_last_rows(engine, lambda parts: engine.feed(parts, Mode.EXTEND))
