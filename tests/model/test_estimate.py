"""What the plan says of time and memory, against calibrations that were measured on an H200."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig, Qwen2Config

from calibrate.model import estimate as module
from calibrate.model.estimate import GIB, ModelSizes, estimate, scale_rates
from calibrate.model.models import load_config
from calibrate.model.weights import skeleton
from calibrate.recipe import Recipe
from calibrate.report.plan import plan
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.identity import geometry

RESULTS = Path(__file__).parents[2] / "docs" / "results"
H200 = DeviceIdentity("cuda", "NVIDIA H200", (9, 0), 132, 150109880320)
CPU = DeviceIdentity("cpu", "cpu")
FACTOR = 1.5  # what the plan promises
SMOLLM2 = LlamaConfig(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
    vocab_size=49152, tie_word_embeddings=True,
)  # fmt: skip
CODER = Qwen2Config(
    hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
    vocab_size=151936, tie_word_embeddings=False,
)  # fmt: skip
# Qwen2.5-Coder-1.5B by the default command on an H200 (2026-11-25): seconds of the phases, and of the whole command
CODER_PHASES = {"loading the model": 27, "measuring": 43, "searching": 62, "proving": 45, "certifying": 132}
CODER_SECONDS = 324
# the defaults of the time of the measured runs
PROMPTS = {"num_prompts": 4, "num_held_out": 4, "num_certify": 32, "linear_tails": False}
CONFIGS = {"smollm2": SMOLLM2, "coder": CODER}
ONE_7B = {"model": "qwen2.5-7b", "random_weights": True, "lengths": (32768,), "num_prompts": 8}
SMOL = {"model": "smollm2", "lengths": (8192, 32768)}
DEMO = {"model": "demo", "lengths": (8192, 32768, 131072), "scores": ("input", "int8"), "linear_tails": True}
MEASURED = {
    "calibrate-7b-h200.txt": ONE_7B | {"num_certify": 19},
    "calibrate-7b-memory-h200.txt": ONE_7B | {"num_certify": 0},
    "calibrate-smollm2-h200.txt": SMOL,
    "calibrate-smollm2-linear-h200.txt": SMOL | {"linear_tails": True},
    "calibrate-demo-first-h200.txt": DEMO,
}


@pytest.fixture(autouse=True)
def _memory_of_an_h200(monkeypatch):
    monkeypatch.setattr(module, "stays_resident", lambda weights, device: 4 * weights <= H200.memory_bytes)


def model_of(name):
    config = CONFIGS[name] if name in CONFIGS else load_config(name, random_weights=True)
    return skeleton(config, module.torch.bfloat16, module.torch.device("cpu"))


def estimated(device=H200, **options):
    options = PROMPTS | options
    model = model_of(options["model"])
    recipe = Recipe.of({"out": Path("p"), "device": device.kind} | options)
    return estimate(recipe, ModelSizes.of(model, device.kind), geometry(model.config), device)


def assert_near(estimated_seconds, measured_seconds):
    assert measured_seconds / FACTOR <= estimated_seconds <= measured_seconds * FACTOR


@pytest.mark.parametrize("file", MEASURED)
def test_a_whole_run_takes_what_was_measured(file):
    took = re.search(r"^wrote .* in (\d+) s$|^TOTAL ([\d.]+) ", (RESULTS / file).read_text(), re.MULTILINE)
    assert_near(estimated(**MEASURED[file]).total, float(took[1] or took[2]))


def test_a_real_model_by_the_default_command():
    told = estimated(model="coder", lengths=(8192, 32768))
    assert_near(told.total, CODER_SECONDS)
    assert list(told.seconds) == list(CODER_PHASES)
    for phase, took in CODER_PHASES.items():
        assert took / 2 <= told.seconds[phase] <= took * 2, phase


@pytest.mark.parametrize(("run", "options"), [("one", {}), ("many", {"gpus": 2})])
def test_on_one_gpu_and_on_two(run, options):
    measured = json.loads((RESULTS / "scaling-h200-x2.json").read_text())["runs"][run]
    assert_near(estimated(**ONE_7B, **options).total, measured["process_seconds"])


@pytest.mark.parametrize("name", ["gemma", "gpt-oss", "qwen3"])
def test_models_with_other_layers_and_experts(name):
    measured = json.loads((RESULTS / f"rehearsals-{name}-h200.json").read_text())
    settings, row = measured["settings"], measured["rows"][0]
    options = {name: settings[name] for name in ("num_prompts", "num_certify", "trials")}
    told = estimated(model=row["model"], random_weights=True, lengths=tuple(settings["lengths"]), **options)
    assert_near(told.total, row["seconds"]["calibration"] + row["seconds"]["weights"])


def test_the_memory_is_what_was_measured():
    """Without a certificate, whose prompts are all on the GPU at a time."""
    measured = re.search(r"peak GiB ([\d.]+)", (RESULTS / "calibrate-7b-memory-h200.txt").read_text())
    assert estimated(**ONE_7B, num_certify=0).memory / GIB == pytest.approx(float(measured[1]), rel=0.2)


@pytest.mark.parametrize(
    "more",
    [
        {"lengths": (8192, 65536)},
        {"num_prompts": 8},
        {"num_held_out": 8},
        {"num_certify": 64},
        {"trials": 32},
        {"segments": (256, 512)},
        {"budget_kl": 5e-3},
        {"model": "qwen2.5-7b"},
        {"model": "llama-3.1-70b"},  # its weights do not stay on the GPU
    ],
    ids=str,
)
def test_more_work_takes_longer(more):
    given = {"model": "qwen2.5-1.5b", "lengths": (8192, 32768), "segments": (256,)}
    longer, shorter = estimated(**given | more), estimated(**given)
    assert longer.total > shorter.total
    assert longer.memory >= shorter.memory


def test_a_device_is_as_fast_as_its_peak():
    half = replace(H200, name="half", sm_count=66)
    a100 = DeviceIdentity("cuda", "NVIDIA A100", (8, 0), 108, 80 << 30)
    assert scale_rates(half).products == pytest.approx(scale_rates(H200).products / 2)
    assert scale_rates(a100).products == pytest.approx(scale_rates(H200).products * 108 / 132 / 2)
    assert scale_rates(replace(H200, capability=(9, 9))) == scale_rates(H200)  # the newest that is known before it
    on_cpu = {"model": "qwen2.5-7b", "lengths": (1024, 2048)}
    assert estimated(CPU, **on_cpu).total > 3600
    assert estimated(CPU, **on_cpu, gpus=4) == estimated(CPU, **on_cpu)  # workers share the threads that there are


def test_the_plan_names_time_and_memory():
    model, recipe = model_of("qwen2.5-7b"), Recipe.of({"out": Path("p"), "device": "cuda"} | ONE_7B)
    told = estimate(recipe, ModelSizes.of(model, "cuda"), geometry(model.config), H200)
    preflight = SimpleNamespace(geometry=geometry(model.config), layers="all", shares={}, loading="")
    lines = plan(recipe, preflight, told, H200, frozenset())
    assert re.fullmatch(
        r"about \d+ min \(.*measuring .*, searching .*, certifying .*\), less what the journal has", lines["takes"]
    )
    assert re.fullmatch(r"about \d+ GiB of the GPU's 140", lines["memory"])
    small = plan(recipe, preflight, told, replace(H200, memory_bytes=16 << 30), frozenset())
    assert "of the GPU's 16, which is too little: use shorter --lengths or a lower --num-certify" in small["memory"]
