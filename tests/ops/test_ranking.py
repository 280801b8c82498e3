"""The ranking kernels in the interpreter: scores, order and tail sums of every prefix, and the order as compiled."""

import itertools

import pytest
import torch

from s2o_runtime.config import KEY_BLOCK, HeadConfig, LayerConfig, TileConfig
from s2o_runtime.kernels.primitives import LOG2E
from s2o_runtime.kernels.rank import means as means_module
from s2o_runtime.kernels.rank import order as order_module
from s2o_runtime.kernels.rank import tail as tail_module
from s2o_runtime.kernels.rank.means import average
from s2o_runtime.kernels.rank.order import BUCKETS, bucket_shares
from s2o_runtime.kernels.rank.scores import score
from s2o_runtime.kernels.rank.tail import EDGES, sum_tails
from s2o_runtime.reference.ranking import log_weights, make_representatives
from support.kernels import TILE, call_of, inputs, prefix_of, starts_of
from support.marks import COMPILED, INTERPRETED, MORE_CASES, SLOW_KERNELS, all_but_first

pytestmark = pytest.mark.usefixtures("nan_filled")

BINS = 4 * BUCKETS  # linear bins of a row's scores, before they become buckets


def rank_of(call):
    """Scores of a whole call, [B, Hq, N, P / GRAIN], the mean values of its steps, and its order."""
    rows, means = range(call.shape.q_len), average(call)
    scores = score(means, call, rows)
    return scores, means.values, order_module.order(scores, call, rows)


