"""profiles/: every profile that is shipped is what its card and the index say, and does what it was proven to."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import s2o_runtime
from calibrate.model.models import load, load_tokenizer
from calibrate.profiles.card import card
from calibrate.profiles.catalogue import INDEX, dump, index, with_table
from calibrate.profiles.stored import recipe_of
from calibrate.prompts.prompts import load_prompts
from calibrate.proof.verify import prove
from calibrate.recipe import Budget, default_out
from s2o_runtime.identity import RANDOM, fingerprint, fingerprint_mismatch
from s2o_runtime.profile import load_profile

EXHAUSTIVE = pytest.mark.exhaustive(reason="proves every shipped profile again")

CATALOGUE = Path(__file__).parents[2] / "profiles"
SHIPPED = sorted(CATALOGUE.rglob("*.safetensors"))
OF_DEMO = [path for path in SHIPPED if path.is_relative_to(CATALOGUE / "demo")]  # the one model that is here to run
AFFORDABLE = 1024  # tokens of a proof on a CPU


def name_of(path):
    return path.relative_to(CATALOGUE).as_posix()


@pytest.fixture(params=SHIPPED, ids=name_of)
def path(request):
    return request.param


@pytest.fixture(scope="module")
def demo():
    return load("demo", "cpu", resident=True)


def test_index_and_readme_are_of_what_lies_there():
    entries = index(CATALOGUE)
    assert {entry["file"] for entry in entries} == {path.relative_to(CATALOGUE).as_posix() for path in SHIPPED}
    assert "demo/cpu/mse-0.0001.safetensors" in {entry["file"] for entry in entries}
    assert (CATALOGUE / INDEX).read_text(encoding="utf-8") == dump(entries)
    readme = (CATALOGUE / "README.md").read_text(encoding="utf-8")
    assert readme == with_table(readme, entries)


def test_no_profile_is_of_random_weights_or_named_by_a_folder(path):
    """A reader must be able to tell which model it is: s2o-profile push --name says so."""
    profile = load_profile(path)
    assert profile.fingerprint
    assert not profile.fingerprint.startswith(RANDOM)
    assert not Path(profile.model_name).is_absolute()
    assert not profile.model_name.startswith(("build/", "."))


def test_every_profile_is_in_its_place_with_its_card(path):
    profile = load_profile(path)
    budget = Budget(profile.record.budget.kind, profile.record.budget.value)
    assert path == default_out(profile.model_name, profile.device.name, budget, CATALOGUE)
    assert path.with_suffix(".md").read_text(encoding="utf-8") == card(profile, path.name)
    assert str(Path.home()) not in json.dumps(profile.record.to_json())


@EXHAUSTIVE
@pytest.mark.parametrize("path", OF_DEMO, ids=name_of)
def test_it_is_of_the_demo_model_and_keeps_its_budget(path, demo):
    """The held-out proof at the shortest length; where a CPU cannot afford that, its thresholds at a shorter one."""
    profile = load_profile(path)
    assert fingerprint_mismatch(fingerprint(demo.model), profile.fingerprint) is None
    shortest = profile.lengths[0]
    if shortest <= AFFORDABLE:
        recipe = recipe_of(profile, path)
        held_out = load_prompts(recipe, load_tokenizer("demo")).held_out[shortest]
        _, proofs = prove(demo, {shortest: held_out}, profile)
        recorded = profile.record.proven_at(shortest)
        named = [prompt.sha256 for prompt in profile.record.data.held_out if prompt.length == shortest]
        same = [prompt.sha256 for prompt in held_out] == named  # they are sources of Python, and those change
        for layer, expected in zip(proofs[shortest].layers, recorded.layers, strict=True):
            assert layer.error(recipe.budget) <= expected.limit * (1.01 if same else 2)
            assert layer.density == pytest.approx(expected.density, rel=0.01 if same else 0.2)
        return
    shorter = dataclasses.replace(profile, lengths=tuple(length * AFFORDABLE // shortest for length in profile.lengths))
    ids = torch.randint(3, 256, (1, AFFORDABLE))
    with torch.no_grad(), s2o_runtime.patched(demo.model, shorter) as model:
        assert model(ids).logits.isfinite().all()
