"""A backward pass in bfloat16 on a GPU beside the one in float32 on the CPU, and a whole calibration with it."""

import torch

from calibrate.curves.measure import join_questions
from calibrate.model.models import load
from calibrate.model.sensitivity import measure_sensitivity
from calibrate.prompts.prompts import load_prompts
from calibrate.recipe import Recipe

LENGTH = 1023  # no multiple of any tile
NATS = 1e-2


def test_bfloat16_on_the_gpu_weighs_layers_as_float32_on_the_cpu(tmp_path):
    """The same tokens are drawn but where rounding moves one across a boundary; that and rounding are a few percent."""
    settings = Recipe.from_options({"model": "demo", "lengths": (1024,), "out": tmp_path / "p", "num_certify": 0})
    on_cpu, on_gpu = load("demo", "cpu"), load("demo", "cuda")
    prompts = load_prompts(settings, on_cpu.tokenizer).calibration[1024][:2]
    texts = [join_questions(on_cpu.tokenizer, prompt.ids[:LENGTH]) for prompt in prompts]
    expected, weighed = (
        torch.tensor(measure_sensitivity(loaded, texts, seed=0), dtype=torch.float64) for loaded in (on_cpu, on_gpu)
    )
    assert on_gpu.model.dtype == torch.bfloat16
    torch.testing.assert_close(weighed.sum(1), expected.sum(1), rtol=0.1, atol=0.0)
    torch.testing.assert_close(weighed, expected, rtol=0.3, atol=0.0)
    assert torch.tensor(measure_sensitivity(on_gpu, texts, seed=0)).double().allclose(weighed, rtol=0.02)
