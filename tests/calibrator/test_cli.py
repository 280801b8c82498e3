"""s2o-calibrate as a user meets it: an exit code, one sentence for bad input, a profile at the end."""

import errno
import json
import logging
import os
import re
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from calibrate import pipeline
from calibrate.commands import calibrate as commands
from calibrate.commands import evaluate, profile
from calibrate.commands.calibrate import main
from calibrate.evaluation import ruler
from calibrate.machine import wrap_write_errors
from calibrate.model.models import ALIASES
from calibrate.proof.state import Problem, ProblemKind
from calibrate.proof.verify import Prover
from calibrate.report import contents, figures, page, sections
from s2o_runtime import load_profile, patch
from support.models import SIZES
from support.pages import ROOT
from support.processes import called, refusal

MODEL = "--model demo --budget-mse 1e-4"
TYPED = f"{MODEL} --lengths 512 --device cpu"
GOOD = TYPED.split()
SMALL = "--lengths 256 --segments 64 --trials 1 --num-prompts 1 --num-held-out 1 --num-certify 0 --device cpu --quiet "
SMALL += "--budget-rel-mse 1e-2"


@pytest.fixture
def command(tmp_path):
    """The command in this process, in an empty folder."""
    return partial(called, main, cwd=tmp_path)


@pytest.fixture
def plan_of(command):
    """The plan of a command line as JSON, of flags as they are typed."""

    def plan(flags):
        outcome = command(*flags.split(), "--dry-run", "--json")
        assert outcome.returncode == 0, outcome.stderr
        return json.loads(outcome.stdout)

    return plan


@pytest.fixture(scope="module")
def unfit(tmp_path_factory):
    """Folders of models without a tokenizer that can be loaded, by the words that stand for them below."""
    plain = LlamaConfig(**SIZES).to_dict()
    folders = {}
    for word, config in {"SPEECHLESS": plain, "WORDLESS": Qwen2Config(**SIZES).to_dict(), "SPELLING": plain}.items():
        folders[word] = tmp_path_factory.mktemp(word.lower())
        (folders[word] / "config.json").write_text(json.dumps(config))
    own_tokenizer = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    (folders["SPELLING"] / "tokenizer_config.json").write_text(json.dumps(own_tokenizer))
    (folders["SPELLING"] / "tokenization_own.py").write_text("raise SystemExit('code of the tokenizer ran')")
    return folders


@pytest.fixture
def calibrate_tiny(tiny_folder, command):
    """A calibration of a tiny model in seconds; after the first, the journal has all measurements."""
    return partial(command, "--model", tiny_folder, *SMALL.split(), "--journal", "j")


@pytest.mark.slow(reason="calibrates a tiny model")
def test_a_proof_that_fails_writes_nothing_unless_that_is_allowed(calibrate_tiny, tmp_path, monkeypatch):
    """The patched model finds none of the needles, whatever is tried."""
    prove = Prover.prove

    def loses(*arguments, **named):
        candidate, proofs = prove(*arguments, **named)
        return candidate, {length: replace(proof, needles=(0, 3)) for length, proof in proofs.items()}

    monkeypatch.setattr(Prover, "prove", loses)
    outcome = calibrate_tiny("--out", "no.safetensors")
    lost = "at 256 tokens the patched model keeps 0 of the 3 needles that dense finds, 95% are asked for"
    assert outcome.returncode == 3, outcome.stderr
    assert not (tmp_path / "no.safetensors").exists()
    assert f"s2o-calibrate: the proof failed, so no profile was written ({lost}): allow less" in outcome.stderr
    report = json.loads((tmp_path / "no.report.json").read_text())
    assert (report["out"], report["met"], report["problems"]) == (None, False, [lost])
    assert calibrate_tiny("--out", "no.safetensors", "--allow-regression").returncode == 0
    record = load_profile(tmp_path / "no.safetensors").record
    assert (record["proof"], record["problems"]) == ("failed", [lost])


