"""scripts/bench/prefill.py at a tiny size: what it says was reached was reached."""

import json

import pytest

from scripts.bench import prefill as bench
from scripts.bench.schema import PrefillFile, read

SLOW = pytest.mark.slow(reason="times a model")


@SLOW
def test_a_model_is_timed_dense_and_at_a_density(tmp_path, capsys):
    out = tmp_path / "p.json"
    arguments = ["--models", "demo", "--lengths", "512", "--densities", "0.8", "--segment", "128", "--device", "cpu"]
    assert bench.main([*arguments, "--rounds", "1", "--steps", "3", "--out", str(out)]) == 0
    (entry,) = read(PrefillFile, json.loads(out.read_text())).results
    assert (entry.model, entry.length) == ("demo", 512)
    dense, sparse = entry.rows
    assert (dense.name, dense.density) == ("dense, cuDNN", 1.0)
    assert sparse.name == "S2O, density 0.8"
    assert 0.5 < sparse.density < 1.0  # a window is an eighth of the prompt, and three steps are few
    for row in (dense, sparse):
        assert row.attention_seconds == pytest.approx(row.share * row.seconds.median)
        assert row.share > 0.0
    assert "attention" in capsys.readouterr().out


def test_an_unknown_model_is_one_sentence(tmp_path, capsys):
    assert bench.main(["--models", "quantum", "--device", "cpu", "--out", str(tmp_path / "p.json")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("scripts.bench.prefill: model 'quantum' is not known")
