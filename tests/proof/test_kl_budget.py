"""A whole calibration with a budget in KL: what is found, what is written of it, and what is made of it afterwards."""

import shutil
from dataclasses import replace
from statistics import fmean

import pytest

from calibrate.curves import sensitivities
from calibrate.journal import Journal
from calibrate.model.models import load
from calibrate.pipeline import calibrate
from calibrate.profiles.rebudget import rebudget
from calibrate.prompts.prompts import load_prompts
from calibrate.proof import certify
from calibrate.proof.again import opened, verified
from calibrate.proof.state import Problem, ProblemKind
from calibrate.recipe import Budget
from calibrate.record import read_record
from calibrate.search.choice import HARMLESS
from s2o_runtime import load_profile
from s2o_runtime.errors import InputError
from s2o_runtime.monitor.drift import error_limits
from support.models import patched_kl
from support.tiny import recipe

NATS = 5e-4  # of the 9e-4 that this model has at the cheapest settings
SETTINGS = {"lengths": (512,), "budget_kl": NATS, "num_certify": 3, "trials": 2, "num_held_out": 2}


@pytest.fixture(scope="module")
def finished(tiny_folder, tmp_path_factory):
    """The recipe and its result; every test shares them."""
    asked = recipe(tiny_folder, tmp_path_factory.mktemp("calibrated") / "p.safetensors", **SETTINGS)
    return asked, calibrate(asked, progress=False)


def test_the_kl_is_within_the_budget_and_not_far_below_it(finished):
    asked, result = finished
    assert (result.met, result.problems) == (True, ())
    kl = result.proofs[512].kl
    loaded = load(asked.model, "cpu")
    adjust_prompts = load_prompts(asked, loaded.tokenizer).held_out[512]
    assert patched_kl(loaded.model, load_profile(asked.out), adjust_prompts) == pytest.approx(kl, rel=1e-3)
    assert any(0.5 * NATS < one.kl <= NATS for one in result.kl_passes[512])
    assert kl <= NATS  # less than in the last pass only where the certificate made a layer more careful
    assert fmean(layer.density for layer in result.proofs[512].layers) < 0.9


def test_the_record_says_how(finished):
    asked, result = finished
    record = read_record(load_profile(asked.out))
    assert (record.budget.kind, record.budget.value, record.budget.scope) == ("kl", NATS, "model")
    (proven,), (predicted,), (certified,) = record.held_out, record.predicted, record.certificate.lengths
    assert [one.to_json() for one in proven.kl_passes] == [
        {"scale": one.scale, "predicted": one.predicted, "kl": one.kl} for one in result.kl_passes[512]
    ]
    assert proven.kl_passes[0].scale == 1.0
    assert proven.kl == result.proofs[512].kl
    assert predicted.kl == pytest.approx(sum(c.weights.layer * c.spent for c in result.chosen[512].choices) / 2)
    assert certified.mean_kl < certified.mean_kl_bound
    shown = any("mean KL of prompts like these" in sentence for sentence in record.not_proven)
    assert shown == (certified.mean_kl_bound > NATS)
    for layer, choice in enumerate(result.chosen[512].choices):
        limit = proven.layers[layer].limit
        assert choice.config.is_dense or proven.layers[layer].mse <= limit
        if (512, layer) not in result.candidate.changes:
            harmless = HARMLESS * NATS / choice.weights.layer
            assert limit == pytest.approx(max(choice.allocation.mse / asked.margin, harmless))


def test_drift_is_held_to_the_limits_of_the_layers(finished):
    asked, result = finished
    allowed = error_limits(load_profile(asked.out))
    assert {one.unit for one in allowed} == {"mse"}
    limits = [result.limits[512, layer] for layer in range(2)]
    assert [one.at(512) for one in allowed if one.limits] == [pytest.approx(limit) for limit in limits if limit]


def test_it_is_proven_again(finished):
    asked, _ = finished
    again = verified(opened(asked.model, asked.out, "cpu"))
    assert (again.problems, again.same_prompts) == ([], True)


def test_certify_prompts_that_show_a_broken_budget_write_nothing(finished, monkeypatch):
    asked, _ = finished
    monkeypatch.setattr(
        certify,
        "kl_shown_over_budget",
        lambda length, kls, kinds, recipe: Problem(ProblemKind.OVER_KL, length, f"{len(kls)} show it"),
    )
    other = replace(asked, out=asked.out.with_name("broken.safetensors"), journal=asked.journal_path)
    result = calibrate(other, progress=False)
    assert (result.problems, result.written) == ((Problem(ProblemKind.OVER_KL, 512, "3 show it"),), False)


def test_another_kl_needs_no_model_if_the_sensitivities_are_stored(finished, tmp_path):
    """What the old profile was found to spend for its KL scales the new prediction."""
    asked, result = finished
    out = tmp_path / "new.safetensors"
    outcomes = [rebudget(asked.out, Budget("kl", NATS * times), out, asked.journal_path) for times in (1e-4, 1.0, 2.0)]
    densities = [fmean(layer.density for layer in read_record(one).predicted[0].layers) for one in outcomes]
    assert densities == sorted(densities, reverse=True)
    assert densities[0] > densities[-1]
    record = read_record(outcomes[1])
    before = read_record(result.profile)
    ratio = before.predicted[0].kl / before.held_out[0].kl
    assert record.predicted[0].kl <= NATS * asked.margin * ratio * (1 + 1e-9)
    assert (record.budget.kind, record.proof) == ("kl", "none")
    relative = read_record(rebudget(asked.out, Budget("rel_mse", 1e-2), out, asked.journal_path))
    assert (relative.budget.kind, relative.budget.scope) == ("rel_mse", "layer")
    assert relative.predicted[0].kl is None


def test_without_sensitivities_another_budget_in_kl_is_one_sentence(finished, tmp_path):
    asked, _ = finished
    journal = tmp_path / "other.sqlite"
    shutil.copy(asked.journal_path, journal)
    with Journal.read(journal) as opened:
        identity = opened.identity
    with Journal.open(journal, identity) as opened:
        opened._rows("DELETE FROM entries WHERE kind = ?", (sensitivities.KIND,))
    with pytest.raises(InputError, match=r"has no sensitivities of the layers.* s2o-calibrate .*--budget-kl 0.01"):
        rebudget(asked.out, Budget("kl", 1e-2), tmp_path / "p.safetensors", journal)
