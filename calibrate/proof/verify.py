"""The patched model, as it will run, beside the dense one, on prompts that it was not calibrated on.

The prompts move through both together, one layer at a time; times are taken afterwards. This module says what comes out
of that; `adjust` and `certify` say whether it is good enough, and what to do if it is not.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from calibrate.curves.curves import worst_of
from calibrate.journal import Journal
from calibrate.model.layers import Calls, DecoderLayer, LayerwiseForward, Stream, begin, layer_on_device
from calibrate.model.models import LoadedModel
from calibrate.progress import progress_bar
from calibrate.prompts.prompt import Prompt
from calibrate.proof.layers import (
    AgreementItem,
    C,
    ConfigPrefix,
    Configured,
    LayerProofItem,
    LayerSetting,
    PromptAgreement,
    ProofItem,
    layer_state,
)
from calibrate.proof.state import Candidate
from calibrate.recipe import Budget, Recipe
from calibrate.timing import medians
from calibrate.work.executor import Executor, Measuring, WorkerState, executor_of, measured
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.attention.dense import fastest_dense_attention
from s2o_runtime.call import Scoring
from s2o_runtime.identity import Geometry

GPU_ROUNDS = 3
LAYER_FLUSHES = 96  # work ahead of a whole layer, about 4 ms: in a prefill the GPU is busy while a layer is launched
LONG_SECONDS = 0.02  # a call that takes longer is timed once: its scatter is small


@dataclass(frozen=True)
class PromptErrors:
    """What one layer is off by on one prompt.

    all_rows, last_rows: mean squared error and mean square of the dense output, over all rows and over the last ones,
    those that answer (`layers.answer_rows`).
    """

    all_rows: tuple[float, float]
    last_rows: tuple[float, float]

    def error(self, budget: Budget) -> float:
        """The error over all rows, in the budget's unit."""
        return budget.error(*self.all_rows)

    def largest(self, budget: Budget) -> float:
        """The larger of the errors over all rows and over those that answer; infinity where one is no number."""
        errors = self.error(budget), budget.error(*self.last_rows)
        return math.inf if any(map(math.isnan, errors)) else max(errors)


@dataclass(frozen=True)
class LayerProof:
    """One layer's attention at one length against dense attention on the same q, k, v.

    mse, dense_power, density: means over the prompts; dense_power is the mean square of the dense output.
    worst: `row_errors.worst_of`, over tiles of 64 rows of all heads and prompts, of the largest relative error of a row
    (`row_errors`). seconds, dense_seconds: attention alone, on the first prompt; None on a CPU. of_prompts: what each
    prompt showed. kinds: the kind of text of each prompt.
    """

    mse: float
    dense_power: float
    density: float
    worst: float
    seconds: float | None = None
    dense_seconds: float | None = None
    of_prompts: tuple[PromptErrors, ...] = ()
    kinds: tuple[str, ...] = ()

    @classmethod
    def of(cls, prompts: Sequence[Prompt], results: Sequence[Mapping[str, Any]]) -> LayerProof:
        """From the results of a layer's steps on these prompts, without times."""
        return cls(
            mse=statistics.fmean(result["all_rows"][0] for result in results),
            dense_power=statistics.fmean(result["all_rows"][1] for result in results),
            density=statistics.fmean(result["density"] for result in results),
            worst=float(worst_of(torch.cat([result["tiles"] for result in results]))),
            of_prompts=tuple(PromptErrors(tuple(result["all_rows"]), tuple(result["last_rows"])) for result in results),
            kinds=tuple(prompt.domain for prompt in prompts),
        )

    @property
    def rel_mse(self) -> float:
        return self.mse / max(self.dense_power, 1e-30)

    def error(self, budget: Budget) -> float:
        """The mean error in the budget's unit."""
        return budget.error(self.mse, self.dense_power)

    def errors(self, budget: Budget) -> list[float]:
        """The error of each prompt over all rows, in the budget's unit."""
        return [prompt.error(budget) for prompt in self.of_prompts]

    def held(self, recipe: Recipe) -> float:
        """What a recipe holds to the layer's limit: the mean error, or the largest of any prompt."""
        if not recipe.per_prompt:
            return self.error(recipe.budget)
        return max(prompt.largest(recipe.budget) for prompt in self.of_prompts)


