"""A calibration on two worker processes: the same bytes as in one process, whatever happens to the workers.

Real processes on the CPU, real signals. On a GPU the same code runs; what differs are times, which a CPU has none of.
"""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("distributed", reason="dask.distributed is not installed (s2o[distributed])")

import dask

from calibrate import pipeline
from calibrate.api import finished_kinds
from calibrate.journal import Journal
from calibrate.machine import on_this_machine
from calibrate.pipeline import calibrate
from calibrate.recipe import Recipe
from calibrate.work import cluster
from calibrate.work.cluster import cluster_executor
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.errors import ConfigError, ModelError, ResourceError
from s2o_runtime.profile import load_profile
from support.pretended_gpus import FAST_ROWS, GPUS, NAME, RAN, UNIT, PretendingWorker, ran
from support.tiny import recipe

SLOW = pytest.mark.slow(reason="starts worker processes for a whole calibration")
EXHAUSTIVE = pytest.mark.exhaustive(reason="further ways in which workers come, go and differ, with processes for each")

ROOT = Path(__file__).parents[2]
TIMES = {  # in the journal, and where the seconds are in an entry
    "tile": lambda value: value[0],
    "timing": lambda value: value["seconds"],
    "crossover": lambda value: value[0][0],
    "prefill": lambda value: value["patched"],
}


