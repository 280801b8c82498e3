"""Items of work on many GPUs, scheduled by dask.distributed.

This process coordinates: it decides, journals and needs no GPU. Each worker process has one GPU, loads the model itself
and runs one item at a time. Items that continue one another have one worker as their home. If all workers of an item
are gone, it is submitted again to those that are left: it holds everything that its result depends on.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from calibrate.progress import show_status
from calibrate.prompts.prompt import Prompt
from calibrate.recipe import Recipe
from calibrate.versions import collect_versions
from calibrate.work.executor import Item, ItemChain, Pending, WorkerState, WorkItem
from s2o_runtime.devices import DeviceIdentity, identify, is_same_product
from s2o_runtime.errors import ConfigError, ResourceError, S2OError, get_first_line
from s2o_runtime.identity import Geometry

try:
    import dask
    from distributed import Client, KilledWorker, SpecCluster, WorkerPlugin, get_worker, wait
except ImportError as error:
    raise ResourceError("--gpus and --scheduler need Dask: in the clone, pip install '.[distributed]'") from error

ATTEMPTS = 3  # of an item, where it raises and where its worker is lost
POLL_INTERVAL_S = 0.5  # between two looks at the list of workers
FETCH_TIMEOUT_S = 60.0  # to move a result
CONNECT_TIMEOUT_S = 30.0  # to wait for a scheduler
WORKER_TIMEOUT_S = 120.0  # to wait for a worker that can run the rest of the items
MAX_WAITING_CALLS = 512

log = logging.getLogger("calibrate")
T = TypeVar("T")


@dataclass(frozen=True)
class WorkerInfo:
    """A worker's model, device and versions, once its model is loaded."""

    name: str
    geometry: Geometry
    fingerprint: str
    device: DeviceIdentity
    versions: Mapping[str, str]
    resident: bool


class S2OWorker(WorkerPlugin):  # type: ignore[misc]
    """A run's model and prompts in a worker process; Dask sends it to every worker, also to those that join late."""

    def __init__(self, name: str, recipe: Recipe, prompts: Sequence[Prompt]) -> None:
        self.name = name
        self._recipe, self._prompts = recipe, tuple(prompts)

    def setup(self, worker: Any) -> None:
        """Prepare a worker that receives this; the model is loaded later, or loading would hold up heartbeats."""
        self._lock = threading.Lock()  # a worker with several threads runs one item at a time all the same
        self._open = ExitStack()
        self._state: WorkerState | None = None
        if self._recipe.gpus is not None:
            _disable_warnings()

    def run(self, item: WorkItem) -> Any:
        """Run an item; the first one loads the model."""
        with self._lock:
            return self._load().run(item)

    def info(self) -> WorkerInfo:
        """Load the model and describe it and its device."""
        with self._lock:
            state = self._load()
        model = state.loaded
        resident, versions = model.weights.resident, collect_versions()
        return WorkerInfo(model.name, model.geometry, model.fingerprint, state.device, versions, resident)

    def teardown(self, worker: Any) -> None:
        with self._lock:
            self._open.close()
            self._state = None

    def _load(self) -> WorkerState:
        if self._state is None:
            from calibrate.model.models import load
            from calibrate.model.self_test import run_self_test

            recipe = self._recipe
            device = "cuda:0" if recipe.device.startswith("cuda") else recipe.device
            loaded = load(recipe.model, device, seed=recipe.seed, **recipe.loading)
            run_self_test(loaded)
            self._state = self._open.enter_context(WorkerState(loaded).open())
            self._state.register_prompts(self._prompts)
        return self._state


def _disable_warnings() -> None:
    """Let Dask log errors only: the coordinator itself reports workers that it started and lost."""
    logging.getLogger("distributed").setLevel(logging.ERROR)


def _call_in_worker(plugin: str, method: str, *arguments: Any) -> tuple[Any, float]:
    """Call a method of `S2OWorker` in a worker. Returns its result, or an error of the model's, and its seconds."""
    begin = time.monotonic()
    try:
        value = getattr(get_worker().plugins[plugin], method)(*arguments)
    except S2OError as error:  # as a result, because Dask runs again what raises
        value = error
    return value, time.monotonic() - begin


