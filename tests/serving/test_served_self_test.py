"""The self-test of served layers, between fakes of both servers."""

import pytest
import torch

from s2o_runtime.dense_reason import DenseReason
from s2o_runtime.monitor.counters import Counters
from s2o_runtime.serving import attend as self_test
from s2o_runtime.serving.attend import FEWEST_ROWS
from s2o_runtime.serving.fit import TEST_KEYS
from support.server_batches import alone, check_close, dense, two_layers

UNTESTED = DenseReason.UNTESTED
ON_CPU = ("s2o", "reference backend")


def test_a_layer_is_dense_until_a_prompt_has_tested_it(make_engine):
    engine = make_engine(tested=False)
    first, second = engine.add(TEST_KEYS + 50), engine.add(300)
    check_close(engine.outputs([(first, TEST_KEYS + 50)]), dense(first, TEST_KEYS + 50))
    layer = engine.server.fit.layers[0]
    assert engine.counted() == {("dense", UNTESTED): TEST_KEYS + 50}
    assert layer.tested
    assert layer.rejected is None
    check_close(engine.outputs([(second, 300)]), alone(second, 300, layer.config(300)).out)
    assert engine.counted() == {("dense", UNTESTED): TEST_KEYS + 50, ON_CPU: 300}


def test_a_chunk_behind_a_prefix_tests_a_layer_and_a_short_prompt_does_not(make_engine):
    """If a layer could be sparse but cannot be tested, it is dense all the same."""
    engine = make_engine(tested=False)
    short, chunked = engine.add(TEST_KEYS - 1), engine.add(TEST_KEYS + FEWEST_ROWS)
    engine.outputs([(short, TEST_KEYS - 1)])
    assert not engine.server.fit.layers[0].tested
    assert engine.counted() == {("dense", UNTESTED): TEST_KEYS - 1}
    engine.outputs([(chunked, TEST_KEYS)])
    assert engine.server.fit.layers[0].tested  # by that chunk


def test_a_prompt_that_is_too_short_for_the_profile_tests_layers(make_engine):
    """So that the first long one is sparse."""
    engine = make_engine(two_layers(lengths=(512, 1024)), tested=False)
    short, long = engine.add(TEST_KEYS), engine.add(600)
    engine.outputs([(short, TEST_KEYS)])
    engine.outputs([(long, 600)])
    assert engine.counted() == {("dense", "shorter than the shortest calibrated length"): TEST_KEYS, ON_CPU: 600}


@pytest.mark.parametrize(
    ("wrong", "heads"),
    [
        (lambda out: out.roll(1, 1), [0, 1, 2, 3]),
        (lambda out: torch.cat([out[:, :2], 1.1 * out[:, 2:3], out[:, 3:]], 1), [2]),
        (lambda out: out * float("nan"), [0, 1, 2, 3]),
    ],
    ids=["other heads", "one head", "not a number"],
)
def test_a_layer_whose_output_differs_stays_dense(wrong, heads, make_engine, monkeypatch, caplog):
    right = self_test.s2o_attention_paged
    monkeypatch.setattr(self_test, "s2o_attention_paged", lambda *args, **named: wrong(right(*args, **named)))
    engine = make_engine(tested=False)
    first, second = engine.add(300), engine.add(300)
    engine.outputs([(first, 300)])
    engine.server.counters = Counters()
    check_close(engine.outputs([(second, 300)]), dense(second, 300))
    ((_, path, reason),) = engine.server.counters.rows
    assert path == "dense"
    assert reason.startswith("its self-test failed: without a threshold S2O differs from the stock backend in heads")
    assert [int(part.split(" (")[0]) for part in reason.split("heads ")[1].split(", expected")[0].split(", ")] == heads
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.message.startswith("S2O: layer 0 is dense: its self-test failed")
