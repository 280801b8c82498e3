"""Every command of this project in the documentation runs here on the demo model, unless it says what it needs."""

import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from calibrate.commands import calibrate, evaluate, profile
from s2o_runtime.command_line import NOT_PROVEN, OK
from s2o_runtime.doctor import command as doctor
from support.pages import DEMO_PROFILE, PAGES, commands_of, name_of
from support.processes import called

PROGRAMS = {
    "s2o-calibrate": calibrate.main,
    "s2o-eval": evaluate.main,
    "s2o-profile": profile.main,
    "s2o-doctor": doctor.main,
}
# other words for those that stand for something of the reader's
STAND_INS = {
    "MODEL": "demo",
    "qwen2.5-7b": "demo",
    "PROFILE": "p.safetensors",
    "A": "p.safetensors",
    "B": "demo.safetensors",
    "FOLDER": "passed-on",
    "FILE.json": "p.json",
}
# options that make the commands short; the last of two of a kind counts
QUICKLY = (
    "--lengths 1024 --segments 256 --num-prompts 1 --num-held-out 1 --num-certify 9 --budget-rel-mse 1e-3 "
    "--allow-regression --device cpu --quiet"
)
SHORT = {
    ("s2o-calibrate",): QUICKLY,
    ("s2o-eval",): "--lengths 1024 --tasks needles --num-prompts 1 --device cpu --quiet",
    ("s2o-profile", "retile"): "--device cpu",
    ("s2o-profile", "verify"): "--device cpu --quiet",
}
PROGRAM_OF_THE_READER = """\
import torch
from calibrate.model.models import load
model = load("demo", "cpu", resident=True).model
with torch.no_grad():
    model(torch.arange(1100)[None], use_cache=False)
"""


def runs_here(command):
    return command.needs is None and command.words[0] in (*PROGRAMS, "s2o-run")


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """A folder with two profiles of the demo model, the journal of one, and a program that loads it."""
    folder = tmp_path_factory.mktemp("reader")
    assert calibrate.main(["--model", "demo", "--out", str(folder / "p.safetensors"), *QUICKLY.split()]) == OK
    shutil.copy(DEMO_PROFILE, folder / "demo.safetensors")
    (folder / "generate.py").write_text(PROGRAM_OF_THE_READER)
    question = {"prompt": "The code is 31. " * 300 + "The code is", "answer": " 31"}
    (folder / "mine.jsonl").write_text(json.dumps(question))
    return folder


def shortened(words):
    """A command of a page as it is run here: its words with stand-ins, and where its output goes."""
    words = [STAND_INS.get(word, word) for word in words]
    goes_to = None
    if ">" in words:
        goes_to = words[words.index(">") + 1]
        words = words[: words.index(">")]
    for beginning, options in SHORT.items():
        if tuple(words[: len(beginning)]) == beginning and "doctor" not in words:
            if "--budget-mse" in words:
                options = options.replace("--budget-rel-mse 1e-3", "")
            words += shlex.split(options)
    return words, goes_to


@pytest.mark.exhaustive(
    reason="calibrates and proves on the demo model; the parsers read the same commands in test_docs.py"
)
@pytest.mark.parametrize("path", [path for path in PAGES if any(map(runs_here, commands_of(path)))], ids=name_of)
def test_commands_run(path, calibrated, tmp_path, monkeypatch):
    folder = tmp_path / "reader"
    shutil.copytree(calibrated, folder)
    monkeypatch.chdir(folder)
    for command in filter(runs_here, commands_of(path)):
        (program, *arguments), goes_to = shortened(command.words)
        ended = called(PROGRAMS[program], *arguments, cwd=folder) if program in PROGRAMS else run_program(arguments)
        verdicts = (OK, NOT_PROVEN) if arguments[:1] == ["verify"] else (OK,)  # a rebudgeted profile may not hold
        assert ended.returncode in verdicts, (
            f"{shlex.join(command.words)}, run as {shlex.join([program, *arguments])}: {ended.stderr}"
        )
        assert goes_to is None or ended.stdout


def run_program(arguments):
    arguments = [sys.executable if word == "python" else word for word in arguments]
    command = [sys.executable, "-m", "s2o_runtime.huggingface.run", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if "--explain" in arguments:
        assert re.search(r"s2o +1 ", ended.stdout + ended.stderr), ended.stderr
    return ended
