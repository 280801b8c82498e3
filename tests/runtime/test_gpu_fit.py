import dataclasses
from types import SimpleNamespace

import pytest
import torch

from s2o_runtime import devices
from s2o_runtime.config import TileConfig
from s2o_runtime.devices import DeviceIdentity, Fit, decide_fit, get_capability, identify
from s2o_runtime.errors import InputError
from s2o_runtime.tiles import find_tile_obstacle, get_default_tile, list_candidate_tiles

H200 = DeviceIdentity("cuda", "NVIDIA H200", (9, 0), 132, 150 << 30)
CPU = DeviceIdentity("cpu", "cpu")


def test_the_same_gpu_takes_everything_and_a_cpu_runs_any_profile_with_the_reference():
    for memory in (150 << 30, 140 << 30):  # drivers keep different parts of it
        verdict = decide_fit(H200, dataclasses.replace(H200, memory_bytes=memory))
        assert verdict == Fit("profile", "the profile was made on this GPU")
    for made_on in (H200, CPU):
        assert decide_fit(made_on, CPU) == Fit("profile", "the reference backend runs any tile")


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(H200, name="NVIDIA H100 80GB HBM3", memory_bytes=80 << 30),
        dataclasses.replace(H200, name="NVIDIA H200 NVL"),  # begins like the other's name
        dataclasses.replace(H200, name="H200"),  # is a part of the other's name
        dataclasses.replace(H200, sm_count=114),
        dataclasses.replace(H200, memory_bytes=75 << 30),
        DeviceIdentity("cuda", "NVIDIA A100", (8, 0), 108, 80 << 30),
        DeviceIdentity("cuda", "NVIDIA GeForce RTX 5090", (12, 0), 170, 32 << 30),
    ],
    ids=lambda other: f"{other.name}-{other.sm_count}-{other.memory_bytes >> 30}",
)
def test_another_gpu_keeps_thresholds_and_takes_safe_tiles(other):
    for made_on in (H200, CPU):
        tiles, reason = decide_fit(made_on, other)
        assert (tiles, reason.partition(": ")[0]) == ("safe", f"the profile was made on {made_on}, this is {other}")
        assert reason.endswith(": run s2o-profile retile PROFILE, then s2o-profile verify PROFILE --model MODEL")
        assert list_candidate_tiles(128, other.capability)


@pytest.mark.parametrize(
    ("here", "reason"),
    [
        (DeviceIdentity("cuda", "Tesla V100", (7, 0), 80, 32 << 30), "is older than sm_80, the oldest"),
        (DeviceIdentity("cuda", "AMD Instinct MI300X", (9, 4), 304, 192 << 30), "is none of sm_80, sm_89, sm_90"),
        (DeviceIdentity("rocm", "AMD Instinct MI250X"), "there is no kernel for rocm (AMD Instinct MI250X)"),
        (DeviceIdentity("xpu", "xpu"), "there is no kernel for xpu: the"),
    ],
    ids=lambda case: getattr(case, "name", None),
)
def test_old_new_and_foreign_devices_stay_dense(here, reason):
    verdict = decide_fit(H200, here)
    assert verdict.tiles is None
    assert reason in verdict.reason
    assert verdict.reason.endswith(": the model stays dense")
    assert decide_fit(here, here) == verdict  # whatever the profile was made on


def test_a_gpu_that_torch_only_calls_cuda_is_not_one_of_nvidias(monkeypatch):
    """An MI250X says compute capability (9, 0), as an H200 does."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    properties = SimpleNamespace(name="AMD Instinct MI250X", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = torch.device("cuda", 17)
    assert identify(device) == DeviceIdentity("rocm", "AMD Instinct MI250X")
    assert get_capability(device) == (0, 0)
    devices.get_capability.cache_clear()


def test_tiles_are_legal_and_the_default_is_a_candidate():
    for pair in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        for head_dim in (64, 80, 96, 128, 192, 256):
            tiles = list_candidate_tiles(head_dim, pair)
            assert all(tile.validate() == tile for tile in tiles)
            if head_dim > 128 and pair not in ((9, 0), (10, 0)):  # they spill without wgmma and tcgen05
                assert tiles == ()
                reason = find_tile_obstacle(TileConfig(64, 32, 1, 8, 1), head_dim, pair)
                assert reason == f"head_dim {head_dim} has no tile on sm_{pair[0]}{pair[1]}"
                continue
            assert {find_tile_obstacle(tile, head_dim, pair) for tile in tiles} == {None}
            assert get_default_tile(head_dim, pair) in tiles
            assert len(set(tiles)) == len(tiles)


def test_neighbours_of_a_compiled_capability_take_its_tiles_and_others_have_none():
    for pair, family in (((8, 6), (8, 9)), ((8, 7), (8, 9)), ((10, 3), (10, 0)), ((12, 1), (12, 0))):
        assert list_candidate_tiles(128, pair) == list_candidate_tiles(128, family) != ()
    for pair in ((7, 5), (9, 4), (11, 0), (13, 0)):
        assert list_candidate_tiles(128, pair) == ()
        with pytest.raises(InputError, match=f"head_dim 128 has no tile on sm_{pair[0]}{pair[1]}: run it dense"):
            get_default_tile(128, pair)


SPECIALIZED = TileConfig(64, 128, 4, 4, 2, specialized=True)
TALLER = dataclasses.replace(SPECIALIZED, block_m=128, num_warps=8)
ONE_STAGE, FOUR_STAGES = (dataclasses.replace(SPECIALIZED, num_stages=stages) for stages in (1, 4))


@pytest.mark.parametrize(
    ("tile", "head_dim", "capability", "obstacle"),
    [
        (TileConfig(), 128, (7, 5), "compute capability 7.5 is older than 8.0"),
        (TileConfig(), 128, (11, 0), "head_dim 128 has no tile on sm_110"),
        (TileConfig(64, 32), 256, (8, 0), "head_dim 256 has no tile on sm_80"),
        (TileConfig(), 300, (9, 0), "head_dim 300 is not supported by the kernel (up to 256)"),
        (SPECIALIZED, 128, (10, 0), "tile 64x128x4 ws s2 is for sm_90, this GPU is sm_100"),
        # queries of 2 * 64 rows, and 2 stages of 128 keys and values: 640 rows of 512 bytes
        (SPECIALIZED, 160, (9, 0), "tile 64x128x4 ws s2 needs 320 KiB of shared memory for head_dim 160, of 227"),
        (dataclasses.replace(SPECIALIZED, block_n=64), 160, (9, 0), None),
        (TALLER, 128, (9, 0), "tile 128x128x4 ws s2 has no specialised kernel (block_m 64, 4 warps)"),
        (ONE_STAGE, 128, (9, 0), "ws s1 has no specialised kernel (block_n 64 or 128, 2 stages or more)"),
        # queries of 2 * 64 rows, and 4 stages of 128 keys and values: 1152 rows of 256 bytes
        (FOUR_STAGES, 100, (9, 0), "tile 64x128x4 ws s4 needs 288 KiB of shared memory for head_dim 100, of 227"),
        (TileConfig(128, 128, 1, 8, 4), 128, (8, 9), "needs 160 KiB of shared memory for head_dim 128, of 99"),
        (TileConfig(128, 128, 1, 8, 4), 128, (8, 0), None),
        (SPECIALIZED, 80, (9, 0), None),
    ],
)
def test_one_function_says_why_a_tile_is_not_legal(tile, head_dim, capability, obstacle):
    answer = find_tile_obstacle(tile.validate(), head_dim, capability)
    assert answer is None if obstacle is None else answer.endswith(obstacle)
