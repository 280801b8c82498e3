"""The adjust stage's measurement: the patched model, as it will run, on prompts that it was not calibrated on.

The prompts move through the patched model and through the dense one together, one layer at a time. This module says
what comes out of that; `judge` says whether it is good enough, and `tighten` what to do if it is not.
"""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from calibrate.curves.row_errors import WORST, row_errors, tile_worst
from calibrate.model.logits import logits_on_device
from calibrate.model.memory import within_memory
from calibrate.model.models import LoadedModel
from calibrate.model.streams import Stream, attention_implementation, begin, decoder_layers, layer_on_device
from calibrate.prompts.prompts import Prompt
from calibrate.proof.agreement import compare
from calibrate.proof.chunks import ByLength, Chunks, chunks_of
from calibrate.proof.rows import drawn_tiles, exact_rows
from calibrate.recipe import Budget
from calibrate.timing import medians
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.attention.dense import fastest_dense_attention
from s2o_runtime.config import LayerConfig
from s2o_runtime.huggingface import hf
from s2o_runtime.scoring import Scoring

GPU_ROUNDS = 3
LAYER_FLUSHES = 96  # work ahead of a whole layer, about 4 ms: in a prefill the GPU is busy while a layer is launched
LONG_SECONDS = 0.02  # a call that takes longer is timed once: its scatter is small
TILE_ROWS = 64  # rows of which the worst counts
PROVEN_ROWS = 8192  # of a longer prompt so many rows are compared, in whole tiles drawn from all of it


@dataclass(frozen=True)
class LayerProof:
    """One layer's attention at one length against float32 dense attention on the same q, k, v.

    mse, dense_power, density: Means over the held-out prompts; dense_power is the mean square of the dense output. Of
    prompts longer than `PROVEN_ROWS`, errors are those of so many rows. worst: The `WORST` quantile, over tiles of 64
    rows of all heads and prompts, of the largest relative error of a row (`row_errors`). seconds, dense_seconds:
    Attention alone, on the first prompt; None on a CPU.
    """

    mse: float
    dense_power: float
    density: float
    worst: float
    seconds: float | None = None
    dense_seconds: float | None = None

    @property
    def rel_mse(self) -> float:
        return self.mse / max(self.dense_power, 1e-30)

    def error(self, budget: Budget) -> float:
        """The error in the budget's unit."""
        return budget.error(self.mse, self.dense_power)


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
    prefill_seconds: float
    dense_prefill_seconds: float


class Configured(ByLength, Protocol):
    """What can be proven: a profile, or a candidate for one."""


C = TypeVar("C", bound=Configured)


def accept(configured: Configured, length: int, layer: int, proof: LayerProof) -> None:
    """Accept what was proven, whatever came out."""


@torch.no_grad()
def prove(
    loaded: LoadedModel,
    held_out: Mapping[int, Sequence[Prompt]],
    configured: C,
    revise: Callable[[C, int, int, LayerProof], C | None] = accept,
    on_step: Callable[[], object] = lambda: None,
    timed: bool = True,
    chunk: int | None = None,
) -> tuple[C, dict[int, LengthProof]]:
    """Measure what a configuration does to every layer at every length, and to the model's predictions.

    Each prompt moves through each layer once for each configuration that the layer is tried with. The layers that
    follow see what the accepted configuration gave.

    Args:
        loaded: The model.
        held_out: The prompts to prove on, by length in tokens. At each layer the lengths take their turns in this
            order.
        configured: What each layer runs at each length.
        revise: Given what was proven, the length, the layer's index and the layer's proof (which has no times yet):
            what to prove instead on the same inputs, or None to accept this one.
        on_step: Called after each length of each layer.
        timed: Whether to take times too; without, those of the proofs are 0 or None.
        chunk: Tokens that a layer is fed at once, as a server does; None for whole prompts. Times are of whole prompts.

    Returns:
        What was proven in the end, and what was measured of it by length in tokens.

    Raises:
        ModelError: inf or NaN came up.
        InputError: The GPU's memory ran out.
    """
    hf.register()
    with attention_implementation(loaded.model, hf.NAME):
        walks = [
            _Walk(length, prompts, begin(loaded, [p.ids for p in prompts]), timed, chunk)
            for length, prompts in held_out.items()
        ]
        for of_decoder in decoder_layers(loaded.model):
            number, row, attention = of_decoder.number, of_decoder.row, of_decoder.attention
            with layer_on_device(loaded, of_decoder) as module:
                for walk in walks:
                    with within_memory(
                        loaded.weights.device, walk.length, loaded.weights.held, f"proving layer {number}"
                    ):
                        if row is None or attention is None:
                            walk.pass_through(module, number, loaded.weights.device)
                            continue
                        layer = PatchableLayer(row, number, module, attention, loaded.weights.device)
                        configured = walk.advance(layer, configured, revise)
                    on_step()
        with logits_on_device(loaded) as logits:
            return configured, {walk.length: walk.conclude(logits) for walk in walks}


