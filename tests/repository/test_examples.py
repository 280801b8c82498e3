"""The examples, one of them a notebook, run as their docstrings say and print what they promise."""

import os
import re
import subprocess
import sys

import pytest

from support.pages import DEMO_PROFILE, ROOT

EXHAUSTIVE = pytest.mark.exhaustive(reason="runs a whole calibration or generation in a process of its own")

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PATHS = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
ENVIRONMENT = os.environ | {"PYTHONPATH": PATHS}
H200_PROFILE = ROOT / "profiles" / "demo" / "nvidia-h200" / "rel-mse-0.001.safetensors"


def run(name, *arguments, needs=None):
    if needs is not None:
        pytest.importorskip(needs, reason=f"the example needs {needs}, which is not installed here")
    command = [sys.executable, ROOT / "examples" / name, *map(str, arguments)]
    environment = ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ""}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert finished.returncode == 0, finished.stderr[-1000:]
    assert "the old name goes with" not in finished.stderr, "examples show today's names"
    return finished.stdout.splitlines()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_to_run_it(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) < 80
    assert f"    python examples/{path.name}" in "\n".join(lines[:5])


# the arguments of an example, and what it prints, as regular expressions; OUT is a file that it writes
PRINTED = {
    "attention_op.py": ([], [r"density 1\.0.*backend reference", r"density 0\.[0-8].*backend reference"]),
    "patch_and_generate.py": (
        [DEMO_PROFILE, 1024],
        [
            r"^code (\d+): dense says \1, S2O says \1$",
            r"^prefill: dense .*\(plain torch: no measure of a GPU\)$",
            " s2o .*no GPU",
        ],
    ),
    "calibrate_api.py": (["OUT"], ["^written$"]),
    "own_prompts.py": (
        [ROOT / "docs", "OUT"],
        ["^written$", "^2 prompts to calibrate on, 1 to adjust on, 4 to certify"],
    ),
    "new_gpu.py": (
        ["OUT", H200_PROFILE],
        ["^as it is: the reference backend runs any tile$", "^thresholds are the same, 0"],
    ),
}


@EXHAUSTIVE
@pytest.mark.parametrize("name", PRINTED)
def test_an_example_prints_what_it_promises(name, tmp_path):
    arguments, expected = PRINTED[name]
    out = tmp_path / "p.safetensors"
    lines = run(name, *(out if argument == "OUT" else argument for argument in arguments))
    for pattern in expected:
        assert any(re.search(pattern, line) for line in lines), (pattern, lines)
    assert out.is_file() == ("OUT" in arguments)


@EXHAUSTIVE
def test_continuous_batching_answers_and_runs_s2o_in_the_long_prompts():
    import transformers

    if not hasattr(transformers, "ContinuousBatchingConfig"):
        pytest.skip("this transformers has another form of continuous batching")
    lines = run("continuous_batching.py", DEMO_PROFILE, 1100, needs="psutil")
    answers = {line.split("answers ")[1] for line in lines if "answers" in line}
    expected = {line.removeprefix("expected ") for line in lines if line.startswith("expected")}
    assert len(expected) == 2
    assert expected < answers
    assert sum(" s2o " in line for line in lines) > 3  # most of the 6 layers


@pytest.fixture
def notebook():
    nbformat = pytest.importorskip("nbformat", reason="the notebook is read with nbformat: pip install nbclient")
    return nbformat.read(ROOT / "examples" / "look_inside.ipynb", as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_the_notebook_is_kept_without_outputs(notebook):
    assert code_cells(notebook)
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code_cells(notebook))


@EXHAUSTIVE
def test_every_cell_of_the_notebook_runs(notebook, tmp_path):
    pytest.importorskip("ipykernel", reason="the notebook runs in ipykernel: pip install nbclient ipykernel")
    from nbclient import NotebookClient

    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=ENVIRONMENT)
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    assert "written: True; needles kept: 2 of 2" in printed
    assert "S2O finds 2 of 2 codes" in printed
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
