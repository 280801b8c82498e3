"""A calibration that is interrupted or killed goes on where it was, and ends with the bytes of a run in one go."""

import json
import os
import signal
import sqlite3
import subprocess
import time
from contextlib import closing

import pytest

from calibrate.commands import calibrate
from calibrate.journal import Journal
from support.processes import called, command, environment

FLAGS = "--lengths 256,512 --segments 64,128 --num-prompts 4 --num-certify 0 --num-held-out 1 --trials 2 --device cpu "
FLAGS += "--budget-rel-mse 1e-2 --out p.safetensors --journal j.sqlite --quiet --json"
CURVES = 4  # of a whole journal: two layers at two lengths
LONG = 120  # seconds that nothing here should take


def entries(path):
    """Return what a journal holds, also while it is written; nothing if its tables are not there yet."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=rw", uri=True, timeout=LONG)) as database:
            return database.execute("SELECT kind, key, value, tensors FROM entries ORDER BY rowid").fetchall()
    except sqlite3.OperationalError:
        return []


def run_whole(folder, cwd):
    """Return how many measurements were reused when nothing disturbed `s2o-calibrate`, in this process."""
    outcome = called(calibrate.main, "--model", folder, *FLAGS.split(), cwd=cwd)
    assert outcome.returncode == 0, outcome
    result = json.loads(outcome.stdout)
    assert result["met"]
    return result["journal"]["reused"]


def run_until_killed(folder, cwd, count):
    """`s2o-calibrate` in a process of its own, which is killed while it works, with so many entries in the journal."""
    arguments = command("calibrate.commands.calibrate", "--model", folder, *FLAGS.split())
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(arguments, cwd=cwd, env=environment(folder.parent), **pipes)
    end = time.monotonic() + LONG
    while len(entries(cwd / "j.sqlite")) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.communicate(timeout=LONG)[0] == b""
    assert process.returncode == -signal.SIGKILL


@pytest.mark.slow(reason="kills and resumes calibrations")
def test_a_run_that_is_stopped_again_and_again_ends_as_in_one_go(tiny_folder, tmp_path, monkeypatch):
    """Interrupted between two measurements, killed while the proof is running."""
    for name in ("one go", "stopped"):
        (tmp_path / name).mkdir()
    one_go, cwd = tmp_path / "one go", tmp_path / "stopped"
    journal = cwd / "j.sqlite"
    assert run_whole(tiny_folder, one_go) == 0
    kinds = [kind for kind, *_ in entries(one_go / "j.sqlite")]
    assert (kinds.count("curves"), set(kinds)) == (CURVES, {"curves", "proof"})

    put_all = Journal.put_all

    def put_and_interrupt(*arguments, **named):
        put_all(*arguments, **named)
        if len(entries(journal)) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "put_all", put_and_interrupt)
        outcome = called(calibrate.main, "--model", tiny_folder, *FLAGS.split(), cwd=cwd)
    kept = "run the same command to continue: everything measured so far is kept in j.sqlite"
    assert (outcome.returncode, outcome.stdout) == (130, "")
    assert outcome.stderr.splitlines()[-1] == f"s2o-calibrate: interrupted; {kept}"
    assert [path.name for path in cwd.iterdir()] == ["j.sqlite"]
    before = entries(journal)
    run_until_killed(tiny_folder, cwd, CURVES + 1)
    after = entries(journal)
    assert after[:2] == before
    assert {path.name for path in cwd.iterdir()} == {"j.sqlite", "j.sqlite.lock"}
    assert run_whole(tiny_folder, cwd) == len(after)  # no measurement is made twice
    assert (cwd / "p.safetensors").read_bytes() == (one_go / "p.safetensors").read_bytes()
    assert entries(journal) == entries(one_go / "j.sqlite")