@INTERPRETED
@pytest.mark.parametrize(
    ("representatives", "starts", "length", "softcap"),
    [
        (16, [30, 0], 394, 1.5),
        *all_but_first([(1, [30, 0], 394, None), (16, None, 394, None)], SLOW_KERNELS, 0),
        *all_but_first([(1, [30, 0], 2600, 1.5), (16, [30, 0], 2600, None)], MORE_CASES, 0),
    ],
)
def test_rank_scores_and_orders_every_prefix(representatives, starts, length, softcap, monkeypatch):
    monkeypatch.setattr(means_module, "LOG_SUM_SAMPLE", 1 << 20)
    q, k, _ = inputs(2, 2, 1, 230, length, 64)
    config = LayerConfig.uniform(2, segment=64, representatives=representatives, tile=TILE, lookback=64)
    kv_start = starts_of(starts)
    call = call_of(q, k, k, config, kv_start, softcap=softcap)
    scores, _, ordered = rank_of(call)
    for b, h, n in itertools.product(range(2), range(2), range(4)):
        start, first = prefix_of(call, b, h, n)
        segment = q[b, h, n * 64 : (n + 1) * 64] * 0.125
        means = make_representatives(segment, 64 // representatives, length - 230 + n * 64, start)
        steps = (first - start) // KEY_BLOCK
        expected = log_weights(means, k[b, 0, start:first], KEY_BLOCK, softcap=softcap) * LOG2E
        ours = scores[b, h, n, :steps].float()
        torch.testing.assert_close(ours, expected, rtol=2e-3, atol=1e-2)  # fp16, and 1 of 1 keys in the denominator
        order, sure = bucket_order(ours)
        ranked = (ordered.order[b, h, n, :steps].long() - start) // KEY_BLOCK
        assert torch.equal(ranked.sort().values, torch.arange(steps))
        assert torch.equal(ranked[sure[ranked]], order[sure[order]])


def bucket_order(scores):
    """The order of a row of scores, as `rank/order.py` describes it: what a lane loads together is apart by a turn.

    Also which scores are sure of their bin: one on the border of two may fall either way.
    """
    every = -(-len(scores) // order_module.SAMPLES)
    index = torch.arange(-(-len(scores) // every))
    at = index * every + (index * order_module.JITTER.value >> 7) % every
    sample = scores[at.clamp_max(len(scores) - 1)].sort(descending=True).values
    shares = bucket_shares(scores.device)
    edges = sample[(shares * len(sample)).int().clamp_max(len(sample) - 1)]
    per_bin = (BINS - 2.5) / (edges.max() - edges.min()).clamp_min(1e-6)
    centre = edges.max() - (torch.arange(BINS) - 0.75) / per_bin
    table = (centre[:, None] < edges).sum(1).clamp_max(BUCKETS - 1)
    position = (edges.max() - scores) * per_bin + 1.25
    bucket = table[position.clamp(0, BINS - 1).int()]
    turn = torch.arange(4 * BUCKETS).view(BUCKETS, 4).T.flatten()
    seen = (torch.arange(0, len(scores), len(turn))[:, None] + turn).flatten()
    seen = seen[seen < len(scores)]
    return seen[bucket[seen].argsort(stable=True)], (position - position.round()).abs() > 1e-3


@INTERPRETED
@SLOW_KERNELS
def test_a_sampled_denominator_is_near_the_exact_one(monkeypatch):
    q, k = torch.randn(1, 1, 64, 64), torch.randn(1, 1, 3000, 64)
    config, scores = LayerConfig.uniform(1, segment=64, representatives=16, tile=TILE, lookback=64), []
    for sample in (1 << 20, 3000 // 16):
        monkeypatch.setattr(means_module, "LOG_SUM_SAMPLE", sample)
        scores.append(rank_of(call_of(q, k, k, config))[0][0, 0, 0, : 2848 // KEY_BLOCK].float())
    difference = (scores[1] - scores[0]).abs()
    assert difference.max() < 1.0  # of a row: at most a factor of two
    assert difference.mean() > 1e-3


@INTERPRETED
@pytest.mark.parametrize(
    ("splits", "head_dim", "starts", "q_len"),
    all_but_first([(2, 64, [30], 560), (3, 64, [30, 0], 230), (1, 128, None, 560), (1, 256, None, 230)], SLOW_KERNELS),
)
def test_tail_sums_are_those_of_the_order(splits, head_dim, starts, q_len, monkeypatch):
    """A program sums four segments or eight, of which the last one has one."""
    monkeypatch.setattr(tail_module, "count_tail_splits", lambda programs, steps: splits)
    q, k, v = inputs(len(starts or [0]), 2, 1, q_len, 700 if q_len > 500 else 500, head_dim)
    heads = (HeadConfig(1.0, 64, representatives=16, tail="mean"), HeadConfig(1.0, 128, tail="mean"))
    call = call_of(q, k, v, LayerConfig(heads, TILE), starts_of(starts))
    scores, mean_values, ordered = rank_of(call)
    four = sum_tails(ordered, scores, mean_values, call, range(q_len))
    monkeypatch.setattr(tail_module, "MANY_SEGMENTS", 1)
    assert tail_module.count_tail_segments(9, head_dim) == (8 if head_dim < 256 else 4)
    ordered = order_module.order(scores, call, range(q_len))  # with no arrival counted
    ranking = sum_tails(ordered, scores, mean_values, call, range(q_len))
    for ours, expected in zip(ranking[1:], four[1:], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    shape = call.shape
    for b, h in itertools.product(range(shape.batch), range(shape.query_heads)):
        for n in range(-(-shape.q_len // call.config.heads[h].segment)):
            start, first = prefix_of(call, b, h, n)
            steps = (first - start) // KEY_BLOCK
            weights = scores[b, h, n, :steps].double().exp2()
            means = call.v[b, h // shape.group, start:first].double().view(steps, KEY_BLOCK, shape.head_dim).mean(1)
            place = (ranking.order[b, h, n, :steps].long() - start) // KEY_BLOCK
            for e, begin in enumerate(ranking.first[b, h, n, :: BUCKETS // EDGES].tolist()):
                rest = place[begin:]
                on_the_border = float(weights[rest].max()) * 2 if len(rest) else 1e-6  # may count for either bucket
                mass, values = ranking.mass[b, h, n, e].double(), ranking.sums[b, h, n, e].double()
                torch.testing.assert_close(mass, weights[rest].sum(), rtol=1e-4, atol=on_the_border)
                torch.testing.assert_close(values, weights[rest] @ means[rest], rtol=1e-4, atol=on_the_border * 4)


def test_few_long_segments_are_shared_and_many_or_short_ones_are_not():
    assert tail_module.count_tail_splits(32, 8192) == tail_module.TAIL_SPLITS
    assert tail_module.count_tail_splits(128, 8192) == 4
    assert tail_module.count_tail_splits(64, 1984) == 3
    assert tail_module.count_tail_splits(1024, 32768) == tail_module.count_tail_splits(8, 511) == 1


@INTERPRETED
@SLOW_KERNELS
def test_the_coarse_order_is_nearly_the_full_order():
    """Along the order, nearly as much of the mass comes at each depth as along a full sort."""
    q, k, _ = inputs(1, 1, 1, 64, 12000, 64)
    scores, _, ordered = rank_of(call_of(q, k, k, LayerConfig.uniform(1, segment=64, tile=TILE)))
    steps = (12000 - 64 - 128) // 32 * 32 // KEY_BLOCK
    weights = scores[0, 0, 0, :steps].double().mul(6).exp2()
    coarse = weights[ordered.order[0, 0, 0, :steps].long() // KEY_BLOCK].cumsum(0) / weights.sum()
    full = weights.sort(descending=True).values.cumsum(0) / weights.sum()
    for depth in (32, 64, 256, 1024):
        assert coarse[depth] >= 0.98 * full[depth]  # the least of three seeds is 0.991


@INTERPRETED
@pytest.mark.parametrize("steps", [96, 160, 224, 480])
def test_the_order_knows_the_last_keys_however_long_the_prefix_is(steps, monkeypatch):
    """Recent keys often matter most: those behind the last whole multiple of the sample must be seen by it too."""
    monkeypatch.setattr(order_module, "SAMPLES", 64)
    direction = torch.full((64,), 0.125)
    q = direction.expand(1, 1, 64, 64)
    rising = torch.linspace(0, 6, steps * KEY_BLOCK + 192)  # scores
    k = rising[None, None, :, None] * direction * 8
    scores, _, ordered = rank_of(call_of(q.half(), k.half(), k.half(), LayerConfig.uniform(1, segment=64, tile=TILE)))
    weights = scores[0, 0, 0, :steps].double().exp2()
    full = weights.sort(descending=True).values
    assert steps % order_module.SAMPLES
    for depth in (8, 16, 32, 64):
        assert weights[ordered.order[0, 0, 0, :depth].long() // KEY_BLOCK].sum() >= 0.9 * full[:depth].sum()


@COMPILED
def test_the_order_with_ballots_is_the_portable_one():
    """Inline PTX against plain Triton; lengths around a warp's stretch."""
    for length in (70, 1000, 2600, 5000):
        q, k, _ = inputs(2, 4, 2, min(length, 700), length, 64)
        config = LayerConfig.uniform(4, segment=128, tail="mean", tile=TileConfig(64, 32, 4, 4, 1))
        call = call_of(q, k, k, config)
        scores, _, fast = rank_of(call)
        portable = order_module.order(scores, call, range(call.shape.q_len), portable=True)
        for n in range(fast.order.shape[2]):
            steps = max(call.shape.offset + n * 128 - 128, 0) // 32 * 32 // KEY_BLOCK
            assert torch.equal(fast.order[:, :, n, :steps], portable.order[:, :, n, :steps])
            if steps:
                assert torch.equal(fast.first[:, :, n], portable.first[:, :, n])
                assert torch.equal(fast.edge[:, :, n], portable.edge[:, :, n])
