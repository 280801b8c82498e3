"""The patched model, as it will run, beside the dense one, on prompts that it was not calibrated on.

The prompts move through both together, one layer at a time; times are taken afterwards. `adjust` and `certify` judge
the results, and change what is not good enough.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import starmap
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
from calibrate.timing import FLUSHES, measure_medians
from calibrate.work.executor import Executor, MeasurementBatch, WorkerState, measure_items
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.attention.dense import fastest_dense_attention
from s2o_runtime.call import Scoring

ROUNDS, SHARED_ROUNDS = 3, 9  # of each time, and of one that stands for all layers, after one that is not counted
LAYER_FLUSHES = 96  # work ahead of a whole layer, about 4 ms: in a prefill the GPU is busy while a layer is launched
EIGHTH_OVER_LIMIT = 1.5  # times its limit that a layer's error may be in any eighth of the prompts


@dataclass(frozen=True)
class LayerProof:
    """One layer's attention at one length against dense attention on the same q, k, v."""

    mse: float  # these three are means over the prompts
    dense_power: float  # the mean square of the dense output
    density: float
    worst: float  # `curves.select_worst`, over tiles of 64 rows of all heads and prompts, of a row's largest error
    seconds: float | None = None  # attention alone, on the first prompt; None on a CPU
    dense_seconds: float | None = None
    kinds: tuple[str, ...] = ()  # of text, of each prompt
    # mean squared error and mean square of the dense output; eighths and places are means over the prompts
    of_prompts: tuple[tuple[float, float], ...] = ()  # of the rows of each prompt that `layers.draw_windows` draws
    eighths: tuple[tuple[float, float], ...] = ()  # of each eighth of the rows
    places: tuple[tuple[float, float], ...] = ()  # of the rows from each of `layers.PLACES` in their segments on

    @classmethod
    def from_results(cls, prompts: Sequence[Prompt], results: Sequence[Mapping[str, Any]]) -> LayerProof:
        """Summarise the results of a layer's items (`LayerProofItem`) on these prompts, without times."""

        def average_parts(name: str) -> tuple[tuple[float, float], ...]:
            parts = zip(*(result[name] for result in results), strict=True)
            return tuple((statistics.fmean(mses), statistics.fmean(powers)) for mses, powers in starmap(zip, parts))

        return cls(
            mse=statistics.fmean(result["all_rows"][0] for result in results),
            dense_power=statistics.fmean(result["all_rows"][1] for result in results),
            density=statistics.fmean(result["density"] for result in results),
            worst=float(select_worst(torch.cat([result["tiles"] for result in results]))),
            of_prompts=tuple(tuple(result["all_rows"]) for result in results),
            kinds=tuple(prompt.domain for prompt in prompts),
            eighths=average_parts("eighths"),
            places=average_parts("places"),
        )

    @property
    def rel_mse(self) -> float:
        """The mean squared error over the mean square of the dense output."""
        return self.mse / max(self.dense_power, 1e-30)

    def error(self, budget: Budget) -> float:
        """Return the mean error in the budget's unit."""
        return budget.error(self.mse, self.dense_power)

    def errors(self, budget: Budget) -> list[float]:
        """Return the error of each prompt, in the budget's unit."""
        return [budget.error(*prompt) for prompt in self.of_prompts]

    def limited_error(self, recipe: Recipe) -> float:
        """Return the error that a recipe holds to the layer's limit: the whole or, scaled down, the largest eighth."""
        # in this order a NaN stays
        return max(self.error(recipe.budget), self.find_largest_eighth(recipe.budget) / EIGHTH_OVER_LIMIT)

    def find_largest_eighth(self, budget: Budget) -> float:
        """Return the error of the eighth that errs most."""
        return max(starmap(budget.error, self.eighths), default=0.0)

    def compare_parts(self, budget: Budget, limit: float) -> dict[str, Any]:
        """Return the errors of `eighths` over the layer's limit and those of `places` over its mean error, by these
        names; none where there is nothing to divide by."""
        error = self.error(budget)
        return {
            "eighths": tuple(budget.error(*part) / limit for part in self.eighths if limit),
            "places": tuple(budget.error(*part) / error for part in self.places if error),
        }