@pytest.mark.slow(reason="calibrates a tiny model")
def test_a_profile_in_the_models_folder_is_all_that_is_written_and_is_found(command, tiny_folder, tmp_path, caplog):
    """Loaders read every .safetensors beside the weights, none in a folder."""
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    before = {path: path.read_bytes() for path in folder.rglob("*")}
    outcome = command("--model", folder, *SMALL.split(), "--out-in-model")
    assert outcome.returncode == 0, outcome.stderr
    written = folder / "s2o" / "cpu" / "rel-mse-0.01.safetensors"
    assert {path: path.read_bytes() for path in folder.rglob("*") if "s2o" not in path.parts} == before
    assert [path for path in tmp_path.rglob("*.safetensors") if path not in before] == [written]
    assert list(tmp_path.iterdir()) == [folder]
    caplog.set_level(logging.INFO, logger="s2o_runtime")  # which the command has no use for
    patch(AutoModelForCausalLM.from_pretrained(folder))
    assert f"S2O takes the profile {written} of " in caplog.text


@pytest.mark.parametrize(("model", "message"), [
    ("org/model", "but org/model is no folder: hf download it with --local-dir FOLDER and give that, or give --out"),
    ("models--org--model/snapshots/0", "is a folder of the Hub's cache: hf download it with"),
    ("/proc", "--out-in-model /proc/s2o/profile cannot be written ("),
])  # fmt: skip
def test_only_a_folder_of_ones_own_takes_a_profile(model, message, command, tmp_path):
    (tmp_path / "models--org--model" / "snapshots" / "0").mkdir(parents=True)
    for more, said in (([], message), (["--out", "p"], "--out p and --out-in-model are both given: choose one")):
        assert said in refusal(command("--model", model, "--out-in-model", *GOOD[2:], *more), "s2o-calibrate")


def test_publishing_scores_ruler_and_files_the_profile(command, tmp_path, monkeypatch):
    """Each command takes what the one before it wrote; what cannot be published is refused before it is measured."""
    flags, ran = f"{MODEL} --lengths 512,8192 --device cpu --out p.safetensors --quiet".split(), []

    def calibrate(recipe, **_):
        recipe.out.touch()
        return SimpleNamespace(report=None, written=True, report_failure="", report_files=(), recipe=recipe)

    monkeypatch.setattr(commands, "run", calibrate)
    monkeypatch.setattr(ruler, "load_generators", lambda: None)
    monkeypatch.setattr(evaluate, "run", lambda flags: ran.append(evaluate._make_plan(flags)))
    monkeypatch.setattr(profile, "publish", ran.append)
    outcome = command(*flags, "--publish", "out", "--name", "org/model")
    assert outcome.returncode == 0, outcome.stderr
    plan, published = ran
    assert (plan.model, plan.tasks, plan.lengths) == ("demo", ("ruler",), (8192,))
    assert plan.profiles == (published["profile"],) == (Path("p.safetensors"),)
    assert published["evaluation"] == plan.out / "summary.json"
    assert (published["name"], published["out_dir"]) == ("org/model", Path("out"))
    monkeypatch.setattr(commands, "run", None)
    for more, message in (
        (["--lengths", "8192", "--name", "org/model"], "--lengths 8192 has none that --publish scores RULER at"),
        (["--json", "--name", "org/model"], "and prints tables: leave --random-weights and --json out"),
        ([], "demo is not the hub id of a model, which its profile is published under: give --name ID"),
    ):
        assert message in refusal(command(*flags, "--publish", "out", *more), "s2o-calibrate")


