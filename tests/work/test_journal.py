"""The journal keeps what was acknowledged: processes are really killed, files really damaged, disks really full."""

import json
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from calibrate.journal import Journal
from s2o_runtime.errors import InputError, ResourceError

ROOT = Path(__file__).parents[2]
IDENTITY = {"model": {"name": "demo", "fingerprint": "a" * 64}, "device": {"name": "cpu"}, "version": "0.1"}
# puts entries of many sizes, one after the other from the first that is missing, and says each once it is put
WRITER = """
import json, sys, time
from pathlib import Path
from calibrate.journal import Journal
with Journal.open(Path(sys.argv[1]), json.loads(sys.argv[2])) as journal:
    print("open", flush=True)
    for index in range(len(journal.entries("curve")), 1_000_000):
        journal.put("curve", {"index": index}, "x" * (index * 7919 % 20_000))
        print(index, flush=True)
        time.sleep(0.01)  # as if it measured something
"""


def start_writer(path):
    arguments = [sys.executable, "-c", WRITER, str(path), json.dumps(IDENTITY)]
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "open\n"
    return process


def kill(process):
    """SIGKILL; returns the indices that were acknowledged."""
    process.send_signal(signal.SIGKILL)
    lines = process.stdout.read().splitlines(keepends=True)
    assert process.wait() == -signal.SIGKILL
    return [int(line) for line in lines if line.endswith("\n")]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "demo.journal.sqlite"


def filled(path, count=3):
    with Journal.open(path, IDENTITY) as journal:
        journal.put_all("curve", [({"layer": index, "segment": 256}, [index, 0.1]) for index in range(count)])
    return path.read_bytes()


def test_measurements_are_found_again_and_counted_once(path):
    with Journal.open(path, IDENTITY) as journal:
        assert journal.get("curve", {"layer": 0}) is None
        journal.put("curve", {"layer": 0, "segment": 256}, {"error": 0.1})
        journal.put("time", {"layer": 0, "segment": 256}, 5e-324)
        assert journal.get("curve", {"segment": 256, "layer": 0}) == {"error": 0.1}
        assert journal.reused == 0
    with Journal.open(path, IDENTITY) as journal:
        journal.put("curve", {"layer": 1}, 2)
        assert [journal.get("curve", {"layer": 1}) for _ in range(2)] == [2, 2]
        assert [journal.get("time", {"segment": 256, "layer": 0}) for _ in range(2)] == [5e-324] * 2
        assert journal.reused == 1
        journal.put("curve", {"layer": 1}, 3)  # the last of two values counts
        assert journal.entries("curve") == [({"layer": 0, "segment": 256}, {"error": 0.1}), ({"layer": 1}, 3)]
        assert journal.identity == IDENTITY


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"error": [-float("inf")]}, None, {"a": {1, 2}}])
def test_what_json_cannot_say_is_refused_and_leaves_no_trace(value, path):
    before = filled(path)
    problem = r"not JSON compliant|not measured|a set is neither JSON nor a tensor"
    with Journal.open(path, IDENTITY) as journal, pytest.raises((ValueError, TypeError), match=problem):
        journal.put("curve", {}, value)
    assert path.read_bytes() == before


