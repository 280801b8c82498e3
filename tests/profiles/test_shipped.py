"""profiles/: every profile that is shipped is what its card and the index say, and does what it was proven to."""

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest

from calibrate.model.models import load_tokenizer
from calibrate.profiles.stored import read_recipe
from calibrate.prompts.prompts import load_prompts
from calibrate.recipe import Budget, place_profile
from calibrate.record import read_record
from s2o_runtime.identity import RANDOM, explain_mismatch, fingerprint
from s2o_runtime.profile import load_profile, save_profile
from s2o_runtime.profile.record import read_budget
from scripts.docs import catalogue
from support import streamed
from support.golden_profiles import minimal

EXHAUSTIVE = pytest.mark.exhaustive(reason="proves every shipped profile again")

CATALOGUE = Path(__file__).parents[2] / "profiles"
SHIPPED = sorted(CATALOGUE.rglob("*.safetensors"))
# of the one model that is here to run, with a length that a CPU can prove
AFFORDABLE = [path for path in (CATALOGUE / "demo").rglob("*.safetensors") if load_profile(path).min_length <= 1024]


def name_of(path):
    return path.relative_to(CATALOGUE).as_posix()


def test_cards_index_and_readme_are_of_what_lies_there():
    texts = catalogue.overviews(CATALOGUE)
    assert {path: path.read_text(encoding="utf-8") for path in texts} == texts
    entries = json.loads(texts[CATALOGUE / "index.json"])["profiles"]
    assert {entry["file"] for entry in entries} == {name_of(path) for path in SHIPPED}
    assert all(
        entry["sha256"] == hashlib.sha256((CATALOGUE / entry["file"]).read_bytes()).hexdigest() for entry in entries
    )


def test_a_profile_is_filed_by_model_device_and_budget(tmp_path, capsys):
    """Index and table follow the files; what else the README says stays."""
    shipped = CATALOGUE / "demo" / "cpu" / "mse-0.0001.safetensors"
    (tmp_path / "README.md").write_text(f"# Mine\n\n{catalogue.START}\n{catalogue.END}\nafter\n")
    for options in ([], ["--name", "org/Model-1"]):
        assert catalogue.main([str(shipped), "--folder", str(tmp_path), *options]) == 0
    copy, renamed = (tmp_path / model / "cpu" / shipped.name for model in ("demo", "org-model-1"))
    assert copy.read_bytes() == shipped.read_bytes()
    profile, name = load_profile(shipped), "org/Model-1"
    record = profile.record | {"recipe": profile.record["recipe"] | {"model": name}}
    assert load_profile(renamed) == dataclasses.replace(profile, model_name=name, record=record)
    copy.unlink()
    assert catalogue.main(["--folder", str(tmp_path)]) == 0
    readme = (tmp_path / "README.md").read_text()
    assert readme.startswith("# Mine\n")
    assert readme.endswith("after\n")
    (row,) = [line for line in readme.splitlines() if ".safetensors" in line]
    assert row.startswith("| [org/Model-1](org-model-1/cpu/mse-0.0001.md) | cpu | mse 0.0001 and rel_mse 0.01 | 1024, ")
    assert [one["model"] for one in json.loads((tmp_path / "index.json").read_text())["profiles"]] == ["org/Model-1"]
    save_profile(minimal(), tmp_path / "minimal.safetensors")
    assert catalogue.main([str(tmp_path / "minimal.safetensors"), "--folder", str(tmp_path)]) == 2
    assert "does not say what its budget is" in capsys.readouterr().err


@pytest.mark.parametrize("path", SHIPPED, ids=name_of)
def test_every_profile_is_in_its_place_and_says_which_model_it_is_of(path):
    """No weights that are random, no folder of somebody's: --name of scripts/docs/catalogue.py names a model."""
    profile = load_profile(path)
    assert profile.fingerprint
    assert not profile.fingerprint.startswith(RANDOM)
    assert not Path(profile.model_name).is_absolute()
    assert not profile.model_name.startswith(("build/", "."))
    origin = catalogue.ORIGINS[profile.model_name]
    assert f"Its weights: fingerprint {profile.fingerprint[:16]}, {origin}." in path.with_suffix(".md").read_text()
    budget = read_budget(profile.record)
    budget = Budget(budget.kind, budget.value)
    assert path == place_profile(profile.model_name, profile.device.name, budget, CATALOGUE)
    assert str(Path.home()) not in json.dumps(profile.record)


@EXHAUSTIVE
@pytest.mark.parametrize("path", AFFORDABLE, ids=name_of)
def test_it_is_of_the_demo_model_and_keeps_its_budget(path, demo):
    """The held-out proof at the shortest length."""
    profile = load_profile(path)
    assert explain_mismatch(fingerprint(demo.model), profile.fingerprint) is None
    shortest = profile.lengths[0]
    recipe = read_recipe(profile, path)
    held_out = load_prompts(recipe, load_tokenizer("demo")).held_out[shortest]
    _, proofs = streamed.prove(demo, {shortest: held_out}, profile)
    recorded = read_record(profile).find_proven(shortest)
    named = [prompt.sha256 for prompt in read_record(profile).data.held_out if prompt.length == shortest]
    same = [prompt.sha256 for prompt in held_out] == named  # they are sources of Python, and those change
    for layer, expected in zip(proofs[shortest].layers, recorded.layers, strict=True):
        assert layer.error(recipe.budget) <= expected.limit * (1.01 if same else 2)
        # it was measured without lookback, up to 128 keys and a tile more of each row
        assert 0.8 * expected.density <= layer.density <= 1.2 * expected.density + 256 / shortest
