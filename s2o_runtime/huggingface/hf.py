"""transformers: S2O as an attention function and a mask function; `patch` and `unpatch`.

No method is replaced. Prefill through a plain causal mask arrives with a small integer tensor instead of a mask
(where its queries stand, where each sequence starts) and runs S2O; decode, odd masks, sliding windows and
everything S2O cannot do exactly run transformers' own SDPA path or dense attention, and the reason is counted. Scores
that are soft-capped or have learned sinks, which SDPA cannot do, run the model's own eager path there. The mask of a
window of a long prompt, which would have an entry for each query and key, is never made: its layers are computed some
rows at a time.
"""

from __future__ import annotations

import copyreg
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import lru_cache, partial
from os import PathLike
from typing import Any, TypeGuard, get_args

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from ..attention import torch_op
from ..attention.compute import window_attention
from ..attention.dense import fastest_dense_attention
from ..call import Scoring, without_gradients
from ..dense_reason import DenseReason
from ..errors import InputError, ModelError, ProfileError
from ..fields import Rule
from ..identity import (
    find_decoder_attention,
    find_not_finite,
    find_offloaded,
    geometry,
    get_device_of,
    list_attention_modules,
)
from ..layer_kinds import describe_window, get_chunk, get_max_positions, get_window
from ..logs import log_once
from ..monitor.counters import DenseWatch
from ..monitor.drift import Drift, read_check
from ..profile import Profile, load_profile
from ..profile.find import OFF, find_profile, find_source_folder, read_named
from ..profile.record import Reads
from ..sequences import needs_gradients
from .layers import (
    STATE,
    Implementations,
    LongPromptPolicy,
    check_model,
    check_policy,
    find_state,
    make_states,
    pair_states,
)
from .layers import LayerState as LayerState
from .layers import Observer as Observer
from .layers import ServerLikeState as ServerLikeState
from .layers import TransformersCall as TransformersCall
from .layers import attach as attach
from .layers import detach as detach
from .layers import get_layer_states as get_layer_states
from .paged import split_requests
from .reads import count_read_rows
from .run import SOFT_CAP, attach_profile, find_weights_mismatch, read_available

NAME = "s2o"
PAGED = f"paged|{NAME}"  # what transformers' continuous batching calls it
CALL = "s2o_call"  # attribute of a mask that stands for a plain causal prefill
REASON = "s2o_reason"  # attribute of a mask that is not plain causal for a reason of its own
MARK = 0x53324F  # the last entry of a prefill mask: a caller's own mask of that shape and type is another
SMALL_MASK = 1 << 22  # entries; a mask of windows that has more is not made

ProfileOrPath = Profile | str | PathLike[str]

log = logging.getLogger("s2o_runtime")


@dataclass(frozen=True)
class PrefillCall:
    """A plain causal prefill.

    q_offset: the position of its first query; kv_start: the first key of each sequence, integers [B], None when nothing
    is padded; sdpa_mask: makes the mask of transformers' SDPA path; window: keys that a query sees, None for all;
    count_read_rows: `reads.count_read_rows`, asked once for all layers.
    """

    q_offset: int
    kv_start: Tensor | None
    sdpa_mask: Callable[[], Tensor | None]
    window: int | None = None
    count_read_rows: Callable[[], int | DenseReason] = field(default_factory=lambda: lru_cache(count_read_rows))


