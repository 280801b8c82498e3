"""The plan of a calibration in words, shown before it starts."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

import torch

from calibrate.model.estimate import GIB, Estimate
from calibrate.model.models import find_shipped_config, in_full
from calibrate.model.preflight import Preflight
from calibrate.progress import format_duration
from calibrate.recipe import OPTIONS, WORKERS, Recipe
from s2o_runtime.devices import DeviceIdentity

FIRST = ("model", "takes", "memory", "runs on", "budget", "lengths", "layers", "out")  # without --verbose
NOT_WORTH_SAYING = 0.05  # of a run's time: a phase that takes less is not named


def list_options(recipe: Recipe) -> dict[str, str]:
    """Return every option that a run uses in words, by its label."""
    return {
        option.label: option.line(recipe)
        for option in OPTIONS.values()
        if option.group != WORKERS or recipe.is_distributed  # without workers they do nothing
    }


def plan(
    recipe: Recipe,
    preflight: Preflight,
    estimate: Estimate,
    device: DeviceIdentity,
    given: frozenset[str],
    *,
    rehearsed: bool = False,
    prompts: str = "",
) -> dict[str, str]:
    """Describe what a run is going to do: a line for each option, and what follows from the model and the device.

    Args:
        recipe, given: what is run on `device`, and the options that the user gave, which are marked.
        rehearsed: whether nothing is going to run, so that an alias has the sizes that ship.
        prompts: how many prompts there are, if they were counted.

    Returns:
        The lines' texts by their names, those of `FIRST` before the others.
    """
    given_labels = {OPTIONS[name].label for name in given}
    lines = list_options(recipe) | {"model": in_full(recipe.model)}
    lines["prompts"] += f"; {prompts}" if prompts else ""
    lines = {label: line + (" (given)" if label in given_labels else "") for label, line in lines.items()}
    longer = (name for name, seconds in estimate.seconds.items() if seconds >= NOT_WORTH_SAYING * estimate.total)
    phases = ", ".join(f"{name} {format_duration(estimate.seconds[name])}" for name in longer)
    shares = ", ".join(f"{share:.0%} at {length}" for length, share in preflight.shares.items())
    derived = {
        "architecture": str(preflight.geometry),
        "layers": preflight.layers,
        "attention in them": f"{shares} tokens",
        "loaded": preflight.loading,
        "runs on": str(device),
        "takes": f"about {format_duration(estimate.total)} ({phases}), less what the journal has",
        "memory": _format_memory(estimate, device),
        "objective": "measured latency" if recipe.device.startswith("cuda") else "predicted latency (no GPU)",
    }
    if (rehearsed or recipe.random_weights) and find_shipped_config(recipe.model):
        asked = "" if recipe.prompts else "; nothing was asked of the Hub"
        derived = {"sizes": f"sizes of the alias, as they ship{asked}"} | derived
    lines = derived | lines
    return {name: lines[name] for name in dict.fromkeys((*FIRST, *lines)) if name in lines}


def select_lines(lines: Mapping[str, str], given: Collection[str]) -> dict[str, str]:
    """Return the lines of a plan that a user needs first, and those of the options that were given."""
    shown = {*FIRST, *(OPTIONS[name].label for name in given)}
    return {name: line for name, line in lines.items() if name in shown}


def describe_load(device: DeviceIdentity) -> dict[str, str]:
    """Return a line that says what to do where others use the cores of a CPU that a run is for; else nothing."""
    cores, threads, load = os.cpu_count() or 1, torch.get_num_threads(), os.getloadavg()[0]
    if device.kind != "cpu" or load + threads < cores + 1:
        return {}
    advice = "set OMP_NUM_THREADS=1, because threads wait for one another" if threads > 1 else "it takes longer"
    return {"busy": f"{cores} cores have a load of {load:.1f}: {advice}"}


def _format_memory(estimate: Estimate, device: DeviceIdentity) -> str:
    """Return the memory of the device that the run needs, and what it has."""
    needed = f"about {estimate.memory / GIB:.2g} GiB"
    if device.kind != "cuda":
        return needed
    if not device.memory_bytes:
        return f"{needed} of each GPU"
    line = f"{needed} of the GPU's {device.memory_bytes / GIB:.0f}"
    too_much = estimate.memory > device.memory_bytes
    return f"{line}, which is too little: use shorter --lengths or a lower --num-certify" if too_much else line
