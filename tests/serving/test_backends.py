"""What S2O's backends do in vLLM and in SGLang alike, between fakes of their classes and a dense stock backend."""

import time
from dataclasses import replace

import pytest
import torch

from s2o_runtime.serving.calls import Batch
from s2o_runtime.serving.fit import Rank
from support.engines import ENGINES, VllmEngine
from support.fake_server import FakeServer
from support.server_batches import FEWEST, all_dense, alone, dense, two_layers


@pytest.fixture(params=ENGINES)
def made(request):
    """Makes an engine for a profile of two layers, the second of which is dense."""

    def make(profile=None, max_keys=2048, **options):
        server = FakeServer(profile or two_layers(), Rank(), "cpu", max_keys)
        return ENGINES[request.param](server, **options)

    return make


def check_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def check_mixed_batch(engine):
    decoding, tailing, first, second, short = (engine.add(length) for length in (200, 300, 300, 305, 64))
    engine.outputs([(decoding, 199), (tailing, 280), (first, 150)])
    before = engine.stock_rows
    parts = [(decoding, 1, False), (tailing, 20, False), (first, 150, True), (second, 305, True), (short, 64, False)]
    parts = [parts[index] for index in engine.order]
    out = engine.outputs([(request, count) for request, count, _ in parts])
    config, begin = engine.server.fit.layers[0].config(300), 0
    for request, count, sparse in parts:
        expected = alone(request, count, config).out if sparse else dense(request, count)
        check_close(out[begin : begin + count], expected)
        begin += count
    assert engine.stock_rows - before == 1 + 20 + 64
    sparse = [part[2] for part in parts]
    assert [sparse[run.first : run.last] for run in engine.runs()] == [
        [run.is_sparse] * (run.last - run.first) for run in engine.runs()
    ]
    assert [run.last - run.first for run in engine.runs() if run.is_sparse] == [2]
    assert engine.counted() == {
        ("dense", "decode"): 1,
        ("dense", f"fewer than {FEWEST} queries behind a prefix"): 20,
        ("dense", "shorter than the shortest calibrated length"): 64,
        ("s2o", "reference backend"): 199 + 280 + 150 + 150 + 305,
    }


def test_a_mixed_batch_is_each_request_on_its_own(made):
    """A decode, a short tail, a chunk behind a prefix, a long and a short prompt."""
    check_mixed_batch(made())


def test_a_mixed_batch_of_vllms_older_caches():
    check_mixed_batch(VllmEngine(FakeServer(two_layers(), Rank(), "cpu", 2048), "pages of two"))


def test_a_prompt_in_chunks_is_the_prompt_where_nothing_stops(made):
    engine = made(two_layers(tau=0.0))
    request = engine.add(500)
    out = torch.cat([engine.outputs([(request, 100)]) for _ in range(5)])
    check_close(out, dense(request, 500))
    assert "s2o" in {path for path, _ in engine.counted()}


def test_a_step_with_too_many_keys_for_one_call_is_several(made):
    engine = made(max_keys=400)
    requests = [engine.add(300), engine.add(305)]
    out = engine.outputs([(request, len(request)) for request in requests])
    config = engine.server.fit.layers[0].config(300)
    check_close(out, torch.cat([alone(request, len(request), config).out for request in requests]))
    assert [run.is_sparse for run in engine.runs()] == [True, True]


LAST = "the last rows of a prompt"


def with_last_rows(rows=128, **options):
    profile = two_layers(lengths=(128, 768), **options)
    first, second = profile.layers[0]
    return replace(profile, layers=((replace(first, last_rows=rows), second),) * 2)


def parts_alone(engine, request, last):
    """The rows of a request up to its last ones by the op, those by dense attention."""
    config, done, count = engine.server.fit.layers[0].config(len(request)), request.done, request.fed
    request.done = done - last
    sparse = alone(request, count - last, config).out
    request.done = done
    return torch.cat([sparse, dense(request, last)])


def test_a_prompts_last_rows_are_the_stock_backends(made):
    """Of two that end in a batch with a decode, one of them behind a prefix, and none before they end."""
    engine = made(with_last_rows(), ends=True)
    decoding, chunked, whole = engine.add(900), engine.add(600), engine.add(500)
    engine.outputs([(decoding, 299), (chunked, 200)])
    assert engine.counted() == {("s2o", "reference backend"): 499}
    before, parts = engine.stock_rows, [(decoding, 1), (chunked, 400), (whole, 500)]
    parts = parts if engine.order[0] == 0 else [*parts[1:], parts[0]]
    out = engine.outputs(parts)
    for (request, _), ours in zip(parts, out.split([count for _, count in parts]), strict=True):
        check_close(ours, dense(request, 1) if request is decoding else parts_alone(engine, request, 128))
    assert engine.stock_rows - before == 1 + 128 + 128
    counted = engine.counted()
    assert (counted["dense", "decode"], counted["dense", LAST]) == (1, 256)
    assert counted["s2o", "reference backend"] == 499 + 272 + 372
    engine.outputs([(engine.add(100), 100)])
    assert engine.counted()["dense", "shorter than the shortest calibrated length"] == 100  # and no last rows of it