def patch(
    model: Any,
    profile: ProfileOrPath | None = None,
    *,
    strict: bool = False,
    drift: Drift = "auto",
    beyond: LongPromptPolicy = "dense",
    reads: Reads | None = None,
) -> Any:
    """Make a transformers model use S2O for long prompts, as its profile says, and return the model.

    A line of the log (level INFO) says from where to where S2O runs, and one before it which profile was found, if none
    was given. A model whose parameters are not all in memory (offloaded ones) cannot be compared with the profile and
    stays dense.

    Args:
        model: a transformers model.
        profile: the model's profile, or the path of its file; None for the one that S2O_PROFILE names, or that
            `s2o_runtime.profile.find` finds: in the folders of S2O_PROFILES, in `s2o` of the model's folder, in
            `profiles` of the current folder or in the catalogue of the package.
        strict: refuse a model that computes another function than the calibrated one, by its weights, active adapters,
            RoPE parameters or config.json, or cannot be compared with it; otherwise that is a warning.
        drift: how it is checked now and then that the errors keep to the profile's budget: a `DriftCheck`; "warn" or
            "dense", that action with the other settings as they are; None or "off", not at all; "auto", "warn" if the
            profile says what errors it allows.
        beyond: what prompts of more than 1.5 times the longest calibrated length run, where nothing was proven:
            "dense"; "warn", S2O after one warning; or "s2o".
        reads: the rows of a prompt that the caller reads, where the profile's budget is of answers: "answers", only the
            last ones, whatever a call returns; "all", others too, and every prompt is dense; None, what each call
            returns, so that one is dense whose logits are of more than the last rows (all without `logits_to_keep`),
            which has `labels` or `output_hidden_states`, or whose model has no language head. `generate` is not.

    Raises:
        ProfileError: the profile does not fit the model's geometry, was made on random weights, or names no budget for
            a drift check that was asked for; or no profile is given, and none is found that fits the model and its GPU.
        ModelError: the architecture is not supported.
        ConfigError: `strict`, `drift`, `beyond` or `reads` is not known or illegal, or S2O_PROFILES names no folder.
    """
    check_model(model, profile)
    strict = Rule(bool).checked(strict, "strict")
    if not isinstance(profile, Profile | str | PathLike | None):
        raise ProfileError(f"the profile is a {type(profile).__name__}, expected a Profile or the path of its file")
    read_check(drift)
    check_policy(beyond)
    Rule(str, optional=True, allowed=get_args(Reads)).checked(reads, "reads")
    profile = read_named() if profile is None else profile
    if profile is None or profile == OFF:
        device = get_device_of(list_attention_modules(model)[0])
        folder = find_source_folder(model.config)
        match = find_profile(
            model.config, device, lambda candidate: find_weights_mismatch([model], candidate), folder, profile
        )
        log.info("S2O takes the profile %s", match)
        profile = match.profile
    if not isinstance(profile, Profile):
        profile = load_profile(profile)
    if misfit := profile.explain_misfit(geometry(model.config)):
        raise ProfileError(f"{misfit}; calibrate this model")
    profile.check_trained()
    rejected = find_offloaded(model)
    if mismatch := find_weights_mismatch([model], profile):
        message = rejected or f"{mismatch} that the profile was calibrated on"
        broken = find_not_finite(model)
        if strict:
            raise ProfileError(broken or f"{message}: calibrate this model, or patch with strict=False")
        consequence = "the model stays dense" if rejected else broken or "errors and densities may differ"
        log.warning("%s: %s", message, consequence)
    if unknown := profile.config_unknown:
        if strict:
            raise ProfileError(f"{unknown}, or patch with strict=False")
        log.info("config not compared: %s", unknown)
    devices = list(map(get_device_of, list_attention_modules(model)))
    states = make_states(profile, devices, drift, beyond, rejected, reads)
    modules = [module for modules in find_decoder_attention(model).values() for module in modules]
    pairs = pair_states(modules, states, model.config, profile.geometry.query_heads)
    unpatch(model)
    states[0].previous = get_implementations(model)
    _attach_all(pairs)
    _register()
    model.set_attn_implementation(NAME)
    return model


def _attach_all(layers: Iterable[tuple[nn.Module, LayerState]]) -> None:
    """Give a model's attention modules their states, and its first layer of full attention the hook that watches it."""
    watched: set[DenseWatch] = set()
    for module, state in layers:
        attach(module, state)
        if state.watch is not None and state.watch not in watched:
            watched.add(state.watch)
            state.hook = module.register_forward_pre_hook(state.watch.check_forward, with_kwargs=True)


