"""A calibration that was made before: the recipe in its profile and the curves in its journal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibrate.curves import measure
from calibrate.curves.curves import Curves, Shape, methods, unpacked
from calibrate.curves.measure import recipe_key
from calibrate.journal import Journal
from calibrate.recipe import DEFAULT_CEILING, Recipe
from s2o_runtime.errors import InputError
from s2o_runtime.identity import Geometry, config_mismatch, split_fingerprint
from s2o_runtime.profile import Profile


@dataclass(frozen=True)
class StoredCurves:
    """The curves that a calibration measured.

    profile, recipe: what it wrote, and what it was asked for.
    entries: keys and values of its journal, in the order in which they were measured.
    ranking_costs: the same of what ranking takes at each length.
    """

    profile: Profile
    recipe: Recipe
    entries: list[tuple[dict[str, Any], Any]]
    ranking_costs: list[tuple[dict[str, Any], Any]]

    def of_layer(self, layer: int, length: int) -> Curves | None:
        """The curves last measured for a layer at a bucket.

        Args:
            layer: index of the layer.
            length: a bucket of the profile, in tokens.

        Returns:
            The curves, if they hold what the layer's heads share in the profile; otherwise None.
        """
        config = self.profile.layers[self.profile.lengths.index(length)][layer]
        shape = Shape.of(config.tile)
        expected_key = {
            "layer": layer,
            "prompts": _prompt_hashes(self.profile, length),
            **recipe_key(self.recipe, length),
        }
        for key, value in reversed(self.entries):
            if key == expected_key | {"shapes": key.get("shapes")} and [shape.block_m, shape.stride] in key["shapes"]:
                cost = measure.stored_cost(
                    self.ranking_costs, self.profile.geometry, self.profile.device, length, self.recipe
                )
                curves = unpacked(value, cost)
                matching = methods(curves, config.segment, shape, config.scores)
                return curves if matching else None
        return None


def recipe_of(profile: Profile, path: Path) -> Recipe:
    """The recipe in a profile's record.

    Args:
        profile: a calibrated profile.
        path: the profile's file, which becomes the recipe's `out`.

    Raises:
        InputError: the record has no recipe, or one that does not fit the profile.
    """
    record = profile.record
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
    if difference := geometry.difference(profile.geometry):
        raise InputError(f"{path} is not of {model}, which has {difference}: calibrate this model")


def stored_curves(profile: Profile, recipe: Recipe, journal: Path, command: str) -> StoredCurves:
    """The curves in the journal of a profile.

    Args:
        profile: what the calibration wrote.
        recipe: what the calibration was asked for (`recipe_of`).
        journal: the journal's file.
        command: the command that measures the curves again, for the error.

    Raises:
        InputError: the journal is missing, or it is of another model or another kind of device.
    """
    if not journal.exists():
        raise InputError(f"journal {journal} does not exist: give --journal, or measure again with {command}")
    with Journal.read(journal) as opened:
        _check_identity(opened, profile)
        return StoredCurves(
            profile,
            recipe,
            opened.entries("curves"),
            opened.entries(measure.RANKING_COST),
        )


def calibrate_command(recipe: Recipe) -> str:
    """The command that calibrates with a recipe's model, budget and lengths."""
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
    if mismatch := config_mismatch(journal.identity["model"].get("config", {}), calibrated.get("config", {})):
        raise InputError(f"journal {journal.path} is of another model: {mismatch}: give the profile's own --journal")


def _prompt_hashes(profile: Profile, length: int) -> list[str | None]:
    """The hashes of a length's calibration prompts."""
    data = profile.record.data
    return [prompt.sha256 for prompt in (data and data.calibration) or () if prompt.length == length]
