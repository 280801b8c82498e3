"""scripts/bench/methods.py at a tiny size: what it says of a setting is what the setting does, whole and in chunks."""

import json
import shlex

import pytest
import torch

from calibrate.search.dense_kernels import attend_in_parts
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.config import LayerConfig, TileConfig
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.files import hash_file
from s2o_runtime.identity import Geometry
from s2o_runtime.profile import Profile, save_profile
from s2o_runtime.reference.dense import exact_attention
from scripts.bench import boards, inputs
from scripts.bench import methods as bench
from scripts.bench.baselines.run import baseline_attention
from scripts.bench.baselines.settings import parse
from scripts.bench.schema import CALIBRATED, DENSE, ONE_SETTING, PROVEN, MethodRow, MethodsEntry, MethodsFile, read

LENGTH, CHUNK, TURN = 520, 256, 200
PBS = "pbs:keep=0.6,segment=128,block=64"
V2 = "flash-prefill-v2:alpha=1,block=64,first=1,window=1,last=0,dense_layers=1"
S2O = "tau=3,segment=64,tail=mean"
CONFIG = LayerConfig.uniform(2, tau=3.0, segment=64, tile=TileConfig(64, 64, 1))
CALIBRATED_KEY = CALIBRATED, "rel_mse 0.001 (calibrated), proven"


@pytest.fixture(scope="module")
def qkv():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, LENGTH, 64, generator=generator) for heads in (2, 1, 1))
    return q + k[:, :1], k, v  # some keys weigh more than others


@pytest.fixture(scope="module", autouse=True)
def _model_of_two_layers(qkv):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "model_qkv", lambda *_: [qkv, qkv])
        patch.setattr(bench, "ERRORS", (0.5, 9.0))
        patch.setattr(inputs, "ERROR_ROWS", LENGTH)
        yield


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """The file of a profile for prompts of 400 tokens or more."""
    path = tmp_path_factory.mktemp("profile") / "calibrated.safetensors"
    record = {"budget": {"kind": "rel_mse", "value": 1e-3}, "proof": "held out"}
    device = DeviceIdentity("cpu", "cpu")
    save_profile(Profile("m", Geometry("llama", 2, 2, 1, 64), "", device, (400,), ((CONFIG,) * 2,), record), path)
    return path


def run(out, *arguments):
    assert bench.main([*arguments, "--out", str(out)]) == 0
    (entry,) = read(MethodsFile, json.loads(out.read_text())).results
    return entry


@pytest.fixture(scope="module")
def entry(profile, tmp_path_factory):
    flags = f"--methods dense {PBS} {V2} {S2O} --profile {profile} --lengths {LENGTH}"
    flags += f" --chunks {CHUNK},{LENGTH} --turns {TURN} --device cpu --rounds 1"
    return run(tmp_path_factory.mktemp("out") / "out.json", *flags.split())


def key_of(text):
    return tuple(text.split(":"))


def by_key(rows, turn=None):
    return {(row.method, row.setting): row for row in rows if row.turn == turn}


@pytest.mark.parametrize("chunk", [None, CHUNK], ids=["whole", "chunks"])
def test_errors_and_densities_are_those_of_the_setting(entry, qkv, profile, chunk):
    rows = by_key(entry.chunked if chunk else entry.rows)
    assert list(rows) == [(DENSE, ""), *map(key_of, (PBS, V2)), (ONE_SETTING, S2O), CALIBRATED_KEY]
    q, k, v = qkv
    exact, causal = exact_attention(q, k, v), LENGTH * (LENGTH + 1) / 2
    for text in (PBS, V2):
        outs, computed = [], 0.0
        for begin in range(0, LENGTH, chunk or LENGTH):
            end = min(begin + (chunk or LENGTH), LENGTH)
            out, stats = baseline_attention(q[:, :, begin:end], k[:, :, :end], v[:, :, :end], parse(text))
            outs.append(out)
            computed += float(stats.density.mean()) * (end * (end + 1) - begin * (begin + 1)) / 2
        mse = float((torch.cat(outs, 2) - exact).square().mean())
        layer = rows[key_of(text)].layers[-1]
        expected = [mse, mse / float(exact.square().mean()), computed / causal]
        assert [layer.mse, layer.rel_mse, layer.density] == pytest.approx(expected, rel=1e-4)
        assert 0.1 < layer.density < 0.95
    assert rows[DENSE, ""].rel_mse < 1e-10
    assert rows[key_of(V2)].layers[0].density == 1.0  # a layer that it leaves dense
    assert rows[CALIBRATED_KEY].profile == hash_file(profile)


def test_times_are_of_all_layers_and_selecting_is_part_of_them(entry):
    for row in (*entry.rows, *entry.chunked):
        assert [layer.layer for layer in row.layers] == [0, 1]
        assert row.seconds == pytest.approx(sum(layer.seconds for layer in row.layers))
        assert (row.selecting_seconds > 0) == (row.method in ("pbs", "flash-prefill-v2"))
    assert entry.rows[0].speedup == entry.chunked[0].speedup == entry.chunked[-5].speedup == 1.0


