"""The journal keeps what was acknowledged: processes are really killed, files really torn, disks really full."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from calibrate import journal as journal_module
from calibrate.journal import Journal, pack, unpack
from s2o_runtime.errors import InputError

ROOT = Path(__file__).parent.parent
IDENTITY = {"model": {"name": "demo", "fingerprint": "a" * 64}, "device": {"name": "cpu"}, "version": "0.1"}
# puts entries of many sizes, one after the other from the first that is missing, and says each once it is put
WRITER = """
import json, sys
from pathlib import Path
from calibrate.journal import Journal
with Journal.open(Path(sys.argv[1]), json.loads(sys.argv[2])) as journal:
    print("open", flush=True)
    for index in range(len(journal.entries("curve")), 1_000_000):
        journal.put("curve", {"index": index}, "x" * (index * 7919 % 20_000))
        print(index, flush=True)
"""


def value_of(index):
    return "x" * (index * 7919 % 20_000)


def start_writer(path):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), json.dumps(IDENTITY)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "open\n"
    return process


def kill(process):
    """SIGKILL; returns the indices that were acknowledged."""
    process.send_signal(signal.SIGKILL)
    said = process.stdout.read().splitlines(keepends=True)
    assert process.wait() == -signal.SIGKILL
    return [int(line) for line in said if line.endswith("\n")]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "demo.journal.jsonl"


def filled(path, count=3):
    with Journal.open(path, IDENTITY) as journal:
        for index in range(count):
            journal.put("curve", {"layer": index, "segment": 256}, [index, 0.1])
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
        assert journal.entries("curve") == [({"layer": 0, "segment": 256}, {"error": 0.1}), ({"layer": 1}, 2)]
        assert journal.identity == IDENTITY


def test_the_last_of_two_values_counts(path):
    with Journal.open(path, IDENTITY) as journal:
        journal.put("time", {}, 1)
        journal.put("time", {}, 2)
        assert journal.get("time", {}) == 2
    with Journal.read(path) as journal:
        assert journal.entries("time") == [({}, 2)]


def test_remember_measures_once_and_gives_what_a_resumed_run_gets(path):
    calls = []

    def measure():
        calls.append(1)
        return {"pair": (1, 0.1 + 0.2)}

    with Journal.open(path, IDENTITY) as journal:
        first = [journal.remember("time", {"tile": (64, 64)}, measure) for _ in range(2)]
        assert journal.reused == 0
    with Journal.open(path, IDENTITY) as journal:
        assert journal.remember("time", {"tile": [64, 64]}, measure) == first[0] == first[1] == {"pair": [1, 0.1 + 0.2]}
        assert journal.reused == 1
    assert len(calls) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"error": [-float("inf")]}, None])
def test_what_json_cannot_say_is_refused_and_leaves_no_trace(value, path):
    before = filled(path)
    with Journal.open(path, IDENTITY) as journal, pytest.raises(ValueError, match=r"not JSON compliant|not measured"):
        journal.put("curve", {}, value)
    assert path.read_bytes() == before


@pytest.mark.parametrize("seed", range(4))
def test_a_kill_loses_nothing_that_was_acknowledged(seed, path):
    """The same journal is killed and continued five times."""
    rng = random.Random(seed)
    acknowledged = []
    for _ in range(5):
        writer = start_writer(path)
        time.sleep(rng.uniform(0, 0.05))
        acknowledged += kill(writer)
        with Journal.open(path, IDENTITY) as journal:
            found = journal.entries("curve")
        assert [key["index"] for key, _ in found] == list(range(len(found)))
        # a kill between put and print leaves at most one entry a writer did not get to say
        assert set(acknowledged) <= set(range(len(found)))
        assert all(value == value_of(key["index"]) for key, value in found)
    assert len(acknowledged) > 5


def test_a_line_torn_anywhere_is_cut_back_and_measured_again(path):
    whole = filled(path)
    last = whole.rindex(b"\n", 0, -1) + 1
    for size in range(last, len(whole)):
        path.write_bytes(whole[:size])
        with Journal.read(path) as journal:
            assert len(journal.entries("curve")) == 2
        assert path.stat().st_size == size
        with Journal.open(path, IDENTITY) as journal:
            assert path.stat().st_size == last
            assert len(journal.entries("curve")) == 2
            journal.put("curve", {"layer": 2, "segment": 256}, [2, 0.1])
        assert path.read_bytes() == whole


def test_an_unreadable_last_line_is_cut_back_too(path):
    whole = filled(path)
    path.write_bytes(whole[:-20] + b"\0" * 19 + b"\n")
    with Journal.open(path, IDENTITY) as journal:
        assert len(journal.entries("curve")) == 2


def test_a_torn_header_starts_over(path):
    header = filled(path, 0)
    for size in range(len(header)):
        path.write_bytes(header[:size])
        with pytest.raises(InputError, match="is empty: calibrate first"):
            Journal.read(path)
        Journal.open(path, IDENTITY).close()
        assert path.read_bytes() == header


@pytest.mark.parametrize("damage", [b"}{", b"[]", b'{"kind": "curve", "key": {}}', b"", b"\xff", b"[" * 100_000])
def test_a_damaged_line_in_the_middle_is_named(damage, path):
    lines = filled(path).splitlines()
    path.write_bytes(b"\n".join([*lines[:2], damage, *lines[2:], b""]))
    before = path.read_bytes()
    for attempt in (lambda: Journal.open(path, IDENTITY), lambda: Journal.read(path)):
        with pytest.raises(InputError, match=r"demo\.journal\.jsonl:3 is damaged .*: delete that line"):
            attempt()
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"a text", b"a text\n", b'{"a": 1}\n', b'{"s2o_journal": 1}\n', b"\x80\0\0\n"])
def test_a_foreign_file_is_left_alone(content, path):
    path.write_bytes(content)
    for attempt in (lambda: Journal.open(path, IDENTITY), lambda: Journal.read(path)):
        with pytest.raises(InputError, match="is not a journal of S2O: give another --journal"):
            attempt()
    assert path.read_bytes() == content


def test_another_schema_is_refused(path):
    path.write_bytes(filled(path).replace(b'"s2o_journal": 1', b'"s2o_journal": 7'))
    with pytest.raises(InputError, match="has schema 7, this version writes schema 1"):
        Journal.open(path, IDENTITY)


def changed(**changes):
    return IDENTITY | changes


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        (changed(model={"name": "demo", "fingerprint": "b" * 64}), r"model\.fingerprint a{20}\.\., this run has b{20}"),
        (changed(device={"name": "H200"}, version="0.2"), r"device\.name cpu, this run has H200"),
        (changed(version="0.2"), r"version 0\.1, this run has 0\.2"),
        (changed(device={"name": "cpu", "count": 2}), r"device\.count null, this run has 2"),
        (changed(device="cpu"), r'device {"name": "cpu"}, this run has cpu'),
        ({"model": IDENTITY["model"], "version": "0.1"}, r'device {"name": "cpu"}, this run has null'),
    ],
)
def test_another_identity_is_refused_by_its_first_change(identity, message, path):
    before = filled(path) + b'{"torn'
    path.write_bytes(before)
    advice = ": give another --journal, or delete it to start over"
    with pytest.raises(InputError, match=message + ".*" + advice):
        Journal.open(path, identity)
    assert path.read_bytes() == before
    Journal.open(path, IDENTITY).close()


def test_two_runs_cannot_share_a_journal_until_the_first_is_dead(path):
    writer = start_writer(path)
    try:
        owner = rf"another run \(process {writer.pid}\)" if Path("/proc/locks").exists() else "another run"
        with pytest.raises(InputError, match=f"is being written by {owner}: wait for it"):
            Journal.open(path, IDENTITY)
    finally:
        kill(writer)
    Journal.open(path, IDENTITY).close()


def test_a_running_writer_can_be_read(path):
    writer = start_writer(path)
    try:
        for _ in range(20):  # anywhere in its lines
            index = int(writer.stdout.readline())
            with Journal.read(path) as journal:
                assert journal.get("curve", {"index": index}) == value_of(index)
                found = journal.entries("curve")
            assert [key["index"] for key, _ in found] == list(range(len(found)))
            assert all(value == value_of(key["index"]) for key, value in found)
    finally:
        kill(writer)


def test_a_reader_cannot_write(path):
    before = filled(path)
    with Journal.read(path) as journal, pytest.raises(ValueError, match="opened to be read only"):
        journal.put("curve", {}, 1)
    assert path.read_bytes() == before
    with pytest.raises(InputError, match=r"cannot be read \(No such file or directory\)"):
        Journal.read(path.with_name("none"))


FULL = r"cannot be written \(No space left on device\): free some space and run the same command again; what was"


@pytest.mark.parametrize("room", [0, 10])
def test_a_full_disk_is_one_sentence_and_nothing_half_written_stays(room, path, monkeypatch):
    before = filled(path)
    real, left = os.write, [room]

    def fills_up(descriptor, data):
        size = left.pop() if left else 0
        if not size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data[:size])

    with Journal.open(path, IDENTITY) as journal:
        monkeypatch.setattr(journal_module.os, "write", fills_up)
        with pytest.raises(InputError, match=FULL):
            journal.put("curve", {"layer": 9}, 1)
        monkeypatch.undo()
        assert not left
        assert journal.get("curve", {"layer": 9}) is None
        assert path.read_bytes() == before
        journal.put("curve", {"layer": 9}, 2)
    with Journal.read(path) as journal:
        assert journal.get("curve", {"layer": 9}) == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
def test_a_device_that_is_full(path):
    journal = Journal.open(path, IDENTITY)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, journal._descriptor)
    os.close(full)
    with journal, pytest.raises(InputError, match=FULL):
        journal.put("curve", {}, 1)


def test_a_file_that_may_not_grow(path):
    """The kernel writes a part of the line and refuses the rest; what was put before stays."""
    limit = 5000
    program = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n{WRITER}"
    outcome = subprocess.run(
        [sys.executable, "-c", program, str(path), json.dumps(IDENTITY)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert f"{path} cannot be written (File too large): make it writable" in outcome.stderr.splitlines()[-1]
    with Journal.open(path, IDENTITY) as journal:
        assert [str(key["index"]) for key, _ in journal.entries("curve")] == outcome.stdout.split()[1:]


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot be written \(File exists\): make it writable"):
        Journal.open(tmp_path / "file" / "journal.jsonl", IDENTITY)
    with pytest.raises(InputError, match="/dev/null is not a file"):
        Journal.open(Path("/dev/null"), IDENTITY)


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


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}")
def test_tensors_come_back_to_the_bit(tensor, path):
    with Journal.open(path, IDENTITY) as journal:
        journal.put("curve", {}, pack(tensor))
        found = unpack(journal.get("curve", {}))
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    as_bytes = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (found, tensor))
    assert torch.equal(*as_bytes)
    found.zero_()  # it is not read-only memory


@pytest.mark.parametrize(
    "damage",
    [
        {"shape": [2]}, {"shape": [4]}, {"shape": [-3]}, {"shape": [3.0]}, {"shape": 3}, {"shape": [True, 3]},
        {"shape": [1 << 62, 1 << 62]}, {"dtype": "float64"}, {"dtype": "load"}, {"dtype": "float3"}, {"dtype": 1},
        {"data": "!"}, {"data": "eJw="}, {"data": 3}, {"data": pack(torch.zeros(1 << 20))["data"]},
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_tensor_is_refused(damage):
    with pytest.raises(InputError, match="a tensor in the journal is damaged"):
        unpack(pack(torch.zeros(3)) | damage)
    with pytest.raises(InputError, match="is damaged"):
        unpack([damage])
    flipped = pack(torch.arange(100.0))
    flipped["data"] = flipped["data"][:50] + ("A" if flipped["data"][50] != "A" else "B") + flipped["data"][51:]
    with pytest.raises(InputError, match="is damaged"):
        unpack(flipped)


def test_a_journal_of_numbers_needs_no_torch():
    program = "import calibrate.journal, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
