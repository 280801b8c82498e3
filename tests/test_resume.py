"""A calibration that is killed goes on where it was: real processes, real signals, and the bytes of a run in one go."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import save_tiny

ROOT = Path(__file__).parent.parent
OPTIONS = ["--lengths", "512,1024", "--segments", "64,128", "--representatives", "1,4", "--num-prompts", "6"]
OPTIONS += ["--held-out", "1", "--trials", "2", "--budget-rel-mse", "1e-2", "--device", "cpu", "--quiet", "--json"]
LINES = 5  # of a whole journal: the header, then two layers at two lengths
LONG = 120  # seconds that nothing here should take


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


def start(folder, cwd, out="p.safetensors", journal="j.jsonl"):
    """`s2o-calibrate` as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "calibrate.cli", "--model", folder, *OPTIONS, "--out", out, "--journal", journal],
        cwd=cwd,
        env={
            "PYTHONPATH": str(ROOT),
            "PATH": "/usr/bin:/bin",
            "HF_HUB_OFFLINE": "1",
            "HOME": str(folder.parent),
            "OMP_NUM_THREADS": "1",  # several processes on few cores: threads that wait for one another are slow
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    """Its exit code, its result and the last line of what it said besides."""
    output, errors = process.communicate(timeout=LONG)
    lines = errors.splitlines()
    return process.returncode, json.loads(output) if output else None, lines[-1] if lines else ""


def whole_lines(path):
    data = path.read_bytes() if path.exists() else b""
    return data[: data.rfind(b"\n") + 1].splitlines(keepends=True)


def wait_for(process, path, count):
    """Until the journal has so many lines. The process must still be at work then."""
    end = time.monotonic() + LONG
    while len(whole_lines(path)) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.002)
    assert process.poll() is None


def assert_as_in_one_go(one_go, cwd, outcome, reused):
    """The same profile and the same journal, without one measurement twice."""
    code, result, said = outcome
    assert code == 0, said
    assert result["met"]
    assert (cwd / "p.safetensors").read_bytes() == (one_go / "p.safetensors").read_bytes()
    assert (cwd / "j.jsonl").read_bytes() == (one_go / "j.jsonl").read_bytes()
    keys = [json.dumps(json.loads(line)["key"], sort_keys=True) for line in whole_lines(cwd / "j.jsonl")[1:]]
    assert len(keys) == len(set(keys)) == LINES - 1
    assert result["journal"]["reused"] == reused


@pytest.fixture(scope="module")
def one_go(folder, tmp_path_factory):
    """Where a run that nothing disturbed left its files."""
    cwd = tmp_path_factory.mktemp("one")
    code, result, said = finish(start(folder, cwd))
    assert code == 0, said
    assert result["met"]
    assert result["journal"]["reused"] == 0
    assert len(whole_lines(cwd / "j.jsonl")) == LINES
    return cwd


def test_a_run_that_is_stopped_again_and_again_ends_as_in_one_go(folder, one_go, tmp_path):
    """Killed before the first measurement, interrupted between two, killed while the proof is running."""
    journal = tmp_path / "j.jsonl"
    for count, number in ((1, signal.SIGKILL), (3, signal.SIGINT), (LINES, signal.SIGKILL)):
        before = whole_lines(journal)
        process = start(folder, tmp_path)
        wait_for(process, journal, count)
        process.send_signal(number)
        code, result, said = finish(process)
        assert (code, result) == (130 if number == signal.SIGINT else -signal.SIGKILL, None)
        if number == signal.SIGINT:
            kept = "run the same command to continue: everything measured so far is kept in j.jsonl"
            assert said == f"s2o-calibrate: interrupted; {kept}"
        after = whole_lines(journal)
        assert after[: len(before)] == before
        assert len(after) >= count
        assert [path.name for path in tmp_path.iterdir()] == ["j.jsonl"]
    assert_as_in_one_go(one_go, tmp_path, finish(start(folder, tmp_path)), LINES - 1)


def test_a_torn_line_is_measured_again(folder, one_go, tmp_path):
    """As a power cut leaves it: the last line is there in part."""
    data = (one_go / "j.jsonl").read_bytes()
    (tmp_path / "j.jsonl").write_bytes(data[:-7])
    assert_as_in_one_go(one_go, tmp_path, finish(start(folder, tmp_path)), LINES - 2)


def test_a_second_run_is_refused_while_the_first_goes_on(folder, one_go, tmp_path):
    first = start(folder, tmp_path)
    wait_for(first, tmp_path / "j.jsonl", 2)
    first.send_signal(signal.SIGSTOP)  # so that it is not done too early
    try:
        before = (tmp_path / "j.jsonl").read_bytes()
        code, result, said = finish(start(folder, tmp_path, out="other.safetensors"))
        assert (code, result) == (2, None)
        owner = re.escape(f" (process {first.pid})") if os.path.exists("/proc/locks") else ""
        assert re.fullmatch(
            rf"s2o-calibrate: journal j\.jsonl is being written by another run{owner}: "
            "wait for it, or give another --journal",
            said,
        )
        assert (tmp_path / "j.jsonl").read_bytes() == before
        assert not (tmp_path / "other.safetensors").exists()
    finally:
        first.send_signal(signal.SIGCONT)
    assert_as_in_one_go(one_go, tmp_path, finish(first), 0)
