"""Items of work that one GPU measures at a time, and the executor that runs them in this process."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise, zip_longest
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol, TypeVar, cast

from calibrate.journal import Journal, gpu_key
from calibrate.model.layers import use_attention
from calibrate.model.models import LoadedModel
from calibrate.prompts.prompt import Prompt
from s2o_runtime.devices import DeviceIdentity, identify
from s2o_runtime.huggingface.hf import get_implementations, set_implementations
from s2o_runtime.huggingface.layers import Implementations
from s2o_runtime.identity import Geometry

T = TypeVar("T")


class WorkItem:
    """One measurement; subclasses are frozen dataclasses."""

    stage: str  # the part of the calibration; a worker forgets what it cached for another stage
    kind: ClassVar[str] = ""  # of its entry in a journal
    timed: ClassVar[bool] = False  # its result is a time, which holds for one kind of GPU

    @property
    def affinity(self) -> Hashable:
        """Name of items that continue one another, which run on one worker where possible; None without such."""
        return None

    @property
    def key(self) -> Mapping[str, Any]:
        """The journal's key: all that the result depends on beside the model, and the GPU if it is timed."""
        raise NotImplementedError

    def run(self, worker: WorkerState) -> Any:
        """Measure; the result is JSON with tensors, or dataclasses of such."""
        raise NotImplementedError


