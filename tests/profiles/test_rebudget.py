"""Another budget from stored curves, against what a calibration with that budget would allocate."""

import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from calibrate.curves.curves import Shape
from calibrate.curves.measure import measure_model
from calibrate.journal import Journal
from calibrate.model import models
from calibrate.pipeline import calibrate, make_journal_identity
from calibrate.profiles.rebudget import UNPROVEN, rebudget
from calibrate.prompts.prompts import load_prompts
from calibrate.proof import adjust
from calibrate.recipe import Budget, Recipe
from calibrate.record import RecordedBudget, read_record
from calibrate.search.choice import LayerBudget, SearchPoint, build_plan
from calibrate.search.tiles import CPU_TILES
from s2o_runtime.devices import identify
from s2o_runtime.errors import InputError
from s2o_runtime.profile import load_profile, save_profile

SLOW = pytest.mark.slow(reason="shares a whole calibration of the demo model and its curves")

LENGTHS = (512, 1024)
BUDGET = 2e-4


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return Recipe(
        "demo", Budget("mse", BUDGET), LENGTHS, tmp_path_factory.mktemp("calibrated") / "old.safetensors",
        num_prompts=1, held_out=1, num_certify=0, trials=3, segments=(256, 512), check_lengths=(), needles=0.0,
        margin=0.35, seed=2,  # one prompt says little of others: with these no layer is over its limit
    ).validate()  # fmt: skip


