"""The patched model, as it will run, beside the dense one, on prompts that it was not calibrated on.

The prompts move through both together, one layer at a time; times are taken afterwards. `adjust` and `certify` judge
the results, and change what is not good enough.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from calibrate.curves.curves import select_worst
from calibrate.journal import Journal
from calibrate.model.layers import DecoderLayer, Stream
from calibrate.progress import show_progress
from calibrate.prompts.prompt import Prompt
from calibrate.proof.layers import (
    AgreementItem,
    ConfigSource,
    LayerConfigAt,
    LayerHistory,
    LayerProofItem,
    PromptAgreement,
    PromptForward,
    ProofItem,
    make_layer_state,
)
from calibrate.recipe import Budget, Recipe
from calibrate.timing import measure_medians
from calibrate.work.executor import Executor, MeasurementBatch, WorkerState, measure_items
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.attention.dense import fastest_dense_attention
from s2o_runtime.call import Scoring

GPU_ROUNDS = 3
LAYER_FLUSHES = 96  # work ahead of a whole layer, about 4 ms: in a prefill the GPU is busy while a layer is launched
LONG_SECONDS = 0.02  # a call that takes longer is timed once: its scatter is small


@dataclass(frozen=True)
class PromptErrors:
    """The errors of one layer on one prompt.

    all_rows, last_rows: mean squared error and mean square of the dense output, over all rows and over the last ones,
    those that answer (`layers.count_answer_rows`).
    """

    all_rows: tuple[float, float]
    last_rows: tuple[float, float]

    def error(self, budget: Budget) -> float:
        """Return the error over all rows, in the budget's unit."""
        return budget.error(*self.all_rows)

    def max_error(self, budget: Budget) -> float:
        """Return the larger of the errors over all rows and over those that answer; infinity where one is NaN."""
        errors = self.error(budget), budget.error(*self.last_rows)
        return math.inf if any(map(math.isnan, errors)) else max(errors)


@dataclass(frozen=True)
class LayerProof:
    """One layer's attention at one length against dense attention on the same q, k, v.

    Attributes:
        mse, dense_power, density: means over the prompts; dense_power is the mean square of the dense output.
        worst: `curves.worst_of`, over tiles of 64 rows of all heads and prompts, of a row's largest relative error.
        seconds, dense_seconds: attention alone, on the first prompt; None on a CPU.
        of_prompts: the errors of each prompt.
        kinds: the kind of text of each prompt.
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
    def from_results(cls, prompts: Sequence[Prompt], results: Sequence[Mapping[str, Any]]) -> LayerProof:
        """Summarise the results of a layer's items (`LayerProofItem`) on these prompts, without times."""
        return cls(
            mse=statistics.fmean(result["all_rows"][0] for result in results),
            dense_power=statistics.fmean(result["all_rows"][1] for result in results),
            density=statistics.fmean(result["density"] for result in results),
            worst=float(select_worst(torch.cat([result["tiles"] for result in results]))),
            of_prompts=tuple(PromptErrors(tuple(result["all_rows"]), tuple(result["last_rows"])) for result in results),
            kinds=tuple(prompt.domain for prompt in prompts),
        )

    @property
    def rel_mse(self) -> float:
        """The mean squared error over the mean square of the dense output."""
        return self.mse / max(self.dense_power, 1e-30)

    def error(self, budget: Budget) -> float:
        """Return the mean error in the budget's unit."""
        return budget.error(self.mse, self.dense_power)

    def errors(self, budget: Budget) -> list[float]:
        """Return the error of each prompt over all rows, in the budget's unit."""
        return [prompt.error(budget) for prompt in self.of_prompts]

    def limited_error(self, recipe: Recipe) -> float:
        """Return the error that a recipe holds to the layer's limit: the mean, or the largest of any prompt."""
        if not recipe.per_prompt:
            return self.error(recipe.budget)
        return max(prompt.max_error(recipe.budget) for prompt in self.of_prompts)


