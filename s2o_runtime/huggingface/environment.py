"""S2O_PROFILE: the profile for programs that cannot be edited; S2O_BEYOND and S2O_DRIFT: two arguments of `patch`.

A model that runs S2O and was given no profile gets this one at its first plain causal prefill, if it has the
geometry that was calibrated; others stay dense, and that is said once.
"""

from __future__ import annotations

import gc
import logging
import os
from functools import lru_cache
from typing import Any, cast, get_args

import torch
from torch import nn

from s2o_runtime.errors import ConfigError, ModelError, ProfileError
from s2o_runtime.huggingface.layers import (
    STATE,
    Beyond,
    LayerState,
    attach,
    no_config,
    other_state,
    states_of,
    was_detached,
)
from s2o_runtime.huggingface.ranks import heads_here
from s2o_runtime.identity import (
    attention_modules,
    decoder_attention,
    fingerprint,
    fingerprint_mismatch,
    geometry,
    offloaded,
)
from s2o_runtime.monitor.drift import DriftChoice, allowed_errors
from s2o_runtime.profile import Profile, load_profile

VARIABLE = "S2O_PROFILE"
BEYOND = "S2O_BEYOND"
DRIFT = "S2O_DRIFT"
STARTED = "S2O_STARTED"  # the id of the process that `s2o-run` became
SOFT_CAP = "attn_logit_softcapping"  # what transformers calls a model's bound on its attention scores

log = logging.getLogger("s2o_runtime")

adopted: list[LayerState] = []  # all layers that S2O_PROFILE was meant for, kept for a table at the very end
refused: dict[str, None] = {}  # why models stayed dense, in the order in which it was said


_read: list[Profile | None] = []  # what S2O_PROFILE names, once it was read; torch.compile can look at a list


def environment_profile() -> Profile | None:
    """What S2O_PROFILE names, read once; None if it is not set.

    Raises:
        ProfileError: it cannot be read, was made on random weights, or names no budget for the drift check that
            S2O_DRIFT asks for.
        ConfigError: S2O_BEYOND or S2O_DRIFT has a value that is not known.
    """
    if not _read:
        path = os.environ.get(VARIABLE)
        try:
            profile = load_profile(path).check_trained() if path else None
            if profile is not None:
                beyond()
                if drift() in ("warn", "dense"):
                    allowed_errors(profile)
            _read.append(profile)
        except ProfileError as error:
            raise ProfileError(f"{VARIABLE}: {error}") from error
    return _read[0]


def beyond() -> Beyond:
    """What S2O_BEYOND says; `patch`'s default if it is not set. Raises ConfigError if that is not known."""
    return cast(Beyond, _choice(BEYOND, get_args(Beyond), "dense"))


def drift() -> DriftChoice:
    """What S2O_DRIFT says; `patch`'s default if it is not set. Raises ConfigError if that is not known."""
    return cast(DriftChoice, _choice(DRIFT, get_args(DriftChoice), "auto"))


def _choice(variable: str, choices: tuple[str, ...], default: str) -> str:
    value = os.environ.get(variable) or default
    if value not in choices:
        raise ConfigError(f"{variable} {value!r} is not known: use one of {choices}")
    return value


def mismatch(config: Any, profile: Profile) -> str | None:
    """Why a model with this transformers configuration cannot have the profile, or None if it can."""
    try:
        difference = geometry(config).difference(profile.geometry)
    except (ModelError, ValueError, AttributeError) as error:  # anybody's configuration
        return str(error)
    return f"the profile of {profile.model_name} does not fit this model: it has {difference}" if difference else None


def obstacle(config: Any) -> str | None:
    """Why a model with this configuration, which could as well run SDPA, is not one for the profile; None if it is.

    SDPA does not cap scores, and a model that caps them is left as it is.
    """
    profile = environment_profile()
    if profile is None:
        return f"{VARIABLE} is not set"
    if getattr(config, SOFT_CAP, None) is not None:
        return "the model caps its attention scores"
    return mismatch(config, profile)


def say_dense(reason: str) -> None:
    """Warn once that a model stays as it is."""
    refused[reason] = None
    _warn_once(f"{VARIABLE}: {reason}; it stays dense")


def adopt(module: nn.Module, device: torch.device) -> LayerState | None:
    """The state of an attention module that has none: with it all of its model gets the profile.

    None if S2O_PROFILE is not set, the module is no decoder's attention, or it was unpatched.
    """
    profile = environment_profile()
    if profile is None or was_detached(module) or not hasattr(module, "layer_idx") or not hasattr(module, "config"):
        return None
    reason = mismatch(module.config, profile)
    if reason is not None:
        say_dense(reason)
        number = int(module.layer_idx)  # type: ignore[arg-type]
        states = {number: LayerState(number, no_config, 0, reason)}
        modules = [module]
    else:
        modules, rejected = _siblings(module, profile)
        states = {state.layer: state for state in states_of(profile, device, drift(), beyond(), rejected)}
    for member in modules:
        number = int(member.layer_idx)  # type: ignore[arg-type]
        if number not in states:
            states[number] = other_state(number, module.config)
        elif reason is None:
            states[number].heads = heads_here(member, profile.geometry.query_heads)
        attach(member, states[number])
        adopted.append(states[number])
    state: LayerState = module.__dict__[STATE]
    return state


def _siblings(module: nn.Module, profile: Profile) -> tuple[list[nn.Module], str | None]:
    """All attention modules of the model that holds this one, and why they must stay dense, if so.

    Only this module if no such model is found.

    A module does not know its model, but the garbage collector knows both. It is asked once for each model.
    """
    from transformers import PreTrainedModel

    if id(module.config) in _searched:
        return [module], None
    models: list[Any] = [
        model
        for model in gc.get_objects()
        if issubclass(type(model), PreTrainedModel) and any(each is module for each in model.modules())
    ]
    models.sort(key=lambda model: sum(1 for _ in model.modules()), reverse=True)
    for model in models:
        try:
            attention_modules(model)
        except (ModelError, ValueError, AttributeError):
            continue
        modules = [each for of_layer in decoder_attention(model).values() for each in of_layer]
        if any(each is module for each in modules):
            return [each for each in modules if STATE not in each.__dict__], _check_weights(models, profile)
    _searched.add(id(module.config))
    _warn_once(f"{VARIABLE}: the model of {type(module).__name__} was not found: its weights are not checked")
    return [module], None


_searched: set[int] = set()  # configurations (their ids) whose model was not found


def _check_weights(models: list[Any], profile: Profile) -> str | None:
    """Compare weights with the profile's, with a warning if they differ. Returns why the model must stay dense, if so.

    models: the one that was loaded, and what it consists of or is a part of.
    """
    rejected = next(filter(None, map(offloaded, models)), None)
    if rejected is not None:
        say_dense(rejected)
        return rejected
    mismatches = [fingerprint_mismatch(fingerprint(model), profile.fingerprint) for model in models]
    if None not in mismatches:
        _warn_once(
            f"{VARIABLE}: {mismatches[0]} of {profile.model_name} that the profile was calibrated on: "
            "errors and densities may differ"
        )
    return None


@lru_cache(maxsize=64)
def _warn_once(message: str) -> None:
    log.warning("%s", message)
