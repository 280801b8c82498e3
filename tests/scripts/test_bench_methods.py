"""scripts/bench/methods.py at a tiny size: what it says of a setting is what the setting does."""

import hashlib
import json
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from s2o_runtime.baselines import baseline_attention
from s2o_runtime.baselines.settings import parse
from s2o_runtime.profile.record import Record, RecordedBudget
from s2o_runtime.reference.dense import exact_attention
from scripts.bench import methods as bench
from scripts.bench.schema import LayerRow, MethodsFile, read
from support.pages import ROOT

LENGTH = 520
SETTING = "pbs:keep=0.6,segment=128,block=64"


@pytest.fixture(scope="module")
def qkv():
    generator = torch.Generator().manual_seed(0)
    heads_of = {"q": 4, "k": 2, "v": 2}
    return {name: torch.randn(1, heads, LENGTH, 64, generator=generator) for name, heads in heads_of.items()}


@pytest.fixture(scope="module")
def measured(qkv, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    file, out = folder / "qkv.safetensors", folder / "out.json"
    save_file({f"{layer}.{name}": tensor.clone() for layer in (0, 1) for name, tensor in qkv.items()}, file)
    methods = ["--methods", "dense", SETTING, "s2o", "published"]
    arguments = [*methods, "--data", str(file), "--lengths", str(LENGTH), "--device", "cpu", "--rounds", "1"]
    assert bench.main([*arguments, "--error-rows", str(LENGTH), "--out", str(out)]) == 0
    return read(MethodsFile, json.loads(out.read_text()))


def test_errors_and_densities_are_those_of_the_setting(measured, qkv):
    (entry,) = measured.results
    rows = {(row.method, row.setting): row for row in entry.rows}
    assert len(rows) == 2 + len(bench.TAUS) + len(bench.PUBLISHED_TAUS)
    row = rows["pbs", SETTING.partition(":")[2]]
    out, stats = baseline_attention(*qkv.values(), parse(SETTING))
    exact = exact_attention(*qkv.values())
    mse = float((out - exact).square().mean())
    assert row.mse == pytest.approx(mse, rel=1e-4)
    assert row.rel_mse == pytest.approx(mse / float(exact.square().mean()), rel=1e-4)
    assert row.density == pytest.approx(float(stats.density.mean()))
    assert 0.1 < row.density < 0.95
    assert rows[bench.DENSE, ""].rel_mse < 1e-10


def test_times_are_of_all_layers_and_selecting_is_part_of_them(measured):
    for row in measured.results[0].rows:
        assert [layer.layer for layer in row.layers] == [0, 1]
        assert row.seconds == pytest.approx(sum(layer.seconds for layer in row.layers))
        assert (row.selecting_seconds > 0) == (row.method == "pbs")
    assert measured.results[0].rows[0].speedup == 1.0


def test_profiles_stand_with_every_budget_and_guard(monkeypatch):
    record = Record(budget=RecordedBudget(kind="rel_mse", value=1e-3))
    profile = types.SimpleNamespace(record=record)
    monkeypatch.setattr(bench, "load_profile", lambda path: profile)
    rebudget = lambda *given: (str(given[1]), given[3:])  # noqa: E731
    monkeypatch.setattr("calibrate.profiles.rebudget.rebudget", rebudget)
    arguments = "--profile p --budgets 1e-4,1e-3 --worst-rows 0 --journal j"
    args = bench.parser().parse_args(arguments.split())
    method = "S2O, calibrated"
    assert bench.calibrated(args) == {
        (method, "rel_mse 0.001, proven"): profile,
        (method, "rel_mse 0.0001"): ("rel-mse-0.0001", (Path("j"), None)),
        (method, "rel_mse 0.0001, rows 0"): ("rel-mse-0.0001", (Path("j"), 0.0)),
        (method, "rel_mse 0.001, rows 0"): ("rel-mse-0.001", (Path("j"), 0.0)),
    }


def test_a_profile_is_told_by_the_digest_of_its_file():
    """As s2o-eval tells it; the same profile with another budget is of no file."""
    (shipped,) = (ROOT / "profiles/demo/cpu").glob("*.safetensors")
    (digest,) = bench.digests_of([shipped]).values()
    assert hashlib.sha256(shipped.read_bytes()).hexdigest().startswith(digest)
    key, other = ("S2O, calibrated", "mse 0.0001, proven"), ("S2O, calibrated", "mse 0.001")
    assert bench.digests_of([shipped]) == {key: digest}
    layer = LayerRow(0, 0.5, 0.0, 0.0, 0.0, 1.0, 0.0)
    rows = bench.all_layers({key: [layer], other: [layer]}, {key: digest})
    assert [row.profile for row in rows] == [digest, None]


def test_calibrated_layers_that_are_slower_run_dense():
    slow, fast, dense = (LayerRow(0, 0.5, 0.0, 0.0, 0.0, seconds, 0.0) for seconds in (2.0, 0.5, 1.0))
    calibrated = bench.LayerCall(lambda: None, lambda: 1.0, dense_if_slower=True)
    rows = {(bench.DENSE, ""): dense, ("a", ""): slow, ("b", ""): fast, ("c", ""): slow}
    calls = {("a", ""): calibrated, ("b", ""): calibrated, ("c", ""): bench.LayerCall(lambda: None, lambda: 1.0)}
    assert bench.dense_where_slower(rows, calls) == rows | {("a", ""): dense}
