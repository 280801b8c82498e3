"""A profile that nobody named, found by the model and the GPU that it is of.

It is looked for in the folders of the environment variable S2O_PROFILES, in `s2o` of the model's own folder, in
`profiles` of the current folder, where s2o-calibrate writes by default, and in the catalogue that comes with the
package, all with their subfolders; nothing is downloaded. A profile fits if it is of this model (its geometry, its
weights, its RoPE parameters and its config's values) and its tiles are for this GPU.

If several fit, the first folder that has one of them decides. In it a certified profile comes before one that is not,
and a smaller budget before a larger one; budgets in KL come before those in rel_mse, and these before those in mse.
Of equal ones the longest calibrated length and then the path decide.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..devices import identify, is_same_product
from ..errors import ConfigError, ProfileError
from ..files import IN_MODEL, PROFILES
from ..identity import geometry
from .file import load_profile
from .profile import Profile
from .record import BudgetKind, list_certified, read_budget

PROFILE_VARIABLE = "S2O_PROFILE"  # a profile's file, which is not searched for, or OFF
OFF = "off"  # in place of a file: no profile, and none is searched for
FOLDERS_VARIABLE = "S2O_PROFILES"  # folders, separated as in PATH
STARTED_IN = "S2O_STARTED_IN"  # the folder in which s2o-run was started, for the program that it became
CATALOGUE = Path(__file__).parents[1] / "catalogue"
KINDS: tuple[BudgetKind, ...] = ("kl", "rel_mse", "mse")  # of budgets, in the order in which profiles are taken

log = logging.getLogger("s2o_runtime")


class FoundProfile(NamedTuple):
    """A profile and the file that it is in."""

    path: Path
    profile: Profile

    def __str__(self) -> str:
        certified = "certified" if list_certified(self.profile.record) else "not certified"
        kind, value = read_budget(self.profile.record)[:2]
        budget = "" if kind is None or value is None else f", {kind} {value:g}"
        proof = f"{certified}{budget}; found, {PROFILE_VARIABLE}={OFF} refuses it"
        return f"{self.path} of {self.profile.model_name} ({proof})"

    @property
    def rank(self) -> tuple[object, ...]:
        """The key that the profiles of one folder are sorted by."""
        kind, value = read_budget(self.profile.record)[:2]
        order = len(KINDS) if kind is None or value is None else KINDS.index(kind)
        return not list_certified(self.profile.record), order, value or 0.0, -self.profile.lengths[-1]


def read_named() -> str | None:
    """Return what S2O_PROFILE names, a profile's file or OFF; None if it is not set."""
    return os.environ.get(PROFILE_VARIABLE) or None


def find_local_folder(model: object, revision: str | None = None) -> Path | None:
    """Return the folder of a model, by its path or hub id; None if it is not on this machine. Downloads nothing."""
    if not model:
        return None
    folder = Path(str(model))
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(model), revision=revision, local_files_only=True))
    except (ImportError, OSError, ValueError):  # not downloaded, or by another way
        return None


def find_source_folder(config: Any) -> Path | None:
    """Return the folder that transformers loaded a model with this configuration from; None if that is not known."""
    return find_local_folder(getattr(config, "_name_or_path", None), getattr(config, "_commit_hash", None))


def list_named_folders() -> list[Path]:
    """Return the folders that S2O_PROFILES names. Raises ConfigError for what is no folder."""
    named = [Path(name) for name in os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep) if name]
    for folder in named:
        if not folder.is_dir():
            raise ConfigError(f"{FOLDERS_VARIABLE} names {folder}, which is no folder: name folders that hold profiles")
    return named


def list_folders(model_folder: Path | None = None) -> list[Path]:
    """Return the folders of profiles in the order of the search, each once, as absolute paths without symbolic links.

    model_folder: where the model's weights are, if that is known.

    Raises:
        ConfigError: S2O_PROFILES names something that is no folder.
    """
    others = [Path(os.environ.get(STARTED_IN, "")) / PROFILES, CATALOGUE]
    if model_folder is not None:
        others.insert(0, model_folder / IN_MODEL)
    folders = [*list_named_folders(), *(folder for folder in others if folder.is_dir())]
    return list(dict.fromkeys(folder.resolve() for folder in folders))


