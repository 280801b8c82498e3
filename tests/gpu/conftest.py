"""Fixtures of tests that only matter on a GPU: models and servers with compiled kernels, memory, times."""

import os
import time

import pytest
import torch

from support.kernels import count_replays


@pytest.fixture(autouse=True)
def _gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")


@pytest.fixture
def alone():
    """A limit on times holds where nothing else uses the GPU and its host."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("other tests run beside it: run it without -n")


@pytest.fixture
def time_host():
    """Microseconds of each call on the host, in bursts short enough for the launch queue, so none waits for the GPU."""

    def measure(call, bursts, of=1, before=lambda: None):
        times = []
        for _ in range(bursts):
            before()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(of):
                call()
            times.append((time.perf_counter() - begin) / of * 1e6)
        return times

    return measure


@pytest.fixture
def replays(monkeypatch):
    """For every call that has a plan, whether the plan is used."""
    return count_replays(monkeypatch)
