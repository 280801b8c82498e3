"""transformers: S2O as an attention function and a mask function; `patch` and `unpatch`.

No method is replaced. Prefill through a plain causal mask arrives with a small integer tensor instead of a mask
(where its queries stand, where each sequence starts) and runs S2O; decode, odd masks, sliding windows and
everything S2O cannot do exactly run transformers' own SDPA path or dense attention, soft-capped scores its eager
path, and the reason is counted.
"""

from __future__ import annotations

import itertools
import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from s2o_runtime import ops
from s2o_runtime.attention import AttentionStats, s2o_attention
from s2o_runtime.config import LayerConfig, TileConfig
from s2o_runtime.dense import dense_attention
from s2o_runtime.errors import ModelError, ProfileError
from s2o_runtime.gpu import Rejected, candidate_tiles, fit, identify
from s2o_runtime.identity import RANDOM, attention_modules, fingerprint, geometry
from s2o_runtime.lengths import length_step
from s2o_runtime.profile import Profile, load_profile

NAME = "s2o"
STATE = "s2o_layer"  # attribute of a patched attention module
NUMBER = "s2o_number"  # attribute of a patched attention module: what stands for it in a compiled graph
CALL = "s2o_call"  # attribute of a mask that stands for a plain causal prefill
PREVIOUS = "s2o_previous_implementation"
SOFT_CAP = "attn_logit_softcapping"  # what transformers calls a model's bound on its attention scores

log = logging.getLogger("s2o_runtime")


@dataclass(frozen=True)
class PrefillCall:
    """A plain causal prefill: where its first query stands, and where each sequence starts."""

    q_offset: int
    kv_start: Tensor | None  # integers [B]; None when nothing is padded


Observer = Callable[[int, Tensor, Tensor, Tensor, float | None, Tensor], None]


@dataclass
class LayerState:
    """What one patched attention layer knows and has done.

    config_at: the layer's configuration for a number of keys; min_length: fewer keys than this stay dense;
    rejected: why the layer cannot run S2O at all, if so.
    observer: called with the layer's index, q, k, v, the scale and the output after every plain causal
    prefill of unpadded prompts, S2O or dense.
    """

    layer: int
    config_at: Callable[[int], LayerConfig]
    min_length: int
    rejected: str | None = None
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    last: AttentionStats | None = None
    configs: dict[int, LayerConfig] = field(default_factory=dict)
    observer: Observer | None = None

    def config(self, length: int) -> LayerConfig:
        step = length_step(length)
        if step not in self.configs:
            self.configs[step] = self.config_at(length)
        return self.configs[step]

    def count(self, path: str, reason: str) -> None:
        if not torch.compiler.is_compiling() and (path, reason) not in self.counts:  # logging would break the graph
            log.info("layer %d runs %s: %s", self.layer, path, reason)
        self.counts[path, reason] += 1


def patch(model: Any, profile: Profile | str | PathLike[str], *, strict: bool = False) -> Any:
    """Make a transformers model use S2O for long prompts, as its profile says. Returns the model.

    strict: refuse a model whose weights are not the ones that were calibrated; otherwise that is a warning.
    Raises ProfileError if the profile does not fit the model's geometry or was made on random weights, ModelError
    if the architecture is not supported.
    """
    if not isinstance(profile, Profile):
        profile = load_profile(profile)
    if not hasattr(model, "config") or not hasattr(model, "set_attn_implementation"):
        raise ModelError(f"{type(model).__name__} is not a transformers model: load it with AutoModelForCausalLM")
    difference = geometry(model.config).difference(profile.geometry)
    if difference:
        raise ProfileError(
            f"the profile of {profile.model_name} does not fit this model: it has {difference}; calibrate this model"
        )
    if profile.fingerprint.startswith(RANDOM):
        raise ProfileError(
            f"the profile of {profile.model_name} was calibrated on random weights, expected ones of a trained model: "
            "calibrate without --random-weights"
        )
    modules = attention_modules(model)
    if fingerprint(model) != profile.fingerprint:
        message = f"the weights are not those of {profile.model_name} that the profile was calibrated on"
        if strict:
            raise ProfileError(f"{message}: calibrate these, or patch with strict=False")
        log.warning("%s: errors and densities may differ", message)
    unpatch(model)
    profile, rejected = _fitted(profile, next(model.parameters()).device)
    for index, module in enumerate(modules):
        attach(module, LayerState(index, partial(profile.layer_config, index), profile.min_length, rejected))
    register()
    setattr(model, PREVIOUS, _implementations(model.config))
    model.set_attn_implementation(NAME)
    return model


def unpatch(model: Any) -> Any:
    """Undo `patch`: the attention implementation the model had before, and no trace of the profile."""
    if PREVIOUS in model.__dict__:
        model.set_attn_implementation(model.__dict__.pop(PREVIOUS))
        for module in model.modules():
            detach(module)
    return model


