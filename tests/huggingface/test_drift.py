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
from s2o_runtime.huggingface.hf import layer_states
from s2o_runtime.monitor.drift import DriftMonitor, ErrorLimits, SampledErrors, error_limits, sampled_errors
from s2o_runtime.reference.dense import exact_attention
from support.models import LENGTH, RUNS, make_profile, new_model, padded_batch, paths, prompt

OFTEN = DriftCheck(every=1, rows=16, after=3)
TILE = TileConfig(64, 32, 1, 4, 1)


def budgeted(profile, value, kind="rel_mse", scope="layer"):
    return dataclasses.replace(profile, record={"budget": {"kind": kind, "value": value, "scope": scope}})


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
    draws = torch.tensor([sampled_errors(q, k, v, out, 8, generator, kv_start=kv_start) for _ in range(200)])
    mean, deviation = draws.mean(0), draws.std(0)
    standard_error = deviation / len(draws) ** 0.5
    assert min(truth) > 0
    for estimate, error, expected in zip(mean.tolist(), standard_error.tolist(), truth, strict=True):
        # 4 standard errors; 1e-6 of it is float32's rounding of the dense rows
        assert abs(estimate - expected) < 4 * error + 1e-6 * expected


@pytest.mark.parametrize(
    ("value_dim", "features"),
    [(24, {}), (32, {"softcap": 1.5, "sinks": torch.linspace(-1, 5, 4), "scale": 0.4})],
    ids=["narrow-values", "cap-sinks"],
)
@pytest.mark.parametrize(("q_len", "rows"), [(96, 2 * 71 * 25), (20, 40)])  # of 96 rows, 25 are of the last eighth
def test_all_rows_give_the_error_itself(q_len, rows, value_dim, features):
    """As many strata as rows, or a multiple, in both halves: nothing is left to chance. A padded sequence is none."""
    q, k, v = torch.randn(2, 4, q_len, 32), torch.randn(2, 2, 200, 32), torch.randn(2, 2, 200, value_dim)
    out = torch.randn(2, 4, q_len, value_dim)
    truth = true_errors(q[:1], k[:1], v[:1], out[:1], **features)
    for batch, starts in ((1, None), (2, torch.tensor([0, 200]))):
        given = (tensor[:batch] for tensor in (q, k, v, out))
        sampled = sampled_errors(*given, rows, torch.Generator(), Scoring(**features), starts)
        assert [float(error) for error in sampled] == pytest.approx(truth, rel=1e-5)


def test_few_heads_at_a_time_give_the_same(monkeypatch):
    q, k, v = torch.randn(2, 6, 70, 32), torch.randn(2, 3, 90, 32), torch.randn(2, 3, 90, 32)
    out = torch.randn_like(q)
    errors = sampled_errors(q, k, v, out, 8, torch.Generator().manual_seed(1), Scoring(0.3))
    for scores in (1, 2 * 2 * 32 * 90 * 2):
        monkeypatch.setattr("s2o_runtime.monitor.drift.SCORES", scores)
        again = sampled_errors(q, k, v, out, 8, torch.Generator().manual_seed(1), Scoring(0.3))
        assert [float(each) for each in again] == pytest.approx([float(each) for each in errors], rel=1e-6)


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
    assert monitor.error() == monitor.numbers().mean


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
        ids, mask = padded_batch()
        if how == "padded":
            return which(ids, attention_mask=mask).logits[mask == 1]
        if how == "plain":
            return which(ids[:1]).logits
        memory = DynamicCache(config=which.config)
        return torch.cat([which(part, past_key_values=memory).logits for part in ids[:1].split((120, 80), 1)], 1)

    for _ in range(6):
        run(plain)
    [warning] = caplog.records
    assert warning.getMessage().startswith("layer 0: the sampled rel_mse is ")
    verdict = layer_states(plain)[0].drift.verdict
    assert verdict in warning.getMessage()
    calls = 12 if how == "chunked" else 6
    expected = {(1, "s2o", RUNS): calls, (0, "s2o", RUNS): calls}
    if action == "dense":  # after three checks
        expected |= {(0, "s2o", RUNS): 3, (0, "dense", verdict): calls - 3}
    rows = explain(plain)
    assert {(row["layer"], row["path"], row["reason"]): row["calls"] for row in rows} == expected
    assert "error" in str(rows).splitlines()[0]
    if action == "dense":
        layer_states(plain)[1].rejected = "for the test"  # then no layer is left that differs from dense
        torch.testing.assert_close(run(plain), run(dense), rtol=1e-4, atol=1e-4)
    unpatch(plain)
    assert all("s2o_layer" not in module.__dict__ for module in plain.modules())


