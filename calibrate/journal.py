"""The journal of one calibration: an SQLite file that keeps every measurement from the moment it is made.

What the journal holds is not measured again. Keys do not name the error budget, so another budget uses the same
measurements. Each measurement is one transaction: a kill at any moment loses at most the one being written. A writer
holds SQLite's lock on an empty database beside it (FILE.lock, which only a kill leaves) while it has the journal open.
The journal itself is locked during a commit only: others can read it meanwhile.
"""

from __future__ import annotations

import errno
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

from s2o_runtime.errors import InputError, ResourceError

if TYPE_CHECKING:
    from s2o_runtime.devices import DeviceIdentity

SCHEMA = 3  # of the tables and of what keys say
APPLICATION_ID = 0x53324F4A  # "S2OJ", where SQLite's header has room for it
TABLES = (
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA}",
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE entries (kind TEXT, key TEXT, value TEXT NOT NULL, tensors BLOB, PRIMARY KEY (kind, key))",
)
# a value that is put again keeps its row, so entries stay in the order in which they were first put
PUT = """INSERT INTO entries VALUES (?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET value = excluded.value, tensors = excluded.tensors"""
LOCK_TIMEOUT_S = 60  # to wait for another process's commit or read
TENSOR = "$tensor"  # {"$tensor": name} stands in a value's JSON where the value has a tensor
SHOWN = 40  # characters of an identity's value in an error message


