"""Variants: the ways in which one model is run, dense, with a profile, with one setting for all heads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from calibrate.evaluation.plan import DENSE, Plan
from calibrate.evaluation.settings import config_of
from calibrate.models import LoadedModel
from calibrate.streams import attention_implementation
from s2o_runtime import hf
from s2o_runtime.config import LayerConfig
from s2o_runtime.gpu import candidate_tiles, identify
from s2o_runtime.identity import attention_modules

DIGEST = 16  # hexadecimal digits that name a profile's content


@dataclass(frozen=True)
class Variant:
    """One way to run a model.

    identity: what results under it depend on; a profile's changes with its content. states: what each attention
    layer knows, in order; none is dense, through the fastest attention that torch has.
    """

    name: str
    identity: str
    states: tuple[hf.LayerState, ...] = ()


@dataclass(frozen=True)
class Ran:
    """What the layers did in the last prefill: pairs computed over causal pairs, and why layers were dense, if so."""

    density: float
    dense: dict[str, int]


def variants(plan: Plan, loaded: LoadedModel) -> list[Variant]:
    """Dense, every profile and every setting of a plan, ready to run.

    Raises ProfileError if a profile does not fit the model.
    """
    names = iter(plan.variant_names)
    found = [Variant(next(names), DENSE)]
    for path in plan.profiles:
        hf.patch(loaded.model, path)  # once: its states are kept, so that changing variants costs nothing
        states = tuple(hf.layer_states(loaded.model))
        hf.unpatch(loaded.model)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:DIGEST]
        found.append(Variant(next(names), digest, states))
    device = identify(loaded.weights.device)
    tiles = candidate_tiles(loaded.geometry.head_dim, device.capability) if device.kind == "cuda" else ()
    for setting in plan.settings:
        config = config_of(setting, loaded.geometry.query_heads, tiles)
        found.append(Variant(name := next(names), name, uniform_states(config, loaded.geometry.layers)))
    return found


def uniform_states(config: LayerConfig, layers: int) -> tuple[hf.LayerState, ...]:
    """What each of so many layers knows if all do the same, at every length."""
    return tuple(hf.LayerState(index, lambda keys: config, min_length=0) for index in range(layers))


@contextmanager
def running(model: Any, variant: Variant) -> Iterator[None]:
    """The model runs a variant inside the block, and is as it was after it."""
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


def ran(variant: Variant) -> Ran:
    """What a variant's layers did since `running` began."""
    densities = [1.0 if state.last is None else float(state.last.density.mean()) for state in variant.states]
    reasons: dict[str, int] = {}
    for state in variant.states:
        for (path, reason), _ in sorted(state.counts.items()):
            if path == "dense" and reason != "decode":
                reasons[reason] = reasons.get(reason, 0) + 1
    return Ran(sum(densities) / len(densities) if densities else 1.0, reasons)
