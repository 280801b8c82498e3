"""Proofs see what a server does: prompts in chunks, dense last rows, and what an fp8 cache rounds."""

from dataclasses import dataclass, replace

import pytest
import torch

from calibrate.commands.profile import main as profile_command
from calibrate.curves.curves import TAUS, RankingConfig, Shape
from calibrate.curves.measure import measure
from calibrate.model.layers import Captured, DecoderLayer
from calibrate.pipeline import calibrate
from calibrate.profiles.rebudget import rebudget
from calibrate.proof.layers import LayerConfigAt, make_layer_state
from calibrate.proof.verify import Prover
from calibrate.recipe import Budget, Recipe
from s2o_runtime import s2o_attention
from s2o_runtime.config import HeadConfig, LayerConfig, StopRule, TileConfig
from s2o_runtime.huggingface.hf import s2o_attention_forward, s2o_mask
from s2o_runtime.huggingface.layers import attach
from s2o_runtime.profile import load_profile
from s2o_runtime.quantisation import round_as_cached
from s2o_runtime.reference.attention import s2o_attention_reference
from s2o_runtime.reference.dense import dense_attention, exact_attention
from support import streamed
from support.models import stream
from support.streamed import prove, random_prompts, uniform
from support.tiny import QUICKEST, recipe

SLOW = pytest.mark.slow(reason="calibrates a tiny model")
EXACT, SPARSE, SPARSER = map(uniform, (0.0, 0.5, 1e4))
LENGTH, CHUNK = 300, 128
RECIPE_CHUNK, OTHER = 256, 128  # of a calibration's recipe, and of who proves its profile again


@dataclass(frozen=True)
class Layers:
    """The configuration of each layer: `short` up to 200 tokens, `long` beyond."""

    short: LayerConfig
    long: LayerConfig
    kv_cache_dtype: str = "auto"

    def layer_config(self, layer, length):
        return self.short if length <= 200 else self.long


def test_a_prefill_in_chunks_is_the_calls_that_a_server_makes():
    """Each runs the whole prompt's settings, whose last rows are those of the last call alone."""
    module = torch.nn.Module().eval()  # in training mode it would be dense
    observed, layers = [], Layers(SPARSE, replace(SPARSER, last_rows=128))
    runs = LayerConfigAt.from_source(layers, CHUNK, 3, LENGTH)
    state = make_layer_state(DecoderLayer(5, 3, module, module), runs, lambda *call: observed.append(call))
    attach(module, state)
    q, k, v = (torch.randn(1, heads, LENGTH, 64) for heads in (4, 2, 2))
    mask = s2o_mask(batch_size=1, q_length=LENGTH, q_offset=0, kv_length=LENGTH)
    out, _ = s2o_attention_forward(module, q, k, v, mask)
    parts, visited, pairs = [], 0.0, 0
    for begin in range(0, LENGTH, CHUNK):
        end = min(begin + CHUNK, LENGTH)
        config = replace(SPARSER, last_rows=128 if end == LENGTH else 0)
        part = s2o_attention(q[:, :, begin:end], k[:, :, :end], v[:, :, :end], config, return_stats=True)
        parts.append(part.out)
        causal = sum(range(begin + 1, end + 1))
        visited, pairs = visited + float(part.density.mean()) * causal, pairs + causal
    expected = torch.cat(parts, 2)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-5, atol=1e-6)
    assert state.density == pytest.approx(visited / pairs)
    ((layer, *tensors, _, whole),) = observed
    assert layer == 3
    assert all(torch.equal(*pair) for pair in zip(tensors, (q, k, v), strict=True))
    torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(whole, dense_attention(q, k, v), atol=1e-3)


@SLOW
def test_a_calibration_and_what_verifies_it_prove_in_chunks(tiny_folder, tmp_path, capsys, monkeypatch):
    chunks, prove_really = set(), Prover.prove
    monkeypatch.setattr(
        Prover, "prove", lambda prover, *rest, **named: chunks.add(prover.chunk) or prove_really(prover, *rest, **named)
    )
    options = QUICKEST | {"lengths": (512,), "num_certify": 3, "chunk": RECIPE_CHUNK}
    asked = recipe(tiny_folder, tmp_path / "p.safetensors", **options)
    calibrate(asked, progress=False)
    assert chunks == {RECIPE_CHUNK}
    for options, expected in (((), RECIPE_CHUNK), (("--seed", "5", "--chunk", str(OTHER)), OTHER)):
        chunks.clear()
        code = profile_command(["verify", str(asked.out), "--model", str(tiny_folder), "--device", "cpu", *options])
        assert code in (0, 3), capsys.readouterr().err  # in other chunks than those of the proof it may fail
        assert chunks == {expected}