class Journal:
    """Measurements by kind and key. A key is a JSON object; a value is JSON that may hold tensors anywhere.

    Attributes:
        path: the file.
        identity: the model, device and versions of the measurements, as the file has it.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any] | None, option: str = "--journal") -> None:
        """Open a journal, with `identity` to write it, without to read only. Use `open` or `read`."""
        self.path, self._writable = path, identity is not None
        self._option = option  # the command's option that names another file, for error messages
        self.identity: dict[str, Any] = {}
        self._lock = RLock()  # threads of one process may use it, one at a time
        self._put: set[tuple[str, str]] = set()  # kinds and keys of this run's measurements
        self._reused: set[tuple[str, str]] = set()  # and of those of earlier runs that it used
        if path.exists() and not path.is_file():
            raise InputError(f"journal {path} is not a file: give another {option}")
        self._connections = ExitStack()
        lock_path = path.with_name(f"{path.name}.lock")
        with self._convert_errors(), self._connections:  # closed again if anything fails
            if self._writable:
                lock = self._connect(lock_path, "rwc", timeout=0)
                lock.execute("PRAGMA journal_mode = MEMORY")  # so that a kill leaves no third file
                lock.execute("BEGIN EXCLUSIVE")
                if not lock_path.exists():  # the run that held it deleted it after it was opened here
                    raise sqlite3.OperationalError("locked")
                self._connections.callback(lock_path.unlink, missing_ok=True)  # before the connection lets go
            # readers too open the file for writing: they undo what a killed writer left half done
            self._database = self._connect(path, "rwc" if self._writable else "rw", timeout=LOCK_TIMEOUT_S)
            self._check(identity)
            self._connections = self._connections.pop_all()

    @classmethod
    def open(cls, path: Path, identity: Mapping[str, Any], *, option: str = "--journal") -> Journal:
        """Create or continue the journal of `identity` (nested mappings of JSON values), with its folder.

        option: the command's option for another file, for messages.

        Raises:
            InputError: the file belongs to another identity, is not a journal of this version of S2O, or is damaged.
            ResourceError: another run has it open, or it cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise make_write_error(path, error) from error
        return cls(path, json.loads(json.dumps(identity, allow_nan=False)), option)

    @classmethod
    def read(cls, path: Path) -> Journal:
        """Open a journal to read it, even while another process writes it. Raises InputError if it is none."""
        return cls(path, None)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and let other writers in."""
        self._connections.close()

    @property
    def reused(self) -> int:
        """The number of different measurements of earlier runs that were asked for and found."""
        return len(self._reused)

    def get(self, kind: str, key: Mapping[str, Any]) -> Any | None:
        """Return the value last put under a kind and key, as JSON gives it back (tuples as lists), or None."""
        name = kind, _encode_key(key)
        rows = self._select("SELECT value, tensors FROM entries WHERE kind = ? AND key = ?", *name)
        if rows and name not in self._put:
            self._reused.add(name)
        return self._decode(*rows[0]) if rows else None

    def keys(self, kind: str) -> list[dict[str, Any]]:
        """Return all keys of a kind, in the order in which they were first put."""
        return [
            json.loads(key) for (key,) in self._select("SELECT key FROM entries WHERE kind = ? ORDER BY rowid", kind)
        ]

    def put(self, kind: str, key: Mapping[str, Any], value: Any) -> None:
        """Write a measurement down as `put_all` does."""
        self.put_all(kind, [(key, value)])

    def put_all(
        self,
        kind: str,
        entries: Sequence[tuple[Mapping[str, Any], Any]],
        instead_of: Sequence[tuple[str, Mapping[str, Any]]] = (),
    ) -> None:
        """Write measurements down, keys and values, all of them or none; once this returns, they are on the disk.

        instead_of: kinds and keys of entries that these take the place of.

        Raises:
            ValueError: a value is None, which means not measured, or holds a number that is not finite.
            ResourceError: the file cannot be written; none of the measurements is in it then.
        """
        if not self._writable:
            raise ValueError(f"journal {self.path} was opened to be read only")
        if any(value is None for _, value in entries):
            raise ValueError(f"the value of {kind} is None, which means not measured")
        rows = [(kind, _encode_key(key), *_encode(value)) for key, value in entries]
        replaced = [(old_kind, _encode_key(key)) for old_kind, key in instead_of]
        with self._lock, self._convert_errors(), self._database:
            self._database.execute("BEGIN")
            self._database.executemany(PUT, rows)
            self._database.executemany("DELETE FROM entries WHERE kind = ? AND key = ?", replaced)
        self._put |= {(kind, key) for _, key, *_ in rows}

    def entries(self, kind: str) -> list[tuple[dict[str, Any], Any]]:
        """Return all keys and values of a kind, in the order in which they were first put."""
        rows = self._select("SELECT key, value, tensors FROM entries WHERE kind = ? ORDER BY rowid", kind)
        return [(json.loads(key), self._decode(value, tensors)) for key, value, tensors in rows]

    def _connect(self, path: Path, mode: str, timeout: float) -> sqlite3.Connection:
        uri = f"{path.absolute().as_uri()}?mode={mode}"
        # each statement is committed
        database = sqlite3.connect(uri, uri=True, timeout=timeout, isolation_level=None, check_same_thread=False)
        return self._connections.enter_context(closing(database))

    def _check(self, identity: Mapping[str, Any] | None) -> None:
        """Read the file's identity, or create its tables; refuse what is not the journal that is meant."""
        # no write-ahead log, which needs memory that all processes share: network disks do not give it
        self._database.execute("PRAGMA synchronous = EXTRA")  # a commit waits for the disk, and for the folder too
        with self._database:  # one transaction
            self._database.execute("BEGIN")
            application, schema, tables = (
                self._select(query)[0][0]
                for query in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
            )
            if not (application or tables):
                if identity is None:
                    raise InputError(f"journal {self.path} is empty: calibrate first")
                for statement in TABLES:
                    self._database.execute(statement)
                self._database.execute("INSERT INTO meta VALUES ('identity', ?)", (json.dumps(identity),))
            elif application != APPLICATION_ID:
                raise self._make_foreign_error("another program's database")
            elif schema != SCHEMA:
                version = f"{'an older' if schema < SCHEMA else 'a newer'} version of S2O"
                raise self._make_error(f"is of {version} (schema {schema}, this one has {SCHEMA})")
            (problem,) = self._select("PRAGMA quick_check(1)")[0]
            if problem != "ok":
                raise sqlite3.DatabaseError(" ".join(problem.split()))
            self.identity = json.loads(self._select("SELECT value FROM meta WHERE name = 'identity'")[0][0])
        if identity is not None and (change := _find_change(self.identity, identity)):
            name, *values = change
            texts = (value if isinstance(value, str) else json.dumps(value) for value in values)
            old, new = (text if len(text) <= SHOWN else f"{text[: SHOWN // 2]}.." for text in texts)
            raise self._make_error(f"was made with {name} {old}, this run has {new}")

    def _select(self, query: str, *values: str) -> list[Any]:
        with self._lock, self._convert_errors():
            return self._database.execute(query, values).fetchall()

    def _decode(self, text: str, tensors: bytes | None) -> Any:
        try:
            if tensors is None:
                return json.loads(text)
            from safetensors.torch import load  # here, so that a journal of plain numbers is read without torch

            named = load(tensors)
            return json.loads(text, object_hook=lambda item: named[item[TENSOR]] if TENSOR in item else item)
        except Exception as error:
            raise self._make_error(f"is damaged ({error})") from error

    @contextmanager
    def _convert_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            if not self._writable:
                raise InputError(f"journal {self.path} cannot be read ({error}): check the path") from error
            if "locked" in str(error):
                raise ResourceError(
                    f"journal {self.path} is being written by another run: wait for it, or give another {self._option}"
                ) from error
            if self.identity and (not self.path.exists() or "DBMOVED" in getattr(error, "sqlite_errorname", "")):
                raise ResourceError(
                    f"journal {self.path} was removed or replaced during this run, and what was measured is lost: run "
                    "the same command again"
                ) from error
            code = errno.ENOSPC if "full" in str(error) else errno.EIO
            raise make_write_error(self.path, OSError(code, str(error))) from error
        except sqlite3.DatabaseError as error:
            if "not a database" in str(error):
                raise self._make_foreign_error("no database") from error
            raise self._make_error(f"is damaged ({error})") from error

    def _make_error(self, problem: str) -> InputError:
        return InputError(f"journal {self.path} {problem}: give another {self._option}, or delete it to start over")

    def _make_foreign_error(self, content: str) -> InputError:
        return InputError(f"{self.path} is not a journal of S2O (found {content}): give another {self._option}")


