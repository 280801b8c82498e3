"""A calibration that is killed goes on where it was: signals to real processes, and the bytes of a run in one go."""

import json
import signal
import sqlite3
import subprocess
import time
from contextlib import closing

import pytest

from calibrate.commands import calibrate
from support.processes import called, command, environment

SLOW = pytest.mark.slow(reason="kills and resumes calibrations in processes of their own")

OPTIONS = ["--lengths", "512,1024", "--segments", "64,128", "--num-prompts", "6"]
OPTIONS += ["--num-certify", "0"]
OPTIONS += ["--num-held-out", "1", "--trials", "2", "--budget-rel-mse", "1e-2", "--device", "cpu", "--quiet", "--json"]
OPTIONS += ["--out", "p.safetensors", "--journal", "j.sqlite"]
CURVES = 4  # of a whole journal: two layers at two lengths
LONG = 120  # seconds that nothing here should take


def start(folder, cwd):
    """`s2o-calibrate` as a process of its own."""
    return subprocess.Popen(
        command("calibrate.commands.calibrate", "--model", folder, *OPTIONS),
        cwd=cwd,
        env=environment(folder.parent),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    """Its exit code, what it wrote and the last line of what it said besides."""
    output, errors = process.communicate(timeout=LONG)
    lines = errors.splitlines()
    return process.returncode, output, lines[-1] if lines else ""


def whole(folder, cwd):
    """The result of `s2o-calibrate` when nothing disturbs it, in this process."""
    outcome = called(calibrate.main, "--model", folder, *OPTIONS, cwd=cwd)
    assert outcome.returncode == 0, outcome
    result = json.loads(outcome.stdout)
    assert result["met"]
    return result


def entries(path):
    """What a journal holds, also while it is written; None if its tables are not there yet."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=rw", uri=True, timeout=LONG)) as database:
            return database.execute("SELECT kind, key, value, tensors FROM entries ORDER BY rowid").fetchall()
    except sqlite3.OperationalError:
        return None


def wait_for(process, path, count):
    """Until the journal has so many entries. The process must still be at work then."""
    end = time.monotonic() + LONG
    while (rows := entries(path)) is None or len(rows) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.002)
    assert process.poll() is None


@pytest.fixture(scope="module")
def one_go(tiny_folder, tmp_path_factory):
    """Where a run that nothing disturbed left its files."""
    cwd = tmp_path_factory.mktemp("one")
    assert whole(tiny_folder, cwd)["journal"]["reused"] == 0
    kinds = [kind for kind, *_ in entries(cwd / "j.sqlite")]
    assert kinds.count("curves") == CURVES
    assert set(kinds) == {"curves", "proof"}
    return cwd


@SLOW
def test_a_run_that_is_stopped_again_and_again_ends_as_in_one_go(tiny_folder, one_go, tmp_path):
    """Interrupted between two measurements, killed while the proof is running."""
    journal = tmp_path / "j.sqlite"
    for count, number in ((2, signal.SIGINT), (CURVES + 1, signal.SIGKILL)):
        before = entries(journal) or []
        process = start(tiny_folder, tmp_path)
        wait_for(process, journal, count)
        process.send_signal(number)
        code, output, said = finish(process)
        assert (code, output) == (130 if number == signal.SIGINT else -signal.SIGKILL, "")
        if number == signal.SIGINT:
            kept = "run the same command to continue: everything measured so far is kept in j.sqlite"
            assert said == f"s2o-calibrate: interrupted; {kept}"
        after = entries(journal)
        assert after[: len(before)] == before
        assert len(after) >= count
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "j.sqlite", *["j.sqlite.lock"] * (number == signal.SIGKILL)
        ]  # fmt: skip
    assert whole(tiny_folder, tmp_path)["journal"]["reused"] == len(after)  # no measurement is made twice
    assert (tmp_path / "p.safetensors").read_bytes() == (one_go / "p.safetensors").read_bytes()
    assert entries(journal) == entries(one_go / "j.sqlite")
