#!/usr/bin/env python3
"""Which lines and branches of the packages the tests run: a table by folder, and the files below a share.

    COVERAGE_FILE=build/coverage/data python -m scripts.docs.coverage MARKS    as `make coverage` does

MARKS is pytest's expression that chose the tests; it is the first line. Kernels are left out: Triton compiles them.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

LOW = 0.85  # files below this share are listed
COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def measured() -> dict[str, Mapping[str, int]]:
    """What coverage measured: its counts of every file."""
    import coverage

    with TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        path = Path(folder) / "coverage.json"
        data = coverage.Coverage()
        data.load()
        data.json_report(outfile=str(path))
        files: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["files"]
    return {name: entry["summary"] for name, entry in files.items()}


def share(counts: Mapping[str, int]) -> float:
    """Of the lines and branches together, those that ran; 1 if there are none."""
    there = counts["num_statements"] + counts["num_branches"]
    return (counts["covered_lines"] + counts["covered_branches"]) / there if there else 1.0


def by_folder(files: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """The counts of each folder, a package's own files under its name, and of each package as a whole."""
    sums: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(COUNTS, 0))
    for name, counts in files.items():
        package, *rest = Path(name).parts
        for key in ("all", package, f"{package}/{rest[0]}/" if len(rest) > 1 else f"{package}/*.py"):
            for count in COUNTS:
                sums[key][count] += counts[count]
    return dict(sorted(sums.items()))


def report(files: Mapping[str, Mapping[str, int]], marks: str) -> str:
    """The text."""
    lines = [f"pytest -m {marks!r}: lines and branches that ran, kernels aside", ""]
    for name, counts in by_folder(files).items():
        lines.append(
            f"{name:<28}{share(counts):>7.1%}   {counts['covered_lines']} of {counts['num_statements']} lines, "
            f"{counts['covered_branches']} of {counts['num_branches']} branches"
        )
    low = sorted((share(counts), name) for name, counts in files.items() if share(counts) < LOW)
    lines += ["", f"below {LOW:.0%}:", *(f"{name:<52}{part:>7.1%}" for part, name in low)] if low else []
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report of the data that COVERAGE_FILE names."""
    arguments = sys.argv[1:] if argv is None else argv
    print(report(measured(), " ".join(arguments)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