@pytest.fixture(scope="module")
def curves(recipe):
    """One real calibration of the demo model, and its curves as a second one would find them in the journal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adjust, "TIGHTENINGS", 1)  # a layer over its limit becomes dense at once: shorter
        assert calibrate(recipe, progress=False).written
    loaded = models.load("demo", "cpu")
    prompts = load_prompts(recipe, loaded.tokenizer)
    shapes = sorted({Shape.from_tile(tile) for tile in CPU_TILES}, key=lambda shape: (shape.block_m, shape.stride))
    identity = make_journal_identity(loaded, identify(torch.device("cpu")))
    with Journal.open(recipe.journal_path, identity) as journal:
        measured = measure_model(
            loaded, prompts.calibration, dict.fromkeys(LENGTHS, shapes), recipe, journal, lambda *_, **__: None
        )
        assert journal.reused == len(LENGTHS) * 6
    return measured


@pytest.fixture
def old(recipe, curves, monkeypatch):
    """The calibrated profile, where the model cannot be loaded any more."""
    monkeypatch.setattr(models, "load", None)
    return load_profile(recipe.out)


@SLOW
@pytest.mark.parametrize(
    "budget",
    [
        Budget("mse", BUDGET / 2),
        Budget("mse", BUDGET),
        Budget("mse", BUDGET * 4),
        Budget("rel_mse", 1e-2),
        Budget("mse", BUDGET * 4, 4e-3),  # binds in the early layers, whose outputs are small
    ],
    ids=lambda budget: f"{budget}-ceiling-{budget.ceiling}",
)
def test_it_is_what_a_calibration_would_allocate(budget, recipe, curves, old, tmp_path):
    """Of a profile whose first layer is dense; before layers are adjusted on other prompts, of which no curve knows."""
    was, out = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    old = replace(old, layers=tuple((bucket[0].as_dense(), *bucket[1:]) for bucket in old.layers))
    save_profile(old, was)
    done = rebudget(was, budget, out, recipe.journal_path)
    after = replace(recipe, budget=budget)
    sparse = 0
    for bucket, index in product(range(2), range(6)):
        measured, before = curves[LENGTHS[bucket]][index], old.layers[bucket][index]
        config, stored = done.layers[bucket][index], load_profile(out).layers[bucket][index]
        point = SearchPoint(before.segment, before.tile, before.lookback)
        assert SearchPoint(config.segment, config.tile, config.lookback) == point
        lax, strict = (LayerBudget.from_recipe(measured, one) for one in (after, recipe))
        spent = build_plan(point, measured, lax).dense_if_no_gain()
        assert spent.allocation.mse <= lax.mse
        grew = lax.mse > strict.mse
        if before.is_dense and not (grew and spent.cost < 0.9):
            assert config.is_dense
        else:
            assert config == spent.config
            sparse += not config.is_dense
        assert stored.tile == config.tile
        assert [head.tau for head in stored.heads] == pytest.approx([head.tau for head in config.heads], rel=1e-6)
    assert (done.layers[1][0].is_dense, sparse >= 4) == (budget != Budget("mse", BUDGET * 4), True)


@SLOW
def test_the_record_says_that_nothing_is_proven(recipe, old, tmp_path):
    """A ceiling too, which binds in the early layers, whose outputs are small."""
    budget, out = Budget("mse", BUDGET * 4, 4e-3), tmp_path / "new.safetensors"
    done = rebudget(recipe.out, budget, out)
    record, before = read_record(load_profile(out)), read_record(old)
    stated = {"kind": "mse", "value": BUDGET * 4, "ceiling_rel_mse": 4e-3}
    assert record.budget == RecordedBudget(**stated)
    assert record.recipe == before.recipe | {"budget": stated}
    assert (record.proof, record.problems, record.held_out) == ("none", (UNPROVEN,), ())
    for name in ("objective", "data", "versions"):
        assert getattr(record, name) == getattr(before, name)
    for length, recorded, bucket in zip(LENGTHS, record.predicted, done.layers, strict=True):
        assert recorded.length == length
        assert [layer.density == 1.0 for layer in recorded.layers] == [config.is_dense for config in bucket]
        assert all(0 < layer.density <= 1.0 and layer.mse <= BUDGET * 4 for layer in recorded.layers)
    again = rebudget(out, recipe.budget, tmp_path / "back.safetensors", journal=recipe.journal_path)
    assert again.record["recipe"] == before.recipe


@SLOW
def test_a_budget_of_answers_is_measured_and_not_predicted(recipe, old, tmp_path):
    command = "s2o-calibrate --model demo --budget-kl 0.002 --lengths 512,1024"
    with pytest.raises(InputError, match=f"measured on the model, .*: run {command}.* curves from the journal"):
        rebudget(recipe.out, Budget("kl", 2e-3), tmp_path / "new.safetensors")
    assert not (tmp_path / "new.safetensors").exists()


def edited(statement):
    """A change to a journal, as SQL."""

    def change(path):
        with closing(sqlite3.connect(path)) as database, database:
            assert database.execute(statement).rowcount > 0

    return change


RECIPE = {"budget": {"kind": "mse", "value": 1e-4}, "scope": "layer", "model": "demo"}
SET = "UPDATE meta SET value = json_set(value, '$.{}', '{}')"
LAYER_3 = "DELETE FROM entries WHERE json_extract(key, '$.layer') = 3"
NOT_SAID = "does not say how it was calibrated"


@SLOW
@pytest.mark.parametrize(
    ("journal", "record", "message"),
    [
        (Path.unlink, {}, "does not exist: give --journal, or measure again with s2o-calibrate --model demo"),
        (lambda path: path.write_text("{}\n"), {}, "is not a journal of S2O"),
        (
            edited(SET.format("model.fingerprint", "other")),
            {},
            "model.fingerprint other, the profile with [0-9a-f]{64}",
        ),
        (edited(SET.format("device.kind", "cuda")), {}, "device.kind cuda, the profile with cpu: give the profile's"),
        (edited(LAYER_3), {}, "lacks the curves of layer 3 at 512 tokens for tile .*: measure them with s2o-calibrate"),
        (edited("DELETE FROM entries"), {}, "--budget-mse 5e-05 --ceiling-rel-mse 0 --lengths 512,1024$"),
        (Path.touch, {"recipe": None}, NOT_SAID),
        (Path.touch, {"recipe": RECIPE | {"budget": {"kind": "mse", "value": "little"}}}, NOT_SAID),
        (Path.touch, {"recipe": RECIPE | {"colour": "red"}}, NOT_SAID),
        (Path.touch, {"data": {"calibration": [512]}}, NOT_SAID),
    ],
)
def test_a_journal_or_a_record_that_does_not_do_is_one_sentence(journal, record, message, recipe, old, tmp_path):
    path = tmp_path / "some.sqlite"
    shutil.copy(recipe.journal_path, path)
    journal(path)
    profile = tmp_path / "old.safetensors"
    save_profile(replace(old, record=old.record | record), profile)
    with pytest.raises(InputError, match=message) as raised:
        rebudget(profile, Budget("mse", 5e-5), tmp_path / "new.safetensors", path)
    assert str(raised.value).count("\n") == 0
    assert not (tmp_path / "new.safetensors").exists()
