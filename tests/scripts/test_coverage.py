"""The bench of certificates: what is counted, and what is refused."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from calibrate.pipeline import calibrate
from calibrate.proof.agreement import PromptAgreement
from calibrate.proof.sample import LayerSample, LengthSample, PromptError
from calibrate.recipe import Budget
from s2o_runtime.config import LayerConfig
from s2o_runtime.profile import save_profile
from s2o_runtime.profile.record import Certificate
from scripts.bench import coverage
from scripts.bench.schema import CoverageCounts, CoverageFile, read
from support.golden_profiles import minimal
from support.profiles import CERTIFICATE
from support.tiny import recipe, save_tiny

SLOW = pytest.mark.slow(reason="calibrates a tiny model, seconds each")
(CERTIFIED,) = Certificate.from_json(CERTIFICATE).lengths  # bounds 8e-4, 7e-4, 1e-9; of the last eighth 1.6e-3, 1e-3


def seen(*errors):
    """A layer whose prompts have these relative errors, the last eighth and continued calls twice as large."""
    return LayerSample(
        tuple(PromptError(e, 1.0, (2 * e, 1.0), {64: (2 * e, 1.0), 512: (2 * e, 1.0)}, 0.1) for e in errors), 0.5
    )


def opened(dense_layer):
    layers = [LayerConfig.uniform(2, mode="dense" if layer == dense_layer else "s2o", tau=1.0) for layer in range(3)]
    profile = SimpleNamespace(layer_config=lambda layer, length: layers[layer])
    return SimpleNamespace(profile=profile, recipe=SimpleNamespace(budget=Budget("rel_mse", 1e-3)))


def test_means_and_prompts_above_their_bounds_are_counted():
    agreements = [PromptAgreement(kl=kl, top1=0.9, found=2, kept=1) for kl in (1e-3, 3e-3)]
    code = LengthSample((), (seen(9e-4, 1e-4), seen(9e-4, 8e-4), seen(1.0, 1.0)), tuple(agreements), None)
    (row,) = coverage.rows_of(opened(2), CERTIFIED, {"code": code})
    assert row.counts[:3] == [
        CoverageCounts("all rows", layers=2, means_above=1, cells=4, cells_above=3),
        CoverageCounts("the last eighth", 2, 1, 4, 3),
        CoverageCounts("64 new tokens", 2, 0, 4, 0),
    ]
    assert [(layer.layer, layer.bound) for layer in row.layers] == [(0, 8e-4), (1, 7e-4)]
    assert (row.prompts, row.kl_above, row.needles_found, row.needles_kept) == (2, 1, 4, 2)
    cells = dict(zip(row.COLUMNS, row.cells(), strict=True))
    assert (cells["means above"], cells["cells above"], cells["KL above"]) == ("1 of 2", "3 of 4", "1 of 2")
    assert (cells["continued"], cells["needles"]) == ("1 of 4", "2 of 4")


def test_all_kinds_of_text_together_have_a_row():
    """A mean above its bound on one kind of text alone may be below it on all."""
    code, prose = (
        LengthSample((), (seen(e), seen(e), seen(e)), (PromptAgreement(0.0, 1.0, 0, 0),), None) for e in (9e-4, 1e-4)
    )
    rows = coverage.rows_of(opened(2), CERTIFIED, {"code": code, "prose": prose})
    assert [row.domain for row in rows] == ["code", "prose", "all"]
    assert [row.counts[0].means_above for row in rows] == [2, 0, 0]
    assert [row.prompts for row in rows] == [1, 1, 2]


def test_a_profile_without_a_certificate_is_refused(capsys, tmp_path):
    save_profile(minimal(), tmp_path / "p.safetensors")
    assert coverage.main([str(tmp_path / "p.safetensors"), "--out", str(tmp_path / "c.json")]) == 2
    assert "is not certified: calibrate with --num-certify" in capsys.readouterr().err


@SLOW
def test_a_certified_profile_is_measured_on_prompts_of_its_own(tmp_path, capsys):
    model = save_tiny(tmp_path / "model")
    made = replace(recipe(model, tmp_path / "p.safetensors"), num_certify=3, allow_regression=True)
    assert calibrate(made, progress=False).written
    out = tmp_path / "c.json"
    arguments = [str(made.out), "--model", str(model), "--device", "cpu", "--num-prompts", "2", "--out", str(out)]
    assert coverage.main([*arguments, "--seed", str(made.seed)]) == 2
    assert "drew the prompts of" in capsys.readouterr().err
    assert coverage.main([*arguments, "--lengths", "77"]) == 2
    assert "77 is not certified: choose from --lengths" in capsys.readouterr().err
    assert coverage.main([*arguments, "--domains", "code,chat", "--lengths", str(made.lengths[0])]) == 0

    file = read(CoverageFile, json.loads(out.read_text()))
    assert {(row.length, row.domain) for row in file.rows} == {
        (made.lengths[0], domain) for domain in ("code", "chat", "all")
    }
    assert all(row.prompts >= 2 and row.mean_kl >= 0 for row in file.rows)