@dataclass(frozen=True)
class LengthProof:
    """The whole model at one length, patched against dense.

    kl: the mean over all positions of KL(dense || patched) of the next token, in nats. top1: the share of positions
    where both find the same token most likely. needles: of the codes that the prompts ask for, how many the patched
    model keeps of those the dense one finds (`PromptAgreement`), and how many the dense one finds; None if they ask
    for none. prefill_seconds, dense_prefill_seconds: all decoder layers on the first prompt, without embedding and
    head. prompts, agreements: on what, and what both models predict of each.
    """

    layers: tuple[LayerProof, ...]
    kl: float
    top1: float
    needles: tuple[int, int] | None
    prefill_seconds: float = 0.0
    dense_prefill_seconds: float = 0.0
    prompts: tuple[Prompt, ...] = ()
    agreements: tuple[PromptAgreement, ...] = ()

    @classmethod
    def of(
        cls, layers: Sequence[LayerProof], agreements: Sequence[PromptAgreement], prompts: Sequence[Prompt]
    ) -> LengthProof:
        """From what prompts showed on their way, without times."""
        needles = sum(prompt.kept for prompt in agreements), sum(prompt.found for prompt in agreements)
        return cls(
            layers=tuple(layers),
            kl=max(statistics.fmean(prompt.kl for prompt in agreements), 0.0),  # NaN stays
            top1=statistics.fmean(prompt.top1 for prompt in agreements),
            needles=needles if any(prompt.answers for prompt in prompts) else None,
            prompts=tuple(prompts),
            agreements=tuple(agreements),
        )

    @property
    def kls(self) -> list[float]:
        """The KL of each prompt in nats, at least 0."""
        return [max(agreement.kl, 0.0) for agreement in self.agreements]  # NaN stays


def accept(configured: Configured, length: int, layer: int, proof: LayerProof) -> None:
    """Accept what was measured, whatever came out."""


class Progress(NamedTuple):
    """How a proof is followed: `on_step` is called after each length of each layer, `stage` says what it is for."""

    on_step: Callable[[], object] = lambda: None
    stage: str = "proving"


def prove(
    model: LoadedModel | Executor,
    prompts: Mapping[int, Sequence[Prompt]],
    configured: C,
    revise: Callable[[C, int, int, LayerProof], C | None] = accept,
    progress: Progress = Progress(),  # noqa: B008, it is immutable
    timed: bool = True,
    chunk: int | None = None,
    journal: Journal | None = None,
) -> tuple[C, dict[int, LengthProof]]:
    """Measure what a configuration does to every layer at every length, and to the model's predictions.

    Each prompt moves through each layer once for each configuration that the layer is tried with. The layers that
    follow see what the accepted configuration gave.

    Args:
        model: who runs it, or a loaded model, which then runs in this process.
        prompts: by length in tokens, at least one of each. At each layer the lengths take their turns in this order.
        configured: what each layer runs at each length.
        revise: given the configuration, the length, the layer's index and its proof, without times: what to measure
            instead on the same inputs, or None to accept this one.
        progress: who is told of it, and what it is done for.
        timed: whether to take times too, of whole prompts; without, those of the proofs are 0 or None.
        chunk: tokens that a layer is fed at once, as a server does; None for whole prompts.
        journal: where steps are kept, and found again; None if nowhere.

    Returns:
        What was accepted in the end, and what was measured of it by length in tokens.

    Raises:
        ModelError: inf or NaN came up.
        ResourceError: The GPU's memory ran out.
    """
    with executor_of(model) as executor:
        evaluations = [
            _Evaluation(executor, journal, progress.stage, length, length_prompts)
            for length, length_prompts in prompts.items()
        ]
        layers: dict[int, list[LayerProof]] = {length: [] for length in prompts}
        for index in range(executor.geometry.layers):
            for evaluation in evaluations:  # so that the lengths are measured beside one another if there are workers
                evaluation.begin(LayerSetting.of(configured, chunk, index, evaluation.length))
            for evaluation in evaluations:
                length = evaluation.length
                revised: C | None = configured
                while revised is not None:
                    configured = revised
                    runs = LayerSetting.of(configured, chunk, index, length)
                    proof = LayerProof.of(prompts[length], evaluation.measured(runs))
                    revised = revise(configured, length, index, proof)
                layers[length].append(proof)
                evaluation.accept(runs)
                progress.on_step()
        proofs = {
            evaluation.length: LengthProof.of(
                layers[evaluation.length], evaluation.agreements(), prompts[evaluation.length]
            )
            for evaluation in evaluations
        }
        if timed:
            first = {length: length_prompts[0] for length, length_prompts in prompts.items()}
            ran = {evaluation.length: evaluation.prefix for evaluation in evaluations}
            proofs = _with_times(executor, first, ran, proofs, journal)
    return configured, proofs


