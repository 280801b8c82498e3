"""A folder to publish: a profile under its model's hub id, its card, and a README with the Hub's metadata."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from calibrate.machine import check_output
from calibrate.model.models import ALIASES
from calibrate.recipe import Budget, place_profile
from calibrate.report.page import render_card, render_readme
from s2o_runtime.errors import ConfigError, InputError
from s2o_runtime.files import IN_MODEL, write_atomically
from s2o_runtime.identity import explain_mismatch
from s2o_runtime.profile import Profile, load_profile
from s2o_runtime.profile.file import serialize
from s2o_runtime.profile.record import read_budget

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def check_publishable(name: str, root: Path, flag: str = "--out-dir") -> str:
    """Return the hub id that a model is published under, by itself or by its alias, in the folder that a flag names.

    Raises ConfigError if it has none, or the folder's README cannot be written.
    """
    check_output(flag, root / "README.md")
    hub_id = ALIASES.get(name, name)
    if not HUB_ID.fullmatch(hub_id) or Path(hub_id).exists():
        raise ConfigError(f"{name} is not the hub id of a model, which its profile is published under: give --name ID")
    return hub_id


def rename_model(profile: Profile, name: str) -> Profile:
    """Return a profile whose model has another name, such as a hub id where it was calibrated from a folder."""
    recipe = profile.record.get("recipe", {}) | {"model": name}  # which may have been a path on somebody's disk
    return replace(profile, model_name=name, record={**profile.record, "recipe": recipe})


def file_profile(profile: Profile, data: bytes, root: Path, folder: str | None = None) -> Path:
    """Write a profile's file to where `s2o-calibrate` would write it below a folder, and return its path.

    Args:
        profile, data: the profile, and the bytes of its file.
        root: a folder, such as a catalogue.
        folder: the folder of the model in `root`; None for one by the model's name.

    Raises:
        InputError: the profile has no budget in its record.
        ConfigError: the file or the card beside it cannot be written, or there is a page that S2O did not write.
    """
    kind, value, *_ = read_budget(profile.record)
    if kind is None or value is None:
        raise InputError(
            f"the profile of {profile.model_name} does not say what its budget is, which its file in a catalogue is "
            "named by: calibrate it again"
        )
    path = place_profile(folder or profile.model_name, profile.device.name, Budget(kind, value), root)
    check_output("beside the profile,", path.with_suffix(".md"))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data)
    return path


def publish(profile_path: Path, name: str | None, root: Path, tasks: Sequence[str]) -> list[Path]:
    """Write a profile of trained weights with its card below `s2o` of a folder, and the folder's README.

    Earlier profiles of the folder, for other GPUs or budgets, stay and are listed.

    Args:
        profile_path: the file of a profile.
        name: the hub id of its model; None for the one of the name that it was calibrated with.
        root: the folder.
        tasks: sentences on what an evaluation of the profile found, for its card.

    Raises what `check_publishable` and `file_profile` do, ProfileError if the file is no profile, or one of random
    weights, or a file among the folder's is none, and InputError if one is of another model; nothing is written then.
    """
    profile = load_profile(profile_path).check_trained()
    name = check_publishable(name or profile.model_name, root)
    listed = {path: load_profile(path) for path in root.glob(f"{IN_MODEL}/*/*.safetensors")}
    for path, other in listed.items():
        if mismatch := explain_mismatch(other.fingerprint, profile.fingerprint):
            raise InputError(
                f"{path} is of another model ({mismatch} of {profile_path}): give a folder for this model alone"
            )
    profile = rename_model(profile, name)
    copy = file_profile(profile, serialize(profile), root, IN_MODEL)
    card = copy.with_suffix(".md")
    readme = root / "README.md"
    listed[copy] = profile
    write_atomically(card, render_card(profile, copy.name, tasks=tasks).encode())
    write_atomically(readme, render_readme(name, root, listed).encode())
    return [copy, card, readme]
