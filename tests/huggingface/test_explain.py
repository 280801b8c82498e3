"""Tests of what a patched model says it did, against what the operator returns, and of its warnings."""

import copy
import logging
import pickle
from unittest import mock

import pytest
import torch
from transformers import DynamicCache

from s2o_runtime import Explanation, explain, patch, patched, unpatch
from s2o_runtime.dense_reason import DenseReason
from s2o_runtime.huggingface.hf import get_layer_states
from s2o_runtime.logs import log_once
from s2o_runtime.monitor import counters
from s2o_runtime.monitor.counters import OTHERWISE, REMEDIES, SAMPLES, WARM, DenseWatch, Meter
from support.models import LENGTH, RUNS, make_profile, new_model, padded_batch, prompt

SHORT = "shorter than the shortest calibrated length, 100"
CPU = torch.device("cpu")


@pytest.fixture
def model(monkeypatch):
    """Two layers, which are judged after five calls of each."""
    monkeypatch.setattr(counters, "CALLS", 5)
    plain = new_model()
    return patch(plain, make_profile(plain, 0.5))


@torch.no_grad()
def test_rows_say_calls_density_and_time(model):
    assert str(explain(model)) == "no attention layer was called"
    densities = [[], []]
    batch, mask = padded_batch()
    model(prompt(40))
    for call in (
        lambda: model(prompt()),
        lambda: model(batch, attention_mask=mask),
        lambda: model(prompt(150)),
        lambda: model.generate(prompt(), max_new_tokens=3, do_sample=False),
    ):
        call()
        for layer, state in enumerate(get_layer_states(model)):
            densities[layer].append(float(state.last.density.mean()))
    rows = explain(model)
    assert [(row["layer"], row["path"], row["reason"], row["calls"]) for row in rows] == [
        (layer, *row) for layer in (0, 1) for row in (("dense", "decode", 2), ("dense", SHORT, 1), ("s2o", RUNS, 4))
    ]
    for row in rows:
        expected = sum(densities[row["layer"]]) / 4 if row["path"] == "s2o" else 1.0
        assert row["density"] == pytest.approx(expected, rel=1e-12)
        assert (row["ms"] is None) == (row["reason"] == "decode")
        assert row["error"] is None
    assert max(row["density"] for row in rows if row["path"] == "s2o") < 1.0


def test_a_table_has_the_error_where_it_was_checked():
    row = {"layer": 11, "path": "s2o", "reason": "why", "calls": 3, "density": 0.25, "ms": None}
    table = "layer  path  calls  density  ms  {}reason\n   11  s2o       3     0.25   -  {}why"
    for errors, *columns in (
        (dict.fromkeys(("error", "last", "high")), "", ""),
        ({"error": 0.5, "last": 1.25, "high": 0.125}, "error  last   high  ", "  0.5  1.25  0.125  "),
    ):
        rows = Explanation([row | errors])
        assert repr(rows) == str(rows) == table.format(*columns)


