"""Held-out proof: the patched model, as it will run, on prompts calibration has not seen.

The prompts move through the patched model and through the dense one together, one layer at a time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from calibrate.memory import within_memory
from calibrate.models import LoadedModel
from calibrate.prompts import Prompt
from calibrate.recipe import Budget
from calibrate.streams import Stream, attention_implementation, begin, layer_on_device
from calibrate.timing import medians
from calibrate.worst import WORST, row_errors, tile_worst
from s2o_runtime import hf
from s2o_runtime.attention import s2o_attention
from s2o_runtime.config import LayerConfig
from s2o_runtime.dense import dense_attention, exact_attention
from s2o_runtime.errors import ModelError
from s2o_runtime.identity import attention_modules
from s2o_runtime.profile import Profile

GPU_ROUNDS = 3
HEAD_ROWS = 512  # positions whose logits exist at once: 512 x 152064 in float32 are 0.3 GB


@dataclass(frozen=True)
class LayerProof:
    """One layer's attention at one length against float32 dense attention on the same q, k, v.

    mse, dense_power, density: means over the held-out prompts; dense_power is the mean square of the dense output.
    worst: the `WORST` quantile, over tiles of 64 rows of all heads and prompts, of the largest relative error of a row
    (`worst.row_errors`). seconds, dense_seconds: attention alone, on the first prompt; None on a CPU.
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
        return budget.error(self.mse, self.dense_power)


@dataclass(frozen=True)
class LengthProof:
    """The whole model at one length, patched against dense.

    kl: mean over all positions of KL(dense || patched) of the next token, in nats; top1: the share of positions
    where both find the same token most likely. needles: of the codes that the prompts ask for, how many the patched
    model finds among those the dense one finds, and how many the dense one finds; None if they ask for none.
    prefill_seconds, dense_prefill_seconds: all decoder layers on the first prompt, without embedding and head.
    """

    layers: tuple[LayerProof, ...]
    kl: float
    top1: float
    needles: tuple[int, int] | None
    prefill_seconds: float
    dense_prefill_seconds: float


@dataclass(frozen=True)
class PrefillTimes:
    """Median seconds of a whole prefill at one length, patched and dense."""

    patched: float
    dense: float


ConfigOf = Callable[[int, int], LayerConfig]
Adjust = Callable[[int, int, LayerProof, LayerConfig], LayerConfig | None]


@torch.no_grad()
def prove(
    loaded: LoadedModel,
    held_out: Mapping[int, Sequence[Prompt]],
    config_of: ConfigOf,
    adjust: Adjust,
    on_step: Callable[[], None],
) -> dict[int, LengthProof]:
    """Errors, densities and times of every layer at every length, and what they do to the model's predictions.

    config_of: (length, layer) -> the configuration to begin with. adjust: given (length, layer, proof, config), a
    configuration to try instead on the same inputs, or None to accept this one; the proof it is given has no times
    yet. Layers that follow see what the accepted one did. on_step: called after each length of each layer.
    Raises ModelError if inf or NaN come up.
    """
    hf.register()
    with attention_implementation(loaded.model, hf.NAME):
        runs = [_Run(length, prompts, begin(loaded, [p.ids for p in prompts])) for length, prompts in held_out.items()]
        for index, attention in enumerate(attention_modules(loaded.model)):
            with layer_on_device(loaded, index) as module:
                layer = _Layer(index, module, attention, loaded.weights.device)
                for run in runs:
                    with within_memory(layer.device, run.length, loaded.weights.held, f"proving layer {index}"):
                        run.advance(layer, config_of, adjust)
                    on_step()
        head = loaded.model.get_output_embeddings()
        norm = loaded.model.get_decoder().norm
        with loaded.weights.on_device(norm, head):
            return {run.length: run.conclude(lambda hidden: head(norm(hidden))) for run in runs}


