"""Prompts on their way through the patched and the dense model, a layer at a time, and what each layer is off by.

A few rows of a prompt may carry a third of its error, so that an error of some rows says little about all: errors are
of all rows, against dense attention. Dense attention in the model's own type costs a prefill no more than one more
attention, and its rounding (in bfloat16 some 3e-6 of the output's mean square) only adds to the error.

A prompt at a layer is an item of work, a step. It says all that its result depends on: the prompt, what the layers
before ran, and what this one runs. Which worker takes it, and whether that one has the prompt at hand or begins again,
changes nothing but the time.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from calibrate.curves.row_errors import row_errors
from calibrate.journal import Journal
from calibrate.model.layerwise import LayerwiseForward
from calibrate.model.logits import logits_on_device
from calibrate.model.memory import within_memory
from calibrate.model.streams import DecoderLayer, Stream, begin, layer_on_device
from calibrate.prompts.prompt import Prompt
from calibrate.proof.agreement import PromptAgreement, compare
from calibrate.work.executor import Executor
from calibrate.work.items import WorkerState, WorkItem
from calibrate.work.measured import Measuring
from s2o_runtime.config import KvCacheDtype, LayerConfig
from s2o_runtime.huggingface import hf
from s2o_runtime.scoring import Scoring

KIND = "proof"  # of entries in a journal
HISTORIES = 16  # that a process keeps unpacked


class Configured(Protocol):
    """What says what layers run, and can be proven: a profile, or a candidate for one."""

    @property
    def min_length(self) -> int:
        """The shortest calibrated length."""

    def layer_config(self, layer: int, length: int) -> LayerConfig:
        """What a layer runs for a prompt of `length` tokens."""

    @property
    def kv_cache_dtype(self) -> KvCacheDtype:
        """The type of the server's cache that keys and values are read from."""


C = TypeVar("C", bound=Configured)
Measured = TypeVar("Measured")


@dataclass(frozen=True)
class RowErrors:
    """What every row of one output is off by.

    squares, powers: Means over heads and Dv of the squared error and of the dense output's squares, float64 [Lq]. off:
    Each row's relative error (`row_errors`), float32 [Hq, Lq].
    """

    squares: Tensor
    powers: Tensor
    off: Tensor

    def mse_and_power(self, first: int = 0) -> tuple[float, float]:
        """The mean squared error and the mean square of the dense output, over the rows from `first`."""
        mse, power = torch.stack([self.squares[first:], self.powers[first:]]).mean(1).tolist()
        return mse, power


def errors_of_rows(out: Tensor, dense: Tensor) -> RowErrors:
    """The errors of all rows.

    Args:
        out, dense: [1, Hq, Lq, Dv] of one prompt, any floating type: an attention output, and dense attention's.
    """
    heads, rows, value_dim = out.shape[1:]
    squares, powers = torch.zeros(2, rows, dtype=torch.float64, device=out.device)
    off = torch.empty(heads, rows, dtype=torch.float32, device=out.device)
    for head in range(heads):  # one at a time: a long output in float32 is large
        ours, truth = out[:, head : head + 1].float(), dense[:, head : head + 1].float()
        squares += (ours - truth).square().sum(-1)[0, 0]
        powers += truth.square().sum(-1)[0, 0]
        off[head] = row_errors(ours, truth)[0, 0]
    return RowErrors(squares / (heads * value_dim), powers / (heads * value_dim), off)


def evenly_drawn(first: int, end: int, count: int, generator: torch.Generator) -> Tensor:
    """One row from each of `count` equal parts of the rows from `first` to `end`; all of them if they are fewer.

    Returns:
        int64 [R] on the CPU, ascending, each row at most once.
    """
    if end - first <= count:
        return torch.arange(first, end)
    draw = torch.rand(count, generator=generator, dtype=torch.float64)
    edges = torch.arange(count + 1) * (end - first) // count
    return first + edges[:-1] + (draw * (edges[1:] - edges[:-1])).long()


@dataclass(frozen=True)
class LayerRun:
    """What one layer runs for prompts of one length.

    chunk: Tokens that it is fed at once; None for whole prompts. by_keys: Of a layer that is fed in chunks, what it
    runs behind each number of keys. kv_cache_dtype: "fp8" if S2O reads keys and values as such a cache has them.
    """

    config: LayerConfig
    chunk: int | None = None
    by_keys: tuple[tuple[int, LayerConfig], ...] = ()
    kv_cache_dtype: KvCacheDtype = "auto"

    @classmethod
    def of(cls, configured: Configured, chunk: int | None, layer: int, length: int) -> LayerRun:
        """What a layer runs in a configuration.

        A server feeds prompts in chunks, each a call behind those before it. Every chunk follows the configuration of
        the keys that there are by then, as the runtime would choose it, and is dense while these are fewer than the
        shortest calibrated length.
        """
        config, cache = configured.layer_config(layer, length), configured.kv_cache_dtype
        if chunk is None or length <= chunk:
            return cls(config, kv_cache_dtype=cache)
        by_keys = []
        for keys in (*range(chunk, length, chunk), length):
            of_chunk = configured.layer_config(layer, keys)
            by_keys.append((keys, of_chunk.as_dense() if keys < configured.min_length else of_chunk))
        return cls(config, chunk, tuple(by_keys), cache)

    @cached_property
    def digest(self) -> str:
        cache = () if self.kv_cache_dtype == "auto" else (self.kv_cache_dtype,)
        return hashlib.sha256(repr((self.config, self.chunk, self.by_keys, *cache)).encode()).hexdigest()


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


