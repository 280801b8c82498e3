"""One prompt on its way through the patched and the dense model, a layer at a time: as items of work, and together.

A step says all that its result depends on: the prompt, what the layers before ran, and what this one runs. Which worker
takes it, and whether that one has the prompt at hand or begins again, changes nothing but the time.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch

from calibrate.journal import Journal
from calibrate.model.layerwise import LayerwiseForward
from calibrate.model.logits import logits_on_device
from calibrate.model.memory import within_memory
from calibrate.model.streams import DecoderLayer, Stream, begin, layer_on_device
from calibrate.prompts.prompt import Prompt
from calibrate.proof.agreement import PromptAgreement, compare
from calibrate.proof.chunks import ByLength, Chunks, chunks_of
from calibrate.work.executor import Executor
from calibrate.work.items import WorkerState, WorkItem
from calibrate.work.measured import Measuring
from s2o_runtime.config import LayerConfig
from s2o_runtime.huggingface import hf

KIND = "proof"  # of entries in a journal
HISTORIES = 16  # that a process keeps unpacked
_unpacked: OrderedDict[str, History] = OrderedDict()


@dataclass(frozen=True)
class LayerRun:
    """What one layer runs for prompts of one length.

    chunk: Tokens that it is fed at once; None for whole prompts. by_keys: Of a layer that is fed in chunks, what it
    runs behind each number of keys.
    """

    config: LayerConfig
    chunk: int | None = None
    by_keys: tuple[tuple[int, LayerConfig], ...] = ()

    @classmethod
    def of(cls, configured: ByLength, chunk: int | None, layer: int, length: int) -> LayerRun:
        """What a layer runs in a configuration."""
        config = configured.layer_config(layer, length)
        chunks = chunks_of(configured, chunk, layer, length)
        if chunks is None:
            return cls(config)
        ends = (*range(chunks.size, length, chunks.size), length)
        return cls(config, chunks.size, tuple((keys, chunks.config_at(keys)) for keys in ends))

    @property
    def chunks(self) -> Chunks | None:
        """How the layer is fed; None if whole."""
        return None if self.chunk is None else Chunks(self.chunk, dict(self.by_keys).__getitem__)

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(repr((self.config, self.chunk, self.by_keys)).encode()).hexdigest()


class History:
    """What the layers before one ran. It is unpacked once in a process, however many items bring it."""

    def __init__(self, runs: tuple[LayerRun, ...] = (), digest: str = "") -> None:
        self.runs, self.digest = runs, digest
        self._packed: bytes | None = None

    def then(self, run: LayerRun) -> History:
        """With one more layer."""
        digest = hashlib.sha256(f"{self.digest}/{run.digest}".encode()).hexdigest()
        return History((*self.runs, run), digest)

    def __reduce__(self) -> tuple[Callable[[str, bytes], History], tuple[str, bytes]]:
        if self._packed is None:
            self._packed = pickle.dumps(self.runs)
        return _unpack, (self.digest, self._packed)


def _unpack(digest: str, packed: bytes) -> History:
    if digest not in _unpacked:
        _unpacked[digest] = History(pickle.loads(packed), digest)
        if len(_unpacked) > HISTORIES:
            _unpacked.popitem(last=False)
    return _unpacked[digest]


def layer_state(
    layer: DecoderLayer, runs: LayerRun, observer: hf.Observer | None = None, chunks: bool = True
) -> hf.LayerState:
    """What patches a layer of full attention.

    Args:
        layer: The layer.
        runs: What it runs.
        observer: Sees its attention's inputs and output.
        chunks: Whether it is fed as `runs` says; else whole.
    """
    assert layer.row is not None
    fed = runs.chunks if chunks else None
    # a state's first calls are all metered, which would be timed too
    if fed is None:
        return hf.LayerState(layer.row, lambda keys: runs.config, min_length=0, observer=observer, meter=None)
    return hf.LayerState(layer.row, fed.config_at, min_length=0, observer=observer, meter=None, chunk=fed.size)


class PairWalk:
    """One prompt in the patched and in the dense model, before some layer of full attention.

    Args:
        worker: What the process keeps.
        prompt: The prompt's hash.
        index: Which of its length's prompts it is.
    """

    def __init__(self, worker: WorkerState, prompt: str, index: int) -> None:
        self._worker, self._prompt, self._index = worker, worker.prompts[prompt], index
        self._runs: tuple[LayerRun, ...]
        self._tried: tuple[LayerRun, Stream] | None
        self._begin()

    def move_to(self, history: History) -> None:
        """Move to where these layers have run: on from here, or from the model's beginning."""
        if history.runs[: len(self._runs)] != self._runs:
            self._begin()
        for run in history.runs[len(self._runs) :]:
            self._pass()
            self._forward.move([partial(self._accepted, run), None])
            self._runs, self._tried = (*self._runs, run), None

    @torch.no_grad()
    def measure(self, run: LayerRun, observer: hf.Observer) -> float:
        """Let the next layer run; it is not moved through yet.

        Args:
            run: What it runs.
            observer: Sees its attention's inputs and output.

        Returns:
            The density.
        """
        self._pass()
        layer = self._forward.next_layer
        with layer_on_device(self._worker.loaded, layer):
            state = layer_state(layer, run, observer)
            self._tried = run, layer.patched(self._forward.streams[0], state)
        return state.density

    @torch.no_grad()
    def agreement(self) -> PromptAgreement:
        """What both models predict in the end, after all layers."""
        self._forward.move_to(len(self._forward.layers))
        patched, dense = self._forward.streams
        with logits_on_device(self._worker.loaded) as logits:
            return compare(self._prompt, dense.hidden, patched.hidden, logits)

    @torch.no_grad()
    def _begin(self) -> None:
        (stream,) = begin(self._worker.loaded, [self._prompt.ids], self._worker.keep("calls of patched layers", dict))
        self._forward = LayerwiseForward(self._worker.loaded, [replace(stream, prompt=self._index)] * 2)
        self._runs, self._tried = (), None

    def _pass(self) -> None:
        """Move to the next layer of full attention."""
        while self._forward.next_layer.row is None:
            self._forward.move()

    def _accepted(self, run: LayerRun, layer: DecoderLayer, stream: Stream) -> Stream:
        if self._tried is not None and self._tried[0] == run:
            return self._tried[1]
        return layer.patched(stream, layer_state(layer, run))


