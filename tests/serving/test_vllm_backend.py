"""S2O's backend between a fake of vLLM's classes and the plain backend: what is vLLM's alone."""

from dataclasses import replace

import pytest
import torch

from s2o_runtime.attention import replay
from s2o_runtime.attention.replay import find_repeated_call
from s2o_runtime.errors import InputError
from s2o_runtime.monitor import counters
from s2o_runtime.monitor.counters import EARLY, SAMPLED_EVERY, Counters
from s2o_runtime.monitor.drift import DriftCheck, DriftMonitor, ErrorLimits
from s2o_runtime.serving.fit import Rank, find_layer_obstacle
from s2o_runtime.vllm.backend import BATCH
from s2o_runtime.vllm.batch import get_pages
from support.fake_server import FakeServer
from support.fake_vllm import FakeEngine, Graphs, fake_backend
from support.server_batches import all_dense, alone, dense, joint_density, two_layers

HEADS, HEAD_DIM = 4, 64


def server(max_keys=2048, rank=None, **options):
    return FakeServer(two_layers(**options), rank or Rank(), "cpu", max_keys)


def test_prompts_of_nearby_lengths_are_calls_that_are_alike(monkeypatch):
    """So that a server replays launches though no two prompts are equally long."""
    calls = []

    def kept(*arguments, **named):
        calls.append(find_repeated_call(*arguments, **named))
        return calls[-1]

    monkeypatch.setattr(replay, "find_repeated_call", kept)
    engine = FakeEngine(server())
    requests = [engine.add(length) for length in (305, 312, 336)]
    outputs = [engine.feed([(request, len(request))])[0] for request in requests]
    for request, out in zip(requests, outputs, strict=True):
        config = engine.server.fit.layers[0].config(len(request))
        torch.testing.assert_close(out, alone(request, len(request), config).out, rtol=1e-4, atol=1e-5)
    assert calls[0] is calls[1]
    assert calls[1] is not calls[2]


def test_a_sparse_slices_call_has_shared_bounds_and_its_own_requests():
    engine = FakeEngine(server())
    requests = [engine.add(length) for length in (200, 300, 305)]
    engine.feed([(request, 190) for request in requests[1:]])
    engine.outputs([(requests[0], 200), (requests[1], 110), (requests[2], 115)])
    batch = getattr(engine.metadata, BATCH)
    whole, behind = (part for part in engine.slices() if part.is_sparse)
    call = batch.get_call(whole, engine.page_size)
    assert call["cu_k"] is call["cu_q"]  # a whole prompt: nothing more to compute
    assert call["cu_q"].tolist() == [0, 200]
    assert (call["max_q"], call["max_k"], call["total_k"]) == (256, 256, 256)
    call = batch.get_call(behind, engine.page_size)
    assert call["cu_q"].tolist() == [0, 110, 225]
    assert call["cu_k"].tolist() == [0, 300, 605]
    assert (call["max_q"], call["max_k"], call["total_k"]) == (128, 320, 640)
    assert call["block_table"].data_ptr() % 16 == 0  # the batch's second row does not begin so
    assert torch.equal(call["block_table"], engine.metadata.block_table[1:3])
    assert batch.get_call(behind, engine.page_size) is call


def test_the_density_of_a_sampled_call_is_that_of_its_requests():
    """Of one of 256 sparse calls, here a run of two prompts of unlike lengths, counted row by row."""
    engine = FakeEngine(server())
    engine.server.counters.calls[0], engine.server.counters.prompts[0] = SAMPLED_EVERY, EARLY
    requests = [engine.add(300), engine.add(305)]
    engine.feed([(request, len(request)) for request in requests])
    config = engine.server.fit.layers[0].config(300)
    expected = joint_density([(request, len(request)) for request in requests], config)
    kept = engine.server.counters.sampled[0].density
    torch.testing.assert_close(kept, expected)
    assert kept[-1] < kept[0] < 1  # heads of a larger tau stop earlier
    assert engine.server.counters.densities() == {0: pytest.approx(float(expected.mean()))}
    engine.feed([(engine.add(400), 400)])  # is not sampled
    assert engine.server.counters.sampled[0].density is not kept
    torch.testing.assert_close(engine.server.counters.sampled[0].density, expected)


