"""Another budget for a calibrated model, from the curves its calibration measured: no model, no prompts, seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from calibrate.allocate import Allocation
from calibrate.choose import shared
from calibrate.curves import Shape, unpacked
from calibrate.journal import Journal
from calibrate.measure import others_key
from calibrate.recipe import Budget, Recipe
from calibrate.search import Choice, Curves, allowed, budget_mse, methods
from s2o_runtime.config import LayerConfig
from s2o_runtime.errors import InputError
from s2o_runtime.profile import Profile, load_profile, save_profile

WINS = 0.9  # of dense attention's time: nothing is timed here, and what is predicted to be below this does win
UNPROVEN = (
    "predicted from stored curves and not proven on held-out prompts: run s2o-calibrate with this budget to prove it"
)

_Entries = list[tuple[dict[str, Any], Any]]  # of a journal: key and value


@dataclass(frozen=True)
class Prediction:
    """What one length is predicted to do.

    error: what the budget is for, in its unit: the worst layer's error, with the scope "model" the mean over layers.
    density, cost: means over the layers; cost in units of dense attention's time.
    """

    length: int
    error: float
    density: float
    cost: float


@dataclass(frozen=True)
class Rebudgeted:
    """The profile that was written, and what it is predicted to do at every length."""

    profile: Profile
    predicted: tuple[Prediction, ...]


def rebudget(
    profile: Path, budget: Budget, out: Path, journal: Path | None = None, worst_rows: float | None = None
) -> Rebudgeted:
    """Write `profile` with another budget to `out`.

    Every layer keeps its segment, grain and tile; its heads' thresholds, representatives and tails are allocated
    anew. A layer that was dense takes part if its budget grew and it is predicted to win clearly (`WINS`). Lengths
    without curves of their own, where the old proof had to tighten a layer, are left out.

    journal: by default where a calibration leaves it, beside the profile.
    worst_rows: another guard on single rows, 0 for none; None keeps the old one.
    Raises ProfileError if the profile cannot be read, InputError if it does not say how it was made or if the journal
    is missing, is of another model or device, or lacks a layer's curves.
    """
    old = load_profile(profile)
    before = recipe_of(old, profile)
    guard = before.worst_rows if worst_rows is None else worst_rows
    after = replace(before, budget=budget, out=out, worst_rows=guard).validate()
    path = journal or before.journal_path
    with opened(path, old, after) as measured:
        entries = measured.entries("curves")
    record, layers, predicted = [], [], []
    for length in after.lengths:
        choices, curves = [], []
        for layer, config in enumerate(old.layers[old.lengths.index(length)]):
            found = stored_curves(entries, layer, length, config, old, before)
            if not found:
                raise InputError(
                    f"journal {path} lacks the curves of layer {layer} at {length} tokens for tile {config.tile}: "
                    f"measure them with {_command(after)}"
                )
            choices.append(_choice(found, config, before, after))
            curves.append(found)
        if after.scope == "model":
            powers = [next(iter(each.values())).dense_power for each in curves]
            choices, _ = shared(choices, powers, after)
        layers.append(tuple(choice.config for choice in choices))
        predicted.append(_prediction(length, choices, after))
        record.append({"length": length, "layers": [choice.allocation.record() for choice in choices]})
    changes: dict[str, Any] = {
        "budget": {"kind": budget.kind, "value": budget.value, "scope": after.scope},
        "recipe": after.record(),
        "proof": "none",
        "problems": [UNPROVEN],
        "predicted": record,
        "held_out": [],
    }
    new = replace(old, lengths=after.lengths, layers=tuple(layers), record=old.record | changes)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_profile(new, out)
    return Rebudgeted(new, tuple(predicted))


def recipe_of(profile: Profile, path: Path) -> Recipe:
    """The recipe in a profile's record, whose file it is to be written to."""
    try:
        recipe = Recipe.from_record(profile.record["recipe"], path)
        if not set(recipe.lengths) <= set(profile.lengths):
            raise ValueError(f"lengths {recipe.lengths} of which the profile has {profile.lengths}")
        _prompts(profile, 0)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"{path} does not say how it was calibrated ({type(error).__name__}: {error}): "
            "use a profile that this version of s2o-calibrate wrote"
        ) from error
    return recipe


def _prompts(profile: Profile, length: int) -> list[str]:
    """The hashes of a length's calibration prompts."""
    return [each["sha256"] for each in profile.record["data"]["calibration"] if each["length"] == length]


def opened(path: Path, profile: Profile, recipe: Recipe) -> Journal:
    """The profile's journal. Raises InputError if it is missing or another model's or device's."""
    if not path.exists():
        raise InputError(f"journal {path} does not exist: give --journal, or measure again with {_command(recipe)}")
    journal = Journal.read(path)
    device = {"kind": profile.device.kind, "name": profile.device.name, "sm_count": profile.device.sm_count}
    wanted: dict[str, dict[str, Any]] = {"model": {"fingerprint": profile.fingerprint}, "device": device}
    for part, fields in wanted.items():
        given = journal.identity.get(part)
        for name, value in fields.items():
            found = given.get(name) if isinstance(given, dict) else None
            if found != value:
                journal.close()
                raise InputError(
                    f"journal {path} was made with {part}.{name} {found}, the profile with {value}: "
                    "give the profile's own --journal"
                )
    return journal


def stored_curves(
    entries: _Entries, layer: int, length: int, config: LayerConfig, profile: Profile, recipe: Recipe
) -> Curves | None:
    """The curves last measured for a layer that hold its segment, grain and tile."""
    shape = Shape.of(config.tile)
    key = {
        "layer": layer,
        "prompts": _prompts(profile, length),
        "segments": list(recipe.segments_for(length)),
        "representatives": list(recipe.representatives),
        "grains": list(recipe.grains),
        **others_key(recipe),
    }
    for found, value in reversed(entries):
        if found == key | {"shapes": found.get("shapes")} and [shape.block_m, shape.stride] in found["shapes"]:
            curves = unpacked(value)
            return curves if methods(curves, config.heads[0].segment, config.grain, shape) else None
    return None


def _choice(curves: Curves, config: LayerConfig, before: Recipe, after: Recipe) -> Choice:
    """A layer as it was in segment, grain and tile, with its new budget spent."""
    segment, grain, tile = config.heads[0].segment, config.grain, config.tile
    budget = budget_mse(curves, after)
    found = Choice(segment, grain, tile, methods(curves, segment, grain, Shape.of(tile)), 0.0, Allocation(()))
    found = found.spending(budget, allowed(after))
    if found.config.is_dense:
        return replace(found, why_dense="no head gains anything within the budget")
    if config.is_dense and budget <= budget_mse(curves, before):
        return found.as_dense("it was dense with no smaller budget")
    if config.is_dense and found.cost >= WINS:
        return found.as_dense("it was dense, and is not predicted to win clearly")
    return found


def _prediction(length: int, choices: Sequence[Choice], recipe: Recipe) -> Prediction:
    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    errors = [
        recipe.budget.error(each.allocation.mse, next(iter(each.curves.values())).dense_power) for each in choices
    ]
    return Prediction(
        length,
        mean(errors) if recipe.scope == "model" else max(errors),
        mean([each.allocation.density for each in choices]),
        mean([each.allocation.cost for each in choices]),
    )


def _command(recipe: Recipe) -> str:
    """The command that calibrates with a recipe's model, budget and lengths."""
    budget = f"--budget-{recipe.budget.kind.replace('_', '-')} {recipe.budget.value:g}"
    return f"s2o-calibrate --model {recipe.model} {budget} --lengths {','.join(map(str, recipe.lengths))}"
