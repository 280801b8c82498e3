"""s2o-calibrate as a user meets it: a process with an exit code, one sentence for bad input, a profile at the end."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_hf import SIZES
from tiny import save_tiny
from transformers import AutoModelForCausalLM, MistralConfig

from s2o_runtime import load_profile

ROOT = Path(__file__).parent.parent
PROFILE = str(ROOT / "README.md")  # any file: flags are judged before it is read
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
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """One real calibration of the demo model, the result printed as JSON."""
    folder = tmp_path_factory.mktemp("calibrated")
    arguments = ["--model", "demo", "--budget-mse", "2e-4", "--lengths", "512", "--segments", "128,256"]
    arguments += ["--num-prompts", 2, "--held-out", 1, "--trials", 3, "--device", "cpu", "--quiet", "--json"]
    return folder, run(*arguments, "--out", "a/first.safetensors", cwd=folder)


def test_a_calibration_writes_a_profile_that_meets_the_budget(calibrated):
    folder, outcome = calibrated
    assert outcome.returncode == 0, outcome.stderr
    result = json.loads(outcome.stdout)
    assert (result["met"], result["problems"], result["out"]) == (True, [], "a/first.safetensors")
    (length,) = result["lengths"]
    rows = length["layers"]
    assert any(row["dense_heads"] < 8 for row in rows)
    assert all(sum(row["representatives"].values()) == 8 - row["dense_heads"] >= row["tails"] for row in rows)
    profile = load_profile(folder / "a" / "first.safetensors")
    (recorded,) = profile.record["held_out"]
    for row, proof in zip(rows, recorded["layers"], strict=True):
        assert 0 < row["held_out_mse"] <= row["limit"] == 2e-4
        assert row["held_out_mse"] == proof["mse"]
        assert 0.2 < row["density"] <= 1.0
    found, of = length["needles"]
    assert found == of == 1
    assert profile.record["recipe"]["representatives"] == [1, 32]
    assert profile.record["recipe"]["grains"] == [4]
    assert result["phases"].keys() == {"measuring", "searching", "proving"}
    written = {path.name for path in (folder / "a").iterdir()}
    assert {"first.safetensors", "demo.journal.jsonl", "first.report.json", "first.report.md"} <= written
    assert json.loads((folder / "a" / "first.report.json").read_text()) == result


def test_what_is_said_is_in_the_right_stream(calibrated):
    """The result alone on stdout, the plan and where the files are on stderr."""
    _, outcome = calibrated
    json.loads(outcome.stdout)
    assert "budget              mse 0.0002\n" in outcome.stderr
    assert "wrote a/first.safetensors in " in outcome.stderr
    assert "wrote the report a/first.report." in outcome.stderr


# a calibration whose patched model finds none of the needles, whatever is tried
LOST = """
import sys
from dataclasses import replace
import calibrate.pipeline as pipeline
from calibrate.cli import main
real, attempts = pipeline.prove, []
def prove(*arguments):
    attempts.append(1)
    return {length: replace(proof, needles=(0, 3)) for length, proof in real(*arguments).items()}
