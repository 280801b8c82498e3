"""Benches of vLLM with a fake one: what both engines are given, what is timed, the tables, and how failures end."""

import json
import os
import re
import sys
from itertools import takewhile
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch

from calibrate.model.models import DEMO_FOLDER, load_tokenizer
from s2o_runtime.monitor.counters import Counters
from s2o_runtime.profile import load_profile
from s2o_runtime.vllm import engine
from scripts.bench import agent_trace
from scripts.bench import first_token as bench
from scripts.bench.schema import Spread, read
from scripts.docs import first_token_plot, raw
from support.pages import DEMO_PROFILE

DENSITY = 0.25
TOKENIZER = load_tokenizer("demo")
# of the times that docs/serving.md states
SETTINGS = {"skip_tokenizer_init": True, "dtype": "bfloat16"}
SETTINGS |= {"enable_prefix_caching": True, "enable_chunked_prefill": True}


def alike(prompt, other):
    """Return how many of their first tokens are the same."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(prompt, other, strict=False))))


class FakeEngine:
    """The parts of vllm.LLM, its engine and its scheduler that the bench uses, in one.

    A step takes a second, half of it with S2O, and the first two prompts of a length and chunk take more. A step that
    generates takes a tenth. Codes that are asked for are looked up. What opts out of S2O has a cache of its own.
    """

    first: ClassVar = {1: 10, 2: 3}  # times longer

    def __init__(self, clock, counters, **options):
        self.options, self.clock, self.counters = options, clock, counters
        self.llm_engine = self.engine_core = self.scheduler = self
        self.max_num_scheduled_tokens = options["max_num_batched_tokens"]
        self.prompts, self.kinds, self.cache, self.running = [], [], [], {}
        self.fast = bool(options.get("additional_config"))

    def reset_prefix_cache(self):
        self.cache = []

    def generate(self, prompts, parameters, use_tqdm):
        off = parameters.extra_args == {"s2o": "off"}
        return [self.read(prompt["prompt_token_ids"], parameters.max_tokens, off) for prompt in prompts]

    def read(self, prompt, tokens, off=False):
        assert self.fast or not off
        cached = max((alike(prompt, other) for other, salted in self.cache if salted == off), default=0)
        if not off:
            self.prompts.append(prompt)
        self.cache.append((prompt, off))
        self.kinds.append((len(prompt), self.max_num_scheduled_tokens, off))
        steps = -(-(len(prompt) - cached) // self.max_num_scheduled_tokens)
        seconds = 0.5 if self.fast and not off else 1.0
        self.clock.now += seconds * steps * self.first.get(self.kinds.count(self.kinds[-1]), 1)
        if self.fast and not off:
            self.counters.add(0, "s2o", "the kernel supports this call", len(prompt))
        answer = [1 if self.fast else len(self.prompts)]  # they agree on the first prompt alone
        if tokens > 1:
            text = TOKENIZER.decode(prompt)
            key = text.split()[-2]
            answer = TOKENIZER.encode(re.search(rf"code for {key} is (\d+)", text)[1])
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=answer)], num_cached_tokens=cached)

    def add_request(self, name, prompt, parameters):
        assert parameters.ignore_eos
        self.running[name] = (prompt["prompt_token_ids"], parameters.max_tokens, [])

    def has_unfinished_requests(self):
        return bool(self.running)

    def step(self):
        """A token of each request that runs; those that have none are read first, in the same step."""
        self.clock.now += 0.1
        outputs = []
        for name, (prompt, tokens, written) in list(self.running.items()):
            if not written:
                self.read(prompt, 1)
            written.append(0)
            if len(written) == tokens:
                del self.running[name]
            outputs.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=list(written))]))
        return outputs


class LocalEngine(bench.Remote):
    """In this process."""

    def __init__(self, *given):
        self.given = given

    def __enter__(self):
        self.served = bench.Served(*self.given)
        return self

    def __exit__(self, *error):
        pass

    def call(self, method, *arguments):
        return getattr(self.served, method)(*arguments)


@pytest.fixture
def engines(monkeypatch):
    """Put a fake in vLLM's place, in this process; the engines that are started, in their order."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    started, clock, counters = [], SimpleNamespace(now=0.0), Counters()
    counters.sampled[0] = SimpleNamespace(density=torch.tensor([0.2, 0.4]))

    def sleep(seconds):
        clock.now += seconds

    def start(**options):
        started.append(FakeEngine(clock, counters, **options))
        return started[-1]

    vllm = ModuleType("vllm")
    vllm.__version__, vllm.LLM, vllm.SamplingParams = "0.0.1", start, SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(bench, "find_spec", lambda name: object())
    monkeypatch.setattr(bench, "LONG", 1)
    monkeypatch.setattr(bench, "Remote", LocalEngine)
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: clock.now, sleep=sleep))
    monkeypatch.setattr(engine, "get_server", lambda: SimpleNamespace(counters=counters))
    return started