@dataclass(frozen=True)
class LengthProof:
    """The whole model at one length, patched against dense.

    Attributes:
        layers: of every layer of full attention.
        kl: the mean over all positions of KL(dense || patched) of the next token, in nats.
        top1: the share of positions where both find the same token most likely.
        needles: of the codes that the prompts ask for, how many the patched model keeps of those the dense one finds
            (`PromptAgreement`), and how many the dense one finds; None if they ask for none.
        prefill_seconds, dense_prefill_seconds: all decoder layers on the first prompt, without embedding and head.
        prompts, agreements: the prompts, and the agreement of both models on each.
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
    def from_agreements(
        cls, layers: Sequence[LayerProof], agreements: Sequence[PromptAgreement], prompts: Sequence[Prompt]
    ) -> LengthProof:
        """Summarise the layers and the predictions of all prompts, without times."""
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


S = TypeVar("S", bound=ConfigSource)
Revise = Callable[[S, int, int, LayerProof], S | None]  # configurations, length, layer, proof -> to prove instead
Prompts = Mapping[int, Sequence[Prompt]]  # by length in tokens


@dataclass(frozen=True)
class Prover:
    """Proofs of candidates and profiles, run by an executor.

    Attributes:
        executor: runs the items of work.
        journal: keeps results, and has those of earlier runs; None to keep none.
        chunk: tokens that a layer is fed at once, as a server does; None for whole prompts.
        progress: whether to show progress bars.
        on_step: called after each length of each layer.
    """

    executor: Executor
    journal: Journal | None = None
    chunk: int | None = None
    progress: bool = False
    on_step: Callable[[], object] = lambda: None

    @contextmanager
    def show_progress(self, title: str, lengths: int) -> Iterator[Prover]:
        """Yield the prover with a progress bar over every layer at so many lengths."""
        steps = self.executor.geometry.layers * lengths
        with show_progress(title, steps, "layer", shown=self.progress) as step:
            yield replace(self, on_step=step)

    def prove(
        self,
        source: S,
        prompts: Prompts,
        revise: Revise[S] | None = None,
        *,
        timed: bool = True,
        stage: str = "proving",
    ) -> tuple[S, dict[int, LengthProof]]:
        """Measure the errors that configurations cause in every layer at every length, and in the predictions.

        Each prompt moves through each layer once for each configuration that the layer is tried with. The layers that
        follow see what the accepted configuration gave.

        Args:
            source: the configurations.
            prompts: by length in tokens, at least one of each. At each layer the lengths take turns in this order.
            revise: given the configurations, the length, the layer's row and its proof, without times: returns what to
                measure instead on the same inputs, or None to accept. By default all is accepted.
            timed: whether to time whole prompts too; without, the times of the proofs are 0 or None.
            stage: the purpose, a word in the journal's keys.

        Returns:
            The configurations that were accepted in the end, and the measurements of these by length in tokens.

        Raises:
            ModelError: inf or NaN came up.
            ResourceError: The GPU's memory ran out.
        """
        runs = {
            length: _LengthRun(self.executor, self.journal, stage, length, length_prompts)
            for length, length_prompts in prompts.items()
        }
        layers: dict[int, list[LayerProof]] = {length: [] for length in prompts}
        for layer in range(self.executor.geometry.layers):
            for length, run in runs.items():  # all begin before one is waited for: workers run them side by side
                run.begin(LayerConfigAt.from_source(source, self.chunk, layer, length))
            for length, run in runs.items():
                while True:
                    config = LayerConfigAt.from_source(source, self.chunk, layer, length)
                    proof = LayerProof.from_results(prompts[length], run.measure(config))
                    revised = revise(source, length, layer, proof) if revise else None
                    if revised is None:
                        break
                    source = revised
                layers[length].append(proof)
                run.accept(config)
                self.on_step()
        proofs = {
            length: LengthProof.from_agreements(layers[length], run.compare(), prompts[length])
            for length, run in runs.items()
        }
        if timed:
            first = {length: length_prompts[0] for length, length_prompts in prompts.items()}
            histories = {length: run.history for length, run in runs.items()}
            proofs = _add_times(self.executor, first, histories, proofs, self.journal)
        return source, proofs


class _LengthRun:
    """All prompts of one length on their way through the layers."""

    def __init__(
        self, executor: Executor, journal: Journal | None, stage: str, length: int, prompts: Sequence[Prompt]
    ) -> None:
        self.history = LayerHistory()
        self._executor, self._journal, self._stage, self._length = executor, journal, stage, length
        self._prompts = [(prompt.sha256, index) for index, prompt in enumerate(prompts)]
        self._begun: tuple[LayerConfigAt, MeasurementBatch] | None = None
        executor.register_prompts(prompts)

    def begin(self, config: LayerConfigAt) -> None:
        """Start the next layer with this configuration on all prompts; `measure` waits for the results."""
        self._begun = config, self._start(LayerProofItem, len(self.history.configs), config)

    def measure(self, config: LayerConfigAt) -> list[Any]:
        """Return every prompt's result of the next layer; another configuration that was begun is not waited for."""
        if self._begun is None or self._begun[0] != config:
            self.begin(config)
        assert self._begun is not None
        return self._begun[1].results()

    def accept(self, config: LayerConfigAt) -> None:
        """Move on to the next layer."""
        self.history, self._begun = self.history.append(config), None

    def compare(self) -> tuple[PromptAgreement, ...]:
        """Compare what both models predict of each prompt, after all layers."""
        last = self._start(AgreementItem, len(self.history.configs) - 1, self.history.configs[-1])
        return tuple(PromptAgreement(**result) for result in last.results())

    def _start(self, item_type: type[LayerProofItem], layer: int, config: LayerConfigAt) -> MeasurementBatch:
        items = [
            item_type(self._length, sha256, index, layer, self.history, config, stage=self._stage)
            for sha256, index in self._prompts
        ]
        return MeasurementBatch(items, self._executor, self._journal)


