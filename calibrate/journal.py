"""The journal of one calibration: every measurement is written down as it is made, one JSON line each.

A calibration is deterministic given its measurements, so resuming it is running the same command again: each
measurement that is already in the journal is taken from there. Keys do not name the budget, so another budget
finds the same measurements. A kill at any moment loses at most the line being written.

The first line is a header that says whose measurements these are; every other line is an entry:
    {"s2o_journal": 1, "identity": {...}}
    {"kind": "curve", "key": {"layer": 0, ...}, "value": ...}
"""

from __future__ import annotations

import base64
import errno
import fcntl
import json
import math
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from s2o_runtime.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = 1
HEADER_START = b'{"s2o_journal": '
SHOWN = 40  # characters of an identity's value in a message

T = TypeVar("T")
_Name = tuple[str, str]  # an entry's kind and its key as canonical JSON
_Place = tuple[int, int]  # an entry's line: offset and size in bytes


class Journal:
    """Measurements by kind and key, append-only. Only their places are kept in memory.

    path: the file; identity: whose measurements these are, as the header says it.
    """

    def __init__(self, path: Path, descriptor: int, *, writable: bool) -> None:
        self.path = path
        self.identity: dict[str, Any] = {}
        self._descriptor = descriptor
        self._writable = writable
        self._places: dict[_Name, _Place] = {}
        self._end = 0  # of the last whole line
        self._found_end = 0  # where the entries of earlier runs end
        self._reused: set[_Name] = set()

    @classmethod
    def open(cls, path: Path, identity: Mapping[str, Any]) -> Journal:
        """Create or continue the journal of `identity` (nested mappings of JSON values).

        A torn last line is cut off. Raises InputError if the file belongs to another identity or another run has
        it open, is not a journal, is damaged before its end, or cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise write_failure(path, error) from error
        journal = cls(path, descriptor, writable=True)
        try:
            journal._lock()
            journal._scan()
            journal._begin(json.loads(json.dumps(identity, allow_nan=False)))
        except BaseException:
            journal.close()
            raise
        return journal

    @classmethod
    def read(cls, path: Path) -> Journal:
        """What a journal holds now, without a lock, even while another process writes it.

        Raises InputError if the file cannot be read, is not a journal, or is damaged before its end.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise InputError(f"journal {path} cannot be read ({error.strerror}): check the path") from error
        journal = cls(path, descriptor, writable=False)
        try:
            journal._scan()
            if not journal._end:
                raise InputError(f"journal {path} is empty: calibrate first")
        except BaseException:
            journal.close()
            raise
        return journal

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and release its lock."""
        os.close(self._descriptor)

    @property
    def reused(self) -> int:
        """How many different measurements of earlier runs were asked for and found."""
        return len(self._reused)

    def get(self, kind: str, key: Mapping[str, Any]) -> Any | None:
        """The value last put under this kind and key, as JSON gives it back, or None."""
        name = (kind, _canonical(key))
        place = self._places.get(name)
        if place is None:
            return None
        if place[0] < self._found_end:
            self._reused.add(name)
        return self._entry(place)["value"]

    def put(self, kind: str, key: Mapping[str, Any], value: Any) -> None:
        """Write a measurement down; once this returns, it is on the disk.

        Raises ValueError for None and for numbers that are not finite, InputError if the file cannot be written.
        """
        if not self._writable:
            raise ValueError(f"journal {self.path} was opened to be read only")
        if value is None:
            raise ValueError(f"the value of {kind} is None, which means not measured")
        name = (kind, _canonical(key))
        self._places[name] = self._append(_line({"kind": kind, "key": key, "value": value}))

    def remember(self, kind: str, key: Mapping[str, Any], measure: Callable[[], T]) -> T:
        """The value under this kind and key; where there is none, it is measured and put.

        Either way it is what JSON gives back (tuples become lists), so that a resumed run sees what the first saw.
        """
        if (kind, _canonical(key)) not in self._places:
            self.put(kind, key, measure())
        value: T = self.get(kind, key)  # type: ignore[assignment]  # there is one now
        return value

    def entries(self, kind: str) -> list[tuple[dict[str, Any], Any]]:
        """All keys and values of a kind, in the order in which they were first put."""
        found = (self._entry(place) for (each, _), place in self._places.items() if each == kind)
        return [(entry["key"], entry["value"]) for entry in found]

    def _lock(self) -> None:
        """Lock the file for as long as this process lives and has it open."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = _lock_owner(self._descriptor)
            who = "another run" if owner is None else f"another run (process {owner})"
            raise InputError(
                f"journal {self.path} is being written by {who}: wait for it, or give another --journal"
            ) from error
        except OSError as error:
            raise write_failure(self.path, error) from error

    def _scan(self) -> None:
        """Find the header and all entries up to a torn last line."""
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            raise InputError(f"journal {self.path} is not a file: give another --journal")
        with open(self._descriptor, "rb", closefd=False) as file:
            if self._scan_header(file):
                self._scan_entries(file)
        self._found_end = self._end

    def _scan_header(self, file: BinaryIO) -> bool:
        """Read the header; False if there is none yet, or only a part of one."""
        line = file.readline()
        begins_well = line[: len(HEADER_START)] == HEADER_START[: len(line)]
        if begins_well and not line.endswith(b"\n"):
            return False
        try:
            header = json.loads(line) if begins_well else {}
            schema, identity = header["s2o_journal"], header["identity"]
        except (ValueError, KeyError, RecursionError):
            raise InputError(f"{self.path} is not a journal of S2O: give another --journal") from None
        if schema != SCHEMA or not isinstance(identity, dict):
            raise InputError(
                f"journal {self.path} has schema {schema}, this version writes schema {SCHEMA}: "
                "give another --journal, or delete it to start over"
            )
        self.identity = identity
        self._end = len(line)
        return True

    def _scan_entries(self, file: BinaryIO) -> None:
        """Note where every entry lies. What is not ended, or not readable and the last, was torn: it is left out."""
        number = 1
        while (line := file.readline()).endswith(b"\n"):
            number += 1
            try:
                name = _name_of(line)
            except (ValueError, RecursionError) as error:
                if not file.readline():
                    return
                raise InputError(
                    f"{self.path}:{number} is damaged ({error}): delete that line to measure it again"
                ) from error
            self._places[name] = (self._end, len(line))
            self._end += len(line)

    def _begin(self, identity: dict[str, Any]) -> None:
        """Compare the header, cut off a torn line, and write the header if there is none yet."""
        change = _first_change(self.identity, identity)
        if self._end and change:
            name, old, new = change
            raise InputError(
                f"journal {self.path} was made with {name} {_shown(old)}, this run has {_shown(new)}: "
                "give another --journal, or delete it to start over"
            )
        try:
            os.ftruncate(self._descriptor, self._end)
        except OSError as error:
            raise write_failure(self.path, error) from error
        if not self._end:
            self.identity = identity
            self._append(_line({"s2o_journal": SCHEMA, "identity": identity}))

    def _append(self, line: bytes) -> _Place:
        """Write a line and wait until it is on the disk; what a failure left of it is cut off."""
        begin = self._end
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            os.fsync(self._descriptor)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, begin)
            raise write_failure(self.path, error) from error
        self._end += len(line)
        return begin, len(line)

    def _entry(self, place: _Place) -> dict[str, Any]:
        offset, size = place
        entry: dict[str, Any] = json.loads(os.pread(self._descriptor, size, offset))
        return entry


