"""Executors: who runs items of work. The default is this process; `cluster.py` runs them on many.

What decides is the same code with either: a stage submits items and reads their results. In this process an item runs
when its result is asked for, one after the other, as in a plain loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise, zip_longest
from typing import Any, Protocol, TypeVar

from calibrate.model.models import LoadedModel
from calibrate.prompts.prompt import Prompt
from calibrate.work.items import WorkerState, WorkItem
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.identity import Geometry

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Item = TypeVar("Item", bound=WorkItem)
Track = Sequence[Item]  # items that continue one another, such as the layers of a model at one length


@dataclass
class StageWork:
    """How many items of a stage were run, and the seconds that they took, of all workers together."""

    items: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """One item more."""
        self.items += 1
        self.seconds += seconds


class Pending(Protocol[T_co]):
    """A result that may not be there yet."""

    def result(self) -> T_co:
        """Wait for it. Raises what the item raised."""


class Executor(Protocol):
    """Runs items of work.

    Attributes:
        name, geometry, fingerprint: of the model.
        device: what times are taken on, and the profile is of.
        size: how many items run at a time.
        work: what was done, by stage.
    """

    name: str
    geometry: Geometry
    fingerprint: str
    device: DeviceIdentity
    work: dict[str, StageWork]

    @property
    def size(self) -> int: ...

    def register_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Prompts that items name from now on, by their hash."""

    def submit(self, item: WorkItem) -> Pending[Any]:
        """Run an item once; it may begin at once or when its result is asked for."""

    def spread(self, tracks: Sequence[Track[Item]]) -> Iterator[tuple[Item, Any]]:
        """Run all items of some tracks, and give each with its result as soon as it is there, in any order.

        A worker that runs neighbours of a track goes on where it was; one that begins in the middle has to get there.
        """

    def background(self, call: Callable[[], T]) -> Pending[T]:
        """A call that submits items and waits for them, beside others like it.

        It may wait for calls that were made before it, not for later ones.
        """


def completed(call: Callable[[], T]) -> Pending[T]:
    """The result of a call that is made now."""
    finished: Future[T] = Future()
    finished.set_result(call())
    return finished


class _LazyResult:
    """The result of an item that runs in this process when somebody asks for it."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.result = cache(run)


class LocalExecutor:
    """Runs items in this process, on one device."""

    size = 1

    def __init__(self, worker: WorkerState) -> None:
        self._worker, model = worker, worker.loaded
        self.name, self.geometry, self.fingerprint = model.name, model.geometry, model.fingerprint
        self.device = worker.device
        self.work: dict[str, StageWork] = {}

    def register_prompts(self, prompts: Iterable[Prompt]) -> None:
        self._worker.register_prompts(prompts)

    def submit(self, item: WorkItem) -> Pending[Any]:
        return _LazyResult(partial(self._run, item))

    def spread(self, tracks: Sequence[Track[Item]]) -> Iterator[tuple[Item, Any]]:
        for abreast in zip_longest(*tracks):  # a layer's weights are on the device for all lengths
            for item in abreast:
                if item is not None:
                    yield item, self._run(item)

    def background(self, call: Callable[[], T]) -> Pending[T]:
        return completed(call)

    def _run(self, item: WorkItem) -> Any:
        begin = time.monotonic()
        value = self._worker.run(item)
        self.work.setdefault(item.stage, StageWork()).add(time.monotonic() - begin)
        return value


@contextmanager
def local_executor(loaded: LoadedModel) -> Iterator[LocalExecutor]:
    """The executor of this process, with a model that is loaded; the model is left as it was."""
    with WorkerState(loaded).working() as worker:
        yield LocalExecutor(worker)


@contextmanager
def executor_of(model: LoadedModel | Executor) -> Iterator[Executor]:
    """The executor itself, or one of this process for a loaded model."""
    if isinstance(model, LoadedModel):
        with local_executor(model) as executor:
            yield executor
    else:
        yield model


def shares(executor: Executor, prompts: Sequence[Prompt]) -> list[Sequence[Prompt]]:
    """Prompts in as many shares as there are workers, nearly equal, each a run of neighbours; none is empty."""
    count = min(executor.size, len(prompts))
    edges = [len(prompts) * number // count for number in range(count + 1)]
    return [prompts[first:end] for first, end in pairwise(edges)]
