"""s2o-calibrate as a user meets it: an exit code, one sentence for bad input, a profile at the end."""

import errno
import json
import os
import re
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config

from calibrate import pipeline
from calibrate.commands.calibrate import main
from calibrate.proof import verify
from calibrate.proof.verify import prove
from s2o_runtime import load_profile
from support.models import SIZES
from support.processes import called, refusal

GOOD = ["--model", "demo", "--budget-mse", "1e-4", "--lengths", "512", "--device", "cpu"]


@pytest.fixture
def command(tmp_path):
    """The command in this process, in an empty folder."""
    return partial(called, main, cwd=tmp_path)


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


@pytest.mark.slow(reason="calibrates a tiny model")
@pytest.mark.parametrize("allow", [False, True])
def test_a_proof_that_fails_writes_nothing_unless_that_is_allowed(allow, tiny_folder, command, tmp_path, monkeypatch):
    """The patched model finds none of the needles, whatever is tried."""

    def loses(*arguments, **named):
        candidate, proofs = prove(*arguments, **named)
        return candidate, {length: replace(proof, needles=(0, 3)) for length, proof in proofs.items()}

    monkeypatch.setattr(verify, "prove", loses)
    flags = "--lengths 512 --budget-rel-mse 1e-2 --segments 64,128 --trials 1 --num-prompts 1 --num-held-out 1"
    flags += " --num-certify 0 --device cpu --quiet --out no.safetensors" + " --allow-regression" * allow
    outcome = command("--model", tiny_folder, *flags.split())
    lost = "at 512 tokens the patched model keeps 0 of the 3 needles that dense finds, 95% are asked for"
    assert outcome.returncode == (0 if allow else 3), outcome.stderr
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
    assert plan["lengths"] == "512 (given)"
    assert plan["device"] == "cpu (given)"
    assert plan["budget"] == "mse 0.0001 and rel_mse 0.01, whichever allows a layer less (given)"
    assert plan["out"] == "profiles/demo/cpu/mse-0.0001.safetensors"
    assert plan["journal"] == "profiles/demo/cpu/demo.journal.sqlite"
    assert plan["num prompts"] == "5 of each length"
    text = command(*GOOD, "--dry-run", "--scores", "input,int8", "--num-held-out", 1).stdout
    assert "scores              input, int8 (given)\n" in text
    assert "num held out        1 of each length (given)\n" in text
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
    assert tuple(plan[name] for name in names) == tuple(f"{value} (given)" for value in expected)
    assert plan["trials"] == "2 for each group of like layers at each length (given)"
    assert plan["margin"] == "90% of the budget is spent"


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
    first, second = ({name: line.removesuffix(" (given)") for name, line in plan.items()} for plan in plans)
    assert first == second


@pytest.mark.parametrize(
    ("kinds", "phrases", "never"),
    [
        (["OVER_LIMIT"], ["allow more error", "--num-prompts"], "less error"),
        (["LOST_NEEDLES"], ["allow less error", "--worst-rows", "--keep-needles"], "more error"),
        (["SLOWER"], ["longer prompts", "dense"], "error"),
        (["OVER_LIMIT", "LOST_NEEDLES"], ["allow less error"], "more error"),
        (["OVER_LIMIT", "OVER_LIMIT", "SLOWER"], ["allow more error", "longer prompts"], "less error"),
    ],
)
def test_what_helps_depends_on_what_failed(kinds, phrases, never):
    from calibrate.commands.calibrate import advice
    from calibrate.proof.state import Problem, ProblemKind

    text = advice([Problem(ProblemKind[kind], 512, "a sentence") for kind in kinds])
    assert all(phrase in text for phrase in phrases)
    assert never not in text
    assert text.count("allow more error") <= 1


def full_disk(recipe, progress, loaded, expected):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def terminated(recipe, progress, loaded, expected):
    recipe.journal_path.parent.mkdir(parents=True)
    recipe.journal_path.touch()
    os.kill(os.getpid(), signal.SIGTERM)


