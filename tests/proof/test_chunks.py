"""Proofs under a server's chunk: layers are fed in parts, errors are of the whole prompt, and everything proves so."""

from dataclasses import dataclass, replace

import pytest
import torch

from calibrate.commands.profile import main as profile_command
from calibrate.model.layers import DecoderLayer
from calibrate.pipeline import calibrate
from calibrate.proof.layers import LayerConfigAt, make_layer_state
from calibrate.proof.verify import Prover
from s2o_runtime import s2o_attention
from s2o_runtime.config import LayerConfig
from s2o_runtime.huggingface.hf import s2o_attention_forward, s2o_mask
from s2o_runtime.huggingface.layers import attach
from s2o_runtime.reference.dense import dense_attention
from support.models import stream
from support.streamed import prove, random_prompts, uniform
from support.tiny import recipe

SLOW = pytest.mark.slow(reason="calibrates a tiny model")

EXACT, SPARSE, SPARSER = map(uniform, (0.0, 0.5, 1e4))
LENGTH, CHUNK = 300, 128
RECIPE_CHUNK, OTHER = 256, 128  # of a calibration's recipe, and of who proves its profile again
SETTINGS = {"lengths": (512,), "num_certify": 3, "trials": 2, "num_held_out": 2}


@dataclass(frozen=True)
class Layers:
    """What each layer runs: `short` up to 200 keys, `long` beyond."""

    short: LayerConfig
    long: LayerConfig
    min_length: int = 100
    kv_cache_dtype: str = "auto"

    def layer_config(self, layer, length):
        return self.short if length <= 200 else self.long


def test_what_each_chunk_runs():
    layers = Layers(SPARSE, SPARSER)
    in_chunks = LayerConfigAt.from_source(layers, CHUNK, 0, LENGTH)
    assert (in_chunks.chunk, in_chunks.by_keys) == (CHUNK, ((128, SPARSE), (256, SPARSER), (300, SPARSER)))
    short = LayerConfigAt.from_source(layers, 64, 0, 150)  # below the shortest calibrated length a chunk is dense
    assert [(keys, config.is_dense) for keys, config in short.by_keys] == [(64, True), (128, False), (150, False)]
    assert LayerConfigAt.from_source(layers, CHUNK, 0, CHUNK) == LayerConfigAt(SPARSE)
    assert LayerConfigAt.from_source(layers, None, 0, LENGTH) == LayerConfigAt(SPARSER)
    short, long = (replace(config, last_rows=128) for config in (SPARSE, SPARSER))  # of a prompt's last chunk alone
    layers = Layers(short, long)
    in_chunks = LayerConfigAt.from_source(layers, CHUNK, 0, LENGTH)
    assert [config for _, config in in_chunks.by_keys] == [SPARSE, SPARSER, long]
    assert LayerConfigAt.from_source(layers, CHUNK, 0, CHUNK).config == short
    assert LayerConfigAt.from_source(layers, None, 0, LENGTH).config == long


def test_a_prefill_in_chunks_is_the_calls_that_a_server_makes():
    module = torch.nn.Module().eval()  # in training mode it would be dense
    observed = []
    layers = Layers(SPARSE, SPARSER)
    runs = LayerConfigAt.from_source(layers, CHUNK, 3, LENGTH)
    state = make_layer_state(DecoderLayer(5, 3, module, module), runs, lambda *call: observed.append(call))
    attach(module, state)
    q, k, v = (torch.randn(1, heads, LENGTH, 64) for heads in (4, 2, 2))
    mask = s2o_mask(batch_size=1, q_length=LENGTH, q_offset=0, kv_length=LENGTH)
    out, _ = s2o_attention_forward(module, q, k, v, mask)
    parts, densities, pairs = [], [], []
    for begin in range(0, LENGTH, CHUNK):
        end = min(begin + CHUNK, LENGTH)
        config = layers.layer_config(3, end)
        part = s2o_attention(q[:, :, begin:end], k[:, :, :end], v[:, :, :end], config, return_stats=True)
        parts.append(part.out)
        densities.append(float(part.density.mean()))
        pairs.append(sum(range(begin + 1, end + 1)))
    expected = torch.cat(parts, 2)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-5, atol=1e-6)
    mean = sum(density * count for density, count in zip(densities, pairs, strict=True)) / sum(pairs)
    assert state.density == pytest.approx(mean)
    ((layer, *tensors, _, whole),) = observed
    assert layer == 3
    assert all(torch.equal(*pair) for pair in zip(tensors, (q, k, v), strict=True))
    torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-6)
    assert state.observer is not None
    assert not torch.allclose(whole, dense_attention(q, k, v), atol=1e-3)


def test_a_proof_in_chunks(tiny_folder):
    """Exact chunks prove exact; chunks that stop differ from the whole prompt, which ranks for other queries."""
    exact = prove(stream(tiny_folder, True), random_prompts(LENGTH), Layers(EXACT, EXACT), chunk=CHUNK)[1][LENGTH]
    assert exact.kl < 1e-7
    assert all(layer.rel_mse < 1e-10 and layer.density == pytest.approx(1.0) for layer in exact.layers)
    layers = Layers(SPARSER, SPARSER)
    chunked, whole = (
        prove(stream(tiny_folder, True), random_prompts(LENGTH), layers, chunk=chunk)[1][LENGTH]
        for chunk in (CHUNK, None)
    )
    for of_chunks, of_whole in zip(chunked.layers, whole.layers, strict=True):
        assert 0 < of_chunks.density < 1
        assert of_chunks.rel_mse > 1e-6
        assert of_chunks.dense_power == pytest.approx(of_whole.dense_power, rel=0.05)
    assert chunked != whole


@pytest.fixture
def chunks(monkeypatch):
    """The chunks that proofs are made with meanwhile."""
    used, prove_really = set(), Prover.prove

    def watched(prover, *arguments, **named):
        used.add(prover.chunk)
        return prove_really(prover, *arguments, **named)

    monkeypatch.setattr(Prover, "prove", watched)
    return used


@SLOW
def test_a_calibration_and_what_verifies_it_prove_in_chunks(chunks, tiny_folder, tmp_path, capsys):
    asked = recipe(tiny_folder, tmp_path / "p.safetensors", **SETTINGS, chunk=RECIPE_CHUNK)
    calibrate(asked, progress=False)
    assert chunks == {RECIPE_CHUNK}
    for options, expected in (((), RECIPE_CHUNK), (("--seed", "5", "--chunk", str(OTHER)), OTHER)):
        chunks.clear()
        code = profile_command(["verify", str(asked.out), "--model", str(tiny_folder), "--device", "cpu", *options])
        assert code in (0, 3), capsys.readouterr().err  # in other chunks than those of the proof it may fail
        assert chunks == {expected}
