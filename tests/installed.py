"""Tests of an installed S2O, through its commands in an empty folder, run by `make wheel`.

    python installed.py runtime    where only torch, triton and safetensors are installed beside it
    python installed.py patch      with transformers beside them, which brings numpy
    python installed.py whole      with the extra calibrate: a calibration of the demo model too

The last line says which Python and torch it was.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.prefix) / "bin"
SMALL = "--budget-rel-mse 1e-2 --lengths 1024 --segments 64,128 --trials 1 --num-prompts 1"
SMALL += " --num-held-out 1 --num-certify 0 --check-lengths none --device cpu --quiet --out p.safetensors"
OP = """
from pathlib import Path
import torch
import s2o_runtime
from s2o_runtime import LayerConfig, load_profile, s2o_attention
torch.manual_seed(0)
q, k, v = (torch.randn(1, heads, 1100, 128) for heads in (8, 2, 2))
out, _, stats = s2o_attention(q, k, v, LayerConfig.uniform(8, tau=0.0, segment=128), return_stats=True)
dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
torch.testing.assert_close(out, dense, rtol=1e-4, atol=1e-4)
profile = load_profile(next(Path(s2o_runtime.__file__).parent.glob("catalogue/demo/cpu/*.safetensors")))
out, _, stats = s2o_attention(q, k, v, profile.layer_config(0, 1100), return_stats=True)
assert out.isfinite().all() and 0 < stats.density.min() < 1
"""
PATCHED = """
import sys
from pathlib import Path
import torch
import s2o_runtime
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(Path(s2o_runtime.__file__).parents[1] / "calibrate/demo/model").eval()
ids = torch.randint(3, 256, (1, 1100))
with torch.no_grad():
    model(ids)  # the first call of a process may be less exact on a CPU (`s2o_runtime.reference`)
    dense = model(ids).logits
    with s2o_runtime.patched(model, *sys.argv[1:]):  # without a path, a profile that is installed
        sparse = model(ids).logits
        assert any(row["path"] == "s2o" for row in s2o_runtime.explain(model))
    assert model(ids).logits.equal(dense)
assert sparse.isfinite().all() and not sparse.equal(dense)
"""
BOUND = "from calibrate.proof.bounds import bound_mean; assert bound_mean([1.0, 2.0, 3.0], [''] * 3, 0.95) > 2"


def run(*command: str) -> str:
    """The standard output of a program that must succeed; with its name and time on this program's."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}
    begun = time.monotonic()
    outcome = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    name = " ".join([Path(command[0]).name, *command[1:3]]).partition("\n")[0]
    print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
    assert outcome.returncode == 0, outcome.stdout[-2000:] + outcome.stderr[-4000:]
    return outcome.stdout


def check_files() -> None:
    """The wheel holds the packages with their data, and nothing else."""
    files = [file for file in importlib.metadata.files("s2o") or () if file.suffix != ".pyc"]
    packages = {"s2o_runtime", "calibrate"}
    assert all(Path(file.locate()).is_relative_to(sys.prefix) for file in files)
    assert {file.parts[0].partition("-")[0] for file in files} == packages | {"..", "s2o"}  # the commands are in bin
    sources = [path for package in packages for path in (ROOT / package).rglob("*") if path.is_file()]
    sources += (ROOT / "s2o_runtime" / "catalogue").glob("*/*/*.safetensors")  # behind a link, which rglob leaves out
    expected = {path.relative_to(ROOT).as_posix() for path in sources if path.suffix not in (".pyc", ".md")}
    assert {file.as_posix() for file in files if file.parts[0] in packages} == expected


def check_runtime() -> None:
    """The op, and the doctor, which says that transformers is not there."""
    for name in ("numpy", "transformers", "optuna"):
        assert importlib.util.find_spec(name) is None, f"{name} is installed: expected an environment without it"
    check_files()
    run(sys.executable, "-c", OP)
    findings = json.loads(run(str(BIN / "s2o-doctor"), "--json"))
    assert "transformers" in json.dumps(findings)


def check_patch() -> None:
    """S2O changes what the demo model computes, and leaving restores it."""
    assert importlib.util.find_spec("optuna") is None, "optuna is installed: expected an environment without it"
    run(sys.executable, "-c", PATCHED)


def check_whole() -> None:
    """Every command answers; a calibration from the wheel's own model and texts, and what its profile does."""
    run(sys.executable, "-c", OP)
    run(str(BIN / "s2o-doctor"))
    assert "--budget-rel-mse" in run(str(BIN / "s2o-calibrate"), "--help")
    for command in ("s2o-profile", "s2o-eval", "s2o-run"):
        run(str(BIN / command), "--help")
    run(str(BIN / "s2o-calibrate"), "--model", "demo", *SMALL.split())
    evaluation = [str(BIN / "s2o-eval"), "--model", "demo", "--out-dir", "e", "--setting", "pbs:keep=0.9"]
    refused = subprocess.run(evaluation, capture_output=True, text=True, check=False)
    assert refused.returncode == 2, refused.stderr
    assert "the baselines are in the repository, not in the package: run from a clone" in refused.stderr
    assert "model         demo" in run(str(BIN / "s2o-profile"), "show", "p.safetensors")
    run(sys.executable, "-c", PATCHED, "p.safetensors")
    run(sys.executable, "-c", BOUND)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        {"runtime": check_runtime, "patch": check_patch, "whole": check_whole}[sys.argv[1]]()
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("s2o", "torch", "triton")]
    print(f"{sys.argv[1]}: as expected on Python {platform.python_version()} with {', '.join(versions)}")
