"""Another budget for a calibrated model, from the curves its calibration measured: no model, no prompts, seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from calibrate.curves.curves import Curves
from calibrate.profiles.stored import StoredCurves, calibrate_command, read_recipe, read_stored_curves
from calibrate.recipe import Budget, Recipe
from calibrate.record import PredictedLength, update_record
from calibrate.search.choice import CalibrationDense, LayerBudget, LayerPlan, SearchPoint, build_plan, warn_of_unspent
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

    Every layer keeps its segment, tile and lookback; its heads' thresholds, representatives and tails are allocated
    anew. A layer that was dense takes part if its budget grew and it is predicted to win clearly (`WINS`). Lengths
    without curves of their own, where the old proof had to tighten a layer, are left out.

    Args:
        profile, out: the file of a calibrated profile, and the file to write.
        journal: the measurements; None is where a calibration leaves them, beside the profile.
        worst_rows: another guard on single rows, 0 for none; None keeps the old one.

    Returns:
        The profile that was written; its record says what every length is predicted to do.

    Raises:
        ProfileError: the profile cannot be read.
        InputError: the profile does not say how it was made, or the journal is missing, is of another model or device,
            or lacks the curves of a layer.
    """
    old = load_profile(profile)
    before = read_recipe(old, profile)
    guard = before.worst_rows if worst_rows is None else worst_rows
    after = replace(before, budget=budget, out=out, worst_rows=guard).validate()
    if budget.kind == "kl":
        raise InputError(
            "a budget of answers is measured on the model, not predicted from curves: run "
            f"{calibrate_command(after)}, which takes the curves from the journal"
        )
    journal = journal or before.journal_path
    stored = read_stored_curves(old, before, journal, calibrate_command(after))
    choices = {length: _choose_layers(stored, length, after, journal) for length in after.lengths}
    predicted = tuple(
        PredictedLength(length=length, layers=tuple(choice.predicted() for choice in layers))
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


def _choose_layers(stored: StoredCurves, length: int, after: Recipe, journal: Path) -> list[LayerPlan]:
    """Return every layer at one length with the new budget spent. Raises InputError if a layer has no curves."""
    old, choices = stored.profile, []
    for layer, config in enumerate(old.layers[old.lengths.index(length)]):
        curves = stored.find_curves(layer, length)
        if not curves:
            raise InputError(
                f"journal {journal} lacks the curves of layer {layer} at {length} tokens for tile {config.tile}: "
                f"measure them with {calibrate_command(after)}"
            )
        choice = _apply_budget(curves, config, stored.recipe, after)
        choices.append(replace(choice, last_rows=after.count_last_rows(length)))
    warn_of_unspent(choices, length)
    return choices


def _apply_budget(curves: Curves, config: LayerConfig, before: Recipe, after: Recipe) -> LayerPlan:
    """Return a layer as it was in segment and tile, with its new budget spent."""
    budget = LayerBudget.from_recipe(curves, after)
    choice = build_plan(SearchPoint(config.segment, config.tile, config.lookback), curves, budget)
    if choice.config.is_dense:
        return choice if choice.why_dense else choice.as_dense(CalibrationDense.NO_GAIN)
    if config.is_dense and budget.mse <= LayerBudget.from_recipe(curves, before).mse:
        return choice.as_dense(CalibrationDense.WAS_DENSE)
    if config.is_dense and choice.cost >= WINS:
        return choice.as_dense(CalibrationDense.NO_CLEAR_GAIN)
    return choice