def unpatch(model: Any) -> Any:
    """Undo `patch`: the attention implementation the model had before, and no trace of the profile.

    A model that got its profile from S2O_PROFILE loses it, for good. Raises ModelError for what is not a model of
    transformers.

    >>> from transformers import AutoModelForCausalLM
    >>> model = AutoModelForCausalLM.from_pretrained("calibrate/demo/model")  # in a clone of the repository
    >>> unpatch(patch(model, "profiles/demo/cpu/mse-0.0001.safetensors")).config._attn_implementation
    'sdpa'
    """
    check_model(model)
    for module in model.modules():
        if STATE in module.__dict__:
            set_implementations(module.__dict__[STATE].previous)
        detach(module)
    return model


@contextmanager
def patched(
    model: Any,
    profile: ProfileOrPath | None = None,
    *,
    strict: bool = False,
    drift: Drift = "auto",
    beyond: LongPromptPolicy = "dense",
    reads: Reads | None = None,
) -> Iterator[Any]:
    """Patch a model inside a block, after which it is what it was before, whatever happened in it.

    >>> from transformers import AutoModelForCausalLM
    >>> model = AutoModelForCausalLM.from_pretrained("calibrate/demo/model")  # in a clone of the repository
    >>> with patched(model, "profiles/demo/cpu/mse-0.0001.safetensors"):
    ...     model.config._attn_implementation
    's2o'
    """
    check_model(model, profile)
    layers = [(module, module.__dict__[STATE]) for module in model.modules() if STATE in module.__dict__]
    previous = get_implementations(model)
    try:
        yield patch(model, profile, strict=strict, drift=drift, beyond=beyond, reads=reads)
    finally:
        unpatch(model)
        _attach_all(layers)
        set_implementations(previous)


def get_implementations(model: Any) -> Implementations:
    """Return the attention implementation in each configuration of a model and of its parts, outer ones first."""
    # all handles of a model share these: its inner model, its PEFT wrapper, what `torch.compile` returned
    configs: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    for config in configs:  # which grows: the configurations of some parts are no module's
        configs += [getattr(config, name) for name in getattr(config, "sub_configs", {}) if hasattr(config, name)]
    known = {id(config): config for config in configs if hasattr(config, "_attn_implementation")}
    return [(config, config._attn_implementation) for config in known.values()]


def set_implementations(previous: Implementations) -> None:
    """Give configurations back the attention implementations that they had."""
    for config, name in previous:
        config._attn_implementation = name  # which sets it in its parts too; they follow in the list


def register() -> None:
    """Make transformers know the attention implementation "s2o".

    A model that is loaded with it gets the profile that the environment variable S2O_PROFILE names, or waits for
    `patch`. Raises ProfileError if S2O_PROFILE cannot be read.

    >>> from transformers import AttentionInterface
    >>> register()
    >>> "s2o" in AttentionInterface().valid_keys()
    True
    """
    read_available()
    _register()


def _register() -> None:
    AttentionInterface.register(NAME, s2o_attention_forward)
    AttentionInterface.register(PAGED, s2o_paged_forward)
    AttentionMaskInterface.register(NAME, s2o_mask)


