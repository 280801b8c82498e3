"""What a host of the repository reads: workflows, templates, citation, image."""

import os
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "path", sorted([*ROOT.glob(".github/**/*.yml"), ROOT / "CITATION.cff"]), ids=lambda path: path.name
)
def test_every_file_is_yaml(path):
    assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict)


def test_hosted_ci_runs_what_ci_runs_on_pythons_that_are_supported():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert commands == [".ci/run", "make wheel"]
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert re.search(r"^wheel:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    least = re.search(r'requires-python = ">=3\.(\d+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    minors = [int(version.split(".")[1]) for version in workflow["jobs"]["wheel"]["strategy"]["matrix"]["python"]]
    assert min(minors) == int(least.group(1))


def test_the_image_installs_an_extra_that_there_is():
    """And its entry point is a command that the package brings."""
    image = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    extra = re.search(r"'/src\[(\w+)\]'", image).group(1)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(rf"^{extra} = \[", project, re.MULTILINE)
    command = re.search(r'CMD ."([\w-]+)', image).group(1)
    assert re.search(rf"^{command} = ", project, re.MULTILINE)