def test_rows_that_answer_have_no_error(tiny_folder):
    layers = streamed.Layers((SPARSER, replace(SPARSER, last_rows=128)))
    proof = prove(stream(tiny_folder, True), random_prompts(600), layers)[1][600]  # the last eighth is 75 rows
    without, with_rows = proof.layers
    assert without.eighths[-1][0] > 0.1 * without.mse
    assert with_rows.eighths[-1][0] < 1e-10 * with_rows.eighths[-1][1]
    assert with_rows.rel_mse > 1e-6


@pytest.mark.parametrize("rows", [pytest.param(0, marks=SLOW), 128])
def test_a_calibration_and_a_rebudget_keep_to_the_recipes_last_rows(tiny_folder, tmp_path, rows):
    options = QUICKEST | {"lengths": (768,), "last_rows": rows, "budget_rel_mse": 0.3, "worst_rows": None}
    made = recipe(tiny_folder, tmp_path / "p.safetensors", **options)
    calibrate(made, progress=False)
    rebudget(made.out, Budget("rel_mse", 0.2), tmp_path / "q.safetensors")
    for path in (made.out, tmp_path / "q.safetensors"):
        (layers,) = load_profile(path).layers
        assert not all(layer.is_dense for layer in layers)
        assert all(layer.last_rows == (0 if layer.is_dense else rows) for layer in layers)


@pytest.mark.parametrize("tail", ["none", "mean"])
def test_a_curves_error_is_from_dense_attention_that_rounds_nothing(tail):
    q, k, v = torch.randn(1, 4, 700, 16), *torch.randn(2, 1, 2, 700, 16)
    tile, ranking = TileConfig(64, 64, 2), RankingConfig(256, 1)
    shape = Shape.from_tile(tile)
    errors = measure(Captured(q, k, v, 0.25).cached("fp8"), [ranking], [shape])[ranking, shape].errors(tail)[0]
    truth, rounded = exact_attention(q, k, v), [round_as_cached(tensor, "fp8") for tensor in (k, v)]
    floor = (exact_attention(q, *rounded) - truth).square().mean((0, 2, 3))
    for index in (0, 10, len(TAUS) - 1):
        config = LayerConfig((HeadConfig(TAUS[index], 256, "s2o", StopRule.REST, 1, tail),) * 4, tile)
        out, _, _ = s2o_attention_reference(q, *rounded, config)
        expected = (out - truth).square().mean((0, 2, 3)).double()
        torch.testing.assert_close(errors[:, index], expected, rtol=0.02, atol=1e-9)
    torch.testing.assert_close(errors[:, 0], floor.double(), rtol=0.05, atol=1e-9)
    assert float(floor.min()) > 1e-6


def test_a_proof_counts_the_rounding_of_sparse_layers_alone(tiny_folder):
    errors = {}
    for name, config in {"sparse": EXACT, "dense": EXACT.as_dense()}.items():
        for cache in ("auto", "fp8"):
            layers = streamed.Layers((config,) * 2, cache)
            errors[name, cache] = prove(stream(tiny_folder, True), random_prompts(LENGTH), layers)[1][LENGTH].layers
    assert all(layer.rel_mse < 1e-10 for key in errors if key != ("sparse", "fp8") for layer in errors[key])
    assert all(1e-5 < layer.rel_mse < 1e-2 for layer in errors["sparse", "fp8"])


def test_what_was_measured_without_such_a_cache_is_found_again(tmp_path):
    config = LayerConfig.uniform(4, tau=0.5, segment=512)
    assert LayerConfigAt(config).digest != LayerConfigAt(config, kv_cache_dtype="fp8").digest
    for cache in ("fp8", "auto"):
        made = recipe("demo", tmp_path / "p.safetensors", kv_cache_dtype=cache)
        assert made.record().get("kv_cache_dtype", "auto") == cache
        assert Recipe.from_record(made.record(), made.out).kv_cache_dtype == cache
    assert "kv_cache_dtype" not in made.record()