pipeline.prove = prove
code = main(sys.argv[1:])
print(len(attempts), "attempts", file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize("allow", [False, True])
def test_a_proof_that_fails_writes_nothing_unless_that_is_allowed(allow, tiny, tmp_path):
    arguments = ["--model", tiny, "--lengths", 512, "--budget-rel-mse", "1e-2", "--segments", "64,128", "--trials", 1]
    arguments += ["--num-prompts", 1, "--held-out", 1, "--device", "cpu", "--quiet", "--out", "no.safetensors"]
    outcome = subprocess.run(
        [sys.executable, "-c", LOST, *map(str, arguments), *["--allow-regression"] * allow],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lost = "at 512 tokens the patched model finds 0 of the 3 needles that dense finds, 95% are asked for"
    assert outcome.returncode == (0 if allow else 3), outcome.stderr
    assert outcome.stderr.endswith("3 attempts\n")
    assert (tmp_path / "no.safetensors").exists() == allow
    if allow:
        record = load_profile(tmp_path / "no.safetensors").record
        assert (record["proof"], record["problems"]) == ("failed", [lost])
    else:
        assert f"s2o-calibrate: the proof failed, so no profile was written ({lost}): allow more" in outcome.stderr
        report = json.loads((tmp_path / "no.report.json").read_text())
        assert (report["out"], report["met"], report["problems"]) == (None, False, [lost])


def test_dry_run_prints_the_plan_and_stops(tmp_path):
    outcome = run(*GOOD, "--dry-run", "--json", cwd=tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    plan = json.loads(outcome.stdout)
    assert plan["lengths"] == "512"
    assert plan["device"] == "cpu"
    assert plan["budget"] == "mse 0.0001"
    assert plan["out"] == "profiles/demo/cpu/mse-0.0001.safetensors (default)"
    assert plan["journal"] == "profiles/demo/cpu/demo.journal.jsonl (default)"
    assert (plan["representatives"], plan["grains"]) == ("1, 32 (default)", "4 (default)")
    assert plan["prompts per length"] == "4 (default) to calibrate, 2 (default) held out"
    text = run(*GOOD, "--dry-run", "--representatives", "8,1", "--held-out", 1, cwd=tmp_path).stdout
    assert "representatives     1, 8\n" in text
    assert "4 (default) to calibrate, 1 held out\n" in text
    assert "8 query heads, 2 KV heads, head dim 128\n" in text
    assert list(tmp_path.iterdir()) == []


def test_flags_override_the_recipe_file_which_overrides_the_defaults(tmp_path):
    written = "model: demo\nbudget_mse: 1e-4\nlengths: [512, 1024]\ndevice: cpu\ntime_limit: 5m\ntails: [off]\n"
    (tmp_path / "mine.yaml").write_text(f"{written}worst_rows: null\nrandom_weights: true\nseed: 7\n")
    flags = ["--budget-rel-mse", "0.01", "--lengths", "1024", "--no-random-weights", "--check-lengths", "none"]
    outcome = run("--recipe", "mine.yaml", *flags, "--trials", 2, "--dry-run", "--json", cwd=tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    plan = json.loads(outcome.stdout)
    names = ("model", "budget", "lengths", "check lengths", "time limit", "tails", "worst rows", "weights", "seed")
    expected = ("demo", "rel_mse 0.01", "1024", "none", "300 s", "off", "off", "the model's", "7")
    assert tuple(plan[name] for name in names) == expected
    assert plan["trials"] == "2 for each of 6 layers and 1 lengths"
    assert plan["margin"] == "80% of the budget is spent (default)"


def test_the_help_states_the_defaults_of_the_recipe():
    from calibrate.cli import parser
    from calibrate.recipe import OPTIONS

    flags = {action.dest: action for action in parser()._actions}
    assert set(OPTIONS) < set(flags)
    assert flags["trials"].help == "Optuna trials for each layer and length (default 16)"
    assert "(default 256,512,1024,2048)" in flags["segments"].help
    assert vars(parser().parse_args([])) == {}


# main() with a part of the program replaced: what takes its place, then the arguments
REPLACED = """
import errno, os, sys, time, types
from calibrate.cli import main

def full(recipe, progress):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

def hangs(recipe, progress):
    recipe.journal_path.parent.mkdir(parents=True)
    recipe.journal_path.touch()
    waits(recipe, progress)

def waits(recipe, progress):
    print("ready", flush=True)
    time.sleep(60)

def mode(*arguments):
    print("called with", [str(each) for each in arguments], flush=True)

if sys.argv[1] == "mode":
    for name in ("rebudget", "retile"):
        sys.modules[f"calibrate.{name}"] = types.SimpleNamespace(**{name: mode})
else:
    import calibrate.pipeline
    calibrate.pipeline.calibrate = globals()[sys.argv[1]]
sys.exit(main(sys.argv[2:]))
"""


def start(what, *arguments, cwd):
    return subprocess.Popen(
        [sys.executable, "-c", REPLACED, what, *map(str, arguments)],
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


KEPT = "run the same command to continue: everything measured so far is kept in profiles/demo/cpu/demo.journal.jsonl"


@pytest.mark.parametrize(
    ("what", "number", "said"), [("hangs", signal.SIGTERM, KEPT), ("waits", signal.SIGINT, "nothing was written")]
)
def test_an_interrupted_run_says_what_is_kept(what, number, said, tmp_path):
    process = start(what, *GOOD, "--quiet", cwd=tmp_path)
    assert any(line == "ready\n" for line in process.stdout)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert errors == f"s2o-calibrate: interrupted; {said}\n"
    assert process.returncode == 130


def test_a_full_disk_is_one_sentence(tmp_path):
    process = start("full", *GOOD, "--out", "p.safetensors", cwd=tmp_path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    said = "p.safetensors cannot be written (No space left on device): free some space and run the same command again"
    assert errors == f"s2o-calibrate: {said}; what was measured so far is kept\n"


def test_a_bug_is_not_taken_for_a_full_disk():
    from calibrate.cli import _writing

    with pytest.raises(FileNotFoundError, match="a bug"), _writing(Path("p.safetensors")):
        raise FileNotFoundError("a bug")


@pytest.mark.parametrize(
    ("arguments", "called", "out"),
    [
        (
            ["--rebudget", "a/p.x", "--budget-mse", "1e-3"],
            "'mse-0.001', 'OUT', 'None', 'None'",
            "a/mse-0.001.safetensors",
        ),
        (
            ["--rebudget", "a/p.x", "--budget-rel-mse", "0.5", "--worst-rows", "0.8"],
            "'rel-mse-0.5', 'OUT', 'None', '0.8'",
            "a/rel-mse-0.5-rows-0.8.safetensors",
        ),
        (
            ["--rebudget", "a/p.x", "--budget-mse", "0.5", "--worst-rows", "0", "--journal", "j", "--out", "b/q"],
            "'mse-0.5', 'OUT', 'j', '0.0'",
            "b/q",
        ),
        (["--retile", "a/p.x"], "'cpu', 'OUT'", "a/p-cpu.safetensors"),
        (["--retile", "a/p.x", "--device", "cpu", "--out", "q"], "'cpu', 'OUT'", "q"),
    ],
)
def test_modes_that_change_a_profile(arguments, called, out, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "p.x").touch()
    output, errors = start("mode", *arguments, cwd=tmp_path).communicate(timeout=60)
    assert output == f"called with ['a/p.x', {called.replace('OUT', out)}]\nwrote {out}\n", errors


def bad_inputs():
    yield ["--model", "qwen2.5-7bb"], "model 'qwen2.5-7bb' is not known: did you mean qwen2.5-7b"
    yield ["--model", "zzz"], "A local folder or a hub id (org/name) works too"
    yield ["--model", "."], "folder . holds no config.json"
    yield ["--model", "some/thing"], "model 'some/thing' cannot be loaded from some/thing"
    yield ["--model", "MISTRAL"], "has layers of sliding_attention, expected full_attention"
    yield ["--prompts", "none.jsonl"], "prompt file none.jsonl does not exist"
    yield ["--prompts", "bad.jsonl"], "bad.jsonl:2: "
    yield ["--prompts", "short.jsonl"], "0 prompts to calibrate on of 512 tokens or more"
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
    yield ["--journal", "."], "--journal . is a folder"
    yield ["--journal", "bad.jsonl/j"], "--journal bad.jsonl/j cannot be written"
    yield ["--recipe", "none.yaml"], "recipe none.yaml cannot be read (No such file or directory): check the path"
    yield ["--recipe", "bad.jsonl"], "recipe bad.jsonl is not YAML"
    yield ["--budget-scope", "head"], "budget_scope 'head' is not known: use layer or model"
    yield ["--check-lengths", "512"], "check length 512 is calibrated"
    yield ["--check-lengths", "262144"], "length 262144 is beyond the model's limit of 131072"
    yield ["--check-lengths", "most"], "'most' is not a list of lengths: try 16384, or none"
    yield ["--time-limit", "soon"], "'soon' is not a duration: try 90, 5m or 1h"
    yield ["--time-limit", "0m"], "time_limit is 0.0: use a number of seconds above 0"
    yield ["--worst-rows", "-1"], "worst_rows is -1.0: use a number above 0, or 0 for off"
    yield ["--segments", "100,256"], "segments 100 is not supported: use multiples of 64"
    yield ["--segments", "1024"], "length 512 is shorter than one segment of 1024"
    yield ["--tails", "maybe"], "'maybe' is not on, off or both: try on,off"
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model is missing: give an alias such as demo"),
        (["--budget-mse", "1", "--budget-rel-mse", "1"], "not allowed with argument --budget-mse"),
        (["--rebudget", "p", "--retile", "p"], "not allowed with argument --rebudget"),
        (["--rebudget", PROFILE], "--rebudget needs the new budget: give --budget-mse or --budget-rel-mse"),
        (["--rebudget", ".", "--budget-mse", "1"], "--rebudget . is not a file: check the path"),
        (["--retile", "none"], "--retile none is not a file: check the path"),
        (
            ["--rebudget", "p", "--budget-mse", "1", "--model", "demo"],
            "--rebudget takes only --budget-mse, --budget-rel-mse, --worst-rows, --journal, --out: leave --model out",
        ),
        (["--retile", "p", "--recipe", "r.yaml"], "--retile takes only --device, --out: leave --recipe out"),
        (["--retile", "p", "--dry-run"], "leave --dry-run out"),
        (["--retile", "p", "--no-random-weights"], "leave --random-weights out"),
        (["--retile", PROFILE, "--device", "tpu"], "device 'tpu' is not known"),
        (["--retile", PROFILE, "--device", "cpu", "--out", "."], "--out . is a folder"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_flags_that_do_not_fit_each_other(arguments, message, tmp_path):
    outcome = run(*arguments, cwd=tmp_path)
    assert outcome.returncode == 2, outcome.stderr
    assert outcome.stderr.startswith("s2o-calibrate: ")
    assert outcome.stderr.count("\n") == 1
    assert message in outcome.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lengths", [[], ["--lengths", "8192"]])
def test_flags_are_refused_before_torch_is_loaded(lengths, tmp_path):
    program = "import sys; from calibrate.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    outcome = subprocess.run(
        [sys.executable, "-c", program, "--model", "demo", *lengths, "--trials", "0"],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert outcome.stdout == "2 False\n"
    assert outcome.stderr == "s2o-calibrate: trials is 0: use at least 1\n"


def test_device_dependent_lengths_are_not_guessed_before_the_device_is_known(tmp_path):
    """Segments and check lengths that fit no CPU default may fit a GPU's, and the other way round."""
    arguments = ["--model", "demo", "--device", "cpu", "--dry-run", "--json", "--check-lengths", "8192"]
    plan = json.loads(run(*arguments, cwd=tmp_path).stdout)
    assert (plan["lengths"], plan["check lengths"]) == ("1024, 2048 (default)", "8192")
