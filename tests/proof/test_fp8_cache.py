"""What an fp8 cache rounds is a part of each layer's error, in curves and in proofs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from calibrate.curves.curves import TAUS, RankingConfig, Shape
from calibrate.curves.measure import measure
from calibrate.model.layers import Captured
from calibrate.proof.layers import LayerConfigAt
from calibrate.recipe import Recipe
from s2o_runtime.config import HeadConfig, LayerConfig, StopRule, TileConfig
from s2o_runtime.quantisation import round_as_cached
from s2o_runtime.reference.attention import s2o_attention_reference
from s2o_runtime.reference.dense import exact_attention
from support.models import stream
from support.streamed import Layers, prove, random_prompts

LENGTH = 700
OPTIONS = {"model": "demo", "lengths": (1024,), "out": Path("p.safetensors"), "kv_cache_dtype": "fp8"}


@pytest.mark.parametrize("tail", ["none", "mean"])
def test_a_curves_error_is_from_dense_attention_that_rounds_nothing(tail):
    q, k, v = torch.randn(1, 4, LENGTH, 16), *torch.randn(2, 1, 2, LENGTH, 16)
    captured = Captured(q, k, v, 0.25).cached("fp8")
    tile, ranking = TileConfig(64, 64, 2), RankingConfig(256, 1)
    curve = measure(captured, [ranking], [Shape.from_tile(tile)])[ranking, Shape.from_tile(tile)]
    truth = exact_attention(q, k, v)
    rounded = [round_as_cached(tensor, "fp8") for tensor in (k, v)]
    floor = (exact_attention(q, *rounded) - truth).square().mean((0, 2, 3))
    for index in (0, 10, len(TAUS) - 1):
        config = LayerConfig((HeadConfig(TAUS[index], 256, "s2o", StopRule.REST, 1, tail),) * 4, tile)
        out, _, _ = s2o_attention_reference(q, *rounded, config)
        expected = (out - truth).square().mean((0, 2, 3)).double()
        predicted = curve.errors(tail)[0][:, index]
        torch.testing.assert_close(predicted, expected, rtol=0.02, atol=1e-9)
    torch.testing.assert_close(curve.errors(tail)[0][:, 0], floor.double(), rtol=0.05, atol=1e-9)
    assert float(floor.min()) > 1e-6


def test_a_proof_counts_the_rounding_of_sparse_layers_alone(tiny_folder):
    exact = LayerConfig.uniform(4, tau=0.0, segment=64, tile=TileConfig(64, 32, 2, 4, 1))
    errors = {}
    for name, config in {"sparse": exact, "dense": exact.as_dense()}.items():
        for cache in ("auto", "fp8"):
            layers = replace(of_all(config), kv_cache_dtype=cache)
            errors[name, cache] = prove(stream(tiny_folder, True), random_prompts(300), layers)[1][300].layers
    assert all(layer.rel_mse < 1e-10 for key in errors if key != ("sparse", "fp8") for layer in errors[key])
    assert all(1e-5 < layer.rel_mse < 1e-2 for layer in errors["sparse", "fp8"])


def of_all(config):
    """Every layer of the tiny model runs this."""
    return Layers((config,) * 8)


def test_what_was_measured_without_such_a_cache_is_found_again():
    config = LayerConfig.uniform(4, tau=0.5, segment=512)
    assert LayerConfigAt(config).digest != LayerConfigAt(config, kv_cache_dtype="fp8").digest
    recipe = Recipe.from_options(OPTIONS)
    assert recipe.record()["kv_cache_dtype"] == "fp8"
    assert Recipe.from_record(recipe.record(), recipe.out).kv_cache_dtype == "fp8"
    plain = replace(recipe, kv_cache_dtype="auto")
    assert "kv_cache_dtype" not in plain.record()
    assert Recipe.from_record(plain.record(), recipe.out).kv_cache_dtype == "auto"
