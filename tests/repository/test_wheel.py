"""Tests of what is in the wheel; `make wheel` runs it in empty environments."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from support.pages import ROOT

EXHAUSTIVE = pytest.mark.exhaustive(reason="builds the wheel")

pytest.importorskip("build", reason="the wheel is built with build: pip install build")
pytest.importorskip("setuptools", reason="building without an index needs setuptools here: pip install setuptools")

SOURCES = ("s2o_runtime", "calibrate", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of the sources by way of the sdist: what a checkout has lying about cannot get in."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        kept = shutil.ignore_patterns("__pycache__", "*.egg-info")
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=kept)
        else:
            shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(source)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    (sdist,) = (folder / "dist").glob("s2o-*.tar.gz")
    with tarfile.open(sdist) as archive:  # the tests need more of the repository than belongs there
        assert not [name for name in archive.getnames() if "/tests" in name]
    (path,) = (folder / "dist").glob("s2o-*.whl")
    return path


@EXHAUSTIVE
def test_it_holds_the_packages_and_their_data_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"s2o_runtime", "calibrate", "s2o"}
    sources = {
        path.relative_to(ROOT).as_posix()
        for package in ("s2o_runtime", "calibrate")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".md")
    }
    assert sources <= names
    assert {"s2o_runtime/py.typed", "calibrate/py.typed", "calibrate/architectures/qwen2.5-7b.json"} <= names
    assert {f"calibrate/prompts/texts/{name}.jsonl.xz" for name in ("prose", "chinese")} <= names
    assert {f"calibrate/prompts/texts/{name}" for name in ("SOURCES.txt", "words.json", "templates.json")} <= names
    assert any(name.startswith("calibrate/demo/model/") and name.endswith(".safetensors") for name in names)
    stray = [
        name for name in names if Path(name).name.startswith("test_") or "/tests/" in name or name.endswith(".pyc")
    ]
    assert not stray