@torch.no_grad()
def test_every_nth_call_is_checked_and_layers_take_turns(plain):
    patch(plain, budgeted(make_profile(plain, 0.5), 1.0), drift=DriftCheck(every=4))
    checks = []
    for _ in range(8):
        plain(prompt())
        checks.append([state.drift.checks for state in layer_states(plain)])
    assert checks == [[0, 0], [0, 0], [0, 1], [1, 1], [1, 1], [1, 1], [1, 2], [2, 2]]


@torch.no_grad()
def test_what_a_program_draws_and_computes_stays_the_same(plain):
    profile, ids = budgeted(make_profile(plain, 0.5), 1.0), prompt()

    def run(drift):
        with patched(plain, profile, drift=drift):
            torch.manual_seed(3)
            return plain(ids).logits, torch.rand(4)

    assert all(torch.equal(a, b) for a, b in zip(run(None), run(OFTEN), strict=True))


def test_it_works_in_and_out_of_inference_mode(plain):
    patch(plain, budgeted(make_profile(plain, 0.5), 1.0), drift=OFTEN)
    ids = prompt()
    with torch.inference_mode():
        plain(ids)
    with torch.no_grad():
        plain(ids)
    assert [state.drift.checks for state in layer_states(plain)] == [2, 2]
    assert all(0 < row["error"] < 1 for row in explain(plain))


def test_outputs_that_are_not_numbers_are_too_much(caplog):
    monitor = DriftMonitor(DriftCheck(every=1, after=1), 5, ErrorLimits("mse", {64: 1.0}))
    q, k, v = (torch.randn(1, 2, 64, 32) for _ in range(3))
    monitor.see(q, k, v, torch.full_like(q, float("nan")), Scoring(), None)
    assert "layer 5: the sampled mse is nan times what the profile allows" in caplog.text


def record(*limits, kind="mse", scope="layer", value=1e-4):
    return {
        "budget": {"kind": kind, "value": value, "scope": scope},
        "held_out": [{"length": length, "layers": [{"limit": each} for each in of]} for length, of in limits],
    }


def test_allowed_errors_are_the_limits_of_the_proof(plain):
    profile = make_profile(plain, 0.5)
    limits = record((128, (0.1, 0.2)), (1024, (0.3, 0.0)), scope="model")
    with_limits = dataclasses.replace(profile, record=limits)
    first, second = error_limits(with_limits)
    assert (first.unit, [first.at(length) for length in (1, 128, 360, 370, 10**6)]) == (
        "mse",
        [0.1, 0.1, 0.1, 0.3, 0.3],
    )
    assert second.at(10**6) == 0.2  # a limit of 0 is a dense layer's
    without = error_limits(budgeted(profile, 0.7))
    assert [each.at(LENGTH) for each in without] == [0.7, 0.7]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "names no budget that drift could be held to"),
        ({"budget": "much"}, "names no budget"),
        (record(value=float("nan")), "names no budget"),
        (record(scope="model"), "does not say what each layer may have of the model's budget"),
        (record((-1, (0.1, 0.1)), (128, ("a", True)), scope="model"), "does not say what each layer may have"),
        ({"budget": {"kind": "mse", "value": 1, "scope": "model"}, "held_out": [3, {"layers": 4}]}, "does not say"),
    ],
)
def test_profiles_without_limits_are_refused_where_a_check_is_asked_for(plain, record, message, info_log):
    profile = dataclasses.replace(make_profile(plain, 0.5), record=record)
    for asked in (OFTEN, "warn", "dense"):
        with pytest.raises(ProfileError, match=message):
            patch(plain, profile, drift=asked)
        assert plain.config._attn_implementation == "sdpa"
    patch(plain, profile)
    assert [state.drift for state in layer_states(plain)] == [None, None]
    [said] = [record for record in info_log.records if "drift" in record.getMessage()]
    assert said.levelname == "INFO"
    assert said.getMessage().startswith("drift is not checked: the profile's record ")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("every", 0),
        ("rows", 1),
        ("rows", 2.5),
        ("rows", "16"),
        ("after", True),
        ("action", "stop"),
        ("margin", 0),
        ("margin", float("nan")),
    ],
)
def test_illegal_checks_are_refused(plain, field, value):
    check = dataclasses.replace(DriftCheck(), **{field: value})
    with pytest.raises(ConfigError, match=f"{field} of the drift check is {value!r}: expected"):
        patch(plain, budgeted(make_profile(plain, 0.5), 1.0), drift=check)


