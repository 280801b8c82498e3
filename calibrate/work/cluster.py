"""Items of work on many GPUs: dask.distributed starts processes, moves items and results, and sees who is gone.

The coordinator is this process. It decides, journals and needs no GPU. Each worker process has one GPU, loads the
model itself and runs one item at a time; the coordinator tells each worker what to run (`board.py`). A worker that
dies, hangs or joins late changes only who does what: items say everything that their results depend on.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from calibrate.progress import showing
from calibrate.prompts.prompt import Prompt
from calibrate.recipe import EVERY_KIND, Recipe
from calibrate.versions import versions
from calibrate.work.board import AHEAD, Board, Entry
from calibrate.work.executor import Executor, Item, Pending, StageWork, Track
from calibrate.work.items import WorkerState, WorkItem
from s2o_runtime.devices import Accepted, DeviceIdentity, fit, identify
from s2o_runtime.errors import ConfigError, ResourceError, S2OError
from s2o_runtime.identity import Geometry

try:
    from distributed import Client, Security, SpecCluster, WorkerPlugin, get_worker
except ImportError as error:
    raise ResourceError("--gpus and --scheduler need dask.distributed: pip install 's2o[distributed]'") from error

ATTEMPTS = 3  # of an item; a worker that is lost with it counts as one

POLL = 0.5  # seconds between two looks at who is there
CONNECT = 30.0  # seconds to wait for a scheduler
FIRST_WORKER = 120.0  # seconds to wait for the first worker of a scheduler
THREADS = 512  # calls that wait beside one another

log = logging.getLogger("calibrate")
T = TypeVar("T")


@dataclass(frozen=True)
class Hello:
    """What a worker says of itself once its model is loaded."""

    name: str
    geometry: Geometry
    fingerprint: str
    device: DeviceIdentity
    versions: Mapping[str, str]
    seconds: float


class S2OWorker(WorkerPlugin):  # type: ignore[misc]
    """What a worker process needs for one run; Dask sends it to every worker, also to those that join late."""

    def __init__(self, name: str, recipe: Recipe, prompts: Sequence[Prompt]) -> None:
        self.name = name
        self._recipe, self._prompts = recipe, tuple(prompts)
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name, "_recipe": self._recipe, "_prompts": self._prompts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()  # a worker with several threads runs one item at a time all the same
        self._open = ExitStack()
        self._state: WorkerState | None = None
        self._hello: Hello | None = None

    def setup(self, worker: Any) -> None:
        """Called by Dask when a worker gets this; the model is loaded later, or it would hold up heartbeats."""
        if self._recipe.gpus is not None:
            _hush()

    def run(self, item: WorkItem) -> Any:
        """Run an item, with the model that is loaded the first time."""
        with self._lock:
            return self._loaded().run(item)

    def hello(self) -> Hello:
        """Load the model and say what it is, and which device it is on."""
        with self._lock:
            self._loaded()
        assert self._hello is not None
        return self._hello

    def teardown(self, worker: Any) -> None:
        with self._lock:
            self._open.close()
            self._reset()

    def _loaded(self) -> WorkerState:
        if self._state is not None:
            return self._state
        from calibrate.model.models import load
        from calibrate.model.self_test import self_test

        begin = time.monotonic()
        recipe = self._recipe
        loaded = load(
            recipe.model,
            "cuda:0" if recipe.device.startswith("cuda") else recipe.device,
            random_weights=recipe.random_weights,
            seed=recipe.seed,
            trust_remote_code=recipe.trust_remote_code,
        )
        self_test(loaded)
        state = self._open.enter_context(WorkerState(loaded, hidden_cache=recipe.hidden_cache).working())
        state.know(self._prompts)
        self._hello = Hello(
            loaded.name, loaded.geometry, loaded.fingerprint, state.device, versions(), time.monotonic() - begin
        )
        self._state = state
        return state


def _hush() -> None:
    """Let Dask say errors only: of workers that are started here, the coordinator says who comes and goes."""
    logging.getLogger("distributed").setLevel(logging.ERROR)


def _run_item(plugin: str, item: WorkItem) -> tuple[Any, float]:
    """Runs in a worker; returns the item's result and the seconds that it took."""
    begin = time.monotonic()
    value = get_worker().plugins[plugin].run(item)
    return value, time.monotonic() - begin


