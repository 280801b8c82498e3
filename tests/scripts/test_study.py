"""scripts/study: summaries on made-up curves, and tiny studies."""

import json

import pytest
import torch

from calibrate.search.allocate import Allocation, Point
from s2o_runtime.config import HeadConfig, TileConfig
from scripts.bench.schema import MethodStudyFile, VariantCurve, read
from scripts.study import budgets, curves, tails, unlike
from scripts.study import method as study
from support.pages import ROOT

SLOW = pytest.mark.slow(reason="runs a whole study")

TINY = ["--device", "cpu", "--segment", "128", "--tile", "64x64x1:4:2", "--variants", "paper", "all"]
TINY += ["--taus", "1e-12,1,100", "--rows", "64"]


def run(*arguments):
    return study.main([str(argument) for argument in arguments])


def curve_of(variant, errors, densities, length=1024, tile="a"):
    """A curve from [taus, heads]."""
    taus = [10.0**exponent for exponent in range(len(errors))]
    return VariantCurve(length, variant, tile, taus, densities, errors)


@pytest.fixture(scope="module")
def studied(tmp_path_factory):
    out = tmp_path_factory.mktemp("study") / "new" / "s.json"
    assert run(*TINY, "--lengths", "512,384", "--out", out) == 0
    return read(MethodStudyFile, json.loads(out.read_text()))


def test_densities_are_interpolated_for_each_head():
    """Heads: between two taus, never within the target, within it at the largest tau, and without any error."""
    errors = [[1e-4, 1e-1, 1e-4, 0.0], [1e-2, 1e-1, 1e-4, 1e-2]]
    curve = curve_of("paper", errors, [[0.8, 1.0, 0.5, 1.0], [0.2, 0.4, 0.1, 0.25]])
    density, unreached, lowest = curves.density_at(curve, 1e-3)
    assert density[:3].tolist() == pytest.approx([0.4, 1.0, 0.1])  # 0.4 is halfway from 0.8 to 0.2 in logarithms
    assert 0.25 < float(density[3]) < 0.3
    assert unreached.tolist() == [False, True, False, False]
    assert lowest.tolist() == [False, False, True, False]


def test_an_error_that_falls_again_gives_the_lowest_density():
    curve = curve_of("all", [[1e-4], [1e-1], [1e-4], [1e-2]], [[0.9], [0.8], [0.4], [0.1]])
    assert float(curves.density_at(curve, 1e-3)[0]) == pytest.approx(0.2)


def test_densities_are_compared_with_the_papers():
    measured = [
        curve_of("all", [[1e-4, 1e-4], [1e-2, 1e-2]], [[0.4, 0.4], [0.1, 0.1]]),
        curve_of("paper", [[1e-4, 1e-4], [1e-2, 1e-2]], [[0.8, 0.8], [0.2, 0.2]]),
        curve_of("all", [[1e-2]], [[0.5]], length=2048),
    ]
    rows = {(row["length"], row["variant"]): row for row in curves.densities_at(measured, (1e-3,))}
    assert rows[1024, "paper"]["density"] == pytest.approx(0.4)
    assert rows[1024, "paper"]["of_paper"] == pytest.approx(1.0)
    assert rows[1024, "all"]["of_paper"] == pytest.approx(0.5)
    assert rows[2048, "all"]["of_paper"] is None  # the paper's was not measured there
    assert (rows[2048, "all"]["density"], rows[2048, "all"]["unreached"]) == (1.0, 1)


def test_drift_is_the_largest_ratio_between_lengths():
    measured = [
        curve_of("rest", [[1e-3, 3e-3], [1e-2, 1e-2]], [[0.5, 0.5], [0.2, 0.2]], length=1024),
        curve_of("rest", [[4e-3, 4e-3], [1e-2, 3e-2]], [[0.4, 0.4], [0.2, 0.2]], length=2048),
        curve_of("rest", [[1e-3, 1e-3], [1e-2, 1e-2]], [[0.5, 0.5], [0.2, 0.2]], length=4096),
    ]
    first, second = curves.drift_over_lengths(measured)
    assert [at["length"] for at in first["at"]] == [1024, 2048, 4096]
    assert [at["rel_mse"] for at in first["at"]] == pytest.approx([2e-3, 4e-3, 1e-3])
    assert (first["tau"], first["rel_mse_ratio"], first["density_ratio"]) == pytest.approx((1.0, 4.0, 1.25))
    assert second["rel_mse_ratio"] == pytest.approx(2.0)
    assert curves.nearest_drift([first, second], "rest", 1e-2) is second


