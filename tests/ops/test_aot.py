"""The rules that `make aot` holds compiled kernels to: each catches what it is for, and every kernel is compiled."""

import pytest

from aot import RULES, VARIANTS, Case, Compiled, broken_rules, cases, largest
from s2o_runtime.config import HEAD_DIMS, TileConfig
from s2o_runtime.tiles import SHARED_MEMORY

LANES = "#ttg.blocked<{sizePerThread = [1, 1], threadsPerWarp = [1, 32], warpsPerCTA = [4, 1], order = [1, 0]}>"


def compiled(**changes):
    """Return what a good kernel for sm_90 with 128 x 64 tiles of head dimension 128 might be."""
    good = {"cp_async": 32, "wgmma": 24, "tcgen05": 0, "mma_sync": 0, "shared": 98304}
    return Compiled(**{**good, "stack": 0, "local": 0, "assembly_layouts": (LANES,), **changes})


@pytest.mark.parametrize(
    ("rule", "case", "changes"),
    [
        ("pipelined", Case("prefill", 90, 128, TileConfig(num_stages=2)), {"cp_async": 31}),
        ("pipelined", Case("prefill_hopper", 90, 128, TileConfig(64, 64, 4, 4, 2, True)), {"cp_async": 31}),
        ("tensor_cores", Case("prefill", 90, 128, TileConfig()), {"wgmma": 0, "mma_sync": 192}),
        ("tensor_cores", Case("scores", 80, 128, rows=16), {"wgmma": 0}),
        ("tensor_cores", Case("tail", 90, 64), {"wgmma": 0, "mma_sync": 64}),
        ("shared_memory", Case("prefill", 89, 128, TileConfig()), {"shared": (99 << 10) + 1}),
        ("no_spills", Case("scores", 90, 128, rows=16), {"stack": 8}),
        ("no_spills", Case("means", 90, 128), {"local": 8}),
        ("no_spills", Case("prefill_hopper", 90, 256, TileConfig(64, 64, 4, 4, 2, True)), {"stack": 312}),
        ("one_key_a_lane", Case("order", 90), {"assembly_layouts": (LANES.replace("[1, 32]", "[4, 8]"),)}),
        ("one_key_a_lane", Case("order", 90), {"assembly_layouts": ()}),
    ],
)
def test_each_rule_catches_what_it_is_for(rule, case, changes):
    good = {"cp_async": 64} if case.head_dim == 256 else {}
    assert broken_rules(case, compiled(**good)) == {}
    assert list(broken_rules(case, compiled(**(good | changes)))) == [rule]


def test_every_rule_was_tried():
    tried = {parameters[0] for parameters in test_each_rule_catches_what_it_is_for.pytestmark[0].args[1]}
    assert tried == {rule.__name__ for rule in RULES}


def test_all_kernels_are_compiled_for_all_targets():
    prefill = [case for case in cases() if case.tile and case.kernel not in ("block_sparse", "antidiagonal")]
    covered = {(case.capability, case.head_dim, case.variant) for case in prefill if case.variant in VARIANTS}
    # head_dim 256 spills on the GPUs without wgmma or tcgen05: it has no tile there and runs dense
    targets = [(cap, dim) for cap in SHARED_MEMORY for dim in HEAD_DIMS if dim <= 128 or cap in (90, 100)]
    assert covered == {(*target, variant) for target in targets for variant in VARIANTS}
    assert {case.kernel for case in cases() if case.capability == 90 and case.head_dim in (64, 128)} == {
        "prefill", "prefill_hopper", "means", "scores", "tail", "trace",
        "block_sparse", "pool_blocks", "mean_key_mass", "antidiagonal", "gather_pages", "combine",
    }  # fmt: skip


def test_quick_leaves_no_kernel_gpu_or_variant_out():
    every, some = cases(), largest(cases())
    assert len(some) < len(every) / 3
    assert {(case.kernel, case.capability, case.variant) for case in some} == {
        (case.kernel, case.capability, case.variant) for case in every
    }
    (hopper,) = (case for case in some if (case.kernel, case.variant) == ("prefill_hopper", ""))
    assert hopper.head_dim == max(case.head_dim for case in every if case.kernel == "prefill_hopper")
