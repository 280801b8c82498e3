"""The drift check: its estimate against the true error, and what it says and does when a profile no longer fits."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from s2o_runtime import DriftCheck, LayerConfig, TileConfig, explain, patch, patched, s2o_attention, unpatch
from s2o_runtime.call import Scoring
from s2o_runtime.errors import ConfigError, ProfileError
from s2o_runtime.huggingface.hf import get_layer_states
from s2o_runtime.monitor.drift import DriftMonitor, ErrorLimits, SampledErrors, read_error_limits, sample_errors
from s2o_runtime.reference.dense import exact_attention
from support.models import LENGTH, RUNS, make_profile, new_model, padded_batch, paths, prompt

OFTEN = DriftCheck(every=1, rows=16, after=3)
TILE = TileConfig(64, 32, 1, 4, 1)


def budgeted(profile, value, kind="rel_mse"):
    return dataclasses.replace(profile, record={"budget": {"kind": kind, "value": value}})


@pytest.fixture
def plain():
    return new_model(initializer_range=0.2)  # else all scores are alike, and what is skipped does not matter


def true_errors(q, k, v, out, kv_start=None, **features):
    """mse and mean square of the dense output, over rows that are not padding and over the last eighth of these."""
    truth = exact_attention(q, k, v, kv_start=kv_start, **features)
    start = torch.zeros(len(q), dtype=torch.int64) if kv_start is None else kv_start
    position = torch.arange(q.shape[2]) + k.shape[2] - q.shape[2]
    errors = []
    for first in (start, k.shape[2] - (k.shape[2] - start) // 8):
        real = (position >= first[:, None])[:, None, :, None].expand_as(truth)
        errors += [float((out - truth)[real].square().mean()), float(truth[real].square().mean())]
    return errors


@pytest.mark.parametrize("starts", [None, [0, 90, 299], [0, 250, 230]], ids=["", "padded", "short-sequences"])
@pytest.mark.parametrize("q_len", [300, 101], ids=["whole", "chunk"])
def test_the_estimate_is_the_error_within_sampling_error(starts, q_len):
    """Grouped heads, three sequences; the mean of many draws is the truth, one draw is not far off."""
    q, k, v = torch.randn(3, 4, q_len, 32) * 2, torch.randn(3, 2, 300, 32), torch.randn(3, 2, 300, 32)
    kv_start = None if starts is None else torch.tensor(starts)
    out = s2o_attention(q, k, v, LayerConfig.uniform(4, tau=1.0, segment=64, tile=TILE), kv_start=kv_start)
    truth = true_errors(q, k, v, out, kv_start)
    generator = torch.Generator().manual_seed(0)
    draws = torch.tensor([sample_errors(q, k, v, out, 8, generator, kv_start=kv_start) for _ in range(200)])
    errors = draws.std(0) / len(draws) ** 0.5
    assert min(truth) > 0
    for estimate, error, expected in zip(draws.mean(0).tolist(), errors.tolist(), truth, strict=True):
        # 4 standard errors; 1e-6 of it is float32's rounding of the dense rows
        assert abs(estimate - expected) < 4 * error + 1e-6 * expected


@pytest.mark.parametrize("scores", [1, None], ids=["head by head", "together"])
@pytest.mark.parametrize(
    ("value_dim", "features"), [(24, {}), (32, {"softcap": 1.5, "sinks": torch.linspace(-1, 5, 4), "scale": 0.4})],
    ids=["narrow-values", "cap-sinks"],
)  # fmt: skip
@pytest.mark.parametrize(("q_len", "rows"), [(96, 2 * 71 * 25), (20, 40)])  # of 96 rows, 25 are of the last eighth
def test_all_rows_give_the_error_itself(q_len, rows, value_dim, features, scores, monkeypatch):
    """As many strata as rows, or a multiple, in both halves: nothing is left to chance. A padded sequence is none."""
    if scores:
        monkeypatch.setattr("s2o_runtime.monitor.drift.SCORES", scores)
    q, k, v = torch.randn(2, 4, q_len, 32), torch.randn(2, 2, 200, 32), torch.randn(2, 2, 200, value_dim)
    out = torch.randn(2, 4, q_len, value_dim)
    truth = true_errors(q[:1], k[:1], v[:1], out[:1], **features)
    for batch, starts in ((1, None), (2, torch.tensor([0, 200]))):
        given = (tensor[:batch] for tensor in (q, k, v, out))
        sampled = sample_errors(*given, rows, torch.Generator(), Scoring(**features), starts)
        assert [float(error) for error in sampled] == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize("kind", ["mse", "rel_mse"])
def test_the_running_error_is_in_the_budgets_unit(kind):
    """Over a limit of 0.5, from two calls whose errors differ: of rel_mse the errors' sum over the powers' sum."""
    monitor = DriftMonitor(DriftCheck(every=1, rows=112), 0, ErrorLimits(kind, {64: 0.5}))
    truths = []
    for scale in (1.0, 3.0):
        q, k, v = (torch.randn(1, 2, 64, 32) for _ in range(3))
        out = torch.randn(1, 2, 64, 32) * scale
        monitor.see(q, k, v, out, Scoring(), None)
        truths.append(true_errors(q, k, v, out))
    older = 1 - 1 / 64
    for part, found in ((0, monitor.numbers().mean), (2, monitor.numbers().last)):
        error = older * truths[0][part] + truths[1][part]
        unit = older * truths[0][part + 1] + truths[1][part + 1] if kind == "rel_mse" else older + 1
        assert found == pytest.approx(error / unit / 0.5, rel=1e-4)


@torch.no_grad()
def test_what_keeps_to_the_budget_is_not_warned_about(plain, caplog):
    """The budget is twice what the layers do, by their own running errors; then margins of one are enough."""
    loose = budgeted(make_profile(plain, 0.3), 1.0)
    ids = torch.randint(3, 128, (8, 1, LENGTH))
    with patched(plain, loose, drift=OFTEN):
        for prompt in ids:
            plain(prompt)
        worst = max(max(row["error"], row["last"] / 2) for row in explain(plain))
    assert worst > 1e-6
    check = dataclasses.replace(OFTEN, margin=1.0)
    with patched(plain, budgeted(loose, 2 * worst), drift=check):
        for prompt in ids:
            plain(prompt)
        assert 0 < max(row["error"] for row in explain(plain)) < 1
        assert paths(plain) == {("s2o", RUNS)}
    assert caplog.text == ""


@torch.no_grad()
@pytest.mark.parametrize(("action", "how"), [("warn", "plain"), ("dense", "padded"), ("dense", "chunked")])
def test_a_loosened_profile_is_noticed(plain, caplog, action, how):
    """It was proven to 1e-6 and skips nearly everything. Layer 0 warns once; layer 1 is within what it may have."""
    profile = budgeted(make_profile(plain, 1e3), 1e-6)
    proof = {"length": 100, "layers": [{"limit": 1e-6}, {"limit": 1e3}]}
    profile = dataclasses.replace(profile, record=profile.record | {"held_out": [proof]})
    patch(plain, profile, drift=dataclasses.replace(OFTEN, action=action))
    dense = copy.deepcopy(plain)
    unpatch(dense)

    def run(which):
        torch.manual_seed(7)
        ids, mask = padded_batch(length=330)
        if how == "padded":
            return which(ids, attention_mask=mask).logits[mask == 1]
        if how == "plain":
            return which(ids[:1]).logits
        memory = DynamicCache(config=which.config)
        return torch.cat([which(part, past_key_values=memory).logits for part in ids[:1].split((200, 130), 1)], 1)

    for _ in range(6):
        run(plain)
    [warning] = caplog.records
    assert warning.getMessage().startswith("layer 0: the sampled rel_mse is ")
    verdict = get_layer_states(plain)[0].drift.verdict
    assert verdict in warning.getMessage()
    calls = 12 if how == "chunked" else 6
    expected = {(1, "s2o", RUNS): calls, (0, "s2o", RUNS): calls}
    if action == "dense":  # after three checks
        expected |= {(0, "s2o", RUNS): 3, (0, "dense", verdict): calls - 3}
    assert {(row["layer"], row["path"], row["reason"]): row["calls"] for row in explain(plain)} == expected
    if action == "dense":
        get_layer_states(plain)[1].rejected = "for the test"  # then no layer is left that differs from dense
        torch.testing.assert_close(run(plain), run(dense), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_every_nth_call_is_checked_and_layers_take_turns(plain):
    patch(plain, budgeted(make_profile(plain, 0.5), 1.0), drift=DriftCheck(every=4))
    checks = []
    for _ in range(8):
        plain(prompt())
        checks.append([state.drift.checks for state in get_layer_states(plain)])
    assert checks == [[0, 0], [0, 0], [0, 1], [1, 1], [1, 1], [1, 1], [1, 2], [2, 2]]


def test_a_check_changes_nothing_and_works_in_and_out_of_inference_mode(plain):
    """A program draws and computes the same with it; a copy starts anew."""
    profile, ids, results = budgeted(make_profile(plain, 0.5), 1.0), prompt(), []
    for drift in (None, OFTEN):
        with patched(plain, profile, drift=drift), torch.inference_mode():
            torch.manual_seed(3)
            results.append((plain(ids).logits, torch.rand(4)))
            if drift is OFTEN:
                with torch.inference_mode(False), torch.no_grad():
                    plain(ids)
                assert [state.drift.checks for state in get_layer_states(plain)] == [2, 2]
                assert all(0 < row["error"] < 1 for row in explain(plain))
                copies = [state.drift for state in get_layer_states(copy.deepcopy(plain))]
                assert [(one.check, one.layer, one.checks) for one in copies] == [(OFTEN, 0, 0), (OFTEN, 1, 0)]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def record(*limits, kind="mse", value=1e-4, **older):
    return {
        "budget": {"kind": kind, "value": value} | older,
        "held_out": [{"length": length, "layers": [{"limit": each} for each in of]} for length, of in limits],
    }


@pytest.mark.parametrize(("kind", "unit"), [("mse", "mse"), ("kl", "rel_mse")])
def test_allowed_errors_are_the_limits_of_the_proof(plain, kind, unit):
    profile = make_profile(plain, 0.5)
    limits = record((128, (0.1, 0.2)), (1024, (0.3, 0.0)), kind=kind)
    first, second = read_error_limits(dataclasses.replace(profile, record=limits))
    assert first.unit == unit
    assert [first.at(length) for length in (1, 128, 360, 370, 10**6)] == [0.1, 0.1, 0.1, 0.3, 0.3]
    assert second.at(10**6) == 0.2  # a limit of 0 is a dense layer's
    assert [limits.at(LENGTH) for limits in read_error_limits(budgeted(profile, 0.7))] == [0.7, 0.7]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "names no budget that drift could be held to"),
        (record(value=float("nan")), "names no budget"),
        (record((128, (0.1, 0.1)), scope="model"), "names no budget"),
        (record(kind="kl"), "does not say what each layer may have of the model's budget"),
        (record((-1, (0.1, 0.1)), (128, ("a", True)), kind="kl"), "does not say what each layer may have"),
        ({"budget": {"kind": "kl", "value": 1}, "held_out": [3, {"layers": 4}]}, "does not say"),
    ],
)
def test_profiles_without_limits_are_refused_where_a_check_is_asked_for(plain, record, message, info_log):
    profile = dataclasses.replace(make_profile(plain, 0.5), record=record)
    for asked in (OFTEN, "warn", "dense"):
        with pytest.raises(ProfileError, match=message):
            patch(plain, profile, drift=asked)
        assert plain.config._attn_implementation == "sdpa"
    patch(plain, profile)
    assert [state.drift for state in get_layer_states(plain)] == [None, None]
    [said] = [(record.levelname, record.getMessage()) for record in info_log.records if "drift" in record.getMessage()]
    assert said[0] == "INFO"
    assert said[1].startswith("drift is not checked: the profile's record ")


@pytest.mark.parametrize(
    ("field", "values"),
    [("every", [0]), ("rows", [1, 2.5, "16"]), ("after", [True]), ("action", ["stop"]), ("margin", [0, float("nan")])],
)
def test_illegal_checks_are_refused(plain, field, values):
    profile = budgeted(make_profile(plain, 0.5), 1.0)
    for value in values:
        with pytest.raises(ConfigError, match=f"{field} of the drift check is {value!r}: expected"):
            patch(plain, profile, drift=dataclasses.replace(DriftCheck(), **{field: value}))


def test_every_256th_call_is_checked_unless_told_otherwise(plain):
    profile = budgeted(make_profile(plain, 0.5), 1.0)
    expected = {"auto": DriftCheck(every=256, action="warn"), "dense": DriftCheck(action="dense"), OFTEN: OFTEN}
    for drift in (*expected, "off", None):
        patch(plain, profile, drift=drift)
        assert [state.drift and state.drift.check for state in get_layer_states(plain)] == [expected.get(drift)] * 2
    with pytest.raises(ConfigError, match="drift 'always' is not known"):
        patch(plain, profile, drift="always")


ONE = torch.ones((), dtype=torch.float64)
ROW = torch.zeros(1, 1, 8, 1)


def monitor_of(monkeypatch, sampled, **settings):
    """A monitor of a limit of 1 whose checks find what a function gives, and a function that makes one more check."""
    monkeypatch.setattr("s2o_runtime.monitor.drift.sample_errors", lambda *_, **__: sampled())
    monitor = DriftMonitor(DriftCheck(every=1, **settings), 0, ErrorLimits("mse", {8: 1.0}))
    return monitor, lambda: monitor.see(ROW, ROW, ROW, ROW, Scoring(), None)


def noticed(monkeypatch, foreign, layers, checks):
    """For each layer the number of checks after which it was warned about, or None.

    What its prompts have of a limit of 1 is lognormal, as on SmolLM2, with a mean of 0.8 and 1.8 times that in the last
    eighth. `foreign` of the prompts have 5.9 times the limit on average. Sampled rows scatter by a quarter.
    """

    def after(seed):
        random = np.random.default_rng(seed)

        def lognormal(mean, deviation):
            return mean * float(np.exp(random.normal(-(deviation**2) / 2, deviation)))

        def sampled():
            share = lognormal(5.9, 0.3) if random.random() < foreign else lognormal(0.8, 0.8)
            last = share * lognormal(1.8, 0.3)
            return SampledErrors(ONE * share * lognormal(1, 0.25), ONE, ONE * last * lognormal(1, 0.25), ONE)

        monitor, check = monitor_of(monkeypatch, sampled)
        while monitor.checks < checks and monitor.verdict is None:
            check()
        return None if monitor.verdict is None else monitor.checks

    return [after(seed) for seed in range(layers)]


def test_one_foreign_prompt_in_six_is_noticed_and_calibrated_ones_are_not(monkeypatch, caplog):
    """In four layers of ten within 60 checks and in nine within 160; the mean alone says nothing."""
    verdicts = noticed(monkeypatch, 1 / 6, layers=10, checks=160)
    assert sum(checks is not None for checks in verdicts) >= 9
    assert sum(checks is not None and checks <= 60 for checks in verdicts) >= 4
    texts = [record.getMessage() for record in caplog.records]
    assert any("of the last " in text and "more than 4 times what the profile allows" in text for text in texts)
    assert noticed(monkeypatch, 1.0, layers=4, checks=16) == [pytest.approx(12, abs=4)] * 4
    assert noticed(monkeypatch, 0.0, layers=4, checks=160) == [None] * 4


def test_high_checks_are_forgotten(monkeypatch):
    """Seven high ones are not enough, and after 64 more none of them counts."""
    shares = iter([100.0] * 7 + [0.1] * 70)
    monitor, check = monitor_of(monkeypatch, lambda: SampledErrors(ONE * next(shares), ONE, ONE * 0, ONE), after=1000)
    high = []
    for _ in range(77):
        check()
        high.append(monitor.numbers().high)
    assert (high[6], high[13], high[63]) == (1.0, 0.5, 7 / 64)
    assert high[64:72] == [count / 64 for count in (6, 5, 4, 3, 2, 1, 0, 0)]
    assert monitor.verdict is None


@pytest.mark.parametrize(
    ("error", "last", "high"), [(3.9, 7.9, 0.0), (4.1, 0.1, 1.0), (0.1, 8.1, 1.0), (float("nan"), 0.0, 1.0)]
)
def test_a_high_check_is_past_four_limits_over_all_rows_or_eight_in_the_last(monkeypatch, caplog, error, last, high):
    for after in (1000, 1):
        sampled = SampledErrors(ONE * error, ONE, ONE * last, ONE)
        monitor, check = monitor_of(monkeypatch, lambda sampled=sampled: sampled, after=after)
        check()
        assert monitor.numbers().high == high
        assert (monitor.verdict is not None) == (after == 1 and (high or last > 4))
    assert ("the sampled mse is nan times what the profile allows" in caplog.text) == (error != error)