class _Submitted:
    """The result of an item that is with the workers. Where two items may run, that of higher priority runs first."""

    def __init__(self, executor: ClusterExecutor, item: WorkItem, priority: int) -> None:
        self._executor, self.item, self._priority = executor, item, priority
        self._tries = 0
        self._submit()

    def _submit(self) -> None:
        self._tries += 1
        self._addresses = self._executor.list_addresses(self.item)
        self.future = self._executor.workers.submit(
            self._addresses, "run", self.item, retries=ATTEMPTS - self._tries, priority=self._priority
        )

    def submit_again_if_lost(self) -> None:
        """Submit the item again if all workers that were to run it are gone, and its result with them.

        Raises ResourceError if this happened too often, or there is no worker that may run it.
        """
        if self.future.status == "error" or self._executor.workers.ready.keys() & set(self._addresses):
            return
        self.future.cancel()
        if self._tries == ATTEMPTS:
            raise self._make_failure("its worker is gone")
        log.warning("%s runs elsewhere: its worker is gone", self.item)
        self._submit()

    def result(self) -> Any:
        while True:
            self._executor.workers.refresh()
            self.submit_again_if_lost()
            try:
                value, _ = self.future.result(timeout=FETCH_TIMEOUT_S if self.future.done() else POLL_INTERVAL_S)
                break
            except Exception as error:
                if self.future.status != "error":
                    continue  # it runs, or its worker is gone before the result was fetched
                cause = "its worker is gone" if isinstance(error, KilledWorker) else get_first_line(error)
                raise self._make_failure(cause) from error
        if isinstance(value, S2OError):
            raise value
        return value

    def _make_failure(self, cause: str) -> ResourceError:
        return ResourceError(f"{self.item} failed {ATTEMPTS} times ({cause}): see the workers' logs")


