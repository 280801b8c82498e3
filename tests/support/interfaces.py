"""The interface of a vLLM or a SGLang, read from its sources: nothing of it is imported, so any wheel will do.

    PYTHONPATH=.:tests python tests/support/interfaces.py SERVER PLACE VERSION

writes tests/SERVER_interfaces/VERSION.json; SERVER is vllm or sglang, PLACE its wheel, or that package where it is
installed. `make interfaces` does so for the versions that `make vllm` and `make sglang` run.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from s2o_runtime.sglang import compat as sglang
from s2o_runtime.vllm import compat as vllm

KINDS: dict[str, Any] = {"vllm": vllm.VllmInterface, "sglang": sglang.SglangInterface}
SOURCES = {"vllm": ".", "sglang": "srt"}  # in the package


def folder(server: str) -> Path:
    """Return where a server's interfaces are recorded."""
    return Path(__file__).parent.parent / f"{server}_interfaces"


def recorded(server: str) -> dict[str, Any]:
    """The recorded interfaces of a server, by version."""
    stored = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder(server).glob("*.json"))}
    return {
        version: KINDS[server](
            **{name: tuple(part) if isinstance(part, list) else part for name, part in parts.items()}
        )
        for version, parts in stored.items()
    }


def write(server: str, place: Path, version: str) -> Path:
    """Record the interface of a version; returns the file."""
    with tempfile.TemporaryDirectory() as unpacked:
        if place.is_file():
            with zipfile.ZipFile(place) as wheel:
                wheel.extractall(unpacked, [name for name in wheel.namelist() if name.endswith(".py")])
            place = Path(unpacked) / server
        interface = KINDS[server].from_sources(place / SOURCES[server])
    path = folder(server) / f"{version}.json"
    path.write_text(json.dumps(asdict(interface), indent=1) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    server, place, version = sys.argv[1:]
    print(write(server, Path(place), version))
