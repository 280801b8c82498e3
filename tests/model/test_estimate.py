"""The plan of time and memory, against calibrations that were measured on an H200; and memory that runs out."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, Qwen2Config

from calibrate.model import estimate as module
from calibrate.model.estimate import (
    GIB,
    ModelSizes,
    estimate,
    find_longest_length,
    measure_free_memory,
    scale_rates,
    wrap_out_of_memory,
)
from calibrate.model.models import load_config
from calibrate.model.weights import build_skeleton
from calibrate.recipe import Recipe
from calibrate.report.plan import plan
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.errors import ResourceError
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
PROMPTS = {"num_prompts": 4, "num_held_out": 4, "num_certify": 32}
CONFIGS = {"smollm2": SMOLLM2, "coder": CODER}
ONE_7B = {"model": "qwen2.5-7b", "random_weights": True, "lengths": (32768,), "num_prompts": 8}
SMOL = {"model": "smollm2", "lengths": (8192, 32768)}
DEMO = {"model": "demo", "lengths": (8192, 32768, 131072), "scores": ("input", "int8")}
MEASURED = {
    "calibrate-7b-h200.txt": ONE_7B | {"num_certify": 19},
    "calibrate-7b-memory-h200.txt": ONE_7B | {"num_certify": 0},
    "calibrate-smollm2-h200.txt": SMOL,
    "calibrate-demo-first-h200.txt": DEMO,
}


@pytest.fixture(autouse=True)
def _memory_of_an_h200(monkeypatch):
    monkeypatch.setattr(module, "decide_resident", lambda weights, device, elsewhere: 4 * weights <= H200.memory_bytes)


def model_of(name):
    config = CONFIGS[name] if name in CONFIGS else load_config(name, random_weights=True)
    return build_skeleton(config, torch.bfloat16, torch.device("cpu"))


def estimated(device=H200, **options):
    model = model_of(options["model"])
    recipe = Recipe.from_options({"out": Path("p"), "device": device.kind} | PROMPTS | options)
    return estimate(recipe, ModelSizes.from_model(model, device.kind), geometry(model.config), device)


def assert_near(estimated_seconds, measured_seconds, factor=FACTOR):
    assert measured_seconds / factor <= estimated_seconds <= measured_seconds * factor


@pytest.mark.parametrize("file", MEASURED)
def test_a_whole_run_takes_what_was_measured(file):
    took = re.search(r"^wrote .* in (\d+) s$|^TOTAL ([\d.]+) ", (RESULTS / file).read_text(), re.MULTILINE)
    assert_near(estimated(**MEASURED[file]).total, float(took[1] or took[2]))


def test_a_real_model_by_the_default_command():
    predicted = estimated(model="coder", lengths=(8192, 32768))
    assert_near(predicted.total, CODER_SECONDS)
    assert list(predicted.seconds) == list(CODER_PHASES)
    for phase, seconds in CODER_PHASES.items():
        assert_near(predicted.seconds[phase], seconds, factor=2)


@pytest.mark.parametrize(("run", "options"), [("one", {}), ("many", {"gpus": 2})])
def test_on_one_gpu_and_on_two(run, options):
    measured = json.loads((RESULTS / "scaling-h200-x2.json").read_text())["runs"][run]
    assert_near(estimated(**ONE_7B, **options).total, measured["process_seconds"])


@pytest.mark.parametrize("name", ["gemma", "gpt-oss", "qwen3"])
def test_models_with_other_layers_and_experts(name):
    measured = json.loads((RESULTS / f"rehearsals-{name}-h200.json").read_text())
    settings, row = measured["settings"], measured["rows"][0]
    options = {name: settings[name] for name in ("num_prompts", "num_certify", "trials")}
    predicted = estimated(model=row["model"], random_weights=True, lengths=tuple(settings["lengths"]), **options)
    assert_near(predicted.total, row["seconds"]["calibration"] + row["seconds"]["weights"])


def test_the_memory_is_what_was_measured():
    """Without a certificate, whose prompts are all on the GPU at a time."""
    measured = re.search(r"peak GiB ([\d.]+)", (RESULTS / "calibrate-7b-memory-h200.txt").read_text())
    assert estimated(**ONE_7B, num_certify=0).memory / GIB == pytest.approx(float(measured[1]), rel=0.2)


@pytest.mark.parametrize(
    "more",
    [
        {"lengths": (8192, 65536)}, {"num_prompts": 8}, {"num_held_out": 8}, {"num_certify": 64}, {"trials": 32},
        {"segments": (256, 512)}, {"model": "qwen2.5-7b"},
        {"model": "llama-3.1-70b"},  # its weights do not stay on the GPU
    ],
    ids=str,
)  # fmt: skip
def test_more_work_takes_longer(more):
    given = {"model": "qwen2.5-1.5b", "lengths": (8192, 32768), "segments": (256,)}
    longer, shorter = estimated(**given | more), estimated(**given)
    assert longer.total > shorter.total
    assert longer.memory >= shorter.memory


def test_a_device_is_as_fast_as_its_peak():
    half = replace(H200, name="half", sm_count=66)
    a100 = DeviceIdentity("cuda", "NVIDIA A100", (8, 0), 108, 80 << 30)
    for device, share in ((half, 1 / 2), (a100, 108 / 132 / 2)):
        assert scale_rates(device) == pytest.approx([rate * share for rate in scale_rates(H200)])
    assert scale_rates(replace(H200, capability=(9, 9))) == scale_rates(H200)  # the newest that is known before it
    on_cpu = {"model": "qwen2.5-7b", "lengths": (1024, 2048)}
    assert estimated(CPU, **on_cpu).total > 3600
    assert estimated(CPU, **on_cpu, gpus=4) == estimated(CPU, **on_cpu)  # workers share the threads that there are


def test_the_plan_names_time_and_memory():
    model, recipe = model_of("qwen2.5-7b"), Recipe.from_options({"out": Path("p"), "device": "cuda"} | ONE_7B)
    predicted = estimate(recipe, ModelSizes.from_model(model, "cuda"), geometry(model.config), H200)
    preflight = SimpleNamespace(geometry=geometry(model.config), layers="all", shares={}, loading="")
    lines = plan(recipe, preflight, predicted, H200, frozenset())
    assert re.fullmatch(
        r"about \d+ min \(.*measuring .*, searching .*, certifying .*\), less what the journal has", lines["takes"]
    )
    assert re.fullmatch(r"about \d+ GiB of the GPU's 140", lines["memory"])
    small = plan(recipe, preflight, predicted, replace(H200, memory_bytes=16 << 30), frozenset())
    assert "of the GPU's 16, which is too little: use shorter --lengths or a lower --num-certify" in small["memory"]


@given(st.integers(1, 1 << 20), *[st.integers(0, 1 << 40)] * 3)
def test_the_length_that_fits_takes_no_more_memory_than_there_is(length, resident, growing, room):
    """Also where not even the weights fit; and where memory is fragmented, it is shorter than what was tried."""
    fits = find_longest_length(length, resident + growing, resident, resident + room)
    assert fits % 1024 == 0
    assert fits == 1024 or (fits <= 0.9 * length and growing * fits / length <= 0.9 * room * (1 + 1e-9))
    assert fits >= 0.9 * length * min(1, room / max(1, growing)) - 1024  # and as long as that allows


def test_memory_that_runs_out_is_one_sentence_with_a_length(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=24 * GIB))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 22 * GIB)
    text = r"^24.0 GiB of GPU memory ran out while measuring layer 3 at 131072 tokens, .*: about 94208 tokens fit, use"
    with (
        pytest.raises(ResourceError, match=text),
        wrap_out_of_memory(torch.device("cuda"), 131072, 0, "measuring layer 3"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.")
    with wrap_out_of_memory(torch.device("cuda"), 1, 0, ""):
        pass


def test_free_memory_is_what_torch_does_not_use(monkeypatch):
    assert measure_free_memory(torch.device("cpu")) == 0
    for name, value in {"mem_get_info": (1000, 5000), "memory_reserved": 600, "memory_allocated": 250}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert measure_free_memory(torch.device("cuda")) == 1350
