"""scripts/study_method.py: its summaries on made-up curves, its orders against the reference, and a tiny study."""

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import study_method as study

from calibrate.models import load_tokenizer
from calibrate.needles import DIGITS
from s2o_runtime.config import LayerConfig, TileConfig
from s2o_runtime.ranking import log_weights, part_means, rank
from s2o_runtime.reference import absorb, dense_window, with_tail

TINY = ["--device", "cpu", "--segment", "128", "--tile", "64x64x1:4:2", "--variants", "paper", "all"]
TINY += ["--taus", "1e-12,1,100", "--rows", "64", "--needle-length", "1024", "--needle-prompts", "1"]


def run(*arguments):
    return study.main([str(argument) for argument in arguments])


def made(variant, errors, densities, length=1024, tile="a"):
    """A curve from [taus, heads]."""
    taus = tuple(10.0**at for at in range(len(errors)))
    numbers = (torch.tensor(each, dtype=torch.float64) for each in (densities, errors))
    return study.Curve(length, variant, tile, taus, *numbers)


@pytest.fixture(scope="module")
def studied(tmp_path_factory):
    out = tmp_path_factory.mktemp("study") / "new" / "s.json"
    assert run(*TINY, "--lengths", "512,384", "--order-segments", "2", "--out", out) == 0
    return out


def test_densities_are_interpolated_for_each_head():
    """Heads: between two taus, never within the target, within it at the largest tau, and without any error."""
    errors = [[1e-4, 1e-1, 1e-4, 0.0], [1e-2, 1e-1, 1e-4, 1e-2]]
    curve = made("paper", errors, [[0.8, 1.0, 0.5, 1.0], [0.2, 0.4, 0.1, 0.25]])
    density, unreached, lowest = study.density_at(curve, 1e-3)
    assert density[:3].tolist() == pytest.approx([0.4, 1.0, 0.1])  # 0.4 is halfway from 0.8 to 0.2 in logarithms
    assert 0.25 < float(density[3]) < 0.3
    assert unreached.tolist() == [False, True, False, False]
    assert lowest.tolist() == [False, False, True, False]


def test_an_error_that_falls_again_gives_the_lowest_density():
    curve = made("all", [[1e-4], [1e-1], [1e-4], [1e-2]], [[0.9], [0.8], [0.4], [0.1]])
    assert float(study.density_at(curve, 1e-3)[0]) == pytest.approx(0.2)


def test_densities_are_compared_with_the_papers():
    curves = [
        made("all", [[1e-4, 1e-4], [1e-2, 1e-2]], [[0.4, 0.4], [0.1, 0.1]]),
        made("paper", [[1e-4, 1e-4], [1e-2, 1e-2]], [[0.8, 0.8], [0.2, 0.2]]),
        made("all", [[1e-2]], [[0.5]], length=2048),
    ]
    rows = {(row["length"], row["variant"]): row for row in study.densities(curves, (1e-3,))}
    assert rows[1024, "paper"]["density"] == pytest.approx(0.4)
    assert rows[1024, "paper"]["of_paper"] == pytest.approx(1.0)
    assert rows[1024, "all"]["of_paper"] == pytest.approx(0.5)
    assert rows[2048, "all"]["of_paper"] is None  # the paper's was not measured there
    assert (rows[2048, "all"]["density"], rows[2048, "all"]["unreached"]) == (1.0, 1)


def test_drift_is_the_largest_ratio_between_lengths():
    curves = [
        made("rest", [[1e-3, 3e-3], [1e-2, 1e-2]], [[0.5, 0.5], [0.2, 0.2]], length=1024),
        made("rest", [[4e-3, 4e-3], [1e-2, 3e-2]], [[0.4, 0.4], [0.2, 0.2]], length=2048),
        made("rest", [[1e-3, 1e-3], [1e-2, 1e-2]], [[0.5, 0.5], [0.2, 0.2]], length=4096),
    ]
    first, second = study.drifts(curves)
    assert [at["length"] for at in first["at"]] == [1024, 2048, 4096]
    assert [at["rel_mse"] for at in first["at"]] == pytest.approx([2e-3, 4e-3, 1e-3])
    assert (first["tau"], first["rel_mse_ratio"], first["density_ratio"]) == pytest.approx((1.0, 4.0, 1.25))
    assert second["rel_mse_ratio"] == pytest.approx(2.0)
    assert study.near([first, second], "rest", 1e-2) is second


def test_only_variants_with_several_tiles_are_compared_over_tiles():
    one, other = ([[1e-3]], [[0.5]]), ([[2e-3]], [[0.5]])
    curves = [made("rest", *one), made("rest", *other, tile="b"), made("share", *one), made("rest", *one, length=2048)]
    (row,) = study.tile_effects(curves)
    assert [at["tile"] for at in row["at"]] == ["a", "b"]
    assert (row["variant"], row["rel_mse_ratio"]) == ("rest", pytest.approx(2.0))


