"""A patched attention layer: what it was told, what it has done, and how that is kept at its module."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from s2o_runtime.attention import AttentionStats
from s2o_runtime.config import LayerConfig, TileConfig
from s2o_runtime.drift import DriftCheck, DriftMonitor, allowed_errors
from s2o_runtime.errors import ModelError
from s2o_runtime.gpu import Rejected, candidate_tiles, fit, identify
from s2o_runtime.identity import attention_modules
from s2o_runtime.lengths import length_step
from s2o_runtime.meter import Meter
from s2o_runtime.profile import Profile

STATE = "s2o_layer"  # attribute of a patched attention module
NUMBER = "s2o_number"  # attribute of a patched attention module: what stands for it in a compiled graph

log = logging.getLogger("s2o_runtime")

Observer = Callable[[int, Tensor, Tensor, Tensor, float | None, Tensor], None]


@dataclass
class LayerState:
    """What one patched attention layer knows and has done.

    config_at: the layer's configuration for a number of keys; min_length: fewer keys than this stay dense;
    rejected: why the layer cannot run S2O at all, if so.
    observer: called with the layer's index, q, k, v, the scale and the output after every plain causal
    prefill of unpadded prompts, S2O or dense. meter: measures some of its calls, None does not.
    drift: checks the layer's error, if that was asked for.
    """

    layer: int
    config_at: Callable[[int], LayerConfig]
    min_length: int
    rejected: str | None = None
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    last: AttentionStats | None = None
    configs: dict[int, LayerConfig] = field(default_factory=dict)
    observer: Observer | None = None
    meter: Meter | None = field(default_factory=Meter)
    drift: DriftMonitor | None = None

    def config(self, length: int) -> LayerConfig:
        step = length_step(length)
        if step not in self.configs:
            self.configs[step] = self.config_at(length)
        return self.configs[step]

    def count(self, path: str, reason: str) -> None:
        if not torch.compiler.is_compiling() and (path, reason) not in self.counts:  # logging would break the graph
            _say_once(path, reason)
        self.counts[path, reason] += 1


@lru_cache(maxsize=256)
def _say_once(path: str, reason: str) -> None:
    log.info("layers run %s: %s", path, reason)


def attach(module: nn.Module, state: LayerState) -> None:
    """Give one attention module its state, whatever the model. For the calibrator; models are patched by `patch`."""
    setattr(module, STATE, state)
    setattr(module, NUMBER, next(_numbers))
    _numbered[getattr(module, NUMBER)] = module


def detach(module: nn.Module) -> None:
    """Undo `attach`: the module has no profile, so it runs dense attention, whatever S2O_PROFILE says."""
    if module.__dict__.pop(STATE, None) is not None:
        _detached.add(module)
    module.__dict__.pop(NUMBER, None)


def was_detached(module: nn.Module) -> bool:
    return module in _detached


def numbered(number: int) -> nn.Module:
    """The module that a compiled graph means. Raises ModelError if it is gone."""
    module = _numbered.get(number)
    if module is None:
        raise ModelError("the model of this compiled graph is gone: compile the new one")
    return module


_numbered: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_detached: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def layer_states(model: nn.Module) -> list[LayerState]:
    """The states of a patched model's attention layers, in order. Raises ModelError if it is not patched."""
    states = [module.__dict__.get(STATE) for module in attention_modules(model)]
    found = [state for state in states if isinstance(state, LayerState)]
    if len(found) != len(states):
        raise ModelError("the model is not patched: call s2o_runtime.patch(model, profile) first")
    return found


def states_of(profile: Profile, device: torch.device, drift: DriftCheck | None = None) -> list[LayerState]:
    """A state for each layer of a profile, as it can run on this device.

    Raises ProfileError if drift is to be checked and the profile does not say what errors it allows.
    """
    allowed = None if drift is None else allowed_errors(profile)
    profile, rejected = _fitted(profile, device)
    states = [
        LayerState(index, partial(profile.layer_config, index), profile.min_length, rejected)
        for index in range(profile.geometry.layers)
    ]
    if drift is not None and allowed is not None:
        for state, errors in zip(states, allowed, strict=True):
            state.drift = DriftMonitor(drift, state.layer, errors)
    return states


def _fitted(profile: Profile, device: torch.device) -> tuple[Profile, str | None]:
    """The profile as it can run on this device, and why it cannot, if so."""
    here = identify(device)
    verdict = fit(profile.device, here)
    if isinstance(verdict, Rejected):
        log.warning("%s", verdict.reason)
        return profile, verdict.reason
    if verdict.tiles == "safe":
        log.warning("%s", verdict.reason)
        return profile.with_tile(_safe_tile(profile, here.capability)), None
    return profile, None


def _safe_tile(profile: Profile, capability: tuple[int, int]) -> TileConfig:
    """The first tile of this GPU with rows that divide every segment of the profile."""
    segments = {head.segment for bucket in profile.layers for layer in bucket for head in layer.heads}
    tiles = candidate_tiles(profile.geometry.head_dim, capability)
    fitting = (tile for tile in tiles if not any(segment % tile.rows for segment in segments))
    return next(fitting, TileConfig(block_m=64, block_n=32, chunk=8, num_warps=4, num_stages=3))
