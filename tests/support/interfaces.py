"""The interface of a vLLM or a SGLang, read from its sources: nothing of it is imported, so any wheel will do.

    PYTHONPATH=.:tests python tests/support/interfaces.py SERVER FOLDER VERSION

writes tests/SERVER_interfaces/VERSION.json; SERVER is vllm or sglang, FOLDER that package of an unpacked wheel.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from s2o_runtime.sglang import compat as sglang
from s2o_runtime.vllm import compat as vllm

KINDS: dict[str, Any] = {"vllm": vllm.Interface, "sglang": sglang.Interface}
SOURCES = {"vllm": ".", "sglang": "srt"}  # in the package


def folder(server: str) -> Path:
    """Where a server's interfaces are recorded."""
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


if __name__ == "__main__":
    server, package, version = sys.argv[1:]
    path = folder(server) / f"{version}.json"
    interface = KINDS[server].in_sources(Path(package) / SOURCES[server])
    path.write_text(json.dumps(asdict(interface), indent=1) + "\n", encoding="utf-8")