def write_failure(path: Path | str, error: OSError) -> InputError:
    """The one sentence for a file of this run that could not be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return InputError(
        f"{path} cannot be written ({error.strerror}): {'free some space' if full else 'make it writable'} "
        "and run the same command again; what was measured so far is kept"
    )


def pack(tensor: Tensor) -> dict[str, Any]:
    """A tensor of any shape and dtype as a JSON value, exact to the bit: its bytes, compressed, in base64.

    The bytes are in this machine's order, which is little-endian on everything torch is built for.
    """
    import torch  # here, so that a journal of plain numbers is read without it

    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "data": base64.b64encode(zlib.compress(data)).decode("ascii"),
    }


def unpack(value: Any) -> Tensor:
    """The tensor that was packed, on the CPU. Raises InputError if the value is not one or its sizes do not fit."""
    import torch

    try:
        dtype, shape = getattr(torch, value["dtype"]), value["shape"]
        if not isinstance(dtype, torch.dtype) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"dtype {value['dtype']!r} with shape {shape!r}")
        expected = math.prod(shape) * dtype.itemsize
        inflate = zlib.decompressobj()
        data = inflate.decompress(base64.b64decode(value["data"], validate=True), expected + 1)
        if len(data) != expected or not inflate.eof:
            raise ValueError(f"not the {expected} bytes of {value['dtype']} {shape}")
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, zlib.error) as error:
        raise InputError(
            f"a tensor in the journal is damaged ({error}): delete its line to measure it again"
        ) from error
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _canonical(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _line(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, allow_nan=False).encode() + b"\n"


def _name_of(line: bytes) -> _Name:
    """The kind and key of an entry's line. Raises ValueError if it is not an entry."""
    entry = json.loads(line)
    if not isinstance(entry, dict) or set(entry) != {"kind", "key", "value"}:
        raise ValueError("expected an object with kind, key and value")
    return str(entry["kind"]), _canonical(entry["key"])


def _first_change(old: Any, new: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """(dotted name, old, new) of the first field that differs, None for one that is not there."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return None if old == new else (name, old, new)
    names: Iterable[str] = dict.fromkeys([*new, *old])
    changes = (_first_change(old.get(each), new.get(each), f"{name}.{each}" if name else each) for each in names)
    return next((change for change in changes if change), None)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]}.."


def _lock_owner(descriptor: int) -> int | None:
    """The process that holds the lock, where the system says so (Linux, the same container)."""
    status = os.fstat(descriptor)
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if "FLOCK" in fields and file in fields:
                owner = int(fields[fields.index(file) - 1])
                return owner if owner > 0 else None
    return None
