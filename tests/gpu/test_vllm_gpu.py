"""S2O's backend for vLLM with the real kernels, between a fake of vLLM's classes and the plain backend."""

import pytest
import torch

from s2o_runtime.monitor.counters import Counters
from s2o_runtime.profile import save_profile
from s2o_runtime.serving.fit import Rank
from s2o_runtime.serving.server import Server, ServerContext, Settings
from support.fake_server import FakeServer
from support.fake_vllm import FakeEngine
from support.server_batches import check_last_rows, check_mixed_batches, served_profile, served_tiles


@pytest.mark.parametrize("layout", ["pages of two", "side by side"])
@pytest.mark.parametrize("tile", served_tiles(), ids=str)
def test_mixed_batches_are_each_request_on_its_own(tile, layout, monkeypatch):
    monkeypatch.setattr(Counters, "is_sampled", lambda self, layer, is_prompt: True)
    server = FakeServer(served_profile(tile), Rank(), "cuda", 16384)
    engine = FakeEngine(server, torch.bfloat16, "cuda", layout=layout, pages=2048)
    # as vLLM orders a batch
    check_mixed_batches(engine, ("decoding", "tailing", "first", "second"), lambda parts: engine.feed(parts)[0])
    seconds = server.counters.seconds()
    assert set(seconds) == set(server.counters.timed) == {(0, "s2o"), (0, "dense")}
    assert all(1e-5 < mean < 10 for mean in seconds.values())
    assert server.counters.densities() == {0: pytest.approx(float(server.counters.sampled[0].density.mean()))}


@pytest.mark.parametrize("tile", served_tiles(), ids=str)
def test_last_rows_are_exact(tile):
    server = FakeServer(served_profile(tile, last_rows=256), Rank(), "cuda", 16384)
    engine = FakeEngine(server, pages=2048, dtype=torch.bfloat16, device="cuda", ends=True)
    check_last_rows(engine, lambda parts: engine.feed(parts)[0])


def test_the_profiling_run_reserves_and_compiles(tmp_path):
    made = served_profile(served_tiles()[0])
    save_profile(made, tmp_path / "p.safetensors")
    sizes = made.geometry
    config = type("Config", (), {
        "model_type": sizes.architecture, "num_hidden_layers": sizes.layers, "num_attention_heads": sizes.query_heads,
        "num_key_value_heads": sizes.kv_heads, "head_dim": sizes.head_dim,
    })  # fmt: skip
    context = ServerContext("0", "STOCK", config, None, Rank(), torch.device("cuda"), max_keys=32768)
    server = Server(Settings(tmp_path / "p.safetensors", strict=False), context)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    query = torch.empty(8192, 8, 128, dtype=torch.bfloat16, device="cuda")
    server.reserve(query)
    taken = torch.cuda.max_memory_allocated() - before
    engine_server = FakeServer(made, Rank(), "cuda", 32768)
    engine = FakeEngine(engine_server, pages=4096, dtype=torch.bfloat16, device="cuda")
    request = engine.add(32768)
    for layer in engine_server.fit.layers:
        layer.max_length = None
    engine.cache.normal_()  # what an earlier part of the prompt would have left
    request.done = 32768 - 8192
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine.feed([(request, 8192)])
    needed = torch.cuda.max_memory_allocated() - before
    print(f"reserved {taken >> 20} MiB, a step of 8192 rows behind 32768 keys takes {needed >> 20} MiB")
    assert needed <= 1.2 * taken
