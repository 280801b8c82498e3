"""Baselines in a calibration: what is measured of them is true, and heads take them where they are cheaper."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from calibrate.curves import baselines
from calibrate.curves.costs import baseline_cost
from calibrate.curves.curves import Curve, Ranking, Shape, mean_curve, methods, packed, unpacked
from calibrate.curves.measure import recipe_key
from calibrate.curves.passes import measure
from calibrate.curves.row_errors import row_errors
from calibrate.model.capture import Captured
from calibrate.pipeline import calibrate
from calibrate.recipe import Recipe
from calibrate.search.allocate import Allowed, allocate, points_of
from calibrate.search.choice import allowed
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.baselines.settings import PBS, FlashPrefill, Prism, SkipSoftmax, Sparge
from s2o_runtime.config import LayerConfig, TileConfig
from s2o_runtime.errors import ConfigError, InputError
from s2o_runtime.profile import load_profile
from s2o_runtime.reference.dense import dense_attention
from support.executors import CPU
from support.tiny import recipe as tiny_recipe
from support.tiny import save_tiny

SLOW = pytest.mark.slow(reason="runs a whole calibration")

METHOD = Ranking(128, 1, 4)


def prompt(length=700, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(heads, rows):
        return torch.randn(1, heads, rows, 16, generator=generator)

    return Captured(randn(2, length) + 3 * randn(2, 1), randn(1, length), randn(1, length), 0.25)


@pytest.mark.parametrize(
    "settings",
    [
        PBS(keep=0.6, segment=128),
        FlashPrefill(0.8, 64, first=0, window=1, last=0),
        Prism(0.6),
        SkipSoftmax(1e6, 64),
    ],
    ids=str,
)
def test_a_setting_is_measured_as_it_runs(settings):
    some = prompt()
    curve = baselines.measure(some, (settings,), timed=False)[settings]
    config = LayerConfig.uniform(2, segment=128, tile=TileConfig(64, 64, 2))
    head = replace(config.heads[0], mode="baseline", baseline=settings)
    out, _, stats = s2o_attention(
        some.q, some.k, some.v, replace(config, heads=(head,) * 2), scale=some.scale, return_stats=True
    )
    dense = dense_attention(some.q, some.k, some.v, scale=some.scale)
    assert_close(curve.mse[:, 0], (out - dense).double().square().mean((0, 2, 3)))
    assert_close(curve.density[:, 0], stats.density, rtol=0.01, atol=0)
    assert 0.1 < float(curve.density.mean()) < 0.95
    worst = row_errors(out, dense)[0].unfold(-1, 60, 64).amax(-1).amax(-1)  # eleven tiles: the worst counts
    assert (curve.worst[:, 0] >= worst.double() - 1e-6).all()
    assert_close(curve.cost, baseline_cost(curve.density))
    assert curve.dense_power == pytest.approx(float(dense.square().mean()), rel=1e-5)


def test_journals_keep_them_and_means_are_careful():
    settings = (PBS(keep=0.6, segment=128), Sparge(keep=0.5, skip=-6.0))
    of_prompts = [baselines.measure(prompt(seed=seed), settings, timed=False) for seed in (0, 1)]
    for each in settings:
        both = mean_curve([found[each] for found in of_prompts])
        errors = torch.stack([found[each].mse for found in of_prompts])
        assert_close(both.mse, errors.mean(0) + errors.std(0, correction=0))
        assert_close(both.cost, torch.stack([found[each].cost for found in of_prompts]).mean(0))
        again = unpacked(packed({(each, None): both}))[each, None]
        assert_close(again.cost, both.cost, rtol=1e-6, atol=0)
        assert_close(again.worst, both.worst, rtol=1e-6, atol=0)
    untimed = replace(both, cost=None)
    assert unpacked(packed({(each, None): untimed}))[each, None].cost is None
    assert_close(mean_curve([both, untimed]).cost, both.cost)  # only one prompt is timed


def curve(mse, cost, worst=0.0):
    column = torch.tensor([[mse], [mse]], dtype=torch.float64)
    return Curve(column, column, column * 0 + worst, column * 0 + worst, column * 0 + 0.25, 1.0, column * 0 + cost)


@pytest.fixture(scope="module")
def ours():
    return {METHOD: measure(prompt(), [METHOD], [SHAPE])[METHOD, SHAPE]}


SHAPE = Shape(64, 128)


def test_a_head_takes_what_is_cheapest_within_its_budget(ours):
    budget, alone = 1e-3, allocate(ours, 1e-3)
    assert all(head.mode != "baseline" for head in alone.heads)
    cheap, dear = PBS(keep=0.9), Sparge(keep=0.9)
    mixed = allocate(ours | {cheap: curve(budget / 2, 0.01), dear: curve(budget / 2, 0.99)}, budget)
    assert [head.baseline for head in mixed.heads] == [cheap, cheap]
    assert mixed.mse <= budget
    assert mixed.cost < alone.cost
    assert [head.segment for head in mixed.heads] == [128, 128]
    assert allocate(ours | {dear: curve(budget / 2, 0.99)}, budget) == alone
    assert allocate(ours | {cheap: curve(1.0, 0.01)}, budget) == alone  # beyond the budget
    assert allocate(ours | {cheap: curve(0.0, 0.01, worst=0.6)}, budget, Allowed(worst_rows=0.5)) == allocate(
        ours, budget, Allowed(worst_rows=0.5)
    )


def test_without_s2o_a_head_is_a_baselines_or_dense(ours):
    other = PBS(keep=0.9)
    points = points_of(ours | {other: curve(1e-4, 0.5)}, 0, Allowed(s2o=False))
    assert [point.head.mode for point in points] == ["dense", "baseline"]


@pytest.mark.parametrize(
    ("method", "s2o", "others"),
    [
        ("s2o", True, 0),
        ("flash-prefill", False, 5),
        ("prism", False, 5),
        ("pbs", False, 5),
        ("sparge", False, 20),
        ("skip-softmax", False, 8),
        ("auto", True, 43),
    ],
)
def test_what_each_method_lets_heads_choose(method, s2o, others):
    made = Recipe.of({"model": "demo", "budget_mse": 1e-4, "lengths": (1024,), "out": Path("x"), "method": method})
    assert allowed(made).s2o is s2o
    settings = baselines.settings_of(method)
    assert len(set(settings)) == others
    key = recipe_key(made, 1024, CPU)
    assert len(key.get("baselines", ())) == others
    assert ("gpu" in key) is bool(others)  # they are timed
    assert all(each.validate() for each in settings)


def test_an_unknown_method_is_refused():
    with pytest.raises(
        ConfigError, match="method is 'quantum': expected one of s2o, flash-prefill, prism, pbs, sparge"
    ):
        Recipe.of({"model": "demo", "budget_mse": 1e-4, "lengths": (1024,), "out": Path("x"), "method": "quantum"})


def test_baselines_belong_to_every_search_point(ours):
    curves = {(METHOD, SHAPE): ours[METHOD], (FlashPrefill(), None): curve(0.1, 0.5)}
    assert set(methods(curves, 128, 4, SHAPE)) == {METHOD, FlashPrefill()}
    assert methods(curves, 256, 4, SHAPE) == {}  # as if nothing were measured there


@SLOW
@pytest.mark.parametrize("method", ["pbs", "flash-prefill", "prism", "auto"])
def test_a_calibration_with_baselines_is_proven_and_read_again(tmp_path, monkeypatch, method):
    folder = save_tiny(tmp_path / "model")
    few = {
        "pbs": (PBS(keep=0.9, segment=128, block=64),),
        "flash-prefill": (FlashPrefill(0.5, 64, first=1, window=1, last=1),),
        "prism": (Prism(0.8, block=64),),
        "auto": (PBS(keep=0.9, segment=128, block=64), SkipSoftmax(1e4, 64)),
    }
    monkeypatch.setattr(baselines, "_SETTINGS", few)
    monkeypatch.setattr(baselines, "baseline_cost", lambda density: density * 0.2)  # so that it is worth it
    changes = {"method": method, "trials": 2, "lengths": (512,), "budget_rel_mse": 0.3, "worst_rows": 0.0}
    recipe = tiny_recipe(folder, tmp_path / "p.safetensors", **changes)
    result = calibrate(recipe, progress=False)
    assert result.met, result.problems
    profile = load_profile(recipe.out)
    modes = {head.mode for layer in profile.layers[0] for head in layer.heads}
    assert "baseline" in modes
    assert method == "auto" or "s2o" not in modes
    for layer in result.proofs[512].layers:
        assert layer.rel_mse <= 0.3
        assert layer.density < 1.0
    assert profile.record.recipe["method"] == method
    report = recipe.out.with_name("p.report.md")
    assert not report.exists() or few[method][0].name in report.read_text()

    from calibrate.profiles.retile import retile

    with pytest.raises(InputError, match="heads of baselines"):
        retile(recipe.out, "cpu", tmp_path / "q.safetensors")