def test_only_variants_with_several_tiles_are_compared_over_tiles():
    low, high = ([[1e-3]], [[0.5]]), ([[2e-3]], [[0.5]])
    measured = [curve_of("rest", *low), curve_of("rest", *high, tile="b")]
    measured += [curve_of("share", *low), curve_of("rest", *low, length=2048)]
    (row,) = curves.drift_over_tiles(measured)
    assert [at["tile"] for at in row["at"]] == ["a", "b"]
    assert (row["variant"], row["rel_mse_ratio"]) == ("rest", pytest.approx(2.0))


def test_grids_and_tiles():
    assert study.VARIANTS["all"].taus(1) == (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1000.0)
    paper = study.VARIANTS["paper"].taus(2)
    assert (paper[0], paper[-1], len(paper)) == (1e-6, 31.62, 16)
    specialised = TileConfig(64, 128, 4, 4, 2, specialized=True)
    assert [str(tile) for tile in study.other_tiles(specialised)] == ["64x32x16 w4 s2", "64x64x8 w4 s2"]
    assert [str(tile) for tile in study.other_tiles(TileConfig(128, 32, 1, 8, 3))] == []
    for variant in study.VARIANTS.values():
        for tile in (specialised, *study.other_tiles(specialised)):
            assert variant.config(2, 1.0, 512, tile).tile.stride == 512


@SLOW
def test_the_record_holds_settings_curves_and_summaries(studied):
    assert studied.versions["torch"] == torch.__version__
    assert {"lengths": [384, 512], "segment": 128, "model": "demo", "seed": 0}.items() <= studied.settings.items()
    options = {"stop_rule": "rest", "representatives": 32, "tail": True, "grain": 1, "row_reduce": "mean"}
    assert studied.variants["all"] == options
    assert studied.tile_name == "64x64x1 w4 s2"
    measured = [(curve.length, curve.variant, curve.tile) for curve in studied.curves]
    main = [(length, name, "64x64x1 w4 s2") for length in (384, 512) for name in ("paper", "all")]
    assert sorted(measured) == sorted([*main, (384, "paper", "64x32x2 w4 s2"), (384, "all", "64x32x2 w4 s2")])
    assert len(studied.density_at) == 2 * 2 * len(study.TARGETS)
    assert len(studied.drift) == len(studied.tiles) == 2 * 3


@SLOW
def test_small_taus_are_exact_and_large_ones_are_not(studied):
    """48 heads each; the reference computes in float32, where only rounding is left of the error."""
    for curve in studied.curves:
        densities, errors = torch.tensor(curve.density), torch.tensor(curve.rel_mse)
        assert densities.shape == errors.shape == (3, 48)
        assert float(densities[0].mean()) > 0.99
        assert float(errors[0].max()) < 1e-9
        assert (densities.diff(dim=0) <= 0).all()
        assert float(errors[2].mean()) > 1e-4


@SLOW
def test_a_tau_of_rest_means_the_same_for_every_tile(studied):
    """Both tiles check every 64 keys, so they stop at the same keys; the paper's rule counts tiles and does not."""
    rows = {(row["variant"], row["tau"]): row for row in studied.tiles}
    for tau in (1.0, 100.0):
        assert rows["all", tau]["rel_mse_ratio"] == pytest.approx(1.0, rel=1e-3)
        assert rows["all", tau]["density_ratio"] == pytest.approx(1.0)
    assert rows["paper", 1.0]["density_ratio"] > 1.001


