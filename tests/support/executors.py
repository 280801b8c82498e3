"""Executors for tests: one that pretends to be on a GPU, and one that sends everything through pickle and threads."""

import pickle
from concurrent.futures import ThreadPoolExecutor
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


class Pickling(Pretended):
    """Runs items one at a time in a thread, from their pickles, as a worker elsewhere would; calls wait in threads."""

    size = 2

    def __init__(self, worker, device):
        super().__init__(worker, device)
        self._items, self._calls = ThreadPoolExecutor(1), ThreadPoolExecutor(64)

    def submit(self, item):
        return self._items.submit(self._run_pickled, pickle.dumps(item))

    def spread(self, tracks):
        pending = [(item, self.submit(item)) for track in tracks for item in track]
        for item, result in reversed(pending):
            yield item, result.result()

    def run_async(self, call):
        return self._calls.submit(call)

    def _run_pickled(self, item):
        return pickle.loads(pickle.dumps(self._worker.run(pickle.loads(item))))
