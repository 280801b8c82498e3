"""s2o-eval as a user meets it: an exit code, one sentence for bad input, a folder of results."""

import json
from datetime import datetime, timedelta, timezone

import pytest

from calibrate.commands.evaluate import main
from calibrate.machine import MARK
from support.pages import ROOT
from support.processes import called, refusal

SLOW = pytest.mark.slow(reason="shares a whole evaluation")

COARSE = "tau=1000,segment=64"


def run(*arguments, cwd):
    return called(main, *arguments, cwd=cwd)


@SLOW
def test_a_run_leaves_results_summary_and_report(tiny_folder, tmp_path):
    """With prompts of the user's beside the built-in ones."""
    mine = ({"prompt": prompt, "answer": answer} for prompt, answer in (("2 + 2 = ", "4"), ("x" * 200, "yes")))
    (tmp_path / "mine.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in mine))
    flags = f"--lengths 640,512 --setting {COARSE} --prompts mine.jsonl --num-prompts 1 --repeats 1 --num-needles 2"
    flags += " --device cpu --out-dir out --json"
    outcome = run("--model", tiny_folder, *flags.split(), cwd=tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    printed = json.loads(outcome.stdout)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["report.md", "results.sqlite", "summary.json"]
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == {"origin": MARK} | printed
    assert abs(datetime.fromisoformat(printed["date"]) - datetime.now(timezone.utc)) < timedelta(hours=1)
    assert printed["plan"]["lengths"] == [512, 640]
    assert printed["plan"]["tasks"] == ["needles", "questions", "agreement", "time", "prompts"]
    mine = [row for row in printed["answers"] if row["task"] == "prompts"]
    assert [(row["variant"], row["prompts"], row["length"]) for row in mine] == [("dense", 2, 203), (COARSE, 2, 203)]
    page = (tmp_path / "out" / "report.md").read_text()
    for piece in ("# Evaluation of", "\ns2o-eval --model", "| questions | 640 |", "| worst eighth |"):
        assert piece in page, piece
    assert "evaluating" in outcome.stderr


@pytest.mark.usefixtures("offline")
def test_a_dry_run_prints_the_plan_writes_nothing_and_needs_no_hub(tmp_path):
    """Sizes of an alias ship; a run of it needs its weights."""
    flags = f"--setting {COARSE} --device cpu --out-dir out --model".split()
    outcome = run(*flags, "demo", "--dry-run", "--json", cwd=tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    plan = json.loads(outcome.stdout)
    assert (plan["lengths"], plan["variants"]) == ([1024, 2048], ["dense", COARSE])
    assert plan["prompts"] == f"{2 * (3 * 4 + 1)} for each of 2 variants"
    assert "needles; questions; agreement" in run(*flags, "demo", "--dry-run", cwd=tmp_path).stdout
    outcome = run(*flags, "qwen2.5-7b", "--dry-run", "--json", cwd=tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    plan = json.loads(outcome.stdout)
    assert (plan["model"], plan["architecture"][:16]) == ("qwen2.5-7b = Qwen/Qwen2.5-7B-Instruct", "qwen2, 28 layers")
    assert list(tmp_path.iterdir()) == []
    assert run(*flags, "qwen2.5-7b", cwd=tmp_path).returncode == 4


@pytest.mark.parametrize("dry", ["--dry-run", ""])
def test_a_profile_of_other_sizes_is_refused_before_anything_is_measured(dry, tmp_path):
    profile = next((ROOT / "profiles").glob("smollm2*/*/*.safetensors"))
    flags = f"--model demo --device cpu --out-dir out {dry} --profile"
    assert f"{profile} is not of demo, which has " in refusal(run(*flags.split(), profile, cwd=tmp_path), "s2o-eval")
    assert list(tmp_path.iterdir()) == []


BAD_INPUT = [
    ("--model", "demoo", "model 'demoo' is not known: did you mean demo"),
    ("--tasks", "prompts", "the task 'prompts' and --prompts FILE.jsonl belong together"),
    ("--lengths", "262144", "length 262144 is beyond the model's limit of 131072: use a shorter one"),
    ("--profile", "none.safetensors", "profile none.safetensors is not a file: check the path"),
    ("--profile", "bad.jsonl", "bad.jsonl"),
    ("--setting", COARSE.replace("1000", "1e3"), "tau=1000,segment=64 is given twice"),
    ("--prompts", "none.jsonl", "prompt file none.jsonl does not exist: check the path"),
    ("--prompts", "bad.jsonl", 'bad.jsonl:2: expected an object with "prompt" (or chat "messages") and "answer"'),
    ("--out-dir", "bad.jsonl", "--out-dir bad.jsonl is a file: give a folder"),
    ("--out-dir", ".", "--out-dir report.md exists and was not written by S2O, so it is not replaced"),
    ("--out-dir", "/proc/eval", "--out-dir /proc/eval/report.md cannot be written"),
    ("--out-dir", "", "--out-dir is missing: give a folder"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD_INPUT, ids=lambda value: value[:20])
def test_bad_input_is_one_sentence_and_exit_code_2(name, value, message, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a"}\n')
    (tmp_path / "report.md").write_text("# My notes\n")
    before = sorted(tmp_path.iterdir())
    flags = {"--model": "demo", "--lengths": "512", "--num-needles": "4", "--out-dir": "out", "--device": "cpu"}
    given = [part for flag in (flags | {name: value}).items() if flag[1] for part in flag]
    assert message in refusal(run("--setting", COARSE, *given, "--quiet", cwd=tmp_path), "s2o-eval")
    assert sorted(tmp_path.iterdir()) == before