def _add_times(
    executor: Executor,
    prompts: Mapping[int, Prompt],
    histories: Mapping[int, LayerHistory],
    proofs: Mapping[int, LengthProof],
    journal: Journal | None,
) -> dict[int, LengthProof]:
    """Return the proofs with the times of every decoder layer on one prompt of each length."""
    geometry = executor.geometry
    if executor.device.kind != "cuda":  # there they are no objective, and no run takes them from another
        journal = None
    numbers = range(geometry.decoder_layers)
    items = {
        (length, number): LayerTime(
            length, prompt.sha256, number, histories[length], number * executor.size // len(numbers)
        )
        for number in numbers  # a layer's weights are on the device for all lengths
        for length, prompt in prompts.items()
    }
    seconds = dict(zip(items, measure_items(list(items.values()), executor, journal), strict=True))
    timed = {}
    for length, proof in proofs.items():
        layers = []
        for row, layer in enumerate(proof.layers):
            s2o, dense = seconds[length, geometry.get_layer_number(row)].get("attention") or (None, None)
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

    Its result has the seconds of the whole layer as `patched` and `dense`, and on a GPU, for a layer of full attention,
    those of attention alone, S2O and dense, as `attention`.

    Attributes:
        prompt: the prompt's hash.
        number: the layer's number in the decoder.
        history: the configurations of all layers of full attention.
        part: the part of the model, one for each worker, that the layer is in; parts are timed side by side.
    """

    prompt: str
    number: int
    history: LayerHistory
    part: int
    stage: str = field(default="timing", kw_only=True)
    kind: ClassVar[str] = "prefill"
    timed: ClassVar[bool] = True

    @property
    def affinity(self) -> Hashable:
        return self.length, self.part

    @property
    def key(self) -> dict[str, Any]:
        return {"length": self.length, "prompt": self.prompt, "layer": self.number, "ran": self.history.digest}

    def __str__(self) -> str:
        return f"times of layer {self.number} at {self.length} tokens"

    def run(self, worker: WorkerState) -> dict[str, Any]:
        self.use_s2o(worker)
        with self.within_memory(worker, f"timing layer {self.number}"):
            cached_as = self.length, self.history.digest
            forward = worker.cached(cached_as, lambda: PromptForward(worker, self.prompt, with_dense=False))
            forward.move_to(self.number, self.history)
            with forward.enter_next_layer() as (layer, stream):
                if layer.row is None:  # both prefills have it
                    seconds = _time_calls({"layer": lambda: layer.dense(stream)}, layer.device)["layer"]
                    return {"patched": seconds, "dense": seconds}
                config, outputs = self.history.configs[layer.row], list[Stream]()
                state = make_layer_state(layer, config, chunks=False)

                def patched() -> None:
                    outputs[:] = [layer.patched(stream, state)]

                calls = {"patched": patched, "dense": lambda: layer.dense(stream)}
                times: dict[str, Any] = {**_time_calls(calls, layer.device)}
                if layer.device.type == "cuda":
                    times["attention"] = _time_attention(layer, stream, config)
                if config.chunk is None:  # in chunks the output is another one
                    forward.tried = config, outputs[0]
        return times


def _time_calls(calls: Mapping[str, Callable[[], Any]], device: torch.device) -> dict[str, float]:
    """Time decoder layers, in seconds: medians on a GPU, of one run if they are long; one run by the clock on a CPU."""
    if device.type == "cuda":
        once = measure_medians(calls, device, 1, LAYER_FLUSHES)
        if min(once.values()) > LONG_SECONDS:
            return once
        return measure_medians(calls, device, GPU_ROUNDS, LAYER_FLUSHES)
    seconds = {}
    for name, call in calls.items():
        start = time.perf_counter()
        call()
        seconds[name] = time.perf_counter() - start
    return seconds


def _time_attention(layer: DecoderLayer, stream: Stream, config: LayerConfigAt) -> tuple[float, float]:
    """Return median seconds of attention alone, S2O and dense, on the q, k, v that a prompt brings to the layer."""
    calls: dict[str, Callable[[], Any]] = {}

    def keep(index: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, out: Tensor) -> None:
        calls["s2o"] = partial(s2o_attention, q, k, v, config.config, **scoring.arguments())
        calls["dense"] = partial(fastest_dense_attention, q, k, v, scoring)

    layer.patched(stream, make_layer_state(layer, config, keep, chunks=False))
    times = measure_medians(calls, layer.device, GPU_ROUNDS)
    if times["s2o"] > times["dense"]:  # that would make the layer dense, so it must be no hiccup
        again = measure_medians(calls, layer.device, GPU_ROUNDS)
        times = {name: min(seconds, again[name]) for name, seconds in times.items()}
    return times["s2o"], times["dense"]
