"""The adjust stage's measurement: the patched model, as it will run, on prompts that it was not calibrated on.

The prompts move through the patched model and through the dense one together, one layer at a time; times are taken
afterwards. This module says what comes out of that; `judge` says whether it is good enough, and `adjust` what to do if
it is not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from calibrate.curves.row_errors import tile_worst, worst_of
from calibrate.journal import Journal
from calibrate.model.layerwise import LayerwiseForward
from calibrate.model.memory import within_memory
from calibrate.model.models import LoadedModel
from calibrate.model.streams import Calls, DecoderLayer, Stream, begin, layer_on_device
from calibrate.progress import progress_bar
from calibrate.prompts.prompt import Prompt
from calibrate.proof.layers import (
    C,
    History,
    LayerRun,
    Passed,
    Step,
    accept,
    errors_of_rows,
    layer_state,
    through_layers,
)
from calibrate.proof.state import Candidate
from calibrate.recipe import Budget
from calibrate.timing import medians
from calibrate.work.executor import Executor, executor_of
from calibrate.work.items import WorkerState, WorkItem
from calibrate.work.measured import measured
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.attention.dense import fastest_dense_attention
from s2o_runtime.huggingface import hf
from s2o_runtime.identity import Geometry
from s2o_runtime.scoring import Scoring

KIND = "prefill"  # of entries in a journal: times of decoder layers
GPU_ROUNDS = 3
LAYER_FLUSHES = 96  # work ahead of a whole layer, about 4 ms: in a prefill the GPU is busy while a layer is launched
LONG_SECONDS = 0.02  # a call that takes longer is timed once: its scatter is small
TILE_ROWS = 64  # rows of which the worst counts


@dataclass(frozen=True)
class LayerProof:
    """One layer's attention at one length against dense attention on the same q, k, v.

    mse, dense_power, density: Means over the held-out prompts; dense_power is the mean square of the dense output.
    worst: `row_errors.worst_of`, over tiles of 64 rows of all heads and prompts, of the largest relative error of a row
    (`row_errors`). seconds, dense_seconds: Attention alone, on the first prompt; None on a CPU. of_prompts: Of each
    prompt its mse and dense power. kinds: The kind of text of each prompt.
    """

    mse: float
    dense_power: float
    density: float
    worst: float
    seconds: float | None = None
    dense_seconds: float | None = None
    of_prompts: tuple[tuple[float, float], ...] = ()
    kinds: tuple[str, ...] = ()

    @classmethod
    def of(cls, prompts: Sequence[Prompt], of_prompts: Sequence[Mapping[str, Any]]) -> LayerProof:
        """From the results of a layer's steps on these prompts, without times."""
        return cls(
            mse=statistics.fmean(one["mse"] for one in of_prompts),
            dense_power=statistics.fmean(one["power"] for one in of_prompts),
            density=statistics.fmean(one["density"] for one in of_prompts),
            worst=float(worst_of(torch.cat([one["tiles"] for one in of_prompts]))),
            of_prompts=tuple((one["mse"], one["power"]) for one in of_prompts),
            kinds=tuple(prompt.domain for prompt in prompts),
        )

    @property
    def rel_mse(self) -> float:
        return self.mse / max(self.dense_power, 1e-30)

    def error(self, budget: Budget) -> float:
        """The error in the budget's unit."""
        return budget.error(self.mse, self.dense_power)

    def errors(self, budget: Budget) -> list[float]:
        """The error of each prompt in the budget's unit."""
        return [budget.error(mse, power) for mse, power in self.of_prompts]


@dataclass(frozen=True)
class LengthProof:
    """The whole model at one length, patched against dense.

    kl: The mean over all positions of KL(dense || patched) of the next token, in nats. top1: The share of positions
    where both find the same token most likely. needles: Of the codes that the prompts ask for, how many the patched
    model keeps of those the dense one finds (`PromptAgreement`), and how many the dense one finds; None if they ask
    for none.
    prefill_seconds, dense_prefill_seconds: All decoder layers on the first prompt, without embedding and head.
    """

    layers: tuple[LayerProof, ...]
    kl: float
    top1: float
    needles: tuple[int, int] | None
    prefill_seconds: float = 0.0
    dense_prefill_seconds: float = 0.0

    @classmethod
    def of(cls, passed: Passed[LayerProof], prompts: Sequence[Prompt]) -> LengthProof:
        """From what prompts showed on their way, without times."""
        agreements = passed.agreements
        needles = sum(prompt.kept for prompt in agreements), sum(prompt.found for prompt in agreements)
        return cls(
            layers=passed.layers,
            kl=max(0.0, statistics.fmean(prompt.kl for prompt in agreements)),
            top1=statistics.fmean(prompt.top1 for prompt in agreements),
            needles=needles if any(prompt.answers for prompt in prompts) else None,
        )


