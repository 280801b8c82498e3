"""A profile's tiles tuned for another GPU, here a pretended one: its timer is a table, its curves are measured."""

import math
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calibrate.curves.curves import TAUS, RankingConfig, Shape
from calibrate.curves.measure import measure
from calibrate.profiles import retile as module
from calibrate.profiles.retile import OTHER_HEIGHT, interpolate_tau, retile
from calibrate.record import read_record
from calibrate.timing import Timing
from s2o_runtime.config import HeadConfig, LayerConfig, StopRule, TileConfig
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.errors import InputError
from s2o_runtime.identity import Geometry
from s2o_runtime.profile import Profile, load_profile, save_profile
from s2o_runtime.tiles import list_candidate_tiles

GEOMETRY = Geometry("llama", 3, 4, 2, 64)
H200 = DeviceIdentity("cuda", "NVIDIA H200", (9, 0), 132, 1 << 37)
A100 = DeviceIdentity("cuda", "pretended", (8, 0), 108, 1)
CPU = DeviceIdentity("cpu", "cpu")
A100_TILES = list_candidate_tiles(64, A100.capability)
FORMER = TileConfig(64, 128, 4, 4, 3, specialized=True, dense_below=1024)  # rows 128, stride 512
DENSITY = 0.8


def layer(density_of_heads="ssss", segment=256, tile=FORMER, tau=0.125):
    heads = tuple(
        HeadConfig(tau + index, segment, mode, StopRule.REST, (1, 16)[index % 2], "mean" if index == 1 else "none")
        for index, mode in enumerate("s2o" if letter == "s" else "dense" for letter in density_of_heads)
    )
    return LayerConfig(heads, tile).validate()


def profile(buckets, densities, device=H200, proof="held out", lengths=(1024, 2048)):
    proven = [
        {"length": length, "layers": [{"density": density} for density in row]}
        for length, row in zip(lengths, densities, strict=True)
    ]
    record = {"proof": proof, "held_out": proven, "budget": {"kind": "mse", "value": 1e-4}, "new": [1]}
    return Profile("demo", GEOMETRY, "f" * 64, device, lengths, tuple(map(tuple, buckets)), record)


CURVES = {}


def measure_once(prompt, rankings, shapes, last_rows=0):
    """Return what `measure` gives, once for each argument: prompts of one length are the same in every test."""
    key = (prompt.q.shape, tuple(rankings), tuple(shapes), last_rows)
    if key not in CURVES:
        CURVES[key] = measure(prompt, rankings, shapes, last_rows)
    return CURVES[key]


@pytest.fixture
def old(tmp_path):
    before = profile([[layer(), layer(), layer("dddd")]] * 2, [[DENSITY, DENSITY + 0.01, 1.0]] * 2)
    save_profile(before, tmp_path / "old.safetensors")
    return before


class PretendedGpu:
    """A timer: `seconds` of a configuration, where dense attention takes 1; `calls` are the (configuration, length)."""

    def __init__(self):
        self.calls, self.seconds = [], lambda config: 0.5

    def time(self, call, dense, device, dense_seconds):
        q, _, _, config = call.args
        self.calls.append((config, q.shape[2]))
        assert dense.__self__.q is q
        seconds = self.seconds(config)
        return Timing(seconds, 1.0)

    def cross(self, layer, geometry, device):
        return replace(layer.config.tile, dense_below=layer.length, min_queries=round(100 * layer.density))


@pytest.fixture
def gpu(monkeypatch):
    gpu = PretendedGpu()
    monkeypatch.setattr(module, "measure", measure_once)
    monkeypatch.setattr(module, "compile_ahead", list)
    monkeypatch.setattr(module, "identify", lambda device: A100)
    monkeypatch.setattr(module, "time_against_dense", gpu.time)
    monkeypatch.setattr(module, "with_crossover", gpu.cross)
    return gpu