def test_grids_and_tiles():
    assert study.VARIANTS["all"].taus(1) == (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1000.0)
    raw = study.VARIANTS["paper"].taus(2)
    assert (raw[0], raw[-1], len(raw)) == (1e-6, 31.62, 16)
    specialised = TileConfig(64, 128, 4, 4, 2, specialized=True)
    assert [str(tile) for tile in study.check_tiles(specialised)] == ["64x32x16 w4 s2", "64x64x8 w4 s2"]
    assert [str(tile) for tile in study.check_tiles(TileConfig(128, 32, 1, 8, 3))] == []
    for variant in study.VARIANTS.values():
        for tile in (specialised, *study.check_tiles(specialised)):
            assert variant.config(2, 1.0, 512, tile).tile.stride == 512


@pytest.fixture
def heads():
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, count, 512, 32, generator=rng) for count in (4, 2, 2))
    return 3 * q, k, v


@pytest.mark.parametrize(("parts", "grain"), [(1, 1), (4, 1), (4, 4)], ids=["R1-G1", "R4-G1", "R4-G4"])
def test_errors_along_an_order_are_the_references(heads, parts, grain):
    """The same order visited step by step, with the online softmax and the tail of the reference."""
    q, k, v = heads[0][0, 0] * 32**-0.5, heads[1][0, 0], heads[2][0, 0]
    begin, segment, step = 320, 128, 64
    queries, k, v = q[begin : begin + segment], k[: begin + segment], v[: begin + segment]
    representatives = part_means(queries, segment // parts)
    rows = study._rows(queries, k, v)
    errors = study.errors_along(rows, log_weights(representatives, k[:begin], grain), grain, step)
    exact = F.scaled_dot_product_attention(q[None], k[None], v[None], scale=1.0, attn_mask=causal(512, len(k)))[0]
    exact = exact[begin : begin + segment]

    ranking = rank(representatives, k[:begin], v[:begin], grain)
    state = dense_window(queries[None], k[begin:], v[begin:], torch.arange(segment)[None])
    for at in range(begin // step):
        visited = ranking.order[at * step : (at + 1) * step]
        after = absorb(state, queries[None], k[visited], v[visited])
        estimated = with_tail(state, after, ranking, at * step, (at + 1) * step)
        for kind, each in enumerate((after, estimated)):
            expected = (each.output()[0] - exact).square().mean(-1)
            torch.testing.assert_close(errors[kind, at], expected, rtol=1e-3, atol=1e-9)
        state = after
    assert float(errors[:, -1].max()) < 1e-9 < float(errors[:, 0].min())


def causal(rows, keys):
    return torch.arange(keys) <= torch.arange(rows)[:, None]


def test_no_order_beats_the_oracle(heads):
    orders = {name: order.config(4, 0.0, 128, TileConfig()) for name, order in study.ORDERS.items()}
    needed = study.ordering_quality(*heads, orders, segments=3, target=0.05)
    assert set(needed) == {*orders, study.ORACLE}
    for name in orders:
        assert (needed[study.ORACLE][0] < needed[name][0]).all()
        assert (needed[name] <= 1).all()


def test_one_heavy_key_is_all_an_order_needs():
    """Key 5 has nearly all the weight of every query."""
    q, k = torch.zeros(1, 1, 512, 32), torch.zeros(1, 1, 512, 32)
    q[..., 0], k[0, 0, 5, 0] = 30.0, 30.0
    orders = {"r=1": LayerConfig.uniform(1, segment=128)}
    needed = study.ordering_quality(q, k, torch.randn(1, 1, 512, 32), orders, segments=3)
    assert study._spread(512, 128, 3) == [128, 256, 384]
    for share in needed.values():
        assert share.flatten().tolist() == pytest.approx([3 * 128 / (128 + 256 + 384)] * 2)


def test_an_exam_grades_each_token():
    """A model that predicts every token, and one that misses the second digit of the first code."""
    exam = study.Exam.make(load_tokenizer("demo"), 1024, random.Random(0))
    assert (len(exam.ids), len(exam.codes)) == (1024, study.NEEDLES)
    missed = exam.codes[0].start + 1

    def model(wrong):
        def logits(input_ids, use_cache, logits_to_keep):
            following = input_ids[0].roll(-1)
            if wrong:
                following[missed - 1] += 1
            return SimpleNamespace(logits=F.one_hot(following[None, -logits_to_keep:], 5000).float())

        logits.device = "cpu"
        return logits

    assert exam.answered(model(wrong=False)) == [[True] * DIGITS] * study.NEEDLES
    graded = study._grades([exam.answered(model(wrong=True))])
    assert graded == {"found": 7 / 8, "digits": 39 / 40}


def test_the_record_holds_settings_curves_and_summaries(studied):
    record = json.loads(studied.read_text())
    assert record["format"] == study.FORMAT
    assert record["versions"]["torch"] == torch.__version__
    assert {"lengths": [384, 512], "segment": 128, "model": "demo", "seed": 0}.items() <= record["settings"].items()
    assert record["variants"]["all"] == {"threshold": "rest", "representatives": 32, "tail": True, "grain": 1}
    assert record["tile_name"] == "64x64x1 w4 s2"
    measured = [(curve["length"], curve["variant"], curve["tile"]) for curve in record["curves"]]
    main = [(length, name, "64x64x1 w4 s2") for length in (384, 512) for name in ("paper", "all")]
    assert sorted(measured) == sorted([*main, (384, "paper", "64x32x2 w4 s2"), (384, "all", "64x32x2 w4 s2")])
    assert {(row["length"], row["order"]) for row in record["ordering"]} == {
        (length, order) for length in (384, 512) for order in (*study.ORDERS, "oracle")
    }
    assert len(record["density_at"]) == 2 * 2 * len(study.TARGETS)
    assert len(record["drift"]) == len(record["tiles"]) == 2 * 3


def test_small_taus_are_exact_and_large_ones_are_not(studied):
    """48 heads each; the reference computes in float32, where only rounding is left of the error."""
    for curve in map(study.Curve.of, json.loads(studied.read_text())["curves"]):
        assert curve.density.shape == curve.rel_mse.shape == (3, 48)
        assert float(curve.density[0].mean()) > 0.99
        assert float(curve.rel_mse[0].max()) < 1e-9
        assert (curve.density.diff(dim=0) <= 0).all()
        assert float(curve.rel_mse[2].mean()) > 1e-4


def test_a_tau_of_rest_means_the_same_for_every_tile(studied):
    """Both tiles check every 64 keys, so they stop at the same keys; "raw" counts tiles and does not."""
    rows = {(row["variant"], row["tau"]): row for row in json.loads(studied.read_text())["tiles"]}
    for tau in (1.0, 100.0):
        assert rows["all", tau]["rel_mse_ratio"] == pytest.approx(1.0, rel=1e-3)
        assert rows["all", tau]["density_ratio"] == pytest.approx(1.0)
    assert rows["paper", 1.0]["density_ratio"] > 1.001


def test_needles_are_found_at_full_density(studied):
    needles = json.loads(studied.read_text())["needles"]
    assert needles["dense"] == {"found": 1.0, "digits": 1.0}
    rows = {(row["variant"], row["tau"]): row for row in needles["rows"]}
    assert list(rows) == [(name, tau) for name in ("paper", "all") for tau in (1e-12, 1.0, 100.0)]
    for name in ("paper", "all"):
        assert rows[name, 1e-12]["found"] == 1.0
        assert 1.0 >= rows[name, 1e-12]["density"] > rows[name, 1.0]["density"] > rows[name, 100.0]["density"] > 0
    assert rows["paper", 100.0]["found"] < 1.0


def test_the_plot_has_a_panel_for_each_length_and_one_for_needles(studied, tmp_path):
    assert run("--plot", studied, "--out", tmp_path / "s.svg") == 0
    text = (tmp_path / "s.svg").read_text()
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len([group for group in root.iter() if group.get("id", "").startswith("axes_")]) == 3
    for label in ("384 tokens", "512 tokens", "needles found", "paper", "all"):
        assert label in text, label


def test_tables_are_plain_without_rich(studied, monkeypatch, capsys):
    record = json.loads(studied.read_text())
    monkeypatch.setitem(sys.modules, "rich.console", None)
    study.print_tables(record)
    study.print_needles(record["needles"])
    firsts = [line.split("\t")[0] for line in capsys.readouterr().out.splitlines() if "\t" in line]
    variants = ["variant", "paper", "all"]
    of_length = [*variants, "order", *study.ORDERS, "oracle"]
    assert firsts == [*of_length * 2, *variants * 2, "variant", "dense", *["paper"] * 3, *["all"] * 3]


BAD = [
    (["--lengths", "8k"], "'8k' is not understood: try 8192,32768"),
    (["--lengths", "256", "--segment", "512"], "length 256 is no longer than --segment 512"),
    (["--lengths", "262144"], "length 262144 is beyond the model's limit"),
    (["--variants", "best"], "invalid choice: 'best'"),
    (["--rows", "0"], "--rows is 0: use at least 1"),
    (["--needle-length", "262144"], "--needle-length 262144 is beyond the model's limit"),
    (["--needle-length", "100"], "--needle-length 100 is too short for 8 needles"),
    (["--model", "demmo"], "did you mean demo"),
    (["--out", "."], "--out . is a folder"),
    (["--plot", "none.json"], "none.json cannot be read"),
    (["--plot", __file__], "test_study.py cannot be read (it is not JSON)"),
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
    assert lines[0].startswith("study_method: ")
    assert message in lines[0]
    assert not list(tmp_path.rglob("*.json"))