def prove(
    model: LoadedModel | Executor,
    held_out: Mapping[int, Sequence[Prompt]],
    configured: C,
    revise: Callable[[C, int, int, LayerProof], C | None] = accept,
    on_step: Callable[[], object] = lambda: None,
    timed: bool = True,
    chunk: int | None = None,
    journal: Journal | None = None,
) -> tuple[C, dict[int, LengthProof]]:
    """Measure what a configuration does to every layer at every length, and to the model's predictions.

    Each prompt moves through each layer once for each configuration that the layer is tried with. The layers that
    follow see what the accepted configuration gave.

    Args:
        model: Who runs it, or a loaded model, which then runs in this process.
        held_out: The prompts to prove on, by length in tokens. At each layer the lengths take their turns in this
            order.
        configured: What each layer runs at each length.
        revise, on_step, chunk, journal: As `through_layers` takes them; the proofs of layers have no times yet.
        timed: Whether to take times too, of whole prompts; without, those of the proofs are 0 or None.

    Returns:
        What was proven in the end, and what was measured of it by length in tokens.

    Raises:
        ModelError: inf or NaN came up.
        ResourceError: The GPU's memory ran out.
    """
    with executor_of(model) as executor:
        configured, passed = through_layers(
            executor, held_out, configured, AdjustStep, LayerProof.of, revise, on_step, chunk, journal
        )
        proofs = {length: LengthProof.of(passed[length], prompts) for length, prompts in held_out.items()}
        if timed:
            first = {length: prompts[0] for length, prompts in held_out.items()}
            ran = {length: of_length.ran for length, of_length in passed.items()}
            proofs = _with_times(executor, first, ran, proofs, journal)
    return configured, proofs


@dataclass(frozen=True)
class Prover:
    """What measures candidates on the prompts that layers are adjusted on.

    executor: Who runs it. held_out: The prompts, by length in tokens; every length of the candidates. journal: Where
    measurements are kept; None if nowhere. progress: Whether to show progress bars.
    """

    executor: Executor
    held_out: Mapping[int, Sequence[Prompt]]
    journal: Journal | None = None
    progress: bool = False

    @property
    def geometry(self) -> Geometry:
        """Of the model."""
        return self.executor.geometry

    def bar(self, title: str, lengths: int) -> AbstractContextManager[Callable[[], object]]:
        """A progress bar of every layer at so many lengths; what it gives is called after each."""
        return progress_bar(title, self.geometry.layers * lengths, "layer", shown=self.progress)

    def prove(
        self,
        title: str,
        lengths: Container[int],
        candidate: Candidate,
        revise: Callable[[Candidate, int, int, LayerProof], Candidate | None] = accept,
        timed: bool = True,
    ) -> tuple[Candidate, dict[int, LengthProof]]:
        """`prove` a candidate at some lengths, fed in its recipe's chunks, under a progress bar with this title."""
        prompts = {length: prompts for length, prompts in self.held_out.items() if length in lengths}
        with self.bar(title, len(prompts)) as step:
            chunk = candidate.recipe.chunk
            return prove(self.executor, prompts, candidate, revise, step, timed, chunk, self.journal)


@dataclass(frozen=True)
class AdjustStep(Step):
    """What one prompt says of one layer: a mapping with `mse`, `power` and `density` as in `LayerProof`, and `tiles`:
    the largest relative error of a row in each tile of rows, float32 [tiles]."""

    stage: str = "proving"

    def errors(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, out: Tensor) -> dict[str, Any]:
        errors = errors_of_rows(out, fastest_dense_attention(q, k, v, scoring))
        mse, power = errors.mse_and_power()
        return {"mse": mse, "power": power, "tiles": tile_worst(errors.off, TILE_ROWS).flatten().cpu()}