def s2o_mask(**call: Any) -> Tensor | None:
    """Make the mask of a call: for a plain causal prefill a `prefill_mask`, for all else SDPA's own mask.

    Its `s2o_call` attribute holds the same on the host. Where scores are soft-capped, which SDPA cannot do, every other
    mask is eager attention's own. A mask of windows that would have more than `SMALL_MASK` entries becomes such a
    tensor too.
    """
    other_mask: Callable[..., Tensor | None]
    other_mask = sdpa_mask if getattr(call.get("config"), SOFT_CAP, None) is None else eager_mask
    compiling = torch.compiler.is_compiling()
    q_length, q_offset = _read_query_range(call)
    plain = call.get("mask_function", causal_mask_function) is causal_mask_function or _is_plain_window(call)
    keys = None if plain else _find_large_window(call)
    if q_length == 1 or not (plain or keys) or int(call.get("kv_offset", 0)) != 0:
        return other_mask(**call)
    padding, starts, device = call.get("attention_mask"), None, call.get("device", "cpu")
    if padding is not None:
        if padding.shape[1] < int(q_offset) + q_length:  # transformers hides the keys that it has no entry for
            short = other_mask(**call)
            if short is not None and not compiling:
                setattr(short, REASON, DenseReason.SHORT_MASK)
            return short
        kept, device = padding[:, : int(q_offset) + q_length].bool(), padding.device
        first = kept.int().argmax(1)
        last = kept.shape[1] - 1 - kept.flip(1).int().argmax(1)  # padding behind it needs no mask: no query sees it
        regular = bool((kept.sum(1) == last - first + 1).all())  # no sequence has a hole
        if not regular:
            return other_mask(**call)
        starts = first if bool(first.any()) else None
    mask = prefill_mask(call["batch_size"], q_offset, device, starts, keys)
    if not compiling:
        if "q_offset" in call:  # a static cache counts on in the tensor that it gave
            call = call | {"q_offset": int(q_offset)}
        setattr(mask, CALL, PrefillCall(int(q_offset), starts, lru_cache(partial(other_mask, **call)), keys))
    return mask


