"""Linear tails: what the reference makes of them, what the calibrator measures of them, and where they are kept."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.autograd.functional import jacobian

from calibrate.curves import linear_pass
from calibrate.curves.costs import EXPANSION, overhead
from calibrate.curves.curves import TAUS, Curve, RankingConfig, Shape, methods, packed, unpacked
from calibrate.curves.measure import recipe_key
from calibrate.curves.row_errors import row_errors, tile_worst, worst_of
from calibrate.model.layers import Captured
from calibrate.proof.adjust import scaled
from calibrate.recipe import Recipe
from calibrate.search.allocate import SearchConstraints, allocate, points_of
from s2o_runtime import s2o_attention
from s2o_runtime.config import HeadConfig, LayerConfig, StopRule, TileConfig
from s2o_runtime.errors import ConfigError, InputError
from s2o_runtime.reference.attention import s2o_attention_reference
from s2o_runtime.reference.dense import exact_attention
from s2o_runtime.reference.ranking import part_means, rank
from s2o_runtime.shapes import call_shape, density
from support.candidates import candidate
from support.golden_profiles import full as a_profile

TILE = TileConfig(64, 32, 2)


def layer(heads=2, **changes):
    return LayerConfig.uniform(heads, segment=128, tile=TILE, far="linear", **changes)


def diffuse(length=700, heads=2, kv_heads=1, dim=16, dtype=torch.float64):
    """Queries that look at all keys nearly alike, and not quite alike one another."""
    q = 0.5 * torch.randn(1, heads, length, dim, dtype=dtype) + torch.randn(1, heads, 1, dim, dtype=dtype)
    k, v = (torch.randn(1, kv_heads, length, dim, dtype=dtype) for _ in range(2))
    return q, k, v + k


def by_derivatives(q, k, v, segment, tile, grain, start=0, sink=None):
    """One head [L, D], row by row: exact attention to the window and the first chunk, and to the keys behind them the
    log-sum-exp and the softmax mean as functions of the query, to first order about the segment's mean query."""
    out = torch.zeros_like(q)
    for begin in range(0, len(q), segment):
        rows = range(max(begin, start), min(begin + segment, len(q)))
        if not rows:
            continue
        first = max(start, start + (begin - start) // tile.block_n * tile.block_n)
        visited, behind = list(range(start)), []
        if first > start:
            center = part_means(q[begin : begin + segment], segment, begin, start)[0]
            order = rank(center[None], k[start:first], v[start:first], grain, start).order.tolist()
            visited, behind = order[: tile.stride], order[tile.stride :]
        for row in rows:
            keys = [*(visited if first > start else []), *range(first, row + 1)]
            scores = k[keys] @ q[row]
            logs, values = [scores], [v[keys]]
            if sink is not None:
                logs, values = [*logs, sink[None]], [*values, torch.zeros_like(v[:1])]
            if behind:
                of_behind = (
                    lambda query, rest=behind: (k[rest] @ query).logsumexp(0),
                    lambda query, rest=behind: (k[rest] @ query).softmax(0) @ v[rest],
                )
                away = q[row] - center
                mass, mean = (of(center) + jacobian(of, center) @ away for of in of_behind)
                logs, values = [*logs, mass[None]], [*values, mean[None]]
            out[row] = torch.cat(logs).softmax(0) @ torch.cat(values)
    return out


@pytest.mark.parametrize(
    ("length", "grain", "start", "sink"), [(270, 1, 0, None), (333, 4, 0, 0.7), (300, 2, 70, None)]
)
def test_a_linear_tail_is_the_first_order_of_the_keys_behind(length, grain, start, sink):
    q, k, v = diffuse(length)
    starts = None if not start else torch.tensor([start])
    sinks = None if sink is None else torch.full((2,), sink, dtype=torch.float64)
    config = layer(grain=grain)
    ours = s2o_attention_reference(q, k, v, config, scale=0.3, kv_start=starts, sinks=sinks)
    for head in range(2):
        sink_of_head = None if sinks is None else sinks[head]
        expected = by_derivatives(q[0, head] * 0.3, k[0, 0], v[0, 0], 128, TILE, grain, start, sink_of_head)
        torch.testing.assert_close(ours.out[0, head], expected, rtol=1e-9, atol=1e-11)


def test_every_row_tile_visits_one_chunk_whatever_tau_says():
    q, k, v = diffuse()
    one, other = layer(tau=0.0), layer(tau=100.0)
    ours = s2o_attention_reference(q, k, v, one)
    assert torch.equal(ours.out, s2o_attention_reference(q, k, v, other).out)
    assert ours.visited[0, 0].tolist() == [0, 0, *[TILE.stride] * 9]


def test_it_helps_where_no_order_can():
    """Of heads that look at all keys alike the plain tail knows the mean only."""
    q, k, v = diffuse(2048)
    truth = exact_attention(q, k, v)
    plain = LayerConfig.uniform(2, tau=TAUS[-1], segment=128, tile=TILE, far="mean")
    linear, with_tail = (
        float((s2o_attention_reference(q, k, v, config).out - truth).square().mean()) for config in (layer(), plain)
    )
    assert linear < 0.1 * with_tail


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"far": True}, "far True is not known: use one of ('none', 'mean', 'linear')"),
        ({"far": "linear", "representatives": 8}, "a linear tail has 8 representatives: use 1"),
    ],
)
def test_what_does_not_go_with_a_linear_tail(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        HeadConfig(**changes).validate()


def test_int8_scores_and_soft_caps_do_not_go_with_it():
    with pytest.raises(ConfigError, match='head 0 has a linear tail and scores are "int8"'):
        layer(scores="int8")
    assert not layer().as_dense().tails
    q, k, v = (tensor.float() for tensor in diffuse(300))
    why = "soft-capped scores cannot be estimated by a linear tail"
    with pytest.raises(InputError, match=why):
        s2o_attention(q, k, v, layer(), softcap=5.0, backend="reference")
    stats = s2o_attention(q, k, v, layer(), softcap=5.0, return_stats=True).stats
    assert (stats.backend, stats.reason) == ("dense", why)


@pytest.mark.parametrize("shorter", [True, False])
def test_between_buckets_a_layer_with_linear_tails_is_as_in_the_longer_one(shorter):
    profile = a_profile()
    assert len(profile.lengths) > 1
    begin, end = profile.lengths[:2]
    plain = profile.layers[0][0]
    linear = replace(plain, heads=(HeadConfig(segment=512, far="linear"), *plain.heads[1:]))
    buckets = [list(layers) for layers in profile.layers]
    buckets[0][0], buckets[1][0] = (linear, plain) if shorter else (plain, linear)
    profile = replace(profile, layers=tuple(map(tuple, buckets)))
    for length in (int(begin * 1.2), int((begin * end) ** 0.5), int(end / 1.2)):
        assert profile.layer_config(0, length) == buckets[1][0]
        assert profile.layer_config(1, length) != buckets[1][1]  # which is interpolated
    assert profile.layer_config(0, begin) == buckets[0][0]


def captured(length=700, **features):
    q, k, v = (tensor.float() for tensor in diffuse(length))
    return Captured(q, k, v, 0.25, **features)


def test_a_curve_is_what_the_op_does():
    prompt, rankings = captured(), [RankingConfig(128, grain=4, linear=True)]
    shapes = [Shape(64, 128), Shape(128, 128), Shape(64, 256)]
    curves = linear_pass.measure(prompt, rankings, shapes)
    assert list(curves) == [(rankings[0], shape) for shape in shapes]
    truth = exact_attention(prompt.q, prompt.k, prompt.v, scale=prompt.scale)
    for shape in shapes:
        tile = TileConfig(64, 64, shape.stride // 64)
        config = LayerConfig.uniform(2, segment=128, grain=4, tile=tile, far="linear")
        out, visited, _ = s2o_attention_reference(prompt.q, prompt.k, prompt.v, config, scale=prompt.scale)
        curve = curves[rankings[0], shape]
        torch.testing.assert_close(curve.mse[:, 0], (out - truth).square().mean((0, 2, 3)).double())
        expected = worst_of(tile_worst(row_errors(out, truth)[0], shape.block_m))
        torch.testing.assert_close(curve.worst[:, 0], expected, rtol=1e-5, atol=0)
        of_op = density(visited, config, call_shape(prompt.q, prompt.k, prompt.v))
        torch.testing.assert_close(curve.density[:, 0], of_op, rtol=1e-9, atol=0)
        assert curve.dense_power == pytest.approx(float(truth.square().mean()), rel=1e-5)


def test_soft_caps_have_no_such_curves_and_journals_keep_those_there_are():
    ranking, shape = RankingConfig(128, grain=4, linear=True), Shape(64, 128)
    assert linear_pass.measure(captured(softcap=5.0), [ranking], [shape]) == {}
    curves = linear_pass.measure(captured(), [ranking], [shape]) | {
        (RankingConfig(128, grain=4), shape): of_taus([1e-3])
    }
    kept = unpacked(packed(curves, torch.float64))
    assert list(kept) == list(curves)
    assert torch.equal(kept[ranking, shape].mse, curves[ranking, shape].mse)
    assert set(methods(kept, 128, 4, shape)) == {ranking, RankingConfig(128, grain=4)}


def of_taus(errors):
    """A curve of one head whose density falls as its error rises, threshold by threshold."""
    mse = torch.full((1, len(TAUS)), 1e9, dtype=torch.float64)
    share = torch.ones(1, len(TAUS), dtype=torch.float64)
    for index, error in enumerate(errors):
        mse[0, index], share[0, index] = error, 0.5
    return Curve(mse, mse, torch.zeros_like(mse), torch.zeros_like(mse), share, 1.0)


def test_a_head_gets_a_linear_tail_where_that_is_cheapest():
    linear, plain = RankingConfig(1024, grain=4, linear=True), RankingConfig(1024, grain=4)
    point = (torch.full((1, 1), value, dtype=torch.float64) for value in (2e-3, 2e-3, 0.4, 0.4, 0.1))
    curves = {plain: of_taus([1e-3]), linear: Curve(*point, 1.0)}
    (head,) = allocate(curves, 2e-3).heads
    assert head == HeadConfig(segment=1024, far="linear")
    assert allocate(curves, 1.5e-3).heads[0].tau == TAUS[0]  # not within this budget
    assert allocate(curves, 2e-3, SearchConstraints(worst_rows=0.3)).heads[0].far == "none"  # nor with such rows
    assert [point.head.far for point in points_of(curves, 0, SearchConstraints())] == ["none", "none", "linear"]
    costs = overhead(linear, "linear") - overhead(plain, "none")
    assert costs == pytest.approx(EXPANSION / 1024)


def test_the_recipe_lets_heads_of_long_prompts_have_one_and_a_journal_knows():
    base = {"model": "demo", "lengths": (32768,), "budget_rel_mse": 1e-3, "out": Path("p.safetensors")}
    without, with_tails = Recipe.of(base | {"linear_tails": False}), Recipe.of(base)
    segments = [recipe.linear_segments_for(length) for recipe in (without, with_tails) for length in (8192, 32768)]
    assert segments == [(), (), (), (512, 1024, 2048)]
    keys = [recipe_key(recipe, length)["linear_tails"] for recipe in (without, with_tails) for length in (8192, 32768)]
    assert keys == [False, False, False, True]


def test_at_a_checked_length_what_has_no_threshold_to_lower_becomes_dense():
    begun = candidate()
    config = begun.layer_config(0, 768)
    mixed = replace(config, heads=(HeadConfig(segment=config.heads[0].segment, far="linear"), *config.heads[1:]))
    begun = replace(begun, changes={})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(begun), "layer_config", lambda self, layer, length: mixed)
        after, choice = scaled(begun, 768, 0, 0.5, "over its limit")
    assert choice is None
    assert after.heads[0].mode == "dense"
    assert all(new.tau <= old.tau for new, old in zip(after.heads[1:], mixed.heads[1:], strict=True))
    assert all(head.stop_rule is StopRule.REST for head in after.heads)
