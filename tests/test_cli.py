"""s2o-calibrate as a user meets it: a process with an exit code, one sentence for bad input, a profile at the end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_hf import SIZES
from transformers import AutoModelForCausalLM, MistralConfig

from s2o_runtime import load_profile, patch

ROOT = Path(__file__).parent.parent
GOOD = ["--model", "demo", "--budget-mse", "1e-4", "--lengths", "512", "--device", "cpu"]


def run(*arguments, cwd):
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "HOME": str(cwd)}
    return subprocess.run(
        [sys.executable, "-m", "calibrate.cli", *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def mistral(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistral")
    AutoModelForCausalLM.from_config(MistralConfig(**SIZES)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """One real calibration of the demo model, run twice."""
    folder = tmp_path_factory.mktemp("calibrated")
    arguments = ["--model", "demo", "--budget-mse", "2e-4", "--lengths", "512,1024", "--num-prompts", 2]
    arguments += ["--held-out", 1, "--trials", 4, "--device", "cpu", "--quiet", "--json"]
    first = run(*arguments, "--out", "a/first.safetensors", cwd=folder)
    second = run(*arguments, "--out", "second.safetensors", cwd=folder)
    return folder, first, second


def test_a_calibration_writes_a_profile_that_meets_the_budget(calibrated):
    folder, first, _ = calibrated
    assert first.returncode == 0, first.stderr
    outcome = json.loads(first.stdout)
    assert outcome["met"]
    rows = outcome["lengths"][1]["layers"]
    assert any(row["dense_heads"] < 8 for row in rows)
    assert all(sum(row["representatives"].values()) == 8 - row["dense_heads"] >= row["tails"] for row in rows)
    assert all(row["grain"] in (1, 4) for row in rows)
    assert [entry["length"] for entry in outcome["lengths"]] == [512, 1024]
    profile = load_profile(folder / "a" / "first.safetensors")
    for entry, recorded in zip(outcome["lengths"], profile.record["held_out"], strict=True):
        for row, proof in zip(entry["layers"], recorded["layers"], strict=True):
            assert 0 < row["held_out_mse"] <= 2e-4
            assert row["held_out_mse"] == proof["mse"]
            assert 0.2 < row["density"] <= 1.0
    assert profile.record["recipe"]["representatives"] == [1, 32]
    assert profile.record["recipe"]["grains"] == [4]
    assert profile.record["objective"] == "predicted latency"
    hashes = profile.record["data"]
    assert not {p["sha256"] for p in hashes["calibration"]} & {p["sha256"] for p in hashes["held_out"]}


def test_the_same_inputs_give_the_same_bytes(calibrated):
    folder, _, second = calibrated
    assert second.returncode == 0
    assert (folder / "a" / "first.safetensors").read_bytes() == (folder / "second.safetensors").read_bytes()


def test_the_profile_does_what_it_says(calibrated):
    """The held-out error in the profile, measured again from outside with a fresh patch."""
    from calibrate.models import load
    from calibrate.prompts import load_prompts
    from calibrate.recipe import Budget, Recipe
    from s2o_runtime.dense import exact_attention
    from s2o_runtime.hf import layer_states

    folder, _, _ = calibrated
    profile = load_profile(folder / "a" / "first.safetensors")
    loaded = load("demo", "cpu")
    recipe = Recipe("demo", Budget("mse", 2e-4), (512, 1024), Path("unused"), num_prompts=2, held_out=1)
    ids = load_prompts(recipe, loaded.tokenizer).held_out[1024][0].ids
    patch(loaded.model, profile, strict=True)
    errors = {}

    def observe(layer, q, k, v, scale, out):
        errors[layer] = float((out - exact_attention(q, k, v, scale=scale)).square().mean())

    for state in layer_states(loaded.model):
        state.observer = observe
    with torch.no_grad():
        loaded.model(ids[None], use_cache=False)
    recorded = [layer["mse"] for layer in profile.record["held_out"][1]["layers"]]
    assert [errors[layer] for layer in sorted(errors)] == pytest.approx(recorded, rel=1e-3)


def test_a_budget_that_held_out_prompts_break_writes_nothing(tmp_path):
    """A run whose held-out errors come out far above what it predicted, dense layers included: exit code 3."""
    program = (
        "import sys, calibrate.verify as v;"
        "real = v._measure\n"
        "def worse(*a):\n"
        "    return tuple(v.LayerProof(x.mse + 1.0, x.dense_power, x.density) for x in real(*a))\n"
        "v._measure = worse\n"
        "from calibrate.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = [*GOOD, "--num-prompts", "1", "--held-out", "1", "--trials", "1", "--quiet", "--out", "no.safetensors"]
    outcome = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert outcome.returncode == 3, outcome.stderr
    assert "held-out error is over budget, so no profile was written" in outcome.stderr
    assert list(tmp_path.iterdir()) == []


def test_dry_run_prints_the_plan_and_stops(tmp_path):
    outcome = run(*GOOD, "--dry-run", "--json", cwd=tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    plan = json.loads(outcome.stdout)
    assert plan["lengths"] == [512]
    assert plan["out"] == "profiles/demo/cpu/mse-0.0001.safetensors"
    assert (plan["representatives"], plan["grains"]) == ([1, 32], [4])
    text = run(*GOOD, "--dry-run", "--representatives", "8,1", "--grains", "2", cwd=tmp_path).stdout
    assert "[1, 8]" in text
    assert "[2]" in text
    assert "8 query heads, 2 KV heads, head dim 128" in text
    assert list(tmp_path.iterdir()) == []


def test_the_table_fits_120_columns(capsys):
    from rich.console import Console

    from calibrate.report import print_tables

    row = {"layer": 27, "tau_min": 0.001468, "tau_max": 146.8, "dense_heads": 12, "tails": 16, "segment": 1024}
    row |= {"representatives": {"1": 20, "32": 8}, "grain": 4, "tile": "64x128x4 ws s2", "density": 0.1234}
    row |= {"error": 1e-4, "error_over_budget": 1.0, "seconds": 1.0, "dense_seconds": 12.3}
    length = {"length": 131072, "layers": [row], "prefill_seconds": 1.0, "dense_prefill_seconds": 2.0}
    dense = dict.fromkeys(("tau_min", "tau_max", "seconds", "dense_seconds")) | {"representatives": {}}
    length["layers"].append(row | dense)
    outcome = {"lengths": [length], "budget": {"kind": "rel_mse"}, "device": "GPU", "failed_trials": 0}
    print_tables(outcome, Console(width=120))
    text = capsys.readouterr().out
    for part in ("0.0015 .. 150", "1/32: 20/8", "64x128x4 ws s2", "12.30x", "rel_mse"):
        assert part in text
    assert "…" not in text


def bad_inputs():
    yield ["--model", "qwen2.5-7bb"], "model 'qwen2.5-7bb' is not known: did you mean qwen2.5-7b"
    yield ["--model", "zzz"], "A local folder or a hub id (org/name) works too"
    yield ["--model", "."], "folder . holds no config.json"
    yield ["--model", "some/thing"], "model 'some/thing' cannot be loaded from some/thing"
    yield ["--model", "MISTRAL"], "architecture 'mistral' is not supported"
    yield ["--prompts", "none.jsonl"], "prompt file none.jsonl does not exist"
    yield ["--prompts", "bad.jsonl"], "bad.jsonl:2: "
    yield ["--prompts", "short.jsonl"], "0 prompts of 512 tokens or more"
    yield ["--budget-mse", "0"], "budget 0.0 is not a positive number"
    yield ["--budget-mse", "-1"], "budget -1.0 is not a positive number"
    yield ["--budget-mse", "nan"], "budget nan is not a positive number"
    yield ["--budget-mse", "little"], "'little' is not a number"
    yield ["--lengths", "262144"], "length 262144 is beyond the model's limit of 131072"
    yield ["--lengths", "100"], "length 100 is shorter than one segment of 256"
    yield ["--lengths", "8k"], "'8k' is not a list of lengths"
    yield ["--representatives", "1,3"], "representatives 3 is not supported: use some of (1, 2, 4, 8, 16, 32, 64)"
    yield ["--representatives", "many"], "'many' is not a list of numbers: try 1,4"
    yield ["--grains", "1,16"], "grains 16 is not supported: use some of (1, 2, 4, 8)"
    yield ["--num-prompts", "0"], "num_prompts is 0: use at least 1"
    yield ["--out", "bad.jsonl/p.safetensors"], "--out bad.jsonl/p.safetensors cannot be written"
    yield ["--out", "/proc/p.safetensors"], "--out /proc/p.safetensors cannot be written"
    yield ["--out", "."], "--out . is a folder"
    yield ["--device", "tpu"], "device 'tpu' is not known"
    yield ["--device", "cuda:99"], "device 'cuda:99' is not here"


@pytest.mark.parametrize(("arguments", "message"), list(bad_inputs()), ids=lambda value: " ".join(value)[:40])
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, message, mistral, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "short.jsonl").write_text('{"text": "a"}\n')
    before = sorted(tmp_path.iterdir())
    flags = dict(zip(GOOD[::2], GOOD[1::2], strict=True)) | dict([arguments])
    flags = {name: str(mistral) if value == "MISTRAL" else value for name, value in flags.items()}
    outcome = run(*[part for flag in flags.items() for part in flag], "--quiet", cwd=tmp_path)
    assert outcome.returncode == 2, outcome.stdout + outcome.stderr
    lines = [line for line in outcome.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, outcome.stderr
    assert lines[0].startswith("s2o-calibrate: ")
    assert message in lines[0]
    assert sorted(tmp_path.iterdir()) == before