def test_a_kill_loses_nothing_that_was_acknowledged(path):
    """The same journal is killed and continued six times; no other run can write it until then."""
    rng = random.Random(0)
    acknowledged = []
    for turn in range(6):
        writer = start_writer(path)
        if turn:  # the first may be killed before it puts anything
            acknowledged.append(int(writer.stdout.readline()))
        time.sleep(rng.uniform(0, 0.1))
        with pytest.raises(ResourceError, match="is being written by another run: wait for it, or give another"):
            Journal.open(path, IDENTITY)
        acknowledged += kill(writer)
        with Journal.read(path) if turn % 2 else Journal.open(path, IDENTITY) as journal:
            entries = journal.entries("curve")
        assert [key["index"] for key, _ in entries] == list(range(len(entries)))
        # a kill between put and print leaves at most one entry a writer did not get to say
        assert set(acknowledged) <= set(range(len(entries)))
        assert len(entries) <= len(acknowledged) + turn + 1
        assert all(value == "x" * (key["index"] * 7919 % 20_000) for key, value in entries)
    assert not path.with_name(f"{path.name}.lock-journal").exists()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_journal_that_is_gone_is_said_to_be_and_not_to_be_kept(replaced, path):
    with Journal.open(path, IDENTITY) as journal:
        journal.put("curve", {"layer": 0}, [1.0])
        path.unlink()
        if replaced:
            path.write_bytes(b"another")
        gone = "was removed or replaced during this run, and what was measured is lost"
        with pytest.raises(ResourceError, match=gone):
            journal.put("curve", {"layer": 1}, [2.0])


def test_an_empty_file_starts_over(path):
    path.touch()
    with pytest.raises(InputError, match="is empty: calibrate first"):
        Journal.read(path)
    with Journal.open(path, IDENTITY) as journal:
        assert journal.entries("curve") == []
    with Journal.read(path) as journal:
        assert journal.identity == IDENTITY


def change_by_sql(path, statement):
    with sqlite3.connect(path) as database:
        database.execute(statement)
    database.close()


def overwrite(path, change):
    path.write_bytes(change(path.read_bytes()))


FOREIGN = r"is not a journal of S2O \(found another program's database\)"


@pytest.mark.parametrize(("change", "argument", "problem"), [
    (overwrite, lambda _: b"\x80\0\0\n" * 1000, r"is not a journal of S2O \(found no database\)"),
    (change_by_sql, "PRAGMA user_version = 2", r"is of an older version of S2O \(schema 2, this one has 3\)"),
    (change_by_sql, "PRAGMA user_version = 4", r"is of a newer version of S2O \(schema 4, this one has 3\)"),
    (change_by_sql, "PRAGMA application_id = 0", FOREIGN),
    (overwrite, lambda data: data[:-4096], r"is damaged \(.*\)"),
    (overwrite, lambda data: data[:4096] + b"\xff" * 4096 + data[8192:], r"is damaged \(.*\)"),
    (overwrite, lambda data: data[:100], r"is damaged \(.*\)"),
], ids=["bytes", "older", "newer", "foreign", "cut", "overwritten", "header"])  # fmt: skip
def test_a_foreign_or_damaged_file_is_refused_in_a_sentence_and_left_alone(change, argument, problem, path):
    filled(path, 200)
    change(path, argument)
    before = path.read_bytes()
    for attempt in (lambda: Journal.open(path, IDENTITY), lambda: Journal.read(path)):
        with pytest.raises(InputError, match=f"{problem}: give another --journal") as raised:
            attempt()
        assert "\n" not in str(raised.value)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]  # and no lock


@pytest.mark.parametrize("change", [
    "value = replace(value, '0', '1')",  # the name of a tensor that is not there
    "tensors = substr(tensors, 1, length(tensors) - 1)",
    "tensors = NULL, value = '[1, {'",
])  # fmt: skip
def test_a_damaged_entry_is_one_sentence(change, path):
    with Journal.open(path, IDENTITY) as journal:
        journal.put("curve", {}, torch.zeros(3))
    change_by_sql(path, f"UPDATE entries SET {change}")
    with Journal.read(path) as journal:
        for attempt in (lambda: journal.get("curve", {}), lambda: journal.entries("curve")):
            with pytest.raises(InputError, match=r"is damaged \(.*\): give another --journal, or delete it"):
                attempt()


def test_no_lock_stays_but_after_a_kill(path):
    lock = path.with_name(f"{path.name}.lock")
    with Journal.open(path, IDENTITY) as journal:
        assert lock.exists()
        journal.put("curve", {}, 1)
    assert list(path.parent.iterdir()) == [path]
    lock.touch()  # as a kill leaves it
    with pytest.raises(InputError, match="this run has"):
        Journal.open(path, {"other": 1})
    assert list(path.parent.iterdir()) == [path]


