"""The op and its kernels, tested on the device at hand: a GPU, or Triton's interpreter where there is none."""

import pytest
import torch

from s2o_runtime.attention.replay import forget_plans
from s2o_runtime.tiles import find_tile_obstacle
from support.kernels import ON_GPU


@pytest.fixture(autouse=True)
def _no_plans():
    forget_plans()
    yield
    forget_plans()


@pytest.fixture(autouse=True)
def _gpu_runs_the_tile(request):
    given = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if ON_GPU and "tile" in given:
        obstacle = find_tile_obstacle(given["tile"], given.get("head_dim", 128), torch.cuda.get_device_capability())
        if obstacle:
            pytest.skip(obstacle)