@dataclass(frozen=True)
class LengthProof:
    """The whole model at one length, patched against dense."""

    layers: tuple[LayerProof, ...]  # of every layer of full attention
    kl: float  # the mean over the compared rows of KL(dense || patched) of the next token, in nats
    top1: float  # the share of these rows where both find the same token most likely
    needles: tuple[int, int] | None  # kept of those the dense model finds, and found; None if the prompts ask for none
    prefill_seconds: float = 0.0  # all decoder layers on the first prompt, without embedding and head
    dense_prefill_seconds: float = 0.0
    prompts: tuple[Prompt, ...] = ()
    agreements: tuple[PromptAgreement, ...] = ()  # of both models on each prompt

    @classmethod
    def from_results(
        cls, layers: Sequence[LayerProof], results: Sequence[Mapping[str, Any]], prompts: Sequence[Prompt]
    ) -> LengthProof:
        """Summarise the layers and the results of all prompts' `AgreementItem`, without times."""
        agreements = tuple(PromptAgreement(**result) for result in results)
        needles = sum(prompt.kept for prompt in agreements), sum(prompt.found for prompt in agreements)
        return cls(
            layers=tuple(layers),
            kl=max(statistics.fmean(prompt.kl for prompt in agreements), 0.0),  # NaN stays
            top1=statistics.fmean(prompt.top1 for prompt in agreements),
            needles=needles if any(prompt.answers for prompt in prompts) else None,
            prompts=tuple(prompts),
            agreements=agreements,
        )


S = TypeVar("S", bound=ConfigSource)
Revise = Callable[[S, int, int, LayerProof], S | None]  # configurations, length, layer, proof -> to prove instead
Prompts = Mapping[int, Sequence[Prompt]]  # by length in tokens


