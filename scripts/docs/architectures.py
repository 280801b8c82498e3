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

# the tests of each column: their name, and the parameters that select them
CAPABILITIES: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "calibrates": (("test_calibrates", {}),),
    "quantised": (("test_quantised_weights", {}),),
    "one prompt": (("test_prefill", {}),),
    "left padding": (("test_padded_batch", {"side": "left"}),),
    "right padding": (("test_padded_batch", {"side": "right"}),),
    "2 chunks": (("test_chunked_prefill_and_decode", {"cuts": (90,)}),),
    "3 chunks": (("test_chunked_prefill_and_decode", {"cuts": (40, 107)}),),
    "prefix cache": (("test_prefix_cache", {}),),
    "greedy": (("test_generate_greedily", {}),),
    "beams": (("test_generate_otherwise", {"how": {"num_beams": 3, "do_sample": False}}),),
    "sampling": (("test_generate_otherwise", {"how": {"do_sample": True}}),),
    "dynamic cache": (
        ("test_chunked_prefill_and_decode", {"cache": "dynamic"}),
        ("test_generate_greedily", {"cache": None}),
    ),
    "static cache": (
        ("test_chunked_prefill_and_decode", {"cache": "static"}),
        ("test_generate_greedily", {"cache": "static"}),
    ),
    "quantised cache": (("test_quantised_cache", {}),),
    "compiled": (("test_compiled", {}),),
    "gradients": (("test_gradients_go_dense", {}),),
}
OTHERS = "layers of other kinds"  # a column whose cells are what its test is given
OTHERS_TEST = "test_layers_of_other_kinds"
COLUMNS = (OTHERS, *CAPABILITIES)

Cells = Mapping[tuple[str, str], str]


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
    tested = cells(recorder.items, recorder.outcomes)
    text = PAGE.read_text(encoding="utf-8")
    if check:
        problem = difference(tested, shown(text))
        print(f"architectures: {problem or 'the table is of these tests'}")
        return 1 if problem else 0
    PAGE.write_text(between(text, START, END, as_table(tested)), encoding="utf-8")
    return 0


def cells(items: Iterable[pytest.Item], outcomes: Mapping[str, str]) -> dict[tuple[str, str], str]:
    """The table's cells by model and column; a cell has passed if all its tests have, or are only collected."""
    table_cells: dict[tuple[str, str], str] = {}
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if "name" not in params:
            continue
        if getattr(item, "originalname", None) == OTHERS_TEST:
            table_cells[params["name"], OTHERS] = params["others"]
        skipped = outcomes.get(item.nodeid) == "skipped"
        for capability, tests in CAPABILITIES.items():
            if any(_is(item, params, *test) for test in tests):
                key = params["name"], capability
                table_cells[key] = SKIPPED if skipped or table_cells.get(key) == SKIPPED else PASSED
    return table_cells


def _is(item: pytest.Item, params: Mapping[str, Any], test: str, wanted: Mapping[str, Any]) -> bool:
    return getattr(item, "originalname", None) == test and all(params[name] == value for name, value in wanted.items())


def as_table(tested: Cells) -> str:
    """Markdown: a row for each model, in the tests' order, a column for each capability."""
    models = dict.fromkeys(model for model, _ in tested)
    rows = [[model, *(tested.get((model, name), UNTESTED) for name in COLUMNS)] for model in models]
    return make_table(("", *COLUMNS), rows, "lc")


def shown(text: str) -> dict[tuple[str, str], str]:
    """The cells of the table in a text, as `cells` gives them; none if it has no table."""
    lines = [line for line in text.partition(START)[2].partition(END)[0].splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    if len(rows) < 3:
        return {}
    names = rows[0][1:]
    return {
        (row[0], name): cell for row in rows[2:] for name, cell in zip(names, row[1:], strict=True) if cell != UNTESTED
    }


def difference(tested: Cells, written: Cells) -> str | None:
    """The first cells that the table lacks, or that no test asks for; None if the cells are the same ones."""
    lacking, extra = tested.keys() - written.keys(), written.keys() - tested.keys()
    for verb, keys in (("lacks", lacking), ("has, without a test,", extra)):
        if keys:
            first = ", ".join(" ".join(key) for key in sorted(keys)[:3])
            return f"the table in {PAGE.name} {verb} {first}: run make architectures"
    return None


if __name__ == "__main__":
    sys.exit(main())
