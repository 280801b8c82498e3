import pytest
import torch

from s2o_runtime.config import HeadConfig, LayerConfig, StopRule, TileConfig
from s2o_runtime.reference.attention import State, order_queries, s2o_attention_reference, with_tail
from s2o_runtime.reference.dense import log_sum_exp
from s2o_runtime.reference.ranking import log_weights, make_representatives, order_of, rank
from s2o_runtime.sequences import call_shape, measure_density
from support.marks import pairwise
from support.naive import naive_attention, naive_s2o

SLOW = pytest.mark.slow(reason="more shapes against explicit loops over rows and keys")

TILE = TileConfig(block_m=64, block_n=32, chunk=2)


def inputs(batch, heads, kv_heads, q_len, kv_len, head_dim=16, dtype=torch.float64):
    q = torch.randn(batch, heads, q_len, head_dim, dtype=torch.float64) * 2
    k, v = (torch.randn(batch, kv_heads, kv_len, head_dim, dtype=torch.float64) for _ in range(2))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def drawn(shape):
    """`inputs` of the sizes of a shape, and where its sequences start."""
    *sizes, starts = shape
    return *inputs(*sizes), None if starts is None else torch.tensor(starts)


SHAPES = [
    pytest.param((1, 2, 1, 200, 200, None), id="B1-H2-L200"),
    pytest.param((1, 1, 1, 3, 3, None), id="shorter-than-a-tile"),
    pytest.param((1, 2, 2, 1, 150, None), id="one-query"),
    pytest.param((1, 4, 2, 130, 211, None), id="q130-kv211"),
    pytest.param((2, 2, 1, 150, 150, [0, 67]), id="left-padded"),
    pytest.param((2, 2, 2, 100, 171, [171, 5]), id="one-row-of-padding-only"),
]


def mixed_heads(count, tau, stop_rule):
    return tuple(HeadConfig(tau=tau, segment=(64, 128)[h % 2], stop_rule=stop_rule) for h in range(count))


@pytest.mark.parametrize("shape", SHAPES)
def test_tau_zero_is_dense_attention(shape):
    q, k, v, kv_start = drawn(shape)
    config = LayerConfig(mixed_heads(shape[1], 0.0, StopRule.REST), TILE)
    out, visited, _ = s2o_attention_reference(q, k, v, config, kv_start=kv_start)
    torch.testing.assert_close(out, naive_attention(q, k, v, kv_start=kv_start), rtol=1e-10, atol=1e-12)
    share = measure_density(visited, config, call_shape(q, k, v), kv_start)
    torch.testing.assert_close(share, torch.ones_like(share), rtol=0, atol=1e-12)


def equals_the_naive_loop(q, k, v, config, **options):
    out, visited, _ = s2o_attention_reference(q, k, v, config, **options)
    expected, pairs, causal = naive_s2o(q, k, v, config.heads, config.tile, **options)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-11)
    if not options.get("paper_literal"):  # permuted queries leave the tiles that density counts
        share = measure_density(visited, config, call_shape(q, k, v), options["kv_start"])
        torch.testing.assert_close(share, torch.tensor(pairs, dtype=torch.float64) / causal, rtol=1e-12, atol=0)


TAU = {StopRule.REST: 1.0, StopRule.PAPER: 0.4}


@pytest.mark.parametrize(
    ("shape", "stop_rule", "paper_literal"),
    pairwise(SHAPES, StopRule, [False, True], mark=SLOW, count=4),
)
def test_rules_equal_the_naive_loop(shape, stop_rule, paper_literal):
    q, k, v, kv_start = drawn(shape)
    config = LayerConfig(mixed_heads(shape[1], TAU[stop_rule], stop_rule), TILE)
    equals_the_naive_loop(q, k, v, config, kv_start=kv_start, paper_literal=paper_literal)