def prefill_mask(
    batch: int, q_offset: int | Tensor, device: torch.device | str = "cpu", starts: Tensor | None = None,
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """Make the tensor that stands for a plain causal prefill: int64 [B, 1, 1, 4].

    Its entries are the position of query 0, the first key that counts, the keys of a window (0 if a query sees all
    before it) and `MARK`. It has four dimensions because models pass such a mask on untouched.
    """
    mask = torch.zeros(batch, 1, 1, 4, dtype=torch.int64, device=device)
    mask[..., 0] = q_offset
    if starts is not None:
        mask[:, 0, 0, 1] = starts
    mask[..., 2] = window or 0
    mask[..., 3] = MARK
    return mask


def is_prefill_mask(mask: Tensor | None) -> TypeGuard[Tensor]:
    """Compare a mask's type and shape with a `prefill_mask`'s; only its entries tell a caller's own such mask."""
    return mask is not None and mask.dtype == torch.int64 and mask.shape[1:] == (1, 1, 4)


def _read_prefill(mask: Tensor | None, queries: int, keys: int) -> PrefillCall | None:
    """Read the call from a mask that lost its attribute (moved to another device): costs a synchronisation."""
    if not is_prefill_mask(mask):
        return None
    q_offset, _, window, mark = mask[0, 0, 0].tolist()
    if mark != MARK:
        return None
    starts, expand = mask[:, 0, 0, 1], partial(_expand_mask, mask, queries, keys)
    return PrefillCall(q_offset, starts if bool(starts.any()) else None, expand, window or None)


def _expand_mask(mask: Tensor, queries: int, keys: int) -> Tensor:
    """Return which keys each query sees by a `prefill_mask`: bool [B, 1, queries, keys]."""
    row = torch.arange(queries, device=mask.device)[:, None] + mask[..., :1]
    key = torch.arange(keys, device=mask.device)
    start, window = mask[..., 1:2], mask[..., 2:3]
    return (key <= row) & (key >= start) & ((window == 0) | (key > row - window))


def _find_large_window(call: dict[str, Any]) -> int | None:
    """Return the keys that a query sees under a mask of causal windows that is too large to be made; else None."""
    local, config = call.get("local_size"), call.get("config")
    if local is None or not call.get("allow_is_causal_skip", False) or torch.compiler.is_compiling():
        return None
    if int(local) != get_window(config) or int(local) == get_chunk(config):
        return None
    q_length, q_offset = _read_query_range(call)
    return int(local) if q_length * (int(q_offset) + q_length) > SMALL_MASK else None


def _is_plain_window(call: dict[str, Any]) -> bool:
    """Decide if a mask of windows or chunks is a plain causal one because all keys so far fit one of them."""
    local = call.get("local_size")
    # transformers forbids to skip a mask that anything else deviates from the causal one (images, packed sequences)
    if local is None or not call.get("allow_is_causal_skip", False):
        return False
    if torch.compiler.is_compiling():  # a graph must not depend on how long the prompt is
        return int(local) >= get_max_positions(call.get("config"))
    q_length, q_offset = _read_query_range(call)
    return int(q_offset) + q_length <= int(local)


def _read_query_range(call: dict[str, Any]) -> tuple[int, Any]:
    """Return the number of queries and the position of the first."""
    if "q_length" in call:
        return int(call["q_length"]), call.get("q_offset", 0)
    return int(call["cache_position"].shape[0]), call["cache_position"][0]  # transformers before 5.2


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
    """Compute attention: q [B, Hq, Lq, D], k, v [B, Hkv, Lk, D] -> [B, Lq, Hq, D]."""
    options = {"scaling": scaling, "dropout": dropout, **kwargs}
    call = TransformersCall(module, query, key, value, attention_mask, options)
    compiling, scoring = torch.compiler.is_compiling(), call.scoring
    if kwargs.get("output_attentions") and not compiling:
        log_once(
            logging.WARNING,
            "S2O computes no attention weights, output_attentions=True gives none: unpatch the model and load it with "
            'attn_implementation="eager" for them',
        )
    unserved, seen = call.obstacle, kwargs.get("sliding_window")
    obstacle = unserved or (None if seen is None or key.shape[2] <= seen else describe_window(seen))
    state: LayerState | None = module.__dict__.get(STATE)
    prefill: PrefillCall | None = getattr(attention_mask, CALL, None)
    reason = DenseReason.DECODE if query.shape[2] == 1 else getattr(attention_mask, REASON, DenseReason.MASK)
    training = module.training or dropout > 0
    if not compiling:
        state = attach_profile(module, query.device) if state is None else state
        prefill = prefill or _read_prefill(attention_mask, query.shape[2], key.shape[2])
    elif is_prefill_mask(attention_mask):
        gradients = needs_gradients(query, key, value)  # the op has no backward pass
        if state is not None and obstacle is None and not training and not gradients:
            inputs = query, key, value, attention_mask, scoring.sinks
            out = torch_op.call_node("layer_attention", *inputs, state.key, scoring.scale, scoring.softcap)
            return out.transpose(1, 2), None
        reason = DenseReason.TRAINING if training else DenseReason.GRADIENTS if gradients else reason
        call, prefill = call._replace(mask=_expand_mask(attention_mask, query.shape[2], key.shape[2])), None
    if prefill is None or prefill.window is None:
        by_sdpa = unserved is not None or training
    else:
        by_sdpa = dropout > 0 or kwargs.get("position_bias") is not None
    if prefill is not None and by_sdpa:
        keys = prefill.q_offset + query.shape[2]  # a static cache is longer than what it holds
        mask = prefill.sdpa_mask()
        mask = None if mask is None else mask[..., :keys]
        call, prefill = call._replace(k=key[:, :, :keys], v=value[:, :, :keys], mask=mask), None
        if training:  # a checkpoint's forward pass may be without gradients, and its backward pass computes it again
            reason = DenseReason.TRAINING
            if state is not None:
                state.warn_of_mode(reason, keys)
    if prefill is not None:
        if state is None and prefill.window is None:
            message = "%s runs dense: the model has no profile, call s2o_runtime.patch(model, profile)"
            log_once(logging.INFO, message, type(module).__name__)
        return _run_prefill(state, obstacle, query, key, value, scoring, prefill).transpose(1, 2).contiguous(), None
    if state is not None:
        state.count("dense", state.other_kind or obstacle or reason, query.shape[2], call.k.shape[2])
    return call.compute(sdpa_attention_forward) if scoring.beyond_sdpa is None else _run_eager(call), None


def _run_prefill(
    state: LayerState | None, obstacle: str | None, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring,
    prefill: PrefillCall,
) -> Tensor:  # fmt: skip
    """Compute a causal prefill of a layer, which may have a window: [B, Hq, Lq, Dv]."""
    keys = prefill.q_offset + q.shape[2]
    k, v = k[:, :, :keys], v[:, :, :keys]
    if prefill.window is not None:
        if state is not None:
            state.count("dense", state.other_kind or describe_window(prefill.window), q.shape[2], keys)
        return window_attention(q, k, v, window=prefill.window, scoring=scoring, kv_start=prefill.kv_start)
    if state is None:
        return fastest_dense_attention(q, k, v, scoring, prefill.kv_start)
    obstacle = obstacle or state.find_read_reason(prefill.count_read_rows, keys)
    return state.attend(q, k, v, scoring, prefill.kv_start, obstacle)


def _run_eager(call: TransformersCall) -> Tensor:
    """Compute a call by the eager attention of the module's own model, which knows soft caps and sinks."""
    name, module = type(call.module).__name__, sys.modules[type(call.module).__module__]
    eager = getattr(module, "eager_attention_forward", None)
    if eager is None:
        raise ModelError(f"{name} has scores that SDPA cannot do and no eager code: unpatch the model")
    mask, queries, keys = call.mask, call.q.shape[2], call.k.shape[2]
    if mask is None and queries > 1:  # SDPA's way to say causal
        mask = _expand_mask(prefill_mask(1, keys - queries, call.q.device), queries, keys)
    if mask is not None and mask.dtype == torch.bool:  # a caller's own; eager attention adds its mask to the scores
        zeros = torch.zeros(mask.shape, dtype=call.q.dtype, device=mask.device)
        mask = zeros.masked_fill(~mask, torch.finfo(call.q.dtype).min)
    return call._replace(mask=mask).compute(eager)


def _attend_request(call: TransformersCall, window: int | None) -> Tensor:
    """Compute one request of a server batch, whose queries are the last of its keys: [1, Lq, Hq, D]."""
    queries, keys = call.q.shape[2], call.k.shape[2]
    mask = None  # one query sees all keys; a window's cache holds no more than one may see
    if queries > 1:
        window = None if window is None or keys <= window else window
        mask = prefill_mask(1, keys - queries, call.q.device, window=window)
        expand = partial(_expand_mask, mask, queries, keys)
        # of a request no more than its last row is read
        setattr(mask, CALL, PrefillCall(keys - queries, None, expand, window, lambda: 1))
    return call._replace(mask=mask).compute(s2o_attention_forward)


s2o_paged_forward = split_requests(_attend_request)


def _run_node(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None, key: str, scale: float, softcap: float | None
) -> Tensor:
    """Compute a layer's node in a compiled graph: the same function, run eagerly inside the op."""
    prefill: PrefillCall | None = getattr(mask, CALL, None) or _read_prefill(mask, q.shape[2], k.shape[2])
    if prefill is None:
        raise InputError(f"the attention mask is {mask.dtype} {tuple(mask.shape)}: give a boolean one")
    scoring = Scoring(scale, softcap, without_gradients(sinks))
    return _run_prefill(find_state(key), None, q, k, v, scoring, prefill)


torch_op.register_node("layer_attention", _run_node)


def _restore_state(kind: type[LayerState], values: dict[str, Any]) -> LayerState:
    """Make the state of a layer that was copied or unpickled, with a key of its own; its model asks for S2O by name."""
    _register()
    return kind(**values)


def _reduce_state(state: LayerState) -> tuple[Any, ...]:
    return _restore_state, (type(state), {f.name: getattr(state, f.name) for f in fields(state) if f.init})


for _kind in (LayerState, ServerLikeState):  # of `copy` too
    copyreg.pickle(_kind, _reduce_state)
