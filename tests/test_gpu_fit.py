import dataclasses
from types import SimpleNamespace

import pytest
import torch

from s2o_runtime import gpu
from s2o_runtime.errors import InputError
from s2o_runtime.gpu import Accepted, DeviceIdentity, Rejected, candidate_tiles, capability, default_tile, fit, identify

H200 = DeviceIdentity("cuda", "NVIDIA H200", (9, 0), 132, 150 << 30)
CPU = DeviceIdentity("cpu", "cpu")


def test_the_same_gpu_takes_everything():
    for memory in (150 << 30, 140 << 30):  # drivers keep different parts of it
        verdict = fit(H200, dataclasses.replace(H200, memory_bytes=memory))
        assert verdict == Accepted("profile", "the profile was made on this GPU")


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(H200, name="NVIDIA H100 80GB HBM3", memory_bytes=80 << 30),
        dataclasses.replace(H200, name="NVIDIA H200 NVL"),  # begins like the other's name
        dataclasses.replace(H200, name="H200"),  # is a part of the other's name
        dataclasses.replace(H200, sm_count=114),
        dataclasses.replace(H200, memory_bytes=75 << 30),
        DeviceIdentity("cuda", "NVIDIA A100", (8, 0), 108, 80 << 30),
        DeviceIdentity("cuda", "NVIDIA GeForce RTX 3090", (8, 6), 82, 24 << 30),
        DeviceIdentity("cuda", "NVIDIA B200", (10, 0), 148, 180 << 30),
        DeviceIdentity("cuda", "NVIDIA GeForce RTX 5090", (12, 0), 170, 32 << 30),
    ],
    ids=lambda other: f"{other.name}-{other.sm_count}-{other.memory_bytes >> 30}",
)
def test_another_gpu_keeps_thresholds_and_takes_safe_tiles(other):
    for made_on in (H200, CPU):
        verdict = fit(made_on, other)
        assert verdict == Accepted(
            "safe",
            f"the profile was made on {made_on}, this is {other}: thresholds kept, safe tiles used; "
            "tune them for this GPU with: s2o-calibrate --retile PROFILE",
        )
        assert candidate_tiles(128, other.capability)


def test_a_cpu_runs_any_profile_with_the_reference():
    for made_on in (H200, CPU):
        assert fit(made_on, CPU) == Accepted("profile", "the reference backend runs any tile")


@pytest.mark.parametrize(
    ("here", "reason"),
    [
        (DeviceIdentity("cuda", "Tesla V100", (7, 0), 80, 32 << 30), "is older than sm_80, the oldest"),
        (DeviceIdentity("cuda", "NVIDIA Thor", (11, 0), 20, 128 << 30), "is none of sm_80, sm_89, sm_90, sm_100"),
        (DeviceIdentity("cuda", "NVIDIA X", (13, 0), 200, 128 << 30), "is none of sm_80, sm_89, sm_90, sm_100"),
        (DeviceIdentity("cuda", "AMD Instinct MI300X", (9, 4), 304, 192 << 30), "is none of sm_80, sm_89, sm_90"),
        (DeviceIdentity("rocm", "AMD Instinct MI250X"), "there is no kernel for rocm (AMD Instinct MI250X)"),
        (DeviceIdentity("xpu", "xpu"), "there is no kernel for xpu: the"),
        (DeviceIdentity("mps", "mps"), "there is no kernel for mps: the"),
    ],
    ids=lambda case: getattr(case, "name", None),
)
def test_old_new_and_foreign_devices_stay_dense(here, reason):
    verdict = fit(H200, here)
    assert isinstance(verdict, Rejected)
    assert reason in verdict.reason
    assert verdict.reason.endswith(": the model stays dense")
    assert fit(here, here) == verdict  # whatever the profile was made on


def test_a_gpu_that_torch_only_calls_cuda_is_not_one_of_nvidias(monkeypatch):
    """An MI250X says compute capability (9, 0), as an H200 does."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    properties = SimpleNamespace(name="AMD Instinct MI250X", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = torch.device("cuda", 17)
    assert identify(device) == DeviceIdentity("rocm", "AMD Instinct MI250X")
    assert capability(device) == (0, 0)
    gpu.capability.cache_clear()


def test_tiles_are_legal_and_the_default_is_a_candidate():
    for pair in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        for head_dim in (64, 128):
            tiles = candidate_tiles(head_dim, pair)
            assert all(tile.validate() == tile for tile in tiles)
            assert default_tile(head_dim, pair) in tiles
            assert len(set(tiles)) == len(tiles)


@pytest.mark.parametrize("pair", [(7, 5), (9, 4), (11, 0), (13, 0)])
def test_a_capability_without_a_compiled_path_has_no_tiles(pair):
    assert candidate_tiles(128, pair) == ()
    with pytest.raises(InputError, match=f"head_dim 128 has no tile on sm_{pair[0]}{pair[1]}: run it dense"):
        default_tile(128, pair)


def test_neighbours_of_a_compiled_capability_take_its_tiles():
    for pair, family in (((8, 6), (8, 9)), ((8, 7), (8, 9)), ((10, 3), (10, 0)), ((12, 1), (12, 0))):
        assert candidate_tiles(128, pair) == candidate_tiles(128, family) != ()
