#!/usr/bin/env python3
"""Mutants: mistakes that somebody could make in one line, and the tests that must notice them.

    python -m scripts.mutants                  applies every mutant, one at a time, to a copy of the sources
    python -m scripts.mutants --only rank      those whose names contain the text

A mutant is one replacement in one file; mutants.yaml beside this file lists them. Its tests run first in a copy without
it and must pass there; with it they must fail. Exit code 1 names the mutants that survive: their tests say less than
they seem to. `make mutants` keeps the output in docs/results/mutants.txt.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("s2o_runtime", "calibrate", "scripts", "tests", "profiles", "docs", "pyproject.toml")
FAILED = 1  # pytest's exit code for tests that failed; others say that nothing was tested
SECONDS = 300  # that the tests of one mutant may take


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        name: what goes wrong, as a few words.
        path: the file, from the root of the repository.
        before, after: what is replaced, which occurs once in the file, and by what.
        tests: what pytest is called with; one of them must fail.
    """

    name: str
    path: str
    before: str
    after: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """The file's text with the mistake. Raises ValueError if what is replaced does not occur exactly once."""
        if text.count(self.before) != 1:
            raise ValueError(
                f"mutant {self.name!r}: {self.path} has {self.before!r} {text.count(self.before)} times, expected one: "
                "bring the mutant up to date"
            )
        return text.replace(self.before, self.after)


MUTANTS = tuple(
    Mutant(mistake["name"], entry["file"], mistake["before"], mistake["after"], tuple(shlex.split(entry["tests"])))
    for entry in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    for mistake in entry["mistakes"]
)


def run_tests(folder: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run pytest in a copy, up to the first failure.

    Returns:
        Its exit code, or -1 if it took too long, and the line of its output that names the failed test.
    """
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    first = os.pathsep.join([str(folder), *(path for path in paths if Path(path).resolve() != ROOT)])  # not this tree
    environment = os.environ | {"PYTHONPATH": first, "OMP_NUM_THREADS": "1"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # or a mutant of the same size and second would not be seen
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    try:
        outcome = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return -1, f"no end after {SECONDS} s"
    failed = [line for line in outcome.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return outcome.returncode, failed[0] if failed else outcome.stdout.strip().rpartition("\n")[2]


def copy_of_the_sources(folder: Path) -> None:
    """Return what the tests need, in a folder of its own."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder)


def killer(failed: str) -> str:
    """`FAILED tests/test_a.py::test_b[c] - AssertionError: ..` -> `test_b`, as pytest's last lines have it."""
    return failed.partition(" - ")[0].removeprefix("FAILED ").rpartition("::")[2].partition("[")[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Apply the mutants, print a line for each, and return 1 if one survives."""
    parser = argparse.ArgumentParser(
        "scripts.mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants whose name or file contains this")
    args = parser.parse_args(argv)
    mutants = [mutant for mutant in MUTANTS if args.only in mutant.name or args.only in mutant.path]
    if not mutants:
        print(f"no mutant with {args.only!r}")
        return 2
    with tempfile.TemporaryDirectory(prefix="s2o-mutants-") as temporary:
        folder = Path(temporary)
        copy_of_the_sources(folder)
        for tests in dict.fromkeys(mutant.tests for mutant in mutants):
            code, said = run_tests(folder, tests)
            if code != 0:
                print(f"without a mutant {' '.join(tests)} does not pass: {said}")
                return 2
        survivors = [mutant.name for mutant in mutants if not _is_killed(folder, mutant)]
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants killed")
    return 1 if survivors else 0


def _is_killed(folder: Path, mutant: Mutant) -> bool:
    """Apply one mutant to the copy, run its tests, print a line and put the file back."""
    path = folder / mutant.path
    original = path.read_text(encoding="utf-8")
    path.write_text(mutant.applied(original), encoding="utf-8")
    begun = time.monotonic()
    code, said = run_tests(folder, mutant.tests)
    path.write_text(original, encoding="utf-8")
    killed = code == FAILED and said.startswith("FAILED ")
    verdict = f"killed by {killer(said)}" if killed else f"SURVIVES ({said})"
    print(f"{mutant.path}: {mutant.name}: {verdict}, {time.monotonic() - begun:.0f} s", flush=True)
    return killed


if __name__ == "__main__":
    sys.exit(main())
