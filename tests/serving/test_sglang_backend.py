"""S2O's backend between a fake of SGLang's classes and a dense backend: mixed batches, caches, counters."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from s2o_runtime.serving.fit import Rank
from support.fake_sglang import FakeEngine, Mode
from support.fake_vllm import FakeServer
from support.server_batches import FEWEST, alone, dense, two_layers

HEADS = 4


def engine(max_keys=2048, rank=None, tau=1.0, **options):
    return FakeEngine(FakeServer(two_layers(tau), rank or Rank(), "cpu", max_keys), **options)


def counted(fake):
    return {(path, reason.split(",")[0]): count for (_, path, reason), count in fake.server.counters.rows.items()}


def test_a_mixed_batch_is_each_request_on_its_own():
    """A chunk behind a prefix, decodes and a short tail, a long and a short prompt, in SGLang's order and others."""
    fake = engine()
    decoding, tailing, first, second, short = (fake.add(length) for length in (200, 300, 300, 305, 64))
    fake.feed([(decoding, 199), (tailing, 280), (first, 150)])
    fake.backend.stock_rows = fake.writes = 0
    parts = [(first, 150, True), (second, 305, True), (decoding, 1, False), (tailing, 20, False), (short, 64, False)]
    out = fake.feed([(request, count) for request, count, _ in parts], Mode.MIXED)
    config, begin = fake.server.fit.layers[0].config(300), 0
    for request, count, sparse in parts:
        expected = alone(request, count, config).out if sparse else dense(request, count)
        torch.testing.assert_close(out[begin : begin + count], expected, rtol=1e-4, atol=1e-5)
        begin += count
    assert fake.backend.stock_rows == 1 + 20 + 64
    assert fake.writes == 1
    runs = fake.backend.s2o_batch.plan(fake.server.fit.layers[0]).runs
    assert [(run.first, run.last, run.is_sparse) for run in runs] == [(0, 2, True), (2, 5, False)]
    assert counted(fake) == {
        ("dense", "decode"): 1,
        ("dense", f"fewer than {FEWEST} queries behind a prefix"): 20,
        ("dense", "shorter than the shortest calibrated length"): 64,
        ("s2o", "the tensors are on the cpu"): 199 + 280 + 150 + 150 + 305,
    }


def test_a_part_is_a_batch_of_its_own():
    fake = engine()
    requests = [fake.add(length) for length in (60, 300, 50, 70)]
    fake.feed([(requests[2], 10)])
    fake.feed([(requests[0], 60), (requests[1], 300), (requests[2], 40), (requests[3], 70)])
    whole, first, last = fake.backend.announced[-3:]
    assert first.extend_seq_lens_cpu == [60]
    assert last.extend_seq_lens_cpu == last.extend_seq_lens.tolist() == [40, 70]
    assert last.extend_prefix_lens_cpu == last.extend_prefix_lens.tolist() == [10, 0]
    assert last.seq_lens.tolist() == last.seq_lens_cpu.tolist() == [50, 70]
    assert (last.batch_size, last.extend_num_tokens, last.seq_lens_sum) == (2, 110, 120)
    assert last.req_pool_indices.tolist() == [3, 4]
    assert torch.equal(last.out_cache_loc, whole.out_cache_loc[360:])
    assert last.positions.tolist() == [*range(10, 50), *range(70)]
    assert fake.backend.forward_metadata.cache_seqlens.tolist() == [60, 300, 50, 70]  # the whole batch's again


def test_a_prompt_in_chunks_is_the_prompt_where_nothing_stops():
    fake = engine(tau=0.0)
    request = fake.add(500)
    outputs = []
    while request.done < 500:
        outputs.append(fake.feed([(request, min(100, 500 - request.done))]))
    torch.testing.assert_close(torch.cat(outputs), dense(request, 500), rtol=1e-4, atol=1e-5)
    assert "s2o" in {path for path, _ in counted(fake)}


def test_a_step_with_too_many_keys_for_one_call_is_several():
    fake = engine(max_keys=400)
    requests = [fake.add(300), fake.add(305)]
    out = fake.feed([(request, len(request)) for request in requests])
    config = fake.server.fit.layers[0].config(300)
    expected = torch.cat([alone(request, len(request), config).out for request in requests])
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert sum(run.is_sparse for run in fake.backend.s2o_batch.plan(fake.server.fit.layers[0]).runs) == 2


def test_keys_that_are_in_the_cache_already_are_not_written_again():
    fake = engine()
    request = fake.add(300)
    fake.feed([(request, 300)])
    expected = fake.pool.k.clone()
    request.done = 0
    out = fake.feed([(request, 300)], named={"save_kv_cache": False})
    assert fake.writes == 1
    torch.testing.assert_close(fake.pool.k, expected, equal_nan=True)
    torch.testing.assert_close(
        out, alone(request, 300, fake.server.fit.layers[0].config(300)).out, rtol=1e-4, atol=1e-5
    )


def test_calls_are_timed_by_layer_and_path():
    fake = engine()
    requests = [fake.add(300), fake.add(64)]
    fake.feed([(request, len(request)) for request in requests])
    fake.feed([(fake.add(300), 300)], layer={"layer_id": 1})
    fake.feed([(fake.add(300), 300)], layer={"layer_id": 2})
    timed = {(0, "s2o"): 1, (0, "dense"): 1, (1, "dense"): 1, (2, "dense"): 1}
    assert fake.server.counters.timed == timed
    seconds = fake.server.counters.seconds()
    assert set(seconds) == set(timed)
    assert all(mean > 0 for mean in seconds.values())