@dataclass(frozen=True)
class Prover:
    """Proofs of candidates and profiles, run by an executor."""

    executor: Executor
    journal: Journal | None = None  # keeps results, and has those of earlier runs; None to keep none
    chunk: int | None = None  # tokens that a layer is fed at once, as a server does; None for whole prompts
    progress: bool = False  # whether to show progress bars
    on_step: Callable[[], object] = lambda: None  # called after each length of each layer

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
        compared: bool = True,
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
            compared: whether the dense model reads the prompts too; without, no needle is found and KLs are NaN.
            stage: the purpose, a word in the journal's keys.

        Returns:
            The configurations that were accepted in the end, and the measurements of these by length in tokens.

        Raises:
            ModelError: inf or NaN came up.
            ResourceError: The GPU's memory ran out.
        """
        histories = dict.fromkeys(prompts, LayerHistory())
        layers: dict[int, list[LayerProof]] = {length: [] for length in prompts}
        for length_prompts in prompts.values():
            self.executor.register_prompts(length_prompts)

        def start(item_type: type[LayerProofItem], length: int, layer: int, config: LayerConfigAt) -> MeasurementBatch:
            items = [
                item_type(length, prompt.sha256, index, layer, histories[length], config, compared, stage=stage)
                for index, prompt in enumerate(prompts[length])
            ]
            return MeasurementBatch(items, self.executor, self.journal)

        for layer in range(self.executor.geometry.layers):
            configs = {length: LayerConfigAt.from_source(source, self.chunk, layer, length) for length in prompts}
            # all begin before one is waited for: workers run them side by side
            begun = {length: start(LayerProofItem, length, layer, config) for length, config in configs.items()}
            for length, length_prompts in prompts.items():
                while True:
                    config = LayerConfigAt.from_source(source, self.chunk, layer, length)
                    if config != configs[length]:
                        configs[length], begun[length] = config, start(LayerProofItem, length, layer, config)
                    proof = LayerProof.from_results(length_prompts, begun[length].results())
                    revised = revise(source, length, layer, proof) if revise else None
                    if revised is None:
                        break
                    source = revised
                layers[length].append(proof)
                histories[length] = histories[length].append(config)
                self.on_step()
        proofs = {}
        for length, history in histories.items():
            results = [{"kl": math.nan, "top1": math.nan, "found": 0, "kept": 0}] * len(prompts[length])
            if compared:
                results = start(AgreementItem, length, len(history.configs) - 1, history.configs[-1]).results()
            proofs[length] = LengthProof.from_results(layers[length], results, prompts[length])
        return source, self._add_times(proofs, histories) if timed else proofs

    def _add_times(
        self, proofs: Mapping[int, LengthProof], histories: Mapping[int, LayerHistory]
    ) -> dict[int, LengthProof]:
        """Return the proofs with the times of every decoder layer on the first prompt of each length."""
        executor, geometry = self.executor, self.executor.geometry
        numbers = range(geometry.decoder_layers)
        items = [
            LayerTime(
                length, proof.prompts[0].sha256, number, histories[length], number * executor.size // len(numbers)
            )
            for number in numbers  # a layer's weights are on the device for all lengths
            for length, proof in proofs.items()
        ]
        # on a CPU times are no objective, and no run takes them from another
        results = measure_items(items, executor, self.journal if executor.device.kind == "cuda" else None)
        seconds = {(item.length, item.number): result for item, result in zip(items, results, strict=True)}
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
    those of attention alone, S2O and dense in turns on the same q, k, v, as `attention`: equal shapes do not make dense
    attention equally fast, which depends on the numbers too. A layer's other parts are timed in the first layer of each
    form, parameters of the same shapes.
    """

    prompt: str  # its hash
    number: int  # in the decoder
    history: LayerHistory  # all layers of full attention
    part: int  # of the model, one for each worker, that the layer is in; parts are timed side by side
    stage: str = field(default="timing", kw_only=True)
    kind: ClassVar[str] = "layer times"
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
            forward = worker.cached(cached_as, lambda: PromptForward(worker, self.prompt, compared=False))
            forward.move_to(self.number, self.history)
            with forward.enter_next_layer() as (layer, stream):
                if layer.row is None:  # both prefills have it
                    others = self._time_others(worker, layer, stream, None)
                    return {"patched": others, "dense": others}
                config, calls = self.history.configs[layer.row], dict[str, Callable[[], Any]]()

                def keep(index: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, out: Tensor) -> None:
                    calls["s2o"] = partial(s2o_attention, q, k, v, config.config, **scoring.arguments())
                    calls["dense"] = partial(fastest_dense_attention, q, k, v, scoring)

                output = layer.patched(stream, make_layer_state(layer, config, keep, chunks=False))
                if config.chunk is None:  # in chunks the output is another one
                    forward.tried = config, output
                others = self._time_others(worker, layer, stream, calls["dense"])
                seconds = _time_calls(calls, layer.device)
                if seconds["s2o"] > seconds["dense"]:  # that would make the layer dense, so it must be no hiccup
                    seconds |= {"s2o": min(seconds["s2o"], _time_calls(calls, layer.device)["s2o"])}
        attention = {"attention": (seconds["s2o"], seconds["dense"])} if layer.device.type == "cuda" else {}
        return {"patched": others + seconds["s2o"], "dense": others + seconds["dense"], **attention}

    def _time_others(
        self, worker: WorkerState, layer: DecoderLayer, stream: Stream, attention: Callable[[], Any] | None
    ) -> float:
        """Return the seconds of all parts of a layer but its dense attention, if there is that call."""
        forms: dict[Hashable, float] = worker.cached("times of forms", dict)
        shapes = tuple((name, parameter.shape) for name, parameter in layer.module.named_parameters())
        form = self.length, attention is None, type(layer.module), shapes
        if form not in forms:
            dense = {"dense": attention} if attention else dict[str, Callable[[], Any]]()
            times = _time_calls(dense, layer.device, rounds=SHARED_ROUNDS)
            times |= _time_calls({"whole": partial(layer.dense, stream)}, layer.device, LAYER_FLUSHES, SHARED_ROUNDS)
            forms[form] = times["whole"] - times.get("dense", 0.0)
        return forms[form]


def _time_calls(
    calls: Mapping[str, Callable[[], Any]], device: torch.device, flushes: int = FLUSHES, rounds: int = ROUNDS
) -> dict[str, float]:
    """Return the median seconds of calls, which take turns; on a CPU, where times decide nothing, of one round."""
    return measure_medians(calls, device, rounds if device.type == "cuda" else 1, flushes)
