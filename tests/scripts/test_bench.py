"""The benches of the kernel, of whole prefills and of several GPUs, and the study of unlike text, at tiny sizes."""

import json
import sqlite3
from contextlib import closing

import pytest
import torch
from safetensors.torch import save_file

from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.config import LayerConfig, StopRule, TileConfig
from s2o_runtime.reference.dense import dense_attention, exact_attention
from scripts.bench import attention as bench
from scripts.bench import prefill
from scripts.bench.calls import CPU_TILE, bisect, kernel_parts, published_config
from scripts.bench.inputs import exact_rows, model_qkv, rel_mse, repeated_qkv
from scripts.bench.scaling import TIMES, _same_entries, _with_times_of, profile_differences
from scripts.bench.schema import AttentionFile, PrefillFile, read
from scripts.study import unlike
from support.pages import ROOT

pytestmark = pytest.mark.usefixtures("small_sample")

EXHAUSTIVE = pytest.mark.exhaustive(reason="runs a whole benchmark")

TINY = ["--heads", "2/1", "--head-dim", "64", "--dtype", "float32", "--segment", "64", "--tile", "64x32x1:4:2"]
TINY += ["--device", "cpu", "--rounds", "2", "--error-rows", "50"]


def run(*arguments):
    return bench.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Two lengths with the reference backend."""
    out = tmp_path_factory.mktemp("bench") / "new" / "b.json"
    assert run(*TINY, "--lengths", "512,256", "--densities", "0.01,0.5,0.7", "--out", out) == 0
    return read(AttentionFile, json.loads(out.read_text()))


@EXHAUSTIVE
def test_the_record_says_what_was_measured_and_where(measured):
    assert measured.device["name"] == "cpu"
    assert measured.versions["torch"] == torch.__version__
    assert measured.cold_l2 is False
    wanted = {"heads": [2, 1], "head_dim": 64, "batch": 1, "dtype": "float32", "segment": 64, "error_rows": 50}
    assert wanted.items() <= measured.settings.items()
    assert [entry.length for entry in measured.results] == [256, 512]
    assert all(TileConfig(**entry.tile) == TileConfig(64, 32, 1, 4, 2) for entry in measured.results)


def of_form(entry, form):
    return [row for row in entry.rows if row.form == form]


@EXHAUSTIVE
def test_densities_are_reached_and_rates_follow(measured):
    for entry in measured.results:
        rows, dense = of_form(entry, bench.S2O), entry.dense.seconds.median
        assert [row.target for row in rows] == ["never stop", 0.7, 0.5, "lowest"]
        assert rows[0].density == 1.0
        for row in rows[1:3]:  # a stop decision is one chunk of 32 keys for 64 rows; the shortest prompt has 4 tiles
            assert row.density == pytest.approx(row.target, rel=0.1)
        assert rows[3].density < rows[2].density
        for row in rows:
            assert 0 < row.seconds.p25 <= row.seconds.median <= row.seconds.p75
            assert row.rate == pytest.approx(row.density * dense / row.seconds.median)
            assert sum(row.density_of_heads) / 2 == pytest.approx(row.density)
            assert len(row.tau_of_heads) == 2
        errors = [row.rel_mse for row in rows]
        assert errors == sorted(errors)
        assert max(errors[0], entry.dense.rel_mse) < 1e-10 < errors[1]  # float32 rounding, then what was left out


@EXHAUSTIVE
def test_s2o_as_published_has_rows_of_its_own(measured):
    """It has one tau for all heads, and its mean density comes near the target."""
    for entry in measured.results:
        rows = of_form(entry, bench.PUBLISHED)
        assert [row.target for row in rows] == ["never stop", 0.7, 0.5, "lowest"]
        for row in rows:
            assert len(set(row.tau_of_heads)) == 1
        for row in rows[1:3]:
            assert row.density == pytest.approx(row.target, rel=0.1)
    head = published_config(2, 0.1, 64, TileConfig(64, 32, 1, 4, 2)).heads[0]
    assert (head.stop_rule, head.representatives, head.tail) == (StopRule.PAPER, 1, False)


def test_a_cpu_has_a_tile_of_its_own(tmp_path):
    size = ["--device", "cpu", "--heads", "1/1", "--head-dim", "64", "--dtype", "float32", "--segment", "64"]
    size += ["--lengths", "128", "--rounds", "1", "--error-rows", "8", "--densities", "0.9", "--steps", "1"]
    assert run(*size, "--out", tmp_path / "b.json") == 0
    (entry,) = read(AttentionFile, json.loads((tmp_path / "b.json").read_text())).results
    assert TileConfig(**entry.tile) == CPU_TILE


@EXHAUSTIVE
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the kernels on CPU tensors, in Triton's interpreter")
def test_the_kernel_is_taken_apart(tmp_path):
    """Ranking and the kernel without it have times of their own."""
    size = [*TINY, "--heads", "1/1", "--lengths", "128", "--rounds", "1", "--error-rows", "8"]
    assert run(*size, "--backend", "triton", "--densities", "0.9", "--steps", "1", "--out", tmp_path / "b.json") == 0
    (entry,) = read(AttentionFile, json.loads((tmp_path / "b.json").read_text())).results
    dense = entry.dense.seconds.median
    for rank in (entry.rank, entry.published_rank):
        assert rank.share_of_dense == pytest.approx(rank.seconds.median / dense)
    for row in entry.rows:
        assert row.prefill_rate == pytest.approx(row.density * dense / row.prefill_seconds.median)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the kernels on CPU tensors, in Triton's interpreter")
def test_the_parts_make_the_whole():
    """What is timed without the ranking computes what the whole call computes."""
    q, k, v = torch.randn(1, 1, 128, 64), torch.randn(1, 1, 128, 64), torch.randn(1, 1, 128, 64)
    config = LayerConfig.uniform(1, tau=1e6, segment=64, tile=TileConfig(64, 32, 1, 4, 2))
    rank, (prefill,) = kernel_parts(q, k, v, [config])
    rank()
    expected = s2o_attention(q, k, v, config, backend="triton")
    assert torch.equal(prefill(), expected)
    assert not torch.equal(expected, dense_attention(q, k, v))


def test_bisection_finds_each_heads_tau():
    """A density of 1 / (1 + tau * sharpness), known in closed form."""
    sharpness = torch.tensor([0.01, 1.0, 300.0], dtype=torch.float64)

    def density(config):
        return 1 / (1 + sharpness * torch.tensor([head.tau for head in config.heads], dtype=torch.float64))

    config = bisect(LayerConfig.uniform(3), 0.2, 20, density)
    assert [head.tau for head in config.heads] == pytest.approx((4 / sharpness).tolist(), rel=1e-3)


@pytest.mark.parametrize(("length", "count"), [(300, 40), (40, 300)], ids=["sample", "all rows"])
def test_sampled_rows_are_exact_attention(length, count):
    q, k, v = torch.randn(2, 4, length, 32), torch.randn(2, 2, length, 32), torch.randn(2, 2, length, 32)
    rows, exact = exact_rows(q, k, v, count, seed=0)
    assert len(rows) == min(length, count)
    assert (rows.diff() > 0).all()
    torch.testing.assert_close(exact, exact_attention(q, k, v)[:, :, rows])
    assert rel_mse(dense_attention(q, k, v)[:, :, rows], exact) < 1e-10


def test_a_models_heads_are_repeated_to_fill_the_call():
    """The demo model has 6 layers of 8 query and 2 KV heads: 13 KV heads need one of them twice."""
    layers = model_qkv("demo", 128, 1, 0, torch.device("cpu"))
    q, k, v = repeated_qkv(layers, (52, 13), 128, torch.float32)
    assert (q.shape, k.shape, v.shape) == ((1, 52, 128, 128), (1, 13, 128, 128), (1, 13, 128, 128))
    for t, heads in ((q, 4), (k, 1), (v, 1)):
        torch.testing.assert_close(t[:, -heads:], t[:, :heads])
        assert not torch.equal(t[:, :heads], t[:, 8 * heads : 9 * heads])


BAD = [
    (["--lengths", "8k"], "'8k' is not understood: try 8192,32768"),
    (["--lengths", "64"], "length 64 is too short for --segment 64: try 65"),
    (["--densities", "0.5,2"], "density 2 is out of range"),
    (["--heads", "4"], "are not query heads and KV heads"),
    (["--heads", "4/3"], "are not query heads and KV heads"),
    (["--tile", "128"], "'128' is not understood: try 128x64x4:8:3"),
    (["--tile", "96x32x1:4:2"], "block_m 96 is not supported"),
    (["--tile", "128x32x1:8:2"], "segment 64 of head 0 is not a multiple of"),
    (["--rounds", "0"], "--rounds is 0: use at least 1"),
    (["--data", "demmo"], "did you mean demo"),
    (["--data", "demo"], "the model has 8/2 heads of 128: use --heads of that ratio"),
    (["--out", "."], "--out . is a folder"),
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
    assert lines[0].startswith("scripts.bench.attention: ")
    assert message in lines[0]
    assert not list(tmp_path.rglob("*.json"))


@EXHAUSTIVE
def test_linear_tails_have_a_row_of_their_own(tmp_path):
    out = tmp_path / "b.json"
    assert run(*TINY, "--lengths", "256", "--densities", "0.01", "--linear", "--out", out) == 0
    (entry,) = read(AttentionFile, json.loads(out.read_text())).results
    (row,), (lowest,) = of_form(entry, bench.LINEAR_TAILS), of_form(entry, bench.S2O)[1:]
    assert (row.target, row.prefill_seconds) == ("one chunk", None)
    assert row.density == pytest.approx(lowest.density)
    assert 0 < row.rel_mse != lowest.rel_mse


@EXHAUSTIVE
def test_a_model_is_timed_dense_and_at_a_density(tmp_path, capsys):
    out = tmp_path / "p.json"
    arguments = ["--models", "demo", "--lengths", "512", "--densities", "0.8", "--segment", "128", "--device", "cpu"]
    assert prefill.main([*arguments, "--rounds", "1", "--steps", "3", "--out", str(out)]) == 0
    (entry,) = read(PrefillFile, json.loads(out.read_text())).results
    assert (entry.model, entry.length) == ("demo", 512)
    dense, sparse = entry.rows
    assert (dense.name, dense.density) == ("dense, cuDNN", 1.0)
    assert sparse.name == "S2O, density 0.8"
    assert 0.5 < sparse.density < 1.0  # a window is an eighth of the prompt, and three steps are few
    for row in (dense, sparse):
        assert row.attention_seconds == pytest.approx(row.share * row.seconds.median)
        assert row.share > 0.0
    assert "attention" in capsys.readouterr().out


def test_an_unknown_model_is_one_sentence(tmp_path, capsys):
    assert prefill.main(["--models", "quantum", "--device", "cpu", "--out", str(tmp_path / "p.json")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("scripts.bench.prefill: model 'quantum' is not known")


def written(path, tau, **record):
    save_file({"tau": torch.tensor([tau])}, path, {"s2o": json.dumps(record)})
    return path


def test_profiles_that_differ_in_times_alone_are_the_same(tmp_path):
    one = written(tmp_path / "1", 1.0, layers=[{"mse": 1.0, "seconds": 0.5}])
    assert profile_differences(one, written(tmp_path / "2", 1.0, layers=[{"mse": 1.0, "seconds": 0.7}])) == []
    assert profile_differences(one, written(tmp_path / "3", 2.0, layers=[{"mse": 1.0}])) == ["tensor tau"]
    assert profile_differences(one, written(tmp_path / "4", 1.0, layers=[{"mse": 2.0}])) == [
        "s2o.layers[0].mse: 1.0 and 2.0"
    ]
    assert profile_differences(one, tmp_path / "none") == [f"{tmp_path / 'none'} was not written"]


@pytest.fixture
def journals(tmp_path):
    """Two journals with the same curves but one, and times of their own."""
    paths = [tmp_path / "one", tmp_path / "many"]
    for number, path in enumerate(paths):
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("CREATE TABLE entries (kind TEXT, key TEXT, value TEXT, tensors BLOB)")
            rows = [("curves", "a", "same", b"1"), ("curves", "b", f"of {number}", b"2")]
            rows += [(kind, f"{kind} {number}", "t", None) for kind in TIMES]
            database.executemany("INSERT INTO entries VALUES (?, ?, ?, ?)", rows)
    return paths


def test_entries_are_compared_to_the_last_bit(journals):
    assert _same_entries(*journals, "curves") == (1, 2)


def test_a_replay_has_the_times_of_one_and_the_rest_of_many(journals, tmp_path):
    _with_times_of(*journals, tmp_path / "replay")
    with closing(sqlite3.connect(tmp_path / "replay")) as database:
        rows = dict(database.execute("SELECT key, value FROM entries").fetchall())
    assert rows == {"a": "same", "b": "of 1"} | {f"{kind} 0": "t" for kind in TIMES}


@EXHAUSTIVE
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
