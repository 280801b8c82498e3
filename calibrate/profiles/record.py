"""Parts of a record: budgets and predictions, as a calibration and another budget of it write them."""

from __future__ import annotations

from dataclasses import replace

from calibrate.recipe import Recipe
from calibrate.search.choice import Choice
from s2o_runtime.profile.record import PredictedLayer, RecordedBudget


def budget_of(recipe: Recipe) -> RecordedBudget:
    """The budget of a recipe, and what it holds for."""
    budget = recipe.budget
    return RecordedBudget.from_json({"kind": budget.kind, "value": budget.value, "scope": recipe.scope})


def predicted_layer(choice: Choice) -> PredictedLayer:
    """What the curves say of a layer's choice, and its times where it was timed."""
    predicted = choice.allocation.record()
    if choice.timing is None:
        return predicted
    return replace(predicted, seconds=choice.seconds, dense_seconds=choice.timing.dense_seconds)