@contextmanager
def patched(model: Any, profile: Profile | str | PathLike[str], *, strict: bool = False) -> Iterator[Any]:
    """`patch` for the length of a block: `with patched(model, "profile.safetensors"): model.generate(...)`.

    Whatever happens in the block, the model is unpatched after it.
    """
    try:
        yield patch(model, profile, strict=strict)
    finally:
        unpatch(model)


def _implementations(config: Any) -> dict[str, str]:
    """The attention implementation of a model and of its parts, as `set_attn_implementation` takes them."""
    parts = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", {})}
    named = {"": config} | {name: part for name, part in parts.items() if part is not None}
    return {name: part._attn_implementation for name, part in named.items()}


def attach(module: nn.Module, state: LayerState) -> None:
    """Give one attention module its state, whatever the model. For the calibrator; models are patched by `patch`."""
    setattr(module, STATE, state)
    setattr(module, NUMBER, next(_numbers))
    _layers[getattr(module, NUMBER)] = module


def detach(module: nn.Module) -> None:
    """Undo `attach`: the module has no profile, so it runs dense attention."""
    module.__dict__.pop(STATE, None)
    module.__dict__.pop(NUMBER, None)


def explain(model: nn.Module) -> list[dict[str, Any]]:
    """What each layer of a patched model did: one row per layer, path and reason, with its number of calls."""
    return [
        {"layer": state.layer, "path": path, "reason": reason, "calls": calls}
        for state in layer_states(model)
        for (path, reason), calls in sorted(state.counts.items())
    ]


def layer_states(model: nn.Module) -> list[LayerState]:
    """The states of a patched model's attention layers, in order. Raises ModelError if it is not patched."""
    states = [module.__dict__.get(STATE) for module in attention_modules(model)]
    found = [state for state in states if isinstance(state, LayerState)]
    if len(found) != len(states):
        raise ModelError("the model is not patched: call s2o_runtime.patch(model, profile) first")
    return found


def register() -> None:
    """Make transformers know the attention implementation "s2o"; a model that is loaded with it waits for `patch`."""
    AttentionInterface.register(NAME, s2o_attention_forward)
    AttentionMaskInterface.register(NAME, s2o_mask)


def s2o_mask(**call: Any) -> Tensor | None:
    """The mask function: a plain causal prefill becomes an integer tensor, all else SDPA's own mask.

    The tensor is int64 [B, 1, 1, 2] (position of query 0, first key that counts); four dimensions because
    models pass such a mask on untouched. Its `s2o_call` attribute holds the same on the host.
    Where scores are soft-capped, which SDPA cannot do, every mask is eager attention's own.
    """
    if getattr(call.get("config"), SOFT_CAP, None) is not None:
        return _eager_mask(call)
    q_length, q_offset = _query_range(call)
    plain = call.get("mask_function", causal_mask_function) is causal_mask_function
    if q_length == 1 or not plain or int(call.get("kv_offset", 0)) != 0:
        return _sdpa_mask(call)
    padding = call.get("attention_mask")
    starts = None
    if padding is not None:
        starts, regular = _starts(padding[:, : int(q_offset) + q_length])
        if not regular:
            return _sdpa_mask(call)
    device = call.get("device", "cpu") if padding is None else padding.device
    mask = torch.zeros(call["batch_size"], 1, 1, 2, dtype=torch.int64, device=device)
    mask[..., 0] = q_offset
    if starts is not None:
        mask[:, 0, 0, 1] = starts
    if not torch.compiler.is_compiling():
        setattr(mask, CALL, PrefillCall(int(q_offset), starts))
    return mask


def _sdpa_mask(call: dict[str, Any]) -> Tensor | None:
    mask: Tensor | None = sdpa_mask(**call)
    return mask


def _eager_mask(call: dict[str, Any]) -> Tensor | None:
    mask: Tensor | None = eager_mask(**call)
    return mask


def _query_range(call: dict[str, Any]) -> tuple[int, Any]:
    """Number of queries and position of the first; transformers before 5.2 says it with `cache_position`."""
    if "q_length" in call:
        return int(call["q_length"]), call.get("q_offset", 0)
    return int(call["cache_position"].shape[0]), call["cache_position"][0]


def _starts(padding: Tensor) -> tuple[Tensor | None, bool]:
    """First key of each sequence (None if all are 0), and whether no sequence has a hole.

    Padding on the right needs no mask: no real query stands behind it.
    """
    kept = padding.bool()
    length = kept.shape[1]
    first = kept.int().argmax(1)
    last = length - 1 - kept.flip(1).int().argmax(1)
    regular = bool((kept.sum(1) == last - first + 1).all())
    return (first if bool(first.any()) else None), regular


