"""What every test of a compiled kernel needs: a GPU that its tile is for."""

import os

import pytest
import torch

from s2o_runtime.kernels.plan import LaunchPlan
from s2o_runtime.tiles import find_tile_obstacle


@pytest.fixture(autouse=True)
def _gpu(request):
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    given = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if "tile" in given:
        head_dim = given["shape"][5] if "shape" in given else given.get("head_dim", 128)
        obstacle = find_tile_obstacle(given["tile"], head_dim, torch.cuda.get_device_capability())
        if obstacle:
            pytest.skip(obstacle)


@pytest.fixture
def alone():
    """A limit on times holds where nothing else uses the GPU and its host."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("other tests run beside it: run it without -n")


@pytest.fixture
def replays(monkeypatch):
    """For every call that had a plan, whether the plan was used."""
    used, replay = [], LaunchPlan.replay

    def counted(plan, inputs):
        done = replay(plan, inputs)
        used.append(done is not None)
        return done

    monkeypatch.setattr(LaunchPlan, "replay", counted)
    return used