@pytest.mark.parametrize(
    ("shape", "tail", "representatives"),
    pairwise(SHAPES, ["none", "mean"], [1, 16], mark=SLOW, count=4),
)
def test_extensions_equal_the_naive_loop(shape, tail, representatives):
    q, k, v, kv_start = drawn(shape)
    kinds = (HeadConfig(1.0, 64, representatives=representatives, tail=tail), HeadConfig(0.5, 128, tail=tail))
    config = LayerConfig(tuple(kinds[h % 2] for h in range(shape[1])), TILE)
    equals_the_naive_loop(q, k, v, config, kv_start=kv_start)


@pytest.mark.parametrize(
    ("shape", "stop_rule", "sinks", "softcap", "value_dim"),
    pairwise(SHAPES, StopRule, [(True, None, 16), (False, 2.0, 16), (True, 2.0, 24)], mark=SLOW, count=3),
)
def test_sinks_caps_and_scales_equal_the_naive_loop(shape, stop_rule, sinks, softcap, value_dim):
    q, k, v, kv_start = drawn(shape)
    v = torch.randn(*v.shape[:3], value_dim, dtype=torch.float64)
    options = {"scale": 0.4, "softcap": softcap, "sinks": torch.randn(shape[1]) * 2 + 3 if sinks else None}
    kinds = (HeadConfig(0.7, 64, "s2o", stop_rule, 16, "mean"), HeadConfig(0.4, 128, "s2o", stop_rule))
    config = LayerConfig(tuple(kinds[h % 2] for h in range(shape[1])), TILE)
    equals_the_naive_loop(q, k, v, config, kv_start=kv_start, **options)
    exact = LayerConfig.uniform(shape[1], tau=0.0, segment=64, tile=TILE)
    dense, _, lse = s2o_attention_reference(q, k, v, exact, kv_start=kv_start, **options)
    truth = naive_attention(q, k, v, kv_start=kv_start, **options)
    torch.testing.assert_close(dense, truth, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(lse.float(), log_sum_exp(q, k, kv_start=kv_start, **options), rtol=1e-5, atol=1e-5)


def test_a_sink_stops_the_visit_earlier():
    """The gain is relative to the denominator, of which the sink is a part."""
    q, k, v = inputs(1, 1, 1, 64, 2000)
    config = LayerConfig.uniform(1, tau=1.0, segment=64, tile=TILE)
    calls = [s2o_attention_reference(q * 0.1, k, v, config, sinks=torch.tensor([sink])) for sink in (-20.0, 5.0, 20.0)]
    keys = [int(call.visited.max()) for call in calls]
    assert keys[0] > keys[1] > keys[2] == TILE.stride


def test_a_needle_for_few_rows_is_found_by_many_representatives_only():
    """One part of the segment asks for one key; the mean of all queries cannot see it, the part's own mean can."""
    k = torch.randn(1, 1, 1024, 16) * 0.3
    needle = torch.randn(16)
    needle *= 12 / needle.norm()
    k[0, 0, 300] = needle
    q = torch.randn(1, 1, 128, 16) * 0.3 - needle * 0.05
    q[0, 0, 64:72] += needle * 0.5
    orders = [rank(make_representatives(q[0, 0] * 0.25, 128 // r), k[0, 0, :896], k[0, 0, :896]).order for r in (1, 16)]
    places = [int((order == 300).nonzero()) for order in orders]
    assert places[0] > 50
    assert places[1] == 0


def test_the_tail_helps_where_the_rest_is_flat():
    q, k, v = inputs(1, 1, 1, 64, 2000)
    q, v = q * 0.1, v + 1.0
    dense = naive_attention(q, k, v)
    errors = []
    for tail in ("none", "mean"):
        config = LayerConfig.uniform(1, tau=1e6, segment=64, tail=tail, tile=TILE)
        out, visited, _ = s2o_attention_reference(q, k, v, config)
        assert int(visited.max()) == TILE.stride
        errors.append(float((out - dense).square().mean()))
    assert errors[1] < errors[0] / 5


@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
@pytest.mark.parametrize("grain", [1, 4])
def test_the_tail_moves_a_row_within_its_bound(spread, grain):
    """However wrong the ranking's weights: at most as if all of the rest were as heavy as the last chunk."""
    prefix, chunk, head_dim = 512, 64, 16
    v = torch.randn(prefix, head_dim, dtype=torch.float64) * 10.0 ** torch.randint(-3, 4, (prefix, 1))
    ranking = rank(torch.randn(3, head_dim) * spread, torch.randn(prefix, head_dim) * spread, v, grain)
    l = torch.rand(5, 8, dtype=torch.float64) + 0.5
    before = State(torch.zeros(5, 8), l, torch.randn(5, 8, head_dim, dtype=torch.float64))
    brought = l * torch.rand(5, 8, dtype=torch.float64) * 10.0 ** torch.randint(-6, 3, (5, 8))
    after = State(before.m, l + brought, before.acc + brought[..., None])
    for begin in range(0, prefix, chunk):
        end = begin + chunk
        moved = with_tail(before, after, ranking, begin, end)
        most = brought * (prefix - end) / chunk
        assert (moved.l - after.l <= most + 1e-12 * moved.l).all()
        share = (moved.l - after.l) / moved.l
        rest = v[ranking.order[end:]]
        farthest = (rest.norm(dim=-1).max() if len(rest) else 0.0) + after.output().norm(dim=-1)
        assert ((moved.output() - after.output()).norm(dim=-1) <= share * farthest * (1 + 1e-9) + 1e-12).all()
    assert torch.equal(moved.l, after.l)  # nothing is left


def test_a_larger_tau_computes_less():
    q, k, v = inputs(1, 1, 1, 600, 600)
    shape = call_shape(q, k, v)
    shares = []
    for tau in (0.0, 0.5, 1.0, 2.0, 100.0):
        config = LayerConfig.uniform(1, tau=tau, segment=64, tile=TileConfig(64, 32, 1))
        _, visited, _ = s2o_attention_reference(q, k, v, config)
        shares.append(float(measure_density(visited, config, shape)[0]))
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1.0
    assert 64 / 600 < shares[-1] < shares[2] < 1.0


def test_dense_heads_ignore_tau_and_segment():
    q, k, v = inputs(1, 2, 1, 700, 700)
    heads = (HeadConfig(tau=50.0, segment=64, mode="dense"), HeadConfig(tau=50.0, segment=64))
    config = LayerConfig(heads, TILE)
    out, visited, _ = s2o_attention_reference(q, k, v, config)
    dense = naive_attention(q, k, v)
    torch.testing.assert_close(out[:, 0], dense[:, 0], rtol=1e-10, atol=1e-12)
    assert (out[:, 1] - dense[:, 1]).abs().max() > 1e-3
    share = measure_density(visited, config, call_shape(q, k, v))
    assert share[0] == 1.0
    assert share[1] < 0.5


def test_output_type_follows_q_and_scale_is_used():
    q, k, v = inputs(1, 1, 1, 90, 90, dtype=torch.float16)
    out, _, _ = s2o_attention_reference(q, k, v, LayerConfig.uniform(1, segment=64, tile=TILE), scale=0.1)
    assert out.dtype == torch.float16
    expected = naive_attention(q, k, v, scale=0.1)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-3)  # one rounding to fp16 of values below 4


def test_algorithm_1_by_hand():
    q = torch.tensor([[2.0, 0.0], [0.0, 2.0], [4.0, 4.0]])
    assert make_representatives(q, 3).tolist() == [[2.0, 2.0]]
    assert make_representatives(q, 2).tolist() == [[1.0, 1.0], [4.0, 4.0]]  # the last part is short
    assert make_representatives(q, 1, 10, 12).tolist() == [[4.0, 4.0]]  # the first two stand before key 12
    keys = torch.tensor([[1.0, 0.0], [0.0, 3.0], [-1.0, 0.0], [2.0, 1.0]])
    representative = torch.tensor([[1.0, 0.5]])
    assert order_of(log_weights(representative, keys)).tolist() == [3, 1, 0, 2]
    assert order_of(log_weights(representative, keys, 2), 2).tolist() == [2, 3, 0, 1]  # e^1 + e^1.5 and e^-1 + e^2.5
    assert order_of(log_weights(representative, keys.flip(0), 2), 2).tolist() == [0, 1, 2, 3]
    assert order_queries(q, torch.tensor([1.0, 0.0])).tolist() == [2, 0, 1]