@pytest.mark.parametrize("last_rows", [0, 128])
def test_layers_of_another_cache_group_read_its_pages(last_rows):
    """The batch is the same, their keys lie in other pages; of a prompt with last rows there are two requests."""
    profile = two_layers()
    layers = tuple(tuple(replace(layer, last_rows=last_rows) for layer in bucket) for bucket in profile.layers)
    engine = FakeEngine(FakeServer(replace(profile, layers=layers), Rank(), "cpu", 2048), ends=True)
    request = engine.add(600)
    prepared = engine.prepare([(request, 600)])
    expected = prepared.forward()
    other = torch.tensor(engine.free[: len(request.pages)])
    engine.cache[other] = engine.cache[request.pages].clone()
    engine.cache[request.pages] = float("nan")
    prepared.metadata = engine.builder.update_block_table(prepared.metadata, other[None].int(), None)
    torch.testing.assert_close(prepared.forward(), expected, rtol=1e-5, atol=1e-6)
    assert engine.impl.stock_rows == 2 * last_rows


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"causal": False}, "the batch is not causal"), ({"mm_req_doc_ranges": {0: [(0, 4)]}}, "rows of an image")],
)
def test_batches_that_cannot_be_shared_are_the_stock_backends_and_counted(change, reason):
    engine = FakeEngine(server())
    request = engine.add(300)
    prepared = engine.prepare([(request, 300)])
    built = None
    for _ in range(2):
        engine.server.counters = Counters()
        if built is None:
            built = engine.builder.build(0, replace(engine.builder.built[0], **change))
        else:  # of layers of another group
            built = engine.builder.update_block_table(built, built.block_table, built.slot_mapping)
        prepared.metadata = built
        torch.testing.assert_close(prepared.forward(), dense(request, 300), rtol=1e-4, atol=1e-5)
        ((layer, path, said),) = engine.server.counters.rows
        assert (layer, path) == (0, "dense")
        assert said.startswith(reason)
        assert engine.server.counters.rows[layer, path, said] == 300


def test_batches_that_decode_are_not_planned_even_where_all_is_dense():
    engine = FakeEngine(FakeServer(all_dense(), Rank(), "cpu", 2048))
    request = engine.add(300)
    engine.feed([(request, 299)])
    _, metadata = engine.feed([(request, 1)])
    assert not hasattr(metadata, BATCH)
    assert engine.server.counters.rows == {(0, "dense", "every layer of the profile is dense"): 299}


def test_decoder_layers_get_their_own_rows_of_the_profile():
    """In a model whose layers 1 and 3 alone have full attention."""
    shared = server(layer_numbers=(1, 3))
    config = shared.fit.layers[0].config(300)
    for number in range(4):
        engine = FakeEngine(shared)
        request = engine.add(300)
        out, _ = engine.feed([(request, 300)], layer=number)
        expected = alone(request, 300, config).out if number == 1 else dense(request, 300)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert shared.counters.rows == {
        (0, "dense", "the layer is none of the profile's"): 300,
        (1, "s2o", "reference backend, no GPU"): 300,
        (2, "dense", "the layer is none of the profile's"): 300,
        (3, "dense", "every head of the layer is dense"): 300,
    }
    assert set(shared.counters.sampled) == {1}


def test_pages_that_the_op_does_not_take_are_the_stock_backends():
    shared = server()
    engine = FakeEngine(shared, page_size=2048, pages=2)
    request = engine.add(300)
    out, _ = engine.feed([(request, 300)])
    torch.testing.assert_close(out, dense(request, 300), rtol=1e-4, atol=1e-5)
    assert shared.counters.rows == {(0, "dense", "pages have 2048 tokens, more than 1024"): 300}


