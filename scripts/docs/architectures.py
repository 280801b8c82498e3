#!/usr/bin/env python3
"""Write the table of architectures in docs/results/architectures.md from the tests that pass.

    python -m scripts.docs.architectures            runs tests/huggingface/test_architectures.py and writes the table
    python -m scripts.docs.architectures --check    only collects them, and fails if the table is of other tests

A row is a model of the tests, a column what they ask of it. A test that fails leaves the table as it is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from scripts.docs.fields import between, make_table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "results" / "architectures.md"
TESTS = ROOT / "tests" / "huggingface" / "test_architectures.py"
START, END = "<!-- architectures: make architectures writes what is between these lines -->", "<!-- /architectures -->"
PASSED, SKIPPED, UNTESTED = "✓", "skipped", ""

# the tests of each column, by name, and the parameters that select them
CAPABILITIES: dict[str, dict[str, dict[str, Any]]] = {
    "calibrates": {"test_calibrates": {}},
    "quantised": {"test_quantised_weights": {}},
    "one prompt": {"test_prefill": {}},
    "left padding": {"test_padded_batch": {"side": "left"}},
    "right padding": {"test_padded_batch": {"side": "right"}},
    "2 chunks": {"test_chunked_prefill_and_decode": {"cuts": (90,)}},
    "3 chunks": {"test_chunked_prefill_and_decode": {"cuts": (40, 107)}},
    "prefix cache": {"test_prefix_cache": {}},
    "greedy": {"test_generate": {"how": {}}},
    "beams": {"test_generate": {"how": {"num_beams": 3}}},
    "sampling": {"test_generate": {"how": {"do_sample": True}}},
    "dynamic cache": {"test_chunked_prefill_and_decode": {"cache": "dynamic"}, "test_generate": {"how": {}}},
    "static cache": {
        "test_chunked_prefill_and_decode": {"cache": "static"},
        "test_generate": {"how": {"cache_implementation": "static", "disable_compile": True}},
    },
    "quantised cache": {"test_quantised_cache": {}},
    "compiled": {"test_compiled": {}},
    "gradients": {"test_gradients_go_dense": {}},
}
OTHERS = "layers of other kinds"  # a column whose cells are what its test is given
OTHERS_TEST = "test_layers_of_other_kinds"
COLUMNS = (OTHERS, *CAPABILITIES)


@dataclass(eq=False)  # pytest keeps plugins in a set
class OutcomeRecorder:
    """A pytest plugin: the tests that were collected, and how each ended."""

    items: list[pytest.Item] = field(default_factory=list)
    outcomes: dict[str, str] = field(default_factory=dict)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = list(session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The worst of a test's setup, call and teardown."""
        order = ("passed", "skipped", "failed")
        before = self.outcomes.get(report.nodeid, "passed")
        self.outcomes[report.nodeid] = max(before, report.outcome, key=order.index)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="run no test and write nothing")
    check = parser.parse_args(argv).check
    recorder = OutcomeRecorder()
    options = ["--collect-only", "-q", "--no-summary"] if check else ["-q", "--no-header"]
    code = pytest.main([str(TESTS), "-p", "no:cacheprovider", *options], plugins=[recorder])
    if code:
        print(f"architectures: the tests do not pass (pytest ends with {int(code)}): {PAGE.name} is as it was")
        return 1
    text = PAGE.read_text(encoding="utf-8")
    written = between(text, START, END, make_cells_table(list_cells(recorder.items, recorder.outcomes)))
    if not check:
        PAGE.write_text(written, encoding="utf-8")
    elif written != text.replace(f" {SKIPPED} |", f" {PASSED} |"):  # which tests are skipped shows only where they run
        print(f"architectures: the table in {PAGE.name} is not of these tests: run make architectures")
        return 1
    return 0


def list_cells(items: Iterable[pytest.Item], outcomes: Mapping[str, str]) -> dict[tuple[str, str], str]:
    """Return the table's cells by model and column; one has passed if all its tests have, or are only collected."""
    table_cells: dict[tuple[str, str], str] = {}
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if "name" not in params:
            continue
        test = getattr(item, "originalname", "")
        if test == OTHERS_TEST:
            table_cells[params["name"], OTHERS] = params["others"]
        skipped = outcomes.get(item.nodeid) == "skipped"
        for capability, tests in CAPABILITIES.items():
            wanted = tests.get(test)
            if wanted is not None and all(params[name] == wanted[name] for name in wanted):
                key = params["name"], capability
                table_cells[key] = SKIPPED if skipped or table_cells.get(key) == SKIPPED else PASSED
    return table_cells


def make_cells_table(tested: Mapping[tuple[str, str], str]) -> str:
    """Return Markdown: a row for each model, in the tests' order, a column for each capability."""
    models = dict.fromkeys(model for model, _ in tested)
    rows = [[model, *(tested.get((model, name), UNTESTED) for name in COLUMNS)] for model in models]
    return make_table(("", *COLUMNS), rows, "lc")


if __name__ == "__main__":
    sys.exit(main())
