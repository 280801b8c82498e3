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
from calibrate.model.models import load_config, load_tokenizer
from calibrate.model.weights import build_skeleton
from calibrate.prompts.questions import ask_about
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
DEFAULTS = {"num_prompts": 5, "num_held_out": 10, "num_certify": 20, "budget_kl": 3e-3}
CONFIGS = {"smollm2": SMOLLM2, "coder": CODER}
ONE_7B = {"model": "qwen2.5-7b", "random_weights": True, "lengths": (32768,), "num_prompts": 8}
PAIR = {"lengths": (8192, 32768)}


def read_json(file):
    return json.loads((RESULTS / file).read_text())


def list_measured():
    """Options of the runs that were measured, with layers of other kinds and experts among them, and their seconds."""
    for run in read_json("calibration-phases.json")["runs"]:
        yield DEFAULTS | run["options"] | {"lengths": tuple(run["options"]["lengths"])}, run["calibration_seconds"]
    for name in ("gemma", "gpt-oss", "qwen3"):
        measured = read_json(f"rehearsals-{name}-h200.json")
        settings, row = measured["settings"], measured["rows"][0]
        options = {name: settings[name] for name in ("num_prompts", "num_certify", "trials")}
        options |= {"model": row["model"], "random_weights": True, "lengths": tuple(settings["lengths"])}
        yield options, row["seconds"]["calibration"] + row["seconds"]["weights"]


@pytest.fixture(autouse=True)
def _memory_of_an_h200(monkeypatch):
    monkeypatch.setattr(module, "decide_resident", lambda weights, device, elsewhere: 4 * weights <= H200.memory_bytes)


def model_of(name):
    config = CONFIGS.get(name) or load_config(name, random_weights=True)
    return build_skeleton(config, torch.bfloat16, torch.device("cpu"))


def estimated(device=H200, **options):
    model = model_of(options["model"])
    # of the time of the measured runs
    defaults = {"num_prompts": 4, "num_held_out": 4, "num_certify": 32}
    defaults |= {} if "budget_kl" in options else {"budget_rel_mse": 1e-3}
    recipe = Recipe.from_options({"out": Path("p"), "device": device.kind} | defaults | options)
    return estimate(recipe, ModelSizes.from_model(model, device.kind), geometry(model.config), device)


@pytest.mark.parametrize(("options", "seconds"), list(list_measured()), ids=str)
def test_a_whole_run_takes_what_was_measured(options, seconds):
    assert seconds / FACTOR <= estimated(**options).total <= seconds * FACTOR


def test_each_phase_takes_what_was_measured_and_the_memory_is_that():
    """The memory without a certificate, whose prompts are all on the GPU at a time."""
    for run in read_json("calibration-phases.json")["runs"]:
        predicted, took = estimated(**DEFAULTS | run["options"] | PAIR).seconds, run["phases"]
        longer = {phase for phase in predicted if took[phase] > 10} - {"testing the model's attention"} | {"certifying"}
        assert all(took[phase] / 1.6 <= predicted[phase] <= 1.6 * took[phase] for phase in longer)
    measured = re.search(r"peak GiB ([\d.]+)", (RESULTS / "calibrate-7b-memory-h200.txt").read_text())
    assert estimated(**ONE_7B, num_certify=0).memory / GIB == pytest.approx(float(measured[1]), rel=0.2)


def test_a_budget_of_answers_takes_phases_of_its_own_and_certifies_by_questions():
    of_layers, of_answers = (estimated(model="coder", **PAIR, **kl).seconds for kl in ({}, {"budget_kl": 2e-3}))
    added = ["measuring noise", "weighing layers by answers", "measuring answers"]
    assert [phase for phase in of_answers if phase not in of_layers] == added
    changed = {phase for phase, seconds in of_layers.items() if of_answers[phase] != seconds}
    assert changed == {"proving", "certifying"}
    assert [*of_answers][-2:] == ["certifying", "proving"] == [*of_layers][:-3:-1]  # in the order of the run
    more, most = (estimated(model="coder", **PAIR, budget_kl=2e-3, num_certify=count) for count in (64, 96))
    times = [of_answers["certifying"], more.seconds["certifying"], most.seconds["certifying"]]
    assert times[2] - times[1] == pytest.approx(times[1] - times[0])
    assert times[1] > 1.5 * times[0]
    assert more.verifying["proving"] > of_answers["measuring answers"]  # about as many prompts, by two kernels
    assert 1 < more.seconds["certifying"] / more.verifying["certifying"] < 2  # which is one attempt
    assert most.verifying["certifying"] == pytest.approx(96 / 64 * more.verifying["certifying"])
    streamed = estimated(model="llama-3.1-70b", lengths=(8192,), num_certify=1, budget_kl=2e-3).seconds
    assert all(streamed[phase] > 70.6e9 * 2 / module.READ for phase in (*added, "certifying"))


def test_the_questions_are_those_that_are_asked():
    """On a CPU their tokens are most of what `s2o-profile verify` takes."""
    few, many = (ask_about(load_tokenizer("demo"), range(parts * module.ROOM)) for parts in (3, 99))
    assert (len(few), len(many), len(few[0].ids + few[0].answer)) == (3, module.QUESTIONS, module.QUESTION)


def test_more_work_takes_longer():
    given = {"model": "qwen2.5-1.5b", "segments": (256,)} | PAIR
    shorter = estimated(**given)
    for more in (
        {"lengths": (8192, 65536)}, {"num_prompts": 8}, {"num_held_out": 8}, {"num_certify": 64}, {"trials": 32},
        {"segments": (256, 512)}, {"model": "qwen2.5-7b"}, {"model": "llama-3.1-70b"},  # which is streamed
    ):  # fmt: skip
        longer = estimated(**given | more)
        assert longer.total > shorter.total, more
        assert longer.memory >= shorter.memory, more


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
    assert re.fullmatch(r"about \d+ min \(.*measuring .*, certifying .*\), less what the journal has", lines["takes"])
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


def test_memory_that_runs_out_is_one_sentence_with_a_length_and_free_memory_is_what_torch_does_not_use(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=24 * GIB))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 22 * GIB)
    text = r"^24.0 GiB of GPU memory ran out while measuring layer 3 at 131072 tokens, .*: about 94208 tokens fit, use"
    with pytest.raises(ResourceError, match=text), wrap_out_of_memory(gpu, 131072, 0, "measuring layer 3"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.")
    with wrap_out_of_memory(gpu, 1, 0, ""):
        pass
    assert measure_free_memory(torch.device("cpu")) == 0
    for name, value in {"mem_get_info": (1000, 5000), "memory_reserved": 600, "memory_allocated": 250}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert measure_free_memory(gpu) == 1350