def interrupted(recipe, progress, loaded, expected):
    os.kill(os.getpid(), signal.SIGINT)


FULL = "p.safetensors cannot be written (No space left on device): free some space and run the same command again"


@pytest.mark.parametrize(
    ("happens", "code", "said"),
    [
        (full_disk, 4, f"{FULL}; what was measured so far is kept"),
        (terminated, 130, "interrupted; run the same command to continue: everything measured so far is kept in j"),
        (interrupted, 130, "interrupted; nothing was written"),
    ],
)
def test_what_ends_a_run_is_one_sentence(happens, code, said, command, monkeypatch):
    monkeypatch.setattr(pipeline, "calibrate", happens)
    outcome = command(*GOOD, "--out", "p.safetensors", "--journal", "new/j", "--quiet")
    assert (outcome.returncode, outcome.stderr) == (code, f"s2o-calibrate: {said.replace(' in j', ' in new/j')}\n")


def test_a_bug_is_not_taken_for_a_full_disk():
    from calibrate.machine import writing

    with pytest.raises(FileNotFoundError, match="a bug"), writing(Path("p.safetensors")):
        raise FileNotFoundError("a bug")


# of values that no option takes, test_recipe.py has the rest
BAD_INPUT = [
    ("--model", "qwen2.5-7bb", "model 'qwen2.5-7bb' is not known: did you mean qwen2.5-7b"),
    ("--model", "zzz", "A local folder or a hub id (org/name) works too"),
    ("--model", ".", "folder . holds no config.json"),
    ("--model", "WINDOWS", "has no layer of full_attention, only 2 of sliding_attention"),
    ("--model", "CODE", "code of its own, which is not run: give --trust-remote-code if you have read and trust"),
    ("--model", "WIDE", "layer 0 cannot run S2O ("),
    ("--model", "SPEECHLESS", "cannot be loaded: its files are missing"),
    ("--model", "WORDLESS", "cannot be loaded: its files are missing or hold no words"),
    ("--model", "SPELLING", "code of its own, which is not run: give --trust-remote-code if you have read and"),
    ("--prompts", "none.jsonl", "prompt file none.jsonl does not exist"),
    ("--prompts", "bad.jsonl", "bad.jsonl:2: "),
    ("--prompts", "short.jsonl", "0 prompts to calibrate on of 512 tokens or more"),
    ("--budget-mse", "0", "budget_mse is 0.0: expected a number above 0, such as 1e-4"),
    ("--ceiling-rel-mse", "-1", "ceiling_rel_mse is -1.0: expected a number from 0 to 1 or none, such as 1e-2"),
    ("--ceiling-rel-mse", "nan", "ceiling_rel_mse is nan: expected a number from 0 to 1 or none, such as 1e-2"),
    ("--budget-mse", "little", "argument --budget-mse: 'little': expected a number above 0, such as 1e-4"),
    ("--lengths", "262144", "length 262144 is beyond the model's limit of 131072"),
    ("--lengths", "8k", "'8k': expected an ascending list, each a whole number of tokens"),
    ("--check-lengths", "262144", "length 262144 is beyond the model's limit of 131072"),
    ("--tails", "maybe", "'maybe': expected an ascending list, each true or false, such as off,on"),
    ("--time-limit", "soon", "'soon': expected a number of seconds above 0 or none, such as 90, 5m or 1h"),
    ("--out", "bad.jsonl/p.safetensors", "--out bad.jsonl/p.safetensors cannot be written"),
    ("--out", "/proc/p.safetensors", "--out /proc/p.safetensors cannot be written"),
    ("--out", ".", "--out . is a folder"),
    ("--out", "pipe", "--out pipe is a pipe, a socket or a device, and no regular file: give another file name"),
    ("--journal", ".", "--journal . is a folder"),
    ("--recipe", "bad.jsonl", "recipe bad.jsonl is not YAML"),
    ("--device", "tpu", "device 'tpu' is not known"),
    ("--yaml", None, "--yaml prints what --dry-run would run: give both"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD_INPUT, ids=lambda value: str(value)[:20])
@pytest.mark.usefixtures("offline")
def test_bad_input_is_one_sentence_and_exit_code_2(name, value, message, unfit, command, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "short.jsonl").write_text('{"text": "a"}\n')
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.iterdir())
    flags = dict(zip(GOOD[::2], GOOD[1::2], strict=True)) | {name: unfit.get(value, value)}
    outcome = command(*[part for flag in flags.items() for part in flag if part is not None], "--quiet")
    assert message in refusal(outcome, "s2o-calibrate")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.usefixtures("offline")
