"""What certify prompts say, against the proof and against exact attention."""

import pytest
import torch

from calibrate.curves.row_errors import row_errors
from calibrate.proof import sample as sampling
from calibrate.proof.sample import sample
from calibrate.proof.verify import prove
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.reference.dense import exact_attention
from support.models import stream
from support.streamed import Layers, random_prompts, uniform

LENGTH = 200
SPARSE = uniform(100.0)


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(LENGTH)[LENGTH]


def test_it_is_what_the_proof_finds(tiny_folder, prompts):
    both = Layers((SPARSE, SPARSE))
    accepted, sampled = sample(stream(tiny_folder, False), LENGTH, prompts, both)
    assert accepted is both
    proof = prove(stream(tiny_folder, False), {LENGTH: prompts}, both)[1][LENGTH]
    for layer, proven in zip(sampled.layers, proof.layers, strict=True):
        assert sum(one.mse for one in layer.prompts) / 2 == pytest.approx(proven.mse, rel=1e-3)
        assert sum(one.power for one in layer.prompts) / 2 == pytest.approx(proven.dense_power, rel=1e-3)
        assert layer.density == pytest.approx(proven.density)
    assert sum(one.kl for one in sampled.agreements) / 2 == pytest.approx(proof.kl, rel=1e-3)
    assert sum(one.top1 for one in sampled.agreements) / 2 == pytest.approx(proof.top1)
    assert sampled.noise_floor is None


def test_the_last_eighth_and_continued_calls(tiny_folder, prompts, monkeypatch):
    """Of the first layer, whose inputs are those of any model."""
    seen = []
    real = sampling.CertifyStep.errors

    def watch(step, q, k, v, scoring, out):
        seen.append((q, k, v, out, scoring))
        return real(step, q, k, v, scoring, out)

    monkeypatch.setattr(sampling.CertifyStep, "errors", watch)
    _, sampled = sample(stream(tiny_folder, False), LENGTH, prompts[:1], Layers((SPARSE, SPARSE)))
    q, k, v, out, scoring = seen[0]
    truth = exact_attention(q, k, v, **scoring.arguments())
    (found,) = sampled.layers[0].prompts
    first = LENGTH - LENGTH // 8
    assert found.last[0] == pytest.approx(float((out - truth)[:, :, first:].square().mean()), rel=1e-3)
    assert found.last[1] == pytest.approx(float(truth[:, :, first:].square().mean()), rel=1e-3)
    continued = s2o_attention(q[:, :, -64:], k, v, SPARSE, **scoring.arguments())
    ((new_tokens, mse, _),) = found.continued
    assert new_tokens == 64  # the prompt is shorter than twice 512
    assert mse == pytest.approx(float((continued - truth[:, :, -64:]).square().mean()), rel=1e-3)
    assert mse > 1e-6
    worst = row_errors(out, truth).flatten().quantile(0.99, interpolation="nearest")
    assert found.worst == pytest.approx(float(worst), rel=1e-3)


def test_the_noise_floor_is_what_two_dense_implementations_differ_by(tiny_folder, prompts, monkeypatch):
    def on_cpu(item, worker):
        return {"kl": sampling.noise(worker, worker.prompts[item.prompt], sampling.SDPBackend.MATH)}

    monkeypatch.setattr(sampling.NoiseFloor, "run", on_cpu)
    floors = []
    for dtype in (torch.float32, torch.bfloat16):
        _, sampled = sample(stream(tiny_folder, False, dtype), LENGTH, prompts, Layers((SPARSE, SPARSE)))
        floors.append(sampled.noise_floor)
        assert sum(one.kl for one in sampled.agreements) / 2 > 10 * sampled.noise_floor
    assert 0 <= floors[0] < 1e-7
    assert floors[0] < floors[1]
