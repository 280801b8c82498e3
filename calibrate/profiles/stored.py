"""An earlier calibration: the recipe in its profile and the curves in its journal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibrate.curves import measure
from calibrate.curves.curves import Curves, Shape, select_rankings, unpack
from calibrate.curves.measure import make_recipe_key
from calibrate.journal import Journal
from calibrate.recipe import DEFAULT_CEILING, Recipe
from calibrate.record import read_record
from s2o_runtime.errors import InputError
from s2o_runtime.identity import Geometry, explain_config_mismatch, split_fingerprint
from s2o_runtime.profile import Profile


@dataclass(frozen=True)
class StoredCurves:
    """The curves that a calibration measured."""

    profile: Profile
    recipe: Recipe
    entries: list[tuple[dict[str, Any], Any]]  # keys and values of the journal's curves, in the order of measuring
    ranking_costs: list[tuple[dict[str, Any], Any]]  # the same of what ranking takes at each length

    def find_curves(self, layer: int, length: int) -> Curves | None:
        """Return the curves last measured for a layer at a bucket of `length` tokens.

        They are None unless they hold what the layer's heads share in the profile.
        """
        config = self.profile.layers[self.profile.lengths.index(length)][layer]
        shape = Shape.from_tile(config.tile)
        data = read_record(self.profile).data
        prompts = [prompt.sha256 for prompt in (data and data.calibration) or () if prompt.length == length]
        expected_key = {"layer": layer, "prompts": prompts, **make_recipe_key(self.recipe, length)}
        for key, value in reversed(self.entries):
            if key == expected_key | {"shapes": key.get("shapes")} and [shape.block_m, shape.stride] in key["shapes"]:
                cost = measure.read_stored_cost(
                    self.ranking_costs, self.profile.geometry, self.profile.device, length, self.recipe
                )
                curves = unpack(value, cost)
                return curves if select_rankings(curves, config.segment, shape, config.lookback) else None
        return None


def read_recipe(profile: Profile, path: Path) -> Recipe:
    """Return the recipe in a profile's record; `path`, the profile's file, becomes its `out`.

    Raises:
        InputError: the record has no recipe, or one that does not fit the profile.
    """
    record = read_record(profile)
    try:
        if record.recipe is None or record.data is None or record.data.calibration is None:
            raise ValueError("its recipe or its prompts are not recorded")
        recipe = Recipe.from_record(record.recipe, path)
        if not set(recipe.lengths) <= set(profile.lengths):
            raise ValueError(f"lengths {recipe.lengths} of which the profile has {profile.lengths}")
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"{path} does not say how it was calibrated ({type(error).__name__}: {error}): "
            "use a profile that this version of s2o-calibrate wrote"
        ) from error
    return recipe


def check_sizes(profile: Profile, path: Path, model: str, geometry: Geometry) -> None:
    """Raise InputError if a model, by its name and sizes, is not one that a profile was calibrated for."""
    if difference := geometry.describe_difference(profile.geometry):
        raise InputError(f"{path} is not of {model}, which has {difference}: calibrate this model")


def read_stored_curves(profile: Profile, recipe: Recipe, journal: Path, command: str) -> StoredCurves:
    """Return the curves in the journal of a profile, which `recipe` made (`read_recipe`).

    `command` measures the curves again; the errors name it.

    Raises:
        InputError: the journal is missing, or it is of another model or another kind of device.
    """
    if not journal.exists():
        raise InputError(f"journal {journal} does not exist: give --journal, or measure again with {command}")
    with Journal.read(journal) as opened:
        _check_identity(opened, profile)
        return StoredCurves(
            profile=profile,
            recipe=recipe,
            entries=opened.entries("curves"),
            ranking_costs=opened.entries(measure.RANKING_COST),
        )


def calibrate_command(recipe: Recipe) -> str:
    """Return the command that calibrates with a recipe's model, budget and lengths."""
    budget = f"--budget-{recipe.budget.kind.replace('_', '-')} {recipe.budget.value:g}"
    if recipe.budget.kind == "mse" and recipe.budget.ceiling != DEFAULT_CEILING:
        budget += f" --ceiling-rel-mse {recipe.budget.ceiling or 0:g}"
    return f"s2o-calibrate --model {recipe.model} {budget} --lengths {','.join(map(str, recipe.lengths))}"


def _check_identity(journal: Journal, profile: Profile) -> None:
    """Raise InputError if the journal's measurements are of another model or kind of device than the profile."""
    calibrated = split_fingerprint(profile.fingerprint)
    expected = {("model", "fingerprint"): calibrated["fingerprint"], ("device", "kind"): profile.device.kind}
    for (part, name), value in expected.items():
        measured = journal.identity.get(part)
        actual = measured.get(name) if isinstance(measured, dict) else None
        if actual != value:
            raise InputError(
                f"journal {journal.path} was made with {part}.{name} {actual}, the profile with {value}: "
                "give the profile's own --journal"
            )
    if mismatch := explain_config_mismatch(journal.identity["model"].get("config", {}), calibrated.get("config", {})):
        raise InputError(f"journal {journal.path} is of another model: {mismatch}: give the profile's own --journal")
