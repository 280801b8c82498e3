"""An executor for tests that pretends to be on a GPU."""

from types import SimpleNamespace

import torch

from calibrate.work.executor import LocalExecutor, WorkerState
from s2o_runtime.devices import DeviceIdentity

CPU = DeviceIdentity("cpu", "cpu")
GPU = DeviceIdentity("cuda", "pretended", (9, 0), 132, 1)


def pretended(geometry, device=CPU, name="tiny"):
    """An executor of this process whose model is a geometry alone, on a CPU that is called something else."""
    weights = SimpleNamespace(device=torch.device("cpu"), held=0, resident=True)
    model = SimpleNamespace(name=name, geometry=geometry, fingerprint="f", weights=weights)
    return Pretended(WorkerState(model), device)


class Pretended(LocalExecutor):
    """On a CPU, but named as another device."""

    def __init__(self, worker, device):
        super().__init__(worker)
        self.device = device