BAD = [
    (["--lengths", "8k"], "'8k' is not understood: try 8192,32768"),
    (["--lengths", "256", "--segment", "512"], "length 256 is too short for --segment 512: try 513"),
    (["--lengths", "262144"], "length 262144 is beyond the model's limit"),
    (["--variants", "best"], "invalid choice: 'best'"),
    (["--rows", "0"], "--rows is 0: use at least 1"),
    (["--model", "demmo"], "did you mean demo"),
    (["--out", "."], "--out . is a folder"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(arguments)[:30] for arguments, _ in BAD])
def test_bad_options_are_one_sentence_and_exit_code_2(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        code = run(*TINY, "--lengths", "512", *arguments)
    except SystemExit as exit:
        code = exit.code
    lines = capsys.readouterr().err.splitlines()
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith("scripts.study.method: ")
    assert message in lines[0]
    assert not list(tmp_path.rglob("*.json"))


def test_guards_of_the_study_of_budgets_may_be_off(capsys):
    args = budgets.parser().parse_args(["--worst-rows", "0.5,off", "--budgets", "1e-3"])
    assert (args.worst_rows, args.budgets) == ([0.5, None], [1e-3])
    with pytest.raises(SystemExit):
        budgets.parser().parse_args(["--budgets", "low"])
    assert "'low' is not understood: try 0.5,off" in capsys.readouterr().err


@SLOW
def test_the_study_of_tails_lets_heads_have_more_ways_and_so_costs_no_more(capsys):
    arguments = ["--lengths", "1024", "--segments", "256", "--budgets", "1e-2", "--layers", "0", "--device", "cpu"]
    assert tails.main(arguments) == 0
    (row,) = (line.split() for line in capsys.readouterr().err.splitlines())
    costs = [float(cell) for cell in row[1:] if "(" not in cell and ")" not in cell]
    assert row[0] == "0"
    assert len(costs) == len(tails.WAYS)
    assert 0 < costs[1] <= costs[0] <= 1
    assert costs[2] > tails.SCORING


@SLOW
def test_the_study_of_tails_knows_what_linear_tails_err_by(capsys):
    assert (
        tails.main(["--errors", "--lengths", "1024", "--segments", "256,4096", "--layers", "0", "--device", "cpu"]) == 0
    )
    title, _, head, _, row, _ = capsys.readouterr().out.splitlines()
    assert title == "demo, 1024 tokens: rel_mse of linear tails in every head (density)"
    assert "segments of 256" in head
    assert "4096" not in head
    layer, error, density = row.replace("│", " ").replace("(", " ").replace(")", " ").split()
    assert (layer, 0 < float(error) < 1e-2, 0 < float(density) < 1) == ("0", True, True)


def test_the_study_of_tails_says_what_it_cannot_do(capsys):
    assert tails.main(["--model", "no-such-model"]) == 2
    assert capsys.readouterr().err.startswith("scripts.study.tails: model 'no-such-model' is not known")


def test_dense_layers_cost_what_dense_attention_does():
    dense = Allocation((Point(0.0, 1.0, 1.0, 0.0, HeadConfig(mode="dense")),))
    linear = Allocation((Point(1e-3, 0.3, 0.2, 0.0, HeadConfig(linear=True)),))
    assert tails.Outcome.of(dense) == (1.0, 1.0, 0)
    assert tails.Outcome.of(linear) == (0.3, 0.2, 1)


@SLOW
def test_what_profiles_err_by_on_unlike_text(capsys):
    profile = str(ROOT / "profiles/demo/cpu/mse-0.0001.safetensors")
    assert unlike.main([profile, profile, "--length", "512", "--settings-of", "2048", "--layers", "0,1"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "demo, 512 tokens, settings of 2048: rel_mse"
    rows = [line.rsplit(maxsplit=4) for line in err.splitlines() if line.startswith(("code", "half code"))]
    assert [row[0] for row in rows] == ["code", "half code, half random tokens"]
    for _, *errors in rows:
        numbers = [float(error) for error in errors]
        assert numbers[0] == numbers[1]  # the same profile
        assert numbers[2] == numbers[3]
        assert all(0 < number < 0.1 for number in numbers)


def test_a_study_of_unlike_text_says_what_it_cannot_read(capsys):
    assert unlike.main(["no-such-file.safetensors"]) == 2
    assert capsys.readouterr().err.startswith("scripts.study.unlike: ")
