"""Fixtures of tests that only matter on a GPU: models and servers with compiled kernels, memory, times."""

import os

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
def replays(monkeypatch):
    """For every call that has a plan, whether the plan is used."""
    return count_replays(monkeypatch)
