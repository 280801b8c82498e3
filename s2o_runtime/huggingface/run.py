"""Run programs that cannot be edited: s2o-run, S2O_PROFILE and what else the environment says."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import nn

from ..command_line import BAD_INPUT, Parser, add_information, call_command, describe_exit_codes
from ..errors import InputError, ModelError, ProfileError
from ..fields import Rule
from ..identity import (
    explain_mismatch,
    find_decoder_attention,
    find_offloaded,
    fingerprint,
    geometry,
    list_attention_modules,
)
from ..logs import log_once
from ..monitor.drift import DriftChoice, read_error_limits
from ..profile import Profile, load_profile
from ..profile.find import (
    FOLDERS_VARIABLE,
    OFF,
    PROFILE_VARIABLE,
    STARTED_IN,
    FoundProfile,
    explain_no_match,
    find_profiles,
    find_source_folder,
    list_named_folders,
    read_named,
    select_profile,
)
from .layers import (
    DENSE,
    STATE,
    LayerState,
    LongPromptPolicy,
    attach,
    check_policy,
    is_detached,
    make_states,
    pair_states,
    refuse_config,
)

BEYOND = "S2O_BEYOND"
DRIFT = "S2O_DRIFT"
STARTED = "S2O_STARTED"  # the id of the process that `s2o-run` became
NO_MODEL = "the model that the layers belong to was not found"
SOFT_CAP = "attn_logit_softcapping"  # what transformers calls a model's bound on its attention scores

log = logging.getLogger("s2o_runtime")

attached: list[LayerState] = []  # of all layers that a profile was meant for, for the summary at exit
refused: dict[str, None] = {}  # why models stayed dense, in the order in which it was said


# The profile that S2O_PROFILE names; without one, as in a program that `s2o-run` started, whether one is searched for.
Available = tuple[Profile | None, bool]
_read: list[Available] = []  # what `read_available` returns; torch.compile can look at a list
_candidates: dict[str, tuple[FoundProfile, ...]] = {}  # the profiles that models may get, by the models' names


def read_available(search: bool = False) -> Available:
    """Return what the models of this process may get, read once.

    search: look for profiles where S2O_PROFILE names none, as in a program that s2o-run started.

    Raises:
        ProfileError: the named profile cannot be read, was made on random weights, or names no budget for the drift
            check that S2O_DRIFT asks for.
        ConfigError: S2O_BEYOND or S2O_DRIFT has a value that is not known.
    """
    if not _read:
        read_long_prompts()
        drift = read_drift()
        path = read_named()
        if path is not None and path != OFF:
            try:
                profile = load_profile(path).check_trained()
                if drift in ("warn", "dense"):
                    read_error_limits(profile)
            except ProfileError as error:
                raise ProfileError(f"{PROFILE_VARIABLE}: {error}") from error
            _read.append((profile, False))
        else:
            _read.append((None, path is None and (search or STARTED in os.environ)))
    return _read[0]


def read_long_prompts() -> LongPromptPolicy:
    """Return what S2O_BEYOND says; `patch`'s default if it is not set. Raises ConfigError if that is not known."""
    return check_policy(os.environ.get(BEYOND) or "dense", BEYOND)


def read_drift() -> DriftChoice:
    """Return what S2O_DRIFT says; `patch`'s default if it is not set. Raises ConfigError if that is not known."""
    rule = Rule(str, allowed=get_args(DriftChoice))
    return cast(DriftChoice, rule.checked(os.environ.get(DRIFT) or "auto", DRIFT))


def find_misfit(config: Any) -> str | None:
    """Return why a model with this transformers configuration gets no profile, by its sizes alone; None if it may."""
    named = read_available()[0]
    try:
        return (
            explain_no_match(_list_candidates(config), config)
            if named is None
            else named.explain_misfit(geometry(config))
        )
    except (ModelError, ValueError, AttributeError) as error:  # anybody's configuration
        return str(error)


