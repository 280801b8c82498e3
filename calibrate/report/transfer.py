"""Passing a profile on, with its card and its report, to and from a folder or a repository of the Hub."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from calibrate.report.card import card
from s2o_runtime.errors import ConfigError, InputError, ResourceError, S2OError
from s2o_runtime.files import write_atomically
from s2o_runtime.profile import load_profile

HUB = "hf://"
# what a calibration writes too
REPORT = ("report.html", "report.md", "report.json", "density.png", "frontier.png", "time.png")


def push(profile: Path, to: str) -> list[str]:
    """Copy a profile, its card and the report beside it to a folder or to hf://org/name.

    Returns:
        The addresses of the copies.

    Raises:
        ProfileError: the file is no profile.
        ResourceError: the Hub cannot be reached, or its package is missing.
    """
    contents = _contents(profile)
    if not to.startswith(HUB):
        return _written(contents, Path(to))
    hub, repository = _hub(), _repository(to)[0]
    with _hub_errors(to):
        api = hub.HfApi()
        api.create_repo(repository, exist_ok=True)
        changes = [hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=data) for name, data in contents.items()]
        api.create_commit(repository, operations=changes, commit_message=f"Add {profile.name}")
    return [f"{HUB}{repository}/{name}" for name in contents]


def pull(source: str, folder: Path) -> list[str]:
    """Fetch a profile, its card and its report from a folder, a file or hf://org/name.

    Returns:
        The files that were written.

    Raises:
        ProfileError: the file is no profile. Nothing is written.
        InputError: the folder does not hold exactly one profile.
        ResourceError: the Hub cannot be reached, or its package is missing.
    """
    with tempfile.TemporaryDirectory() as temporary:
        local = Path(source)
        if source.startswith(HUB):
            repository, name = _repository(source)
            stem = Path(name).stem if name else "*"
            patterns = [f"{stem}.{suffix}" for suffix in ("safetensors", "md", *REPORT)]
            with _hub_errors(source):
                _hub().snapshot_download(repository, local_dir=temporary, allow_patterns=patterns)
            local = Path(temporary) / name if name else Path(temporary)
        return _written(_contents(_only_profile(local, source)), folder)


def _only_profile(source: Path, name: str) -> Path:
    if not source.is_dir():
        return source
    profiles = sorted(source.glob("*.safetensors"))
    if len(profiles) != 1:
        names = ", ".join(file.name for file in profiles[:5]) or "none"
        raise InputError(f"{name} holds {len(profiles)} profiles ({names}): name one, as in {name.rstrip('/')}/FILE")
    return profiles[0]


def _contents(profile: Path) -> dict[str, bytes]:
    """The files that belong together by name, the profile last, so that the others are there once it is.

    The card is made anew.
    """
    written_card = {f"{profile.stem}.md": card(load_profile(profile), profile.name).encode()}
    beside = [profile.with_name(f"{profile.stem}.{suffix}") for suffix in REPORT]
    report = {file.name: file.read_bytes() for file in beside if file.is_file()}
    return written_card | report | {profile.name: profile.read_bytes()}


def _written(contents: Mapping[str, bytes], folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in contents.items():
        write_atomically(folder / name, data)
    return [str(folder / name) for name in contents]


def _repository(address: str) -> tuple[str, str]:
    """hf://org/name or hf://org/name/file -> ("org/name", file or "")."""
    parts = address.removeprefix(HUB).rstrip("/").split("/")
    if not 2 <= len(parts) <= 3 or not all(parts):
        raise ConfigError(f"{address} is no Hub repository: use {HUB}org/name")
    return "/".join(parts[:2]), "".join(parts[2:])


def _hub() -> Any:
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise ResourceError(f"{HUB} needs huggingface_hub: pip install huggingface_hub, or use a folder") from error
    return huggingface_hub


@contextmanager
def _hub_errors(address: str) -> Iterator[None]:
    """Errors of the Hub and of the network as one sentence."""
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, S2OError):
            raise
        cause = str(error).strip().splitlines()[0].removeprefix("Got: ")
        raise ResourceError(
            f"{address} cannot be reached ({cause}): check the name and the network, or give a folder"
        ) from error