@dataclass(frozen=True)
class _Layer:
    """One decoder layer, its parameters on the device, dense or with an S2O configuration."""

    index: int
    module: nn.Module
    attention: nn.Module
    device: torch.device

    def dense(self, stream: Stream) -> Stream:
        return stream.through(self.module, self.index)

    def patched(self, stream: Stream, state: hf.LayerState) -> Stream:
        hf.attach(self.attention, state)
        try:
            return stream.through(self.module, self.index)
        finally:
            hf.detach(self.attention)

    def state(self, config: LayerConfig, observer: hf.Observer | None = None) -> hf.LayerState:
        # a state's first calls are all metered, which would be timed too
        return hf.LayerState(self.index, lambda keys: config, min_length=0, observer=observer, meter=None)


class _Run:
    """The held-out prompts of one length, on their way through the patched and the dense model."""

    def __init__(self, length: int, prompts: Sequence[Prompt], streams: list[Stream]) -> None:
        self.length, self._prompts = length, prompts
        self._patched, self._dense = streams, streams
        self._layers: list[LayerProof] = []
        self._seconds = {"patched": 0.0, "dense": 0.0}

    def advance(self, layer: _Layer, config_of: ConfigOf, adjust: Adjust) -> None:
        """Through one layer, once its configuration is accepted."""
        config: LayerConfig | None = config_of(self.length, layer.index)
        while config is not None:
            accepted = config
            after, proof = _measure(layer, self._patched, accepted)
            config = adjust(self.length, layer.index, proof, accepted)
        first = self._patched[0]
        for name, seconds in _layer_seconds(layer, first, accepted).items():
            self._seconds[name] += seconds
        if layer.device.type == "cuda":
            seconds, dense_seconds = _attention_seconds(layer, first, accepted)
            proof = replace(proof, seconds=seconds, dense_seconds=dense_seconds)
        self._layers.append(proof)
        self._patched = after
        self._dense = [layer.dense(stream) for stream in self._dense]

    def conclude(self, logits: Callable[[Tensor], Tensor]) -> LengthProof:
        """The proof, after the last layer. logits: [1, R, H] -> [1, R, V]."""
        kl = same = asked = dense_found = both_found = 0.0
        for prompt, dense, patched in zip(self._prompts, self._dense, self._patched, strict=True):
            divergence, of_dense, of_patched = _compare(dense.hidden, patched.hidden, logits)
            kl += divergence
            same += float((of_dense == of_patched).double().mean())
            found = [_finds(prompt, span, of_dense) for span in prompt.answers]
            both = [_finds(prompt, span, of_patched) for span, one in zip(prompt.answers, found, strict=True) if one]
            asked, dense_found, both_found = asked + len(found), dense_found + sum(found), both_found + sum(both)
        count = len(self._prompts)
        return LengthProof(
            tuple(self._layers),
            max(0.0, kl / count),  # rounding can leave less than nothing
            same / count,
            (int(both_found), int(dense_found)) if asked else None,
            self._seconds["patched"],
            self._seconds["dense"],
        )


@dataclass
class _Errors:
    """What one layer's outputs are off by; one entry for each prompt."""

    squared: list[float] = field(default_factory=list)
    power: list[float] = field(default_factory=list)
    tiles: list[Tensor] = field(default_factory=list)

    def observe(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None, out: Tensor) -> None:
        truth = exact_attention(q, k, v, scale=scale)
        self.squared.append(float((out.to(truth.dtype) - truth).square().mean()))
        self.power.append(float(truth.square().mean()))
        self.tiles.append(tile_worst(row_errors(out, truth)).flatten())


def _measure(layer: _Layer, streams: list[Stream], config: LayerConfig) -> tuple[list[Stream], LayerProof]:
    """The prompts after a layer with this configuration, and its errors."""
    errors = _Errors()
    state = layer.state(config, errors.observe)
    after, densities = [], []
    for stream in streams:
        after.append(layer.patched(stream, state))
        densities.append(1.0 if state.last is None else float(state.last.density.mean()))
    worst = float(torch.cat(errors.tiles).quantile(WORST))
    mean = statistics.fmean
    return after, LayerProof(mean(errors.squared), mean(errors.power), mean(densities), worst)


def _layer_seconds(layer: _Layer, stream: Stream, config: LayerConfig) -> dict[str, float]:
    """Seconds of the whole decoder layer: medians on a GPU, one run by the clock on a CPU."""
    state = layer.state(config)
    calls: dict[str, Callable[[], Any]] = {
        "patched": lambda: layer.patched(stream, state),
        "dense": lambda: layer.dense(stream),
    }
    if layer.device.type == "cuda":
        return medians(calls, layer.device, GPU_ROUNDS)
    return {name: _clocked(call) for name, call in calls.items()}