@pytest.fixture
def short_silence():
    """A worker that stands still is given up after seconds, where Dask's default is minutes."""
    with dask.config.set({"distributed.scheduler.worker-ttl": "25s"}):
        yield


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """In the workers too: with another number of threads torch adds up in another order."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    )


def made(folder, out, **changes):
    return recipe(folder, out, device="cpu", **{"num_certify": 9, "check_lengths": (), **changes})


@pytest.fixture(scope="module")
def undisturbed(tiny_folder, tmp_path_factory):
    """The profile of a plain run, without Dask."""
    path = tmp_path_factory.mktemp("plain") / "p.safetensors"
    assert calibrate(made(tiny_folder, path), progress=False).written
    return path.read_bytes()


@dataclass(frozen=True)
class Act:
    """An item that does something to its worker the first time, and says in which process it ran."""

    deed: str
    mark: Path
    affinity: object = None
    stage: str = "acts"
    timed: bool = False

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
def workers(tiny_folder, tmp_path, short_silence):
    with cluster_executor(made(tiny_folder, tmp_path / "p", gpus=2), []) as executor:
        yield executor


@EXHAUSTIVE
def test_items_that_kill_hang_or_fail_run_elsewhere_and_not_for_ever(workers, tmp_path):
    """One cluster for all of it, in the order in which it gets worse."""
    executor = workers
    assert executor.size == 2
    assert executor.submit(Act("nothing", tmp_path / "0")).result() != os.getpid()
    failed = tmp_path / "failed"
    executor.submit(Act("fail", failed)).result()
    assert failed.read_text() == "xx"
    with pytest.raises(ModelError, match="layer 3 holds inf"):  # the model's fault, wherever it runs
        executor.submit(Act("refuse", tmp_path / "refused")).result()
    assert (tmp_path / "refused").read_text() == "x"
    with pytest.raises(ResourceError, match=r"failed 3 times \(a bug"):
        executor.submit(Act("always fail", tmp_path / "bug")).result()
    assert (tmp_path / "bug").read_text() == "xxx"
    died, others = tmp_path / "died", [Act("nothing", tmp_path / f"other{number}") for number in range(6)]
    pending = [executor.submit(item) for item in (Act("die", died), *others)]
    assert len({one.result() for one in pending}) >= 1
    assert died.read_text() == "xx"
    hung = tmp_path / "hung"
    executor.submit(Act("hang", hung)).result()
    assert hung.read_text() == "xx"
    assert executor.workers.lost == 2
    with pytest.raises(ResourceError, match=r"failed 3 times \(its worker is gone"):
        executor.submit(Act("always die", tmp_path / "poison")).result()
    assert (tmp_path / "poison").read_text() == "xxx"
    assert executor.submit(Act("nothing", tmp_path / "after")).result()  # workers came back


def children():
    """The worker processes of this one, by their numbers."""
    import psutil

    return [
        child.pid
        for nanny in [psutil.Process()]
        for child in nanny.children(recursive=True)
        if "spawn_main" in " ".join(child.cmdline())
    ]


@SLOW
@pytest.mark.parametrize(
    ("number", "stage"),
    [
        pytest.param(signal.SIGKILL, "curves", id="killed"),
        pytest.param(signal.SIGKILL, "proof", marks=EXHAUSTIVE, id="killed-later"),
        pytest.param(signal.SIGSTOP, "curves", marks=EXHAUSTIVE, id="hung"),
    ],
)
def test_a_worker_that_is_lost_in_the_middle_changes_nothing(
    number, stage, tiny_folder, undisturbed, tmp_path, monkeypatch, short_silence
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
    seen = []
    monkeypatch.setattr(cluster.log, "warning", lambda text, *values: seen.append(text % values))
    result = calibrate(made(tiny_folder, tmp_path / "p.safetensors", gpus=2), progress=False)
    assert lost
    assert result.written
    assert (tmp_path / "p.safetensors").read_bytes() == undisturbed
    gone = [text for text in seen if "what it had runs elsewhere" in text]
    assert gone or stage == "proof"  # near the end nobody may need it any more


def test_options_that_do_not_fit_are_named(tmp_path):
    base = {"model": "demo", "lengths": (1024,), "out": tmp_path / "p"}
    for options, message in [
        ({"gpus": 2, "scheduler": "tcp://a:1"}, "leave one out"),
        ({"scheduler": "head-node"}, "is no address"),
        ({"target_gpu": ("H200",)}, "give gpus or scheduler"),
        ({"target_gpu": ("all",)}, "give gpus or scheduler"),
        ({"target_gpu": ("all", "H200"), "gpus": 2}, "leave the others out"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Recipe.of(base | options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a host without a GPU")
def test_a_host_without_gpus_may_coordinate_those_that_have_some(tmp_path):
    options = {"model": "demo", "device": "cuda", "target_gpu": ("NVIDIA H200",)}
    made, device = on_this_machine(options | {"scheduler": "tcp://head:8786"})
    assert (made.device, made.lengths, device.name) == ("cuda", (8192, 32768), "NVIDIA H200")
    assert made.out == Path("profiles/demo/nvidia-h200/rel-mse-0.001.safetensors")
    with pytest.raises(ResourceError, match="is not here"):
        on_this_machine(options | {"gpus": 2})
    several, _ = on_this_machine(options | {"scheduler": "tcp://head:8786", "target_gpu": ("all",)})
    assert several.out == Path("profiles/demo/rel-mse-0.001.safetensors")
    assert several.for_gpu("nvidia-h200").out == made.out
    assert (
        several.for_gpu("nvidia-h200").journal_path == several.journal_path == Path("profiles/demo/demo.journal.sqlite")
    )


def test_times_are_taken_on_the_target_kind():
    """Which of the workers' GPUs that is."""
    h100, h200 = (DeviceIdentity("cuda", f"NVIDIA {name}", (9, 0), 132, 1) for name in ("H100", "H200"))
    l40s = GPUS["L40S"]

    def executor(*devices, target=None):
        made = object.__new__(cluster.ClusterExecutor)
        ready = {number: SimpleNamespace(device=device) for number, device in enumerate(devices)}
        made.workers, made._target, made._kinds = SimpleNamespace(ready=ready), target, []
        return made

    assert executor(h100, h100)._first_kind() == h100
    assert executor(h100, h200, target=("h200",))._first_kind() == h200
    with pytest.raises(ConfigError, match="there are NVIDIA H100"):
        executor(h100, target=("A100",))._first_kind()
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"NVIDIA H200.*--target-gpu all"):
            executor(h100, h200)._first_kind()
    assert executor(h200, h100, h200, target=("all",)).kinds() == [h100, h200]
    assert executor(h200, h100, l40s, target=("L40S", "h200", "NVIDIA H200")).kinds() == [l40s, h200]
    with pytest.raises(ConfigError, match="'A100' is no worker's"):
        executor(h100, h200, target=("h100", "A100")).kinds()
    assert cluster.alike(h100, h100)
    assert not cluster.alike(h100, h200)

    def runs(device, **kind):
        return cluster.may_run(device, SimpleNamespace(**{"timed": False} | kind), h200)

    assert [runs(device, timed=True) for device in (h200, h100, l40s)] == [True, False, False]
    assert [runs(device, tiled=True) for device in (h200, h100, l40s)] == [True, True, False]  # has its tiles, or not
    assert [runs(device) for device in (h200, h100, l40s)] == [True, True, True]


def test_kinds_that_are_called_the_same_get_folders_of_their_own():
    small = DeviceIdentity("cuda", "NVIDIA RTX 4060 Ti", (8, 9), 34, 8 << 30)
    large, other = replace(small, memory_bytes=16 << 30), replace(small, name="NVIDIA L40S")
    assert not cluster.alike(small, large)
    assert [pipeline._folder(kind, [small, other, large]) for kind in (small, other, large)] == [
        "nvidia-rtx-4060-ti-34-sms-8-gib", "nvidia-l40s", "nvidia-rtx-4060-ti-34-sms-16-gib",
    ]  # fmt: skip
    assert pipeline._folder(small, [small]) == "nvidia-rtx-4060-ti"


