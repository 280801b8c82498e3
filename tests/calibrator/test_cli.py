"""s2o-calibrate as a user meets it: a process with an exit code, one sentence for bad input, a profile at the end."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config

from calibrate import pipeline
from calibrate.commands.calibrate import main
from calibrate.proof.tighten import RETRIES, prove_and_tighten
from calibrate.proof.verify import prove
from s2o_runtime import load_profile
from support.models import SIZES
from support.processes import ROOT, environment
from support.processes import command as process_of
from support.tiny import save_tiny

PROFILE = str(ROOT / "README.md")  # any file: flags are judged before it is read
GOOD = ["--model", "demo", "--budget-mse", "1e-4", "--lengths", "512", "--device", "cpu"]


def run(*arguments, cwd):
    return subprocess.run(
        process_of("calibrate.commands.calibrate", *arguments),
        cwd=cwd, env=environment(cwd), capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """The command in this process, in an empty folder: starting one of its own takes seconds."""
    monkeypatch.chdir(tmp_path)
    terminate = signal.getsignal(signal.SIGTERM)

    def run(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as left:
            code = left.code
        output = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=output.out, stderr=output.err)

    yield run
    signal.signal(signal.SIGTERM, terminate)


WHOLE_RUN = pytest.mark.slow(reason="runs a calibration, or the command in a process of its own")


@pytest.fixture(scope="module")
def unfit(tmp_path_factory):
    """Folders of models that cannot be calibrated, by the words that stand for them below."""
    plain = LlamaConfig(**SIZES).to_dict()
    configs = {
        "WINDOWS": MistralConfig(**SIZES, sliding_window=64).to_dict(),
        "CODE": {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}},
        "WIDE": LlamaConfig(**SIZES | {"head_dim": 288}).to_dict(),
        "SPEECHLESS": plain,
        "WORDLESS": Qwen2Config(**SIZES).to_dict(),
        "SPELLING": plain,
    }
    folders = {}
    for word, config in configs.items():
        folders[word] = tmp_path_factory.mktemp(word.lower())
        (folders[word] / "config.json").write_text(json.dumps(config))
    (folders["CODE"] / "configuration_own.py").write_text("raise SystemExit('code of the model ran')")
    own_tokenizer = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    (folders["SPELLING"] / "tokenizer_config.json").write_text(json.dumps(own_tokenizer))
    (folders["SPELLING"] / "tokenization_own.py").write_text("raise SystemExit('code of the tokenizer ran')")
    return folders


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """One real calibration of the demo model, the result printed as JSON."""
    folder = tmp_path_factory.mktemp("calibrated")
    arguments = ["--model", "demo", "--budget-mse", "2e-4", "--lengths", "512", "--segments", "128,256"]
    arguments += ["--num-prompts", 2, "--num-held-out", 1, "--num-certify", 0]
    arguments += ["--trials", 3, "--device", "cpu", "--quiet", "--json"]
    return folder, run(*arguments, "--out", "a/first.safetensors", cwd=folder)


@WHOLE_RUN
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
    (recorded,) = profile.record.held_out
    for row, proof in zip(rows, recorded.layers, strict=True):
        assert row["held_out_mse"] <= row["limit"] == 2e-4
        assert (row["held_out_mse"] > 0) == (row["density"] < 1)  # the error is against dense attention
        assert row["held_out_mse"] == proof.mse
        assert 0.2 < row["density"] <= 1.0
    found, of = length["needles"]
    assert found == of == 1
    assert profile.record.recipe["representatives"] == [1, 32]
    assert profile.record.recipe["grains"] == [4]
    assert list(result["phases"])[-3:] == ["measuring", "searching", "proving"]
    written = {path.name for path in (folder / "a").iterdir()}
    assert {"first.safetensors", "demo.journal.sqlite", "first.report.json", "first.report.md"} <= written
    assert json.loads((folder / "a" / "first.report.json").read_text()) == result


@WHOLE_RUN
def test_what_is_said_is_in_the_right_stream(calibrated):
    """The result alone on stdout, the plan and where the files are on stderr."""
    _, outcome = calibrated
    json.loads(outcome.stdout)
    assert "budget              mse 0.0002\n" in outcome.stderr
    assert "wrote a/first.safetensors in " in outcome.stderr
    assert "wrote the report a/first.report." in outcome.stderr


@WHOLE_RUN
@pytest.mark.parametrize("allow", [False, True])
def test_a_proof_that_fails_writes_nothing_unless_that_is_allowed(allow, tiny, command, tmp_path, monkeypatch):
    """The patched model finds none of the needles, whatever is tried."""
    attempts = []

    def loses(*arguments, **named):
        attempts.append(1)
        candidate, proofs = prove(*arguments, **named)
        return candidate, {length: replace(proof, needles=(0, 3)) for length, proof in proofs.items()}

    monkeypatch.setattr(pipeline, "prove_and_tighten", partial(prove_and_tighten, prove=loses))
    arguments = ["--model", tiny, "--lengths", 512, "--budget-rel-mse", "1e-2", "--segments", "64,128", "--trials", 1]
    arguments += ["--num-prompts", 1, "--num-held-out", 1, "--num-certify", 0]
    arguments += ["--device", "cpu", "--quiet", "--out", "no.safetensors"]
    outcome = command(*arguments, *["--allow-regression"] * allow)
    lost = "at 512 tokens the patched model keeps 0 of the 3 needles that dense finds, 95% are asked for"
    assert outcome.returncode == (0 if allow else 3), outcome.stderr
    assert len(attempts) == 1 + RETRIES
    assert (tmp_path / "no.safetensors").exists() == allow
    if allow:
        record = load_profile(tmp_path / "no.safetensors").record
        assert (record.proof, record.problems) == ("failed", (lost,))
    else:
        assert f"s2o-calibrate: the proof failed, so no profile was written ({lost}): allow less" in outcome.stderr
        report = json.loads((tmp_path / "no.report.json").read_text())
        assert (report["out"], report["met"], report["problems"]) == (None, False, [lost])


def test_dry_run_prints_the_plan_and_stops(command, tmp_path):
    outcome = command(*GOOD, "--dry-run", "--json")
    assert outcome.returncode == 0, outcome.stderr
    plan = json.loads(outcome.stdout)
    assert plan["lengths"] == "512"
    assert plan["device"] == "cpu"
    assert plan["budget"] == "mse 0.0001"
    assert plan["out"] == "profiles/demo/cpu/mse-0.0001.safetensors (default)"
    assert plan["journal"] == "profiles/demo/cpu/demo.journal.sqlite (default)"
    assert (plan["representatives"], plan["grains"]) == ("1, 32 (default)", "4 (default)")
    assert plan["num prompts"] == "4 of each length (default)"
    text = command(*GOOD, "--dry-run", "--representatives", "8,1", "--num-held-out", 1).stdout
    assert "representatives     1, 8\n" in text
    assert "num held out        1 of each length\n" in text
    assert "8 query heads, 2 KV heads, head dim 128\n" in text
    assert list(tmp_path.iterdir()) == []


def test_flags_override_the_recipe_file_which_overrides_the_defaults(command, tmp_path):
    written = "model: demo\nbudget_mse: 1e-4\nlengths: [512, 1024]\ndevice: cpu\ntime_limit: 5m\ntails: [off]\n"
    (tmp_path / "mine.yaml").write_text(f"{written}worst_rows: null\nrandom_weights: true\nseed: 7\n")
    flags = ["--budget-rel-mse", "0.01", "--lengths", "1024", "--no-random-weights", "--check-lengths", "none"]
    outcome = command("--recipe", "mine.yaml", *flags, "--trials", 2, "--dry-run", "--json")
    assert outcome.returncode == 0, outcome.stderr
    plan = json.loads(outcome.stdout)
    names = ("model", "budget", "lengths", "check lengths", "time limit", "tails", "worst rows", "weights", "seed")
    expected = ("demo", "rel_mse 0.01", "1024", "none", "300 s", "off", "off", "the model's", "7")
    assert tuple(plan[name] for name in names) == expected
    assert plan["trials"] == "2 for each group of like layers at each length"
    assert plan["margin"] == "80% of the budget is spent (default)"


def test_the_help_states_the_defaults_of_the_recipe():
    from calibrate.commands.calibrate import parser
    from calibrate.recipe import OPTIONS

    flags = {action.dest: action for action in parser()._actions}
    assert set(OPTIONS) < set(flags)
    assert flags["trials"].help == "trials of the search for each group of like layers at each length (default 16)"
    assert "(default 256,512,1024,2048)" in flags["segments"].help
    assert vars(parser().parse_args([])) == {}


def test_a_dry_run_writes_a_recipe_that_runs_the_same(command, tmp_path):
    """Without what the user gave, and with what depends on the machine."""
    given = [*GOOD, "--keep-needles", "0.5", "--tails", "on", "--check-lengths", "none"]
    outcome = command(*given, "--dry-run", "--yaml")
    assert outcome.returncode == 0, outcome.stderr
    assert "keep_needles: 0.5\n" in outcome.stdout
    (tmp_path / "again.yaml").write_text(outcome.stdout)
    again = command("--recipe", "again.yaml", "--dry-run", "--yaml")
    assert again.stdout == outcome.stdout
    plans = [json.loads(command(*arguments, "--dry-run", "--json").stdout)
             for arguments in (given, ["--recipe", "again.yaml"])]  # fmt: skip
    first, second = ({name: line.removesuffix(" (default)") for name, line in plan.items()} for plan in plans)
    assert first == second


@pytest.mark.parametrize("flag", ["--needles=1", "--held-out=3", "--rebudget=p", "--retile=p"])
def test_flags_of_versions_before_02_are_unknown(flag, capsys):
    from calibrate.commands.calibrate import parser

    with pytest.raises(SystemExit):
        parser().parse_args([flag])
    assert f"s2o-calibrate: unrecognized arguments: {flag}: " in capsys.readouterr().err


OVER = "layer 3 at 512 tokens has an error of 2.00e-03, 1.00e-03 is allowed"
LESS = "at 512 tokens the patched model keeps 0 of the 3 needles that dense finds, 95% are asked for"
SLOW = "the prefill of 512 tokens takes 3.0 ms, dense 2.0 ms"


@pytest.mark.parametrize(
    ("problems", "phrases", "never"),
    [
        ([OVER], ["allow more error", "--num-prompts"], "less error"),
        ([LESS], ["allow less error", "--worst-rows", "--keep-needles"], "more error"),
        ([SLOW], ["longer prompts", "dense"], "error"),
        ([OVER, LESS], ["allow less error"], "more error"),
        ([OVER, OVER, SLOW], ["allow more error", "longer prompts"], "less error"),
        (["something else"], ["--num-prompts"], "error"),
    ],
)
def test_what_helps_depends_on_what_failed(problems, phrases, never):
    from calibrate.commands.calibrate import advice

    text = advice(problems)
    assert all(phrase in text for phrase in phrases)
    assert never not in text
    assert text.count("allow more error") <= 1


# main() with a part of the program replaced: what takes its place, then the arguments
REPLACED = """
import errno, os, sys, time
from calibrate.commands.calibrate import main

