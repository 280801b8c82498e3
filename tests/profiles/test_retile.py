"""A profile's tiles tuned for another GPU, here a pretended one: its timer is a table, its curves are measured."""

import math
from dataclasses import replace

import pytest
import torch

from calibrate.curves.curves import TAUS, RankingConfig, Shape
from calibrate.curves.passes import measure
from calibrate.profiles import retile as module
from calibrate.profiles.retile import OTHER_HEIGHT, interpolate_tau, list_legal_tiles, retile
from calibrate.record import read_record
from calibrate.timing import Timing
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.config import HeadConfig, LayerConfig, StopRule, TileConfig
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.errors import InputError, ProfileError
from s2o_runtime.identity import Geometry
from s2o_runtime.profile import Profile, load_profile, save_profile
from s2o_runtime.tiles import candidate_tiles

GEOMETRY = Geometry("llama", 3, 4, 2, 64)
H200 = DeviceIdentity("cuda", "NVIDIA H200", (9, 0), 132, 1 << 37)
A100 = DeviceIdentity("cuda", "pretended", (8, 0), 108, 1)
CPU = DeviceIdentity("cpu", "cpu")
A100_TILES = candidate_tiles(64, A100.capability)
FORMER = TileConfig(64, 128, 4, 4, 3, specialized=True, dense_below=1024)  # rows 128, stride 512
CROSSOVER = 768
DENSITY = 0.8


def layer(density_of_heads="ssss", segment=256, tile=FORMER, tau=0.125):
    heads = tuple(
        HeadConfig(tau + index, segment, mode, StopRule.REST, 1 + 3 * (index % 2), "mean" if index == 1 else "none")
        for index, mode in enumerate("s2o" if letter == "s" else "dense" for letter in density_of_heads)
    )
    return LayerConfig(heads, tile, grain=4).validate()


def profile(buckets, densities, device=H200, proof="held out", lengths=(1024, 2048)):
    proven = [
        {"length": length, "layers": [{"density": density} for density in row]}
        for length, row in zip(lengths, densities, strict=True)
    ]
    record = {"proof": proof, "held_out": proven, "budget": {"kind": "mse", "value": 1e-4}, "new": [1]}
    return Profile("demo", GEOMETRY, "f" * 64, device, lengths, tuple(map(tuple, buckets)), record)


@pytest.fixture(scope="module")
def measured():
    """What `measure` gives, once for each argument: prompts of one length are the same in every test."""
    curves = {}

    def measured(prompt, rankings, shapes, last_rows=0):
        key = (prompt.q.shape, tuple(rankings), tuple(shapes), last_rows)
        if key not in curves:
            curves[key] = measure(prompt, rankings, shapes, last_rows)
        return curves[key]

    return measured


@pytest.fixture
def old(tmp_path):
    before = profile([[layer(), layer(), layer("dddd")]] * 2, [[DENSITY, DENSITY + 0.01, 1.0]] * 2)
    save_profile(before, tmp_path / "old.safetensors")
    return before


@pytest.fixture
def timed(measured, monkeypatch):
    """The pretended GPU: what was timed, as (configuration, length); seconds of its tiles are in `table`."""

    class Timed(list):
        table = dict.fromkeys(A100_TILES, 0.5)
        default = 0.5

        def __call__(self, call, dense, device, best):
            q, _, _, config = call.args
            self.append((config, q.shape[2]))
            assert dense.__self__.q is q
            seconds = self.table.get(config.tile, self.default)
            return Timing(seconds, seconds, seconds, 1.0, 3)

    def compile_ahead(calls):
        made.compiled.append([call.args[3] for call in calls if call.func is s2o_attention])

    made = Timed()
    made.table = dict(made.table)
    made.compiled = []  # layers that were compiled together
    monkeypatch.setattr(module, "measure", measured)
    monkeypatch.setattr(module, "compile_ahead", compile_ahead)
    monkeypatch.setattr(module, "identify", lambda device: A100)
    monkeypatch.setattr(module, "against_dense", made)
    monkeypatch.setattr(
        module,
        "with_crossover",
        lambda layer, geometry, device: replace(
            layer.config.tile, dense_below=CROSSOVER, min_queries=round(100 * layer.density)
        ),
    )
    return made


def run(tmp_path, before=None):
    """The profile, the one of `old` by default, with other tiles."""
    if before is not None:
        save_profile(before, tmp_path / "old.safetensors")
    return retile(tmp_path / "old.safetensors", "cpu", tmp_path / "new" / "new.safetensors")


def sparse_and_dense(first, density):
    """A profile whose other layers are dense."""
    return profile([[first, layer("dddd"), layer("dddd")]], [[density, 1.0, 1.0]], lengths=(2048,))


