"""Every shipped kernel configuration, compiled for GPUs that are not here, with the Triton that is installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aot import RULES, VARIANTS, Case, Compiled, broken_rules
from s2o_runtime.config import HEAD_DIMS, TileConfig
from s2o_runtime.tiles import SHARED_MEMORY

EXHAUSTIVE = pytest.mark.exhaustive(reason="compiles every kernel for every GPU, as `make aot` does: minutes")

ROOT = Path(__file__).parent.parent
LANES = "#ttg.blocked<{sizePerThread = [1, 1], threadsPerWarp = [1, 32], warpsPerCTA = [4, 1], order = [1, 0]}>"


@pytest.fixture(scope="module")
def built():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "aot.py")], env=environment, capture_output=True, text=True, check=False
    )
    assert run.stdout, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@EXHAUSTIVE
def test_all_targets_are_covered(built):
    prefill = [entry for entry in built if entry["tile"] and entry["kernel"] not in ("block_sparse", "antidiagonal")]
    covered = {(entry["capability"], entry["head_dim"], entry["variant"]) for entry in prefill}
    # head_dim 256 spills on the GPUs without wgmma or tcgen05: it has no tile there and runs dense
    targets = [(cap, dim) for cap in SHARED_MEMORY for dim in HEAD_DIMS if dim <= 128 or cap in (90, 100)]
    assert covered == {(*target, variant) for target in targets for variant in VARIANTS}
    assert {entry["kernel"] for entry in built if entry["capability"] == 90 and entry["head_dim"] in (64, 128)} == {
        "prefill", "prefill_hopper", "representatives", "log_sums", "scores", "pool", "tail", "trace",
        "block_sparse", "pool_blocks", "antidiagonal",
    }  # fmt: skip


@EXHAUSTIVE
def test_no_rule_is_broken(built):
    """The rules are those of `aot.py`, which also checks them for the other versions of Triton."""
    broken = [f"{entry['case']}: {rule}: {text}" for entry in built for rule, text in entry["broken"].items()]
    assert not broken, "\n".join(broken)


def compiled(**changes):
    """What a good kernel for sm_90 with 128 x 64 tiles of head dimension 128 might be."""
    good = {"cp_async": 32, "wgmma": 24, "tcgen05": 0, "mma_sync": 0, "shared": 98304, "registers": 190}
    return Compiled(**{**good, "stack": 0, "local": 0, "assembly_layouts": (LANES,), **changes})


@pytest.mark.parametrize(
    ("rule", "case", "changes"),
    [
        ("pipelined", Case("prefill", 90, 128, TileConfig(num_stages=2)), {"cp_async": 31}),
        ("pipelined", Case("prefill_hopper", 90, 128, TileConfig(64, 64, 4, 4, 2, True)), {"cp_async": 31}),
        ("tensor_cores", Case("prefill", 90, 128, TileConfig()), {"wgmma": 0, "mma_sync": 192}),
        ("tensor_cores", Case("scores", 80, 128, rows=16), {"wgmma": 0}),
        ("shared_memory", Case("prefill", 89, 128, TileConfig()), {"shared": (99 << 10) + 1}),
        ("no_spills", Case("representatives", 90, 128), {"stack": 8}),
        ("no_spills", Case("representatives", 90, 128), {"local": 8}),
        ("one_key_a_lane", Case("order", 90), {"assembly_layouts": (LANES.replace("[1, 32]", "[4, 8]"),)}),
        ("one_key_a_lane", Case("order", 90), {"assembly_layouts": ()}),
    ],
)
def test_each_rule_catches_what_it_is_for(rule, case, changes):
    assert broken_rules(case, compiled()) == {}
    assert list(broken_rules(case, compiled(**changes))) == [rule]


def test_every_rule_was_tried():
    tried = {parameters[0] for parameters in test_each_rule_catches_what_it_is_for.pytestmark[0].args[1]}
    assert tried == {rule.__name__ for rule in RULES}
