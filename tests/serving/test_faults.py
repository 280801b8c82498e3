"""Faults of S2O in a server, the switch, and shadow mode: whatever S2O does, the stock backend can answer."""

import pytest
import torch
from triton.compiler.errors import CompilationError

from s2o_runtime.dense_reason import DenseReason
from s2o_runtime.errors import InputError, get_first_line
from s2o_runtime.monitor.counters import REMEMBERED
from s2o_runtime.serving import attend
from s2o_runtime.serving.batch import Batch
from s2o_runtime.serving.fit import Rank
from support.server_batches import alone, check_close, dense

FAULTS = {
    "launch": RuntimeError("Triton Error [CUDA]: too many resources requested for launch"),
    "compile": CompilationError("x", None, "no such function"),
    "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB."),
    "input": InputError("the tensors do not fit"),
}


def fail(monkeypatch, fault, owner=attend, name="s2o_attention_paged"):
    """Let a function raise; returns its calls."""
    calls = []

    def failing(*arguments, **named):
        calls.append(arguments)
        raise fault

    monkeypatch.setattr(owner, name, failing)
    return calls


@pytest.mark.parametrize("kind", FAULTS)
def test_a_layer_with_a_fault_is_the_stock_backends_from_then_on(kind, make_engine, monkeypatch, caplog):
    """On rank 1 of 2; rank 0 goes on without a word from it, since each computes its own heads."""
    ranks = [make_engine(rank=Rank(index, 2)) for index in range(2)]
    for index, engine in enumerate(ranks):
        short, *long = [engine.add(length) for length in (100, 300, 300)]
        with monkeypatch.context() as patched:
            calls = fail(patched, FAULTS[kind]) if index else None
            batches = [[(request, len(request)) for request in batch] for batch in ([short, long[0]], long[1:])]
            outputs = list(map(engine.outputs, batches))
        config = engine.server.fit.layers[0].config(300)
        expected = [dense(r, 300) if index else alone(r, 300, config).out for r in long]
        check_close(torch.cat(outputs), torch.cat([dense(short, 100), *expected]))
    counters, layer = ranks[1].server.counters, ranks[1].server.fit.layers[0]
    assert (len(calls), counters.faults) == (1, {(0, type(FAULTS[kind]).__name__): 1})
    reasons = {DenseReason.from_sentence(reason) for _, _, reason in counters.rows}
    assert DenseReason.FAULT in reasons <= {DenseReason.FAULT, DenseReason.TOO_SHORT}
    assert layer.rejected.endswith(f"{type(FAULTS[kind]).__name__}: {get_first_line(FAULTS[kind])}")
    assert "S2O failed in layer 0, the stock backend answers" in caplog.text
    assert not ranks[0].server.counters.faults


@pytest.mark.parametrize("where", [(Batch, "__init__"), (attend, "run_self_test"), (Batch, "plan")], ids=str)
def test_a_fault_beside_the_call_is_the_stock_backends_batch(where, make_engine, monkeypatch):
    engine = make_engine(tested=False)
    calls = fail(monkeypatch, KeyError("x"), *where)
    check_close(engine.outputs([(request := engine.add(300), 300)]), dense(request, 300))
    assert list(engine.server.counters.faults.values()) == [len(calls)] == [1]
    assert DenseReason.FAULT in {DenseReason.from_sentence(reason) for _, _, reason in engine.server.counters.rows}


def test_a_file_switches_all_layers_off_and_on_again(make_engine, tmp_path):
    engine = make_engine()
    switch = engine.server.fit.off_file = tmp_path / "off"
    for change in (switch.touch, switch.unlink):
        change()
        engine.outputs([(engine.add(300), 300)])
    assert engine.counted() == {("dense", DenseReason.SWITCHED_OFF): 300, ("s2o", "reference backend"): 300}


def test_in_shadow_mode_the_stock_backend_answers_and_errors_are_those_of_s2o(make_engine):
    """In one of two calls of a layer."""
    engine = make_engine()
    counters, errors = engine.server.counters, []
    counters.shadow_every = 2
    for request in [engine.add(300) for _ in range(4)]:
        out, truth = engine.outputs([(request, 300)]), dense(request, 300)
        check_close(out, truth)
        ours = alone(request, 300, engine.server.fit.layers[0].config(300)).out
        errors.append(float((ours - truth).square().sum() / truth.square().sum()))
    assert counters.rows == {(0, "dense", DenseReason.SHADOW): 1200}
    assert [float(error) for error in counters.shadow_errors[0]] == pytest.approx(errors[1::2], rel=1e-3)
    assert counters.timed == {(0, "dense"): 4, (0, "s2o"): 2}
    assert counters.requests == 0


def test_a_request_of_several_batches_and_layers_is_counted_once(make_engine):
    engine = make_engine()
    chunked, short = engine.add(400), engine.add(60)
    for parts in ([(chunked, 200), (short, 60)], [(chunked, 200)]):
        engine.outputs(parts)
    assert engine.server.counters.requests == 1
    engine.server.counters.count_requests(map(str, range(REMEMBERED)))
    engine.outputs([(engine.add(300), 300)])
    assert engine.server.counters.requests == REMEMBERED + 2
