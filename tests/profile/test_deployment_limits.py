"""Tests of a profile where nothing was proven: another GPU, longer prompts, a model that is not quite its own."""

import dataclasses
import json
import re
from types import SimpleNamespace

import pytest
import torch

import s2o_runtime.huggingface.layers as layers
from s2o_runtime import explain, load_profile, patch
from s2o_runtime.config import HeadConfig, LayerConfig, TileConfig
from s2o_runtime.errors import ConfigError, ProfileError
from s2o_runtime.identity import ROPE, compose_fingerprint, explain_mismatch, fingerprint, split_fingerprint
from s2o_runtime.profile.profile import with_safe_tile
from s2o_runtime.tiles import list_candidate_tiles
from support.models import close, make_profile, new_model, prompt, twin, used_s2o
from support.pages import ROOT

CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 2048}


def reasons(model):
    return {row["reason"] for row in explain(model) if row["path"] == "dense"}


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_another_gpu_stops_heads_where_the_profile_was_proven_to(capability):
    """Never more checks than the profile's, and the same rows stop together: else errors grow up to 72 times."""
    profile = load_profile(ROOT / "profiles/demo/nvidia-h200/rel-mse-0.001.safetensors")
    tiles = list_candidate_tiles(profile.geometry.head_dim, capability)
    for config in (layer for bucket in profile.layers for layer in bucket if not layer.is_dense):
        safe = with_safe_tile(config, tiles).validate()
        assert safe.heads == config.heads
        assert safe.tile.stride == config.tile.stride
        assert safe.tile.block_m == config.tile.block_m
        assert dataclasses.replace(safe.tile, chunk=1) in {dataclasses.replace(tile, chunk=1) for tile in tiles}


def test_a_layer_without_a_tile_that_fits_is_dense_and_one_without_any_tile_is_kept():
    config = LayerConfig.uniform(2, tau=0.5, segment=64, tile=TileConfig(64, 64, 2))
    tall = (TileConfig(128, 64, 4, 8, 2),)
    assert with_safe_tile(config, tall).is_dense
    assert with_safe_tile(config, ()) == config
    mixed = dataclasses.replace(config, heads=(config.heads[0], HeadConfig(mode="dense", segment=64)))
    assert with_safe_tile(mixed, list_candidate_tiles(64, (8, 0))).heads == mixed.heads


@torch.no_grad()
def test_prompts_far_beyond_the_longest_length_run_dense_unless_asked(eager, info_log):
    profile = make_profile(twin(eager), 2.0)
    profile = dataclasses.replace(profile, lengths=(100,), layers=profile.layers[:1])
    ids, too_long = prompt(), "longer than 150 keys, 1.5 times the longest calibrated length"
    for beyond, end in (
        ("dense", "from 100 to 150 tokens "),
        ("warn", "from 100 tokens "),
        ("s2o", "from 100 tokens "),
    ):
        info_log.clear()
        model = patch(twin(eager), profile, beyond=beyond)
        assert len([message for message in info_log.messages if message.startswith(f"S2O runs {end}")]) == 1
        model(ids)
        assert reasons(model) == ({too_long} if beyond == "dense" else set())
        assert ("more than 150 keys" in info_log.text) == (beyond == "warn")
        model(ids[:, :150])
        assert used_s2o(model)
    with pytest.raises(ConfigError, match="beyond is 'never': expected one of"):
        patch(twin(eager), profile, beyond="never")


@torch.no_grad()
def test_another_number_of_heads_than_the_profiles_runs_dense(eager):
    """A rank of tensor parallelism computes a part of the heads that the model's config names."""
    model = patch(twin(eager), make_profile(twin(eager), 2.0))
    two = [LayerConfig.uniform(2, tau=2.0, segment=128)] * 2
    for state, config in zip(layers.get_layer_states(model), two, strict=True):
        state.config_at = lambda length, config=config: config
    ids = prompt()
    close(model(ids).logits, eager(ids).logits)
    assert reasons(model) == {"the profile is of 2 query heads, the layer has 4 here"}


def test_offloaded_weights_stay_dense_with_a_reason(eager, caplog):
    with torch.device("meta"):
        model = new_model()
    profile = make_profile(twin(eager), 0.0)
    patch(model, profile)
    assert "the weights are offloaded (model.embed_tokens.weight is not in memory)" in caplog.text
    assert all("offloaded" in state.rejected for state in layers.get_layer_states(model))
    with pytest.raises(ProfileError, match="offloaded"):
        patch(model, profile, strict=True)


def test_other_rope_parameters_are_another_model(eager, caplog):
    profile = make_profile(twin(eager), 0.0)
    stretched = twin(eager, config=type(eager.config)(**eager.config.to_dict() | {"rope_parameters": YARN}))
    with pytest.raises(ProfileError, match=r"the RoPE parameters .* are not those of tiny"):
        patch(stretched, profile, strict=True)
    patch(stretched, profile)
    assert "RoPE parameters" in caplog.text
    without = fingerprint(eager).partition(ROPE)[0]  # as of a model without RoPE
    assert "RoPE" in explain_mismatch(fingerprint(eager), without)
    # the same in every transformers
    assert split_fingerprint(fingerprint(eager))["fingerprint"].partition(ROPE)[2] == "907973fa8095631b"


@pytest.mark.parametrize("parameters", [YARN, {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}])
def test_the_former_name_of_a_rope_type_changes_no_fingerprint(eager, parameters):
    """SGLang writes `type` beside `rope_type` into the configuration, and old files have it alone."""
    text, name = json.dumps(parameters), r'"rope_type": ("\w+")'
    forms = [json.loads(re.sub(name, form, text)) for form in (r"\g<0>", r'\g<0>, "type": \1', r'"type": \1')]
    configs = [SimpleNamespace(rope_parameters=rope_parameters) for rope_parameters in forms]
    assert len({json.dumps(form) for form in forms}) == 3
    assert len({compose_fingerprint("weights", config) for config in configs}) == 1