def test_the_fastest_tile_is_taken_and_nothing_else_changes(old, timed, tmp_path):
    fastest = next(tile for tile in A100_TILES if (tile.block_m, tile.stride) == (64, 1024))
    timed.table[fastest] = 0.3
    done = run(tmp_path)
    new = load_profile(tmp_path / "new" / "new.safetensors")
    assert (new.device, new.fingerprint, new.lengths) == (A100, old.fingerprint, old.lengths)
    for before, after in zip(old.layers, new.layers, strict=True):
        for index in (0, 1):
            assert after[index].tile == replace(fastest, dense_below=CROSSOVER, min_queries=80)  # at a DENSITY of 0.8
        assert after[2].tile in A100_TILES
        for was, config in zip(before, after, strict=True):
            assert config.heads == was.heads  # bit for bit: tau went through float32 in both
            assert config.grain == was.grain
    assert read_record(done).retiled.dense_layers == 0
    changed = {"proof", "retiled", "not_proven"}
    assert {name: value for name, value in new.record.items() if name not in changed} == {
        name: value for name, value in old.record.items() if name not in changed
    }


def test_heads_are_timed_at_the_density_that_the_record_gives(old, timed, tmp_path):
    run(tmp_path)
    shape = Shape.of(FORMER)
    prompt = module._make_inputs(GEOMETRY, 2048, torch.device("cpu"))
    config = next(config for config, length in timed if length == 2048)
    methods = [RankingConfig(head.segment, head.representatives, 4) for head in config.heads]
    curves = measure(prompt, list(dict.fromkeys(methods)), [shape])
    for index, head in enumerate(config.heads):
        density = curves[methods[index], shape].density[index]
        place = [math.log(tau) for tau in TAUS]
        low = max(i for i, each in enumerate(place) if each <= math.log(head.tau) + 1e-9)
        high = min(low + 1, len(TAUS) - 1)
        assert float(density[high]) - 1e-9 <= DENSITY <= float(density[low]) + 1e-9
    assert all(TAUS[0] < head.tau < TAUS[-1] for head in config.heads)
    assert len({head.tau for head in config.heads}) > 1


def test_dense_heads_of_a_sparse_layer_count_as_dense(timed, tmp_path):
    """Half of the heads are dense, so the others do all the skipping."""
    run(tmp_path, sparse_and_dense(layer("sdsd"), 0.9))
    half = timed[0][0]
    timed.clear()
    run(tmp_path, sparse_and_dense(layer("ssss"), 0.8))
    whole = timed[0][0]
    assert [head.mode for head in half.heads] == ["s2o", "dense"] * 2
    for index in (0, 2):
        assert TAUS[0] < half.heads[index].tau < TAUS[-1]
        assert half.heads[index].tau == pytest.approx(whole.heads[index].tau)


