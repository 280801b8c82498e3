"""A backward pass in bfloat16 on a GPU beside the one in float32 on the CPU, and a whole calibration with it."""

from statistics import fmean

import torch

from calibrate.model.models import load
from calibrate.model.sensitivity import sensitivity
from calibrate.pipeline import calibrate
from calibrate.prompts.prompts import load_prompts
from calibrate.recipe import Recipe

LENGTH = 1023  # no multiple of any tile
NATS = 1e-2


def test_bfloat16_on_the_gpu_weighs_layers_as_float32_on_the_cpu(tmp_path):
    """The same tokens are drawn but where rounding moves one across a boundary; that and rounding are a few percent."""
    settings = Recipe.of({"model": "demo", "lengths": (1024,), "out": tmp_path / "p", "num_certify": 0})
    on_cpu, on_gpu = load("demo", "cpu"), load("demo", "cuda")
    prompts = [prompt.ids[:LENGTH] for prompt in load_prompts(settings, on_cpu.tokenizer).calibration[1024][:2]]
    expected, weighed = (
        torch.tensor(sensitivity(loaded, prompts, seed=0), dtype=torch.float64) for loaded in (on_cpu, on_gpu)
    )
    assert on_gpu.model.dtype == torch.bfloat16
    torch.testing.assert_close(weighed.sum(1), expected.sum(1), rtol=0.1, atol=0.0)
    torch.testing.assert_close(weighed, expected, rtol=0.3, atol=0.0)
    assert torch.tensor(sensitivity(on_gpu, prompts, seed=0)).double().allclose(weighed, rtol=0.02)


def test_a_calibration_on_the_gpu_keeps_to_its_kl(tmp_path, alone):
    """The final proof may round unlike the passes, so what it finds is near the best of them, not equal."""
    options = {"lengths": (8192,), "budget_kl": NATS, "num_certify": 4, "check_lengths": (), "trials": 4}
    result = calibrate(Recipe.of({"model": "demo", "device": "cuda", "out": tmp_path / "p", **options}), progress=False)
    assert result.problems == ()
    assert result.proofs[8192].kl <= NATS
    assert any(0.5 * NATS < one.kl <= NATS for one in result.kl_passes[8192])
    assert fmean(layer.density for layer in result.proofs[8192].layers) < 0.8
