"""scripts/bench/rehearsals.py at tiny sizes: what it records is a whole calibration's."""

import json

import pytest

from calibrate.model.models import load_config
from scripts.bench import rehearsals as bench
from scripts.bench.schema import RehearsalFile, read
from support.marks import all_but_first

SLOW = pytest.mark.slow(reason="calibrates more models")

ALWAYS = ["--tiny", "--device", "cpu", "--lengths", "512", "--num-prompts", "1", "--num-certify", "3", "--trials", "1"]


@pytest.mark.parametrize("name", all_but_first(["qwen3-30b-a3b", "gemma-3-12b", "gpt-oss-20b"], SLOW))
def test_a_model_is_calibrated_and_runs(name, tmp_path, capsys):
    out = tmp_path / "r.json"
    assert bench.main([*ALWAYS, "--models", name, "--budget-rel-mse", "0.3", "--out", str(out)]) == 0
    (row,) = read(RehearsalFile, json.loads(out.read_text())).rows
    assert row.failed is None
    assert row.layers["full_attention"] == (2 if name == "qwen3-30b-a3b" else 1)
    assert row.published_layers == load_config(name, random_weights=True).num_hidden_layers
    assert {"weights", "calibration", "calibration, certifying", "run"} <= row.seconds.keys()
    assert sum(taken for stage, taken in row.seconds.items() if "," in stage) <= row.seconds["calibration"]
    (length,) = row.lengths
    assert length.certify_prompts == 3
    assert length.s2o_layers == sum(density < 1 for density in length.density_of_layers) > 0
    assert length.density == pytest.approx(sum(length.density_of_layers) / len(length.density_of_layers))
    assert length.certified == row.met
    assert row.run.kl > 0  # S2O ran
    assert sum(path == "s2o" for _, path, _ in row.run.paths) == length.s2o_layers
    assert len(row.run.paths) == sum(row.layers.values())
    assert "a prompt: dense" in capsys.readouterr().out


def test_a_model_in_4_bits(tmp_path):
    """Its profile fits it in the strict sense, though bitsandbytes packs its weights anew when it first runs."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    out = tmp_path / "r.json"
    assert bench.main([*ALWAYS, "--models", "qwen2.5-7b:nf4", "--out", str(out)]) == 0
    (row,) = read(RehearsalFile, json.loads(out.read_text())).rows
    assert row.weights == "nf4, bitsandbytes"
    assert row.seconds["quantising"] > 0
    assert row.run.paths


def test_a_failure_is_recorded_and_the_others_go_on(tmp_path, capsys):
    """Gemma 3 has no layer of full attention among its first five."""
    out = tmp_path / "r.json"
    models = ["--models", "gemma-3-12b,qwen3-30b-a3b", "--layers", "1"]
    assert bench.main([*ALWAYS, *models, "--out", str(out)]) == 2
    failed, done = read(RehearsalFile, json.loads(out.read_text())).rows
    assert "has no layer of full_attention" in failed.failed
    assert failed.run is None
    assert done.failed is None
    assert done.layers == {"full_attention": 1}
    assert "has no layer of full_attention" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--models", "quantum"], "model 'quantum' is not known"),
        (["--models", "gpt-oss-20b", "--layers", "30"], "--layers 30 is more than the 24 of a model: use fewer"),
        (["--num-certify", "0"], "--num-certify is 0: use at least 1"),
    ],
)
def test_bad_options_are_one_sentence(options, sentence, tmp_path, capsys):
    assert bench.main([*ALWAYS, *options, "--out", str(tmp_path / "r.json")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"scripts.bench.rehearsals: {sentence}")