@dataclass
class WorkerState:
    """The model and the caches of one process that runs items."""

    loaded: LoadedModel
    prompts: dict[str, Prompt] = field(default_factory=dict)  # those that items may name, by their hash
    kept: dict[Hashable, Any] = field(default_factory=dict)  # cache of the present stage
    # what the dense model gave, which no stage changes: by what it is, and by the prompt's hash
    dense: defaultdict[str, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    _stage: str = ""
    _attention: Implementations | None = None  # the model's own implementations, while another is used

    @property
    def device(self) -> DeviceIdentity:
        return identify(self.loaded.weights.device)

    def run(self, item: WorkItem) -> Any:
        """Run an item."""
        if item.stage != self._stage:
            self.kept.clear()
            self._stage = item.stage
        return item.run(self)

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value cached under a key; make it first if there is none."""
        if key not in self.kept:
            self.kept[key] = make()
        return cast(T, self.kept[key])

    def attend_with(self, name: str) -> None:
        """Let the model compute attention by the function that transformers knows by this name, while it is open."""
        if self._attention is None:
            self._attention = get_implementations(self.loaded.model)
        use_attention(self.loaded.model, name)

    @contextmanager
    def open(self) -> Iterator[WorkerState]:
        """Run items inside the block: the weights that were used last stay on the device until it ends.

        Then the cache is empty, and the model is as it was.
        """
        weights = self.loaded.weights
        weights.keeps_last = True
        try:
            yield self
        finally:
            weights.keeps_last = False
            self.kept.clear()
            weights.release()
            if self._attention is not None:
                set_implementations(self._attention)
                self._attention = None

    def register_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Let items name these prompts from now on."""
        self.prompts |= {prompt.sha256: prompt for prompt in prompts}


T_co = TypeVar("T_co", covariant=True)
Item = TypeVar("Item", bound=WorkItem)
ItemChain = Sequence[Item]  # items that continue one another, such as the layers of a model at one length


class Pending(Protocol[T_co]):
    """A result that may not be there yet."""

    def result(self) -> T_co:
        """Wait for it. Raises what the item raised."""


class Executor(Protocol):
    """Runs items of work on a model of this name, geometry and fingerprint."""

    name: str
    geometry: Geometry
    fingerprint: str
    device: DeviceIdentity  # of the times and of the profile
    resident: bool  # whether the whole model is on the device; else one layer at a time

    @property
    def size(self) -> int:
        """The number of items that run at a time."""

    def register_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Let items name these prompts, by their hash, from now on."""

    def submit(self, item: WorkItem) -> Pending[Any]:
        """Run an item once; it may begin at once or when its result is asked for."""

    def spread(self, tracks: Sequence[ItemChain[Item]]) -> Iterator[tuple[Item, Any]]:
        """Run all items of some tracks, and yield each with its result as soon as it is there, in any order.

        A worker that runs neighbours of a track goes on where it was; one that begins in the middle has to get there.
        """

    def run_async(self, call: Callable[[], T]) -> Pending[T]:
        """Run a call concurrently that submits items. It may wait for earlier calls only, or it deadlocks."""


def run_at_once(call: Callable[[], T]) -> Pending[T]:
    """Run a call at once, and return its result as a future."""
    finished: Future[T] = Future()
    finished.set_result(call())
    return finished


class LocalExecutor:
    """Runs items in this process, on one device."""

    size = 1

    def __init__(self, worker: WorkerState) -> None:
        self._worker, model = worker, worker.loaded
        self.name, self.geometry, self.fingerprint = model.name, model.geometry, model.fingerprint
        self.device, self.resident = worker.device, model.weights.resident

    def register_prompts(self, prompts: Iterable[Prompt]) -> None:
        self._worker.register_prompts(prompts)

    def submit(self, item: WorkItem) -> Pending[Any]:
        return SimpleNamespace(result=cache(partial(self._worker.run, item)))  # runs when first asked for

    def spread(self, tracks: Sequence[ItemChain[Item]]) -> Iterator[tuple[Item, Any]]:
        for row in zip_longest(*tracks):  # a layer's weights are on the device for all lengths
            yield from ((item, self._worker.run(item)) for item in row if item is not None)

    def run_async(self, call: Callable[[], T]) -> Pending[T]:
        return run_at_once(call)


@contextmanager
def open_local_executor(loaded: LoadedModel) -> Iterator[LocalExecutor]:
    """Yield the executor of this process for a loaded model, which is left as it was."""
    with WorkerState(loaded).open() as worker:
        yield LocalExecutor(worker)


@contextmanager
def open_executor(model: LoadedModel | Executor) -> Iterator[Executor]:
    """Yield the executor itself, or one of this process for a loaded model."""
    if isinstance(model, LoadedModel):
        with open_local_executor(model) as executor:
            yield executor
    else:
        yield model


def split_among_workers(executor: Executor, prompts: Sequence[Prompt]) -> list[Sequence[Prompt]]:
    """Split prompts into as many nearly equal runs of neighbours as there are workers; none is empty."""
    count = min(executor.size, len(prompts))
    edges = [len(prompts) * number // count for number in range(count + 1)]
    return [prompts[first:end] for first, end in pairwise(edges)]


WRITE_INTERVAL_S = 1.0  # of measuring: a commit waits for the disk


def measure_items(
    items: Sequence[WorkItem], executor: Executor, journal: Journal | None, on_item: Callable[[], object] = lambda: None
) -> list[Any]:
    """Return the results of items of one kind, in their order: from the journal, or measured and put into it.

    Without a journal all are measured and none is kept. on_item: called after each that is measured.

    Raises:
        ModelError: inf or NaN came up.
        ResourceError: the GPU's memory ran out, or the journal cannot be written.
    """
    return MeasurementBatch(items, executor, journal).results(on_item)


def find_unmeasured(items: Sequence[Item], executor: Executor, journal: Journal) -> list[Item]:
    """Return the items whose results the journal does not have."""
    return [item for item in items if journal.get(*_get_entry(item, executor)) is None]


class MeasurementBatch:
    """Items that are in the journal, or submitted: they may run before the results are asked for."""

    def __init__(self, items: Sequence[WorkItem], executor: Executor, journal: Journal | None) -> None:
        self._journal = journal
        self._entries = [_get_entry(item, executor) for item in items]
        self._results = [None if journal is None else journal.get(*entry) for entry in self._entries]
        self._pending = {
            number: executor.submit(item) for number, item in enumerate(items) if self._results[number] is None
        }

    def results(self, on_item: Callable[[], object] = lambda: None) -> list[Any]:
        """Wait for the results, in the items' order, as a journal gives them back; on_item: called after each."""
        unwritten: list[int] = []
        begun = time.monotonic()
        try:
            for number in list(self._pending):
                self._results[number] = self._pending[number].result()
                del self._pending[number]
                unwritten.append(number)
                on_item()
                if time.monotonic() - begun > WRITE_INTERVAL_S:
                    self._write(unwritten)
                    unwritten, begun = [], time.monotonic()
        finally:
            self._write(unwritten)
        return self._results

    def _write(self, numbers: Sequence[int]) -> None:
        if self._journal is not None and numbers:
            entries = [(self._entries[number][1], self._results[number]) for number in numbers]
            self._journal.put_all(self._entries[0][0], entries)
            for number in numbers:
                self._results[number] = self._journal.get(*self._entries[number])


def _get_entry(item: WorkItem, executor: Executor) -> tuple[str, dict[str, Any]]:
    """Return an item's kind and key in a journal."""
    return item.kind, {**item.key, **(gpu_key(executor.device) if item.timed else {})}