def test_dry_run_prints_the_plan_and_stops(command, plan_of, tmp_path):
    """First what a newcomer needs and what was given; the rest is said with --verbose, and all of it in JSON."""
    first = ["model", "takes", "memory", "runs on", "budget", "lengths", "layers", "out"]
    plan = plan_of(f"{TYPED} --seed 3")
    assert (list(plan)[:8], len(plan) > 30) == (first, True)
    assert (plan["lengths"], plan["device"]) == ("512 (given)", "cpu (given)")
    assert plan["budget"] == "mse 0.0001 and rel_mse 0.01, whichever allows a layer less (given)"
    assert plan["out"] == "profiles/demo/cpu/mse-0.0001.safetensors"
    assert plan["journal"] == "profiles/demo/cpu/demo.journal.sqlite"
    assert plan["num prompts"] == "5 of each length"
    lines = command(*GOOD, "--seed", 3, "--dry-run").stdout.splitlines()
    assert [re.split("  +", line)[0] for line in lines if not line.startswith("busy")] == [*first, "seed", "device"]
    assert all(f"{plan[name]}\n" in "\n".join([*lines, ""]) for name in first)
    text = re.sub(" +", " ", command(*GOOD, "--dry-run", "--lookbacks", "64,256", "--verbose").stdout)
    for line in ("lookbacks 64, 256 (given)", "num held out 10 of each length", "trials 16 for"):
        assert f"\n{line}" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("load", "threads", "said"), [
    (6.0, 2, "2 cores have a load of 6.0: set OMP_NUM_THREADS=1"), (6.0, 1, "load of 6.0: it takes longer"),
    (0.2, 2, ""), (0.9, 1, ""),
])  # fmt: skip
def test_the_plan_says_when_others_use_the_cores(load, threads, said, command, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    busy = [line for line in command(*GOOD, "--dry-run").stdout.splitlines() if line.startswith("busy ")]
    assert bool(busy) == bool(said)
    assert all(said in line for line in busy)


@pytest.mark.parametrize("worthwhile", [True, False])
def test_a_run_ends_with_what_was_written_and_what_is_worth_deploying(worthwhile, command, monkeypatch):
    finished = SimpleNamespace(report="the report", written=True, report_files=[Path("p.html")], report_failure="")
    finished.recipe = SimpleNamespace(out=Path("p.safetensors"))
    monkeypatch.setattr(commands, "run", lambda *_, **__: finished)
    monkeypatch.setattr(page, "print_report", lambda report, console: None)
    monkeypatch.setattr(sections, "is_worthwhile", lambda report: (report, worthwhile) == ("the report", True))
    for flags in ([], ["--quiet"]):
        printed = command(*GOOD, "--out", "p.safetensors", *flags).stdout
        assert "wrote p.safetensors in " in printed
        assert ("deploy it: s2o_runtime.patch(" in printed) == worthwhile
        assert ("runs on" in printed) == (not flags)


def test_aliases_are_listed_as_in_the_page(command):
    lines = command("--list-models").stdout.splitlines()
    assert "qwen2.5-7b = Qwen/Qwen2.5-7B-Instruct" in lines
    assert lines[0] == "demo"
    assert json.loads(command("--list-models", "--json").stdout) == ALIASES
    table = (ROOT / "docs" / "models.md").read_text().partition("## Aliases")[2].partition("## ")[0]
    rows = re.findall(r"^\| `(.*)` \| (.*) \|$", table, re.MULTILINE)
    assert dict(rows) == ALIASES | {"demo": "the demo model, in `calibrate/demo/model`"}
    assert [name for name, _ in rows] == list(ALIASES)


def test_flags_override_the_recipe_file_which_overrides_the_defaults(command, plan_of, tmp_path):
    """And the plan as a recipe file, with what depends on the machine, is the same plan."""
    written = "model: demo\nbudget_mse: 1e-4\nlengths: [512, 1024]\nceiling_rel_mse: 1e-3\ndevice: cpu\n"
    (tmp_path / "mine.yaml").write_text(
        f"{written}time_limit: 5m\ntails: [off]\nworst_rows: null\nrandom_weights: true\nseed: 7\n"
    )
    flags = "--recipe mine.yaml --budget-rel-mse 0.01 --lengths 1024 --no-random-weights --trials 2"
    plan = plan_of(f"{flags} --check-lengths none")
    expected = {
        "model": "demo", "budget": "rel_mse 0.01", "lengths": "1024", "check lengths": "none", "time limit": "300 s",
        "tails": "off", "worst rows": "off", "weights": "the model's", "seed": "7",
        "trials": "2 for each group of like layers at each length",
    }  # fmt: skip
    assert {name: plan[name] for name in expected} == {name: f"{text} (given)" for name, text in expected.items()}
    assert plan["margin"] == "90% of the budget is spent"
    yaml = command(*flags.split(), "--dry-run", "--yaml").stdout
    assert "budget_rel_mse: 0.01\n" in yaml
    (tmp_path / "again.yaml").write_text(yaml)
    assert command("--recipe", "again.yaml", "--dry-run", "--yaml").stdout == yaml


@pytest.mark.parametrize(("kinds", "phrases", "never"), [
    (["OVER_LIMIT", "OVER_LIMIT", "TOO_FEW"], ["allow more error", "--num-prompts", "on more text"], "less error"),
    (["OVER_LIMIT", "LOST_NEEDLES"], ["allow less error", "--worst-rows", "--keep-needles"], "more error"),
])  # fmt: skip
def test_what_helps_depends_on_what_failed(kinds, phrases, never):
    text = commands.give_advice([Problem(ProblemKind[kind], 512, "a sentence") for kind in kinds])
    assert all(text.count(phrase) == 1 for phrase in phrases)
    assert never not in text


FULL = "p.safetensors cannot be written (No space left on device): free some space and run the same command again"


@pytest.mark.parametrize(("happens", "code", "said"), [
    ("full", 4, f"{FULL}; what was measured so far is kept"),
    ("SIGTERM", 130, "interrupted; run the same command to continue: everything measured so far is kept in new/j"),
    ("SIGINT", 130, "interrupted; nothing was written"),
])  # fmt: skip
def test_what_ends_a_run_is_one_sentence(happens, code, said, command, monkeypatch):
    def end(recipe, progress, loaded, expected):
        if happens == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if happens == "SIGTERM":  # with measurements
            recipe.journal_path.parent.mkdir(parents=True)
            recipe.journal_path.touch()
        os.kill(os.getpid(), signal.Signals[happens])

    monkeypatch.setattr(pipeline, "calibrate", end)
    outcome = command(*GOOD, "--out", "p.safetensors", "--journal", "new/j", "--quiet")
    assert (outcome.returncode, outcome.stderr) == (code, f"s2o-calibrate: {said}\n")
    with pytest.raises(FileNotFoundError, match="a bug"), wrap_write_errors(Path("p.safetensors")):
        raise FileNotFoundError("a bug")


# of values that no option takes, test_options.py and test_recipe.py have the rest
BAD_INPUT = [
    ("--model", "qwen2.5-7bb", "model 'qwen2.5-7bb' is not known: did you mean qwen2.5-7b"),
    ("--model", "phi-4", "model 'phi-4' is not known: s2o-calibrate --list-models lists the aliases"),
    ("--model", "./nope", "./nope does not exist: check the path"),
    ("--model", "bad.jsonl", "model bad.jsonl is a file that is no GGUF file: give a folder"),
    ("--model", "zzz", "A local folder or a hub id (org/name) works too"),
    ("--tokenizer", "/nope", "/nope does not exist: check the path"),
    ("--model", ".", "folder . holds no config.json"),
    ("--model", "SPEECHLESS", "cannot be loaded: its files are missing"),
    ("--model", "WORDLESS", "cannot be loaded: its files are missing or hold no words"),
    ("--model", "SPELLING", "code of its own, which is not run: give --trust-remote-code if you have read and"),
    ("--prompts", "none.jsonl", "prompt file none.jsonl does not exist"),
    ("--prompts", "bad.jsonl", "bad.jsonl:2: "),
    ("--prompts", "short.jsonl", "0 prompts to calibrate on of 512 tokens or more"),
    ("--lengths", "256k", "length 262144 is beyond the model's limit of 131072: use a shorter one, or a folder whose"),
    ("--check-lengths", "262144", "length 262144 is beyond the model's limit of 131072"),
    ("--out", "bad.jsonl/p.safetensors", "--out bad.jsonl/p.safetensors cannot be written"),
    ("--out", ".", "--out . is a folder"),
    ("--out", "bad.jsonl", "--out bad.jsonl exists and was not written by S2O, so it is not replaced"),
    ("--out", "foreign.safetensors", "beside --out, foreign.report.md exists and was not written by S2O"),
    ("--journal", "bad.jsonl", "bad.jsonl is not a journal of S2O (found no database): give another --journal"),
    ("--journal", "profiles/demo/cpu/mse-0.0001.report.md", "cannot be the journal too: give another --journal or"),
    ("--storage", "nosql://user:secret@host/x", "--storage is no URL of a database that is known here"),
    ("--out", "pipe", "--out pipe is a pipe, a socket or a device, and no regular file: give another file name"),
    ("--journal", ".", "--journal . is a folder"),
    ("--num-certify", "2", "at 512 tokens not proven: 2 groups of text to certify on allow no statement, 3 are the"),
    ("--device", "tpu", "device 'tpu' is not known"),
    ("--yaml", None, "--yaml prints what --dry-run would run: give both"),
    ("--name", "org/model", "--name is what --publish calls the model: give both"),
]


# a plan finds what a run would
RUNS = [(False, *case) for case in BAD_INPUT]
PLANS = [(True, *case) for case in BAD_INPUT if case[0] != "--yaml"]


@pytest.mark.parametrize(("dry_run", "name", "value", "message"), RUNS + PLANS, ids=lambda value: str(value)[:20])
@pytest.mark.usefixtures("offline")
def test_bad_input_is_one_sentence_and_exit_code_2(dry_run, name, value, message, unfit, command, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "foreign.report.md").write_text("notes")
    (tmp_path / "short.jsonl").write_text('{"text": "a"}\n')
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.iterdir())
    flags = dict(zip(GOOD[::2], GOOD[1::2], strict=True)) | {name: unfit.get(value, value)}
    words = [part for flag in flags.items() for part in flag if part is not None]
    outcome = command(*words, "--quiet", *(["--dry-run"] * dry_run))
    assert message in refusal(outcome, "s2o-calibrate")
    assert sorted(tmp_path.iterdir()) == before