def _say_hello(plugin: str) -> Hello:
    """Runs in a worker."""
    hello: Hello = get_worker().plugins[plugin].hello()
    return hello


@dataclass(eq=False)
class _Worker:
    """A worker process as the coordinator knows it. hello: None while its model is loaded."""

    address: str
    hello: Hello | None = None
    greeting: Any = None  # Dask's future of it
    running: dict[Any, Entry] = field(default_factory=dict)  # by Dask's future, in the order in which they run
    last_sign: float = field(default_factory=time.monotonic)


class _OfKind:
    """Runs items on the workers of a cluster, for one kind of GPU, which times are taken on.

    Args:
        cluster: whose workers.
        device: the kind.
    """

    def __init__(self, cluster: ClusterExecutor, device: DeviceIdentity) -> None:
        self._cluster, self.device = cluster, device

    @property
    def name(self) -> str:
        return self._cluster.model.name

    @property
    def geometry(self) -> Geometry:
        return self._cluster.model.geometry

    @property
    def fingerprint(self) -> str:
        return self._cluster.model.fingerprint

    @property
    def size(self) -> int:
        return max(1, self._cluster.ready)

    @property
    def work(self) -> Mapping[str, StageWork]:
        return self._cluster.work_for.get(self.device, {})

    def know(self, prompts: Iterable[Prompt]) -> None:
        unknown = [prompt for prompt in prompts if prompt.sha256 not in self._cluster.known]
        if unknown:
            raise ValueError(f"{len(unknown)} prompts are not those that the workers were given")

    def submit(self, item: WorkItem) -> Pending[Any]:
        future: Future[Any] = Future()
        self._cluster.add([item], [future], track=False, target=self.device)
        return future

    def spread(self, tracks: Sequence[Track[Item]]) -> Iterator[tuple[Item, Any]]:
        done: queue.SimpleQueue[tuple[Item, Future[Any]]] = queue.SimpleQueue()
        count = 0
        for track in tracks:
            futures: list[Future[Any]] = []
            for item in track:
                future: Future[Any] = Future()
                future.add_done_callback(partial(_put_finished, done, item))
                futures.append(future)
            count += len(track)
            if track:
                self._cluster.add(track, futures, track=True, target=self.device)
        for _ in range(count):
            item, finished = done.get()
            yield item, finished.result()

    def background(self, call: Callable[[], T]) -> Pending[T]:
        return self._cluster.threads.submit(call)


