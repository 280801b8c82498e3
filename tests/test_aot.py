"""Every shipped kernel configuration, compiled for GPUs that are not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# The most shared memory one block may use, in bytes (CUDA programming guide, table of compute capabilities).
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "aot.py")], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_all_targets_are_covered(built):
    prefill = [entry for entry in built if entry["kernel"] == "prefill"]
    assert {(entry["capability"], entry["head_dim"]) for entry in prefill} == {
        (capability, head_dim) for capability in SHARED_LIMIT for head_dim in (64, 128)
    }


def test_the_loops_over_keys_are_pipelined(built):
    """No cp.async means that the pipeline, or the 16-byte divisibility of the rows, was lost."""
    lost = [entry["case"] for entry in built if entry["kernel"] == "prefill" and entry["built"]["cp_async"] == 0]
    assert lost == []


def test_tensor_cores_are_used(built):
    without = [e["case"] for e in built if e["kernel"] in ("prefill", "scores") and e["built"]["tensor_core"] == 0]
    assert without == []


def test_nothing_spills(built):
    """Spilled registers show as stack or local memory."""
    spilled = {e["case"]: e["built"] for e in built if e["built"]["stack"] or e["built"]["local"]}
    assert spilled == {}


def test_shared_memory_fits(built):
    beyond = {e["case"]: e["built"]["shared"] for e in built if e["built"]["shared"] > SHARED_LIMIT[e["capability"]]}
    assert beyond == {}
