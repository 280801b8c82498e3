"""What a patched model says it did: the table against what the operator itself returns for every call."""

import copy
import pickle

import pytest
import torch

from s2o_runtime import Explanation, LayerConfig, TileConfig, explain, patch, s2o_attention
from s2o_runtime.config import HeadConfig
from s2o_runtime.huggingface.hf import layer_states
from s2o_runtime.logs import log_once
from s2o_runtime.monitor.counters import SAMPLES, WARM, Meter
from support.models import LENGTH, RUNS, make_profile, new_model, padded_batch, prompt

SHORT = "shorter than the shortest calibrated length, 100"
CPU = torch.device("cpu")


@pytest.fixture
def model():
    plain = new_model()
    return patch(plain, make_profile(plain, 0.5))


@torch.no_grad()
def test_rows_say_calls_density_and_time(model):
    densities = [[], []]
    batch, mask = padded_batch()
    for call in ({"input_ids": prompt()}, {"input_ids": batch, "attention_mask": mask}, {"input_ids": prompt(150)}):
        model(**call)
        for layer, state in enumerate(layer_states(model)):
            densities[layer].append(float(state.last.density.mean()))
    model(prompt(40))
    model.generate(prompt(), max_new_tokens=3, do_sample=False)
    for layer, state in enumerate(layer_states(model)):
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


@torch.no_grad()
def test_it_prints_a_table(model):
    assert str(explain(model)) == "no attention layer was called"
    model(prompt())
    rows = explain(model)
    lines = str(rows).splitlines()
    assert lines[0].split() == ["layer", "path", "calls", "density", "ms", "reason"]
    assert len(lines) == 3
    for line, row in zip(lines[1:], rows, strict=True):
        cells = line.split(maxsplit=5)
        assert cells[:3] == [str(row["layer"]), "s2o", "1"]
        assert [float(cell) for cell in cells[3:5]] == pytest.approx([row["density"], row["ms"]], rel=1e-2)
        assert cells[5] == RUNS
    assert repr(rows) == str(rows)
    assert {line.index(RUNS) for line in lines[1:]} == {lines[0].index("reason")}


def test_a_table_has_the_error_where_it_was_checked():
    row = {"layer": 11, "path": "s2o", "reason": "why", "calls": 3, "density": 0.25, "ms": None}
    checked = row | {"error": 0.5, "last": 1.25, "high": 0.125}
    assert str(Explanation([checked])) == (
        "layer  path  calls  density  ms  error  last   high  reason\n"
        "   11  s2o       3     0.25   -    0.5  1.25  0.125  why"
    )


def heads(*settings):
    return tuple(HeadConfig(tau, segment, mode) for tau, segment, mode in settings)


@pytest.mark.parametrize("starts", [None, [0, 70], [199, 13]], ids=["", "padded", "mostly-padding"])
@pytest.mark.parametrize("q_len", [230, 131], ids=["whole", "chunk"])
def test_density_from_one_sum_is_that_of_all_heads(starts, q_len):
    """Heads with segments of their own, one of them dense; against `AttentionStats.density`."""
    settings = heads((1.0, 64, "s2o"), (0.3, 128, "s2o"), (1.0, 64, "dense"), (2.0, 64, "s2o"))
    config = LayerConfig(settings, TileConfig(64, 32, 1, 4, 1))
    q, k, v = torch.randn(2, 4, q_len, 32), torch.randn(2, 2, 230, 32), torch.randn(2, 2, 230, 32)
    kv_start = None if starts is None else torch.tensor(starts)
    meter = Meter()
    sample = meter.begin(None, CPU)
    _, _, stats = s2o_attention(q, k, v, config, kv_start=kv_start, return_stats=True)
    meter.end(sample, ("s2o", "why"), stats, CPU)
    expected = float(stats.density.mean())
    assert meter.read()["s2o", "why"].density == pytest.approx(expected, rel=1e-12)
    assert expected < 1.0


def test_samples_are_few_and_spread_over_all_calls():
    meter, kept = Meter(), []
    for number in range(4000):
        sample = meter.begin("kind", CPU)
        if sample is not None:
            kept.append(number)
            meter.end(sample, ("dense", "kind"), None, CPU)
    held = sorted(sample.number for sample in meter._kept["kind"].values())
    assert len(held) == SAMPLES
    # uniform over 4000: of 16 the median lies this far from the middle once in 10^4 times at most
    assert 400 < held[SAMPLES // 2] < 3600
    # 16 + sum of 16 / n, which is 105, give or take four deviations
    assert 65 < len(kept) < 145


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
    assert pickle.loads(pickle.dumps(layer_states(model)[0].meter)).read() == {}
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