def run(tmp_path, before=None):
    """The profile, the one of `old` by default, with other tiles, as it was returned and as it was written."""
    if before is not None:
        save_profile(before, tmp_path / "old.safetensors")
    out = tmp_path / "new" / "new.safetensors"
    done = retile(tmp_path / "old.safetensors", "cpu", out)
    assert load_profile(out) == done
    return done


def sparse_and_dense(first, density):
    """A profile whose other layers are dense."""
    return profile([[first, layer("dddd"), layer("dddd")]], [[density, 1.0, 1.0]], lengths=(2048,))


def test_the_fastest_tile_is_taken_and_nothing_else_changes(old, gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LONGEST", 1024)  # crossovers are those of the bucket nevertheless
    fastest = next(tile for tile in A100_TILES if (tile.block_m, tile.stride) == (64, 1024))
    gpu.seconds = lambda config: 0.3 if config.tile == fastest else 0.5
    new = run(tmp_path)
    assert (new.device, new.fingerprint, new.lengths) == (A100, old.fingerprint, old.lengths)
    for before, after, length in zip(old.layers, new.layers, old.lengths, strict=True):
        expected = replace(fastest, dense_below=length, min_queries=80)  # at a DENSITY of 0.8
        assert [config.tile for config in after[:2]] == [expected] * 2
        assert after[2].tile in A100_TILES
        for was, config in zip(before, after, strict=True):
            assert config.heads == was.heads  # bit for bit: tau went through float32 in both
    retiled = read_record(new).retiled
    assert (retiled.dense_layers, retiled.made_on, retiled.tuned_for) == (0, str(H200), str(A100))
    assert {"s2o", "torch", "triton"} <= set(retiled.versions)
    timed = retiled.timed[0]
    assert (timed.seconds, timed.dense_seconds, timed.density, timed.timed_at) == (0.3, 1.0, DENSITY, 1024)
    assert new.record["proof"] == f"held out on {H200}"
    for name in old.record.keys() - {"proof"}:  # also what this version does not understand
        assert new.record[name] == old.record[name]
    again = retile(tmp_path / "new" / "new.safetensors", "cpu", tmp_path / "again.safetensors")  # now its own GPU
    assert again.record["proof"] == f"held out on {H200}"
    assert again.layers == new.layers


def test_heads_are_timed_at_the_density_that_the_record_gives(gpu, tmp_path):
    """Half of the heads are dense, so the others do all the skipping."""
    run(tmp_path, sparse_and_dense(layer("ssdd"), (DENSITY + 1) / 2))
    prompt, shape = module._make_inputs(GEOMETRY, 2048, torch.device("cpu")), Shape.from_tile(FORMER)
    config, _ = gpu.calls[0]
    assert [head.mode for head in config.heads] == ["s2o", "s2o", "dense", "dense"]
    for index, head in enumerate(config.heads[:2]):
        method = RankingConfig(head.segment, head.representatives)
        density = measure(prompt, [method], [shape])[method, shape].density[index]
        assert TAUS[0] < head.tau < TAUS[-1]
        above = next(i for i, tau in enumerate(TAUS) if tau > head.tau * (1 + 1e-9))
        assert float(density[above]) - 1e-9 <= DENSITY <= float(density[above - 1]) + 1e-9
    assert config.heads[0].tau != config.heads[1].tau


def test_no_tile_checks_more_often_than_the_profile_did(gpu, tmp_path):
    for stride in (256, 512, 1024, 2048):
        gpu.calls.clear()
        run(tmp_path, sparse_and_dense(layer(tile=replace(FORMER, chunk=stride // 128, dense_below=0)), 0.6))
        strides = {config.tile.stride for config, _ in gpu.calls}
        assert strides == {each for each in (256, 512, 1024) if each >= stride} or (stride, strides) == (2048, {2048})


def test_a_layer_without_a_legal_tile_becomes_dense(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "list_candidate_tiles", lambda *_: tuple(t for t in A100_TILES if t.block_m == 128))
    before = profile([[layer(segment=192, tile=TileConfig(64, 64, 8, 8, 2)), layer(), layer()]] * 2, [[0.6] * 3] * 2)
    done = run(tmp_path, before)
    assert [config.is_dense for config in done.layers[0]] == [True, False, False]
    retiled = read_record(done).retiled
    assert (retiled.timed[0].tile, retiled.dense_layers) == (None, 2)


def test_layers_that_lose_to_dense_become_dense(gpu, tmp_path):
    before = profile([[layer(), layer(segment=512), layer(segment=512)]] * 2, [[0.3, 0.9, 0.9]] * 2, proof="failed")
    gpu.seconds = lambda config: 1.1 if config.heads[0].segment == 512 else 0.5
    done = run(tmp_path, before)
    assert done.record["proof"] == "failed"  # as before
    for bucket in done.layers:
        assert [config.is_dense for config in bucket] == [False, True, True]
        assert [head.tau for head in bucket[1].heads] == [0.125, 1.125, 2.125, 3.125]
    assert read_record(done).retiled.dense_layers == 4


@pytest.mark.parametrize("faster", [1.02, 1.1])
def test_another_height_must_be_clearly_faster(faster, old, gpu, tmp_path):
    assert 1.02 < OTHER_HEIGHT < 1.1
    gpu.seconds = lambda config: 0.5 if config.tile.block_m == FORMER.block_m else 0.5 / faster
    heights = {config.tile.block_m for config in run(tmp_path).layers[0][:2]}
    assert heights == ({64} if faster < OTHER_HEIGHT else {128})


def test_tiles_that_fail_are_passed_over(old, gpu, tmp_path):
    out_of_resources = Mock(side_effect=RuntimeError("out of resources: shared memory\nmore"))
    gpu.seconds = lambda config: out_of_resources() if config.tile.block_m == 64 else 0.5
    assert {config.tile.block_m for config in run(tmp_path).layers[0][:2]} == {128}


LACKS_DENSITIES = r"does not give every layer's density at \[1024, 2048\] tokens: use a"


@pytest.mark.parametrize(
    ("changes", "identity", "sentence"),
    [
        ({"record": {}}, A100, LACKS_DENSITIES),
        ({"record": {"held_out": [{"length": 1024}]}}, A100, LACKS_DENSITIES),
        ({"record": {"held_out": [{"length": 1024, "layers": [{"density": 1}]}]}}, A100, LACKS_DENSITIES),
        ({}, DeviceIdentity("cuda", "old", (7, 5), 40, 1), r"tuned here: old \(sm_75, 40 SMs\) is older than"),
        ({"geometry": replace(GEOMETRY, head_dim=256)}, A100, "head_dim 256 has no tile on sm_80: run it dense"),
    ],
    ids=["none", "no-layers", "one-layer", "old-gpu", "wide"],
)
def test_bad_input_is_one_sentence(changes, identity, sentence, old, gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "identify", lambda device: identity)
    with pytest.raises(InputError, match=sentence):
        run(tmp_path, replace(old, **changes))
    assert not (tmp_path / "new").exists()


@given(
    steps=st.lists(st.floats(0, 0.1), min_size=len(TAUS), max_size=len(TAUS)),
    first=st.floats(0.05, 1),
    target=st.floats(0, 1),
)
def test_a_tau_is_interpolated_in_its_logarithm(steps, first, target):
    densities = (first - torch.tensor([0.0, *steps[1:]], dtype=torch.float64).cumsum(0)).clamp(min=0)
    tau = interpolate_tau(densities, target)
    if target > densities[0]:  # denser than all that was measured: the nearest, or 0, which computes everything
        assert tau == (0.0 if 1 - target < target - float(densities[0]) else TAUS[0])
    elif target < densities[-1]:
        assert tau == TAUS[-1]
    else:
        logs = [math.log(value) for value in TAUS]
        assert np.interp(math.log(tau), logs, densities) == pytest.approx(target, abs=1e-9)


def test_a_tau_of_equal_densities_is_the_smallest():
    flat = torch.full((len(TAUS),), 0.5, dtype=torch.float64)
    assert (interpolate_tau(flat, 0.5), interpolate_tau(flat, 0.4)) == (TAUS[0], TAUS[-1])
