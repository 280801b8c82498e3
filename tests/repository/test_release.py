"""Tests of what a host of the repository reads: workflows, templates, citation, image."""

import re

import yaml

from s2o_runtime.version import __version__
from support.pages import ROOT


def project():
    return (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_version_is_stated_once_and_followed():
    """version.py has it; the citation and the changelog are of the same release."""
    assert re.search(r'^dynamic = \["version"\]$', project(), re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(citation["version"]) == __version__
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[:2] == ["Unreleased", f"{__version__} ({citation['date-released']})"]


def test_lint_is_for_the_oldest_python():
    """Ruff refuses newer syntax, and mypy what the standard library did not have then."""
    (oldest,) = re.findall(r'^requires-python = ">=3\.(\d+)"$', project(), re.MULTILINE)
    assert f'\npython_version = "3.{oldest}"\n' in project()  # mypy's
    assert f'\ntarget-version = "py3{oldest}"\n' in project()  # ruff's


def test_every_folder_of_tests_is_in_one_shard_of_the_night():
    workflow = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text(encoding="utf-8"))
    shards = " ".join(workflow["jobs"]["tests"]["strategy"]["matrix"]["tests"]).split()
    assert sorted(shards) == sorted({f"tests/{path.parent.name}" for path in (ROOT / "tests").rglob("test_*.py")})
    targets = workflow["jobs"]["others"]["strategy"]["matrix"]["target"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
