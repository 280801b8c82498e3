"""Fixtures of all tests. Without a GPU kernels run in Triton's interpreter, said before triton is imported."""

import gc
import importlib.util
import logging
import os
import signal

import pytest

gc.disable()  # what is imported and collected stays: to look through it again and again takes half the time of it

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton"):
        from support.interpreter import hasten

        hasten()

# a shell lets what it starts in the background ignore interrupts, and so would the programs that tests interrupt
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def _seed() -> None:
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # without the stack that torch keeps for GPUs that may come
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _raise_faults(request, monkeypatch):
    """Raise the exceptions that a server survives, but in tests of faults, by their names."""
    from s2o_runtime.monitor.counters import Counters

    def count_fault(counters, layer, error):
        raise error

    if "_fault" not in request.node.name:
        monkeypatch.setattr(Counters, "count_fault", count_fault)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A model and tokenizer that are calibrated in seconds; tests do not change them."""
    from support.tiny import save_tiny

    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def eager():
    """A small llama with eager attention; tests do not change it."""
    from support.models import new_model

    torch.manual_seed(1)
    return new_model(implementation="eager")


@pytest.fixture(scope="session")
def demo():
    """The demo model, whole; tests do not change it."""
    from calibrate.model.models import load

    return load("demo", "cpu", resident=True)


@pytest.fixture
def journal(tmp_path):
    """An empty journal."""
    from calibrate.journal import Journal

    with Journal.open(tmp_path / "journal", {}) as journal:
        yield journal


@pytest.fixture(autouse=True)
def _log():
    """Servers set the level of S2O's log and add handlers to it."""
    log = logging.getLogger("s2o_runtime")
    level, handlers = log.level, log.handlers[:]
    yield
    if log.level != level:  # which looks through all loggers that there are
        log.setLevel(level)
    log.handlers[:] = handlers


@pytest.fixture
def info_log(caplog):
    """Return what S2O says of itself at level INFO and above."""
    caplog.set_level(logging.INFO, logger="s2o_runtime")
    return caplog


@pytest.fixture
def nan_filled():
    """Uninitialised memory is NaN, or the largest integer, so that an unwritten element shows."""
    previous = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.ones(1).new_empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(previous)


@pytest.fixture
def offline(monkeypatch):
    """Any attempt to reach the hub is an error."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
