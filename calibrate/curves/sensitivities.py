"""What the errors of layers and heads cost in KL: measured once for a calibration, and kept in its journal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from calibrate.journal import Journal
from calibrate.model.models import LoadedModel
from calibrate.model.sensitivity import Sensitivity, sensitivity
from calibrate.prompts.prompt import Prompt
from calibrate.recipe import Recipe

KIND = "sensitivity"  # of entries in the journal
PROMPTS = 4  # one of each kind of the built-in text; single prompts differ by a factor of two to three
TOKENS = 2048  # of each, its first ones: a backward pass needs memory


def measured_sensitivity(
    loaded: LoadedModel, prompts: Mapping[int, Sequence[Prompt]], recipe: Recipe, journal: Journal
) -> Sensitivity:
    """The sensitivity of every layer and head, from the journal if it is there.

    Args:
        loaded: The model.
        prompts: Calibration prompts by length. Those of the longest length of at most `TOKENS` are used, or the
            beginnings of the shortest ones.
        recipe: Says the seed.
        journal: Where it is kept.

    Raises:
        ModelError: inf or NaN came up in the model.
        ResourceError: The GPU's memory ran out, or the journal cannot be written.
    """
    length = max((length for length in prompts if length <= TOKENS), default=min(prompts))
    of_length = prompts[length][:PROMPTS]
    key = {"prompts": [prompt.sha256 for prompt in of_length], "tokens": min(length, TOKENS), "seed": recipe.seed}
    cut = [prompt.ids[:TOKENS] for prompt in of_length]
    return _typed(journal.remember(KIND, key, lambda: sensitivity(loaded, cut, recipe.seed)))


def stored_sensitivity(
    entries: Sequence[tuple[Mapping[str, Any], Any]], prompts: set[str | None]
) -> Sensitivity | None:
    """The sensitivity last measured on some of these prompts; None without one.

    Args:
        entries: Of this kind in a journal.
        prompts: The hashes of the prompts that a profile was calibrated on.
    """
    for key, value in reversed(entries):
        if set(key["prompts"]) <= prompts:
            return _typed(value)
    return None


def _typed(value: Any) -> Sensitivity:
    return tuple(tuple(float(of_head) for of_head in of_layer) for of_layer in value)
