"""The doctor's checks of the devices and of what a profile would run on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from s2o_runtime.command_line import BAD_INPUT, NO_RESOURCE, OK
from s2o_runtime.devices import fit, identify, interpreted
from s2o_runtime.doctor.findings import Finding, Section
from s2o_runtime.errors import ModelError, ProfileError, ResourceError
from s2o_runtime.identity import geometry
from s2o_runtime.layer_kinds import positions
from s2o_runtime.monitor.drift import error_limits
from s2o_runtime.profile import Profile, load_profile
from s2o_runtime.profile.record import get_list, list_certified, read_budget
from s2o_runtime.serving.fit import ANOTHER, COMPARED, ProfileFit, Rank, check_model

GIB = 1 << 30


def device_findings(device: torch.device) -> list[Finding]:
    """The device, its memory, and whether the kernels are made for it."""
    here = identify(device)
    if here.kind == "cpu":
        advice = (
            "the kernels need an NVIDIA GPU; S2O runs in plain torch here, which shows what is skipped, not how fast"
        )
        return [Finding("device", "cpu", advice)]
    verdict = fit(here, here)
    is_served = verdict.tiles is not None
    findings = [Finding("device", f"{device}: {here}", *(() if is_served else (verdict.reason, NO_RESOURCE)))]
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        findings.append(Finding("memory", f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free"))
    if interpreted():
        findings.append(
            Finding(
                "interpreter", "on", "TRITON_INTERPRET=1 runs kernels in Python, thousands of times slower: unset it"
            )
        )
    return findings


@dataclass(frozen=True)
class ModelView:
    """What is known of a model without its weights.

    Attributes:
        name: as the user gave it.
        config: its transformers configuration.
        folder: of its safetensors files; None where they are not on this machine.
        facts: what is to be said of it besides, by name.
    """

    name: str
    config: Any
    folder: Path | None
    facts: Mapping[str, str] = field(default_factory=dict)


class Outcome(NamedTuple):
    """What one layer runs for a whole prompt of one length: path is "s2o" or "dense", with the reason for dense."""

    layer: int
    path: str
    reason: str | None


def model_view(name: str) -> ModelView:
    """A model by its folder or hub id.

    Raises:
        ModelError: transformers cannot load its configuration.
        ResourceError: transformers is not installed.
    """
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ResourceError(
            f"--model needs transformers ({error}): in the clone, pip install '.[calibrate]'"
        ) from error
    if not Path(name).is_dir() and (name.count("/") != 1 or name.startswith(("/", ".", "~"))):
        raise ModelError(
            f"model {name!r} is neither a folder nor a hub id (org/name): give one, or an alias such as demo to "
            "s2o-doctor"
        )
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"model {name!r} cannot be loaded ({reason}): give a local folder or a hub id") from error
    return ModelView(name, config, Path(name) if Path(name).is_dir() else None)


def model_section(view: ModelView) -> Section:
    """The layers that S2O serves in a model, by its configuration."""
    try:
        shape = geometry(view.config)
    except ModelError as error:
        return Section("model", [Finding("model", view.name, str(error), BAD_INPUT)])
    limit = positions(view.config)
    findings = [Finding("model", f"{view.name}: {shape}"), Finding("positions", f"{limit} tokens")]
    return Section("model", [*findings, *(Finding(name, value) for name, value in view.facts.items())])


def profile_section(path: Path, device: torch.device, view: ModelView | None) -> Section:
    """What a profile would run on a device.

    Args:
        path: of the profile.
        device: where the model would run.
        view: the model that it would run with; None if that is not known.

    Raises:
        ProfileError: the file cannot be read.
    """
    profile = load_profile(path)
    made_on, here = profile.device, identify(device)
    verdict = fit(made_on, here)
    here_finding = Finding("made on", f"{made_on}; {verdict.reason}")
    if verdict.tiles != "profile":
        here_finding = Finding("made on", str(made_on), verdict.reason, OK if verdict.tiles else NO_RESOURCE)
    lengths = ", ".join(map(str, profile.lengths))
    findings = [
        Finding("profile", f"{path}: {profile.model_name} ({profile.geometry}), calibrated at {lengths} tokens"),
        here_finding,
        *_proof_findings(profile),
        _drift_finding(profile),
    ]
    if view is not None:
        findings.append(_match_finding(profile, view))
    on_device = ProfileFit(profile, Rank(), device)
    runs = {length: outcomes(on_device, length) for length in profile.lengths}
    findings += [Finding(f"{length} tokens", in_words(layers)) for length, layers in runs.items()]
    findings.append(
        Finding(
            "dense too",
            f"decode, prompts of fewer than {profile.min_length} tokens and of more than {on_device.max_length} "
            '(unless beyond="warn" or "s2o"), fewer than '
            f"{on_device.min_queries} new tokens behind a prefix, layers of other kinds, masks that are not causal",
        )
    )
    data = {"lengths": [{"length": n, "layers": [layer._asdict() for layer in layers]} for n, layers in runs.items()]}
    return Section("profile", findings, data)


def outcomes(on_device: ProfileFit, length: int) -> list[Outcome]:
    """What each layer of a profile runs for a whole prompt of `length` tokens."""
    reasons = ((layer.layer, layer.why_dense(length, length)) for layer in on_device.layers)
    return [Outcome(number, "s2o" if reason is None else "dense", reason) for number, reason in reasons]


def in_words(layers: list[Outcome]) -> str:
    """Which layers run S2O, and which run dense and why."""
    by_reason: dict[str | None, list[int]] = {}
    for outcome in layers:
        by_reason.setdefault(outcome.reason, []).append(outcome.layer)
    sparse = by_reason.pop(None, [])
    parts = [f"{len(sparse)} of {len(layers)} layers run S2O{f' ({ranges(sparse)})' if by_reason and sparse else ''}"]
    parts += [f"dense: {ranges(numbers)}, because {reason}" for reason, numbers in by_reason.items()]
    return "; ".join(parts)


def ranges(numbers: list[int]) -> str:
    """Ascending numbers in words: "0 to 3, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _proof_findings(profile: Profile) -> list[Finding]:
    record, allowed = profile.record, read_budget(profile.record)
    budget = "no budget is recorded"
    if allowed.value is not None:
        beside = "" if allowed.ceiling is None else f" and rel_mse {allowed.ceiling:g}"
        budget = f"{allowed.kind} {allowed.value:g}{beside} for every {allowed.scope or 'layer'}"
    findings = []
    try:
        profile.check_trained()
    except ProfileError as error:
        findings.append(Finding("weights", "random", str(error), BAD_INPUT))
    counts = ", ".join(f"{row.get('prompts')} prompts of {row.get('length')} tokens" for row in list_certified(record))
    certified = f"; certified on {counts}" if counts else ""
    advice = "" if certified else "nothing is certified: s2o-calibrate certifies by default"
    proof = record.get("proof")
    shown = proof if isinstance(proof, str) else "not proven"
    findings.append(Finding("proof", f"{budget}, {shown}{certified}", advice))
    findings += [Finding("not proven", sentence, "see the report") for sentence in get_list(record, "problems", str)]
    return findings


def _drift_finding(profile: Profile) -> Finding:
    try:
        error_limits(profile)
    except ProfileError as error:
        return Finding("drift check", "off", str(error))
    return Finding("drift check", "on: the record says what errors are allowed")


def _match_finding(profile: Profile, view: ModelView) -> Finding:
    try:
        compared = check_model(profile, view.config, view.folder, (ANOTHER,))
    except ProfileError as error:
        return Finding("model", view.name, str(error), BAD_INPUT)
    if compared.startswith(COMPARED):
        return Finding("model", f"{view.name} is the profile's: {compared}", profile.config_unknown or "")
    return Finding("model", f"{view.name} has the profile's sizes", compared)
