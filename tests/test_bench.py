"""scripts/bench_attention.py at a tiny size: what it records is consistent, what it plots is a picture."""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import bench_attention as bench

from s2o_runtime.attention import s2o_attention
from s2o_runtime.config import LayerConfig, TileConfig
from s2o_runtime.dense import dense_attention, exact_attention

TINY = ["--heads", "2/1", "--head-dim", "64", "--dtype", "float32", "--segment", "64", "--tile", "64x32x1:4:2"]
TINY += ["--device", "cpu", "--rounds", "2", "--error-rows", "50"]


def run(*arguments):
    return bench.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Two lengths with the reference backend."""
    out = tmp_path_factory.mktemp("bench") / "new" / "b.json"
    assert run(*TINY, "--lengths", "512,256", "--densities", "0.01,0.5,0.7", "--out", out) == 0
    return out


def test_the_record_says_what_was_measured_and_where(measured):
    record = json.loads(measured.read_text())
    assert record["device"]["name"] == "cpu"
    assert record["versions"]["torch"] == torch.__version__
    assert record["cold_l2"] is False
    wanted = {"heads": [2, 1], "head_dim": 64, "batch": 1, "dtype": "float32", "segment": 64, "error_rows": 50}
    assert wanted.items() <= record["settings"].items()
    assert [result["length"] for result in record["results"]] == [256, 512]
    assert all(TileConfig(**result["tile"]) == TileConfig(64, 32, 1, 4, 2) for result in record["results"])


def test_densities_are_reached_and_rates_follow(measured):
    for result in json.loads(measured.read_text())["results"]:
        rows, dense = result["rows"], result["dense"]["seconds"]["median"]
        assert [row["target"] for row in rows] == ["never stop", 0.7, 0.5, "lowest"]
        assert rows[0]["density"] == 1.0
        for row in rows[
            1:3
        ]:  # a stop decision is one chunk of 32 keys for 64 rows, the shortest prompt has 4 row tiles
            assert row["density"] == pytest.approx(row["target"], rel=0.1)
        assert rows[3]["density"] < rows[2]["density"]
        for row in rows:
            seconds = row["seconds"]
            assert 0 < seconds["p25"] <= seconds["median"] <= seconds["p75"]
            assert row["rate"] == pytest.approx(row["density"] * dense / seconds["median"])
            assert sum(row["density_of_heads"]) / 2 == pytest.approx(row["density"])
            assert len(row["tau_of_heads"]) == 2
        errors = [row["rel_mse"] for row in rows]
        assert errors == sorted(errors)
        assert (
            max(errors[0], result["dense"]["rel_mse"]) < 1e-10 < errors[1]
        )  # float32 rounding, then what was left out


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the kernels on CPU tensors, in Triton's interpreter")
def test_the_kernel_is_taken_apart(tmp_path):
    """Ranking and the kernel without it have times of their own."""
    size = [*TINY, "--heads", "1/1", "--lengths", "128", "--rounds", "1", "--error-rows", "8"]
    assert run(*size, "--backend", "triton", "--densities", "0.9", "--steps", "1", "--out", tmp_path / "b.json") == 0
    (result,) = json.loads((tmp_path / "b.json").read_text())["results"]
    dense, rank = result["dense"]["seconds"]["median"], result["rank"]
    assert rank["share_of_dense"] == pytest.approx(rank["seconds"]["median"] / dense)
    for row in result["rows"]:
        assert row["prefill_rate"] == pytest.approx(row["density"] * dense / row["prefill_seconds"]["median"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the kernels on CPU tensors, in Triton's interpreter")
def test_the_parts_make_the_whole():
    """What is timed without the ranking computes what the whole call computes."""
    q, k, v = torch.randn(1, 1, 128, 64), torch.randn(1, 1, 128, 64), torch.randn(1, 1, 128, 64)
    config = LayerConfig.uniform(1, tau=1e6, segment=64, tile=TileConfig(64, 32, 1, 4, 2))
    parts = bench.kernel_parts(q, k, v, [config])
    expected = s2o_attention(q, k, v, config, backend="triton")
    assert torch.equal(parts["prefill 0"](), expected)
    assert not torch.equal(expected, dense_attention(q, k, v))


def test_bisection_finds_each_heads_tau():
    """A density of 1 / (1 + tau * sharpness), known in closed form."""
    sharpness = torch.tensor([0.01, 1.0, 300.0], dtype=torch.float64)

    def density(config):
        return 1 / (1 + sharpness * torch.tensor([head.tau for head in config.heads], dtype=torch.float64))

    found = bench.bisect(LayerConfig.uniform(3), 0.2, 20, density)
    assert [head.tau for head in found.heads] == pytest.approx((4 / sharpness).tolist(), rel=1e-3)


@pytest.mark.parametrize(("length", "count"), [(300, 40), (40, 300)], ids=["sample", "all rows"])
def test_sampled_rows_are_exact_attention(length, count):
    q, k, v = torch.randn(2, 4, length, 32), torch.randn(2, 2, length, 32), torch.randn(2, 2, length, 32)
    rows, exact = bench.exact_rows(q, k, v, count, seed=0)
    assert len(rows) == min(length, count)
    assert (rows.diff() > 0).all()
    torch.testing.assert_close(exact, exact_attention(q, k, v)[:, :, rows])
    assert bench.rel_mse(dense_attention(q, k, v)[:, :, rows], exact) < 1e-10


def test_a_models_heads_are_repeated_to_fill_the_call(tmp_path):
    """The demo model has 6 layers of 8 query and 2 KV heads: 13 KV heads need one of them twice."""
    arguments = [*TINY, "--heads", "52/13", "--head-dim", "128", "--data", "demo"]
    q, k, v = bench.captured(bench.parser().parse_args(arguments), 128, torch.device("cpu"))
    assert (q.shape, k.shape, v.shape) == ((1, 52, 128, 128), (1, 13, 128, 128), (1, 13, 128, 128))
    for t, heads in ((q, 4), (k, 1), (v, 1)):
        torch.testing.assert_close(t[:, -heads:], t[:, :heads])
        assert not torch.equal(t[:, :heads], t[:, 8 * heads : 9 * heads])


def test_the_plot_is_an_svg_with_a_panel_for_each_length(measured, tmp_path):
    assert run("--plot", measured, measured, "--out", tmp_path / "b.svg") == 0
    text = (tmp_path / "b.svg").read_text()
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len([group for group in root.iter() if group.get("id", "").startswith("axes_")]) == 2
    for label in (
        "256 tokens",
        "512 tokens",
        "ideal: 100% of dense's rate",
        "target: 75%",
        "64x32x1 w4 s2, segment 64",
    ):
        assert label.replace(" ", "") in text.replace(" ", "").replace("&#x27;", "'"), label


def test_plain_output_without_rich(measured, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    bench.print_table(json.loads(measured.read_text())["results"][0])
    assert [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()[1:]] == [
        "target", "never stop", "0.7", "0.5", "lowest",
    ]  # fmt: skip


def test_plotting_without_matplotlib_says_what_to_install(measured, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run("--plot", measured, "--out", measured.with_suffix(".svg")) == 2
    assert "is not installed: run pip install" in capsys.readouterr().err


BAD = [
    (["--lengths", "8k"], "'8k' is not understood: try 8192,32768"),
    (["--lengths", "64"], "length 64 is no longer than --segment 64"),
    (["--densities", "0.5,2"], "density 2 is out of range"),
    (["--heads", "4"], "are not query heads and KV heads"),
    (["--heads", "4/3"], "are not query heads and KV heads"),
    (["--tile", "128"], "'128' is not understood: try 128x64x4:8:3"),
    (["--tile", "96x32x1:4:2"], "block_m 96 is not supported"),
    (["--tile", "128x32x1:8:2"], "segment 64 of head 0 is not a multiple of"),
    (["--rounds", "0"], "--rounds is 0: use at least 1"),
    (["--data", "demmo"], "did you mean demo"),
    (["--data", "demo"], "demo has 8/2 heads of 128: use --heads of that ratio"),
    (["--out", "."], "--out . is a folder"),
    (["--plot", "none.json"], "none.json cannot be read"),
    (["--plot", __file__], "test_bench.py cannot be read (it is not JSON)"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(arguments)[:30] for arguments, _ in BAD])
def test_bad_options_are_one_sentence_and_exit_code_2(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        code = run(*TINY, "--lengths", "256", *arguments)
    except SystemExit as exit:
        code = exit.code
    lines = capsys.readouterr().err.splitlines()
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith("bench_attention: ")
    assert message in lines[0]
    assert not list(tmp_path.rglob("*.json"))