class _Workers:
    """The workers of a Dask scheduler that have loaded the run's model."""

    def __init__(self, client: Any, recipe: Recipe, prompts: Sequence[Prompt]) -> None:
        self._client, self._plugin = client, f"s2o-{uuid.uuid4().hex[:12]}"
        client.register_plugin(S2OWorker(self._plugin, recipe, prompts))
        self.ready: dict[str, WorkerInfo] = {}  # by address; all have the same model and versions, and the product
        self._product: DeviceIdentity | None = None  # of the run's GPUs, once it is chosen
        self._asked: dict[str, Any] = {}  # by address, the future of a worker's info; None once that is judged
        self.lost_count = 0  # workers that are gone
        self._lock = threading.Lock()
        self._refreshed = 0.0

    def wait_until_loaded(self, workers_wanted: int | None) -> None:
        """Wait until this many workers have loaded the model; with None, until all that there are have."""
        begun = time.monotonic()
        while True:
            self.refresh(at_once=True)
            loading = any(future is not None for future in self._asked.values())
            if len(self.ready) >= (workers_wanted or math.inf):
                return
            if self.ready and not loading and len(self._asked) >= (workers_wanted or 1):
                return  # all have answered, and some cannot be used
            if not loading and time.monotonic() - begun > WORKER_TIMEOUT_S:
                raise ResourceError(f"no worker is there after {WORKER_TIMEOUT_S:g} s: start workers, one for each GPU")
            time.sleep(POLL_INTERVAL_S / 5)

    def choose_device(self, target: str | None) -> DeviceIdentity:
        """Choose the run's GPU product by its name, by default this machine's or the only one, and its workers.

        Raises ConfigError if no worker has a GPU of that name, or it must name one of several.
        """
        devices = sorted((info.device for info in self.ready.values()), key=lambda item: (str(item), item.memory_bytes))
        names = ", ".join(dict.fromkeys(map(str, devices)))
        if target is not None:
            fitting = [device for device in devices if target.lower() in str(device).lower()]
            if not fitting:
                raise ConfigError(f"target_gpu {target!r} is no worker's: there are {names}")
        else:
            local = identify(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
            fitting = [device for device in devices if is_same_product(local, device)] or devices
            if not all(is_same_product(fitting[0], device) for device in fitting):
                raise ConfigError(f"the workers have GPUs of several kinds ({names}): name one with --target-gpu")
        with self._lock:
            self._product = fitting[0]
            self.ready = {address: info for address, info in self.ready.items() if self._has_product(address, info)}
        return fitting[0]

    def _has_product(self, address: str, info: WorkerInfo) -> bool:
        """Check that a worker has the run's GPU product, as far as it is chosen; warn if not."""
        if self._product is None or is_same_product(self._product, info.device):
            return True
        log.warning("worker %s is not used: it has %s, and the run is for %s", address, info.device, self._product)
        return False

    def refresh(self, at_once: bool = False) -> None:
        """Meet new workers and drop those that are gone; without `at_once` only if the last refresh is not recent."""
        with self._lock:
            if not at_once and time.monotonic() - self._refreshed < POLL_INTERVAL_S:
                return
            self._refreshed = time.monotonic()
            try:
                present = set(self._client.nthreads())
            except Exception as error:  # whatever Dask raises when the scheduler is gone
                raise ResourceError(
                    f"the scheduler cannot be reached any more ({get_first_line(error)}): run the same command again, "
                    "what was measured so far is kept"
                ) from error
            for address in self.ready.keys() - present:
                del self.ready[address]
                self.lost_count += 1
                log.warning("worker %s is gone: what it had runs elsewhere", address)
            self._asked = {address: future for address, future in self._asked.items() if address in present}
            for address in present - self.ready.keys():
                if address not in self._asked:
                    self._asked[address] = self.submit([address], "info")
                elif (future := self._asked[address]) is not None and future.done():
                    self._asked[address] = None
                    self._accept_worker(address, future)

    def _accept_worker(self, address: str, future: Any) -> None:
        """Use a worker whose model is loaded, if it is like the others."""
        try:
            info, seconds = future.result()
        except Exception as error:
            log.warning("worker %s cannot be used: %s", address, get_first_line(error))
            return
        if isinstance(info, S2OError):
            raise info
        reference = next(iter(self.ready.values()), info)
        for name in ("fingerprint", "geometry", "versions"):
            if getattr(info, name) != getattr(reference, name):
                log.warning("worker %s is not used: its %s differ from the others'", address, name)
                return
        if self._has_product(address, info):
            self.ready = {**self.ready, address: info}
            log.info("worker %s: %s, model loaded in %.0f s", address, info.device, seconds)

    def submit(self, addresses: Sequence[str], method: str, *arguments: Any, **options: int) -> Any:
        """Call a method of `S2OWorker` in one of some workers, with options of Dask's, and return Dask's future."""
        return self._client.submit(
            _call_in_worker, self._plugin, method, *arguments, workers=list(addresses), pure=False, **options
        )

    def wait_for_one_of(self, futures: Sequence[Any]) -> None:
        """Wait until one of some calls ended, or it is time to refresh the workers."""
        with self._client.as_current(), contextlib.suppress(TimeoutError):
            wait(futures, timeout=POLL_INTERVAL_S, return_when="FIRST_COMPLETED")

    def close(self) -> None:
        """Let the workers forget the run."""
        with contextlib.suppress(Exception):  # a scheduler that is gone has nothing to forget
            self._client.unregister_worker_plugin(self._plugin)


class ClusterExecutor:
    """Executor on those workers of a Dask scheduler that have the run's GPU product; see `connect_cluster`."""

    def __init__(self, client: Any, recipe: Recipe, prompts: Sequence[Prompt]) -> None:
        self.workers = _Workers(client, recipe, prompts)
        try:
            # all workers of a scheduler may be needed to find the GPU that is named
            self.workers.wait_until_loaded(recipe.gpus or (1 if recipe.target_gpu is None else None))
            self.device = self.workers.choose_device(recipe.target_gpu)
            model = next(iter(self.workers.ready.values()))  # with which all others agree
            self.name, self.geometry, self.fingerprint = model.name, model.geometry, model.fingerprint
            self.resident = all(worker.resident for worker in self.workers.ready.values())
            self._known = frozenset(prompt.sha256 for prompt in prompts)
            self._threads = ThreadPoolExecutor(MAX_WAITING_CALLS, "s2o-wait")
        except BaseException:
            self.workers.close()
            raise
        self._homes: dict[Hashable, str] = {}  # of the present stage: the worker on which items of an affinity run
        self._stage = ""
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        return max(1, len(self.workers.ready))

    def register_prompts(self, prompts: Iterable[Prompt]) -> None:
        if unknown := {prompt.sha256 for prompt in prompts} - self._known:
            raise ValueError(f"{len(unknown)} prompts are not those that the workers were given")

    def submit(self, item: WorkItem) -> Pending[Any]:
        self.workers.refresh()
        return _Submitted(self, item, priority=0)

    def spread(self, tracks: Sequence[ItemChain[Item]]) -> Iterator[tuple[Item, Any]]:
        self.workers.refresh()
        waiting: dict[Any, tuple[Item, _Submitted]] = {}
        for track in tracks:
            for number, item in enumerate(track):  # the same layer of all lengths together, as in one process
                submitted = _Submitted(self, item, priority=-number)
                waiting[submitted.future] = item, submitted
        while waiting:
            self.workers.wait_for_one_of(list(waiting))
            self.workers.refresh()
            for _, submitted in waiting.values():
                submitted.submit_again_if_lost()
            finished = [future for future in waiting if future.done() and waiting[future][1].future is future]
            for item, submitted in [waiting.pop(future) for future in finished]:
                yield item, submitted.result()
            waiting = {submitted.future: (item, submitted) for item, submitted in waiting.values()}

    def run_async(self, call: Callable[[], T]) -> Pending[T]:
        return self._threads.submit(call)

    def list_addresses(self, item: WorkItem) -> list[str]:
        """Return the workers that may run an item: the home of its affinity, or all.

        Raises ResourceError if no worker is there, and none came in time.
        """
        with self._lock:
            begun = time.monotonic()
            while not (able := list(self.workers.ready)):
                if time.monotonic() - begun > WORKER_TIMEOUT_S:
                    problem = f"no worker with {self.device} is there since {WORKER_TIMEOUT_S:.0f} s"
                    remedy = "start one and run the same command again, what was measured so far is kept"
                    raise ResourceError(f"{problem}: {remedy}")
                time.sleep(POLL_INTERVAL_S)
                self.workers.refresh()
            if item.affinity is None:
                return able
            if item.stage != self._stage:
                self._stage, self._homes = item.stage, {}
            home = self._homes.get(item.affinity)
            if home not in able:
                count = Counter(self._homes.values())
                home = self._homes[item.affinity] = min(able, key=lambda address: count[address])
            return [home]

    def describe(self) -> str:
        """Return the workers in one line."""
        text = f"{self.size} workers"
        return f"{text}, {self.workers.lost_count} workers lost" if self.workers.lost_count else text

    def close(self) -> None:
        """Let the workers forget the run."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.workers.close()


@contextmanager
def connect_cluster(recipe: Recipe, prompts: Sequence[Prompt]) -> Iterator[ClusterExecutor]:
    """Yield an executor on the workers that a recipe names: started here, or those of a scheduler.

    Args:
        recipe: names them, and the model that they load.
        prompts: all that items are going to name.

    Raises:
        ConfigError: no worker has a GPU that the recipe names, it must name one of several, or too few are here.
        ModelError: the model cannot be loaded or is not supported.
        ResourceError: the scheduler cannot be reached, or no worker came in time.
    """
    with ExitStack() as stack:
        address = recipe.scheduler or stack.enter_context(_start_cluster(recipe, recipe.gpus or 1))
        client = stack.enter_context(connect(address))
        executor = ClusterExecutor(client, recipe, prompts)
        stack.callback(executor.close)
        stack.enter_context(show_status(executor.describe))
        yield executor


def connect(scheduler: Any) -> Any:
    """Return a client, to be closed, of a scheduler by its address or of a cluster here, or raise ResourceError."""
    try:
        return Client(scheduler, set_as_default=False, timeout=CONNECT_TIMEOUT_S)
    except OSError as error:
        problem = f"does not answer within {CONNECT_TIMEOUT_S:g} s ({get_first_line(error)})"
        raise ResourceError(f"scheduler {scheduler} {problem}: check that it runs") from error


@contextmanager
def _start_cluster(recipe: Recipe, count: int) -> Iterator[Any]:
    """Start a scheduler and one worker process for each GPU, all of them reachable from this machine only."""
    from distributed import Nanny, Scheduler

    _disable_warnings()
    options = {"host": "127.0.0.1", "nthreads": 1, "memory_limit": 0, "silence_logs": logging.ERROR, "dashboard": False}
    workers = {
        number: {"cls": Nanny, "options": {**options, "env": environment}}
        for number, environment in enumerate(_assign_devices(recipe, count))
    }
    scheduler = {"host": "127.0.0.1", "dashboard": False, "dashboard_address": "127.0.0.1:0"}
    # what continues on a worker stays there; the third worker that dies with an item is the last
    settings = {"distributed.scheduler.work-stealing": False, "distributed.scheduler.allowed-failures": ATTEMPTS - 1}
    with (
        dask.config.set(settings),
        SpecCluster(workers, {"cls": Scheduler, "options": scheduler}, silence_logs=logging.ERROR) as cluster,
    ):
        yield cluster


def _assign_devices(recipe: Recipe, count: int) -> list[dict[str, str]]:
    """Return each worker's environment variables: its GPU, or its part of the CPU."""
    if not recipe.device.startswith("cuda"):
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // count))
        return [{"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}] * count
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    if len(gpus) < count:
        raise ConfigError(f"gpus is {count}, but {len(gpus)} GPUs are here: give at most {len(gpus)}")
    return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[:count]]
