"""The doctor's checks of the devices and of what a profile would run on them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..command_line import BAD_INPUT, NO_RESOURCE, OK
from ..devices import decide_fit, identify, is_interpreted
from ..errors import ModelError, ProfileError, ResourceError, get_first_line
from ..fields import format_ranges, group_by_key
from ..identity import geometry
from ..layer_kinds import get_max_positions
from ..monitor.drift import read_error_limits
from ..profile import Profile, load_profile
from ..profile.record import get_list, list_certified, read_budget
from ..serving.fit import ANOTHER, COMPARED, Rank, RankProfile, Request, check_model
from .findings import Finding, Section

GIB = 1 << 30


def check_device(device: torch.device) -> list[Finding]:
    """Check the device, its memory, and whether the kernels are made for it."""
    here = identify(device)
    if here.kind == "cpu":
        advice = (
            "the kernels need an NVIDIA GPU; S2O runs in plain torch here, which shows what is skipped, not how fast"
        )
        return [Finding("device", "cpu", advice)]
    verdict = decide_fit(here, here)
    problem = () if verdict.tiles is not None else (verdict.reason, NO_RESOURCE)
    findings = [Finding("device", f"{device}: {here}", *problem)]
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        findings.append(Finding("memory", f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free"))
    if is_interpreted():
        advice = "TRITON_INTERPRET=1 runs kernels in Python, thousands of times slower: unset it"
        findings.append(Finding("interpreter", "on", advice))
    return findings


class ModelView(NamedTuple):
    """A model without its weights: `folder` has its safetensors files, if they are here; `facts` is printed too."""

    name: str
    config: Any
    folder: Path | None
    facts: Mapping[str, str] = {}


def find_model(name: str) -> ModelView:
    """Find a model by its folder or hub id. Raises ModelError, or ResourceError if transformers is not installed."""
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ResourceError(
            f"--model needs transformers ({error}): in the clone, pip install '.[calibrate]'"
        ) from error
    folder = Path(name) if Path(name).is_dir() else None
    if folder is None and (name.count("/") != 1 or name.startswith(("/", ".", "~"))):
        raise ModelError(
            f"model {name!r} is neither a folder nor a hub id (org/name): give one, or an alias such as demo to "
            "s2o-doctor"
        )
    try:
        return ModelView(name, AutoConfig.from_pretrained(name), folder)
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(
            f"model {name!r} cannot be loaded ({get_first_line(error)}): give a local folder or a hub id"
        ) from error


def describe_model(view: ModelView) -> Section:
    """Describe the layers that S2O serves in a model, by its configuration."""
    try:
        shape = geometry(view.config)
    except ModelError as error:
        return Section("model", [Finding("model", view.name, str(error), BAD_INPUT)])
    facts = {"model": f"{view.name}: {shape}", "positions": f"{get_max_positions(view.config)} tokens", **view.facts}
    return Section("model", [Finding(name, value) for name, value in facts.items()])


def describe_profile(path: Path, device: torch.device, view: ModelView | None) -> Section:
    """Describe a profile, its proof, and what it would run on a device with a model, if one is known.

    Raises:
        ProfileError: the file cannot be read.
    """
    profile = load_profile(path)
    verdict = decide_fit(profile.device, identify(device))
    if verdict.tiles == "profile":
        made_on = Finding("made on", f"{profile.device}; {verdict.reason}")
    else:
        made_on = Finding("made on", str(profile.device), verdict.reason, OK if verdict.tiles else NO_RESOURCE)
    lengths = ", ".join(map(str, profile.lengths))
    findings = [
        Finding("profile", f"{path}: {profile.model_name} ({profile.geometry}), calibrated at {lengths} tokens"),
        made_on,
        *_check_proof(profile),
    ]
    if view is not None:
        findings.append(_match_model(profile, view))
    on_device = RankProfile(profile, Rank(), device)
    runs = {length: list_outcomes(on_device, length) for length in profile.lengths}
    findings += [Finding(f"{length} tokens", describe_outcomes(layers)) for length, layers in runs.items()]
    dense = (
        f"decode, prompts of fewer than {profile.min_length} tokens and of more than {on_device.max_length} "
        f'(unless beyond="warn" or "s2o"), fewer than {on_device.min_queries} new tokens behind a prefix, layers of '
        "other kinds, masks that are not causal"
    )
    data = {"lengths": [{"length": length, "layers": layers} for length, layers in runs.items()]}
    if profile.reads == "answers":
        dense += ", what reads more than a prompt's last rows (logits of all, a loss, hidden states, prompt logprobs)"
        findings.append(
            Finding("last layer", "in a server, only rows that are read, unless a draft or a scale needs all")
        )
    return Section("profile", [*findings, Finding("dense too", dense)], data)


def list_outcomes(on_device: RankProfile, length: int) -> list[dict[str, Any]]:
    """Return each layer of a profile with its path for a whole prompt of `length` tokens, and the reason for dense."""
    reasons = {layer.layer: on_device.dense_reason(Request(length, length), layer) for layer in on_device.layers}
    return [
        {"layer": layer, "path": "s2o" if reason is None else "dense", "reason": reason}
        for layer, reason in reasons.items()
    ]


def describe_outcomes(outcomes: list[dict[str, Any]]) -> str:
    """Return in words which layers run S2O, and which run dense and why."""
    by_reason = group_by_key((outcome["reason"], outcome["layer"]) for outcome in outcomes)
    sparse = by_reason.pop(None, [])
    numbers = f" ({format_ranges(sparse)})" if by_reason and sparse else ""
    dense = [f"dense: {format_ranges(layers)}, because {reason}" for reason, layers in by_reason.items()]
    return "; ".join([f"{len(sparse)} of {len(outcomes)} layers run S2O{numbers}", *dense])


def _check_proof(profile: Profile) -> list[Finding]:
    """Check what the record says was proven, and whether errors can be checked against it."""
    record, findings = profile.record, []
    try:
        profile.check_trained()
    except ProfileError as error:
        findings.append(Finding("weights", "random", str(error), BAD_INPUT))
    text, budget, proof = "no budget is recorded", read_budget(record), record.get("proof")
    if budget.value is not None:
        ceiling = "" if budget.ceiling is None else f" and rel_mse {budget.ceiling:g}"
        where = "at the rows that answer" if profile.reads == "answers" else "for every layer"
        text = f"{budget.kind} {budget.value:g}{ceiling} {where}"
    text += f", {proof if isinstance(proof, str) else 'not proven'}"
    counts = ", ".join(f"{row.get('prompts')} prompts of {row.get('length')} tokens" for row in list_certified(record))
    advice = "" if counts else "nothing is certified: s2o-calibrate certifies by default"
    findings.append(Finding("proof", f"{text}; certified on {counts}" if counts else text, advice))
    findings += [Finding("not proven", problem, "see the report") for problem in get_list(record, "problems", str)]
    try:
        read_error_limits(profile)
        findings.append(Finding("drift check", "on: the record says what errors are allowed"))
    except ProfileError as error:
        findings.append(Finding("drift check", "off", str(error)))
    return findings


def _match_model(profile: Profile, view: ModelView) -> Finding:
    try:
        compared = check_model(profile, view.config, view.folder, (ANOTHER,))
    except ProfileError as error:
        return Finding("model", view.name, str(error), BAD_INPUT)
    if compared.startswith(COMPARED):
        return Finding("model", f"{view.name} is the profile's: {compared}", profile.config_unknown or "")
    return Finding("model", f"{view.name} has the profile's sizes", compared)