def full(recipe, progress, loaded):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

def hangs(recipe, progress, loaded):
    recipe.journal_path.parent.mkdir(parents=True)
    recipe.journal_path.touch()
    waits(recipe, progress, loaded)

def waits(recipe, progress, loaded):
    print("ready", flush=True)
    time.sleep(60)

import calibrate.pipeline
calibrate.pipeline.calibrate = globals()[sys.argv[1]]
sys.exit(main(sys.argv[2:]))
"""


def start(what, *arguments, cwd):
    return subprocess.Popen(
        [sys.executable, "-c", REPLACED, what, *map(str, arguments)],
        cwd=cwd,
        env=environment(cwd),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


KEPT = "run the same command to continue: everything measured so far is kept in profiles/demo/cpu/demo.journal.sqlite"


@WHOLE_RUN
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


@WHOLE_RUN
def test_a_full_disk_is_one_sentence(tmp_path):
    process = start("full", *GOOD, "--out", "p.safetensors", cwd=tmp_path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 4
    said = "p.safetensors cannot be written (No space left on device): free some space and run the same command again"
    assert errors == f"s2o-calibrate: {said}; what was measured so far is kept\n"


def test_a_bug_is_not_taken_for_a_full_disk():
    from calibrate.machine import writing

    with pytest.raises(FileNotFoundError, match="a bug"), writing(Path("p.safetensors")):
        raise FileNotFoundError("a bug")


def bad_inputs():
    yield ["--model", "qwen2.5-7bb"], "model 'qwen2.5-7bb' is not known: did you mean qwen2.5-7b"
    yield ["--model", "zzz"], "A local folder or a hub id (org/name) works too"
    yield ["--model", "."], "folder . holds no config.json"
    yield ["--model", "WINDOWS"], "has no layer of full_attention, only 2 of sliding_attention"
    yield ["--model", "CODE"], "code of its own, which is not run: give --trust-remote-code if you have read and trust"
    yield ["--model", "WIDE"], "layer 0 cannot run S2O ("
    yield ["--model", "SPEECHLESS"], "cannot be loaded: its files are missing"
    yield ["--model", "WORDLESS"], "cannot be loaded: its files are missing or hold no words"
    yield ["--model", "SPELLING"], "code of its own, which is not run: give --trust-remote-code if you have read and"
    yield ["--prompts", "none.jsonl"], "prompt file none.jsonl does not exist"
    yield ["--prompts", "bad.jsonl"], "bad.jsonl:2: "
    yield ["--prompts", "short.jsonl"], "0 prompts to calibrate on of 512 tokens or more"
    yield ["--budget-mse", "0"], "budget_mse is 0.0: expected a number above 0, such as 1e-4"
    yield ["--budget-mse", "-1"], "budget_mse is -1.0: expected a number above 0"
    yield ["--budget-mse", "nan"], "budget_mse is nan: expected a number above 0"
    yield ["--budget-mse", "little"], "argument --budget-mse: 'little': expected a number above 0, such as 1e-4"
    yield ["--lengths", "262144"], "length 262144 is beyond the model's limit of 131072"
    yield ["--lengths", "100"], "length 100 is shorter than one segment of 256"
    yield (
        ["--lengths", "8k"],
        "'8k': expected an ascending list, each a whole number of tokens",
    )
    yield (
        ["--representatives", "1,3"],
        "representatives is (1, 3): expected an ascending list, each one of 1, 2, 4, 8, 16",
    )
    yield ["--representatives", "many"], "'many': expected an ascending list, each one of"
    yield ["--grains", "1,16"], "grains is (1, 16): expected an ascending list, each one of 1, 2, 4, 8"
    yield ["--num-prompts", "0"], "num_prompts is 0: expected a whole number of at least 1"
    yield ["--out", "bad.jsonl/p.safetensors"], "--out bad.jsonl/p.safetensors cannot be written"
    yield ["--out", "/proc/p.safetensors"], "--out /proc/p.safetensors cannot be written"
    yield ["--out", "."], "--out . is a folder"
    yield ["--out", "pipe"], "--out pipe is a pipe, a socket or a device, and no regular file: give another file name"
    yield ["--journal", "."], "--journal . is a folder"
    yield ["--journal", "bad.jsonl/j"], "--journal bad.jsonl/j cannot be written"
    yield ["--recipe", "none.yaml"], "recipe none.yaml cannot be read (No such file or directory): check the path"
    yield ["--recipe", "bad.jsonl"], "recipe bad.jsonl is not YAML"
    yield ["--budget-kl", "little"], "argument --budget-kl: 'little': expected a number above 0, such as 5e-3"
    yield ["--budget-scope", "head"], "budget_scope is 'head': expected one of layer, model"
    yield ["--check-lengths", "512"], "check length 512 is calibrated"
    yield ["--check-lengths", "262144"], "length 262144 is beyond the model's limit of 131072"
    yield (
        ["--check-lengths", "most"],
        "'most': expected an ascending list, each a whole number of tokens of at least 1, or none",
    )
    yield ["--prompts", ""], "prompts is empty: expected a list, each a file name"
    yield ["--time-limit", "soon"], "'soon': expected a number of seconds above 0 or none, such as 90, 5m or 1h"
    yield ["--time-limit", "0m"], "time_limit is 0.0: expected a number of seconds above 0"
    yield ["--worst-rows", "-1"], "worst_rows is -1.0: expected a number of at least 0"
    yield ["--segments", "100,256"], "segments is (100, 256): expected an ascending list, each a multiple of 64"
    yield ["--segments", "1024"], "length 512 is shorter than one segment of 1024"
    yield ["--tails", "maybe"], "'maybe': expected an ascending list, each true or false, such as off,on"
    yield ["--device", "tpu"], "device 'tpu' is not known"


@pytest.mark.usefixtures("offline")
def test_a_hub_out_of_reach_is_a_missing_resource(command):
    outcome = command("--model", "some/thing", "--dry-run")
    assert outcome.returncode == 4
    (line,) = outcome.stderr.splitlines()
    assert line.startswith(
        "s2o-calibrate: model 'some/thing' cannot be loaded from some/thing: the Hub cannot be reached"
    )


def test_a_gpu_that_is_not_here_is_a_missing_resource(command):
    outcome = command(*GOOD, "--device", "cuda:99", "--dry-run")
    assert (outcome.returncode, "device 'cuda:99' is not here" in outcome.stderr) == (4, True)


@pytest.mark.parametrize(("arguments", "message"), list(bad_inputs()), ids=lambda value: " ".join(value)[:40])
@pytest.mark.usefixtures("offline")
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, message, unfit, command, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "short.jsonl").write_text('{"text": "a"}\n')
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.iterdir())
    flags = dict(zip(GOOD[::2], GOOD[1::2], strict=True)) | dict([arguments])
    flags = {name: str(unfit.get(value, value)) for name, value in flags.items()}
    outcome = command(*[part for flag in flags.items() for part in flag], "--quiet")
    assert outcome.returncode == 2, outcome.stdout + outcome.stderr
    lines = [line for line in outcome.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, outcome.stderr
    assert lines[0].startswith("s2o-calibrate: ")
    assert message in lines[0]
    assert sorted(tmp_path.iterdir()) == before


@WHOLE_RUN
def test_bad_input_ends_a_process_in_one_sentence(tmp_path):
    """The same from outside: nothing but the sentence is on standard error, whatever libraries would say."""
    outcome = run(*GOOD, "--model", "qwen2.5-7bb", cwd=tmp_path)
    assert (outcome.returncode, outcome.stdout, outcome.stderr.count("\n")) == (2, "", 1)
    assert outcome.stderr.startswith("s2o-calibrate: model 'qwen2.5-7bb' is not known")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model is missing: give an alias such as demo"),
        (
            ["--model", "demo", "--budget-kl", "1e-3", "--budget-scope", "layer"],
            "budget_scope layer does not go with budget_kl, because a KL is of the whole model: leave budget_scope out",
        ),
        (
            ["--model", "demo", "--budget-mse", "1", "--budget-rel-mse", "1"],
            "budget_mse and budget_rel_mse are both given",
        ),
        (["--model", "demo", "--yaml"], "--yaml prints what --dry-run would run: give both"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_flags_that_do_not_fit_each_other(arguments, message, command, tmp_path):
    outcome = command(*arguments)
    assert outcome.returncode == 2, outcome.stderr
    assert outcome.stderr.startswith("s2o-calibrate: ")
    assert outcome.stderr.count("\n") == 1
    assert message in outcome.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lengths", [[], ["--lengths", "8192"]])
def test_flags_are_refused_before_torch_is_loaded(lengths, tmp_path):
    program = (
        "import sys; from calibrate.commands.calibrate import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    )
    outcome = subprocess.run(
        [sys.executable, "-c", program, "--model", "demo", *lengths, "--trials", "0"],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert outcome.stdout == "2 False\n"
    assert outcome.stderr == "s2o-calibrate: trials is 0: expected a whole number of at least 1, such as 16\n"


def test_device_dependent_lengths_are_not_guessed_before_the_device_is_known(command):
    """Segments and check lengths that fit no CPU default may fit a GPU's, and the other way round."""
    arguments = ["--model", "demo", "--device", "cpu", "--dry-run", "--json", "--check-lengths", "8192"]
    plan = json.loads(command(*arguments).stdout)
    assert (plan["lengths"], plan["check lengths"]) == ("1024, 2048 (default)", "8192")
