"""S2O's backend between a fake of vLLM's classes and the plain backend: what is vLLM's alone."""

from dataclasses import replace

import pytest
import torch

from s2o_runtime.attention import replay
from s2o_runtime.attention.replay import find_repeated_call
from s2o_runtime.errors import InputError
from s2o_runtime.monitor.counters import EARLY, SAMPLED_EVERY, Counters
from s2o_runtime.monitor.drift import DriftCheck, DriftMonitor, ErrorLimits
from s2o_runtime.serving.fit import Rank
from s2o_runtime.vllm.backend import BATCH, get_pages
from support.fake_server import FakeServer
from support.fake_vllm import FakeEngine, Graphs, fake_backend
from support.server_batches import all_dense, alone, check_close, dense, joint_density, two_layers, with_last_rows

HEADS, HEAD_DIM = 4, 64


def engine_of(profile=None, **options):
    return FakeEngine(FakeServer(profile or two_layers(), Rank(), "cpu", 2048), **options)


def test_prompts_of_nearby_lengths_are_calls_that_are_alike(monkeypatch):
    """So that a server replays launches though no two prompts are equally long."""
    calls = []

    def kept(*arguments, **named):
        calls.append(find_repeated_call(*arguments, **named))
        return calls[-1]

    monkeypatch.setattr(replay, "find_repeated_call", kept)
    engine = engine_of()
    requests = [engine.add(length) for length in (305, 312, 336)]
    outputs = [engine.outputs([(request, len(request))]) for request in requests]
    for request, out in zip(requests, outputs, strict=True):
        check_close(out, alone(request, len(request), engine.server.fit.layers[0].config(len(request))).out)
    assert calls[0] is calls[1]
    assert calls[1] is not calls[2]


def test_a_sparse_slices_call_has_shared_bounds_and_its_own_requests():
    engine = engine_of()
    requests = [engine.add(length) for length in (200, 300, 305)]
    engine.feed([(request, 190) for request in requests[1:]])
    engine.outputs([(requests[0], 200), (requests[1], 110), (requests[2], 115)])
    whole, behind = (part for part in engine.slices() if part.is_sparse)
    call = engine.last_batch.get_call(whole, engine.page_size)
    assert call["cu_k"] is call["cu_q"]  # a whole prompt: nothing more to compute
    assert call["cu_q"].tolist() == [0, 200]
    assert (call["max_q"], call["max_k"], call["total_k"]) == (256, 256, 256)
    call = engine.last_batch.get_call(behind, engine.page_size)
    assert (call["cu_q"].tolist(), call["cu_k"].tolist()) == ([0, 110, 225], [0, 300, 605])
    assert (call["max_q"], call["max_k"], call["total_k"]) == (128, 320, 640)
    assert call["block_table"].data_ptr() % 16 == 0  # the batch's second row does not begin so
    assert torch.equal(call["block_table"], engine.metadata.block_table_tensor[1:3])
    assert engine.last_batch.get_call(behind, engine.page_size) is call


def test_the_density_of_a_sampled_call_is_that_of_its_requests():
    """Of one of 256 sparse calls, here a run of two prompts of unlike lengths, counted row by row."""
    engine = engine_of()
    counters = engine.server.counters
    counters.calls[0], counters.prompts[0] = SAMPLED_EVERY, EARLY
    parts = [(engine.add(400), 400), (engine.add(405), 405)]
    engine.feed(parts)
    expected = joint_density(parts, engine.server.fit.layers[0].config(400))
    kept = counters.sampled[0].density
    torch.testing.assert_close(kept, expected)
    assert kept[-1] < kept[0] < 1  # heads of a larger tau stop earlier
    assert counters.densities() == {0: pytest.approx(float(expected.mean()))}
    engine.feed([(engine.add(400), 400)])  # is not sampled
    torch.testing.assert_close(counters.sampled[0].density, expected)


