"""The calibrator as a Python call, and the steps that s2o-calibrate shares with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from calibrate.machine import draft, on_this_machine, writing
from calibrate.options import read_all
from calibrate.recipe import OPTIONS, Recipe
from s2o_runtime.errors import ConfigError

if TYPE_CHECKING:
    from calibrate.pipeline import Result
    from calibrate.report.contents import Report
    from s2o_runtime.devices import DeviceIdentity
    from s2o_runtime.identity import Geometry


class Planned(NamedTuple):
    """A run whose options fit the model and the machine."""

    recipe: Recipe
    device: DeviceIdentity
    geometry: Geometry


class Finished(NamedTuple):
    """A run that ended: its result, the report of it, and the report's files."""

    result: Result
    report: Report
    report_files: list[Path]


def calibrate(model: str | Recipe, *, progress: bool = True, **options: Any) -> Result:
    """Calibrate a model on this machine and write its profile and report, as s2o-calibrate does.

    Run again with the same options, it continues an interrupted run; with another budget, it measures nothing again.

    Args:
        model: an alias such as "demo", a local folder or a hub id; or a `Recipe`, which is run as it is.
        progress: show progress bars on standard error.
        **options: by the names of the command's flags, with underscores: docs/options.md lists them with their
            defaults. Values are Python's own (lengths=(1024, 2048)) or the texts of the flags (time_limit="5m").

    Returns:
        The result: its `profile`, whether the proof was `met` and the profile `written`, and the `problems`, if not.

    Raises:
        ConfigError: an option is not known, is out of range, or does not fit another or this machine.
        InputError: the prompts or the journal do not fit.
        ModelError: the model cannot be found or has parts that cannot be calibrated.
        ResourceError: GPU memory or the disk does not suffice, or another run writes the journal.

    Example:
        >>> from calibrate import calibrate
        >>> calibrate("demo", budget_rel_mse=1e-3, lengths=(1024, 2048), out="p.safetensors").written  # doctest: +SKIP
        True
    """
    if not isinstance(model, Recipe):
        recipe = planned(read_all(OPTIONS, {"model": model, **options}, "calibrate()")).recipe
    elif options:
        raise ConfigError(f"calibrate() got a recipe and {', '.join(options)}: give a recipe or a model with options")
    else:
        recipe = model.validate()
    return finished(recipe, progress=progress).result


def planned(options: Mapping[str, Any]) -> Planned:
    """Check options against the model and this machine; what is cheap to get wrong is checked first.

    Args:
        options: those that were given, in the types of `Recipe`'s fields.

    Raises:
        ConfigError, ModelError, ResourceError: as `calibrate` does.
    """
    recipe = draft(options)

    from calibrate.model.models import load_config
    from s2o_runtime.identity import geometry

    config = load_config(recipe.model, random_weights=recipe.random_weights)
    recipe, device = on_this_machine(options)
    recipe.check_limit(int(config.max_position_embeddings))
    return Planned(recipe, device, geometry(config))


def finished(recipe: Recipe, *, progress: bool, command: str | None = None) -> Finished:
    """Run a recipe and write the report beside its profile, or where the profile would be if the proof failed.

    Args:
        recipe: what to calibrate.
        progress: show progress bars on standard error.
        command: the command line that the report says it was made with, if there was one.
    """
    from calibrate import pipeline
    from calibrate.report.contents import report_of
    from calibrate.report.output import write_report

    with writing(recipe.out):
        result = pipeline.calibrate(recipe, progress=progress)
        report = report_of(recipe, result, command=command)
        return Finished(result, report, write_report(report, recipe.out))
