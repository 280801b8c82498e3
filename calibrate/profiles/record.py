"""Parts of a record: budgets and predictions, as a calibration and another budget of it write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from calibrate.recipe import Recipe
from calibrate.search.choice import Choice
from s2o_runtime.profile.record import PredictedLayer, RecordedBudget


def budget_of(recipe: Recipe) -> RecordedBudget:
    """The budget of a recipe, and what it holds for."""
    return RecordedBudget.from_json(recipe.budget.as_json() | {"scope": recipe.scope})


def predicted_layers(choices: Sequence[Choice]) -> tuple[PredictedLayer, ...]:
    """What the curves say of the choices of all layers at one length, and their times where they were timed."""
    return tuple(_predicted_layer(choice, len(choices)) for choice in choices)


def _predicted_layer(choice: Choice, layers: int) -> PredictedLayer:
    predicted = choice.allocation.record()
    if choice.weights.heads is not None:  # a budget in KL, where layers' weights are for a mean over them
        predicted = replace(predicted, sensitivity=choice.weights.layer / layers)
    if choice.timing is None:
        return predicted
    return replace(predicted, seconds=choice.seconds, dense_seconds=choice.timing.dense_seconds)
