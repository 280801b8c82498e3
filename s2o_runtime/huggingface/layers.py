"""One layer of a model that transformers runs: its state, and what S2O cannot do there."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal, cast, get_args
from uuid import uuid4

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from s2o_runtime.attention.compute import AttentionStats
from s2o_runtime.call import Scoring
from s2o_runtime.config import HEAD_DIMS, KvCacheDtype, LayerConfig
from s2o_runtime.errors import ModelError
from s2o_runtime.fields import Rule
from s2o_runtime.identity import attention_modules, decoder_attention
from s2o_runtime.layer_kinds import kind_in_words, layer_kinds
from s2o_runtime.monitor.counters import DenseWatch, Meter
from s2o_runtime.monitor.drift import Drift, DriftMonitor, check_and_limits
from s2o_runtime.profile import Profile
from s2o_runtime.profile.profile import fitted
from s2o_runtime.sequences import CallShape
from s2o_runtime.serving.fit import Rank, ServedLayer, longest_trusted


def heads_here(attention: nn.Module, query_heads: int) -> range | None:
    """The query heads that an attention module computes in this process; None if all of them.

    Torch cuts the rows of the projections into equal parts, in the order of the ranks, so a rank holds neighbouring
    heads. A module whose parameters are whole computes all heads.

    Args:
        attention: the module; its split parameters are torch's DTensors.
        query_heads: of the whole model.

    Raises:
        ProfileError: the ranks cannot share so many heads.
    """
    for parameter in attention.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        for dimension, placement in enumerate(getattr(parameter, "placements", ())):
            if mesh is None or not placement.is_shard() or mesh.size(dimension) == 1:
                continue
            return Rank(mesh.get_local_rank(dimension), mesh.size(dimension)).heads(query_heads)
    return None


def layer_obstacle(query: Tensor, key: Tensor, value: Tensor, call: Mapping[str, Any]) -> str | None:
    """Why S2O cannot do the attention of a layer, whatever the prompt; None if it can.

    Args:
        query: [B, Hq, Lq, D]; key: [B, Hkv, Lk, D]; value: [B, Hkv, Lk, Dv].
        call: what the layer passes to transformers' attention function besides, by name.
    """
    return _obstacle(query.shape[3], value.shape[3])


def _obstacle(query_dim: int, value_dim: int) -> str | None:
    widest = max(query_dim, value_dim)
    if widest > HEAD_DIMS[-1]:
        return f"head_dim {widest} is not supported by the kernel (up to {HEAD_DIMS[-1]})"
    return None


def foreseen_obstacle(module: nn.Module, config: Any) -> str | None:
    """What `layer_obstacle` will say of a layer, as far as its attention module and the configuration tell.

    Args:
        module: the attention module; its parameters need not be in memory.
        config: the model's transformers configuration.
    """
    query_dim = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None) or 0
    value_dim = getattr(module, "v_head_dim", None) or query_dim
    return _obstacle(query_dim, value_dim)


def prefill_in_chunks(
    state: LayerState, query: Tensor, key: Tensor, offset: int, compute: Callable[[slice, int], Tensor]
) -> Tensor:
    """Compute a prefill chunk by chunk, and let the layer's observer see it as one.

    Args:
        state: of the layer; its `chunk` is the queries of all calls but the last. Its `last_density` is that of the
            whole prefill afterwards.
        query: [B, Hq, Lq, D].
        key: [B, Hkv, Lk, D].
        offset: the position of the first query.
        compute: computes some of the queries behind so many keys, and leaves what it did in `state.last`.

    Returns:
        [B, Hq, Lq, D].
    """
    assert state.chunk is not None
    q_len, chunk, observer = query.shape[2], state.chunk, state.observer
    outputs, computed, causal = [], 0.0, 0
    state.observer, state.last_density = None, None
    try:
        for begin in range(0, q_len, chunk):
            end = min(begin + chunk, q_len)
            outputs.append(compute(slice(begin, end), offset + end))
            pairs = CallShape(1, 1, 1, end - begin, offset + end, 1, 1).causal_pairs
            computed += pairs * state.density
            causal += pairs
    finally:
        state.observer = observer
    state.last_density = computed / causal
    return torch.cat(outputs, 2)


STATE = "s2o_layer"  # attribute of a patched attention module
Beyond = Literal["dense", "warn", "s2o"]
Implementations = list[tuple[Any, str]]  # configurations of transformers, each with its attention implementation

log = logging.getLogger("s2o_runtime")

paths_taken: set[str] = set()  # by any layer of this process

Observer = Callable[[int, Tensor, Tensor, Tensor, Scoring, Tensor], None]


@dataclass(eq=False)
class LayerState(ServedLayer):
    """What one patched attention layer knows and has done.

    observer: called with the layer's index, q, k, v, their scoring and the output after every plain causal
    prefill of unpadded prompts, S2O or dense. meter: measures some of its calls, None does not.
    watch: sees whether most calls of the model are dense; all of its layers have the same one.
    other_kind: what is said of a layer that has no full attention and stays what it is.
    chunk: queries that a prefill is fed at once, as a server does; None for all. last_density: of the last prefill that
    was fed so, as a whole, where `last` is of its last chunk. hook: of its module, removed when it is detached.
    kv_cache_dtype: "fp8" rounds keys and values before S2O reads them, as a server's cache would; the observer sees
    them as they were. previous: of the first layer that `patch` attached, the attention implementation that each of the
    model's configurations had before. key: what stands for the state in a compiled graph; no other state has it, in no
    process, so that a copy and a saved graph never run another model's profile.
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    last: AttentionStats | None = None
    observer: Observer | None = None
    meter: Meter | None = field(default_factory=Meter)
    watch: DenseWatch | None = None
    other_kind: str | None = None
    chunk: int | None = None
    last_density: float | None = None
    hook: RemovableHandle | None = None
    kv_cache_dtype: KvCacheDtype = "auto"
    previous: Implementations = field(default_factory=list)
    key: str = field(init=False)

    def __post_init__(self) -> None:
        self.key = uuid4().hex
        _states[self.key] = self

    @property
    def density(self) -> float:
        """The mean density over the heads of the last prefill; reading it waits for the device."""
        if self.last_density is not None:
            return self.last_density
        return 1.0 if self.last is None else float(self.last.density.mean())

    def count(self, path: str, reason: str, queries: int = 1, keys: int = 0) -> None:
        """Remember a call, of so many queries and keys, and what became of it."""
        if not torch.compiler.is_compiling():  # logging would break the graph
            if (path, reason) not in self.counts:
                paths_taken.add(path)
                _say_once(path, reason)
            if self.watch is not None and queries > 1:
                self.watch.see(path, reason, keys)
        self.counts[path, reason] += 1


