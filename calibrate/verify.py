"""Held-out proof: the patched model, as it will run, on prompts calibration has not seen."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from calibrate.models import LoadedModel
from calibrate.prompts import Prompt
from calibrate.recipe import Budget
from s2o_runtime.dense import exact_attention
from s2o_runtime.hf import layer_states, patch, unpatch
from s2o_runtime.profile import Profile

GPU_ROUNDS = 3


@dataclass(frozen=True)
class LayerProof:
    """One layer at one length, mean over the held-out prompts."""

    mse: float
    dense_power: float
    density: float

    @property
    def rel_mse(self) -> float:
        return self.mse / max(self.dense_power, 1e-30)

    def error(self, budget: Budget) -> float:
        return budget.error(self.mse, self.dense_power)


@dataclass(frozen=True)
class PrefillTimes:
    """Median seconds of a whole prefill at one length, patched and dense."""

    patched: float
    dense: float


def prove(
    loaded: LoadedModel, profile: Profile, held_out: dict[int, list[Prompt]], on_prompt: Callable[[], None]
) -> dict[int, tuple[LayerProof, ...]]:
    """Every layer's error and density at every length, from the patched model on the held-out prompts."""
    with patched(loaded.model, profile):
        return {length: _measure(loaded, prompts, on_prompt) for length, prompts in held_out.items()}


def time_prefill(loaded: LoadedModel, profile: Profile, held_out: dict[int, list[Prompt]]) -> dict[int, PrefillTimes]:
    """How long the patched and the dense model take for the held-out prompts of every length."""
    dense = {length: _prefill_seconds(loaded, prompts) for length, prompts in held_out.items()}
    with patched(loaded.model, profile):
        return {
            length: PrefillTimes(_prefill_seconds(loaded, prompts), dense[length])
            for length, prompts in held_out.items()
        }


@contextmanager
def patched(model: Any, profile: Profile) -> Iterator[None]:
    """The model patched inside the block, and as it was after it."""
    patch(model, profile, strict=True)
    try:
        yield
    finally:
        unpatch(model)


def _measure(loaded: LoadedModel, prompts: list[Prompt], on_prompt: Callable[[], None]) -> tuple[LayerProof, ...]:
    states = layer_states(loaded.model)
    squared, power, density = ([0.0] * len(states) for _ in range(3))

    def observe(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None, out: Tensor) -> None:
        truth = exact_attention(q, k, v, scale=scale)
        squared[layer] += float((out.to(truth.dtype) - truth).square().mean())
        power[layer] += float(truth.square().mean())

    for state in states:
        state.observer = observe
    for prompt in prompts:
        for state in states:
            state.last = None
        prefill(loaded.model, prompt.ids)
        for index, state in enumerate(states):
            density[index] += 1.0 if state.last is None else float(state.last.density.mean())
        on_prompt()
    for state in states:
        state.observer = None
    count = len(prompts)
    sums = zip(squared, power, density, strict=True)
    return tuple(LayerProof(error / count, scale / count, share / count) for error, scale, share in sums)


@torch.no_grad()
def prefill(model: Any, ids: Tensor) -> Tensor:
    """The logits of the last token [1, 1, V] after a prefill of ids [L]."""
    device = next(model.parameters()).device
    logits: Tensor = model(input_ids=ids[None].to(device), use_cache=False, logits_to_keep=1).logits
    return logits


def _prefill_seconds(loaded: LoadedModel, prompts: list[Prompt]) -> float:
    """Median seconds of a whole prefill; on a GPU after a warm-up, on a CPU one run per prompt."""
    device = next(loaded.model.parameters()).device
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