def test_copies_start_anew(plain):
    patch(plain, budgeted(make_profile(plain, 0.5), 1.0), drift=OFTEN)
    with torch.no_grad():
        plain(prompt())
    again = [state.drift for state in layer_states(copy.deepcopy(plain))]
    assert [(each.check, each.layer, each.checks) for each in again] == [(OFTEN, 0, 0), (OFTEN, 1, 0)]


def test_every_256th_call_is_checked_unless_told_otherwise(plain):
    profile = budgeted(make_profile(plain, 0.5), 1.0)

    def checks():
        return [state.drift and state.drift.check for state in layer_states(plain)]

    patch(plain, profile)
    assert checks() == [DriftCheck(every=256, action="warn")] * 2
    for drift, expected in (("dense", DriftCheck(action="dense")), (OFTEN, OFTEN), ("off", None), (None, None)):
        patch(plain, profile, drift=drift)
        assert checks() == [expected] * 2
    with pytest.raises(ConfigError, match="drift 'always' is not known: use a DriftCheck, None or one of "):
        patch(plain, profile, drift="always")


class Shares:
    """Stands for `sampled_errors`: what a layer's prompts have of a limit of 1, as on SmolLM2.

    The errors are lognormal with a mean of 0.8 and 1.8 times that in the last eighth. `foreign` of the prompts have 5.9
    times the limit on average. Sampled rows scatter by a quarter.
    """

    def __init__(self, foreign, seed):
        self.foreign, self.random = foreign, np.random.default_rng(seed)

    def lognormal(self, mean, deviation):
        return mean * float(np.exp(self.random.normal(-(deviation**2) / 2, deviation)))

    def __call__(self, *_, **__):
        foreign = self.random.random() < self.foreign
        share = self.lognormal(5.9, 0.3) if foreign else self.lognormal(0.8, 0.8)
        last = share * self.lognormal(1.8, 0.3)
        one = torch.ones((), dtype=torch.float64)
        return SampledErrors(one * share * self.lognormal(1, 0.25), one, one * last * self.lognormal(1, 0.25), one)


def noticed(monkeypatch, foreign, layers, checks):
    """For each layer the number of checks after which it was warned about, or None."""
    tensor = torch.zeros(1, 1, 8, 1)
    found = []
    for layer in range(layers):
        monkeypatch.setattr("s2o_runtime.monitor.drift.sampled_errors", Shares(foreign, seed=layer))
        monitor = DriftMonitor(DriftCheck(every=1), layer, ErrorLimits("mse", {8: 1.0}))
        while monitor.checks < checks and monitor.verdict is None:
            monitor.see(tensor, tensor, tensor, tensor, Scoring(), None)
        found.append(None if monitor.verdict is None else monitor.checks)
    return found


@torch.no_grad()
def test_one_foreign_prompt_in_six_is_noticed_and_calibrated_ones_are_not(monkeypatch, caplog):
    """In four layers of ten within 60 checks and in nine within 160; the mean alone says nothing."""
    found = noticed(monkeypatch, 1 / 6, layers=10, checks=160)
    assert sum(checks is not None for checks in found) >= 9
    assert sum(checks is not None and checks <= 60 for checks in found) >= 4
    verdicts = [record.getMessage() for record in caplog.records]
    assert any(
        "of the last " in verdict and "more than 4 times what the profile allows" in verdict for verdict in verdicts
    )
    assert noticed(monkeypatch, 1.0, layers=4, checks=16) == [pytest.approx(12, abs=4)] * 4
    assert noticed(monkeypatch, 0.0, layers=4, checks=160) == [None] * 4


def test_high_checks_are_forgotten(monkeypatch):
    """Seven high ones are not enough, and after 64 more none of them counts."""
    shares = iter([100.0] * 7 + [0.1] * 70)
    one = torch.ones((), dtype=torch.float64)
    monkeypatch.setattr(
        "s2o_runtime.monitor.drift.sampled_errors",
        lambda *_, **__: SampledErrors(one * next(shares), one, one * 0, one),
    )
    monitor = DriftMonitor(DriftCheck(every=1, after=1000), 0, ErrorLimits("mse", {8: 1.0}))
    tensor = torch.zeros(1, 1, 8, 1)
    high = []
    for _ in range(77):
        monitor.see(tensor, tensor, tensor, tensor, Scoring(), None)
        high.append(monitor.numbers().high)
    assert high[6] == 1.0
    assert high[13] == 0.5
    assert high[63] == 7 / 64
    assert high[64:72] == [each / 64 for each in (6, 5, 4, 3, 2, 1, 0, 0)]
    assert monitor.verdict is None