def _clocked(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _attention_seconds(layer: _Layer, stream: Stream, config: LayerConfig) -> tuple[float, float]:
    """Median seconds of attention alone, S2O and dense, on the q, k, v that a prompt brings to the layer."""
    calls: dict[str, Callable[[], Any]] = {}

    def keep(index: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None, out: Tensor) -> None:
        calls["s2o"] = partial(s2o_attention, q, k, v, config, scale=scale)
        calls["dense"] = partial(dense_attention, q, k, v, scale=scale)

    layer.patched(stream, layer.state(config, keep))
    times = medians(calls, layer.device, GPU_ROUNDS)
    return times["s2o"], times["dense"]


def _compare(
    dense: Tensor, patched: Tensor, logits: Callable[[Tensor], Tensor]
) -> tuple[float, Tensor, Tensor]:  # fmt: skip
    """KL(dense || patched) in nats, the mean over positions, and the most likely tokens of both, int64 [L].

    dense, patched: hidden states [1, L, H] after the last layer.
    """
    total = 0.0
    best: list[tuple[Tensor, Tensor]] = []
    for rows in zip(torch.split(dense, HEAD_ROWS, 1), torch.split(patched, HEAD_ROWS, 1), strict=True):
        p, q = (logits(each)[0].float().log_softmax(-1) for each in rows)
        best.append((p.argmax(-1).cpu(), q.argmax(-1).cpu()))
        total += float((p.exp() * (p - q)).sum(-1, dtype=torch.float64).sum())
    of_dense, of_patched = (torch.cat(each) for each in zip(*best, strict=True))
    return total / dense.shape[1], of_dense, of_patched


def _finds(prompt: Prompt, span: tuple[int, int], best: Tensor) -> bool:
    """Whether every token of a span is the most likely one after those before it. best: [L]."""
    begin, end = span
    return bool((best[begin - 1 : end - 1] == prompt.ids[begin:end]).all())


@contextmanager
def patched(model: Any, profile: Profile) -> Iterator[None]:
    """A model whose weights are all on the device, patched inside the block, and as it was after it."""
    hf.patch(model, profile, strict=True)
    try:
        yield
    finally:
        hf.unpatch(model)


def time_prefill(
    loaded: LoadedModel, profile: Profile, held_out: Mapping[int, Sequence[Prompt]]
) -> dict[int, PrefillTimes]:
    """How long the patched and the dense model take for whole prompts of every length, embedding and head included.

    Raises ModelError if the model's weights are not all on the device.
    """
    if not loaded.weights.resident:
        raise ModelError(f"the weights of {loaded.name} are not all on the device: load it with resident=True")
    dense = {length: _prefill_seconds(loaded, prompts) for length, prompts in held_out.items()}
    with patched(loaded.model, profile):
        return {
            length: PrefillTimes(_prefill_seconds(loaded, prompts), dense[length])
            for length, prompts in held_out.items()
        }


@torch.no_grad()
def prefill(model: Any, ids: Tensor) -> Tensor:
    """The logits of the last token [1, 1, V] after a prefill of ids [L]."""
    device = next(model.parameters()).device
    logits: Tensor = model(input_ids=ids[None].to(device), use_cache=False, logits_to_keep=1).logits
    return logits


def _prefill_seconds(loaded: LoadedModel, prompts: Sequence[Prompt]) -> float:
    """Median seconds of a whole prefill; on a GPU after a warm-up, on a CPU one run per prompt."""
    device = loaded.weights.device
    on_gpu = device.type == "cuda"
    times = []
    for turn in range(GPU_ROUNDS + 1 if on_gpu else 1):
        for prompt in prompts:
            if on_gpu:
                torch.cuda.synchronize(device)
            began = time.perf_counter()
            prefill(loaded.model, prompt.ids)
            if on_gpu:
                torch.cuda.synchronize(device)
            if turn or not on_gpu:
                times.append(time.perf_counter() - began)
    return statistics.median(times)