@pytest.mark.parametrize("turn", [None, TURN])
@pytest.mark.parametrize("key", [key_of(V2), (ONE_SETTING, S2O), CALIBRATED_KEY], ids=lambda key: key[0])
def test_the_command_of_a_row_measures_it_again(entry, key, turn, tmp_path):
    row = by_key(entry.chunked, turn)[key]
    python, flag, module, *words = shlex.split(row.command)
    assert (python, flag, module) == ("python", "-m", bench.NAME)
    again = run(tmp_path / "again.json", *words, "--device", "cpu")
    assert set(by_key(again.rows)) == {(DENSE, ""), key}
    assert by_key(again.rows)[key].rel_mse == by_key(entry.rows)[key].rel_mse
    assert by_key(again.chunked, turn)[key].rel_mse == row.rel_mse


def test_chunks_and_turns_run_the_settings_of_the_whole_prompt(entry, qkv):
    """Though the first chunk has fewer keys than were calibrated. A turn's errors are of its own rows."""
    whole, chunked = (by_key(rows)[CALIBRATED_KEY] for rows in (entry.rows, entry.chunked))
    assert (chunked.density, chunked.rel_mse) == pytest.approx((whole.density, whole.rel_mse), rel=1e-4)
    q, k, v = qkv
    last = q[:, :, -TURN:]
    out, exact = s2o_attention(last, k, v, CONFIG), exact_attention(last, k, v)
    expected = float((out - exact).square().mean() / exact.square().mean())
    assert by_key(entry.chunked, TURN)[CALIBRATED_KEY].rel_mse == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("batch", "parts"), [(1, 1), (1, 4), (2, 2)])
def test_parts_of_the_keys_join_to_dense_attention(batch, parts):
    q, k, v = (torch.randn(batch, 2, length, 64) for length in (72, 200, 200))

    def run(q, k, v, is_causal):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)

    torch.testing.assert_close(attend_in_parts(q, k, v, parts, run), exact_attention(q, k, v))


def test_ladders_are_settings_of_both_programs():
    settings = bench.settings_of(["dense", *bench.LADDERS], torch.device("cpu"))
    texts = [boards.text_of(*key) for key in settings if key != (DENSE, "")]
    assert sum(len(forms) * len(numbers) for forms, numbers in bench.LADDERS.values()) == len(texts)
    assert set(bench.settings_of(texts, torch.device("cpu"))) == set(settings) - {(DENSE, "")}
    first = [parse(text).first for text in texts if ":" in text]
    assert min(first) > 0  # no method has to do without the first keys, which most models attend to


def row(method, setting, seconds, rel_mse, density=0.5, profile=None):
    return MethodRow(method, setting, seconds, 0.0, 1 / seconds, density, 0.0, rel_mse, 0.0, [], profile)


ROWS = [
    row(DENSE, "", 1.0, 1e-6, density=1.0),
    row("pbs", "keep=0.9", 0.8, 9e-4),
    row("pbs", "keep=0.7", 0.5, 9e-3),
    row("pbs", "keep=0.3", 0.2, 9e-2),
    row("sparge", "keep=1", 0.1, 0.0, density=1.0),
    row(CALIBRATED, f"rel_mse 0.001 (a){PROVEN}", 0.3, 9e-4, profile="digest"),
    row(CALIBRATED, "rel_mse 0.001 (b)", 0.2, 9e-4),
]


def test_a_board_has_the_fastest_measured_setting_of_each_method():
    """A row that computes everything, or was not proven, does not count."""
    assert boards.at_error(ROWS, 1e-3) == {DENSE: ROWS[0], "pbs": ROWS[1], CALIBRATED: ROWS[5]}
    assert boards.at_error(ROWS, 1e-2) == {DENSE: ROWS[0], "pbs": ROWS[2], CALIBRATED: ROWS[5]}
    assert boards.candidates(ROWS, [1e-3, 1e-2]) == [*ROWS[:4], ROWS[5]]


def test_answers_are_joined_with_times_by_text_and_digest():
    rows = [("p", -0.01), ("pbs:keep=0.7", 0.0), ("pbs:keep=0.3", -0.02), ("pbs:keep=0.3", 0.0)]
    lengths = (32768, 32768, 32768, 8192)
    evaluation = {
        "variants": [{"name": name, "identity": "digest" if name == "p" else name} for name, _ in rows],
        "quality": [
            {"variant": name, "length": length, "difference": difference}
            for (name, difference), length in zip(rows, lengths, strict=True)
        ],
    }
    answered = boards.differences(MethodsEntry(32768, ROWS), evaluation)
    assert answered == {"digest": -0.01, "pbs:keep=0.7": 0.0, "pbs:keep=0.3": -0.02}
    assert [answered.get(boards.identity_of(row)) for row in ROWS] == [None, None, 0.0, -0.02, None, -0.01, None]
