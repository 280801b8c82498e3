"""Dense last rows in a calibration: the rows that answer have no error, and the profile says how many there are."""

from dataclasses import replace

import pytest

from calibrate.pipeline import calibrate
from calibrate.profiles.rebudget import rebudget
from calibrate.recipe import Budget
from s2o_runtime.profile import load_profile
from support.models import stream
from support.streamed import Layers, prove, random_prompts, uniform
from support.tiny import QUICKEST, recipe

LENGTH = 600  # of which 75 rows answer


def test_rows_that_answer_have_no_error(tiny_folder):
    sparse = uniform(1e4)
    layers = Layers((sparse, replace(sparse, last_rows=128)))
    proof = prove(stream(tiny_folder, True), random_prompts(LENGTH), layers)[1][LENGTH]
    without, with_rows = proof.layers
    for prompt in without.of_prompts:
        assert prompt.last_rows[0] > 0.1 * prompt.all_rows[0]
    for prompt in with_rows.of_prompts:
        assert prompt.last_rows[0] < 1e-10 * prompt.last_rows[1]
        assert prompt.all_rows[0] > 1e-6 * prompt.all_rows[1]


@pytest.mark.parametrize("rows", [pytest.param(0, marks=pytest.mark.slow(reason="calibrates a tiny model")), 128])
def test_a_calibration_and_a_rebudget_keep_to_the_recipe(tiny_folder, tmp_path, rows):
    options = QUICKEST | {"lengths": (768,), "last_rows": rows, "budget_rel_mse": 0.3, "worst_rows": None}
    made = recipe(tiny_folder, tmp_path / "p.safetensors", **options)
    calibrate(made, progress=False)
    rebudget(made.out, Budget("rel_mse", 0.2), tmp_path / "q.safetensors")
    for path in (made.out, tmp_path / "q.safetensors"):
        profile = load_profile(path)
        assert not all(layer.is_dense for layer in profile.layers[0])
        assert all(layer.last_rows == (0 if layer.is_dense else rows) for layer in profile.layers[0])