def _with_times(
    executor: Executor,
    prompts: Mapping[int, Prompt],
    ran: Mapping[int, History],
    proofs: Mapping[int, LengthProof],
    journal: Journal | None,
) -> dict[int, LengthProof]:
    """The proofs with the times of every decoder layer on one prompt of each length; ran: what all layers run."""
    geometry = executor.geometry
    if executor.device.kind != "cuda":  # there they are no objective, and no run takes them from another
        journal = None
    numbers = range(geometry.decoder_layers)
    items = {
        (length, number): LayerTime(length, prompt.sha256, number, ran[length], number * executor.size // len(numbers))
        for number in numbers  # a layer's weights are on the device for all lengths
        for length, prompt in prompts.items()
    }
    seconds = dict(zip(items, measured(list(items.values()), executor, journal), strict=True))
    timed = {}
    for length, proof in proofs.items():
        layers = []
        for row, layer in enumerate(proof.layers):
            s2o, dense = seconds[length, geometry.layer_number(row)].get("attention") or (None, None)
            layers.append(replace(layer, seconds=s2o, dense_seconds=dense))
        timed[length] = replace(
            proof,
            layers=tuple(layers),
            prefill_seconds=sum(seconds[length, number]["patched"] for number in numbers),
            dense_prefill_seconds=sum(seconds[length, number]["dense"] for number in numbers),
        )
    return timed


@dataclass(frozen=True)
class LayerTime(WorkItem):
    """The times of one decoder layer on one prompt, as an item of work.

    number: Which decoder layer. ran: What all layers of full attention run. part: Which of the parts of the model, one
    for each worker, it is in; the parts are timed beside one another. Its result has the seconds of the whole
    layer as `patched` and `dense`, and on a GPU, for a layer of full attention, those of attention alone, S2O and
    dense, as `attention`.
    """

    length: int
    prompt: str
    number: int
    ran: History
    part: int
    stage: str = "timing"
    kind: ClassVar[str] = KIND
    timed: ClassVar[bool] = True

    @property
    def affinity(self) -> Hashable:
        return self.length, self.part

    @property
    def key(self) -> dict[str, Any]:
        return {"length": self.length, "prompt": self.prompt, "layer": self.number, "ran": self.ran.digest}

    def __str__(self) -> str:
        return f"times of layer {self.number} at {self.length} tokens"

    def run(self, worker: WorkerState) -> dict[str, Any]:
        hf.register()
        worker.attend_with(hf.NAME)
        weights = worker.loaded.weights
        with within_memory(weights.device, self.length, weights.held, f"timing layer {self.number}"):
            walk = worker.keep((self.length, self.ran.digest), lambda: _TimedWalk(worker, self.prompt, self.ran))
            return walk.timed(self.number)


class _TimedWalk:
    """A prompt on its way through the patched model, whose layers are timed with its hidden states."""

    def __init__(self, worker: WorkerState, prompt: str, ran: History) -> None:
        self._worker, self._ids, self._runs = worker, worker.prompts[prompt].ids, ran.runs
        self._begin()

    @torch.no_grad()
    def timed(self, number: int) -> dict[str, Any]:
        """Time a decoder layer, and move through it."""
        if number < self._forward.number:
            self._begin()
        while self._forward.number < number:
            self._forward.move(None if self._forward.next_layer.row is None else self._patched)
        layer, (stream,) = self._forward.next_layer, self._forward.streams
        runs = None if layer.row is None else self._runs[layer.row]
        after: list[Stream] = []
        with layer_on_device(self._worker.loaded, layer):
            if runs is None:  # both prefills have it
                seconds = _seconds({"layer": lambda: layer.dense(stream)}, layer.device)["layer"]
                times: dict[str, Any] = {"patched": seconds, "dense": seconds}
            else:
                state = layer_state(layer, runs, chunks=False)

                def patched() -> None:
                    after[:] = [layer.patched(stream, state)]

                times = {**_seconds({"patched": patched, "dense": lambda: layer.dense(stream)}, layer.device)}
                if layer.device.type == "cuda":
                    times["attention"] = _attention_seconds(layer, stream, runs)
        if runs is not None and runs.chunk is None:
            self._forward.move(lambda layer, stream: after[0])
        else:
            self._forward.move(None if runs is None else self._patched)
        return times

    def _patched(self, layer: DecoderLayer, stream: Stream) -> Stream:
        assert layer.row is not None
        return layer.patched(stream, layer_state(layer, self._runs[layer.row]))

    @torch.no_grad()
    def _begin(self) -> None:
        calls: dict[int, Calls] = self._worker.keep("calls of patched layers", dict)
        self._forward = LayerwiseForward(self._worker.loaded, begin(self._worker.loaded, [self._ids], calls))


def _seconds(calls: Mapping[str, Callable[[], Any]], device: torch.device) -> dict[str, float]:
    """Seconds of decoder layers: medians on a GPU, of one run if they are long; one run by the clock on a CPU."""
    if device.type == "cuda":
        once = medians(calls, device, 1, LAYER_FLUSHES)
        if min(once.values()) > LONG_SECONDS:
            return once
        return medians(calls, device, GPU_ROUNDS, LAYER_FLUSHES)
    return {name: _clocked(call) for name, call in calls.items()}


def _clocked(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _attention_seconds(layer: DecoderLayer, stream: Stream, runs: LayerRun) -> tuple[float, float]:
    """Median seconds of attention alone, S2O and dense, on the q, k, v that a prompt brings to the layer."""
    calls: dict[str, Callable[[], Any]] = {}

    def keep(index: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, out: Tensor) -> None:
        calls["s2o"] = partial(s2o_attention, q, k, v, runs.config, **scoring.arguments())
        calls["dense"] = partial(fastest_dense_attention, q, k, v, scoring)

    layer.patched(stream, layer_state(layer, runs, keep, chunks=False))
    times = medians(calls, layer.device, GPU_ROUNDS)
    if times["s2o"] > times["dense"]:  # that would make the layer dense, so it must be no hiccup
        again = medians(calls, layer.device, GPU_ROUNDS)
        times = {name: min(seconds, again[name]) for name, seconds in times.items()}
    return times["s2o"], times["dense"]
