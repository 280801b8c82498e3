#!/usr/bin/env python3
"""File a profile in profiles/ by model, device and budget, and write the cards, the index and the table in its README.

python -m scripts.docs.catalogue [PROFILE] [--name org/model] [--folder profiles]

Cards, index and table are made anew from the profiles in the folder, whatever was in them before.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calibrate.evaluation.report import list_ruler
from calibrate.record import Record, read_record
from calibrate.report.contents import summarise_profile
from calibrate.report.page import render_card
from calibrate.report.publish import file_profile, rename_model
from calibrate.report.sections import format_range, format_speedup
from calibrate.tables import Markup, Table, escape_markdown, format_markdown
from s2o_runtime.command_line import OK, get_exit_code, report_failure
from s2o_runtime.errors import S2OError
from s2o_runtime.files import write_atomically
from s2o_runtime.profile import load_profile, serialize
from scripts.docs.fields import between
from scripts.docs.raw import RESULTS, raw

CATALOGUE = Path(__file__).resolve().parents[2] / "profiles"
INDEX, README = "index.json", "README.md"
START = "<!-- profiles: scripts/docs/catalogue.py writes what is between these lines -->"
END = "<!-- /profiles -->"
QWEN = "Qwen2.5-Coder-1.5B-Instruct dequantised from 4 bits (Q4_K_M) by scripts/real_models.py, not the Hub's"
ORIGINS = {  # of models that ship profiles: whose weights they have
    "demo": "the demo model of this repository",
    "qwen2.5-coder-1.5b-dequantised-q4": QWEN,
    "qwen2.5-coder-1.5b-dequantised-q4-yarn": f"{QWEN}, stretched to 131072 tokens by YaRN",
    "smollm2-135m-instruct-yarn": (
        "SmolLM2-135M-Instruct dequantised by scripts/real_models.py, not the Hub's, stretched to 32768 tokens by YaRN"
    ),
}
NAMES = ("model", "device", "budget", "lengths", "density", "prefill", "certified", "file")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path, nargs="?", help="the profile to file; none to write all else anew")
    parser.add_argument("--name", help="what its model is called in the catalogue (default as it was calibrated)")
    parser.add_argument("--folder", type=Path, default=CATALOGUE, help="the catalogue (default profiles/)")
    arguments = parser.parse_args(argv)
    try:
        if arguments.profile is not None:
            profile, data = load_profile(arguments.profile), arguments.profile.read_bytes()
            if arguments.name is not None:
                profile = rename_model(profile, arguments.name)
                data = serialize(profile)
            print("wrote", file_profile(profile, data, arguments.folder))
        for path, text in overviews(arguments.folder).items():
            write_atomically(path, text.encode())
    except S2OError as error:
        return report_failure("scripts.docs.catalogue", get_exit_code(error), str(error))
    return OK


def overviews(catalogue: Path) -> dict[Path, str]:
    """The texts that follow from the profiles in a catalogue: each profile's card, the index, and the README."""
    paths = sorted(catalogue.glob("*/*/*.safetensors"))
    entries = [_entry(catalogue, path) for path in paths]
    evaluations = [raw(path.name) for path in sorted(RESULTS.glob("eval-*.json"))]
    cards = {}
    for path in paths:
        profile = load_profile(path)
        tasks = [line for evaluation in evaluations for line in list_ruler(evaluation, path)]
        origin = ORIGINS.get(profile.model_name, "")
        cards[path.with_suffix(".md")] = render_card(profile, path.name, origin, tasks)
    table = format_markdown(Table(NAMES, [_cells(entry) for entry in entries], align="l"))
    readme = (catalogue / README).read_text(encoding="utf-8")
    return cards | {
        catalogue / README: between(readme, START, END, table),
        catalogue / INDEX: json.dumps({"profiles": entries}, indent=1) + "\n",
    }


def _entry(catalogue: Path, path: Path) -> dict[str, Any]:
    """Return what the index says of a profile: what it is for, its digest and what it saves."""
    profile = load_profile(path)
    record = read_record(profile)
    summed = summarise_profile(profile)
    return {
        "file": path.relative_to(catalogue).as_posix(),
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "model": summed["model"],
        "fingerprint": summed["fingerprint"],
        "device": summed["device"],
        "measured_on": record.retiled.made_on if record.retiled else summed["device"],
        "budget": summed["budget"],
        "proof": summed["proof"],
        "certified": _summarise_certificate(record),
        "lengths": [
            {name: row[name] for name in ("length", "density", "prefill_speedup", "needles")}
            for row in summed["lengths"]
        ],
    }


def _summarise_certificate(record: Record) -> str:
    """Return a few words for a table of profiles; "-" without a certificate."""
    lengths = record.certified_lengths
    if not lengths:
        return "-"
    retrievals = [length.retrieval for length in lengths if length.retrieval is not None]
    kept, needles = sum(item.kept or 0 for item in retrievals), sum(item.found or 0 for item in retrievals)
    parts = [
        f"{format_range(length.prompts for length in lengths)} prompts",
        "means within limits",
        f"needles {kept} of {needles}" if needles else "",
    ]
    return ", ".join(part for part in parts if part)


def _cells(entry: dict[str, Any]) -> list[str]:
    lengths = entry["lengths"]
    densities = ("-" if row["density"] is None else f"{row['density']:.3f}" for row in lengths)
    timed = any(row["prefill_speedup"] is not None for row in lengths)
    elsewhere = f" (on {entry['measured_on']})" if entry["measured_on"] != entry["device"] else ""
    file = str(entry["file"])
    card_link = f"[{escape_markdown(str(entry['model']))}]({file.removesuffix('.safetensors')}.md)"
    return [
        Markup(card_link),
        *(str(entry[name] or "-") for name in ("device", "budget")),
        ", ".join(str(row["length"]) for row in lengths),
        ", ".join(densities),
        (", ".join(format_speedup(row["prefill_speedup"]) for row in lengths) if timed else "not timed") + elsewhere,
        entry["certified"],
        Markup(f"[{Path(file).stem}]({file})"),
    ]


if __name__ == "__main__":
    sys.exit(main())
