"""S2O's backend between a fake of SGLang's classes and a dense backend: what is SGLang's alone."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from s2o_runtime.dense_reason import DenseReason
from s2o_runtime.serving.fit import Rank
from s2o_runtime.sglang.backend import get_prompt_lengths, watch_prompts
from s2o_runtime.sglang.engine import _find_reader
from support.fake_server import FakeServer
from support.fake_sglang import Capture, FakeEngine, Mode
from support.server_batches import alone, check_close, dense, two_layers

HEADS, ENCODER = 4, SimpleNamespace(value="encoder_only")


def engine(**options):
    return FakeEngine(FakeServer(two_layers(), Rank(), "cpu", 2048), **options)


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


def test_keys_that_are_in_the_cache_already_are_not_written_again():
    """Nor does decoding write or plan anything."""
    fake = engine()
    request = fake.add(301)
    fake.feed([(request, 300)])
    expected = fake.pool.k.clone()
    request.done = 0
    out = fake.feed([(request, 300)], named={"save_kv_cache": False})
    check_close(out, alone(request, 300, fake.server.fit.layers[0].config(300)).out)
    fake.backend.init_forward_metadata(fake.batch([(request, 1)], Mode.DECODE))
    assert fake.backend.s2o_batch is None
    assert fake.backend.forward_decode() == "decoded"
    assert fake.writes == 1
    torch.testing.assert_close(fake.pool.k, expected, equal_nan=True)


@pytest.mark.parametrize(
    ("options", "call", "reason"),
    [
        ({"obstacle": "the KV cache is a SWAKVPool, not one of plain rows"}, {}, "the KV cache is a SWAKVPool"),
        ({"reason": "the context is shared by several ranks"}, {}, "the context is shared by several ranks"),
        ({}, {"mode": Mode.TARGET_VERIFY}, "the batch is of mode TARGET_VERIFY"),
        ({}, {"mha_return_lse": False}, "log-sum-exps are asked for"),
        ({}, {"_attn_output": torch.zeros(1)}, "the batch is of a CUDA graph"),
        ({}, {"named": {"sinks": None, "return_lse": True}}, "the layer is called with return_lse"),
        ({}, {"layer": {"sliding_window_size": 127}}, "the layer sees a sliding window of 127 keys"),
        ({}, {"layer": {"is_cross_attention": True}}, "the layer's attention is of type cross"),
        ({}, {"layer": {"attn_type": ENCODER}}, "the layer's attention is of type encoder"),
        ({}, {"layer": {"use_irope": True}}, "the layer sees chunks of the context"),
        ({}, {"layer": {"xai_temperature_len": 64}}, "the scores are scaled by their position"),
    ],
)
def test_what_s2o_cannot_do_is_one_call_of_the_stock_backend(options, call, reason):
    fake = engine(**options)
    requests = [fake.add(300), fake.add(200)]
    out = fake.feed([(request, len(request)) for request in requests], **call)
    check_close(out, torch.cat([dense(request, len(request)) for request in requests]))
    assert len(fake.backend.announced) == 1
    assert fake.writes == 0
    ((path, said),) = fake.counted()
    assert path == "dense"
    assert said.startswith(reason.split(",")[0])


DRAFTING = SimpleNamespace(is_speculative=lambda: True)


@pytest.mark.parametrize(
    ("call", "dense_rows"),
    [
        ({"capture_hidden_mode": Capture.FULL}, {"hidden states of all rows may be read": 500}),
        ({"capture_hidden_mode": Capture.FULL, "spec_algorithm": DRAFTING}, {}),
        ({"capture_hidden_mode": Capture.LAST}, {}),
        ({"token_indices_to_pool": [torch.zeros(1)] * 2}, {"hidden states of the request are pooled": 500}),
        ({"return_logprob": True, "extend_logprob_start_lens_cpu": [299, 200]}, {}),  # of what is generated
        (
            {"return_logprob": True, "extend_logprob_start_lens_cpu": [0, 199]},
            {"the prompt's log-probabilities are read": 300},
        ),
    ],
)  # fmt: skip
def test_requests_that_read_more_than_answers_are_dense_under_a_budget_of_them(call, dense_rows):
    for kind, expected in (("kl", dense_rows), ("mse", {})):
        profile = replace(two_layers(), record={"budget": {"kind": kind, "value": 1e-3}})
        fake = FakeEngine(FakeServer(profile, Rank(), "cpu", 2048))
        fake.feed([(fake.add(length), length) for length in (300, 200)], **call)
        rows = fake.counted()
        assert rows.pop(("s2o", "reference backend"), 0) == 500 - sum(expected.values())
        assert rows == {("dense", reason): count for reason, count in expected.items()}


def test_a_server_that_reads_hidden_states_of_every_request_is_dense_as_a_whole():
    arguments = {"enable_return_hidden_states": False, "return_hidden_states_mode": None}
    for generates, changes, reason in (
        (True, {}, None), (True, {"return_hidden_states_mode": "last"}, None), (False, {}, DenseReason.POOLING),
        (True, {"return_hidden_states_mode": "full"}, DenseReason.HIDDEN_STATES),
        (True, {"enable_return_hidden_states": True}, DenseReason.HIDDEN_STATES),
    ):  # fmt: skip
        runner = SimpleNamespace(is_generation=generates, server_args=SimpleNamespace(**arguments | changes))
        assert _find_reader(runner) is reason


def test_values_of_another_width_and_embeddings_without_a_cache_are_the_stock_backends():
    fake = engine()
    assert fake.backend._find_layer(fake.layer(v_head_dim=32)) == "keys have 64 numbers and values 32"
    fake = engine()
    fake.backend.fa_skip_kv_cache = True
    assert fake.backend._find_layer(fake.layer()) == "keys are not written into the cache"


def test_rows_of_another_batch_or_of_images_are_the_stock_backends():
    fake = engine()
    request = fake.add(300)
    batch, other = fake.batch([(request, 300)]), fake.batch([(request, 300)])
    rows = request.queries.flatten(1), request.keys, request.values, fake.layer()
    fake.backend.init_forward_metadata(other)
    fake.backend.forward_extend(*rows, batch)
    fake.backend.forward_metadata.image_token_ranges = torch.zeros(1, 2)  # a model says so after the announcement
    fake.backend.forward_extend(*rows, other)
    reasons = "the call's rows are not those of the announced batch", "rows of an image see one another"
    assert fake.counted() == dict.fromkeys([("dense", reason) for reason in reasons], 300)
    fake.backend.forward_metadata.image_token_ranges = None
    out = fake.backend.forward_extend(*rows, copy.copy(other))  # as a breakable CUDA graph calls
    request.done = 300
    check_close(out.view(300, HEADS, -1), alone(request, 300, fake.server.fit.layers[0].config(300)).out)
    batch.extend_seq_lens_cpu = None
    fake.backend.init_forward_metadata(batch)
    assert fake.backend.s2o_batch == "the lengths of the batch are not known on the host"


def test_batches_are_given_the_lengths_of_their_prompts():
    """None where requests are not understood, so that chunks run the settings of their keys so far."""

    class Batches:
        @classmethod
        def init_new(cls, batch, runner, *, hidden):
            return SimpleNamespace(made_of=(batch, runner, hidden), extend_seq_lens_cpu=batch.new)

    watch_prompts(Batches)
    asked = [SimpleNamespace(full_untruncated_fill_ids=b"ab")]
    known, other, unknown = (SimpleNamespace(reqs=reqs, new=[1]) for reqs in (asked, 2 * asked, [0]))
    made, *others = (Batches.init_new(batch, "runner", hidden=1) for batch in (known, other, unknown))
    assert made.made_of == (known, "runner", 1)
    assert [get_prompt_lengths(copy.copy(batch)) for batch in (made, *others)] == [[2], [2, 2], []]
