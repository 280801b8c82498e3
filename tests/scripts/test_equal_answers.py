"""scripts/bench/equal_answers.py: the setting whose KL of answers is S2O's, and the ladder's end where none is."""

import json

import pytest

from calibrate.evaluation.plan import EvaluationPlan
from calibrate.evaluation.run import list_variants
from scripts.bench import equal_answers as bench
from scripts.bench.methods import LADDERS
from support.pages import DEMO_PROFILE
from support.processes import called


@pytest.mark.parametrize(("method", "field"), [("pbs", "keep"), ("flash-prefill", "alpha")])
def test_the_number_is_found_between_the_ends_of_its_ladder(method, field):
    """Of keep a larger number is more exact, of alpha a smaller one."""

    def measure(variant):
        number = getattr(variant.baseline, field)
        return 1e-3 * (1 - number if field == "keep" else number) ** 2

    setting, kl = bench.find_setting(measure, method, target=1e-5)
    assert kl == pytest.approx(1e-5, rel=0.03)
    assert float(setting.partition("=")[2]) == pytest.approx(0.9 if field == "keep" else 0.1, rel=0.03)
    ends = sorted(LADDERS[method][1], reverse=field == "keep")
    for target, end in ((1e-12, ends[0]), (1.0, ends[-1])):
        assert bench.find_setting(measure, method, target)[0] == f"{method}:{field}={end:g}"


def test_every_baseline_is_set_to_the_answers_of_the_profile(tmp_path, monkeypatch):
    """The command that asks all of them has these settings."""

    def measure_kl(variant):
        return 1e-2 * (1 - variant.baseline.keep) ** 2 if variant.baseline else 1e-3

    monkeypatch.setattr(bench, "prepare", lambda *_: measure_kl)
    flags = "--length 1100 --methods pbs --device cpu --out rows.json --profile"
    outcome = called(bench.main, *flags.split(), DEMO_PROFILE, cwd=tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    (row,) = json.loads((tmp_path / "rows.json").read_text())["results"]
    keep = float(row["setting"].removeprefix("pbs:keep="))
    assert keep == pytest.approx(1 - 0.1**0.5, abs=0.01)
    assert row["kl"] == pytest.approx(1e-3, rel=0.03)
    assert "--tasks needles,questions --num-prompts 10 --num-needles 32" in outcome.stdout
    assert f"--setting {row['setting']}\n" in outcome.stdout


def test_the_divergence_of_answers_is_that_of_the_prefill_alone(demo, tmp_path):
    plan = EvaluationPlan("demo", tmp_path, (400,), settings=("tau=0,segment=64", "pbs:keep=0.2")).validate()
    exact, sparse = map(bench.prepare(demo, 400, 1), list_variants(plan, demo)[1:])
    assert exact < 1e-8 < 1e-4 < sparse
