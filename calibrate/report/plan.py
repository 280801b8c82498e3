"""What a calibration is going to do, in words: shown before it starts."""

from __future__ import annotations

from calibrate.model.foresight import Outlook
from calibrate.recipe import OPTIONS, WORKERS, Recipe


def option_lines(recipe: Recipe) -> dict[str, str]:
    """Every option that a run uses in words, by its label."""
    return {
        option.label: option.line(recipe)
        for option in OPTIONS.values()
        if option.group != WORKERS or recipe.is_distributed  # without workers they do nothing
    }


def plan(recipe: Recipe, outlook: Outlook, device: str, given: frozenset[str]) -> dict[str, str]:
    """What a run is going to do: a line for each option, and what follows from the model and the device.

    Args:
        recipe: what is run.
        outlook: what is known of the model before its weights are.
        device: the device that the recipe names, in words.
        given: the options that the user gave; the others are marked as defaults.

    Returns:
        The lines' texts by their names.
    """
    given_labels = {OPTIONS[name].label for name in given}
    lines = {
        label: line + ("" if label in given_labels else " (default)") for label, line in option_lines(recipe).items()
    }
    derived = {
        "architecture": str(outlook.geometry),
        "layers": outlook.layers,
        "attention in them": ", ".join(f"{share:.0%} at {length}" for length, share in outlook.shares.items())
        + " tokens",
        "loaded": outlook.loading,
        "runs on": device,
        "objective": "measured latency" if recipe.device.startswith("cuda") else "predicted latency (no GPU)",
    }
    return {"model": lines["model"]} | derived | lines
