"""The examples run as their docstrings say, and print what they promise."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXHAUSTIVE = pytest.mark.exhaustive(reason="runs a whole calibration or generation in a process of its own")

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PATHS = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
PROFILE = ROOT / "profiles" / "demo" / "cpu" / "mse-0.0001.safetensors"
H200_PROFILE = ROOT / "profiles" / "demo" / "nvidia-h200" / "rel-mse-0.001.safetensors"


def run(name, *arguments, needs=None):
    if needs is not None:
        pytest.importorskip(needs, reason=f"the example needs {needs}, which is not installed here")
    command = [sys.executable, ROOT / "examples" / name, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": PATHS, "CUDA_VISIBLE_DEVICES": ""}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert finished.returncode == 0, finished.stderr[-1000:]
    assert "the old name goes with" not in finished.stderr, "examples show today's names"
    return finished.stdout.splitlines()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_to_run_it(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) < 80
    assert f"    python examples/{path.name}" in "\n".join(lines[:5])


@EXHAUSTIVE
def test_the_op_alone():
    lines = run("attention_op.py")
    densities = [float(line.split("density ")[1].split(",")[0]) for line in lines]
    assert densities[0] == 1.0
    assert densities == sorted(densities, reverse=True)
    assert densities[-1] < 0.9
    assert all("backend reference" in line for line in lines)


@EXHAUSTIVE
def test_a_patched_model_answers():
    lines = run("patch_and_generate.py", PROFILE, 1024)
    answer = next(line for line in lines if line.startswith("code "))
    code = answer.split()[1].rstrip(":")
    assert answer == f"code {code}: dense says {code}, S2O says {code}"
    assert any(line.startswith("prefill: dense ") for line in lines)
    assert any(" s2o " in line and "the tensors are on the cpu" in line for line in lines)


@EXHAUSTIVE
def test_the_api_writes_a_profile(tmp_path):
    lines = run("calibrate_api.py", tmp_path / "p.safetensors")
    assert lines[0] == "written"
    assert (tmp_path / "p.safetensors").is_file()


@EXHAUSTIVE
def test_own_prompts_are_split_three_ways(tmp_path):
    lines = run("own_prompts.py", ROOT / "docs", tmp_path / "p.safetensors")
    assert lines[:2] == ["written", "2 prompts to calibrate on, 1 to adjust on, 4 to certify on"]


@EXHAUSTIVE
def test_a_budget_in_kl_is_kept(tmp_path):
    lines = run("kl_budget.py", "2e-2", tmp_path / "p.safetensors")
    assert lines[0] == "written"
    kl = float(lines[1].split("KL ")[1].split()[0])
    assert 0 < kl <= 2e-2


@EXHAUSTIVE
def test_a_profile_of_another_gpu_keeps_its_thresholds(tmp_path):
    lines = run("new_gpu.py", H200_PROFILE, tmp_path / "p.safetensors")
    assert lines[0] == "as it is: the reference backend runs any tile"
    assert lines[-1] == "thresholds are the same, 0 layers became dense"
    assert (tmp_path / "p.safetensors").is_file()


@EXHAUSTIVE
def test_continuous_batching_answers_and_runs_s2o_in_the_long_prompts():
    import transformers

    if not hasattr(transformers, "ContinuousBatchingConfig"):
        pytest.skip("this transformers has another form of continuous batching")
    lines = run("continuous_batching.py", PROFILE, 1100, needs="psutil")
    answers = {line.split("answers ")[1] for line in lines if "answers" in line}
    expected = {line.removeprefix("expected ") for line in lines if line.startswith("expected")}
    assert len(expected) == 2
    assert expected < answers
    assert sum(" s2o " in line for line in lines) > 3  # most of the 6 layers


@EXHAUSTIVE
def test_a_task_of_the_harness_runs_s2o():
    lines = run("harness_task.py", PROFILE, 1100, 1, needs="lm_eval")
    assert "needles: dense 100%, S2O 100% of 1 prompts" in lines
    assert sum(" s2o " in line for line in lines) > 3  # most of the 6 layers


@EXHAUSTIVE
def test_without_vllm_one_sentence_says_so():
    """With vLLM on a CPU, `make vllm` runs what this example does."""
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed: `make vllm` runs it")
    command = [sys.executable, ROOT / "examples" / "vllm_offline.py", "model", PROFILE]
    environment = os.environ | {"PYTHONPATH": PATHS}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert finished.returncode == 1
    assert finished.stderr.splitlines()[-1].startswith("vLLM is not installed: pip install vllm")