def lines_of(count, words):
    return "".join(json.dumps({"text": f"{number} " + "word " * words}) + "\n" for number in range(count))


def test_a_plan_counts_the_prompts(command, plan_of, tmp_path):
    """Of each length, of those that the run needs; where the run would be refused, so is the plan, below its lines."""
    (tmp_path / "mine.jsonl").write_text(lines_of(3, 1100) + lines_of(20, 600))
    demo, few = "--model demo --device cpu", "--num-prompts 1 --num-held-out 1 --num-certify 9"
    mine = f"{demo} --prompts mine.jsonl --lengths"
    assert plan_of(f"{mine} 512 {few}")["prompts"] == "mine.jsonl; 11 of 11 needed at 512 (given)"
    (tmp_path / "mine.jsonl").write_text(lines_of(3, 1100))
    outcome = command(*mine.split(), "1024", "--dry-run", "--quiet")
    assert "prompts: 3 of 35 needed at 1024; at 1024 tokens not proven: 0 groups" in refusal(outcome, "s2o-calibrate")
    assert plan_of(f"{mine} 1024 --allow-regression")["prompts"] == "mine.jsonl; 3 of 35 needed at 1024 (given)"
    built_in = "built-in text; 35 of 35 needed at 1024, 30 of 30 needed at 1536, 35 of 35"
    assert plan_of(demo)["prompts"].startswith(built_in)
    chinese = plan_of(f"{demo} --domains chinese --lengths 8192")["prompts"]
    assert re.match(r"built-in text; \d+ of 35 needed at 8192", chinese)
    assert not list(tmp_path.glob("profiles"))


