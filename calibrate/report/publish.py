"""A folder to publish: a profile under its model's hub id, its card, and a README with the Hub's metadata."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from calibrate.machine import MARK
from calibrate.model.models import ALIASES
from calibrate.recipe import Budget, place_profile
from calibrate.record import read_record
from calibrate.report.contents import summarise_profile
from calibrate.report.page import render_card
from s2o_runtime.errors import ConfigError, InputError
from s2o_runtime.files import IN_MODEL, write_atomically
from s2o_runtime.profile import load_profile
from s2o_runtime.profile.file import serialize

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
README = "README.md"
TEXT = """\
---
library_name: s2o
base_model: {name}
tags:
- s2o
- sparse-attention
---

<!-- {mark} -->

# S2O profiles of {name}

Copy the folder `s2o` into the one with the model's weights (`hf download REPOSITORY --include "s2o/*" --local-dir
FOLDER`): S2O finds there the profile for the GPU, in transformers, vLLM and SGLang, and takes it for exactly these
weights only. To propose it to the model's own repository: `hf upload {name} s2o s2o --create-pr`.

{profiles}
"""


def find_hub_id(name: str) -> str:
    """Return the hub id that a model is published under, by itself or by its alias. Raises ConfigError without one."""
    hub_id = ALIASES.get(name, name)
    if not HUB_ID.fullmatch(hub_id) or Path(hub_id).exists():
        raise ConfigError(f"{name} is not the hub id of a model, which its profile is published under: give --name ID")
    return hub_id


def file_profile(profile_path: Path, root: Path, name: str | None = None, folder: str | None = None) -> Path:
    """Copy a profile to where `s2o-calibrate` would write it below a folder.

    Args:
        profile_path: the file of a profile.
        root: a folder, such as a catalogue.
        name: what its model is called in the copy, such as a hub id where it was calibrated from a folder; None for
            the name that it has.
        folder: the folder of the model in `root`; None for one by the model's name.

    Raises:
        ProfileError: the file is no profile.
        InputError: the profile has no budget in its record.
    """
    profile, data = load_profile(profile_path), profile_path.read_bytes()
    if name is not None:
        recipe = {**profile.record.get("recipe", {}), "model": name}  # which may have been a path on somebody's disk
        profile = replace(profile, model_name=name, record={**profile.record, "recipe": recipe})
        data = serialize(profile.validate())
    budget = read_record(profile).budget
    if budget is None or budget.kind is None or budget.value is None:
        raise InputError(
            f"{profile_path} does not say what its budget is, which its file in a catalogue is named by: "
            "calibrate it again"
        )
    copy = place_profile(folder or profile.model_name, profile.device.name, Budget(budget.kind, budget.value), root)
    copy.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(copy, data)
    return copy


def publish(profile_path: Path, name: str, root: Path, tasks: Sequence[str]) -> list[Path]:
    """Write a profile of trained weights with its card below `s2o` of a folder, and the folder's README.

    Earlier profiles of the folder, for other GPUs or budgets, stay and are listed.

    Args:
        profile_path: the file of a profile.
        name: the hub id of its model.
        root: the folder.
        tasks: sentences on what an evaluation of the profile found, for its card.

    Raises what `file_profile` does, and ProfileError if the profile is of random weights.
    """
    load_profile(profile_path).check_trained()
    copy = file_profile(profile_path, root, name, IN_MODEL)
    card, readme = copy.with_suffix(".md"), root / README
    write_atomically(card, render_card(load_profile(copy), copy.name, tasks=tasks).encode())
    lines = []
    for path in sorted(root.glob(f"{IN_MODEL}/*/*.safetensors")):
        facts, page = summarise_profile(load_profile(path)), path.with_suffix(".md").relative_to(root).as_posix()
        lines.append(f"- [{facts['budget']} on {facts['device']}]({page}), proof: {facts['proof']}")
    write_atomically(readme, TEXT.format(name=name, mark=MARK, profiles="\n".join(lines)).encode())
    return [copy, card, readme]