@lru_cache(maxsize=256)
def _say_once(path: str, reason: str) -> None:
    log.info("layers run %s: %s", path, reason)


def attach(module: nn.Module, state: LayerState) -> None:
    """Give one attention module its state, whatever the model. For the calibrator; models are patched by `patch`."""
    setattr(module, STATE, state)


def detach(module: nn.Module) -> None:
    """Undo `attach`: the module has no profile, so it runs dense attention, whatever S2O_PROFILE says."""
    state: LayerState | None = module.__dict__.pop(STATE, None)
    if state is not None:
        _detached.add(module)
        if state.hook is not None:
            state.hook.remove()


def was_detached(module: nn.Module) -> bool:
    return module in _detached


def state_of_key(key: str) -> LayerState:
    """The state that a compiled graph means. Raises ModelError if it is gone."""
    state = _states.get(key)
    if state is None:
        raise ModelError("the model of this compiled graph is gone: compile the new one")
    return state


_states: weakref.WeakValueDictionary[str, LayerState] = weakref.WeakValueDictionary()
_detached: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def check_model(model: object, profile: object = None) -> None:
    """Raises ModelError for what is no transformers model; `profile` is what `patch` was given besides."""
    if _is_model(model):
        return
    name, other = type(model).__name__, type(profile).__name__
    if _is_model(profile):
        raise ModelError(f"the model is a {name} and the profile a {other}: swap them, patch(model, profile)")
    raise ModelError(f"{name} is not a transformers model: load it with AutoModelForCausalLM")


def _is_model(thing: object) -> bool:
    return hasattr(thing, "config") and hasattr(thing, "set_attn_implementation")