def test_decoding_is_the_stock_backends():
    fake = engine()
    request = fake.add(300)
    fake.feed([(request, 299)])
    fake.backend.init_forward_metadata(fake.batch([(request, 1)], Mode.DECODE))
    assert fake.backend.s2o_batch is None
    assert fake.backend.forward_decode() == "decoded"


@pytest.mark.parametrize(
    ("options", "call", "reason"),
    [
        ({"obstacle": "the KV cache is a SWAKVPool, not one of plain rows"}, {}, "the KV cache is a SWAKVPool"),
        ({"kv_cache_dtype": "float8_e4m3fn"}, {}, "the KV cache is float8_e4m3fn"),
        ({"split": True}, {}, "the context is shared by several ranks"),
        ({}, {"mode": Mode.TARGET_VERIFY}, "the batch is of mode TARGET_VERIFY"),
        ({}, {"mha_return_lse": False}, "log-sum-exps are asked for"),
        ({}, {"_attn_output": torch.zeros(1)}, "the batch is of a CUDA graph"),
        ({}, {"named": {"sinks": torch.zeros(HEADS)}}, "the layer is called with sinks"),
        ({}, {"named": {"sinks": None, "return_lse": True}}, "the layer is called with return_lse"),
        ({}, {"layer": {"sliding_window_size": 127}}, "the layer sees a sliding window of 127 keys"),
        ({}, {"layer": {"logit_cap": 30.0}}, "the scores are soft-capped at 30"),
        ({}, {"layer": {"is_cross_attention": True}}, "the layer's attention is of type cross"),
        (
            {},
            {"layer": {"attn_type": SimpleNamespace(value="encoder_only")}},
            "the layer's attention is of type encoder",
        ),
        ({}, {"layer": {"use_irope": True}}, "the layer sees chunks of the context"),
        ({}, {"layer": {"xai_temperature_len": 64}}, "the scores are scaled by their position"),
        ({}, {"layer": {"layer_id": 2}}, "the layer is none of the profile's"),
        ({}, {"layer": {"layer_id": 1}}, "every head of the layer is dense"),
    ],
)
def test_what_s2o_cannot_do_is_one_call_of_the_stock_backend(options, call, reason):
    fake = engine(**options)
    requests = [fake.add(300), fake.add(200)]
    out = fake.feed([(request, len(request)) for request in requests], **call)
    expected = torch.cat([dense(request, len(request)) for request in requests])
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert len(fake.backend.announced) == 1
    assert fake.writes == 0
    ((path, said),) = counted(fake)
    assert path == "dense"
    assert said.startswith(reason.split(",")[0])


@pytest.mark.parametrize(
    ("options", "number", "said"),
    [
        ({}, 1, "every head of the layer is dense"),
        ({"kv_cache_dtype": "float8_e5m2"}, 0, "the KV cache is float8_e5m2"),
        ({"split": True}, 0, "the context is shared by several ranks"),
    ],
)
def test_a_server_that_sends_all_rows_to_the_stock_backend_logs_them_too(options, number, said, caplog):
    fake = engine(**options)
    fake.server.counters.log_every = 1e-9
    with caplog.at_level("INFO", logger="s2o_runtime"):
        fake.feed([(fake.add(300), 300)], layer={"layer_id": number})
    assert caplog.messages[-1] == f"S2O: 100.0% dense ({said})"


def test_a_profile_without_a_sparse_layer_is_the_stock_backends():
    layers = tuple((dense_layer, dense_layer) for _, dense_layer in two_layers().layers)
    fake = FakeEngine(FakeServer(replace(two_layers(), layers=layers), Rank(), "cpu", 2048))
    fake.feed([(fake.add(300), 300)])
    assert counted(fake) == {("dense", "every layer of the profile is dense"): 300}


def test_values_of_another_width_are_the_stock_backends():
    fake = engine()
    assert fake.backend._layer(fake.layer(v_head_dim=32)) == "keys have 64 numbers and values 32"


def test_embeddings_without_a_cache_are_the_stock_backends():
    fake = engine()
    fake.backend.fa_skip_kv_cache = True
    assert fake.backend._layer(fake.layer()) == "keys are not written into the cache"


def test_images_are_the_stock_backends():
    """A model says so after the batch was announced."""
    fake = engine()
    request = fake.add(300)
    announce = fake.backend.init_forward_metadata

    def announced(batch):
        announce(batch)
        fake.backend.forward_metadata.image_token_ranges = torch.zeros(1, 2)

    fake.backend.init_forward_metadata = announced
    fake.feed([(request, 300)])
    assert counted(fake) == {("dense", "rows of an image see one another"): 300}


def test_rows_of_another_batch_are_the_stock_backends():
    fake = engine()
    request = fake.add(300)
    batch = fake.batch([(request, 300)])
    fake.backend.init_forward_metadata(fake.batch([(request, 300)]))
    query = request.queries.flatten(1)
    fake.backend.forward_extend(query, request.keys, request.values, fake.layer(), batch)
    assert counted(fake) == {("dense", "the call's rows are not those of the announced batch"): 300}
    batch.extend_seq_lens_cpu = None
    fake.backend.init_forward_metadata(batch)
    assert fake.backend.s2o_batch == "the lengths of the batch are not known on the host"
