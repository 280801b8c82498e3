"""Items of work that one GPU measures at a time, and the executor that runs them in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise, zip_longest
from typing import Any, ClassVar, Protocol, TypeVar, cast

from calibrate.journal import Journal, taken_on
from calibrate.model.models import LoadedModel
from calibrate.model.streams import use_attention
from calibrate.prompts.prompt import Prompt
from s2o_runtime.devices import DeviceIdentity, identify
from s2o_runtime.huggingface.hf import implementations
from s2o_runtime.identity import Geometry

T = TypeVar("T")


class WorkItem:
    """One measurement; subclasses are frozen dataclasses.

    Attributes:
        stage: what it is a part of; a worker forgets what it kept for another stage.
        kind: of its entry in a journal.
        timed: whether its result is a time, which holds for one kind of GPU.
    """

    stage: str
    kind: ClassVar[str] = ""
    timed: ClassVar[bool] = False

    @property
    def affinity(self) -> Hashable:
        """Items of one affinity continue one another, so they run on one worker where possible; None if none do."""
        return None

    @property
    def key(self) -> Mapping[str, Any]:
        """What its result depends on beside the model, and beside the GPU if it is timed; for a journal."""
        raise NotImplementedError

    def run(self, worker: WorkerState) -> Any:
        """Measure; the result is JSON with tensors, or dataclasses of such."""
        raise NotImplementedError


@dataclass
class WorkerState:
    """What one process keeps between items.

    Attributes:
        loaded: the model.
        prompts: those that items may name, by their hash.
        kept: of the present stage, by a key of its own.
    """

    loaded: LoadedModel
    prompts: dict[str, Prompt] = field(default_factory=dict)
    kept: dict[Hashable, Any] = field(default_factory=dict)
    _stage: str = ""
    _attention: Mapping[str, str] | None = None  # the model's own implementations, while another is used

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
        """What is cached under a key; made if it is not there."""
        if key not in self.kept:
            self.kept[key] = make()
        return cast(T, self.kept[key])

    def attend_with(self, name: str) -> None:
        """Let the model compute attention by the function that transformers knows by this name, until `close`."""
        if self._attention is None:
            self._attention = implementations(self.loaded.model.config)
        use_attention(self.loaded.model, name)

    def close(self) -> None:
        """Forget what is kept and leave the model as it was."""
        self.kept.clear()
        self.loaded.weights.release()
        if self._attention is not None:
            self.loaded.model.set_attn_implementation(self._attention)
            self._attention = None

    @contextmanager
    def working(self) -> Iterator[WorkerState]:
        """Items are run inside the block: the weights that were used last stay on the device until it ends."""
        self.loaded.weights.keeps_last = True
        try:
            yield self
        finally:
            self.loaded.weights.keeps_last = False
            self.close()

    def register_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Prompts that items may name from now on."""
        for prompt in prompts:
            self.prompts[prompt.sha256] = prompt


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


WRITE = 1.0  # seconds of measuring after which results are written: a commit waits for the disk


def measured(items: Sequence[WorkItem], executor: Executor, journal: Journal | None) -> list[Any]:
    """The results of some items, in their order: from the journal, or measured and put into it.

    Args:
        items: what to measure.
        executor: who measures.
        journal: where results are kept, and found again; None if nowhere.

    Raises:
        ModelError: inf or NaN came up.
        ResourceError: The GPU's memory ran out, or the journal cannot be written.
    """
    return Measuring(items, executor, journal).results()


def unmeasured(items: Sequence[Item], executor: Executor, journal: Journal) -> list[Item]:
    """The items whose results the journal does not have."""
    return [item for item in items if journal.get(item.kind, _key(item, executor)) is None]


class Measuring:
    """Items that are in the journal, or on their way: an executor may run them before the results are asked for.

    Args:
        items: of one kind.
        executor, journal: as `measured` takes them.
    """

    def __init__(self, items: Sequence[WorkItem], executor: Executor, journal: Journal | None) -> None:
        self._journal = journal
        self._entries = [(item.kind, _key(item, executor)) for item in items]
        self._results = [None if journal is None else journal.get(*entry) for entry in self._entries]
        self._pending = {
            number: executor.submit(item) for number, item in enumerate(items) if self._results[number] is None
        }

    def results(self) -> list[Any]:
        """The results, in the items' order, as a journal gives them back."""
        unwritten: dict[int, Any] = {}
        begun = time.monotonic()
        try:
            while self._pending:
                number = next(iter(self._pending))
                self._results[number] = unwritten[number] = self._pending[number].result()
                del self._pending[number]
                if time.monotonic() - begun > WRITE:
                    self._write(unwritten)
                    begun = time.monotonic()
        finally:
            self._write(unwritten)
        return self._results

    def _write(self, results: dict[int, Any]) -> None:
        if self._journal is not None and results:
            kind = self._entries[0][0]
            self._journal.put_all(kind, [(self._entries[number][1], value) for number, value in results.items()])
            for number in results:
                self._results[number] = self._journal.get(*self._entries[number])
        results.clear()


def _key(item: WorkItem, executor: Executor) -> dict[str, Any]:
    return {**item.key, **(taken_on(executor.device) if item.timed else {})}