@dataclass(frozen=True)
class PatchableLayer:
    """One decoder layer, its parameters on the device, dense or with an S2O configuration.

    index: Its row in a profile's tables. number: Which decoder layer it is.
    """

    index: int
    number: int
    module: nn.Module
    attention: nn.Module
    device: torch.device

    def dense(self, stream: Stream) -> Stream:
        return stream.through(self.module, self.number)

    def patched(self, stream: Stream, state: hf.LayerState) -> Stream:
        hf.attach(self.attention, state)
        try:
            return stream.through(self.module, self.number)
        finally:
            hf.detach(self.attention)

    def state(
        self, config: LayerConfig, observer: hf.Observer | None = None, chunks: Chunks | None = None
    ) -> hf.LayerState:
        # a state's first calls are all metered, which would be timed too
        if chunks is None:
            return hf.LayerState(self.index, lambda keys: config, min_length=0, observer=observer, meter=None)
        return hf.LayerState(
            self.index, chunks.config_at, min_length=0, observer=observer, meter=None, chunk=chunks.size
        )


class _Walk:
    """The held-out prompts of one length on their way through the patched and the dense model."""

    def __init__(
        self, length: int, prompts: Sequence[Prompt], streams: list[Stream], timed: bool, chunk: int | None
    ) -> None:
        self.length, self._prompts, self._timed, self._chunk = length, prompts, timed, chunk
        self._patched, self._dense = streams, streams
        self._layers: list[LayerProof] = []
        self._seconds = {"patched": 0.0, "dense": 0.0}

    def advance(self, layer: PatchableLayer, configured: C, revise: Callable[[C, int, int, LayerProof], C | None]) -> C:
        """Move through one layer, with what is accepted of it."""
        revised: C | None = configured
        while revised is not None:
            configured = revised
            config = configured.layer_config(layer.index, self.length)
            chunks = chunks_of(configured, self._chunk, layer.index, self.length)
            after, proof = _measure(layer, self._patched, config, chunks)
            revised = revise(configured, self.length, layer.index, proof)
        self._layers.append(self._with_times(layer, config, proof) if self._timed else proof)
        self._patched = after
        self._dense = [layer.dense(stream) for stream in self._dense]
        return configured

    def pass_through(self, module: nn.Module, number: int, device: torch.device) -> None:
        """Move through a layer that has no full attention, whose time is part of both prefills."""
        first = self._patched[0]
        if self._timed:
            seconds = _seconds({"layer": lambda: first.through(module, number)}, device)["layer"]
            for name in self._seconds:
                self._seconds[name] += seconds
        alike = self._patched is self._dense  # before the first layer that S2O may change
        self._patched = [stream.through(module, number) for stream in self._patched]
        self._dense = self._patched if alike else [stream.through(module, number) for stream in self._dense]

    def _with_times(self, layer: PatchableLayer, config: LayerConfig, proof: LayerProof) -> LayerProof:
        """The proof with its times, which are added to the prefill's."""
        first = self._patched[0]
        for name, seconds in _layer_seconds(layer, first, config).items():
            self._seconds[name] += seconds
        if layer.device.type != "cuda":
            return proof
        attention_seconds, dense_seconds = _attention_seconds(layer, first, config)
        return replace(proof, seconds=attention_seconds, dense_seconds=dense_seconds)

    def conclude(self, logits: Callable[[Tensor], Tensor]) -> LengthProof:
        """The proof, after the last layer. logits: [1, R, H] -> [1, R, V]."""
        compared = [
            compare(prompt, dense.hidden, patched.hidden, logits)
            for prompt, dense, patched in zip(self._prompts, self._dense, self._patched, strict=True)
        ]
        return LengthProof(
            tuple(self._layers),
            max(0.0, statistics.fmean(prompt.kl for prompt in compared)),
            statistics.fmean(prompt.top1 for prompt in compared),
            (sum(prompt.kept for prompt in compared), sum(prompt.found for prompt in compared))
            if any(prompt.answers for prompt in self._prompts)
            else None,
            self._seconds["patched"],
            self._seconds["dense"],
        )


