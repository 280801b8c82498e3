"""calibrate() from Python: the command without its terminal."""

import json
import re
from pathlib import Path

import pytest

import calibrate as package
from calibrate import Budget, Recipe, calibrate
from calibrate.commands import calibrate as command
from calibrate.machine import MARK
from s2o_runtime.errors import ConfigError, ResourceError
from support.tiny import QUICKEST

RECIPE = Recipe("demo", Budget("mse", 1e-4), (512,), Path("p"))


def test_every_public_name_is_there():
    assert [getattr(package, name).__name__ for name in package.__all__] == package.__all__
    with pytest.raises(AttributeError, match="module 'calibrate' has no attribute 'calibrated'"):
        package.calibrated  # noqa: B018


@pytest.mark.slow(reason="two calibrations")
def test_it_does_what_the_command_does(tiny_folder, tmp_path, monkeypatch, capsys):
    """The same options give the same bytes, by name, as a recipe, and on the command line; files are written alike."""
    monkeypatch.chdir(tmp_path)
    journal = tmp_path / "journal"
    given = QUICKEST | {"device": "cpu", "budget_rel_mse": 1e-2, "journal": journal}
    result = calibrate(str(tiny_folder), progress=False, out="a/named.safetensors", **given)
    assert (result.met, result.written) == (True, True)
    recipe = Recipe.from_options(given | {"model": str(tiny_folder), "out": Path("b/named.safetensors")})
    assert recipe.budget == Budget("rel_mse", 1e-2)
    assert calibrate(recipe, progress=False).journal_reused > 0
    flags = "--budget-rel-mse 1e-2 --lengths 256 --segments 64 --lookbacks 64 --trials 1 --num-prompts 1"
    flags += " --num-held-out 1 --num-certify 0 --device cpu --json --out c/named.safetensors --journal"
    capsys.readouterr()
    assert command.main([*flags.split(), str(journal), "--model", str(tiny_folder)]) == 0
    folders = [tmp_path / name for name in "abc"]
    assert len({(folder / "named.safetensors").read_bytes() for folder in folders}) == 1
    (written,) = {tuple(sorted(path.name for path in folder.iterdir())) for folder in folders}
    assert "named.report.md" in written
    said = capsys.readouterr()  # the result alone on stdout, the plan and where the files are on stderr
    in_file = json.loads((tmp_path / "c" / "named.report.json").read_text())
    assert in_file == {"origin": MARK} | json.loads(said.out)
    assert re.search(r"^budget +rel_mse 0.01 \(given\)$", said.err, re.MULTILINE)
    assert "wrote c/named.safetensors in " in said.err
    assert "wrote the report c/named.report." in said.err


def test_its_defaults_are_the_commands(tiny_folder, tmp_path, monkeypatch):
    """Device, lengths and output, which depend on the machine."""
    from calibrate import pipeline

    recipes = []

    def stop(recipe, progress, loaded, expected):
        recipes.append(recipe)
        raise ResourceError("stopped")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipeline, "calibrate", stop)
    with pytest.raises(ResourceError, match="stopped"):
        calibrate("demo", device="cpu", time_limit="5m")
    assert command.main(["--model", "demo", "--device", "cpu", "--time-limit", "5m"]) == 4
    assert recipes[0] == recipes[1]
    assert recipes[0].lengths == (1024, 2048)
    assert recipes[0].out == Path("profiles/demo/cpu/kl-0.002.safetensors")
    assert recipes[0].time_limit == 300


@pytest.mark.parametrize(("model", "options", "message"), [
    (RECIPE, {"trials": 3}, "calibrate() got a recipe and trials: give a"),
    (RECIPE, {"tokenizer": "a"}, "calibrate() got a tokenizer and a model"),
    ("demo", {"trial": 3}, "calibrate() has 'trial', which is no option: did you mean trials?"),
    ("demo", {"trials": "many"}, "calibrate(): trials is 'many': expected a whole number from 1 to 1000000"),
])  # fmt: skip
def test_what_it_refuses(model, options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        calibrate(model, **options)
