"""What a host of the repository reads: workflows, templates, citation, image."""

import ast
import os
import re
from pathlib import Path

import pytest
import yaml

from s2o_runtime.version import __version__

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "path", sorted([*ROOT.glob(".github/**/*.yml"), ROOT / "CITATION.cff"]), ids=lambda path: path.name
)
def test_every_file_is_yaml(path):
    assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict)


def project():
    return (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_version_is_stated_once_and_followed():
    """version.py has it; the citation and the changelog are of the same release."""
    assert re.search(r'^dynamic = \["version"\]$', project(), re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(citation["version"]) == __version__
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[:2] == ["Unreleased", f"{__version__} ({citation['date-released']})"]


def test_sources_are_of_the_oldest_python():
    """Their syntax here; what they use of the standard library is mypy's to say, which checks for the same version."""
    (oldest,) = re.findall(r'^requires-python = ">=3\.(\d+)"$', project(), re.MULTILINE)
    assert f'\npython_version = "3.{oldest}"\n' in project()  # mypy's
    assert f'\ntarget-version = "py3{oldest}"\n' in project()  # ruff's
    folders = ("s2o_runtime", "calibrate", "scripts", "tests", "examples")
    for path in [path for folder in folders for path in (ROOT / folder).rglob("*.py")]:
        ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, int(oldest)))
    with pytest.raises(SyntaxError):
        ast.parse("try:\n    pass\nexcept* ValueError:\n    pass\n", feature_version=(3, int(oldest)))


def test_hosted_ci_runs_what_ci_runs_on_pythons_that_are_supported():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert commands == [".ci/run", "make wheel PYTHONS=python"]
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert re.search(r"^wheel:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    least = re.search(r'requires-python = ">=3\.(\d+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    minors = [int(version.split(".")[1]) for version in workflow["jobs"]["wheel"]["strategy"]["matrix"]["python"]]
    assert min(minors) == int(least.group(1))
    minors += [int(workflow["jobs"]["ci"]["steps"][1]["with"]["python-version"].split(".")[1])]
    assert sorted(minors) == [int(minor) for minor in re.findall(r"Python :: 3\.(\d+)", project())]


def test_every_folder_of_tests_is_in_one_shard_of_the_night():
    workflow = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text(encoding="utf-8"))
    shards = " ".join(workflow["jobs"]["tests"]["strategy"]["matrix"]["tests"]).split()
    assert sorted(shards) == sorted({f"tests/{path.parent.name}" for path in (ROOT / "tests").rglob("test_*.py")})
    targets = workflow["jobs"]["others"]["strategy"]["matrix"]["target"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_the_image_installs_an_extra_that_there_is():
    """And its entry point is a command that the package brings."""
    image = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    extra = re.search(r"'/src\[(\w+)\]'", image).group(1)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(rf"^{extra} = \[", project, re.MULTILINE)
    command = re.search(r'CMD ."([\w-]+)', image).group(1)
    assert re.search(rf"^{command} = ", project, re.MULTILINE)
