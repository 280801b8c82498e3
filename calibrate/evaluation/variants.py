"""Variants of one model that an evaluation compares: dense, with a profile, with one setting for all heads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from calibrate.evaluation.plan import DENSE, Plan
from calibrate.evaluation.settings import config_of
from calibrate.model.models import LoadedModel
from calibrate.model.streams import attention_implementation
from s2o_runtime.config import LayerConfig
from s2o_runtime.devices import identify
from s2o_runtime.huggingface import hf
from s2o_runtime.identity import attention_modules
from s2o_runtime.tiles import candidate_tiles

DIGEST = 16  # hexadecimal digits that name a profile's content


@dataclass(frozen=True)
class Variant:
    """One way to run a model.

    Args:
        name: What reports call it.
        identity: What results are kept under in the journal; a profile's changes with its content.
        states: The state of each attention layer, in order. Without states the model is dense, with the fastest
            attention that torch has.
    """

    name: str
    identity: str
    states: tuple[hf.LayerState, ...] = ()


@dataclass(frozen=True)
class RunStats:
    """What the layers did in the last prefill.

    Args:
        density: Query-key pairs computed over causal pairs, the mean over heads and layers.
        dense: How many layers ran dense for each reason.
    """

    density: float
    dense: dict[str, int]


def variants(plan: Plan, loaded: LoadedModel) -> list[Variant]:
    """Dense, every profile and every setting of a plan, ready to run.

    Raises:
        ProfileError: If a profile does not fit the model.
    """
    names = iter(plan.variant_names)
    compared = [Variant(next(names), DENSE)]
    for path in plan.profiles:
        hf.patch(loaded.model, path, drift="off")  # once: its states are kept, so that changing variants costs nothing
        states = tuple(hf.layer_states(loaded.model))
        hf.unpatch(loaded.model)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:DIGEST]
        compared.append(Variant(next(names), digest, states))
    device = identify(loaded.weights.device)
    tiles = candidate_tiles(loaded.geometry.head_dim, device.capability) if device.kind == "cuda" else ()
    for setting in plan.settings:
        config = config_of(setting, loaded.geometry.query_heads, tiles)
        compared.append(Variant(name := next(names), name, uniform_states(config, loaded.geometry.layers)))
    return compared


def uniform_states(config: LayerConfig, layers: int) -> tuple[hf.LayerState, ...]:
    """The states of a model's layers if all have one configuration, at every length."""
    return tuple(hf.LayerState(index, lambda keys: config, min_length=0) for index in range(layers))


@contextmanager
def running(model: Any, variant: Variant) -> Iterator[None]:
    """Run the model as a variant inside the block; afterwards it is as it was."""
    hf.register()
    modules = attention_modules(model)
    with attention_implementation(model, hf.NAME):
        try:
            for module, state in zip(modules, variant.states, strict=False):  # dense has none
                state.counts.clear()
                state.last = None
                hf.attach(module, state)
            yield
        finally:
            for module in modules:
                hf.detach(module)


def run_stats(variant: Variant) -> RunStats:
    """What a variant's layers did since `running` began."""
    densities = [1.0 if state.last is None else float(state.last.density.mean()) for state in variant.states]
    reasons: dict[str, int] = {}
    for state in variant.states:
        for (path, reason), _ in sorted(state.counts.items()):
            if path == "dense" and reason != "decode":
                reasons[reason] = reasons.get(reason, 0) + 1
    return RunStats(sum(densities) / len(densities) if densities else 1.0, reasons)
