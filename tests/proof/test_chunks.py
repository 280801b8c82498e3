"""Proofs under a server's chunk: layers are fed in parts, errors are of the whole prompt, and everything proves so."""

from dataclasses import dataclass, replace

import pytest
import torch

from calibrate.commands.profile import main as profile_command
from calibrate.model.layers import DecoderLayer
from calibrate.pipeline import calibrate
from calibrate.proof import again, certify, verify
from calibrate.proof.layers import LayerSetting, layer_state
from calibrate.proof.verify import prove
from s2o_runtime import s2o_attention
from s2o_runtime.config import LayerConfig
from s2o_runtime.huggingface.hf import s2o_attention_forward, s2o_mask
from s2o_runtime.huggingface.layers import attach
from s2o_runtime.reference.dense import dense_attention
from support.models import stream
from support.streamed import random_prompts, uniform
from support.tiny import recipe, save_tiny

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
    in_chunks = LayerSetting.of(layers, CHUNK, 0, LENGTH)
    assert (in_chunks.chunk, in_chunks.by_keys) == (CHUNK, ((128, SPARSE), (256, SPARSER), (300, SPARSER)))
    short = LayerSetting.of(layers, 64, 0, 150)  # below the shortest calibrated length a chunk is dense
    assert [(keys, config.is_dense) for keys, config in short.by_keys] == [(64, True), (128, False), (150, False)]
    assert LayerSetting.of(layers, CHUNK, 0, CHUNK) == LayerSetting(SPARSE)
    assert LayerSetting.of(layers, None, 0, LENGTH) == LayerSetting(SPARSER)


def test_a_prompts_last_chunk_alone_has_dense_last_rows():
    short, long = (replace(config, last_rows=128) for config in (SPARSE, SPARSER))
    layers = Layers(short, long)
    assert [config for _, config in LayerSetting.of(layers, CHUNK, 0, LENGTH).by_keys] == [SPARSE, SPARSER, long]
    assert LayerSetting.of(layers, CHUNK, 0, CHUNK).config == short
    assert LayerSetting.of(layers, None, 0, LENGTH).config == long


def test_a_prefill_in_chunks_is_the_calls_that_a_server_makes():
    module = torch.nn.Module().eval()  # in training mode it would be dense
    observed = []
    layers = Layers(SPARSE, SPARSER)
    runs = LayerSetting.of(layers, CHUNK, 3, LENGTH)
    state = layer_state(DecoderLayer(5, 3, module, module), runs, lambda *call: observed.append(call))
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


class Chunks(dict):
    """The chunks that each module's proofs were called with, by the module's name."""

    def watch(self, monkeypatch, module, name, function):
        """Keep those of a function that a module calls."""
        place = f"{module.__name__.rpartition('.')[2]}.{name}"

        def watched(*arguments, **named):
            given = named["chunk"] if "chunk" in named else arguments[6]  # of `prove`, as `Prover` calls it
            self.setdefault(place, set()).add(given)
            return function(*arguments, **named)

        monkeypatch.setattr(module, name, watched)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A calibration with chunks: the profile, the model's folder and what proved with which chunks."""
    folder = save_tiny(tmp_path_factory.mktemp("tiny") / "model")
    asked = recipe(folder, tmp_path_factory.mktemp("calibrated") / "p.safetensors", **SETTINGS, chunk=RECIPE_CHUNK)
    chunks = Chunks()
    with pytest.MonkeyPatch.context() as monkeypatch:
        chunks.watch(monkeypatch, verify, "prove", prove)
        chunks.watch(monkeypatch, certify, "prove", prove)
        calibrate(asked, progress=False)
    return asked.out, folder, chunks


@SLOW
def test_a_calibration_proves_in_the_recipes_chunks(finished):
    _, _, chunks = finished
    assert chunks == {
        "verify.prove": {RECIPE_CHUNK},
        "certify.prove": {RECIPE_CHUNK},
    }  # the passes in KL and the proof


@SLOW
@pytest.mark.parametrize(("fresh", "given"), [((), None), (("--seed", "5"), OTHER)])
def test_verify_proves_in_chunks(finished, fresh, given, monkeypatch, capsys):
    path, folder, _ = finished
    chunks = Chunks()
    chunks.watch(monkeypatch, again, "prove", prove)
    option = () if given is None else ("--chunk", str(given))
    code = profile_command(["verify", str(path), "--model", str(folder), "--device", "cpu", *fresh, *option])
    assert code in (0, 3), capsys.readouterr().err  # in other chunks than those of the proof it may fail
    assert chunks == {"again.prove": {given or RECIPE_CHUNK}}