def find_obstacle(config: Any) -> str | None:
    """Return why a model with this configuration, which could as well run SDPA, gets no profile; None if it may."""
    if read_available() == (None, False):
        return f"{PROFILE_VARIABLE} is {OFF!r}, which refuses every profile"
    if getattr(config, SOFT_CAP, None) is not None:  # SDPA does not cap scores: the model is left as it is
        return "the model caps its attention scores"
    return find_misfit(config)


def _list_candidates(config: Any) -> tuple[FoundProfile, ...]:
    """Return the profiles that a model may get, those in its own folder among them; files are read once for a model."""
    name = str(getattr(config, "_name_or_path", ""))
    if name not in _candidates:
        if torch.compiler.is_compiling():  # a model that ran nothing eagerly has no profile
            return ()
        _candidates[name] = tuple(find_profiles(find_source_folder(config)))
    return _candidates[name]


def warn_dense(reason: str) -> None:
    """Warn once that a model stays as it is."""
    refused[reason] = None
    speaker = "" if read_available()[0] is None else f"{PROFILE_VARIABLE}: "
    log_once(logging.WARNING, f"{speaker}%s; it stays dense", reason)


def attach_profile(module: nn.Module, device: torch.device) -> LayerState | None:
    """Give the model of an attention module that has no state a profile, and return the module's state.

    None if there is no profile, the module is no decoder's attention, or it was unpatched.
    """
    is_attention = hasattr(module, "layer_idx") and hasattr(module, "config")
    if read_available() == (None, False) or is_detached(module) or not is_attention:
        return None
    modules, states, query_heads, reason = [module], list[LayerState](), None, find_misfit(module.config)
    if reason is None:
        modules, models = _find_siblings(module)
        try:
            profile, rejected = _choose_profile(models, module.config, device)
            states = make_states(profile, device, read_drift(), read_long_prompts(), rejected)
            query_heads = profile.geometry.query_heads
        except ProfileError as error:
            reason = str(error)
    if reason is not None:
        warn_dense(reason)
        numbers: set[Any] = {member.layer_idx for member in modules}
        states = [LayerState(number, refuse_config, 0, reason, source=DENSE) for number in numbers]
    for member, state in pair_states(modules, states, module.config, query_heads):
        attach(member, state)
        attached.append(state)
    own: LayerState = module.__dict__[STATE]
    return own


def _find_siblings(module: nn.Module) -> tuple[list[nn.Module], list[Any]]:
    """Find all attention modules of the model that holds this one, and the models, from the loaded one on, around them.

    If no model is found, it is only this module.
    """
    # a module does not know its model, but the garbage collector knows both; it is asked once for each model
    from transformers import PreTrainedModel

    if id(module.config) in _searched:
        return [module], []
    models: list[Any] = [
        model
        for model in gc.get_objects()
        if issubclass(type(model), PreTrainedModel) and any(attention is module for attention in model.modules())
    ]
    models.sort(key=lambda model: sum(1 for _ in model.modules()), reverse=True)
    for model in models:
        try:
            list_attention_modules(model)
        except (ModelError, ValueError, AttributeError):
            continue
        modules = [attention for layer_modules in find_decoder_attention(model).values() for attention in layer_modules]
        if any(attention is module for attention in modules):
            return [attention for attention in modules if STATE not in attention.__dict__], models
    _searched.add(id(module.config))
    return [module], []


_searched: set[int] = set()  # configurations (their ids) whose model was not found


def _choose_profile(models: list[Any], config: Any, device: torch.device) -> tuple[Profile, str | None]:
    """Return the profile that a model of a fitting geometry gets, and why it must stay dense with it, if so.

    Other weights than those of the profile that S2O_PROFILE names are a warning. Raises ProfileError if none fits.
    """
    profile = read_available()[0]
    if profile is None:
        candidates = _list_candidates(config)
        match = select_profile(candidates, config, device, lambda one: find_weights_mismatch(models, one))
        log.info("S2O takes the profile %s", match)
        return match.profile, None
    rejected = next(filter(None, map(find_offloaded, models)), None)
    if rejected is not None:
        warn_dense(rejected)
    elif not models:
        log_once(logging.WARNING, f"{PROFILE_VARIABLE}: {NO_MODEL}: its weights are not checked")
    elif mismatch := find_weights_mismatch(models, profile):
        consequence = "that the profile was calibrated on: errors and densities may differ"
        log_once(logging.WARNING, f"{PROFILE_VARIABLE}: %s {consequence}", mismatch)
    return profile, rejected