@pytest.fixture
def mixed(tiny_folder, tmp_path, monkeypatch):
    """A recipe for two workers whose GPUs differ; what they ran is in the file `ran`."""

    def environments(recipe, count):
        return [{"OMP_NUM_THREADS": "1", NAME: gpu, RAN: str(tmp_path / "ran")} for gpu in ("H200", "L40S")]

    def build(**changes):
        options = {"gpus": 2, "segments": (128, 256), "num_certify": 0, "target_gpu": ("all",)} | changes
        return made(tiny_folder, tmp_path / "p.safetensors", **options)

    monkeypatch.setattr(cluster, "_environments", environments)
    monkeypatch.setattr(cluster, "S2OWorker", PretendingWorker)
    return build


@EXHAUSTIVE
def test_one_run_makes_a_profile_for_each_kind_of_gpu(mixed, tmp_path):
    outcomes = list(finished_kinds(mixed(), progress=False))
    assert [outcome.device for outcome in outcomes] == list(GPUS.values())
    assert all(outcome.result.written for outcome in outcomes)
    names = ["nvidia-h200", "nvidia-l40s"]
    assert [outcome.recipe.out for outcome in outcomes] == [tmp_path / name / "p.safetensors" for name in names]
    for outcome, name in zip(outcomes, GPUS, strict=True):
        profile = load_profile(outcome.recipe.out)
        assert profile.device == GPUS[name]
        assert outcome.result.report_files[-1] == outcome.recipe.out.with_name("p.report.html")
        tiles = {config.tile for bucket in profile.layers for config in bucket if not config.is_dense}
        assert {(tile.block_m, tile.dense_below) for tile in tiles} == {(FAST_ROWS[name], int(UNIT[name]))}

    done = ran(tmp_path / "ran")
    assert sum(item.item == "LayerCurves" for item in done) == 2 * 2 * 2  # once, by halves of the prompts
    assert {item.gpu for item in done if item.item == "LayerCurves"} == set(GPUS)
    assert {item.item for item in done if item.timed} == {
        "Compilation", "TileTime", "RankingCost", "CallTime", "Crossovers", "LayerTime",
    }  # fmt: skip
    of_tiles = [item for item in done if item.rows]
    assert {item.item for item in of_tiles} == {"CallTime", "AdjustStep", "LastStep"}
    assert all(item.rows == FAST_ROWS[item.gpu] for item in of_tiles)
    with Journal.read(outcomes[0].recipe.journal_path) as journal:
        assert len(journal.entries("curves")) == 2 * 2
        times = [
            (key["gpu"][0].removeprefix("NVIDIA "), seconds)
            for kind, read in TIMES.items()
            for key, value in journal.entries(kind)
            for seconds in [read(value)]
        ]
    assert {gpu for gpu, _ in times} == set(GPUS)
    assert all(UNIT[gpu] <= seconds <= 10 * UNIT[gpu] for gpu, seconds in times)  # what was made up there

    # one of the kinds by itself finds everything, although it needs fewer shapes of curves
    (tmp_path / "ran").unlink()
    alone = mixed(target_gpu=("L40S",), journal=outcomes[1].recipe.journal_path)
    assert calibrate(alone, progress=False).work == {}
    assert not (tmp_path / "ran").exists()
    assert alone.out.read_bytes() == outcomes[1].recipe.out.read_bytes()


@EXHAUSTIVE
def test_a_scheduler_of_ones_own_with_a_worker_that_joins_late(tiny_folder, undisturbed, tmp_path):
    """Started as a user would: dask scheduler, dask worker; the second worker comes when work has begun."""
    port, log = 18786, (tmp_path / "dask.log").open("w")
    address = f"tcp://127.0.0.1:{port}"
    common = {"stdout": log, "stderr": log, "cwd": tmp_path}
    worker = [sys.executable, "-m", "dask", "worker", address, "--nthreads", "1", "--no-dashboard"]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "dask", "scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard"],
            **common,
        ),
        subprocess.Popen(worker, **common),
    ]
    late = threading.Timer(6.0, lambda: started.append(subprocess.Popen(worker, **common)))
    late.start()
    try:
        result = calibrate(made(tiny_folder, tmp_path / "p.safetensors", scheduler=address), progress=False)
        assert result.written
        assert (tmp_path / "p.safetensors").read_bytes() == undisturbed
    finally:
        late.cancel()
        for process in started:
            process.terminate()
        for process in started:
            process.wait()
        log.close()


@EXHAUSTIVE
def test_a_scheduler_that_does_not_answer_is_one_sentence(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "CONNECT", 1)
    with pytest.raises(ResourceError, match=r"tcp://127.0.0.1:9 does not answer"):
        calibrate(made(tiny_folder, tmp_path / "p", scheduler="tcp://127.0.0.1:9"), progress=False)
