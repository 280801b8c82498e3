"""Fixtures of tests that only matter on a GPU: models and servers with compiled kernels, memory, times."""

import os

import pytest
import torch

from s2o_runtime.kernels.plan import LaunchPlan


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
    used, replay = [], LaunchPlan.replay

    def counted(plan, inputs):
        outputs = replay(plan, inputs)
        used.append(outputs is not None)
        return outputs

    monkeypatch.setattr(LaunchPlan, "replay", counted)
    return used
