"""scripts/bench/int8.py at a tiny size: what it records is consistent, and one failure does not stop the rest."""

import json

import pytest

from scripts.bench import int8 as bench
from scripts.bench.schema import Int8File, read

TINY = ["--device", "cpu", "--segment", "64", "--rounds", "1", "--steps", "2", "--error-rows", "20"]
TINY += ["--shapes", "2/1/64", "--lengths", "200", "--densities", "0.5"]


@pytest.fixture(autouse=True)
def one_short_check(monkeypatch):
    monkeypatch.setattr(bench, "CHECKED", ((2, 1, 70, 130, 64, None),))


def measured(out, *arguments):
    code = bench.main([*TINY, "--out", str(out), *arguments])
    return code, read(Int8File, json.loads(out.read_text()))


def test_both_kinds_of_scores_are_in_the_record(tmp_path, capsys):
    code, file = measured(tmp_path / "b.json")
    assert code == 0
    assert list(file.checks.values()) == [0.0]  # without a GPU both are the reference
    assert file.failures == {}
    (entry,) = file.results
    assert [(row.scores, row.target) for row in entry.rows] == [
        (scores, target) for target in ("dense", "never stop", "0.5") for scores in ("input", "int8")
    ]
    plain, int8 = entry.rows[2:4]
    assert plain.density == int8.density == 1.0
    assert 2 * plain.rel_mse < int8.rel_mse < 1e-3
    assert all(row.rate == pytest.approx(row.density * row.dense_seconds / row.seconds) for row in entry.rows)
    assert capsys.readouterr().out.count("of cuDNN") == 6


def test_a_failure_is_kept_and_the_rest_goes_on(tmp_path, capsys, monkeypatch):
    attention = bench.s2o_attention

    def failing(q, k, v, config, **options):
        if config.scores == "int8" and not config.is_dense and q.shape[2] == 200:
            raise RuntimeError("no such kernel")
        return attention(q, k, v, config, **options)

    monkeypatch.setattr(bench, "s2o_attention", failing)
    code, file = measured(tmp_path / "b.json")
    assert code == 2
    (entry,) = file.results
    assert [(row.scores, row.target) for row in entry.rows] == [
        ("input", "dense"), ("int8", "dense"), ("input", "never stop"), ("input", "0.5"),
    ]  # fmt: skip
    assert set(file.failures.values()) == {"no such kernel"}
    assert "2 of the checks and measurements failed" in capsys.readouterr().err


def test_a_kernel_that_is_off_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "off_the_reference", lambda *arguments: float("nan"))
    code, file = measured(tmp_path / "b.json", "--only-check")
    assert code == 2
    assert len(file.failures) == 1
    assert file.results == []
