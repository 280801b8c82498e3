"""Tests of an installed S2O, through its commands in an empty folder, run by `make wheel`.

    python installed.py runtime    where only torch, triton and safetensors are installed beside it
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

BIN = Path(sys.prefix) / "bin"
SMALL = "--budget-rel-mse 1e-2 --lengths 512 --segments 64,128 --trials 1 --num-prompts 1"
SMALL += " --num-held-out 1 --num-certify 0 --check-lengths none --device cpu --quiet --out p.safetensors"
OP = """
import torch
from s2o_runtime import LayerConfig, TileConfig, s2o_attention
torch.manual_seed(0)
q, k, v = (torch.randn(1, heads, 600, 64) for heads in (4, 2, 2))
out, _, stats = s2o_attention(q, k, v, LayerConfig.uniform(4, tau=0.0, segment=128), return_stats=True)
dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
torch.testing.assert_close(out, dense, rtol=1e-4, atol=1e-4)
stopping = LayerConfig.uniform(4, tau=2.0, segment=64, tile=TileConfig(64, 32, 1, 4, 1))
skipping = s2o_attention(q, k, v, stopping, return_stats=True)
assert skipping.density.max() < 1
"""
PATCHED = """
import sys
from pathlib import Path
import torch
import calibrate, s2o_runtime
from calibrate.model.models import load
from calibrate.proof.bounds import bound_mean
assert bound_mean([1.0, 2.0, 3.0], [""] * 3, 0.95) > 2  # the mean, with some doubt
assert all(Path(package.__file__).is_relative_to(sys.prefix) for package in (calibrate, s2o_runtime))
model = load("demo", "cpu", resident=True).model
ids = torch.randint(3, 256, (1, 512))
with torch.no_grad(), s2o_runtime.patched(model, "p.safetensors", strict=True):
    sparse = model(ids).logits
    assert any(row["path"] == "s2o" for row in s2o_runtime.explain(model))
with torch.no_grad():
    assert sparse.isfinite().all() and not sparse.equal(model(ids).logits)
with torch.no_grad(), s2o_runtime.patched(model, strict=True):  # with a profile of the catalogue that is installed
    model(torch.randint(3, 256, (1, 1100)))
    assert any(row["path"] == "s2o" for row in s2o_runtime.explain(model))
"""


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


def check_runtime() -> None:
    """The op, and the doctor, which says that transformers is not there."""
    for name in ("numpy", "transformers", "optuna"):
        assert importlib.util.find_spec(name) is None, f"{name} is installed: expected an environment without it"
    run(sys.executable, "-c", OP)
    findings = json.loads(run(str(BIN / "s2o-doctor"), "--json"))
    assert "transformers" in json.dumps(findings)


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
    run(sys.executable, "-c", PATCHED)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        {"runtime": check_runtime, "whole": check_whole}[sys.argv[1]]()
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("s2o", "torch", "triton")]
    print(f"{sys.argv[1]}: as expected on Python {platform.python_version()} with {', '.join(versions)}")
