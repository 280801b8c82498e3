"""The examples in docstrings run, and most public names have one."""

import doctest
import importlib

import pytest

import calibrate
import s2o_runtime
from support.pages import ROOT

MODULES = (
    "calibrate.recipe",
    "s2o_runtime.attention.api",
    "s2o_runtime.attention.paged",
    "s2o_runtime.attention.compute",
    "s2o_runtime.attention.warmup",
    "scripts.bench.baselines.run",
    "scripts.bench.baselines.settings",
    "s2o_runtime.config",
    "s2o_runtime.errors",
    "s2o_runtime.huggingface.explanation",
    "s2o_runtime.huggingface.hf",
    "s2o_runtime.monitor.drift",
    "s2o_runtime.profile.file",
    "s2o_runtime.profile.profile",
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    tested = doctest.testmod(importlib.import_module(name))
    assert tested.attempted > 0
    assert tested.failed == 0


def test_twenty_public_names_have_an_example():
    names = [getattr(package, name) for package in (s2o_runtime, calibrate) for name in package.__all__]
    assert sum(">>> " in (name.__doc__ or "") for name in names) >= 20
