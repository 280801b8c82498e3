"""The examples run as their docstrings say, and print what they promise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SLOW = pytest.mark.slow(reason="runs a whole calibration or generation in a process of its own")

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PROFILE = ROOT / "profiles" / "demo" / "cpu" / "mse-0.0001.safetensors"


def run(name, *arguments):
    command = [sys.executable, ROOT / "examples" / name, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert finished.returncode == 0, finished.stderr[-1000:]
    return finished.stdout.splitlines()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_to_run_it(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) < 60
    assert f"    python examples/{path.name}" in "\n".join(lines[:5])


@SLOW
def test_the_op_alone():
    lines = run("attention_op.py")
    densities = [float(line.split("density ")[1].split(",")[0]) for line in lines]
    assert densities[0] == 1.0
    assert densities == sorted(densities, reverse=True)
    assert densities[-1] < 0.9
    assert all("backend reference" in line for line in lines)


@SLOW
def test_a_patched_model_answers():
    lines = run("patch_and_generate.py", PROFILE, 1024)
    answer = next(line for line in lines if line.startswith("code "))
    code = answer.split()[1].rstrip(":")
    assert answer == f"code {code}: dense says {code}, S2O says {code}"
    assert any(line.startswith("prefill: dense ") for line in lines)
    assert any(" s2o " in line and "the tensors are on the cpu" in line for line in lines)


@SLOW
def test_the_api_writes_a_profile(tmp_path):
    lines = run("calibrate_api.py", tmp_path / "p.safetensors")
    assert lines[0] == "written"
    assert (tmp_path / "p.safetensors").is_file()