@pytest.mark.parametrize("last_rows", [0, 128])
def test_layers_of_another_cache_group_read_its_pages(last_rows):
    """The batch is the same, their keys lie in other pages; of a prompt with last rows there are two requests."""
    engine = engine_of(with_last_rows(last_rows), ends=True)
    request = engine.add(600)
    prepared = engine.prepare([(request, 600)])
    expected = prepared.forward()
    other = torch.tensor(engine.free[: len(request.pages)])
    engine.cache[other] = engine.cache[request.pages].clone()
    engine.cache[request.pages] = float("nan")
    prepared.metadata = engine.builder.update_block_table(prepared.metadata, other[None].int(), None)
    check_close(prepared.forward(), expected)
    assert engine.impl.stock_rows == 2 * last_rows


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"causal": False}, "the batch is not causal"),
        ({"mm_req_doc_ranges": {0: [(0, 4)]}}, "rows of an image"),
        ({"req_idx": torch.tensor([7, 7])}, "several chunks share one context"),
    ],
)
def test_batches_that_cannot_be_shared_are_the_stock_backends_and_counted(change, reason):
    engine = engine_of()
    request = engine.add(300)
    prepared = engine.prepare([(request, 300)])
    built = engine.builder.build(0, replace(engine.builder.built[0], **change))
    for _ in range(2):
        prepared.metadata = built
        check_close(prepared.forward(), dense(request, 300))
        ((layer, path, said),) = engine.server.counters.rows
        assert (layer, path, said.startswith(reason)) == (0, "dense", True)
        assert engine.server.counters.rows[layer, path, said] == 300
        engine.server.counters = Counters()
        # of layers of another group
        built = engine.builder.update_block_table(built, built.block_table_tensor, built.slot_mapping)


def test_batches_that_decode_are_not_planned_even_where_all_is_dense():
    engine = engine_of(all_dense())
    request = engine.add(300)
    engine.feed([(request, 299)])
    _, metadata = engine.feed([(request, 1)])
    assert not hasattr(metadata, BATCH)
    assert engine.server.counters.rows == {(0, "dense", "every layer of the profile is dense"): 299}


@pytest.mark.parametrize(("action", "path"), [("warn", "s2o"), ("dense", "dense")])
def test_a_layer_past_its_budget_is_noticed(action, path, monkeypatch):
    """Sampled calls are compared with dense attention; with action "dense" the layer runs dense from then on."""
    monkeypatch.setattr(Counters, "is_sampled", lambda self, layer, is_prompt: True)
    engine = engine_of(two_layers(tau=1e5))
    server = engine.server
    layer, check = server.fit.layers[0], DriftCheck(every=1, after=2, action=action)
    layer.drift = server.counters.drift[0] = DriftMonitor(check, 0, ErrorLimits("rel_mse", {300: 1e-9}))
    for _ in range(3):
        engine.feed([(engine.add(300), 300)])
    assert server.counters.errors()[0] > check.margin
    assert "of what is allowed" in server.counters.summary()
    assert "times what the profile allows" in layer.drift.verdict
    server.counters = Counters()
    request = engine.add(300)
    out = engine.outputs([(request, 300)])
    ((_, taken, _),) = server.counters.rows
    assert taken == path
    if path == "dense":
        check_close(out, dense(request, 300))


def test_the_profiling_run_reserves_what_calls_will_need():
    engine = engine_of()
    output = torch.ones(5, HEADS, HEAD_DIM)
    layer = type("Layer", (), {"layer_name": "model.layers.0"})
    engine.impl.forward(layer, output, output, output, torch.empty(0), None, output)
    assert engine.server.reserved == 1
    assert not output.any()


@pytest.mark.parametrize(
    ("more", "named", "reason"),
    [
        ((None, None, "auto", 50.0), {"sinks": torch.zeros(HEADS)}, None),
        ((None, 1024), {}, "the layer sees a sliding window of 1024 keys"),
        (([1.0],), {}, "the layer has ALiBi slopes"),
        ((), {"attn_type": "encoder_only"}, "the layer's attention is of type encoder_only"),
    ],
)
def test_a_layer_that_is_made_with_what_s2o_lacks_is_the_stock_backends(more, named, reason):
    implementation = type(engine_of().impl)
    assert implementation(HEADS, HEAD_DIM, HEAD_DIM**-0.5, 2, *more, **named).s2o_obstacle == reason


def test_what_vllm_asks_of_the_backend():
    backend = fake_backend(None)
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
    obstacle = engine_of().impl._find_cache_obstacle(None, torch.zeros(shape))
    assert obstacle.startswith(f"the KV cache has shape {shape}")


def test_pages_that_the_op_does_not_take_are_the_stock_backends():
    engine = engine_of(page_size=2048, pages=2)
    request = engine.add(300)
    check_close(engine.outputs([(request, 300)]), dense(request, 300))
    assert engine.server.counters.rows == {(0, "dense", "pages have 2048 tokens, more than 1024"): 300}