def test_a_lock_that_its_run_deletes_meanwhile_is_held(path, monkeypatch):
    """Opened before the other run deletes it, locked after that: two runs would have two locks."""
    connect = Journal._connect

    def slow(journal, file, *arguments, **options):
        database = connect(journal, file, *arguments, **options)
        if file.name.endswith(".lock"):
            database.execute("PRAGMA user_version")  # the file is open
            file.unlink(missing_ok=True)
        return database

    monkeypatch.setattr(Journal, "_connect", slow)
    with pytest.raises(ResourceError, match="written by another run"):
        Journal.open(path, IDENTITY)
    monkeypatch.undo()
    Journal.open(path, IDENTITY).close()


def test_a_reader_cannot_write(path):
    before = filled(path)
    with Journal.read(path) as journal, pytest.raises(ValueError, match="opened to be read only"):
        journal.put("curve", {}, 1)
    assert path.read_bytes() == before
    with pytest.raises(InputError, match=r"cannot be read \(unable to open database file\): check the path"):
        Journal.read(path.with_name("none"))


FULL = r"cannot be written \(database or disk is full\): free some space and run the same command again; what was"


@pytest.mark.parametrize("room", [0, 3])
def test_a_full_disk_is_one_sentence_and_nothing_half_written_stays(room, path):
    """SQLite itself refuses to let the file grow by more than `room` pages."""
    before = filled(path)
    with Journal.open(path, IDENTITY) as journal:
        ((pages,),) = journal._database.execute("PRAGMA page_count")  # how a disk gets full has no public name
        journal._database.execute(f"PRAGMA max_page_count = {pages + room}")
        with pytest.raises(ResourceError, match=FULL):
            journal.put("curve", {"layer": 9}, "x" * 30_000)
        assert journal.get("curve", {"layer": 9}) is None
        assert path.read_bytes() == before
        with pytest.raises(ResourceError, match="is being written by another run"):
            Journal.open(path, IDENTITY)
        journal._database.execute("PRAGMA max_page_count = 1000000")
        journal.put("curve", {"layer": 9}, 2)
    with Journal.read(path) as journal:
        assert journal.get("curve", {"layer": 9}) == 2


def test_a_path_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match=r"cannot be written \(File exists\): make it writable"):
        Journal.open(tmp_path / "file" / "journal", IDENTITY)
    with pytest.raises(ResourceError, match=r"cannot be written \(unable to open database file\): make it writable"):
        Journal.open(Path("/proc/journal"), IDENTITY)
    for path in (Path("/dev/null"), tmp_path):
        with pytest.raises(InputError, match=f"{path} is not a file"):
            Journal.open(path, IDENTITY)


TENSORS = [
    torch.tensor([0.1, -0.0, float("nan"), float("inf"), 5e-324], dtype=torch.float64),
    torch.tensor([0x7F800001, 1], dtype=torch.int32).view(torch.float32),  # a signalling NaN keeps its bits
    torch.arange(24.0).reshape(2, 3, 4).transpose(0, 2),
    torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    torch.tensor([True, False]),
    torch.tensor(-(2**62)),
    torch.empty(0, 3, dtype=torch.float16),
    torch.ones(3, requires_grad=True),
]


def test_tensors_come_back_to_the_bit(path):
    with Journal.open(path, IDENTITY) as journal:
        journal.put("curve", {}, {"curves": [{"name": "a", "curve": tensor} for tensor in TENSORS], "power": 1.5})
    with Journal.read(path) as journal:
        value = journal.get("curve", {})
    assert (value["power"], {curve["name"] for curve in value["curves"]}) == (1.5, {"a"})
    for back, tensor in zip((curve["curve"] for curve in value["curves"]), TENSORS, strict=True):
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(*(each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (back, tensor)))
        back.zero_()  # it is not read-only memory
