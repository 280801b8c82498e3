"""An item of work: what one GPU measures at a time, and what a process that runs items keeps between them.

An item is plain data and says everything that its result depends on, so any worker can run it, and run it again. What
a worker keeps (a model, prompts on their way through it) only makes the next item cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, cast

from calibrate.model.layers import use_attention
from calibrate.model.models import LoadedModel
from calibrate.prompts.prompt import Prompt
from s2o_runtime.devices import DeviceIdentity, identify
from s2o_runtime.huggingface.hf import implementations, set_implementations
from s2o_runtime.huggingface.layers import Implementations

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
    _attention: Implementations | None = None  # the model's own, while another is used

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
            self._attention = implementations(self.loaded.model)
        use_attention(self.loaded.model, name)

    def close(self) -> None:
        """Forget what is kept and leave the model as it was."""
        self.kept.clear()
        self.loaded.weights.release()
        if self._attention is not None:
            set_implementations(self._attention)
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