def test_a_hub_out_of_reach_is_a_missing_resource(command):
    outcome = command("--model", "some/thing", "--dry-run")
    assert outcome.returncode == 4
    (line,) = outcome.stderr.splitlines()
    assert line == (
        "s2o-calibrate: model 'some/thing' cannot be loaded from some/thing: the Hub cannot be reached and there is no "
        "copy of it here; try again with a network, or give a local folder or a GGUF file; the sizes of an alias such "
        "as qwen2.5-7b suffice for a plan (--dry-run) and to rehearse (--random-weights)"
    )


@pytest.mark.usefixtures("offline")
def test_the_plan_of_an_alias_needs_no_hub(command, caplog):
    """Its sizes ship. Without a GPU a large model gets a warning that says the hours."""
    outcome = command("--model", "qwen2.5-7b", "--budget-mse", "1e-4", "--device", "cpu", "--dry-run", "--json")
    assert outcome.returncode == 0, outcome.stderr
    plan = json.loads(outcome.stdout)
    assert plan["sizes"] == "sizes of the alias, as they ship; nothing was asked of the Hub"
    assert plan["architecture"] == "qwen2, 28 layers, 28 query heads, 4 KV heads, head dim 128"
    assert plan["weights"] == "the model's"
    assert plan["budget"].startswith("mse 0.0001")
    assert re.fullmatch(r"about \d+ h \d+ min \(proving .*, certifying .*\), less what the journal has", plan["takes"])
    warning = r"qwen2.5-7b has 7.6 billion parameters and this run has no GPU: it takes about \d+ h \d+ min"
    assert re.search(warning, caplog.text)
    assert command("--model", "qwen2.5-7b", "--device", "cpu", "--quiet").returncode == 4  # its weights do not
    caplog.clear()
    assert "sizes" not in json.loads(command("--model", "demo", "--device", "cpu", "--dry-run", "--json").stdout)
    assert "no GPU" not in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a host without a GPU")
def test_a_host_without_gpus_plans_for_those_that_have_some(command):
    workers = ["--scheduler", "tcp://head:8786", "--target-gpu", "H200", "--device", "cuda"]
    outcome = command("--model", "qwen2.5-7b", *workers, "--dry-run", "--json")
    assert outcome.returncode == 0, outcome.stderr
    plan = json.loads(outcome.stdout)
    assert (plan["lengths"], plan["loaded"]) == ("8192, 32768", "15.2 GB, which stay on the device")
    assert plan["memory"].endswith("of each GPU")


def test_a_gpu_that_is_not_here_is_a_missing_resource(command):
    outcome = command(*GOOD, "--device", "cuda:99", "--dry-run")
    assert (outcome.returncode, "device 'cuda:99' is not here" in outcome.stderr) == (4, True)


def test_device_dependent_lengths_are_not_guessed_before_the_device_is_known(command):
    """Segments and check lengths that fit no CPU default may fit a GPU's, and the other way round."""
    arguments = ["--model", "demo", "--device", "cpu", "--dry-run", "--json", "--check-lengths", "8192"]
    plan = json.loads(command(*arguments).stdout)
    assert (plan["lengths"], plan["check lengths"]) == ("1024, 2048", "8192 (given)")