def run(tmp_path, flags=""):
    out, sizes = tmp_path / "f.json", "--lengths 48,1024 --uncounted 2 --repeats 5 --device cpu "
    code = bench.main([*(sizes + flags).split(), "--profile", str(DEMO_PROFILE), "--out", str(out)])
    return code, read(bench.FirstTokenFile, json.loads(out.read_text())) if out.exists() else None


def test_engines_read_the_same_prompts_and_differ_by_the_backend_alone(tmp_path, engines, capsys):
    """S2O's reads each once more without it; codes are asked for in one text."""
    code, file = run(tmp_path, "--chunks 512")
    assert code == 0
    stock, s2o = engines
    assert stock.prompts == s2o.prompts
    assert [len(prompt) for prompt in stock.prompts[:14]] == [48] * 7 + [1024] * 7
    assert len(set(map(tuple, stock.prompts))) == 14 + 8
    rows = [(row.kind.length, row.engine, row.seconds, row.first_seconds) for row in file.rows]
    assert rows == [
        (length, name, Spread(*[median] * 3), 10 * median)
        for length, names in ((48, (1.0, 0.5, 1.0)), (1024, (2.0, 1.0, 2.0)))
        for name, median in zip(("stock", "S2O", "S2O off"), names, strict=True)
    ]
    assert (file.density, file.versions["vllm"]) == ({"0": pytest.approx(0.3)}, "0.0.1")
    printed = capsys.readouterr().out
    table = [" ".join(line.replace("│", " ").split()) for line in printed.splitlines() if " of 7" in line]
    assert table == [
        "48 512 0 1000.0 1000.0 500.0 2.00x (2.00 to 2.00) faster 1.00x 10000 5000 1 of 7",
        "1024 512 0 2000.0 2000.0 1000.0 2.00x (2.00 to 2.00) faster 1.00x 20000 10000 0 of 7",
    ]
    assert "S2O: 100.0% s2o (the kernel supports this call); mean density 0.300 of 1 layers" in printed

    assert file.needles == {"stock": 8, "S2O": 8}
    asked = stock.prompts[-8:]
    assert max(map(len, asked)) == 1024 - bench.NEEDLE_TOKENS
    assert alike(*asked[:2]) > 1024 - bench.NEEDLE_TOKENS - 64
    assert "S2O: 8 of 8 needles" in printed

    assert s2o.options.pop("additional_config") == {
        "s2o": {"profile": str(DEMO_PROFILE), "strict": False, "drift": "off"}
    }
    assert stock.options == s2o.options
    sizes = {"max_num_batched_tokens": 512, "max_model_len": 1024 + 64, "gpu_memory_utilization": bench.MEMORY / 2}
    assert stock.options.items() >= (SETTINGS | sizes | {"model": str(DEMO_FOLDER), "load_format": "auto"}).items()
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_chunks_and_shares_of_the_cache_are_timed_in_one_engine(tmp_path, engines):
    # the second turn is longer than the longest prompt
    _, file = run(tmp_path, "--lengths 1024 --chunks 256,512 --cached 700,1000 --new 300")
    kinds = [bench.PromptKind(length, chunk, hit) for length, hit in ((1024, 0), (1000, 0.7)) for chunk in (256, 512)]
    assert [row.kind for row in file.rows] == [kind for kind in kinds for _ in range(3)]
    assert [[row.cached for row in file.rows[at::3]] for at in range(3)] == [[0, 0, 700, 700]] * 3
    assert [row.seconds.median for row in file.rows[::3]] == [4.0, 2.0, 2.0, 1.0]
    assert len(engines) == 2
    assert {engine.options["max_num_batched_tokens"] for engine in engines} == {512}


def test_an_interval_of_turns_says_which_engine_is_slower():
    """By the order of the turns' ratios: of five, all; of forty, the 14th to the 27th, which hold it with 96%."""
    stock = [float(number) for number in range(1, 41)]
    assert bench.compare_turns([1.0] * 5, [1.0, 2.0, 4.0, 1.25, 1.6]) == (0.625, 0.25, 1.0)
    assert bench.compare_turns(stock, [1.0] * 40) == (20.5, 14.0, 27.0)