def find_weights_mismatch(models: list[Any], profile: Profile) -> str | None:
    """Return how the function of models, the loaded one and its parts, differs from a profile's; None if it does not.

    Where that is not known, the reason why.
    """
    if not models:
        return NO_MODEL
    if rejected := next(filter(None, map(find_offloaded, models)), None):
        return rejected
    mismatches = [explain_mismatch(fingerprint(model), profile.fingerprint) for model in models]
    return None if None in mismatches else f"{mismatches[0]} of {profile.model_name}"


PROGRAM = "s2o-run"
SITE = Path(__file__).parent / "site"
DESCRIPTION = """\
Run COMMAND so that the transformers models which it starts in Python with SDPA attention, the default, run S2O where
the profile fits them. Other models, and all that S2O is not for, run as without s2o-run.
"""
_OWN_CODES = describe_exit_codes(BAD_INPUT).removeprefix("Exit codes: ")
EPILOG = f"The exit code is the command's. If it is not started: {_OWN_CODES}"
EXAMPLES = (
    ("Run a program with a profile", "--profile p.safetensors python answer.py"),
    ("See what ran and why", "--profile p.safetensors --explain python answer.py"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Become the command; return an exit code only if there is no profile that can be used, or no such command."""
    args = build_parser().parse_args(arguments)
    return call_command(PROGRAM, lambda: _execute(args))


def build_parser() -> Parser:
    """Return the parser of the flags before the command, and of the command with its own."""
    out = Parser(PROGRAM, description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False, examples=EXAMPLES)
    out.add_argument(
        "--profile",
        metavar="FILE",
        help="default: what the environment variable S2O_PROFILE names (off: none), or for each model the one that is "
        "found in the folders of S2O_PROFILES, in s2o/ of the model's folder, in profiles/ or in S2O's catalogue",
    )
    out.add_argument(
        "--beyond",
        choices=("dense", "warn", "s2o"),
        help="what prompts of more than 1.5 times the longest calibrated length run; default: S2O_BEYOND, or dense",
    )
    out.add_argument(
        "--drift",
        choices=("auto", "off", "warn", "dense"),
        help="what happens when a layer's sampled errors are past what the profile allows; default: S2O_DRIFT, or "
        "auto: warn if the profile says what it allows",
    )
    out.add_argument("--explain", action="store_true", help="print what every layer did when a process ends")
    add_information(out)
    out.add_argument("command", metavar="COMMAND", help="such as python, or a script that is one")
    out.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="the command's own")
    return out


def _execute(args: argparse.Namespace) -> int:
    flags = {"S2O_PROFILE": args.profile, "S2O_BEYOND": args.beyond, "S2O_DRIFT": args.drift}
    os.environ.update({variable: value for variable, value in flags.items() if value is not None})
    try:
        read_available()
    except ProfileError as error:
        if args.profile is None:
            raise
        raise ProfileError(f"--profile: {error.__cause__}") from error
    folders = os.pathsep.join(map(os.path.abspath, list_named_folders()))
    environment = dict(os.environ)
    environment |= {FOLDERS_VARIABLE: folders, STARTED_IN: os.getcwd()}  # the program may go elsewhere
    if (path := read_named()) is not None and path != OFF:
        environment[PROFILE_VARIABLE] = os.path.abspath(path)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH"))))
    environment[STARTED] = str(os.getpid())  # which the command keeps
    if args.explain:
        environment["S2O_EXPLAIN"] = "1"
    try:
        os.execvpe(args.command, [args.command, *args.arguments], environment)
    except OSError as error:
        raise InputError(f"{args.command} cannot be run ({error.strerror}): check the command") from error


if __name__ == "__main__":
    sys.exit(main())