def test_no_tile_checks_more_often_than_the_profile_did(timed, tmp_path):
    for stride in (256, 512, 1024, 2048):
        tile = replace(FORMER, chunk=stride // 128, dense_below=0)
        timed.clear()
        run(tmp_path, sparse_and_dense(layer(tile=tile), 0.6))
        strides = {config.tile.stride for config, _ in timed}
        assert strides == {each for each in (256, 512, 1024) if each >= stride} or (stride, strides) == (2048, {2048})


def test_a_layer_without_a_legal_tile_becomes_dense(timed, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "candidate_tiles", lambda *_: tuple(t for t in A100_TILES if t.block_m == 128))
    before = profile([[layer(segment=192, tile=TileConfig(64, 64, 8, 8, 2)), layer(), layer()]] * 2, [[0.6] * 3] * 2)
    done = run(tmp_path, before)
    assert [config.is_dense for config in done.layers[0]] == [True, False, False]
    assert read_record(done).retiled.timed[0].tile is None
    assert read_record(done).retiled.dense_layers == 2


def test_layers_that_lose_to_dense_become_dense(timed, tmp_path, monkeypatch):
    before = profile([[layer(), layer(segment=512), layer(segment=512)]] * 2, [[0.3, 0.9, 0.9]] * 2)
    real = module.against_dense

    def slow_for_long_segments(call, *rest):
        timing = real(call, *rest)
        return replace(timing, seconds=1.1) if call.args[3].heads[0].segment == 512 else timing

    monkeypatch.setattr(module, "against_dense", slow_for_long_segments)
    done = run(tmp_path, before)
    for bucket in load_profile(tmp_path / "new" / "new.safetensors").layers:
        assert [config.is_dense for config in bucket] == [False, True, True]
        assert [head.tau for head in bucket[1].heads] == [0.125, 1.125, 2.125, 3.125]
    assert read_record(done).retiled.dense_layers == 4


@pytest.mark.parametrize("faster", [1.02, 1.1])
def test_another_height_must_be_clearly_faster(faster, old, timed, tmp_path):
    assert 1.02 < OTHER_HEIGHT < 1.1
    for tile in A100_TILES:
        timed.table[tile] = 0.5 if tile.block_m == FORMER.block_m else 0.5 / faster
    run(tmp_path)
    heights = {config.tile.block_m for config in load_profile(tmp_path / "new" / "new.safetensors").layers[0][:2]}
    assert heights == ({64} if faster < OTHER_HEIGHT else {128})


def test_tiles_that_fail_are_passed_over(old, timed, tmp_path, monkeypatch):
    real = module.against_dense

    def failing(call, *rest):
        if call.args[3].tile.block_m == 64:
            raise RuntimeError("out of resources: shared memory\nmore")
        return real(call, *rest)

    monkeypatch.setattr(module, "against_dense", failing)
    assert {config.tile.block_m for config in run(tmp_path).layers[0][:2]} == {128}


def test_the_record_says_what_was_done(old, timed, tmp_path):
    done = run(tmp_path)
    record = read_record(load_profile(tmp_path / "new" / "new.safetensors"))
    assert record.proof == f"held out on {H200}"
    assert (record.retiled.made_on, record.retiled.tuned_for) == (str(H200), str(A100))
    assert {"s2o", "torch", "triton"} <= set(record.retiled.versions)
    assert record.retiled == read_record(done).retiled
    alike = record.retiled.timed[0]
    assert (alike.seconds, alike.dense_seconds, alike.density, alike.timed_at) == (0.5, 1.0, DENSITY, 1024)
    again = retile(tmp_path / "new" / "new.safetensors", "cpu", tmp_path / "again.safetensors")  # now its own GPU
    assert again.record["proof"] == f"held out on {H200}"
    assert again.layers == done.layers


@pytest.mark.parametrize("proof", ["none", "failed"])
def test_what_was_not_proven_is_not_proven_now(proof, timed, tmp_path):
    before = profile([[layer()] * 3] * 2, [[0.6] * 3] * 2, proof=proof)
    assert run(tmp_path, before).record["proof"] == proof


def test_a_cpu_takes_the_profile_as_it_is(old, tmp_path):
    done = run(tmp_path)
    assert done.layers == old.layers
    assert done.device == load_profile(tmp_path / "new" / "new.safetensors").device == CPU
    assert done.record["proof"] == f"held out on {H200}"
    assert (read_record(done).retiled.timed, read_record(done).retiled.dense_layers) == ((), 0)


def test_bad_input_is_one_sentence(old, timed, tmp_path, monkeypatch):
    out = tmp_path / "new" / "new.safetensors"
    for record in ({}, {"held_out": [{"length": 1024}]}, {"held_out": [{"length": 1024, "layers": [{"density": 1}]}]}):
        save_profile(replace(old, record=record), tmp_path / "bare.safetensors")
        with pytest.raises(InputError, match=r"does not give every layer's density at \[1024, 2048\] tokens: use a"):
            retile(tmp_path / "bare.safetensors", "cpu", out)
    with pytest.raises(ProfileError, match="cannot be read"):
        retile(tmp_path / "none.safetensors", "cpu", out)
    monkeypatch.setattr(module, "identify", lambda device: DeviceIdentity("cuda", "old", (7, 5), 40, 1))
    with pytest.raises(InputError, match=r"cannot be tuned here: old \(sm_75, 40 SMs\) is older than sm_80"):
        run(tmp_path)
    wide = replace(GEOMETRY, head_dim=256)
    save_profile(replace(old, geometry=wide), tmp_path / "old.safetensors")
    monkeypatch.setattr(module, "identify", lambda device: A100)
    with pytest.raises(InputError, match="head_dim 256 has no tile on sm_80: run it dense"):
        run(tmp_path)
    assert not out.parent.exists()


def test_legal_tiles_follow_the_strictest_head():
    mixed = layer("sssd", tile=TileConfig(64, 64, 4))
    heads = (replace(mixed.heads[0], segment=320), *mixed.heads[1:])
    assert {tile.rows for tile in list_legal_tiles(replace(mixed, heads=heads), A100_TILES)} == {64}
    dense = (*mixed.heads[1:], replace(mixed.heads[3], segment=320))
    assert {tile.rows for tile in list_legal_tiles(replace(mixed, heads=dense), A100_TILES)} == {64, 128}


def test_a_tau_is_interpolated_in_its_logarithm():
    densities = torch.linspace(0.9, 0.3, len(TAUS), dtype=torch.float64)
    assert interpolate_tau(densities, 0.6) == pytest.approx(1.0)
    assert interpolate_tau(densities, 0.9) == interpolate_tau(densities, 0.94) == TAUS[0]
    assert interpolate_tau(densities, 0.96) == interpolate_tau(densities, 1.0) == 0.0
    assert interpolate_tau(densities, 0.1) == TAUS[-1]
    between = (float(densities[3]) + float(densities[4])) / 2
    assert interpolate_tau(densities, between) == pytest.approx(math.sqrt(TAUS[3] * TAUS[4]))
    flat = torch.full((len(TAUS),), 0.5, dtype=torch.float64)
    assert (interpolate_tau(flat, 0.5), interpolate_tau(flat, 0.4)) == (TAUS[0], TAUS[-1])