class ClusterExecutor(_OfKind):
    """The workers of a Dask scheduler, and what runs items on them for the kind of GPU that the recipe names first.

    `aimed_at` gives executors for other kinds, on the same workers.

    Args:
        client: connected to it.
        recipe: the run.
        prompts: all that items are going to name.
        wanted: how many workers to wait for before the first item; others join when they are there. With infinity,
            for all that a scheduler has.
        plugin: what runs the items in a worker.
    """

    def __init__(
        self,
        client: Any,
        recipe: Recipe,
        prompts: Sequence[Prompt],
        wanted: float,
        plugin: type[S2OWorker] | None = None,
    ) -> None:
        self._client, self._recipe = client, recipe
        self._plugin = f"s2o-{uuid.uuid4().hex[:12]}"
        self.known = {prompt.sha256 for prompt in prompts}
        client.register_plugin((plugin or S2OWorker)(self._plugin, recipe, prompts))
        self._board = Board()
        self._futures: dict[Entry, Future[Any]] = {}
        self._workers: dict[str, _Worker] = {}
        self._given_up: set[str] = set()
        self._events: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        self._reference: Hello | None = None
        self._kinds: list[DeviceIdentity] = []
        self._stranded: dict[Hashable, float] = {}  # targets that no worker can run items for, and since when
        self._abandoned: dict[Hashable, S2OError] = {}
        self._enough = threading.Event()
        self._wanted = wanted
        self._last_seen = time.monotonic()
        self.lost = 0
        self.work_for: dict[Hashable, dict[str, StageWork]] = {}  # by the kind of GPU
        self.threads = ThreadPoolExecutor(THREADS, "s2o-wait")
        self._loop = threading.Thread(target=self._run, name="s2o-coordinator", daemon=True)
        self._loop.start()
        try:
            self._wait_for_workers()
            super().__init__(self, self._first_kind())
        except BaseException:
            self.close()
            raise

    @property
    def status(self) -> str:
        """The workers in one line."""
        running = sum(len(worker.running) for worker in list(self._workers.values()))
        text = f"{self.size} workers, {running} items run, {self._board.waiting} wait"
        return f"{text}, {self.lost} workers lost" if self.lost else text

    def kinds(self) -> list[DeviceIdentity]:
        """The kinds of GPU to make profiles for: those that the recipe names, or all that workers have had so far.

        Raises:
            ConfigError: no worker has a GPU that the recipe names.
        """
        devices = [worker.hello.device for worker in list(self._workers.values()) if worker.hello]
        for device in sorted(devices, key=lambda device: (str(device), device.memory_bytes)):
            if not any(alike(kind, device) for kind in self._kinds):
                self._kinds.append(device)
        named = self._recipe.target_gpu
        return list(
            self._kinds if named in (None, (EVERY_KIND,)) else dict.fromkeys(map(self._kind_named, named or ()))
        )

    def aimed_at(self, device: DeviceIdentity) -> Executor:
        """The same workers, which take times on GPUs of one kind."""
        return _OfKind(self, device)

    def close(self) -> None:
        """Give up what still runs and let the workers forget the run."""
        self._closing.set()
        self._events.put(("wake",))
        self._loop.join()
        self.threads.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(Exception):  # a scheduler that is gone has nothing to forget
            self._client.unregister_worker_plugin(self._plugin)

    @property
    def model(self) -> Hello:
        """What the first worker said, with which all others agree."""
        assert self._reference is not None
        return self._reference

    @property
    def ready(self) -> int:
        """How many workers have loaded the model."""
        return sum(worker.hello is not None for worker in list(self._workers.values()))

    def add(
        self, items: Sequence[WorkItem], futures: Sequence[Future[Any]], *, track: bool, target: DeviceIdentity
    ) -> None:
        """Have items run for a kind of GPU; `track`: they continue one another."""
        self._events.put(("add", list(items), futures, track, target))

    def _wait_for_workers(self) -> None:
        """Until there are as many workers as wanted."""
        self._enough.wait()
        if self._failure is not None:
            raise self._failure

    def _first_kind(self) -> DeviceIdentity:
        """The kind of GPU that times are taken on where nobody says for which."""
        kinds = self.kinds()
        if self._recipe.target_gpu is not None:
            return kinds[0]
        here = identify(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        for device in kinds:
            if here.kind == device.kind and alike(here, device):
                return device
        if len(kinds) > 1:
            raise ConfigError(
                f"the workers have GPUs of several kinds ({', '.join(map(str, kinds))}): name one with --target-gpu, "
                f"or make a profile for each with --target-gpu {EVERY_KIND}"
            )
        return kinds[0]

    def _kind_named(self, name: str) -> DeviceIdentity:
        for device in self._kinds:
            if name.lower() in str(device).lower():
                return device
        raise ConfigError(f"target_gpu {name!r} is no worker's: there are {', '.join(map(str, self._kinds))}")

    # everything below runs in the coordinator's own thread

    def _run(self) -> None:
        looked = 0.0
        begun = time.monotonic()
        while not self._closing.is_set():
            with contextlib.suppress(queue.Empty):
                self._handle(self._events.get(timeout=POLL))
                while True:
                    self._handle(self._events.get_nowait())
            try:
                if time.monotonic() - looked > POLL:
                    self._look()
                    looked = time.monotonic()
                if not self._enough.is_set():
                    self._check_start(begun)
                self._check_alone()
                self._check_stranded()
                self._feed()
            except Exception as error:  # whatever Dask raises when the scheduler is gone
                self._fail(_as_resource_error(error))
        for worker in self._workers.values():
            for future in worker.running:
                with contextlib.suppress(Exception):
                    future.cancel()

    def _handle(self, event: tuple[Any, ...]) -> None:
        if event[0] == "add":
            _, items, futures, track, target = event
            if target in self._abandoned:
                for future in futures:
                    future.set_exception(self._abandoned[target])
                return
            board = self._board
            entries = board.add_track(items, target) if track else [board.add(item, target) for item in items]
            self._futures.update(zip(entries, futures, strict=True))
            if self._failure is not None:
                self._fail(self._failure)
        elif event[0] == "done":
            self._finished(event[1], event[2])

    def _look(self) -> None:
        """Who is there, who is new, who is gone, who does not answer."""
        present = set(self._client.nthreads())
        for address in present - self._workers.keys() - self._given_up:
            worker = self._workers[address] = _Worker(address)
            worker.greeting = self._submit(worker, _say_hello, self._plugin)
        now = time.monotonic()
        for worker in list(self._workers.values()):
            if worker.address not in present:
                self._lose(worker, "is gone")
            elif (worker.running or worker.hello is None) and now - worker.last_sign > self._recipe.item_deadline:
                self._given_up.add(worker.address)
                self._lose(worker, f"did not finish within {self._recipe.item_deadline:g} s")
                threading.Thread(target=self._restart, args=(worker.address,), daemon=True).start()

    def _check_start(self, begun: float) -> None:
        ready = self.ready
        greeting = any(worker.hello is None for worker in self._workers.values())
        if ready >= self._wanted or (ready and not greeting and self._recipe.scheduler is not None):
            self._enough.set()
        elif not self._workers and time.monotonic() - begun > FIRST_WORKER:
            self._fail(ResourceError(f"no worker is there after {FIRST_WORKER:g} s: start workers, one for each GPU"))

    def _check_alone(self) -> None:
        """End the run if no worker has been there for as long as an item may take."""
        now = time.monotonic()
        self._last_seen = now if self._workers else self._last_seen
        if now - self._last_seen > max(self._recipe.item_deadline, FIRST_WORKER):
            self._fail(
                ResourceError(
                    f"all workers are gone since {now - self._last_seen:.0f} s: start workers and run the same command "
                    "again, what was measured so far is kept"
                )
            )

    def _check_stranded(self) -> None:
        """Give up the kinds of GPU of which no worker has been there for as long as an item may take."""
        if not self._workers:
            return  # of that `_check_alone` speaks
        now = time.monotonic()
        self._stranded = {target: self._stranded.get(target, now) for target in self._board.stranded()}
        for target, since in self._stranded.items():
            if now - since <= max(self._recipe.item_deadline, FIRST_WORKER):
                continue
            error = self._abandoned[target] = ResourceError(
                f"no worker with {target} is there since {now - since:.0f} s: start one and run the same command "
                "again, what was measured so far is kept"
            )
            self._board.drop(target)
            for entry in [entry for entry in self._futures if entry.target == target]:
                self._futures.pop(entry).set_exception(error)

    def _submit(self, worker: _Worker, function: Callable[..., Any], *arguments: Any) -> Any:
        future = self._client.submit(
            function, *arguments, workers=[worker.address], allow_other_workers=False, pure=False, retries=0
        )
        future.add_done_callback(lambda finished: self._events.put(("done", worker, finished)))
        return future

    def _feed(self) -> None:
        """Give every worker something to run, and something to go on with."""
        for ahead in range(1, AHEAD + 1):
            for address in self._board.workers:
                worker = self._workers[str(address)]
                if len(worker.running) >= ahead:
                    continue
                entry = self._board.take(worker.address)
                if entry is None:
                    continue
                if not worker.running:
                    worker.last_sign = time.monotonic()
                worker.running[self._submit(worker, _run_item, self._plugin, entry.item)] = entry

    def _finished(self, worker: _Worker, future: Any) -> None:
        """A result, an error, or a future that Dask gave up because the worker is gone."""
        if self._workers.get(worker.address) is not worker:
            return
        if future is worker.greeting and worker.hello is None:
            self._greeted(worker, future)
            return
        entry = worker.running.get(future)
        if entry is None or future.status not in ("finished", "error"):
            return  # `_look` sees that the worker is gone
        del worker.running[future]
        worker.last_sign = time.monotonic()
        if future.status == "finished":
            try:
                value, seconds = future.result(timeout=self._recipe.item_deadline)
            except Exception as error:  # the worker went before its result was fetched
                self._again(entry, error)
                return
            self._board.done(entry)
            self.work_for.setdefault(entry.target, {}).setdefault(entry.item.stage, StageWork()).add(seconds)
            if (waiting := self._futures.pop(entry, None)) is not None:
                waiting.set_result(value)
            return
        raised = future.exception()
        if isinstance(raised, S2OError):
            self._end(entry, raised)
        else:
            self._again(entry, raised)

    def _again(self, entry: Entry, error: BaseException) -> None:
        """Let an item that failed wait again, unless it has been tried often enough."""
        entry.tries += 1
        if entry.tries < ATTEMPTS:
            log.warning("%s failed (%s): it is run again", entry.item, _text(error))
            self._board.put_back(entry)
            return
        self._end(entry, ResourceError(f"{entry.item} failed {ATTEMPTS} times ({_text(error)}): see the workers' logs"))

    def _end(self, entry: Entry, error: BaseException) -> None:
        """An item that is given up; nobody may wait for it any more."""
        self._board.done(entry)
        if (waiting := self._futures.pop(entry, None)) is not None:
            waiting.set_exception(error)

    def _lose(self, worker: _Worker, why: str) -> None:
        """A worker that is gone or given up: what it had runs elsewhere."""
        del self._workers[worker.address]
        if worker.hello is not None or worker.running:
            self.lost += 1
            log.warning("worker %s %s: what it had runs elsewhere", worker.address, why)
        again = []
        for number, (future, entry) in enumerate(worker.running.items()):
            with contextlib.suppress(Exception):
                future.cancel()
            entry.tries += number == 0  # the others only waited behind the first
            if entry.tries < ATTEMPTS:
                again.append(entry)
            else:
                self._end(
                    entry,
                    ResourceError(f"{entry.item} failed {ATTEMPTS} times (its worker {why}): see the workers' logs"),
                )
        self._board.leave(worker.address, again)

    def _greeted(self, worker: _Worker, future: Any) -> None:
        if future.status != "finished":
            error = future.exception() if future.status == "error" else None
            if isinstance(error, S2OError):
                self._fail(error)
            elif error is not None:
                log.warning("worker %s cannot be used: %s", worker.address, _text(error))
                self._given_up.add(worker.address)
                del self._workers[worker.address]
            return
        hello = future.result()
        reference = self._reference = self._reference or hello
        for name in ("fingerprint", "geometry", "versions"):
            if getattr(hello, name) != getattr(reference, name):
                log.warning("worker %s is not used: its %s differ from the others'", worker.address, name)
                self._given_up.add(worker.address)
                del self._workers[worker.address]
                return
        worker.hello = hello
        log.info("worker %s: %s, model loaded in %.0f s", worker.address, hello.device, hello.seconds)
        self._board.join(worker.address, partial(may_run, hello.device))

    def _restart(self, address: str) -> None:
        """Ask a worker's nanny to end and start the process; where it has none, the worker is just not used."""
        with contextlib.suppress(Exception):
            self._client.restart_workers([address], timeout=30, raise_for_error=False)

    def _fail(self, error: BaseException) -> None:
        """End the run: everybody who waits gets this error."""
        self._failure = self._failure or error
        self._enough.set()
        futures, self._futures = list(self._futures.values()), {}
        for future in futures:
            future.set_exception(self._failure)


def may_run(device: DeviceIdentity, item: WorkItem, target: Any) -> bool:
    """Whether a worker on this device may run an item for a kind of GPU.

    Another kind of the same compute capability runs the same tiles; one of another runs layers dense whose tile it has
    no kernel for, of which an error would say nothing.
    """
    if item.timed:
        return alike(target, device)
    if getattr(item, "tiled", False):
        return (device.kind, device.capability) == (target.kind, target.capability)
    return True


def _put_finished(done: queue.SimpleQueue[Any], item: WorkItem, finished: Future[Any]) -> None:
    done.put((item, finished))


def alike(one: DeviceIdentity, other: DeviceIdentity) -> bool:
    """Whether times taken on one device are times of the other."""
    accepted = fit(one, other)
    return one.kind == other.kind and isinstance(accepted, Accepted) and accepted.tiles == "profile"


@contextmanager
def cluster_executor(recipe: Recipe, prompts: Sequence[Prompt], *, progress: bool) -> Iterator[ClusterExecutor]:
    """The workers that a recipe names: started here, or those of a scheduler.

    Args:
        recipe: names them, and the model that they load.
        prompts: all that items are going to name.
        progress: whether to print where Dask's dashboard is.

    Raises:
        ConfigError: the recipe does not fit the machine.
        ResourceError: the scheduler or its workers cannot be reached.
    """
    with ExitStack() as stack:
        if recipe.gpus is not None:
            address = stack.enter_context(_local_cluster(recipe, recipe.gpus))
        else:
            address = recipe.scheduler
        try:
            client = stack.enter_context(
                Client(address, security=_security(recipe), set_as_default=False, timeout=CONNECT)
            )
        except OSError as error:
            raise ResourceError(f"scheduler {recipe.scheduler} does not answer ({_text(error)}): check it") from error
        if progress and recipe.dashboard is not None:
            log.warning("dashboard: %s", client.dashboard_link)
        wanted = recipe.gpus or (1 if recipe.target_gpu is None else math.inf)  # all may be needed to know the kinds
        executor = ClusterExecutor(client, recipe, prompts, wanted)
        stack.callback(executor.close)
        stack.enter_context(showing(lambda: executor.status))
        yield executor


@contextmanager
def _local_cluster(recipe: Recipe, count: int) -> Iterator[Any]:
    """A scheduler and one worker process for each GPU, all of them reachable from this machine only."""
    from distributed import Nanny, Scheduler

    _hush()
    security = _security(recipe)
    host, _, port = (recipe.dashboard or "").rpartition(":")
    common = {"host": "127.0.0.1", "security": security, "protocol": "tls" if security else "tcp"}
    workers = {
        number: {
            "cls": Nanny,
            "options": {
                **common,
                "nthreads": 1,
                "memory_limit": 0,
                "silence_logs": logging.ERROR,
                "dashboard": False,
                "env": environment,
            },
        }
        for number, environment in enumerate(_environments(recipe, count))
    }
    dashboard = {"dashboard": recipe.dashboard is not None, "dashboard_address": f"{host or '127.0.0.1'}:{port}"}
    if recipe.dashboard is None:
        dashboard["dashboard_address"] = "127.0.0.1:0"
    with SpecCluster(
        workers, {"cls": Scheduler, "options": {**common, **dashboard}}, security=security, silence_logs=logging.ERROR
    ) as cluster:
        yield cluster


def _environments(recipe: Recipe, count: int) -> list[dict[str, str]]:
    """The environment variables of each worker: its GPU, or its part of the CPU.

    Raises:
        ConfigError: there are fewer GPUs.
    """
    if not recipe.device.startswith("cuda"):
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // count))
        return [{"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}] * count
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    if len(gpus) < count:
        raise ConfigError(f"gpus is {count}, but {len(gpus)} GPUs are here: give at most {len(gpus)}")
    return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[:count]]


def _security(recipe: Recipe) -> Any:
    """Dask's TLS settings; None without."""
    if recipe.tls_ca_file is None:
        return None
    ca, cert, key = map(str, (recipe.tls_ca_file, recipe.tls_cert, recipe.tls_key))
    roles = {f"tls_{role}_{part}": path for role in ("client", "worker", "scheduler") for part, path in
             (("cert", cert), ("key", key))}  # fmt: skip
    return Security(tls_ca_file=ca, require_encryption=True, **roles)


def _as_resource_error(error: BaseException) -> BaseException:
    if isinstance(error, S2OError):
        return error
    return ResourceError(
        f"the scheduler cannot be reached any more ({_text(error)}): run the same command again, what was measured so "
        "far is kept"
    )


def _text(error: BaseException | None) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
