"""Another budget for a calibrated model, from the curves its calibration measured: no model, no prompts, seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from calibrate.curves.curves import Curves
from calibrate.profiles.stored import StoredCurves, calibrate_command, recipe_of, stored_curves
from calibrate.recipe import Budget, Recipe
from calibrate.record import PredictedLength, update_record
from calibrate.search.allocate import ErrorWeights
from calibrate.search.choice import (
    Choice,
    ChosenDense,
    SearchPoint,
    allocate_model_budget,
    budget_mse,
    choice_at,
    predicted_kl,
    weights_of,
)
from s2o_runtime.config import LayerConfig
from s2o_runtime.errors import InputError
from s2o_runtime.profile import Profile, load_profile, save_profile

WINS = 0.9  # of dense attention's time: a layer predicted below this does win, although nothing is timed here
UNPROVEN = (
    "predicted from stored curves and not proven on held-out prompts: run s2o-calibrate with this budget to prove it"
)


def rebudget(
    profile: Path, budget: Budget, out: Path, journal: Path | None = None, worst_rows: float | None = None
) -> Profile:
    """Write `profile` with another budget to `out`.

    Every layer keeps its segment, grain and tile; its heads' thresholds, representatives and tails are allocated
    anew. A layer that was dense takes part if its budget grew and it is predicted to win clearly (`WINS`). Lengths
    without curves of their own, where the old proof had to tighten a layer, are left out.

    A budget in KL needs the sensitivities that an earlier calibration with such a budget left in the journal. If the
    profile is of one, what it was found to spend for its KL says how much to spend for the new one.

    Args:
        profile: the file of a calibrated profile.
        budget: the new budget.
        out: the file to write.
        journal: the measurements; None is where a calibration leaves them, beside the profile.
        worst_rows: another guard on single rows, 0 for none; None keeps the old one.

    Returns:
        The profile that was written; its record says what every length is predicted to do.

    Raises:
        ProfileError: the profile cannot be read.
        InputError: the profile does not say how it was made, or the journal is missing, is of another model or device,
            or lacks the curves of a layer, or for a budget in KL the sensitivities.
    """
    old = load_profile(profile)
    before = recipe_of(old, profile)
    guard = before.worst_rows if worst_rows is None else worst_rows
    after = replace(before.with_budget(budget), out=out, worst_rows=guard).validate()
    journal = journal or before.journal_path
    stored = stored_curves(old, before, journal, calibrate_command(after))
    if budget.is_kl and stored.sensitivity is None:
        raise InputError(
            f"journal {journal} has no sensitivities of the layers, which a budget in KL needs: measure them with "
            f"{calibrate_command(after)}"
        )
    choices = {length: _choose_layers(stored, length, after, journal) for length in after.lengths}
    predicted = tuple(
        PredictedLength(
            length=length,
            kl=predicted_kl(layers) if budget.is_kl else None,
            layers=tuple(choice.predicted(len(layers)) for choice in layers),
        )
        for length, layers in choices.items()
    )
    record = update_record(
        old,
        budget=after.recorded_budget,
        recipe=after.record(),
        proof="none",
        problems=(UNPROVEN,),
        predicted=predicted,
        held_out=(),
        certificate=None,
        not_proven=None,
    )
    configs = tuple(tuple(choice.config for choice in layers) for layers in choices.values())
    new = replace(old, lengths=after.lengths, layers=configs, record=record)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_profile(new, out)
    return new


def _choose_layers(stored: StoredCurves, length: int, after: Recipe, journal: Path) -> list[Choice]:
    """Return every layer at one length with the new budget spent. Raises InputError if a layer has no curves."""
    old, before = stored.profile, stored.recipe
    predicted = stored.record.find_predicted(length)
    layers, isolated = old.geometry.layers, (predicted and predicted.layers) or ()
    choices = []
    for layer, config in enumerate(old.layers[old.lengths.index(length)]):
        curves = stored.find_curves(layer, length)
        if not curves:
            raise InputError(
                f"journal {journal} lacks the curves of layer {layer} at {length} tokens for tile {config.tile}: "
                f"measure them with {calibrate_command(after)}"
            )
        weights = weights_of(curves, after, stored.sensitivity[layer] if stored.sensitivity else None, layers)
        measured = isolated[layer].sensitivity if isolated else None
        if after.budget.is_kl and measured:  # a KL after a KL: the old calibration measured the layer by itself
            weights = replace(weights, layer=measured * layers)
        choice = _apply_budget(curves, config, before, after, weights)
        choices.append(replace(choice, last_rows=after.last_rows_at(length)))
    if after.scope == "model":
        choices, _ = allocate_model_budget(choices, after, _scale_budget(stored, length, after))
    return choices


def _scale_budget(stored: StoredCurves, length: int, after: Recipe) -> float:
    """Return the share of a budget to spend: of a KL after a KL, by what the old KL was found to be over its
    prediction."""
    predicted, proven = stored.record.find_predicted(length), stored.record.find_proven(length)
    if not after.budget.is_kl or predicted is None or proven is None or not predicted.kl or not proven.kl:
        return 1.0
    return predicted.kl / proven.kl


def _apply_budget(curves: Curves, config: LayerConfig, before: Recipe, after: Recipe, weights: ErrorWeights) -> Choice:
    """Return a layer as it was in segment, grain and tile, with its new budget spent."""
    budget = budget_mse(weights, after)
    choice = choice_at(SearchPoint(config.segment, config.grain, config.tile, config.scores), curves, after, weights)
    if choice.config.is_dense:
        return choice if choice.why_dense else choice.as_dense(ChosenDense.NO_GAIN)
    comparable = not (before.budget.is_kl or after.budget.is_kl)  # a layer's part of a KL says nothing by itself
    if config.is_dense and comparable and budget <= budget_mse(weights_of(curves, before), before):
        return choice.as_dense(ChosenDense.WAS_DENSE)
    if config.is_dense and choice.cost >= WINS:
        return choice.as_dense(ChosenDense.NO_CLEAR_GAIN)
    return choice
