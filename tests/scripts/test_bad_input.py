"""Tests of what a bench cannot use: one sentence with its name, before anything is measured."""

import pytest

from scripts.bench import agent_trace, attention, first_token, methods, prefill
from support.pages import DEMO_PROFILE
from support.processes import called

CASES = [
    (attention, "--lengths 8k", "'8k' is not understood: try 8192,32768"),
    (attention, "--lengths 64 --segment 64", "length 64 is too short for --segment 64: try 65"),
    (attention, "--densities 0.5,2", "density 2 is out of range"),
    (attention, "--heads 4/3", "are not query heads and KV heads"),
    (attention, "--rounds 0", "--rounds is 0: use at least 1"),
    (methods, "--data demmo", "did you mean demo"),
    (first_token, "", "give either --profile FILE, or --density X"),
    (first_token, f"--profile {DEMO_PROFILE} --density 0.5", "give either --profile FILE, or --density X"),
    (first_token, "--density 1.5", "--density is 1.5: use a number above 0, up to 1"),
    (first_token, "--profile missing.safetensors", "missing.safetensors"),
    (first_token, f"--profile {DEMO_PROFILE} --chunks 0", "--lengths and --chunks need numbers of at least 1"),
    (first_token, f"--profile {DEMO_PROFILE} --repeats 3", "--repeats is 3: use at least 5"),
    (agent_trace, "--lengths 16384,18000", "use two --lengths, 4096 or more apart, and a --limit and a --rate above 0"),
    (methods, "--lengths 256 --methods quantum", "setting 'quantum' has 'quantum'"),
    (prefill, "--models quantum", "model 'quantum' is not known"),
]


@pytest.mark.parametrize(
    ("script", "arguments", "said"), CASES, ids=lambda value: getattr(value, "__name__", value)[:40]
)
def test_bad_input_is_one_sentence(script, arguments, said, tmp_path, monkeypatch):
    monkeypatch.setattr(first_token, "find_spec", lambda name: object())  # vLLM, which is not asked for anything
    outcome = called(script.main, *arguments.split(), "--device", "cpu", "--out", "new.json", cwd=tmp_path)
    assert outcome.returncode == 2, outcome
    assert said in outcome.stderr
    assert f"{script.__name__}: " in outcome.stderr
    assert not list(tmp_path.iterdir())
