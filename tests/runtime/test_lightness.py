"""Tests of what the runtime adds to a program with torch and transformers: milliseconds, each in a cold process.

Processor time, and the least of several runs: other programs on the machine lengthen a run and never shorten it.
"""

import json
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from calibrate.model.models import load_config
from s2o_runtime import LayerConfig, Profile, TileConfig, patch, save_profile, unpatch
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.identity import fingerprint, geometry
from support.pages import ROOT

SLOW = pytest.mark.slow(reason="imports torch in cold processes")
EXHAUSTIVE = pytest.mark.exhaustive(reason="imports transformers in cold processes")

IMPORT_SECONDS = 0.15
PATCH_SECONDS = 0.1
RUNS = 3
HEAVY = ("optuna", "sklearn", "yaml", "transformers", "calibrate", "triton", "rich", "matplotlib")
TRANSFORMERS = """
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask
"""


def imported(code: str, before: str = "") -> tuple[float, set[str]]:
    """Seconds that running `code` takes once torch and `before` are there, and the modules it adds."""
    program = f"""
import json, sys, time
import torch
{before}
known, start = set(sys.modules), time.process_time()
{code}
print(json.dumps([time.process_time() - start, sorted(set(sys.modules) - known)]))
"""
    outputs = []
    for _ in range(RUNS):
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        outputs.append(json.loads(run.stdout))
    return min(seconds for seconds, _ in outputs), set(outputs[0][1])


@pytest.mark.parametrize(
    ("code", "before", "home", "heavy"),
    [
        pytest.param("LayerConfig, load_profile, s2o_attention, warmup", "", "attention.api", HEAVY, marks=SLOW),
        pytest.param("patch", TRANSFORMERS, "huggingface.hf", ("s2o_runtime.kernels",), marks=EXHAUSTIVE),
    ],
)
def test_importing_takes_little_time_and_nothing_heavy(code, before, home, heavy):
    seconds, modules = imported(f"from s2o_runtime import {code}", before)
    assert seconds <= IMPORT_SECONDS
    assert f"s2o_runtime.{home}" in modules
    assert not [name for name in modules if f"{name}.".startswith(tuple(f"{package}." for package in heavy))]


@pytest.mark.parametrize(
    ("command", "flags", "said"),
    [
        ("calibrate", "--lengths 8192 --trials 0", "s2o-calibrate: trials is 0: expected a whole number from 1"),
        ("evaluate", "--out-dir out --tasks none", "s2o-eval: tasks is ('none',): expected a list"),
    ],
)
def test_flags_are_refused_before_torch_is_loaded(command, flags, said, tmp_path):
    """In a process of its own, where nothing but the sentence is on standard error, whatever libraries would say."""
    program = (
        f"import sys; from calibrate.commands.{command} import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    )
    words = [sys.executable, "-c", program, "--model", "demo", *flags.split()]
    run = subprocess.run(
        words, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert run.stdout == "2 False\n"
    assert (run.stderr.startswith(said), run.stderr.count("\n")) == (True, 1)


def test_patching_a_model_of_seven_billion_parameters(tmp_path):
    """Qwen2.5-7B's own sizes: its weights take no memory, because nothing was ever written there."""
    config = load_config("qwen2.5-7b", random_weights=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    shape, path = geometry(config), tmp_path / "p.safetensors"
    layer = LayerConfig.uniform(shape.query_heads, tau=0.3, segment=1024, tile=TileConfig(64, 32, 1, 4, 1))
    layers = ((layer,) * shape.layers,) * 3
    device, lengths = DeviceIdentity("cpu", "cpu"), (8192, 32768, 131072)
    save_profile(Profile("qwen2.5-7b", shape, fingerprint(model), device, lengths, layers), path)
    took = []
    for _ in range(5):
        start = time.process_time()
        patch(model, path, strict=True)
        took.append(time.process_time() - start)
        unpatch(model)
    assert min(took) <= PATCH_SECONDS
