"""A calibration on two worker processes: the same bytes as in one process, whatever happens to the workers.

Real processes on the CPU, real signals. On a GPU the same code runs; what differs are times, which a CPU has none of.
"""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("distributed", reason="dask.distributed is not installed ('.[distributed]')")

import dask
from distributed.utils import get_mp_context

from calibrate.journal import Journal
from calibrate.pipeline import calibrate
from calibrate.work import cluster
from calibrate.work.cluster import WorkerInfo, connect_cluster
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.errors import ConfigError, ModelError, ResourceError
from support.tiny import recipe

SLOW = pytest.mark.slow(reason="starts worker processes for a whole calibration")
EXHAUSTIVE = pytest.mark.exhaustive(reason="further ways in which workers come, go and differ, with processes for each")

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def workers_at_once(monkeypatch, request):
    """Workers have one thread, because with more torch adds up in another order; one that is silent is given up soon.

    In `make test` they begin as copies of a process that has imported all they need, which saves half of the time.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folders = ROOT, ROOT / "tests", Path(__file__).parent, os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))
    method = "spawn" if request.node.get_closest_marker("exhaustive") else "forkserver"
    changes = {"distributed.scheduler.worker-ttl": "25s", "distributed.worker.multiprocessing-method": method}
    with dask.config.set(changes):
        get_mp_context().set_forkserver_preload(["calibrate.pipeline", "calibrate.work.cluster", "transformers"])
        yield


def cluster_recipe(folder, out, **changes):
    return recipe(folder, out, device="cpu", lengths=(256, 512), num_certify=3, check_lengths=(), **changes)


@pytest.fixture(scope="module")
def undisturbed(tiny_folder, tmp_path_factory):
    """The profile of a plain run, without Dask."""
    path = tmp_path_factory.mktemp("plain") / "p.safetensors"
    assert calibrate(cluster_recipe(tiny_folder, path), progress=False).written
    return path.read_bytes()


@dataclass(frozen=True)
class Act:
    """An item that does something to its worker the first time, and says in which process it ran."""

    deed: str
    mark: Path
    affinity: object = None
    stage: str = "acts"

    def run(self, worker):
        first = not self.mark.exists()
        with self.mark.open("a") as file:
            file.write("x")
        if self.deed == "always die" or (self.deed == "die" and first):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.deed == "hang" and first:
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.deed == "fail" and first:
            raise RuntimeError("a cosmic ray")
        if self.deed == "always fail":
            raise RuntimeError("a bug")
        if self.deed == "refuse":
            raise ModelError("layer 3 holds inf")
        return os.getpid()


@pytest.fixture
def workers(tiny_folder, tmp_path):
    with connect_cluster(cluster_recipe(tiny_folder, tmp_path / "p", gpus=2), []) as executor:
        yield executor


@EXHAUSTIVE
def test_items_that_kill_hang_or_fail_run_elsewhere_and_not_for_ever(workers, tmp_path):
    """One cluster for all of it, in the order in which it gets worse."""
    assert workers.size == 2
    assert workers.submit(Act("nothing", tmp_path / "0")).result() != os.getpid()
    failed = tmp_path / "failed"
    workers.submit(Act("fail", failed)).result()
    assert failed.read_text() == "xx"
    with pytest.raises(ModelError, match="layer 3 holds inf"):  # the model's fault, wherever it runs
        workers.submit(Act("refuse", tmp_path / "refused")).result()
    assert (tmp_path / "refused").read_text() == "x"
    with pytest.raises(ResourceError, match=r"failed 3 times \(a bug"):
        workers.submit(Act("always fail", tmp_path / "bug")).result()
    assert (tmp_path / "bug").read_text() == "xxx"
    died, others = tmp_path / "died", [Act("nothing", tmp_path / f"other{number}") for number in range(6)]
    pending = [workers.submit(item) for item in (Act("die", died), *others)]
    assert os.getpid() not in {future.result() for future in pending}
    assert died.read_text() == "xx"
    hung = tmp_path / "hung"
    workers.submit(Act("hang", hung)).result()
    assert hung.read_text() == "xx"
    assert workers.workers.lost_count == 2
    with pytest.raises(ResourceError, match=r"failed 3 times \(its worker is gone"):
        workers.submit(Act("always die", tmp_path / "poison")).result()
    assert (tmp_path / "poison").read_text() == "xxx"
    assert workers.submit(Act("nothing", tmp_path / "after")).result()  # workers came back


def children():
    """The worker processes of this one, by their numbers."""
    import psutil

    processes = psutil.Process().children(recursive=True)
    if dask.config.get("distributed.worker.multiprocessing-method") == "forkserver":  # whose children they are
        return [process.pid for process in processes if process.ppid() != os.getpid()]
    return [process.pid for process in processes if "spawn_main" in " ".join(process.cmdline())]


@SLOW
@pytest.mark.parametrize(("number", "stage"), [
    pytest.param(signal.SIGKILL, "curves", id="killed"),
    pytest.param(signal.SIGKILL, "proof", marks=EXHAUSTIVE, id="killed-later"),
    pytest.param(signal.SIGSTOP, "curves", marks=EXHAUSTIVE, id="hung"),
])  # fmt: skip
def test_a_worker_that_is_lost_in_the_middle_changes_nothing(
    number, stage, tiny_folder, undisturbed, tmp_path, monkeypatch
):
    """It is lost as soon as something of the stage is in the journal."""
    lost = []
    real = Journal.put_all

    def put_all(journal, kind, entries, **named):
        real(journal, kind, entries, **named)
        if kind.startswith(stage) and not lost:
            lost.append(children()[0])
            os.kill(lost[0], number)

    monkeypatch.setattr(Journal, "put_all", put_all)
    warnings = []
    monkeypatch.setattr(cluster.log, "warning", lambda text, *values: warnings.append(text % values))
    result = calibrate(cluster_recipe(tiny_folder, tmp_path / "p.safetensors", gpus=2), progress=False)
    assert lost
    assert result.written
    assert (tmp_path / "p.safetensors").read_bytes() == undisturbed
    # near the end nobody may need it any more
    assert stage == "proof" or any("what it had runs elsewhere" in text for text in warnings)


class Client:
    """Of a scheduler with a worker for each of these GPUs, which have loaded the same model."""

    def __init__(self, *devices):
        self.devices = list(devices)

    def register_plugin(self, plugin):
        pass

    def unregister_worker_plugin(self, name):
        pass

    def nthreads(self):
        return dict.fromkeys(range(len(self.devices)), 1)

    def submit(self, function, plugin, method, *, workers, pure):
        loaded = Future()
        loaded.set_result((WorkerInfo("tiny", None, "f", self.devices[workers[0]], {}, True), 1.0))
        return loaded


H100, H200 = (DeviceIdentity("cuda", f"NVIDIA {name}", (9, 0), 132, 80 << 30) for name in ("H100", "H200"))
L40S = DeviceIdentity("cuda", "NVIDIA L40S", (8, 9), 142, 44 << 30)


@pytest.fixture
def executor_on():
    with ExitStack() as stack:

        def executor_on(*devices, target=None):
            recipe = SimpleNamespace(scheduler="tcp://head:8786", gpus=None, target_gpu=target)
            executor = cluster.ClusterExecutor(client := Client(*devices), recipe, [])
            stack.callback(executor.close)
            return executor, client

        yield executor_on


def test_a_run_is_for_one_kind_of_gpu(executor_on):
    """The kind is that of all workers, or the one of theirs that is named."""
    assert executor_on(H100, H100)[0].device == H100
    assert executor_on(H100, H200, target="h200")[0].device == H200
    with pytest.raises(ConfigError, match=r"target_gpu 'A100' is no worker's: there are NVIDIA H100 \(sm_90, 132 SMs"):
        executor_on(H100, target="A100")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"several kinds .*NVIDIA H200.*: name one with --target-gpu"):
            executor_on(H100, H200)


def test_a_worker_of_another_kind_is_not_used_whenever_it_joins(executor_on, tmp_path, caplog):
    small = DeviceIdentity("cuda", "NVIDIA RTX 4060 Ti", (8, 9), 34, 8 << 30)
    large = replace(small, memory_bytes=16 << 30)  # called the same
    executor, client = executor_on(large, H100, small, target="4060")
    assert (executor.device, executor.size) == (small, 1)
    client.devices += [L40S, small, large]
    for _ in range(2):  # they are asked first
        executor.workers.refresh(at_once=True)
    assert executor.list_addresses(Act("nothing", tmp_path / "0")) == [2, 4]
    assert caplog.messages.count(f"worker 3 is not used: it has {L40S}, and the run is for {small}") == 1
    assert sum("is not used" in text for text in caplog.messages) == 4


@EXHAUSTIVE
def test_a_scheduler_of_ones_own_with_a_worker_that_joins_late(tiny_folder, undisturbed, tmp_path):
    """Started as a user would: dask scheduler, dask worker; the second worker comes when work has begun."""
    port, log = 18786, (tmp_path / "dask.log").open("w")
    address = f"tcp://127.0.0.1:{port}"
    common = {"stdout": log, "stderr": log, "cwd": tmp_path}
    worker = [sys.executable, *f"-m dask worker {address} --nthreads 1 --no-dashboard".split()]
    scheduler = [sys.executable, *f"-m dask scheduler --host 127.0.0.1 --port {port} --no-dashboard".split()]
    started = [subprocess.Popen(arguments, **common) for arguments in (scheduler, worker)]
    late = threading.Timer(6.0, lambda: started.append(subprocess.Popen(worker, **common)))
    late.start()
    try:
        result = calibrate(cluster_recipe(tiny_folder, tmp_path / "p.safetensors", scheduler=address), progress=False)
        assert result.written
        assert (tmp_path / "p.safetensors").read_bytes() == undisturbed
    finally:
        late.cancel()
        for process in started:
            process.terminate()
        for process in started:
            process.wait()
        log.close()
