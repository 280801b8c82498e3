"""s2o-eval as a user meets it: a process with an exit code, one sentence for bad input, a folder of results."""

import json
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from datetime import datetime, timedelta, timezone

import pytest
import torch

from calibrate.commands.evaluate import main
from calibrate.model.models import load
from support.processes import ROOT, called, command, environment
from support.tiny import save_tiny

SLOW = pytest.mark.slow(reason="shares a whole evaluation")

SMALL = ["--num-depths", 2, "--num-prompts", 1, "--repeats", 1, "--num-needles", 2, "--device", "cpu"]
TASKS = ["--tasks", "needles,multi,perplexity,agreement,time"]
COARSE = "tau=1000,segment=64"


def start(*arguments, cwd):
    return subprocess.Popen(
        command("calibrate.commands.evaluate", *arguments),
        cwd=cwd, env=environment(cwd), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def run(*arguments, cwd):
    return called(main, *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def evaluated(tiny, tmp_path_factory):
    """One whole evaluation with prompts of the user's."""
    folder = tmp_path_factory.mktemp("evaluated")
    records = [{"prompt": "2 + 2 = ", "answer": "4"}, {"prompt": "x" * 200, "answer": "yes"}]
    (folder / "mine.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    arguments = [
        "--model",
        tiny,
        "--lengths",
        "512,400",
        "--setting",
        COARSE,
        "--prompts",
        "mine.jsonl",
        *TASKS,
        *SMALL,
    ]
    return folder, arguments, run(*arguments, "--out-dir", "out", "--json", cwd=folder)


@SLOW
def test_a_run_leaves_results_summary_report_and_pictures(evaluated):
    folder, _, outcome = evaluated
    assert outcome.returncode == 0, outcome.stderr
    found = json.loads(outcome.stdout)
    names = ["agreement.png", "needles.png", "perplexity.png", "report.md", "results.sqlite"]
    names += ["results.sqlite.lock", "summary.json", "time.png"]
    assert sorted(path.name for path in (folder / "out").iterdir()) == names
    assert json.loads((folder / "out" / "summary.json").read_text()) == found
    assert abs(datetime.fromisoformat(found["date"]) - datetime.now(timezone.utc)) < timedelta(hours=1)
    assert found["plan"]["lengths"] == [400, 512]
    assert found["plan"]["tasks"] == ["needles", "multi", "perplexity", "agreement", "time", "prompts"]
    card = (folder / "out" / "report.md").read_text()
    for piece in ("# Evaluation of", "\ns2o-eval --model", "| many needles | 512 |", "](needles.png)", "dense cannot"):
        assert piece in card
    assert "evaluating" in outcome.stderr


@SLOW
def test_the_users_prompts_are_scored_as_by_hand(evaluated, tiny):
    _, _, outcome = evaluated
    row = next(row for row in json.loads(outcome.stdout)["retrieval"] if row["task"] == "prompts")
    loaded = load(str(tiny), "cpu", resident=True)
    correct, likelihood = [], []
    for before, answer in (("2 + 2 = ", "4"), ("x" * 200, "yes")):
        ids = torch.tensor(loaded.tokenizer(before + answer, add_special_tokens=False).input_ids)
        with torch.no_grad():
            log_probs = loaded.model(ids[None], use_cache=False).logits[0].double().log_softmax(-1)
        places = range(len(ids) - len(answer), len(ids))
        correct.append(all(log_probs[place - 1].argmax() == ids[place] for place in places))
        likelihood.append(sum(float(log_probs[place - 1, ids[place]]) for place in places))
    assert (row["variant"], row["asked"], row["found"]) == ("dense", 2, sum(correct))
    assert (row["shortest"], row["length"]) == (9, 203)
    assert row["log_likelihood"] == pytest.approx(sum(likelihood) / 2, rel=1e-5)


@SLOW
def test_a_killed_run_continues_with_the_same_command(evaluated):
    folder, arguments, whole = evaluated
    process = start(*arguments, "--out-dir", "killed", "--quiet", "--json", cwd=folder)
    results = folder / "killed" / "results.sqlite"
    wait_for(lambda: entries(results) > 2, process)
    process.kill()
    process.communicate()
    assert not (folder / "killed" / "summary.json").exists()
    outcome = run(*arguments, "--out-dir", "killed", "--quiet", "--json", cwd=folder)
    assert outcome.returncode == 0, outcome.stderr
    first, second = (json.loads(each.stdout) for each in (whole, outcome))
    for found in (first, second):
        del found["time"], found["date"], found["command"], found["plan"]["out"]
    assert json.dumps(first) == json.dumps(second)


@SLOW
def test_an_interrupted_run_says_that_it_can_be_continued(evaluated):
    folder, arguments, _ = evaluated
    process = start(*arguments, "--out-dir", "interrupted", "--quiet", cwd=folder)
    results = folder / "interrupted" / "results.sqlite"
    wait_for(lambda: entries(results) > 0, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert errors == "s2o-eval: interrupted; run the same command to continue: what was measured is kept\n"
    assert process.returncode == 130


def entries(path):
    """How many results a journal holds, also while it is written."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=rw", uri=True, timeout=60)) as database:
            return database.execute("SELECT count(*) FROM entries").fetchone()[0]
    except sqlite3.OperationalError:  # it is not there yet, or has no tables
        return 0


def wait_for(condition, process):
    while not condition():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)


@SLOW
def test_changed_inputs_are_named(evaluated):
    folder, arguments, _ = evaluated
    outcome = run(*arguments, "--out-dir", "out", "--seed", 5, cwd=folder)
    assert outcome.returncode == 2
    said = "s2o-eval: journal out/results.sqlite was made with seed 0, this run has 5: give another --out-dir"
    assert said in outcome.stderr
    other = folder / "other.jsonl"
    other.write_text('{"prompt": "a", "answer": "b"}\n')
    changed = ["other.jsonl" if each == "mine.jsonl" else each for each in arguments]
    outcome = run(*changed, "--out-dir", "out", cwd=folder)
    assert outcome.returncode == 2
    assert "journal out/results.sqlite was made with prompts " in outcome.stderr


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path):
    arguments = ["--model", "demo", "--setting", COARSE, "--device", "cpu", "--out-dir", "out", "--dry-run"]
    outcome = run(*arguments, "--json", cwd=tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    plan = json.loads(outcome.stdout)
    assert plan["lengths"] == [1024, 2048]
    assert plan["variants"] == ["dense", COARSE]
    assert plan["depths"] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert plan["prompts"] == f"{2 * (5 * 4 + 4 + 4 + 4 + 1)} for each of 2 variants"
    assert "tasks             needles; multi; variables" in run(*arguments, cwd=tmp_path).stdout
    assert list(tmp_path.iterdir()) == []


def bad_inputs():
    yield ["--model", "demoo"], "model 'demoo' is not known: did you mean demo"
    yield (
        ["--tasks", "needles,haystacks"],
        "tasks is ('needles', 'haystacks'): expected a list, each one of",
    )
    yield ["--tasks", ","], "tasks is empty: expected a list, each one of needles"
    yield ["--tasks", "prompts"], "the task 'prompts' and --prompts FILE.jsonl belong together"
    yield ["--lengths", "64"], "length 64 is too short for the task 'needles': use "
    yield (
        ["--lengths", "20"],
        "lengths is (20,): expected an ascending list, each a whole number of tokens",
    )
    yield ["--lengths", "262144"], "length 262144 is beyond the model's limit of 131072: use a shorter one"
    yield (
        ["--lengths", "8k"],
        "'8k': expected an ascending list, each a whole number of tokens",
    )
    yield ["--num-needles", "1000"], "num_needles is 1000: expected a whole number from 1 to "
    yield ["--num-prompts", "0"], "num_prompts is 0: expected a whole number of at least 1, such as 4"
    yield ["--profile", "none.safetensors"], "profile none.safetensors is not a file: check the path"
    yield ["--profile", "bad.jsonl"], "bad.jsonl"
    yield ["--setting", "tau"], "setting 'tau' has 'tau', expected tau=.."
    yield ["--setting", COARSE.replace("1000", "1e3")], "tau=1000,segment=64 is given twice"
    yield ["--prompts", "none.jsonl"], "prompt file none.jsonl does not exist: check the path"
    yield ["--prompts", "bad.jsonl"], 'bad.jsonl:2: expected an object with "prompt" (or chat "messages") and "answer"'
    yield ["--prompts", "broken.jsonl"], "broken.jsonl:1: "
    yield ["--prompts", "empty.jsonl"], "prompt file empty.jsonl holds no prompts: expected an object with"
    yield ["--out-dir", "bad.jsonl"], "--out-dir bad.jsonl is a file: give a folder"
    yield ["--out-dir", "/proc/eval"], "--out-dir /proc/eval/report.md cannot be written"
    yield ["--device", "tpu"], "device 'tpu' is not known: use cuda, cuda:N or cpu"
    yield ["--seed", "-1"], "seed is -1: expected a whole number of at least 0"


@pytest.mark.parametrize(("arguments", "message"), list(bad_inputs()), ids=lambda value: " ".join(value)[:40])
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, message, tmp_path, monkeypatch, capsys):
    """In this process: torch takes longer to load than all of them together."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a"}\n')
    (tmp_path / "broken.jsonl").write_text('{"prompt": \n')
    (tmp_path / "empty.jsonl").write_text("\n")
    before = sorted(tmp_path.iterdir())
    flags = {"--model": "demo", "--lengths": "512", "--out-dir": "out", "--device": "cpu"} | dict([arguments])
    try:
        code = main(["--setting", COARSE, *(part for flag in flags.items() for part in flag), "--quiet"])
    except SystemExit as left:
        code = left.code
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith("s2o-eval: ")
    assert message in lines[0]
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model is missing: give an alias such as demo"),
        (["--model", "demo"], "--out-dir is missing: give a folder"),
        (["--model", "demo", "--out-dir", "out", "--tasks", "none"], "tasks is ('none',): expected a list"),
    ],
    ids=["model", "out", "task"],
)
def test_flags_are_refused_before_torch_is_loaded(arguments, message, tmp_path):
    program = (
        "import sys; from calibrate.commands.evaluate import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    )
    outcome = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert outcome.stdout == "2 False\n"
    assert outcome.stderr.startswith(f"s2o-eval: {message}")
