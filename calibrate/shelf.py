"""A shelf: a folder of profiles by model, device and budget, with their cards, an index and a table in its README.

Index and table are made from the profiles that lie there, whatever they said before.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from calibrate.card import card, table, times
from calibrate.recipe import KINDS, Budget, default_out
from calibrate.summary import at, number, summary
from s2o_runtime.errors import InputError
from s2o_runtime.profile import Profile, load_profile, write_atomically

INDEX = "index.json"
START, END = "<!-- profiles: s2o-profile push --shelf writes what is between these lines -->", "<!-- /profiles -->"


def shelve(profile: Path, shelf: Path) -> list[str]:
    """Put a profile in its place on a shelf, and bring its card, the index and the table up to date.

    The place is <model>/<device>/<budget>.safetensors, where `s2o-calibrate` writes by default. Returns what was
    written, the index last. Raises ProfileError for what is no profile, InputError if it has no budget.
    """
    found, data = load_profile(profile), profile.read_bytes()
    place = _place(found, profile, shelf)
    place.parent.mkdir(parents=True, exist_ok=True)
    made = {place.with_suffix(".md"): card(found, place.name).encode(), place: data}
    for path, content in made.items():
        write_atomically(path, content)
    entries = index(shelf)
    last = {shelf / "README.md": with_table(_readme(shelf), entries), shelf / INDEX: dump(entries)}
    for path, text in last.items():
        write_atomically(path, text.encode())
    return [str(path) for path in (*made, *last)]


def _place(profile: Profile, path: Path, shelf: Path) -> Path:
    kind, value = at(profile.record, "budget", "kind"), number(at(profile.record, "budget", "value"))
    if kind not in KINDS or value is None:
        raise InputError(f"{path} does not say what its budget is, which its place is named by: calibrate it again")
    return default_out(profile.model_name, profile.device.name, Budget(kind, value), shelf)


def index(shelf: Path) -> list[dict[str, Any]]:
    """What lies on a shelf, by file name: for each profile what it is for, its digest and what it saves."""
    return [_entry(shelf, path) for path in sorted(shelf.glob("*/*/*.safetensors"))]


def _entry(shelf: Path, path: Path) -> dict[str, Any]:
    profile = load_profile(path)
    found = summary(profile)
    return {
        "file": path.relative_to(shelf).as_posix(),
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "model": found["model"],
        "fingerprint": found["fingerprint"],
        "device": found["device"],
        "budget": found["budget"],
        "proof": found["proof"],
        "lengths": [
            {name: row[name] for name in ("length", "density", "prefill_speedup", "needles")}
            for row in found["lengths"]
        ],
    }


def dump(entries: list[dict[str, Any]]) -> str:
    return json.dumps({"profiles": entries}, indent=1) + "\n"


def shelf_table(entries: list[dict[str, Any]]) -> str:
    """The index as a Markdown table."""
    names = ("profile", "model", "device", "budget", "lengths", "density", "prefill")
    return table(names, [_cells(entry) for entry in entries])


def _cells(entry: dict[str, Any]) -> list[str]:
    lengths = entry["lengths"]
    densities = ("-" if each["density"] is None else f"{each['density']:.3f}" for each in lengths)
    timed = any(each["prefill_speedup"] is not None for each in lengths)
    return [
        *(str(entry[name] or "-") for name in ("file", "model", "device", "budget")),
        ", ".join(str(each["length"]) for each in lengths),
        ", ".join(densities),
        ", ".join(times(each["prefill_speedup"]) for each in lengths) if timed else "not timed",
    ]


def with_table(text: str, entries: list[dict[str, Any]]) -> str:
    """A README with the table between its marks, or after everything else if it has none."""
    before, found, rest = text.partition(START)
    after = rest.partition(END)[2] if found else "\n"
    return f"{before if found else text.rstrip() + chr(10) * 2}{START}\n\n{shelf_table(entries)}\n\n{END}{after}"


def _readme(shelf: Path) -> str:
    readme = shelf / "README.md"
    return readme.read_text(encoding="utf-8") if readme.is_file() else "# Profiles\n"
