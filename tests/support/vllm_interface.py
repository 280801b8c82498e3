"""The interface of a vLLM, read from its sources: nothing of it is imported, so any version's wheel will do.

    PYTHONPATH=.:tests python tests/support/vllm_interface.py FOLDER VERSION

writes tests/vllm_interfaces/VERSION.json; FOLDER is the package `vllm` of an unpacked wheel.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from s2o_runtime.vllm.compat import Interface

RECORDED = Path(__file__).parent.parent / "vllm_interfaces"


def recorded() -> dict[str, Interface]:
    """The recorded interfaces, by version."""
    stored = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECORDED.glob("*.json"))}
    return {
        version: Interface(**{name: tuple(part) if isinstance(part, list) else part for name, part in parts.items()})
        for version, parts in stored.items()
    }


if __name__ == "__main__":
    RECORDED.mkdir(exist_ok=True)
    path = RECORDED / f"{sys.argv[2]}.json"
    path.write_text(json.dumps(asdict(Interface.in_sources(Path(sys.argv[1]))), indent=1) + "\n", encoding="utf-8")