@pytest.mark.parametrize(("action", "path"), [("warn", "s2o"), ("dense", "dense")])
def test_a_layer_past_its_budget_is_noticed(action, path, monkeypatch):
    """Sampled calls are compared with dense attention; with action "dense" the layer runs dense from then on."""
    monkeypatch.setattr(counters.Counters, "is_sampled", lambda self, layer, is_prompt: True)
    shared = server(tau=1e5)
    layer = shared.fit.layers[0]
    check = DriftCheck(every=1, after=2, action=action)
    layer.drift = shared.counters.drift[0] = DriftMonitor(check, 0, ErrorLimits("rel_mse", {300: 1e-9}))
    for _ in range(3):
        engine = FakeEngine(shared)
        request = engine.add(300)
        engine.feed([(request, 300)])
    assert shared.counters.errors()[0] > check.margin
    assert "of what is allowed" in shared.counters.summary()
    assert "times what the profile allows" in layer.drift.verdict
    shared.counters = Counters()
    engine = FakeEngine(shared)
    out, _ = engine.feed([(engine.add(300), 300)])
    ((_, taken, _),) = shared.counters.rows
    assert taken == path
    if path == "dense":
        torch.testing.assert_close(out, dense(engine.requests[0], 300), rtol=1e-4, atol=1e-5)


def test_the_profiling_run_reserves_what_calls_will_need():
    engine = FakeEngine(server())
    output = torch.ones(5, HEADS, HEAD_DIM)
    layer = type("Layer", (), {"layer_name": "model.layers.0"})
    engine.impl.forward(layer, output, output, output, torch.empty(0), None, output)
    assert engine.server.reserved == 1
    assert not output.any()


@pytest.mark.parametrize(
    ("made_with", "reason"),
    [
        ({}, None),
        ({"sliding_window": 1024}, "the layer sees a sliding window of 1024 keys"),
        ({"soft_cap": 50.0}, "the scores are soft-capped at 50"),
        ({"soft_cap": 0.0}, None),
        ({"sinks": True}, "the layer has attention sinks"),
        ({"alibi": True}, "the layer has ALiBi slopes"),
        ({"attn_type": "encoder_only"}, "the layer's attention is of type encoder_only"),
    ],
)
def test_features_that_s2o_lacks_are_a_reason(made_with, reason):
    assert find_layer_obstacle(**made_with) == reason


def test_what_vllm_asks_of_the_backend():
    backend = fake_backend(server())
    builder = backend.get_builder_cls()
    assert backend.get_name() == "S2O"
    assert not backend.supports_batch_invariance()
    assert not backend.supports_device_cpu_query_lens_mismatch()  # the stock backend's would be inherited
    assert builder.get_cudagraph_support() is Graphs.UNIFORM_BATCH
    assert not builder().use_cascade_attention(1, 2, three=3)


@pytest.mark.parametrize("shape", [(5, 2, 4, 3, 8), (5, 3, 4, 16)])
def test_layouts_are_known_by_the_shape_of_the_cache(shape):
    k, v = get_pages(torch.arange(2 * 5 * 4 * 3 * 8).view(shape), 3, 8)
    assert k.shape == v.shape == (5, 4, 3, 8)
    assert not set(k.flatten().tolist()) & set(v.flatten().tolist())


@pytest.mark.parametrize("shape", [(5, 4, 3), (2, 5, 4, 3, 8), (5, 4, 3, 16)])
def test_caches_of_another_shape_are_the_stock_backends(shape):
    with pytest.raises(InputError, match=r"the KV cache has shape \(.*expected \[pages, 3, page size, 16\] or"):
        get_pages(torch.zeros(shape), 3, 8)
    impl = FakeEngine(server()).impl
    assert impl._find_cache_obstacle(None, torch.zeros(shape)).startswith(f"the KV cache has shape {shape}")