def gpu_key(device: DeviceIdentity) -> dict[str, Any]:
    """Return the GPU's part of the key of a time: times of unlike GPUs are never mixed."""
    return {"gpu": [device.name, device.sm_count, round(device.memory_bytes / 2**30)]}


def make_write_error(path: Path | str, error: OSError) -> ResourceError:
    """Return the error of a file of this run that could not be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return ResourceError(
        f"{path} cannot be written ({error.strerror}): {'free some space' if full else 'make it writable'} "
        "and run the same command again; what was measured so far is kept"
    )


def _encode_key(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _encode(value: Any) -> tuple[str, bytes | None]:
    """Return a value as JSON, and its tensors as one safetensors document, None if there are none."""
    tensors: dict[str, Any] = {}

    def set_aside(tensor: Any) -> dict[str, str]:
        if not hasattr(tensor, "contiguous"):
            raise TypeError(f"a {type(tensor).__name__} is neither JSON nor a tensor")
        tensors[name := str(len(tensors))] = tensor.detach().cpu().contiguous()
        return {TENSOR: name}

    text = json.dumps(value, allow_nan=False, default=set_aside)
    if not tensors:
        return text, None
    from safetensors.torch import save

    return text, save(tensors)


def _find_change(old: Any, new: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """Return (dotted name, old, new) of the first field that differs; None stands for a field that is missing."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return None if old == new else (name, old, new)
    fields = dict.fromkeys([*new, *old])
    changes = (_find_change(old.get(field), new.get(field), f"{name}.{field}".strip(".")) for field in fields)
    return next(filter(None, changes), None)