def test_the_trace_of_agents_finds_the_rate_that_each_engine_keeps_up_with(tmp_path, engines, monkeypatch):
    """Sessions grow by turns behind what is cached, in both engines alike; S2O's steps take half the time."""
    monkeypatch.setattr(agent_trace, "NEW", (16, 64))
    monkeypatch.setattr(FakeEngine, "first", {})
    out, flags = tmp_path / "t.json", "--lengths 128,512 --chunks 512 --sessions 2 --requests 30 --tokens 2 --limit 3"
    flags += " --rate 0.5 --steps 6 --device cpu"
    assert agent_trace.main([*flags.split(), "--profile", str(DEMO_PROFILE), "--out", str(out)]) == 0
    file = read(agent_trace.AgentTraceFile, json.loads(out.read_text()))
    stock, s2o = engines
    assert stock.prompts == s2o.prompts
    cached, turns = stock.prompts[:2], stock.prompts[2:32]
    assert stock.prompts == (cached + turns) * 7  # the same at each rate
    for index, prompt in enumerate(turns):
        new = len(prompt) - max(alike(prompt, other) for other in cached + turns[:index])
        assert 16 <= new <= 64 or len(prompt) == 128  # the next turn of a session, or another session
    assert 400 < max(map(len, turns)) <= 512 - 2
    rates = []
    for name in ("stock", "S2O"):
        runs = [run for run in file.runs if run.engine == name]
        assert (len(runs), {run.requests for run in runs}) == (6, {30})
        rates.append(max(run.rate for run in runs if run.first_p99 <= 3))
        assert min(run.rate for run in runs if run.first_p99 > 3) < 1.5 * rates[-1]
        assert all(0 < run.between_median <= run.between_p99 for run in runs)
    assert rates[1] > 1.4 * rates[0]


def test_random_weights_have_the_models_sizes_and_an_even_profile(tmp_path):
    args = bench.parser().parse_args(["--model", "llama-3.1-8b", "--density", str(DENSITY), "--device", "cpu"])
    options = bench.engine_options(bench.S2O, args, tmp_path)
    assert (options["load_format"], options["model"]) == ("dummy", str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (32, 4096, 128256)
    profile = load_profile(options["additional_config"]["s2o"]["profile"])
    assert profile.lengths == (8192, 131072)
    assert (profile.geometry.layers, profile.geometry.query_heads, profile.geometry.kv_heads) == (32, 32, 8)
    # of keys that all count the same, the share (1 - x) is (1 - x) / x of the share x that was visited
    (tau,) = {head.tau for layers in profile.layers for layer in layers for head in layer.heads}
    assert tau == pytest.approx((1 - DENSITY) / DENSITY)


def test_short_prompts_are_timed_more_often(tmp_path, engines, monkeypatch):
    monkeypatch.setattr(bench, "LONG", 100)
    run(tmp_path)
    assert [len(prompt) for prompt in engines[0].prompts].count(48) == 2 + 2 * 5


def test_the_picture_never_mixes_settings_and_takes_the_one_with_most_lengths_or_the_newest(tmp_path, monkeypatch):
    measured = raw.raw("first-token-qwen2.5-coder-1.5b-kl-h200.json")
    stock, s2o = measured["rows"][:2]
    for module in (raw, first_token_plot):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    for number, (budget, lengths, setting, drawn) in enumerate([
        ("rel-mse-0.001", (8192, 32768), "H200, rel_mse 0.001", [8192, 32768]),
        ("kl-0.002", (32768,), "H200, rel_mse 0.001", [8192, 32768]),
        ("kl-0.002", (131072,), "H200, kl 0.002", [32768, 131072]),
    ]):  # fmt: skip
        kinds = [{"length": length, "chunk": 8192, "hit": 0.0} for length in lengths]
        file = measured | {
            "date": f"2026-12-0{number + 1}",
            "rows": [row | {"kind": of} for of in kinds for row in (stock, s2o)],
        }
        file["settings"] |= {"profile": f"{budget}.safetensors"}
        (tmp_path / f"first-token-{9 - number}.json").write_text(json.dumps(file))
        found, points = first_token_plot.find_points("Qwen2.5-Coder-1.5B", "cold")
        assert (found, list(points)) == (setting, drawn)
    ratio, low, high = bench.compare_turns(stock["turns"], s2o["turns"])
    assert points[32768].describe_gain() == f"{ratio:.2f}x\n({low:.2f}-{high:.2f})"
    assert first_token_plot.find_points("Qwen2.5-Coder-1.5B", "turn") == ("", {})
