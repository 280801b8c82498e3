"""The bench of profiles: what a row says, and what is refused."""

import pytest

from calibrate.proof.verify import LayerProof, LengthProof
from scripts.bench import profiles
from support.golden_profiles import path_of


def proof(*seconds):
    layers = tuple(LayerProof(1e-4 * (1 + i), 0.1, 0.5, 0.3, s, s and 2 * s) for i, s in enumerate(seconds))
    return LengthProof(layers, kl=2e-3, top1=0.97, needles=(3, 4), prefill_seconds=1.0, dense_prefill_seconds=2.0)


def test_a_row_sums_times_and_averages_errors_over_the_layers():
    row = profiles.row_of("p", 8192, proof(1e-3, 3e-3))
    assert (row.seconds, row.dense_seconds) == (pytest.approx(4e-3), pytest.approx(8e-3))
    assert (row.mean_rel_mse, row.largest_rel_mse) == (pytest.approx(1.5e-3), pytest.approx(2e-3))
    cells = dict(zip(row.COLUMNS, row.cells(), strict=True))
    assert (cells["ms"], cells["speed-up"], cells["needles"]) == ("4.00", "2.00x", "3 of 4")


def test_a_cpu_has_no_times():
    row = profiles.row_of("p", 8192, proof(None, None))
    assert (row.seconds, row.dense_seconds, row.cells()[5]) == (None, None, "-")


def test_a_profile_of_another_model_is_refused(capsys, tmp_path):
    out = tmp_path / "out.json"
    assert profiles.main([str(path_of("schema7")), "--lengths", "1024", "--device", "cpu", "--out", str(out)]) == 2
    assert "is not of demo" in capsys.readouterr().err
    assert not out.exists()
