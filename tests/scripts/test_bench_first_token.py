"""scripts/bench/first_token.py with a fake vLLM: what both engines are given, the table, and how failures end."""

import json
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from calibrate.model.models import DEMO_FOLDER
from s2o_runtime.monitor.counters import Counters
from s2o_runtime.profile import load_profile
from s2o_runtime.vllm import host
from scripts.bench import first_token as bench
from scripts.bench.schema import Spread, read
from support.pages import DEMO_PROFILE

DENSITY = 0.25
SETTINGS = {  # of the times that docs/serving.md states
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "enable_chunked_prefill": True,
}


class FakeEngine:
    """What the bench uses of vllm.LLM: a second for a prompt, half of it with S2O, more for the first two."""

    def __init__(self, clock, counters, **options):
        self.options, self.clock, self.counters = options, clock, counters
        self.prompts = []
        self.seconds = 0.5 if options.get("additional_config") else 1.0

    def generate(self, prompts, parameters, use_tqdm):
        assert parameters.max_tokens == 1
        (prompt,) = prompts
        self.prompts.append(prompt["prompt_token_ids"])
        of_length = [len(other) for other in self.prompts].count(len(self.prompts[-1]))
        self.clock.now += self.seconds * {1: 10, 2: 3}.get(of_length, 1)
        if self.options.get("additional_config"):
            self.counters.add(0, "s2o", "the kernel supports this call", len(self.prompts[-1]))
        answer = len(self.prompts) if self.seconds == 1.0 else 1  # they agree on the first prompt alone
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[answer])])]


@pytest.fixture
def engines(monkeypatch):
    """Put a fake in vLLM's place, in this process; the engines that are started, in their order."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    started, clock, counters = [], SimpleNamespace(now=0.0), Counters()
    counters.keep(0, SimpleNamespace(density=torch.tensor([0.2, 0.4])))

    def start(**options):
        started.append(FakeEngine(clock, counters, **options))
        return started[-1]

    vllm = ModuleType("vllm")
    vllm.__version__, vllm.LLM, vllm.SamplingParams = "0.0.1", start, SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(bench, "find_spec", lambda name: object())
    monkeypatch.setattr(bench, "alone", bench.run_engine)
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(host, "server", lambda: SimpleNamespace(counters=counters))
    return started


def run(tmp_path, *arguments):
    out = tmp_path / "f.json"
    sizes = ["--lengths", "48,64", "--uncounted", "2", "--repeats", "2", "--device", "cpu"]
    code = bench.main([*arguments, *sizes, "--out", str(out)])
    return code, read(bench.FirstTokenFile, json.loads(out.read_text())) if out.exists() else None


def test_both_engines_read_the_same_prompts_and_are_compared(tmp_path, engines, capsys):
    code, file = run(tmp_path, "--profile", str(DEMO_PROFILE), "--chunk", "512")
    assert code == 0
    stock, s2o = engines
    assert stock.prompts == s2o.prompts
    assert [len(prompt) for prompt in stock.prompts] == [48] * 4 + [64] * 4
    assert len(set(map(tuple, stock.prompts))) == 8
    assert [(row.engine, row.length) for row in file.rows] == [("stock", 48), ("stock", 64), ("S2O", 48), ("S2O", 64)]
    assert [row.seconds for row in file.rows] == [Spread(*[seconds] * 3) for seconds in (1.0, 1.0, 0.5, 0.5)]
    assert [row.first_seconds for row in file.rows] == [10.0, 10.0, 5.0, 5.0]
    assert file.density == {"0": pytest.approx(0.3)}
    assert file.versions["vllm"] == "0.0.1"
    printed = capsys.readouterr().out
    rows = [line.replace("│", " ").split() for line in printed.splitlines() if " 1000.0 " in line]
    assert rows == [
        ["48", "1000.0", "500.0", "2.00x", "10000", "5000", "1", "of", "4"],
        ["64", "1000.0", "500.0", "2.00x", "10000", "5000", "0", "of", "4"],
    ]
    assert "S2O: 100.0% s2o (the kernel supports this call); mean density 0.300 of 1 layers" in printed


def test_engines_differ_by_the_backend_alone(tmp_path, engines):
    run(tmp_path, "--profile", str(DEMO_PROFILE), "--chunk", "512")
    stock, s2o = (engine.options for engine in engines)
    assert s2o.pop("additional_config") == {"s2o": {"profile": str(DEMO_PROFILE), "drift": "off"}}
    assert stock == s2o
    assert stock.items() >= SETTINGS.items()
    assert (stock["model"], stock["load_format"]) == (str(DEMO_FOLDER), "auto")
    assert (stock["max_num_batched_tokens"], stock["max_model_len"]) == (512, 64 + 64)
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_random_weights_have_the_models_sizes_and_an_even_profile(tmp_path):
    args = bench.parser().parse_args(["--model", "llama-3.1-8b", "--density", str(DENSITY), "--device", "cpu"])
    options = bench.engine_options(bench.S2O, args, tmp_path)
    assert options["load_format"] == "dummy"
    config = json.loads((tmp_path / "config.json").read_text())
    assert options["model"] == str(tmp_path)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (32, 4096, 128256)
    profile = load_profile(options["additional_config"]["s2o"]["profile"])
    assert profile.lengths == (8192, 131072)
    assert (profile.geometry.layers, profile.geometry.query_heads, profile.geometry.kv_heads) == (32, 32, 8)
    # of keys that all count the same, the share (1 - x) is (1 - x) / x of the share x that was visited
    (tau,) = {head.tau for layers in profile.layers for layer in layers for head in layer.heads}
    assert tau == pytest.approx((1 - DENSITY) / DENSITY)