@dataclass
class _Errors:
    """What one layer's outputs are off by: mean squared error, mean square of the dense output, and the largest
    relative errors of rows in each tile; one entry for each prompt."""

    squared: list[float] = field(default_factory=list)
    power: list[float] = field(default_factory=list)
    tiles: list[Tensor] = field(default_factory=list)

    def observe(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, out: Tensor) -> None:
        # the same rows whatever the layer runs, so that what is tried instead is compared with like
        seed = zlib.crc32(f"{q.shape[2]}/{layer}/{len(self.squared)}".encode())
        rows = drawn_tiles(q.shape[2], TILE_ROWS, PROVEN_ROWS, torch.Generator().manual_seed(seed))
        truth = exact_rows(q, k, v, rows, scoring)
        out = out[:, :, rows.to(out.device)]
        self.squared.append(float((out.to(truth.dtype) - truth).square().mean()))
        self.power.append(float(truth.square().mean()))
        self.tiles.append(tile_worst(row_errors(out, truth), TILE_ROWS).flatten())


def _measure(
    layer: PatchableLayer, streams: list[Stream], config: LayerConfig, chunks: Chunks | None
) -> tuple[list[Stream], LayerProof]:
    """The prompts after a layer with this configuration, and what was measured of the layer."""
    errors = _Errors()
    state = layer.state(config, errors.observe, chunks)
    after, densities = [], []
    for stream in streams:
        after.append(layer.patched(stream, state))
        densities.append(state.density)
    mean = statistics.fmean
    return after, LayerProof(
        mse=mean(errors.squared),
        dense_power=mean(errors.power),
        density=mean(densities),
        worst=float(torch.cat(errors.tiles).quantile(WORST)),
    )


def _layer_seconds(layer: PatchableLayer, stream: Stream, config: LayerConfig) -> dict[str, float]:
    """Seconds of the whole decoder layer."""
    state = layer.state(config)
    calls: dict[str, Callable[[], Any]] = {
        "patched": lambda: layer.patched(stream, state),
        "dense": lambda: layer.dense(stream),
    }
    return _seconds(calls, layer.device)


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


def _attention_seconds(layer: PatchableLayer, stream: Stream, config: LayerConfig) -> tuple[float, float]:
    """Median seconds of attention alone, S2O and dense, on the q, k, v that a prompt brings to the layer."""
    calls: dict[str, Callable[[], Any]] = {}

    def keep(index: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, out: Tensor) -> None:
        calls["s2o"] = partial(s2o_attention, q, k, v, config, **scoring.arguments())
        calls["dense"] = partial(fastest_dense_attention, q, k, v, **scoring.arguments())

    layer.patched(stream, layer.state(config, keep))
    times = medians(calls, layer.device, GPU_ROUNDS)
    return times["s2o"], times["dense"]