@pytest.mark.usefixtures("offline")
def test_a_plan_without_a_tokenizer_says_so_and_reads_the_files_all_the_same(command, plan_of, tmp_path):
    (tmp_path / "mine.jsonl").write_text(lines_of(3, 10))
    (tmp_path / "bad.jsonl").write_bytes(b"\x80random")
    flags = "--model qwen2.5-7b --device cpu --prompts"
    plan = plan_of(f"{flags} mine.jsonl")
    assert plan["prompts"].startswith("mine.jsonl; not read: the tokenizer of qwen2.5-7b cannot be loaded here")
    assert "nothing was asked" not in plan["sizes"]
    outcome = command(*flags.split(), "bad.jsonl", "--dry-run", "--quiet")
    assert "prompt file bad.jsonl cannot be read" in refusal(outcome, "s2o-calibrate")


def test_a_scheduler_that_does_not_answer_is_named_while_it_is_waited_for(command, monkeypatch):
    monkeypatch.setattr("calibrate.work.cluster.CONNECT_TIMEOUT_S", 0.2)
    outcome = command(*GOOD, "--scheduler", "tcp://127.0.0.1:9", "--dry-run")
    waiting, sentence = (line for line in outcome.stderr.splitlines() if "127.0.0.1" in line)
    assert (outcome.returncode, waiting) == (4, "waiting for scheduler tcp://127.0.0.1:9, at most 0.2 s ..")
    assert sentence.startswith("s2o-calibrate: scheduler tcp://127.0.0.1:9 does not answer within 0.2 s (")