def layer_states(model: nn.Module) -> list[LayerState]:
    """The states of a patched model's layers of full attention, in order. Raises ModelError if it is not patched."""
    states = [module.__dict__.get(STATE) for module in attention_modules(model)]
    patched = [state for state in states if isinstance(state, LayerState)]
    if len(patched) != len(states):
        raise ModelError("the model is not patched: call s2o_runtime.patch(model, profile) first")
    return patched


def other_attention(model: nn.Module) -> list[tuple[nn.Module, LayerState]]:
    """The attention modules that a profile has no row for, each with a state that keeps it as it is.

    They are those of layers of other kinds, such as sliding ones; layers without softmax attention have none.
    """
    served = attention_modules(model)
    return [
        (module, other_state(number, model.config))
        for number, modules in sorted(decoder_attention(model).items())
        for module in modules
        if all(module is not other for other in served)
    ]


def other_state(number: int, config: Any) -> LayerState:
    """The state of decoder layer `number` of a model with this configuration, which has no full attention."""
    reason = kind_in_words(layer_kinds(config)[number], config)
    return LayerState(number, no_config, 0, other_kind=reason, meter=None)


def no_config(length: int) -> LayerConfig:
    raise ModelError(f"a layer without a profile has no configuration for {length} keys")


def all_states(model: nn.Module) -> list[LayerState]:
    """The states of all attention layers of a patched model, in order, also of those that have no row in its profile.

    Raises:
        ModelError: it is not patched.
    """
    layer_states(model)
    states = (module.__dict__.get(STATE) for modules in decoder_attention(model).values() for module in modules)
    return sorted((state for state in states if isinstance(state, LayerState)), key=lambda state: state.layer)


def states_of(
    profile: Profile,
    device: torch.device | Sequence[torch.device],
    drift: Drift = None,
    beyond: Beyond = "dense",
    rejected: str | None = None,
) -> list[LayerState]:
    """A state for each layer of a profile, as it can run on this device; one log line says where S2O will run.

    Args:
        profile: of the model whose layers these are.
        device: where the model's attention runs; one for each layer where they are on several.
        drift: how the layers' errors are checked, as `patch` takes it.
        beyond: what prompts longer than 1.5 times the longest calibrated length run.
        rejected: why no layer may run S2O, if that is known already.

    Raises:
        ProfileError: drift is to be checked and the profile does not say what errors it allows.
        ConfigError: `beyond` or `drift` is not known or illegal.
    """
    check_beyond(beyond)
    check, allowed = check_and_limits(profile, drift)
    devices = [device] * profile.geometry.layers if isinstance(device, torch.device) else list(device)
    fits = {here: (profile, rejected) if rejected else fitted(profile, here) for here in dict.fromkeys(devices)}
    rejected = next((why for _, why in fits.values() if why is not None), None)
    longest = longest_trusted(profile)
    watch = None if rejected else DenseWatch(profile.geometry.layers, profile.min_length)
    states = [
        LayerState(
            profile.geometry.layer_number(index),
            partial(fits[here][0].layer_config, index),
            profile.min_length,
            rejected,
            max_length=None if beyond == "s2o" else longest,
            warn_beyond=beyond == "warn",
            watch=watch,
        )
        for index, here in enumerate(devices)
    ]
    _say_range(profile, longest, beyond, rejected)
    if check is not None:
        for state, errors in zip(states, allowed, strict=True):
            state.drift = DriftMonitor(check, state.layer, errors)
    return states


def check_beyond(beyond: str, name: str = "beyond") -> Beyond:
    """The value itself, which is called by that name. Raises ConfigError if it is not known."""
    return cast(Beyond, Rule(str, allowed=get_args(Beyond)).checked(beyond, name))


def _say_range(profile: Profile, longest: int, beyond: Beyond, rejected: str | None) -> None:
    """One line of the log that says from where to where S2O runs."""
    if rejected is not None:
        return
    until, others = (f" to {longest}", "other") if beyond == "dense" else ("", "shorter")
    calibrated = ", ".join(map(str, profile.lengths))
    log.info(
        "S2O runs from %d%s tokens (calibrated at %s), %s prompts run dense",
        profile.min_length,
        until,
        calibrated,
        others,
    )
