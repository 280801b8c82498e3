"""The interface of a SGLang, read from its sources: nothing of it is imported, so any version's wheel will do.

    PYTHONPATH=.:tests python tests/support/sglang_interface.py FOLDER VERSION

writes tests/sglang_interfaces/VERSION.json; FOLDER is the package `sglang` of an unpacked wheel.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from s2o_runtime.sglang.compat import Interface

RECORDED = Path(__file__).parent.parent / "sglang_interfaces"


def recorded() -> dict[str, Interface]:
    """The recorded interfaces, by version."""
    stored = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECORDED.glob("*.json"))}
    return {
        version: Interface(**{name: tuple(names) for name, names in parts.items()}) for version, parts in stored.items()
    }


if __name__ == "__main__":
    RECORDED.mkdir(exist_ok=True)
    path = RECORDED / f"{sys.argv[2]}.json"
    interface = Interface.in_sources(Path(sys.argv[1]) / "srt")
    path.write_text(json.dumps(asdict(interface), indent=1) + "\n", encoding="utf-8")