def find_profiles(model_folder: Path | None = None) -> list[FoundProfile]:
    """Return all profiles in the folders of `list_folders`, in the order in which they are taken.

    A file that is none is left out, and a line of the log says why. So is a profile in the model's folder whose
    config.json cannot be compared: anybody may have put it there, for another fine-tune of the same weights.

    Raises:
        ConfigError: as `list_folders` does.
    """
    candidates = []
    own = model_folder and (model_folder / IN_MODEL).resolve()
    for folder in list_folders(model_folder):
        in_folder = []
        for path in sorted(folder.rglob("*.safetensors")):
            try:
                profile = load_profile(path)
                if folder == own and profile.config_unknown:
                    raise ProfileError(f"{path}: {profile.config_unknown}")
                in_folder.append(FoundProfile(path, profile))
            except ProfileError as error:
                log.warning("left out of the search for a profile: %s", error)
        candidates += sorted(in_folder, key=lambda candidate: candidate.rank)
    return candidates


def explain_no_match(candidates: Sequence[FoundProfile], config: Any) -> str | None:
    """Return the reason that none of some profiles fits a model, if none has its geometry; None if one has.

    Raises:
        ModelError: the architecture in the model's transformers configuration is not supported.
    """
    model = geometry(config)
    if any(candidate.profile.geometry == model for candidate in candidates):
        return None
    return f"no profile is of a model like this one ({model}): {_advise(config)}"


def select_profile(
    candidates: Sequence[FoundProfile], config: Any, device: torch.device, mismatch: Callable[[Profile], str | None]
) -> FoundProfile:
    """Return the first of some profiles that is of a model and for a device.

    Args:
        candidates: profiles, as `find_profiles` sorts them.
        config: the model's transformers configuration.
        device: where its attention runs.
        mismatch: returns how the model's weights and RoPE parameters differ from a profile's, or why they cannot be
            compared; None if they are the same.

    Raises:
        ModelError: the architecture is not supported.
        ProfileError: none fits; the sentence says what the first that has the model's geometry is of, and how to make
            one that does, of one for another GPU too.
    """
    if reason := explain_no_match(candidates, config):
        raise ProfileError(reason)
    nearest, here, model = "", identify(device), geometry(config)
    alike = [candidate for candidate in candidates if candidate.profile.geometry == model]
    for candidate in sorted(alike, key=lambda candidate: not is_same_product(candidate.profile.device, here)):
        difference = mismatch(candidate.profile)
        if difference is None and is_same_product(candidate.profile.device, here):
            return candidate
        if difference is None:  # of the rest, all for other GPUs, the first will do
            raise ProfileError(
                f"no profile fits this model on {here} ({candidate.path}: it is for {candidate.profile.device}): run "
                f"s2o-profile retile {candidate.path} and name what it writes, {_advise(config)}"
            )
        nearest = nearest or f"{candidate.path}: {difference}"
    raise ProfileError(f"no profile fits this model on {here} ({nearest}): {_advise(config)}")


def find_profile(
    config: Any,
    device: torch.device,
    mismatch: Callable[[Profile], str | None],
    model_folder: Path | None,
    named: object = None,
) -> FoundProfile:
    """Return the profile of a model and a device in the folders where profiles are looked for.

    Args: as `select_profile` and `list_folders` have them; `named` is OFF to refuse every profile.

    Raises: as `select_profile`; ConfigError as `list_folders`.
    """
    if str(named) == OFF:
        raise ProfileError(f"the profile is {OFF!r}, so none is looked for: name one, or unset {PROFILE_VARIABLE}")
    return select_profile(find_profiles(model_folder), config, device, mismatch)


def _advise(config: Any) -> str:
    """Return the advice to make a profile, with the model's name in it where transformers knows it."""
    name = getattr(config, "_name_or_path", None) or "MODEL"
    return f"make one with s2o-calibrate --model {name}, or name a profile's path"
