"""The warning about a model that should run S2O and hardly does."""

import logging
import pickle

import pytest
import torch
from transformers import DynamicCache

from s2o_runtime import patch, patched, unpatch
from s2o_runtime.dense_reason import DenseReason
from s2o_runtime.huggingface.hf import layer_states
from s2o_runtime.monitor import counters
from s2o_runtime.monitor.counters import OTHERWISE, REMEDIES, DenseWatch
from support.models import LENGTH, make_profile, new_model, prompt

HOLES = DenseReason.MASK


@pytest.fixture
def model(monkeypatch):
    """Two layers; judged after five calls of each."""
    monkeypatch.setattr(counters, "CALLS", 5)
    plain = new_model()
    return patch(plain, make_profile(plain, 0.5), drift="off")


def with_holes(model):
    mask = torch.ones(1, LENGTH, dtype=torch.int64)
    mask[0, 40:60] = 0
    model(prompt(), attention_mask=mask)


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@torch.no_grad()
def test_long_prompts_that_run_dense_are_warned_about_once(model, caplog):
    """At the fifth long call of each layer, whatever short ones and decode are between."""
    for _ in range(4):
        with_holes(model)
    for _ in range(3):
        model(prompt(1))
        model(prompt(50))
    assert warnings(caplog) == []
    for _ in range(8):
        with_holes(model)
    [warning] = warnings(caplog)
    assert warning == (
        "S2O hardly runs: 10 of the first 10 calls of attention layers with 100 keys or more were dense, most often "
        f"(10) for this reason: {HOLES}; {REMEDIES[HOLES]}"
    )


@torch.no_grad()
def test_prompts_that_are_too_short_are_warned_about_once(model, caplog):
    memory = DynamicCache(config=model.config)
    for _ in range(4):
        model(prompt(20))
    for _ in range(9):  # decode does not count
        model(prompt(1), past_key_values=memory)
    assert warnings(caplog) == []
    for _ in range(20):
        model(prompt(20))
    [warning] = warnings(caplog)
    assert warning.startswith(
        "S2O hardly runs: 10 of the first 10 calls of attention layers with more than one query had fewer than 100 keys"
    )


def test_more_than_nine_in_ten_and_the_most_frequent_reason(caplog):
    few, many = DenseWatch(1, 100), DenseWatch(1, 100)
    for watch, dense in ((few, 900), (many, 901)):
        for call in range(1000):
            reason = "rare" if call % 3 == 0 else "frequent"
            watch.count(*(("dense", reason) if call < dense else ("s2o", "it runs")), 100)
    [warning] = warnings(caplog)
    assert "901 of the first 1000 calls" in warning
    assert f"most often (600) for this reason: frequent; {OTHERWISE}" in warning


def test_short_prompts_that_are_not_nearly_all_leave_the_long_ones_to_be_judged(caplog):
    watch = DenseWatch(1, 100)
    for call in range(2000):
        watch.count("dense", "a reason", 99 if call % 2 else 100)
    [warning] = warnings(caplog)
    assert "1000 of the first 1000 calls of attention layers with 100 keys or more" in warning


@torch.no_grad()
def test_reasons_that_have_a_remedy_are_those_that_layers_give(model):
    with_holes(model)
    state = layer_states(model)[0]
    state.max_length = 150
    model(prompt())
    with torch.enable_grad():
        model(prompt(120))
    model.train()(prompt(120))
    model.eval()
    state.max_length = None
    state.config_at = lambda length: make_profile(model, 0.5).layer_config(0, length).as_dense()
    model(prompt())
    given = {reason for path, reason in state.counts if path == "dense"}
    assert {DenseReason.of(reason) for reason in given} == set(REMEDIES)


def test_a_reason_with_numbers_stays_what_it_is_in_another_process():
    reason = DenseReason.TOO_LONG.about(150, 1.5)
    assert reason == "longer than 150 keys, 1.5 times the longest calibrated length"
    assert DenseReason.of(pickle.loads(pickle.dumps(reason))) is DenseReason.TOO_LONG
    assert f"{DenseReason.DECODE}" == str(DenseReason.DECODE) == "decode"
    assert DenseReason.of("decode") is None


def test_a_model_that_cannot_run_s2o_at_all_has_said_so_already(model, monkeypatch):
    monkeypatch.setattr("s2o_runtime.huggingface.hf.offloaded", lambda model: "the weights are offloaded")
    patch(model, make_profile(model, 0.5))
    assert [state.watch for state in layer_states(model)] == [None, None]


GRADIENTS = (
    "S2O does not run: gradients are enabled for a prompt of 200 keys: "
    "call the model under torch.no_grad() or torch.inference_mode()"
)


def test_the_first_long_prompt_with_gradients_is_warned_about_once(model, caplog):
    model(prompt(99))
    model.train()(prompt(200))  # training is what gradients are for
    model.eval()
    with torch.no_grad():
        model(prompt(200))
    assert warnings(caplog) == []
    for _ in range(2):
        model(prompt(200))
    assert warnings(caplog) == [GRADIENTS]


@torch.no_grad()
def test_the_first_long_prompt_that_another_implementation_computes_is_warned_about_once(model, caplog):
    """As after a switch to FlashAttention by continuous batching, or to SDPA so that it takes the model."""
    model(prompt(200))
    model.set_attn_implementation("sdpa")
    model(prompt(99))
    assert warnings(caplog) == []
    for _ in range(2):
        model(prompt(200))
    [warning] = warnings(caplog)
    assert warning.startswith(
        "S2O does not run: the patched model has the attention implementation 'sdpa' for a prompt of 200 keys: call "
        'model.set_attn_implementation("s2o"), or for continuous batching '
    )


@pytest.mark.parametrize(("longest", "said"), [({"full_attention": 100}, 1), (100, 1), (99, 0)])
def test_requests_of_a_batch_are_long_by_their_keys(model, caplog, longest, said):
    """A batch of continuous batching has the new tokens of all requests in one row."""
    model.set_attn_implementation("eager")
    [attention] = [layer.self_attn for layer in model.model.layers if layer.self_attn._forward_pre_hooks]
    layer_states(model)[0].watch.check_forward(attention, (torch.zeros(1, 300, 64),), {"max_length_k": longest})
    assert len(warnings(caplog)) == said


def test_a_model_that_was_patched_again_and_unpatched_is_not_watched(model):
    profile = make_profile(model, 0.5)
    with patched(patch(model, profile), profile):
        pass
    hooks = [len(layer.self_attn._forward_pre_hooks) for layer in model.model.layers]
    assert hooks == [1, 0]
    unpatch(model)
    assert not any(layer.self_attn._forward_pre_hooks for layer in model.model.layers)
