"""The examples in docstrings run, and most public names have one."""

import doctest
import importlib

import pytest

from support.pages import ROOT

PACKAGES = ("s2o_runtime", "calibrate", "scripts")
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
WITH_EXAMPLES = [path.relative_to(ROOT) for path in SOURCES if ">>> " in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=str)
def test_examples_run(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    tested = doctest.testmod(importlib.import_module(".".join(path.with_suffix("").parts)))
    assert tested.attempted > 0
    assert tested.failed == 0