def test_a_request_with_a_lora_adapter_is_the_stock_backends(made):
    """Beside one without, whose last rows are apart; a prompt of the adapter's shape shares its lot only in vLLM."""
    engine = made(with_last_rows(), ends=True)
    plain, adapted = engine.add(600), engine.add(500)
    adapted.adapter = "law"
    out = engine.outputs([(plain, 600), (adapted, 500)])
    check_close(out[:600], parts_alone(engine, plain, 128))
    check_close(out[600:], dense(adapted, 500))
    counted = engine.counted()
    assert counted["s2o", "reference backend"] == 600 - 128
    assert counted["dense", "the request has a LoRA adapter"] + counted["dense", LAST] == 128 + 500
    assert counted["dense", "the request has a LoRA adapter"] >= 500 - 128


def test_a_chunk_of_last_rows_alone_is_the_stock_backends_as_a_whole(made):
    engine = made(with_last_rows(), ends=True)
    request = engine.add(500)
    engine.outputs([(request, 400)])
    check_close(engine.outputs([(request, 100)]), dense(request, 100))
    assert engine.counted()["dense", LAST] >= 100


def test_last_rows_lie_in_two_chunks_of_vllm():
    """Which knows how much of a prompt is left; SGLang says only that it does not end."""
    engine = VllmEngine(FakeServer(with_last_rows(), Rank(), "cpu", 2048), ends=True)
    request = engine.add(500)
    out = engine.outputs([(request, 450)])
    check_close(out, parts_alone(engine, request, 78))
    check_close(engine.outputs([(request, 50)]), dense(request, 50))
    assert engine.counted()["dense", LAST] == 128


def test_pieces_of_another_cache_group_read_its_pages():
    engine = VllmEngine(FakeServer(with_last_rows(), Rank(), "cpu", 2048), ends=True)
    request = engine.add(600)
    prepared = engine.prepare([(request, 600)])
    expected = prepared.forward()
    other = torch.randperm(engine.pages)[: len(request.pages)]
    engine.cache[other] = engine.cache[request.pages].clone()
    prepared.metadata = engine.builder.update_block_table(prepared.metadata, other[None].int(), None)
    check_close(prepared.forward(), expected)


def test_nothing_is_made_of_a_batch_with_little_work(made, monkeypatch):
    """Unless one request has more work, or a layer waits for its self-test."""
    engine = made()
    fit, counters = engine.server.fit, engine.server.counters
    fit.host_flops = 4 * 4 * 64 * 250**2 / 2  # of 250 tokens
    fit.layers[0].tested = False
    little, most = engine.add(300), engine.add(300)
    said = "so little work that the host would decide, not the GPU"
    fit.host_flops *= 4
    check_close(engine.outputs([(most, 300)]), dense(most, 300))
    assert fit.layers[0].tested
    fit.host_flops /= 4
    with monkeypatch.context() as patched:
        patched.setattr(Batch, "__init__", None)
        check_close(engine.outputs([(little, 150)]), dense(little, 150))
    assert counters.rows == {(0, "dense", said): 450}
    assert counters.timed == {(0, "dense"): 2}
    engine.outputs([(engine.add(200), 200), (engine.add(300), 300)])
    assert engine.counted()["s2o", "reference backend"] > 0


def test_calls_are_timed_by_layer_and_path(made):
    """Of a batch with a run of each path, of a dense layer, and of one that is none of the profile's."""
    engine = made()
    batches = [([engine.add(300), engine.add(64)], 0), ([engine.add(300)], 1), ([engine.add(300)], 2)]
    began = time.perf_counter()
    for requests, layer in batches:
        engine.outputs([(request, len(request)) for request in requests], layer)
    took = time.perf_counter() - began
    counters = engine.server.counters
    assert counters.timed == {(0, "s2o"): 1, (0, "dense"): 1, (1, "dense"): 1, (2, "dense"): 1}
    seconds = counters.seconds()
    assert set(seconds) == set(counters.timed) - {(2, "dense")}  # S2O has no part in it
    assert min(seconds.values()) > 0
    assert sum(counters.timed[key] * mean for key, mean in seconds.items()) <= took


@pytest.mark.parametrize(
    ("kind", "layer", "said"),
    [
        ("dense layer", 1, "every head of the layer is dense"),
        ("dense profile", 0, "every layer of the profile is dense"),
        ("none of the profile's", 7, "the layer is none of the profile's"),
        ("fp8_e5m2", 0, "the KV cache is fp8_e5m2"),
    ],
)
def test_a_layer_that_is_the_stock_backends_is_one_call_counted_and_logged(kind, layer, said, made, info_log):
    options = {"kv_cache_dtype": kind} if kind.startswith("fp8") else {}
    engine = made(all_dense() if kind == "dense profile" else None, **options)
    engine.server.counters.log_every = 1e-9
    requests = [engine.add(300), engine.add(200)]
    out = engine.outputs([(request, len(request)) for request in requests], layer)
    check_close(out, torch.cat([dense(request, len(request)) for request in requests]))
    assert engine.server.counters.rows == {(layer, "dense", said): 500}
    assert engine.server.counters.timed == {(layer, "dense"): 1}
    assert info_log.messages[-1] == f"S2O: 100.0% dense ({said})"
