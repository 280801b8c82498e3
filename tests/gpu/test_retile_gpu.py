"""A profile of another GPU tuned on this one: with real kernels, and faster than dense where little is computed."""

import time
from dataclasses import replace

import torch

from calibrate.profiles.retile import retile
from s2o_runtime.config import HeadConfig, LayerConfig, StopRule, TileConfig
from s2o_runtime.devices import DeviceIdentity, identify
from s2o_runtime.identity import Geometry
from s2o_runtime.profile import Profile, load_profile, save_profile
from s2o_runtime.tiles import list_candidate_tiles

GEOMETRY = Geometry("llama", 3, 16, 4, 128)
LENGTHS = (8192, 32768)
FORMER = TileConfig(128, 32, 16, 8, 3)
SPARSE, HALF, FULL = 0.2, 0.5, 1.0


def layer(representatives, tail):
    heads = [HeadConfig(1.0 + index, 512, "s2o", StopRule.REST, representatives, tail) for index in range(16)]
    return LayerConfig(tuple(heads), FORMER).validate()


def test_tiles_are_tuned_and_thresholds_kept(tmp_path):
    proven = [{"length": length, "layers": [{"density": each} for each in (SPARSE, HALF, FULL)]} for length in LENGTHS]
    bucket = (layer(1, "mean"), layer(16, "none"), layer(16, "mean"))
    other = DeviceIdentity("cuda", "NVIDIA A100", (8, 0), 108, 1 << 36)
    record = {"proof": "held out", "held_out": proven}
    old = Profile("demo", GEOMETRY, "f" * 64, other, LENGTHS, (bucket, bucket), record)
    save_profile(old, tmp_path / "old.safetensors")
    began = time.monotonic()
    done = retile(tmp_path / "old.safetensors", "cuda", tmp_path / "new.safetensors")
    seconds = time.monotonic() - began
    print(f"{seconds:.0f} s", *done.record["retiled"]["kinds"], sep="\n")
    new = load_profile(tmp_path / "new.safetensors")
    here = identify(torch.device("cuda"))
    candidates = {replace(tile, chunk=1) for tile in list_candidate_tiles(128, here.capability)}
    assert new.device == here
    for of_old, of_new in zip(old.layers, new.layers, strict=True):
        for before, config in zip(of_old, of_new, strict=True):
            assert [head.tau for head in config.heads] == [head.tau for head in before.heads]
            assert replace(config.tile, chunk=1, dense_below=0, min_queries=0, tail_keys=0) in candidates
            assert config.is_dense or config.tile.stride >= FORMER.stride
    assert new.layers[0][2].is_dense  # computing everything and ranking it too is not faster at 8192 tokens
    assert not new.layers[1][0].is_dense
    assert 0 < new.layers[1][0].tile.dense_below < LENGTHS[1]
    assert 2 <= new.layers[1][0].tile.min_queries < 8192
    assert seconds < 120
