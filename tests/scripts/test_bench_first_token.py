"""scripts/bench/first_token.py with a fake vLLM: what both engines are given, the table, and how failures end."""

import json
import os
import subprocess
import sys
import textwrap
from argparse import Namespace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from calibrate.model.models import DEMO_FOLDER
from s2o_runtime.monitor.counters import Counters
from s2o_runtime.profile import load_profile
from s2o_runtime.vllm import host, plugin
from scripts.bench import first_token as bench
from scripts.bench.schema import Spread, read
from support.pages import ROOT

PROFILE = ROOT / "profiles" / "demo" / "cpu" / "mse-0.0001.safetensors"
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
    code = bench.main(
        [*arguments, "--lengths", "48,64", "--uncounted", "2", "--repeats", "2", "--device", "cpu", "--out", str(out)]
    )
    return code, read(bench.FirstTokenFile, json.loads(out.read_text())) if out.exists() else None


def test_both_engines_read_the_same_prompts_and_are_compared(tmp_path, engines, capsys):
    code, file = run(tmp_path, "--profile", str(PROFILE), "--chunk", "512")
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
    run(tmp_path, "--profile", str(PROFILE), "--chunk", "512")
    stock, s2o = (engine.options for engine in engines)
    assert s2o.pop("additional_config") == {"s2o": {"profile": str(PROFILE), "drift": "off"}}
    assert stock == s2o
    assert stock.items() >= SETTINGS.items()
    assert (stock["model"], stock["load_format"]) == (str(DEMO_FOLDER), "auto")
    assert (stock["max_num_batched_tokens"], stock["max_model_len"]) == (512, 64 + 64)
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@pytest.mark.parametrize("name", ["CUSTOM", "S2O"])
def test_a_gpu_is_told_both_backends(name, tmp_path, monkeypatch):
    monkeypatch.setattr(plugin, "backend_name", lambda: name)
    args = bench.parser().parse_args(["--profile", str(PROFILE), "--device", "cuda"])
    assert bench.engine_options(bench.STOCK, args, tmp_path)["attention_backend"] == "FLASH_ATTN"
    assert "additional_config" not in bench.engine_options(bench.STOCK, args, tmp_path)
    assert bench.engine_options(bench.S2O, args, tmp_path)["attention_backend"] == name


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


def test_random_tokens_are_of_the_vocabulary_and_the_same_for_both(monkeypatch):
    args = Namespace(model="llama-3.1-8b", density=DENSITY, lengths=(5000,), uncounted=1, repeats=1)
    prompts = list(bench.prompts(args))
    assert [len(prompt) for prompt in prompts] == [5000, 5000]
    assert prompts[0] != prompts[1]
    assert prompts == list(bench.prompts(args))
    assert 120000 < max(prompts[0]) < 128256


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "give either --profile FILE, or --density X"),
        (["--profile", str(PROFILE), "--density", "0.5"], "give either --profile FILE, or --density X"),
        (["--density", "1.5"], "--density is 1.5: use a number above 0, up to 1"),
        (["--profile", "missing.safetensors"], "missing.safetensors"),
        (["--profile", str(PROFILE), "--chunk", "0"], "--chunk is 0: use at least 1"),
        (["--profile", str(PROFILE), "--model", "nonsense"], "model 'nonsense' is not known"),
        (["--density", "0.5", "--model", "nonsense"], "model 'nonsense' is not known"),
    ],
    ids=["neither", "both", "density", "no-profile", "chunk", "model", "sizes"],
)
def test_what_cannot_run_is_one_sentence(arguments, problem, tmp_path, engines, capsys):
    code, file = run(tmp_path, *arguments)
    assert (code, file, engines) == (2, None, [])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("scripts.bench.first_token: ")
    assert problem in line


def test_without_vllm_it_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    code, _ = run(tmp_path, "--profile", str(PROFILE))
    assert code == 2
    expected = (
        "scripts.bench.first_token: vllm is not installed: run pip install vllm, on a machine with an NVIDIA GPU\n"
    )
    assert capsys.readouterr().err == expected


def test_an_engine_that_fails_is_one_sentence(tmp_path, engines, monkeypatch, capsys):
    def fails(**options):
        raise ValueError("no room for\nthe KV cache")

    monkeypatch.setattr(sys.modules["vllm"], "LLM", fails)
    code, file = run(tmp_path, "--profile", str(PROFILE))
    assert (code, file) == (2, None)
    assert "the stock engine failed (ValueError: no room for the KV cache)" in capsys.readouterr().err


def test_times_without_s2o_are_none_of_s2o(tmp_path, engines, monkeypatch, capsys):
    monkeypatch.setattr(Counters, "add", lambda self, *row: self.rows.update({(0, "dense", "decode"): 1}))
    code, file = run(tmp_path, "--profile", str(PROFILE))
    assert (code, file) == (2, None)
    assert "no row was computed by S2O (100.0% dense (decode)" in capsys.readouterr().err


FAKE = """\
import os
__version__ = os.environ["FAKE_VERSION"]
SamplingParams = dict
class LLM:
    def __init__(self, **options):
        assert not hasattr(LLM, "started"), "a second engine in one process"
        LLM.started = True
        open(os.environ["FAKE_PIDS"], "a").write(f"{os.getpid()} ")
        if options.get("additional_config"):
            os._exit(9)
"""


@pytest.mark.exhaustive(reason="starts processes of engines and kills them")
def test_each_engine_has_a_process_of_its_own_and_one_that_is_killed_is_one_sentence(tmp_path):
    (tmp_path / "vllm.py").write_text(FAKE + textwrap.indent(GENERATE, "    "))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
        "FAKE_VERSION": "0.0.2",
        "FAKE_PIDS": str(tmp_path / "pids"),
    }
    command = [
        sys.executable,
        "-m",
        bench.NAME,
        "--profile",
        str(PROFILE),
        "--lengths",
        "48",
        "--uncounted",
        "1",
        "--repeats",
        "1",
    ]
    command += ["--device", "cpu", "--out", str(tmp_path / "f.json")]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2, ended.stderr
    assert "the process of the S2O engine was lost" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert len(set((tmp_path / "pids").read_text().split())) == 2


GENERATE = """\
def generate(self, prompts, parameters, use_tqdm):
    from types import SimpleNamespace
    return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1])])]
"""
