"""A profile on each rank of a server: its heads, its layers, its reasons, and the model that it is of."""

import re
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from s2o_runtime.config import HeadConfig, LayerConfig, TileConfig
from s2o_runtime.dense_reason import DenseReason
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.errors import ProfileError
from s2o_runtime.identity import Geometry, compose_fingerprint, compute_sampled_fingerprint
from s2o_runtime.profile import Profile
from s2o_runtime.serving.checkpoint import hash_checkpoint
from s2o_runtime.serving.fit import Rank, RankProfile, Request, check_model, count_row_weights, find_mismatch

CPU = torch.device("cpu")


def profile(kv_heads=2):
    heads = tuple(HeadConfig(0.1 + index, 128) for index in range(8))
    config = LayerConfig(heads, TileConfig(64, 64, 4, 4, 2, min_queries=200))
    geometry, device = Geometry("llama", 2, 8, kv_heads, 64), DeviceIdentity("cpu", "cpu")
    return Profile("made", geometry, "", device, (1024, 4096), ((config, config.as_dense()),) * 2).validate()


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_ranks_hold_every_head_once_and_the_kv_heads_that_these_read(size, kv_heads):
    calibrated = profile(kv_heads=kv_heads)
    fits = [RankProfile(calibrated, Rank(index, size), CPU) for index in range(size)]
    assert [head for fit in fits for head in fit.heads] == list(range(8))
    group = 8 // kv_heads
    for fit in fits:
        assert {head // group for head in fit.heads} == set(fit.kv_heads)
        config = fit.layers[0].config(1024)
        assert [head.tau for head in config.heads] == pytest.approx([0.1 + head for head in fit.heads])
        assert fit.find_layer(0, len(fit.heads), len(fit.kv_heads), 64) is fit.layers[0]


def test_layers_are_found_by_their_numbers_in_the_decoder_and_their_sizes():
    calibrated = profile()
    others = {"layer_numbers": (1, 3), "others": (("sliding_attention", 2),)}
    fit = RankProfile(replace(calibrated, geometry=replace(calibrated.geometry, **others)), Rank(), CPU)
    assert [layer.layer for layer in fit.layers] == [1, 3]
    layers = [fit.find_layer(number, 8, 2, 64) for number in range(-1, 5)]
    none = "the layer is none of the profile's"
    assert layers == [none, none, fit.layers[0], none, fit.layers[1], none]
    assert [fit.find_layer(1, *sizes) for sizes in ((4, 2, 64), (8, 1, 64), (8, 2, 80))] == [none] * 3


def reason_of(fit, queries, keys, layer=0, **more):
    """A reason's first part, up to the comma."""
    reason = fit.dense_reason(Request(queries, keys, **more), fit.layers[layer])
    return reason and reason.split(",")[0]


def test_a_requests_reason_is_the_first_rule_that_it_breaks():
    fit = RankProfile(profile(), Rank(1, 2), CPU)
    short, long = "shorter than the shortest calibrated length", "longer than 6144 keys"
    few, whole_layer = "fewer than 200 queries behind a prefix", "every head of the layer is dense"
    for queries, keys, reason in (
        (1, 4000, "decode"),
        (500, 1023, short),
        (500, 1024, None),
        (500, 6144, None),
        (500, 6145, long),
        (199, 4000, few),
        (200, 4000, None),
        (4096, 4096, None),
    ):
        assert reason_of(fit, queries, keys) == reason
        rest = {"own_reason": DenseReason.ADAPTER, "is_last_rows": True}
        assert reason_of(fit, queries, keys, **rest) == (reason or "the request has a LoRA adapter")
        assert reason_of(fit, queries, keys, is_last_rows=True) == (reason or "the last rows of a prompt")
    assert reason_of(fit, 4096, 4096, layer=1) == whole_layer
    assert fit.dense_reason(Request(1, 4000)) == "decode"
    assert fit.dense_reason(Request(500, 1023)) is None  # some layer may compute it, for all that it knows
    assert fit.layers[0].plan_key != fit.layers[1].plan_key
    speculating = RankProfile(profile(), Rank(), CPU, decode_queries=300)
    assert (reason_of(speculating, 300, 4000), reason_of(speculating, 301, 4000)) == ("decode", None)
    assert (RankProfile(profile(), Rank(), CPU).min_queries, speculating.min_queries) == (200, 301)
    assert reason_of(RankProfile(profile(), Rank(), CPU, beyond="s2o"), 500, 60000) is None
    fit.layers[0].refuse("for the test")
    assert reason_of(fit, 4096, 4096) == "for the test"


def test_requests_with_little_work_for_a_gpu_are_dense():
    """8 heads of 64 take 4e11 operations for 19,800 tokens."""
    one = RankProfile(profile(), Rank(), CPU, "s2o")
    one.host_flops = 4e11
    host = "so little work that the host would decide"
    assert (reason_of(one, 19_700, 19_700), reason_of(one, 19_900, 19_900)) == (host, None)
    assert reason_of(one, 2048, 90_000) == host
    sizes = {"hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 8960}
    weights = count_row_weights(SimpleNamespace(**sizes))
    assert weights == 2 * 1536 * 1536 + 2 * 1536 * 256 + 3 * 1536 * 8960
    experts = {"intermediate_size": 8960, "moe_intermediate_size": 1120, "num_experts_per_tok": 8}
    assert count_row_weights(SimpleNamespace(**(sizes | experts))) == weights
    by_layer = SimpleNamespace(**(sizes | {"intermediate_size": [8960] * 28}))
    assert count_row_weights(by_layer) == weights - 3 * 1536 * 8960
    larger = RankProfile(profile(), Rank(), CPU, "s2o", row_weights=weights)
    larger.host_flops = 4e11
    assert reason_of(larger, 2048, 90_000) is None  # 3.5e11 for attention, 1.9e11 for the matrices
    assert reason_of(larger, 2048, 50_000) == host


def test_layers_share_a_plan_only_if_they_send_the_same_requests_to_the_stock_backend(monkeypatch):
    """Also those that differ in nothing but one head's mode or the tile."""
    monkeypatch.setattr("s2o_runtime.serving.fit.get_capability", lambda device: (8, 0))
    tile = TileConfig(64, 64, 4, 4, 2, min_queries=200)
    plain = LayerConfig((HeadConfig(0.1, 128),) * 8, tile)
    layers = [
        (plain, plain),
        (replace(plain, tile=TileConfig(64, 128, 4, 4, 2, specialized=True, min_queries=200)),) * 2,
        (replace(plain, heads=(HeadConfig(0.1, 256),) * 8),) * 2,
        (plain.as_dense(), plain.as_dense()),
        (plain, plain.as_dense()),
        (replace(plain, heads=(HeadConfig(0.2, 128, representatives=16),) * 8), plain),
    ]
    geometry = Geometry("llama", len(layers), 8, 2, 64)
    buckets = tuple(zip(*layers, strict=True))
    calibrated = Profile("made", geometry, "", DeviceIdentity("cuda", "H", (8, 0)), (1024, 4096), buckets).validate()
    fit = RankProfile(calibrated, Rank(), CPU)
    calls = [(queries, keys) for queries in (1, 150, 250, 1500) for keys in (1000, 1800, 4096, 9000) if queries <= keys]
    calls += [(keys, keys) for keys in (1024, 1800, 4096)]
    assert fit.rejected is None
    answers = [tuple(fit.dense_reason(Request(*call), layer) for call in calls) for layer in fit.layers]
    assert answers[1][-1] == "tile 64x128x4 ws s2 is for sm_90, this GPU is sm_80"
    for (first, of_first), (second, of_second) in combinations(zip(fit.layers, answers, strict=True), 2):
        assert first.plan_key != second.plan_key or of_first == of_second
    assert fit.layers[0].plan_key == fit.layers[-1].plan_key  # thresholds make no difference


def served(**changes):
    """A model's configuration, as transformers has it."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    return SimpleNamespace(**{"model_type": "llama", **sizes, **changes})


def checkpoint(folder, **more):
    generator = torch.Generator().manual_seed(0)
    weights = {
        "model.embed.weight": torch.randn(40, 8, generator=generator),
        "model.norm.weight": torch.randn(8, generator=generator),
    }
    folder.mkdir(exist_ok=True)
    save_file({**weights, **more}, folder / "model.safetensors")

    def sample(name, positions):
        return weights[name].reshape(-1)[positions.start : positions.stop : positions.step]

    return compute_sampled_fingerprint({name: weight.shape for name, weight in weights.items()}, sample)


def test_a_checkpoint_is_hashed_as_its_model(tmp_path):
    """Without what its model has not: the head that is tied, frequencies, layers that predict further tokens."""
    expected = (checkpoint(tmp_path / "plain"),)
    tied, untied = served(tie_word_embeddings=True), served()
    assert hash_checkpoint(tmp_path / "plain", untied) == expected
    more = {"lm_head.weight": torch.ones(40, 8), "model.layers.0.rotary_emb.inv_freq": torch.ones(4)}
    more["model.layers.2.eh_proj.weight"] = torch.ones(4)
    checkpoint(tmp_path / "more", **more)
    assert hash_checkpoint(tmp_path / "more", tied) == expected
    assert hash_checkpoint(tmp_path / "more", untied) != expected
    assert hash_checkpoint(tmp_path, untied) == ()


YARN = {"rope_type": "yarn", "factor": 4.0}
UNPROVEN = '"strict": false to serve it unproven$'


def compared(calibrated, config, folder):
    """Return what is said of a comparison where it does not refuse, and why strict refuses; None if it does not."""
    said = check_model(calibrated, config, folder, ())
    try:
        assert check_model(calibrated, config, folder) == said
    except ProfileError as error:
        return said, str(error)
    return said, None


def test_weights_and_config_are_compared(tmp_path):
    hashed = checkpoint(tmp_path)
    config = served(rms_norm_eps=1e-6, num_experts_per_tok=2)
    calibrated = replace(profile(), fingerprint=compose_fingerprint(hashed, config))
    assert compared(calibrated, config, tmp_path) == ("weights compared", None)
    assert compared(replace(calibrated, fingerprint="random-1"), config, None)[1] is None  # a rehearsal's
    more = served(rms_norm_eps=1e-6, num_experts_per_tok=2, of_a_newer_version=1)
    assert compared(calibrated, more, tmp_path) == ("weights compared", None)
    for other, model, mismatch in (
        (replace(calibrated, fingerprint="0" * 64), config, "the weights are not those"),
        (calibrated, served(rope_parameters=YARN), r"the RoPE parameters .* are not those"),
        (calibrated, served(num_experts_per_tok=4), r"the config \(num_experts_per_tok is 4 where the profile has 2\)"),
        (replace(calibrated, fingerprint=f"{hashed}+adapters-0"), config, "the active adapters are not those"),
    ):
        said, refused = compared(other, model, tmp_path)
        assert re.match(rf"{mismatch}.* of made: nothing is proven$", said)
        assert re.match(rf"{mismatch}.* of made: calibrate the model that you serve, or say {UNPROVEN}", refused)
        assert find_mismatch(other, model, tmp_path) == refused


@pytest.mark.parametrize(
    ("why", "changes", "folder"),
    [
        ("their types differ between checkpoint and model", {"quantization_config": {}}, "."),
        ("the checkpoint has no safetensors files here", {}, None),
        ("the checkpoint has no safetensors files here", {}, "empty"),
    ],
    ids=["quantised", "unknown", "empty"],
)
def test_weights_that_cannot_be_compared_are_refused_unless_they_may_be_unproven(why, changes, folder, tmp_path):
    """RoPE and config.json are compared all the same."""
    (tmp_path / "empty").mkdir()
    hashed = checkpoint(tmp_path)
    calibrated = replace(profile(), fingerprint=compose_fingerprint(hashed, served(rms_norm_eps=1e-6)))
    folder = folder and tmp_path / folder
    said, refused = compared(calibrated, served(rms_norm_eps=1e-6, **changes), folder)
    assert said == f"weights not compared: {why}"
    assert re.match(rf"{said}: say {UNPROVEN}", refused)
    assert find_mismatch(calibrated, served(rms_norm_eps=1e-6, **changes), folder) == refused
    assert "rms_norm_eps is 0.5" in compared(calibrated, served(rms_norm_eps=0.5, **changes), folder)[1]
    assert "RoPE" in compared(calibrated, served(rope_parameters=YARN, **changes), folder)[1]


def test_a_profile_without_the_config_is_refused_by_name_and_taken_where_it_is_found(tmp_path):
    old = replace(profile(), fingerprint=checkpoint(tmp_path))
    said, refused = compared(old, served(), tmp_path)
    assert said == "weights compared, config not compared"
    assert re.match(
        rf"the profile of made lacks the values of config.json: calibrate again, or say {UNPROVEN}", refused
    )
    assert find_mismatch(old, served(), tmp_path) is None


def test_of_models_whose_names_are_not_known_weights_are_not_compared(tmp_path):
    """Rather than refused as others: transformers may have merged their experts, or renamed their parts."""
    hashed = checkpoint(tmp_path, **{"model.layers.0.moe.experts.0.gate.weight": torch.ones(4, 8)})
    other = replace(profile(), fingerprint="0" * 64)
    assert "is not known" in compared(other, served(), tmp_path)[1]
    checkpoint(tmp_path)
    parts = SimpleNamespace(model_type="pictures", get_text_config=served)
    assert "is not known" in compared(other, parts, tmp_path)[1]
    known = replace(other, fingerprint=compose_fingerprint(hashed, parts))
    assert compared(known, parts, tmp_path) == ("weights compared", None)


def test_last_rows_are_a_requests_own_and_not_a_matter_of_configurations():
    made = profile()
    layers = tuple(tuple(replace(layer, last_rows=256) for layer in bucket) for bucket in made.layers)
    fit = RankProfile(replace(made, layers=layers), Rank(), CPU)
    assert fit.layers[0].config(1024) == made.layers[0][0]
    assert fit.layers[0].config(1024) is fit.layers[0].config(1024)
    assert [fit.count_last_rows(500, 2048, left) for left in (0, 56, 255, 256, 900, None)] == [256, 200, 1, 0, 0, 0]
    assert fit.count_last_rows(100, 2048, 0) == 100
    assert fit.count_last_rows(500, made.min_length - 1, 0) == 0
    assert fit.count_last_rows(1, 2048, 0) == 0  # decode
    fit.host_flops = 1e18
    assert fit.count_last_rows(500, 2048, 0) == 0
