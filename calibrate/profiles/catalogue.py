"""A catalogue: a folder of profiles by model, device and budget, with their cards, an index and a table in its README.

Index and table are made anew from the profiles in the folder, whatever was in them before.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from calibrate.profiles.card import card, times
from calibrate.profiles.certified import in_short
from calibrate.profiles.summary import summary
from calibrate.recipe import Budget, default_out
from calibrate.tables import Markup, Table, escaped, markdown
from s2o_runtime.errors import InputError
from s2o_runtime.files import write_atomically
from s2o_runtime.profile import Profile, load_profile
from s2o_runtime.profile.file import serialize

INDEX = "index.json"
START = "<!-- profiles: s2o-profile push --catalogue writes what is between these lines -->"
END = "<!-- /profiles -->"


def add_to_catalogue(profile_path: Path, catalogue: Path, name: str | None = None) -> list[str]:
    """Copy a profile into a catalogue, and bring its card, the index and the table up to date.

    Args:
        profile_path: the file of a profile.
        name: what its model is called in the copy, such as a hub id where it was calibrated from a folder; None for
            the name that it has.
        catalogue: a folder. The copy is <model>/<device>/<budget>.safetensors below it, where `s2o-calibrate` writes
            by default.

    Returns:
        The files that were written, the index last.

    Raises:
        ProfileError: the file is no profile.
        InputError: the profile has no budget in its record.
    """
    profile, data = load_profile(profile_path), profile_path.read_bytes()
    if name is not None:
        profile = replace(profile, model_name=name)
        data = serialize(profile.validate())
    copy = _path_in(catalogue, profile, profile_path)
    copy.parent.mkdir(parents=True, exist_ok=True)
    copies = {copy.with_suffix(".md"): card(profile, copy.name).encode(), copy: data}
    for path, content in copies.items():
        write_atomically(path, content)
    entries = index(catalogue)
    overviews = {catalogue / "README.md": with_table(_readme(catalogue), entries), catalogue / INDEX: dump(entries)}
    for path, text in overviews.items():
        write_atomically(path, text.encode())
    return [str(path) for path in (*copies, *overviews)]


def _path_in(catalogue: Path, profile: Profile, profile_path: Path) -> Path:
    budget = profile.record.budget
    if budget is None or budget.kind is None or budget.value is None:
        raise InputError(
            f"{profile_path} does not say what its budget is, which its file in a catalogue is named by: "
            "calibrate it again"
        )
    return default_out(profile.model_name, profile.device.name, Budget(budget.kind, budget.value), catalogue)


def index(catalogue: Path) -> list[dict[str, Any]]:
    """The profiles in a catalogue by file name: for each what it is for, its digest and what it saves."""
    return [_entry(catalogue, path) for path in sorted(catalogue.glob("*/*/*.safetensors"))]


def _entry(catalogue: Path, path: Path) -> dict[str, Any]:
    profile = load_profile(path)
    summed = summary(profile)
    return {
        "file": path.relative_to(catalogue).as_posix(),
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "model": summed["model"],
        "fingerprint": summed["fingerprint"],
        "device": summed["device"],
        "measured_on": profile.record.retiled.made_on if profile.record.retiled else summed["device"],
        "budget": summed["budget"],
        "proof": summed["proof"],
        "certified": in_short(profile.record.certificate),
        "lengths": [
            {name: row[name] for name in ("length", "density", "prefill_speedup", "needles")}
            for row in summed["lengths"]
        ],
    }


def dump(entries: list[dict[str, Any]]) -> str:
    """The text of the index."""
    return json.dumps({"profiles": entries}, indent=1) + "\n"


def catalogue_table(entries: list[dict[str, Any]]) -> str:
    """The index as a Markdown table: what is supported, and what was shown of it."""
    names = ("model", "device", "budget", "lengths", "density", "prefill", "certified", "file")
    return markdown(Table(names, [_cells(entry) for entry in entries], align="l"))


def _cells(entry: dict[str, Any]) -> list[str]:
    lengths = entry["lengths"]
    densities = ("-" if row["density"] is None else f"{row['density']:.3f}" for row in lengths)
    timed = any(row["prefill_speedup"] is not None for row in lengths)
    elsewhere = f" (on {entry['measured_on']})" if entry["measured_on"] != entry["device"] else ""
    file = str(entry["file"])
    card_link = f"[{escaped(str(entry['model']))}]({file.removesuffix('.safetensors')}.md)"
    return [
        Markup(card_link),
        *(str(entry[name] or "-") for name in ("device", "budget")),
        ", ".join(str(row["length"]) for row in lengths),
        ", ".join(densities),
        (", ".join(times(row["prefill_speedup"]) for row in lengths) if timed else "not timed") + elsewhere,
        entry["certified"],
        Markup(f"[{Path(file).stem}]({file})"),
    ]


def with_table(text: str, entries: list[dict[str, Any]]) -> str:
    """A README with the table between its marker lines, or after everything else if it has none."""
    before, marked, rest = text.partition(START)
    after = rest.partition(END)[2] if marked else "\n"
    return f"{before if marked else text.rstrip() + chr(10) * 2}{START}\n\n{catalogue_table(entries)}\n\n{END}{after}"


def _readme(catalogue: Path) -> str:
    readme = catalogue / "README.md"
    return readme.read_text(encoding="utf-8") if readme.is_file() else "# Profiles\n"
