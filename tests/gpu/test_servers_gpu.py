"""S2O's backends for vLLM and SGLang with the real kernels, between fakes of both servers and a dense backend."""

from dataclasses import replace

import pytest
import torch

from s2o_runtime.call import PLAIN
from s2o_runtime.config import TileConfig
from s2o_runtime.monitor.counters import Counters
from s2o_runtime.profile import save_profile
from s2o_runtime.quantisation import round_as_cached
from s2o_runtime.serving.fit import Rank
from s2o_runtime.serving.server import Server, ServerContext, Settings
from s2o_runtime.tiles import list_candidate_tiles
from support import fake_sglang, fake_vllm
from support.fake_server import FakeServer
from support.server_batches import alone, check_mixed_batches, served_profile

SERVERS = ["vllm", "sglang"]
DEVICE = {"dtype": torch.bfloat16, "device": "cuda"}


def served_tiles():
    """One of each kind that this GPU has; two tiles between stop checks, so that prefixes can stop more than once."""
    if not torch.cuda.is_available():
        return [TileConfig()]
    candidates = list_candidate_tiles(128, torch.cuda.get_device_capability())
    shapes = {(tile.block_m, tile.specialized): tile for tile in candidates}
    return [replace(tile, chunk=2, min_queries=200) for tile in shapes.values()]


TILES = pytest.mark.parametrize("tile", served_tiles(), ids=str)


def engine_of(server_name, server, **options):
    """A server's engine and what feeds it a batch: (engine, feed)."""
    if server_name == "vllm":
        engine = fake_vllm.FakeEngine(server, pages=2048, **DEVICE, **options)
        return engine, lambda parts: engine.feed(parts)[0]
    engine = fake_sglang.FakeEngine(server, slots=32768, width=8192, **DEVICE, **options)
    return engine, lambda parts: engine.feed(parts, fake_sglang.Mode.MIXED)


@TILES
@pytest.mark.parametrize(
    ("server_name", "layout"), [("vllm", "pages of two"), ("vllm", "side by side"), ("sglang", None)]
)
def test_mixed_batches_are_each_request_on_its_own(tile, server_name, layout, monkeypatch):
    monkeypatch.setattr(Counters, "is_sampled", lambda self, layer, is_prompt: True)
    server = FakeServer(served_profile(tile), Rank(), "cuda", 16384)
    engine, feed = engine_of(server_name, server, **({"layout": layout} if layout else {}))
    decoding_first = ("decoding", "tailing", "first", "second")  # as vLLM orders a batch
    check_mixed_batches(engine, decoding_first if layout else ("first", "second", "decoding", "tailing"), feed)
    if server_name == "sglang":
        return
    seconds = server.counters.seconds()
    assert set(seconds) == set(server.counters.timed) == {(0, "s2o"), (0, "dense")}
    assert all(1e-5 < mean < 10 for mean in seconds.values())
    assert server.counters.densities() == {0: pytest.approx(float(server.counters.sampled[0].density.mean()))}


@TILES
@pytest.mark.parametrize("server_name", SERVERS)
@pytest.mark.parametrize("fp8", [False, True], ids=["16-bits", "fp8"])
def test_a_layer_passes_its_self_test_and_reads_its_cache(tile, server_name, fp8):
    """Of 8 bits it gives what keys and values that were rounded beforehand give."""
    profile = replace(served_profile(tile), record={"recipe": {"kv_cache_dtype": "fp8"}})
    server = FakeServer(profile, Rank(), "cuda", 8192, tested=False)
    engine, _ = engine_of(server_name, server, kv_cache_dtype="fp8" if fp8 else None)
    layer = server.fit.layers[0]
    first, second = engine.add(300), engine.add(4000)
    engine.outputs([(first, 300)])
    assert layer.tested
    assert not layer.rejected
    for _ in range(3):
        second.done = 0
        out = engine.outputs([(second, 4000)]).float()
    if fp8:
        second.keys, second.values = (round_as_cached(tensor, "fp8") for tensor in (second.keys, second.values))
    truth = alone(second, 4000, layer.config(4000)).out.float()
    assert float((out - truth).square().mean() / truth.square().mean()) <= 2e-5
    assert "s2o" in {path for path, _ in engine.counted()}


def test_the_profiling_run_reserves_and_compiles(tmp_path):
    made = served_profile(served_tiles()[0])
    save_profile(made, tmp_path / "p.safetensors")
    sizes = made.geometry
    config = type("Config", (), {
        "model_type": sizes.architecture, "num_hidden_layers": sizes.layers, "num_attention_heads": sizes.query_heads,
        "num_key_value_heads": sizes.kv_heads, "head_dim": sizes.head_dim,
    })  # fmt: skip
    context = ServerContext("0", "STOCK", config, None, Rank(), torch.device("cuda"), max_keys=32768, chunk=8192)
    server = Server(Settings(tmp_path / "p.safetensors", strict=False), context)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    server.reserve(torch.empty(8192, 8, 128, **DEVICE), PLAIN)
    assert 1e10 < server.fit.host_flops < 1e13  # 5 times 20 us to 2 ms, of 1e14 to 1e15 operations a second
    taken = torch.cuda.max_memory_allocated() - before
    engine_server = FakeServer(made, Rank(), "cuda", 32768)
    engine = fake_vllm.FakeEngine(engine_server, pages=4096, **DEVICE)
    request = engine.add(32768)
    for layer in engine_server.fit.layers:
        layer.max_length = None
    engine.cache.normal_()  # what an earlier part of the prompt would have left
    request.done = 32768 - 8192
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine.feed([(request, 8192)])
    needed = torch.cuda.max_memory_allocated() - before
    assert needed <= 1.2 * taken, f"reserved {taken >> 20} MiB, 8192 rows behind 32768 keys take {needed >> 20} MiB"
