"""What the runtime adds to a program that has torch and transformers anyway: milliseconds, each in a cold process.

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
from support.processes import ROOT

SLOW = pytest.mark.slow(reason="imports torch or transformers in cold processes")

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


@SLOW
def test_importing_the_runtime():
    seconds, modules = imported("from s2o_runtime import LayerConfig, load_profile, s2o_attention, warmup")
    assert seconds <= IMPORT_SECONDS
    assert "s2o_runtime.attention.api" in modules
    assert not {name.partition(".")[0] for name in modules}.intersection(HEAVY)


@pytest.mark.exhaustive(reason="imports transformers in cold processes")
def test_importing_what_patches_a_model():
    seconds, modules = imported("from s2o_runtime import patch", TRANSFORMERS)
    assert seconds <= IMPORT_SECONDS
    assert "s2o_runtime.huggingface.hf" in modules
    assert not [name for name in modules if name.startswith("s2o_runtime.kernels")]


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
    assert sum(each.numel() for each in model.parameters()) > 7e9
    shape = geometry(config)
    layer = LayerConfig.uniform(shape.query_heads, tau=0.3, segment=1024, tile=TileConfig(64, 32, 1, 4, 1))
    layers = ((layer,) * shape.layers,) * 3
    device, lengths = DeviceIdentity("cpu", "cpu"), (8192, 32768, 131072)
    path = tmp_path / "p.safetensors"
    save_profile(Profile("qwen2.5-7b", shape, fingerprint(model), device, lengths, layers), path)
    took = []
    for _ in range(5):
        start = time.process_time()
        patch(model, path, strict=True)
        took.append(time.process_time() - start)
        unpatch(model)
    assert min(took) <= PATCH_SECONDS