@dataclass(frozen=True)
class Step(WorkItem):
    """One prompt at one layer, as an item of work; what is observed there is a subclass's.

    index: Which of its length's prompts it is. before: What the layers before ran. runs: What this one runs.
    """

    length: int
    prompt: str
    index: int
    layer: int
    before: History
    runs: LayerRun
    stage: str = ""
    kind: ClassVar[str] = KIND
    tiled: ClassVar[bool] = True

    @property
    def affinity(self) -> Hashable:
        return self.stage, self.length, self.index

    @property
    def key(self) -> dict[str, Any]:
        """What its result depends on, for a journal."""
        return {
            "stage": self.stage,
            "length": self.length,
            "prompt": self.prompt,
            "index": self.index,
            "layer": self.layer,
            "before": self.before.digest,
            "runs": self.runs.digest,
        }

    def __str__(self) -> str:
        return f"{self.stage}: layer {self.layer} of prompt {self.index} of {self.length} tokens"

    def run(self, worker: WorkerState) -> Any:
        with self._within_memory(worker):
            return self.measured(self._walk(worker))

    def measured(self, walk: PairWalk) -> Any:
        """What is to be known of the layer, as a journal keeps it."""
        raise NotImplementedError

    def _walk(self, worker: WorkerState) -> PairWalk:
        """The prompt before this layer."""
        hf.register()
        worker.attend_with(hf.NAME)
        walk = worker.keep(self.affinity, lambda: PairWalk(worker, self.prompt, self.index))
        walk.move_to(self.before)
        return walk

    def _within_memory(self, worker: WorkerState) -> Any:
        weights = worker.loaded.weights
        number = worker.loaded.geometry.layer_number(self.layer)
        return within_memory(weights.device, self.length, weights.held, f"{self.stage} layer {number}")


@dataclass(frozen=True)
class LastStep(Step):
    """What both models predict of a prompt after all layers, which `before` has; `layer` and `runs` are not read."""

    @property
    def key(self) -> dict[str, Any]:
        return {**super().key, "last": True}

    def __str__(self) -> str:
        return f"{self.stage}: predictions of prompt {self.index} of {self.length} tokens"

    def run(self, worker: WorkerState) -> dict[str, Any]:
        with self._within_memory(worker):
            agreement = self._walk(worker).agreement()
        worker.kept.pop(self.affinity)
        return vars(agreement)


class LockStep:
    """The prompts of one length on their way together, as it looks from where is decided what layers run.

    Args:
        executor: Who runs the steps.
        journal: Where they are kept; None if they are not.
        make: The kind of step.
        stage: What the steps are a part of.
        length: Tokens of every prompt.
        prompts: At least one.
    """

    def __init__(
        self,
        executor: Executor,
        journal: Journal | None,
        make: type[Step],
        stage: str,
        length: int,
        prompts: Sequence[Prompt],
    ) -> None:
        self.length, self.history = length, History()
        self._executor, self._journal, self._make, self._stage = executor, journal, make, stage
        self._prompts = [(prompt.sha256, index) for index, prompt in enumerate(prompts)]
        self._begun: tuple[LayerRun, Measuring] | None = None
        executor.know(prompts)

    def begin(self, runs: LayerRun) -> None:
        """Let the next layer run this on all prompts; the results come by `measured`."""
        self._begun = runs, self._measuring(self._make, len(self.history.runs), runs)

    def measured(self, runs: LayerRun) -> list[Any]:
        """Every prompt's result of the next layer; what was begun with another configuration is not waited for."""
        if self._begun is None or self._begun[0] != runs:
            self.begin(runs)
        assert self._begun is not None
        return self._begun[1].results()

    def accept(self, runs: LayerRun) -> None:
        """Move on, with what was measured last."""
        self.history, self._begun = self.history.then(runs), None

    def agreements(self) -> list[PromptAgreement]:
        """What both models predict of each prompt, after all layers."""
        last = self._measuring(LastStep, len(self.history.runs) - 1, self.history.runs[-1])
        return [PromptAgreement(**result) for result in last.results()]

    def _measuring(self, make: type[Step], layer: int, runs: LayerRun) -> Measuring:
        steps = [
            make(self.length, sha256, index, layer, self.history, runs, self._stage) for sha256, index in self._prompts
        ]
        return Measuring(steps, self._executor, self._journal)