@lru_cache(maxsize=HISTORIES)
def _unpack(digest: str, packed: bytes) -> History:
    return History(pickle.loads(packed), digest)


def layer_state(
    layer: DecoderLayer, runs: LayerRun, observer: hf.Observer | None = None, chunks: bool = True
) -> hf.LayerState:
    """What patches a layer of full attention.

    Args:
        layer: The layer.
        runs: What it runs.
        observer: Sees its attention's inputs and output.
        chunks: Whether it is fed in the chunks that `runs` has; else whole.
    """
    assert layer.row is not None
    chunk = runs.chunk if chunks else None
    config_at = (lambda keys: runs.config) if chunk is None else dict(runs.by_keys).__getitem__
    # a state's first calls are all metered, which would be timed too
    return hf.LayerState(
        layer.row, config_at, min_length=0, observer=observer, meter=None, chunk=chunk,
        kv_cache_dtype=runs.kv_cache_dtype,
    )  # fmt: skip


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
    """One prompt at one layer, as an item of work; what is observed there is a subclass's `errors`, beside the density.

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

    def run(self, worker: WorkerState) -> dict[str, Any]:
        errors: dict[str, Any] = {}

        def observe(layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, out: Tensor) -> None:
            errors.update(self.errors(q, k, v, scoring, out))

        with self._within_memory(worker):
            density = self._walk(worker).measure(self.runs, observe)
        return {**errors, "density": density}

    def errors(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, out: Tensor) -> dict[str, Any]:
        """What the layer's output is off by, as a journal keeps it.

        Args:
            q, k, v: The inputs of its attention, [1, H, L, D].
            scoring: How scores become weights.
            out: [1, Hq, L, Dv].
        """
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


@dataclass(frozen=True)
class Passed(Generic[Measured]):
    """What prompts of one length showed: of each layer, of each prompt after all layers, and what the layers ran."""

    layers: tuple[Measured, ...]
    agreements: tuple[PromptAgreement, ...]
    ran: History


def accept(configured: Configured, length: int, layer: int, measured: Any) -> None:
    """Accept what was measured, whatever came out."""


def through_layers(
    executor: Executor,
    prompts: Mapping[int, Sequence[Prompt]],
    configured: C,
    make: type[Step],
    result: Callable[[Sequence[Prompt], Sequence[Mapping[str, Any]]], Measured],
    revise: Callable[[C, int, int, Measured], C | None],
    on_step: Callable[[], object],
    chunk: int | None,
    journal: Journal | None,
) -> tuple[C, dict[int, Passed[Measured]]]:
    """Move prompts through the layers, each of which is measured until what it runs is accepted.

    The layers that follow see what the accepted configuration gave.

    Args:
        executor: Who runs it.
        prompts: By length in tokens, at least one of each. At each layer the lengths take their turns in this order.
        configured: What each layer runs at each length.
        make: The kind of step.
        result: What a layer comes to, from the prompts of a length and the results of its steps on them.
        revise: Given the configuration, the length, the layer's index and its result: what to measure instead on the
            same inputs, or None to accept this one.
        on_step: Called after each length of each layer.
        chunk: Tokens that a layer is fed at once, as a server does; None for whole prompts.
        journal: Where steps are kept, and found again; None if nowhere.

    Returns:
        What was accepted in the end, and what was measured of it by length.
    """
    walks = [_LockStep(executor, journal, make, length, of_length) for length, of_length in prompts.items()]
    layers: dict[int, list[Measured]] = {length: [] for length in prompts}
    for index in range(executor.geometry.layers):
        for walk in walks:  # so that the lengths are measured beside one another where there are workers
            walk.begin(LayerRun.of(configured, chunk, index, walk.length))
        for walk in walks:
            revised: C | None = configured
            while revised is not None:
                configured = revised
                runs = LayerRun.of(configured, chunk, index, walk.length)
                of_layer = result(prompts[walk.length], walk.measured(runs))
                revised = revise(configured, walk.length, index, of_layer)
            layers[walk.length].append(of_layer)
            walk.accept(runs)
            on_step()
    return configured, {
        walk.length: Passed(tuple(layers[walk.length]), walk.agreements(), walk.history) for walk in walks
    }


class _LockStep:
    """The prompts of one length on their way together, as it looks from where is decided what layers run.

    Who runs the steps, where they are kept and of which kind they are is as `through_layers` takes it.
    """

    def __init__(
        self,
        executor: Executor,
        journal: Journal | None,
        make: type[Step],
        length: int,
        prompts: Sequence[Prompt],
    ) -> None:
        self.length, self.history = length, History()
        self._executor, self._journal, self._make = executor, journal, make
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

    def agreements(self) -> tuple[PromptAgreement, ...]:
        """What both models predict of each prompt, after all layers."""
        last = self._measuring(LastStep, len(self.history.runs) - 1, self.history.runs[-1])
        return tuple(PromptAgreement(**result) for result in last.results())

    def _measuring(self, make: type[Step], layer: int, runs: LayerRun) -> Measuring:
        steps = [
            make(self.length, sha256, index, layer, self.history, runs, self._make.stage)
            for sha256, index in self._prompts
        ]
        return Measuring(steps, self._executor, self._journal)