def test_samples_are_few_and_spread_over_all_calls():
    meter, sampled = Meter(), 0
    for _ in range(4000):
        if (sample := meter.begin("kind", CPU)) is not None:
            sampled += 1
            meter.end(sample, ("dense", "kind"), None, CPU)
    held = sorted(sample.number for sample in meter._kept["kind"].values())
    assert len(held) == SAMPLES
    # uniform over 4000: of 16 the median lies this far from the middle once in 10^4 times at most
    assert 400 < held[SAMPLES // 2] < 3600
    # 16 + sum of 16 / n, which is 105, give or take four deviations
    assert 65 < sampled < 145


def test_first_calls_do_not_count_for_the_time():
    """They compile: a slow one would be all that a mean shows."""
    meter = Meter()
    for seconds in [100.0] * WARM + [1.0, 3.0]:
        sample = meter.begin(None, CPU)
        meter.end(sample, ("s2o", "why"), None, CPU)
        sample.begin, sample.end = 0.0, seconds
    assert meter.read()["s2o", "why"].seconds == 2.0


@torch.no_grad()
def test_copies_start_anew(model):
    model(prompt())
    other = copy.deepcopy(model)
    assert pickle.loads(pickle.dumps(get_layer_states(model)[0].meter)).read() == {}
    assert all(row["ms"] is None for row in explain(other))
    assert all(row["ms"] is not None for row in explain(model))


@torch.no_grad()
def test_one_log_line_for_a_reason_and_none_for_a_call(model, info_log):
    log_once.cache_clear()
    for length in (LENGTH, 40, LENGTH, 40, 50):
        model(prompt(length))
    assert sorted(record.getMessage() for record in info_log.records if "layers run" in record.getMessage()) == [
        f"layers run dense: {SHORT}",
        f"layers run s2o: {RUNS}",
    ]


# warnings


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


LONG, SHORTER, RARE, RAN = (
    ("dense", "frequent", 100),
    ("dense", "frequent", 99),
    ("dense", "rare", 100),
    ("s2o", "", 100),
)


@pytest.mark.parametrize(
    ("calls", "warned"),
    [
        ([RARE, *[LONG] * 18, RAN], [(19, 20, 100, 18, "frequent", OTHERWISE)]),
        ([*[LONG] * 18, RAN, RAN], []),
        ([SHORTER] * 19 + [LONG], [(19, 20, 100)]),
        ([SHORTER] * 18 + [RAN] * 2, []),
        ([SHORTER] * 18 + [LONG] * 20, [(20, 20, 100, 20, "frequent", OTHERWISE)]),
    ],
)
def test_a_watch_warns_once_by_its_first_calls(calls, warned, monkeypatch):
    """Twenty are judged, of which nineteen are nearly all."""
    monkeypatch.setattr(counters, "CALLS", 20)
    with mock.patch.object(counters.log, "warning") as warning:
        watch = DenseWatch(1, 100)
        for call in [*calls, *[LONG] * (40 if warned else 0)]:
            watch.count(*call)
    assert [call.args[1:] for call in warning.call_args_list] == warned


@torch.no_grad()
def test_a_model_that_hardly_runs_s2o_is_warned_about_once(model, caplog):
    """Decode does not count, nor do short prompts where long ones are judged."""
    mask, cache = torch.ones(1, LENGTH, dtype=torch.int64), DynamicCache(config=model.config)
    mask[0, 40:60] = 0
    for _ in range(3):
        model(prompt(1), past_key_values=cache)
        model(prompt(50))
    assert warnings(caplog) == []
    for _ in range(8):
        model(prompt(), attention_mask=mask)
    assert warnings(caplog) == [
        "S2O hardly runs: 10 of the first 10 calls of attention layers with 100 keys or more were dense, most often "
        f"(10) for this reason: {DenseReason.MASK}; {REMEDIES[DenseReason.MASK]}"
    ]


@torch.no_grad()
def test_reasons_that_have_a_remedy_are_those_that_layers_give(model):
    mask = torch.ones(1, LENGTH, dtype=torch.int64)
    mask[0, 40:60] = 0
    model(prompt(), attention_mask=mask)
    state = get_layer_states(model)[0]
    state.max_length = 150
    model(prompt())
    with torch.enable_grad():
        model(prompt(120))
    model.train()(prompt(120))
    model.eval()
    state.max_length, state.answer_rows = None, 1
    for options in ({}, {"labels": prompt()}, {"output_hidden_states": True}):
        model(prompt(), **options)
    state.answer_rows = None
    state.config_at = lambda length: make_profile(model, 0.5).layer_config(0, length).as_dense()
    model(prompt())
    assert {DenseReason.from_sentence(reason) for path, reason in state.counts if path == "dense"} == set(REMEDIES)


def test_a_reason_with_numbers_stays_what_it_is_in_another_process():
    reason = DenseReason.TOO_LONG.fill_in(150, 1.5)
    assert reason == "longer than 150 keys, 1.5 times the longest calibrated length"
    assert DenseReason.from_sentence(pickle.loads(pickle.dumps(reason))) is DenseReason.TOO_LONG
    assert f"{DenseReason.DECODE}" == str(DenseReason.DECODE) == "decode"
    assert DenseReason.from_sentence("decode") is None


def test_a_model_that_cannot_run_s2o_at_all_has_said_so_already(model, monkeypatch):
    monkeypatch.setattr("s2o_runtime.huggingface.hf.find_offloaded", lambda model: "the weights are offloaded")
    patch(model, make_profile(model, 0.5))
    assert [state.watch for state in get_layer_states(model)] == [None, None]


def compute_gradients(model):
    model.train()(prompt(200))  # training is what gradients are for
    model.eval()


@pytest.mark.parametrize(
    ("change", "gradients", "words"),
    [
        (compute_gradients, True, "enabled for a prompt of 200 keys: call the model under torch.no_grad()"),
        # as by continuous batching, which switches to FlashAttention, or to SDPA so that it takes the model
        (lambda model: model.set_attn_implementation("sdpa"), False, "implementation 'sdpa' for a prompt of 200 keys"),
    ],
    ids=["gradients", "another implementation"],
)
def test_the_first_long_prompt_that_cannot_run_s2o_is_warned_about_once(model, caplog, change, gradients, words):
    with torch.no_grad():
        model(prompt(200))
    change(model)
    with torch.set_grad_enabled(gradients):
        model(prompt(99))
        assert warnings(caplog) == []
        for _ in range(2):
            model(prompt(200))
    [warning] = warnings(caplog)
    assert words in warning


@pytest.mark.parametrize(("longest", "count"), [({"full_attention": 100}, 1), (100, 1), (99, 0)])
def test_requests_of_a_batch_are_long_by_their_keys(model, caplog, longest, count):
    """A batch of continuous batching has the new tokens of all requests in one row."""
    model.set_attn_implementation("eager")
    [attention] = [layer.self_attn for layer in model.model.layers if layer.self_attn._forward_pre_hooks]
    get_layer_states(model)[0].watch.check_forward(attention, (torch.zeros(1, 300, 64),), {"max_length_k": longest})
    assert len(warnings(caplog)) == count


def test_a_model_that_was_patched_again_and_unpatched_is_not_watched(model):
    profile = make_profile(model, 0.5)
    with patched(patch(model, profile), profile):
        pass
    assert [len(layer.self_attn._forward_pre_hooks) for layer in model.model.layers] == [1, 0]
    unpatch(model)
    assert not any(layer.self_attn._forward_pre_hooks for layer in model.model.layers)
