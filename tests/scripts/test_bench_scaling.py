"""The bench that compares one GPU with several: what it calls the same."""

import json
import sqlite3
from contextlib import closing

import pytest
import torch
from safetensors.torch import save_file

from scripts.bench.scaling import TIMES, _same_entries, _with_times_of, profile_differences


def written(path, tau, **record):
    save_file({"tau": torch.tensor([tau])}, path, {"s2o": json.dumps(record)})
    return path


def test_profiles_that_differ_in_times_alone_are_the_same(tmp_path):
    one = written(tmp_path / "1", 1.0, layers=[{"mse": 1.0, "seconds": 0.5}])
    assert profile_differences(one, written(tmp_path / "2", 1.0, layers=[{"mse": 1.0, "seconds": 0.7}])) == []
    assert profile_differences(one, written(tmp_path / "3", 2.0, layers=[{"mse": 1.0}])) == ["tensor tau"]
    assert profile_differences(one, written(tmp_path / "4", 1.0, layers=[{"mse": 2.0}])) == [
        "s2o.layers[0].mse: 1.0 and 2.0"
    ]
    assert profile_differences(one, tmp_path / "none") == [f"{tmp_path / 'none'} was not written"]


@pytest.fixture
def journals(tmp_path):
    """Two journals with the same curves but one, and times of their own."""
    paths = [tmp_path / "one", tmp_path / "many"]
    for number, path in enumerate(paths):
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("CREATE TABLE entries (kind TEXT, key TEXT, value TEXT, tensors BLOB)")
            rows = [("curves", "a", "same", b"1"), ("curves", "b", f"of {number}", b"2")]
            rows += [(kind, f"{kind} {number}", "t", None) for kind in TIMES]
            database.executemany("INSERT INTO entries VALUES (?, ?, ?, ?)", rows)
    return paths


def test_entries_are_compared_to_the_last_bit(journals):
    assert _same_entries(*journals, "curves") == (1, 2)


def test_a_replay_has_the_times_of_one_and_the_rest_of_many(journals, tmp_path):
    _with_times_of(*journals, tmp_path / "replay")
    with closing(sqlite3.connect(tmp_path / "replay")) as database:
        rows = dict(database.execute("SELECT key, value FROM entries").fetchall())
    assert rows == {"a": "same", "b": "of 1"} | {f"{kind} 0": "t" for kind in TIMES}