class _Evaluation:
    """All prompts of one length, evaluated layer by layer, so that the caller can choose each layer's configuration
    from the results so far."""

    def __init__(
        self,
        executor: Executor,
        journal: Journal | None,
        stage: str,
        length: int,
        prompts: Sequence[Prompt],
    ) -> None:
        self.length, self.prefix = length, ConfigPrefix()
        self._executor, self._journal, self._stage = executor, journal, stage
        self._prompts = [(prompt.sha256, index) for index, prompt in enumerate(prompts)]
        self._begun: tuple[LayerSetting, Measuring] | None = None
        executor.register_prompts(prompts)

    def begin(self, runs: LayerSetting) -> None:
        """Let the next layer run this on all prompts; the results come by `measured`."""
        self._begun = runs, self._measuring(LayerProofItem, len(self.prefix.runs), runs)

    def measured(self, runs: LayerSetting) -> list[Any]:
        """Every prompt's result of the next layer; what was begun with another configuration is not waited for."""
        if self._begun is None or self._begun[0] != runs:
            self.begin(runs)
        assert self._begun is not None
        return self._begun[1].results()

    def accept(self, runs: LayerSetting) -> None:
        """Move on, with what was measured last."""
        self.prefix, self._begun = self.prefix.then(runs), None

    def agreements(self) -> tuple[PromptAgreement, ...]:
        """What both models predict of each prompt, after all layers."""
        last = self._measuring(AgreementItem, len(self.prefix.runs) - 1, self.prefix.runs[-1])
        return tuple(PromptAgreement(**result) for result in last.results())

    def _measuring(self, make: type[LayerProofItem], layer: int, runs: LayerSetting) -> Measuring:
        steps = [
            make(self.length, sha256, index, layer, self.prefix, runs, stage=self._stage)
            for sha256, index in self._prompts
        ]
        return Measuring(steps, self._executor, self._journal)


@dataclass(frozen=True)
class Prover:
    """What measures candidates on the prompts that layers are adjusted on.

    executor: who runs it. held_out: the prompts, by length in tokens; every length of the candidates. journal: where
    measurements are kept; None if nowhere. progress: whether to show progress bars.
    """

    executor: Executor
    held_out: Mapping[int, Sequence[Prompt]]
    journal: Journal | None = None
    progress: bool = False

    @property
    def geometry(self) -> Geometry:
        """The model's sizes."""
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
            return prove(self.executor, prompts, candidate, revise, Progress(step), timed, chunk, self.journal)


def _with_times(
    executor: Executor,
    prompts: Mapping[int, Prompt],
    ran: Mapping[int, ConfigPrefix],
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
class LayerTime(ProofItem):
    """The times of one decoder layer on one prompt, as an item of work.

    number: which decoder layer. ran: what all layers of full attention run. part: which of the parts of the model, one
    for each worker, it is in; the parts are timed beside one another. Its result has the seconds of the whole
    layer as `patched` and `dense`, and on a GPU, for a layer of full attention, those of attention alone, S2O and
    dense, as `attention`.
    """

    prompt: str
    number: int
    ran: ConfigPrefix
    part: int
    stage: str = field(default="timing", kw_only=True)
    kind: ClassVar[str] = "prefill"
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
        self.patching(worker)
        with self.within_memory(worker, f"timing layer {self.number}"):
            forward = worker.cached(
                (self.length, self.ran.digest), lambda: _TimedForward(worker, self.prompt, self.ran)
            )
            return forward.timed(self.number)


class _TimedForward:
    """The patched model's forward pass over one prompt, which times each layer with the prompt's hidden states."""

    def __init__(self, worker: WorkerState, prompt: str, ran: ConfigPrefix) -> None:
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
        calls: dict[int, Calls] = self._worker.cached("calls of patched layers", dict)
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


def _attention_seconds(layer: DecoderLayer, stream: Stream, runs: LayerSetting) -> tuple[float, float]:
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