@pytest.mark.slow(reason="calibrates a tiny model")
@pytest.mark.parametrize(("module", "name", "said", "suffixes"), [
    (figures, "_save_figure", "the pictures cannot be drawn (OverflowError: cannot convert", ["json", "md", "html"]),
    (contents, "make_report", "the report cannot be written (cannot convert float infinity", []),
])  # fmt: skip
def test_a_report_that_fails_fails_no_run(
    module, name, said, suffixes, calibrate_tiny, tmp_path, monkeypatch, caplog
):  # fmt: skip
    """The pictures or the whole report: the profile is written, said to be, and a warning follows."""

    def broken(*arguments, **options):
        raise OverflowError("cannot convert float infinity to integer")

    monkeypatch.setattr(module, name, broken)
    outcome = calibrate_tiny("--out", "p.safetensors")
    assert outcome.returncode == 0, outcome.stderr
    assert "wrote p.safetensors in" in outcome.stdout
    assert caplog.messages[-1].startswith(said)
    assert {path.name for path in tmp_path.glob("p.report.*")} == {f"p.report.{suffix}" for suffix in suffixes}
    assert load_profile(tmp_path / "p.safetensors").record["proof"] == "held out"


@pytest.mark.usefixtures("offline")
def test_the_plan_of_an_alias_needs_no_hub(command, plan_of, caplog):
    """Its sizes ship. Without a GPU a large model gets a warning that says the hours."""
    plan = plan_of("--model qwen2.5-7b --device cpu")
    assert plan["sizes"] == "sizes of the alias, as they ship; nothing was asked of the Hub"
    assert plan["architecture"] == "qwen2, 28 layers, 28 query heads, 4 KV heads, head dim 128"
    assert (plan["model"], plan["weights"]) == ("qwen2.5-7b = Qwen/Qwen2.5-7B-Instruct (given)", "the model's")
    assert re.fullmatch(
        r"about \d+ h \d+ min \(.*certifying .*, proving .*\), less what the journal has", plan["takes"]
    )
    warning = r"qwen2.5-7b has 7.6 billion parameters and this run has no GPU: it takes about \d+ h \d+ min"
    assert re.search(warning + ".*--dry-run --target-gpu H100$", caplog.text, re.MULTILINE)
    outcome = command("--model", "qwen2.5-7b", "--device", "cpu", "--quiet")  # its weights do not
    (line,) = outcome.stderr.splitlines()
    assert outcome.returncode == 4
    for remedy in ("try again with a network", "give a local folder or a GGUF file", "--dry-run", "--random-weights"):
        assert remedy in line
    caplog.clear()
    assert "sizes" not in plan_of("--model demo --device cpu")
    assert "no GPU" not in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a host without a GPU")