def s2o_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function: q [B, Hq, Lq, D], k, v [B, Hkv, Lk, D] in; [B, Lq, Hq, D] out."""
    number: int | None = getattr(module, NUMBER, None)
    obstacle = _layer_obstacle(kwargs)
    compiling = torch.compiler.is_compiling() and obstacle is None
    if compiling and number is not None and _is_ours(attention_mask) and not dropout:
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        return ops.attention(query, key, value, attention_mask, _RUN_LAYER, number, scale).transpose(1, 2), None
    state: LayerState | None = module.__dict__.get(STATE)
    if kwargs.get("softcap") is not None:
        if state is not None:
            state.count("dense", str(obstacle))
        return _soft_capped(module, query, key, value, attention_mask, scaling, dropout, kwargs), None
    call: PrefillCall | None = getattr(attention_mask, CALL, None)
    if call is None and attention_mask is not None and not attention_mask.dtype.is_floating_point:
        call = _recovered(attention_mask)
    if call is None:
        if state is not None:
            other = "decode" if query.shape[2] == 1 else "the mask is not a plain causal one"
            state.count("dense", obstacle or other)
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
        return out, None
    if dropout:
        raise ModelError(f"attention dropout {dropout} is not supported by S2O: call model.eval() or unpatch it")
    kv_len = call.q_offset + query.shape[2]
    key, value = key[:, :, :kv_len], value[:, :, :kv_len]  # a static cache is longer than what it holds
    reason = obstacle or _dense_reason(state, query, key, kv_len)
    if state is None or reason is not None:
        if state is not None and reason is not None:
            state.count("dense", reason)
        elif state is None:
            _say_unpatched(type(module).__name__)
        out = dense_attention(query, key, value, scale=scaling, kv_start=call.kv_start)
    else:
        config = state.config(kv_len)
        out, state.last = s2o_attention(
            query, key, value, config, scale=scaling, kv_start=call.kv_start, return_stats=True
        )
        state.count("dense" if state.last.backend == "dense" else "s2o", state.last.reason)
    if state is not None and state.observer is not None and call.kv_start is None:
        state.observer(state.layer, query, key, value, scaling, out)
    return out.transpose(1, 2).contiguous(), None


def _layer_obstacle(kwargs: dict[str, Any]) -> str | None:
    """Why a layer never runs S2O, by what its model passes to every call; None if it may."""
    if kwargs.get("softcap") is not None:
        return f"the scores are soft-capped at {kwargs['softcap']:g}"
    if kwargs.get("sliding_window") is not None:
        return f"the layer sees a sliding window of {kwargs['sliding_window']} keys"
    return None


def _soft_capped(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> Tensor:
    """The eager attention of the module's own model, which knows how to cap scores. Returns [B, Lq, Hq, D]."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise ModelError(f"{type(module).__name__} caps its scores and has no eager attention: unpatch the model")
    if mask is not None and mask.dtype == torch.bool:  # a caller's own; eager attention adds its mask to the scores
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(
            ~mask, torch.finfo(query.dtype).min
        )
    out: Tensor = eager(module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs)[0]
    return out


@lru_cache(maxsize=64)
def _say_unpatched(name: str) -> None:
    log.info("%s runs dense: the model has no profile, call s2o_runtime.patch(model, profile)", name)


def _is_ours(mask: Tensor | None) -> bool:
    """Whether a mask is the integer tensor that stands for a plain causal prefill."""
    return mask is not None and mask.dtype == torch.int64 and mask.shape[1:] == (1, 1, 2)


def _run_layer(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, number: int, scale: float) -> Tensor:
    """What a layer of a compiled model does: the same function, run eagerly inside the op."""
    module = _layers.get(number)
    if module is None:
        raise ModelError("the model of this compiled graph is gone: compile the new one")
    return s2o_attention_forward(module, q, k, v, mask, scaling=scale)[0].transpose(1, 2)


_layers: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_RUN_LAYER = ops.register(_run_layer)


def _recovered(mask: Tensor) -> PrefillCall | None:
    """The call behind a mask that lost its attribute (moved to another device): costs a synchronisation."""
    if not _is_ours(mask):
        return None
    starts = mask[:, 0, 0, 1]
    return PrefillCall(int(mask[0, 0, 0, 0]), starts if bool(starts.any()) else None)


def _dense_reason(state: LayerState | None, query: Tensor, key: Tensor, kv_len: int) -> str | None:
    if state is None:
        return "the model has no profile"
    if state.rejected is not None:
        return state.rejected
    if kv_len < state.min_length:
        return f"shorter than the shortest calibrated length, {state.min_length}"
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        return "gradients are enabled"
    return None


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
