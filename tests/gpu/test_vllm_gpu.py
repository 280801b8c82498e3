"""S2O's backend for vLLM with the real kernels, between a fake of vLLM's classes and the plain backend."""

import pytest
import torch

from s2o_runtime import LayerConfig, s2o_attention
from s2o_runtime.config import HeadConfig, TileConfig
from s2o_runtime.devices import identify
from s2o_runtime.identity import Geometry
from s2o_runtime.profile import Profile, save_profile
from s2o_runtime.reference.dense import exact_attention
from s2o_runtime.tiles import candidate_tiles
from s2o_runtime.vllm.fit import Rank
from s2o_runtime.vllm.server import Server, Site
from s2o_runtime.vllm.settings import Settings
from scripts.bench.fake_vllm import FakeEngine, FakeServer

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
    return [TileConfig(**{**vars(tile), "min_queries": FEWEST}) for tile in shapes.values()]


def alone(request, count, config):
    end = request.done
    q, k, v = (
        tensor[begin:end].transpose(0, 1)[None]
        for tensor, begin in ((request.queries, end - count), (request.keys, 0), (request.values, 0))
    )
    return s2o_attention(q, k, v, config, scale=HEAD_DIM**-0.5, backend="triton")[0].transpose(0, 1)


def dense(request, count):
    end = request.done
    q, k, v = request.queries[end - count : end], request.keys[:end], request.values[:end]
    return exact_attention(*(tensor.transpose(0, 1)[None] for tensor in (q, k, v)))[0].transpose(0, 1)


@pytest.mark.parametrize("layout", ["two caches", "pages of two", "side by side"])
@pytest.mark.parametrize("tile", tiles(), ids=str)
def test_mixed_batches_are_each_request_on_its_own(tile, layout):
    """Sparse rows bit for bit what the op gives on contiguous tensors; the others exact up to bf16."""
    server = FakeServer(profile(tile), Rank(), "cuda", 16384)
    engine = FakeEngine(server, layout, pages=2048, dtype=torch.bfloat16, device="cuda")
    decoding, tailing, first, second = (engine.add(length) for length in (2000, 1501, 3000, 3010))
    for _ in range(3):  # kernels are compiled, recorded and replayed
        for request in (decoding, tailing, first, second):
            request.done = 0
        engine.feed([(decoding, 1999), (tailing, 1400), (first, 1000), (second, 1010)])
        out, _ = engine.feed([(decoding, 1), (tailing, 101), (first, 2000), (second, 2000)])
        config, begin = server.fit.layers[0].config(3010), 0
        for request, count, sparse in (
            (decoding, 1, False),
            (tailing, 101, False),
            (first, 2000, True),
            (second, 2000, True),
        ):
            ours = out[begin : begin + count]
            if sparse:
                assert torch.equal(ours, alone(request, count, config))
            else:
                torch.testing.assert_close(ours.float(), dense(request, count).float(), rtol=2e-2, atol=2e-2)
            begin += count
    paths = {path: rows for (_, path, _), rows in server.counters.rows.items() if path == "s2o"}
    assert paths == {"s2o": server.counters.rows.total() - sum(
        rows for (_, path, _), rows in server.counters.rows.items() if path == "dense"
    )}  # fmt: skip
    assert 0 < next(iter(server.counters.densities().values())) < 1


def test_the_profiling_run_reserves_and_compiles(tmp_path):
    made = profile(tiles()[0])
    save_profile(made, tmp_path / "p.safetensors")
    sizes = made.geometry
    config = type("Config", (), {
        "model_type": sizes.architecture, "num_hidden_layers": sizes.layers, "num_attention_heads": sizes.query_heads,
        "num_key_value_heads": sizes.kv_heads, "head_dim": sizes.head_dim,
    })  # fmt: skip
    site = Site("0", "STOCK", config, None, Rank(), torch.device("cuda"), max_keys=32768)
    server = Server(Settings(tmp_path / "p.safetensors"), site)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    query = torch.empty(8192, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    server.reserve(query)
    taken = torch.cuda.max_memory_allocated() - before
    engine_server = FakeServer(made, Rank(), "cuda", 32768)
    engine = FakeEngine(engine_server, pages=4096, dtype=torch.bfloat16, device="cuda")
    request = engine.add(32768)
    engine_server.fit.max_length = None
    engine.cache.normal_()  # what an earlier part of the prompt would have left
    request.done = 32768 - 8192
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine.feed([(request, 8192)])
    needed = torch.cuda.max_memory_allocated() - before
    print(f"reserved {taken >> 20} MiB, a step of 8192 rows behind 32768 keys takes {needed >> 20} MiB")
    assert needed <= 1.2 * taken
