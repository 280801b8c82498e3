import dataclasses

from s2o_runtime.gpu import Accepted, DeviceIdentity, Rejected, candidate_tiles, default_tile, fit

H200 = DeviceIdentity("cuda", "NVIDIA H200", (9, 0), 132, 150 << 30)
CPU = DeviceIdentity("cpu", "cpu")


def test_the_same_gpu_takes_everything():
    verdict = fit(H200, dataclasses.replace(H200, memory_bytes=140 << 30))
    assert isinstance(verdict, Accepted)
    assert verdict.tiles == "profile"


def test_another_gpu_keeps_thresholds_and_takes_safe_tiles():
    for other in (
        dataclasses.replace(H200, name="NVIDIA H100 80GB HBM3"),
        dataclasses.replace(H200, sm_count=114),
        DeviceIdentity("cuda", "NVIDIA A100", (8, 0), 108, 80 << 30),
    ):
        verdict = fit(H200, other)
        assert isinstance(verdict, Accepted)
        assert verdict.tiles == "safe"
        assert other.name in verdict.reason
    assert isinstance(fit(CPU, H200), Accepted)
    assert fit(CPU, H200).tiles == "safe"


def test_a_cpu_runs_any_profile_with_the_reference():
    assert isinstance(fit(H200, CPU), Accepted)
    assert fit(H200, CPU).tiles == "profile"


def test_old_and_foreign_devices_stay_dense():
    old = fit(H200, DeviceIdentity("cuda", "Tesla V100", (7, 0), 80, 32 << 30))
    assert isinstance(old, Rejected)
    assert "sm_80" in old.reason
    assert isinstance(fit(H200, DeviceIdentity("xpu", "xpu")), Rejected)


def test_tiles_are_legal_and_the_default_is_a_candidate():
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        for head_dim in (64, 128):
            tiles = candidate_tiles(head_dim, capability)
            assert all(tile.validate() == tile for tile in tiles)
            assert default_tile(head_dim, capability) in tiles
            assert len(set(tiles)) == len(tiles)