def test_a_host_without_gpus_plans_for_those_that_have_some(plan_of, monkeypatch):
    monkeypatch.setattr("calibrate.work.cluster.connect", lambda scheduler: SimpleNamespace(close=lambda: None))
    workers = "--model qwen2.5-7b --scheduler tcp://head:8786 --device cuda"
    plan = plan_of(f"{workers} --target-gpu H200")
    assert (plan["lengths"], plan["loaded"]) == ("8192, 32768", "15.2 GB, which stay on the device")
    assert plan["memory"].endswith("of the GPU's 140")
    assert plan["out"] == "profiles/qwen2.5-7b/nvidia-h200/kl-0.002.safetensors"
    assert plan_of(workers)["memory"].endswith("of each GPU")


@pytest.mark.parametrize(("gpu", "name", "memory", "loaded"), [
    ("h100", "NVIDIA H100 80GB HBM3 (sm_90, 132 SMs)", 79, "15.2 GB, which stay on the device"),
    ("4090", "NVIDIA GeForce RTX 4090 (sm_89, 128 SMs)", 24, "layer by layer"),
])  # fmt: skip
@pytest.mark.usefixtures("offline")
def test_a_plan_is_for_the_gpu_that_is_named(gpu, name, memory, loaded, command, plan_of, caplog):
    flags = f"--model qwen2.5-7b --target-gpu {gpu}"
    plan = plan_of(flags)
    assert (plan["runs on"], plan["lengths"], plan["device"]) == (name, "8192, 32768", "cuda")
    assert f"of the GPU's {memory}" in plan["memory"]
    assert plan["loaded"].startswith(loaded)
    assert "/nvidia-" in plan["out"]
    assert "no GPU" not in caplog.text
    recipe = command(*flags.split(), "--dry-run", "--yaml").stdout
    assert all(line in recipe for line in ("device: cuda\n", "target_gpu: null\n"))
    many = plan_of(f"{flags} --gpus 8")
    assert (many["runs on"], many["gpus"]) == (name, "8 workers on this machine (given)")


def test_a_gpu_that_is_not_known_or_not_here(command):
    outcome = command("--model", "demo", "--target-gpu", "T4", "--dry-run")
    assert "'T4' is not known: name one of NVIDIA A100" in refusal(outcome, "s2o-calibrate")
    outcome = command(*GOOD, "--device", "cuda:99", "--dry-run")
    assert (outcome.returncode, "device 'cuda:99' is not here" in outcome.stderr) == (4, True)


def test_device_dependent_lengths_are_not_guessed_before_the_device_is_known(plan_of):
    """Segments and check lengths that fit no CPU default may fit a GPU's, and the other way round."""
    plan = plan_of("--model demo --device cpu --check-lengths 8192")
    assert (plan["lengths"], plan["check lengths"]) == ("1024, 2048", "8192 (given)")
    plan = plan_of("--model demo --target-gpu H100 --segments 4096 --check-lengths 16384")
    assert (plan["lengths"], plan["check lengths"]) == ("8192, 32768", "16384 (given)")
