"""The Triton kernels in the interpreter, against the reference. bf16 is wrong there: fp32 and fp16 only."""

import itertools
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from s2o_runtime.attention.api import s2o_attention, s2o_attention_varlen
from s2o_runtime.attention.warmup import SEGMENTS
from s2o_runtime.call import make_head_tables
from s2o_runtime.config import KEY_BLOCK, HeadConfig, LayerConfig, StopRule, TileConfig
from s2o_runtime.devices import Resources
from s2o_runtime.kernels import prefill as prefill_module
from s2o_runtime.kernels import tail as tail_module
from s2o_runtime.kernels.prefill import count_heads_per_wave, run_prefill, slice_rows
from s2o_runtime.kernels.primitives import LOG2E, assign_tile
from s2o_runtime.kernels.rank import order as order_module
from s2o_runtime.kernels.rank import scores as scores_module
from s2o_runtime.kernels.rank.order import BUCKETS, bucket_shares
from s2o_runtime.kernels.tail import EDGES
from s2o_runtime.reference.attention import s2o_attention_reference
from s2o_runtime.reference.dense import log_sum_exp
from s2o_runtime.reference.ranking import log_weights, make_representatives
from s2o_runtime.sequences import CallShape
from support.kernels import TILE, agree, call_of, drawn, inputs, kernel_ranking, mixed_config, prefix_of, run_both
from support.layouts import as_transformers, pack, unpacked
from support.marks import INTERPRETED, all_but_first, pairwise
from support.naive import naive_attention

SLOW = pytest.mark.slow(reason="more cases of a kernel in Triton's interpreter, seconds each")
EXHAUSTIVE = pytest.mark.exhaustive(reason="still more of them: `make test` runs some")

pytestmark = INTERPRETED

BINS = 4 * BUCKETS  # linear bins of a row's scores, before they become buckets


def rank_of(q, k, config, kv_start=None):
    """(scores, order) of a whole call, [B, Hq, N, P / GRAIN] each."""
    ranking, _ = kernel_ranking(call_of(q, k, k, config, kv_start))
    return ranking.score.clone(), ranking.order


SHAPES = [
    pytest.param((1, 2, 1, 200, 200, 64, None), id="B1-H2-L200-D64"),
    pytest.param((1, 3, 3, 257, 257, 128, None), id="B1-H3-L257-D128"),
    pytest.param((1, 1, 1, 5, 5, 64, None), id="shorter-than-a-tile"),
    pytest.param((1, 1, 1, 1, 100, 64, None), id="one-query"),
    pytest.param((2, 4, 2, 100, 211, 64, None), id="q100-kv211"),
    pytest.param((3, 2, 1, 150, 150, 64, [0, 67, 149]), id="left-padded"),
    pytest.param((2, 3, 1, 100, 171, 64, [171, 33]), id="padded-chunk"),
]


TAUS = [1.0, 0.0, 100.0]


@pytest.mark.parametrize(
    ("shape", "tau"),
    all_but_first(pairwise(SHAPES, TAUS, mark=EXHAUSTIVE, count=7), SLOW),
)
def test_prefill_equals_the_reference(shape, tau, nan_filled):
    q, k, v, kv_start = drawn(shape)
    config = mixed_config(shape[1], tau)
    agree(*run_both(q, k, v, config, kv_start))


RULES_AND_TILES = [
    (TILE, StopRule.REST, 1.0),
    (TILE, StopRule.PAPER, 0.2),
    (TileConfig(128, 64, 1, 8, 1), StopRule.PAPER, 0.2),
    (TileConfig(64, 128, 3, 4, 1), StopRule.REST, 1.0),
]


@pytest.mark.parametrize(("tile", "stop_rule", "tau"), all_but_first(RULES_AND_TILES, SLOW), ids=str)
def test_rules_and_tiles(stop_rule, tau, tile, nan_filled):
    config = LayerConfig.uniform(1, tau=tau, segment=128, stop_rule=stop_rule, tail="mean", tile=tile)
    agree(*run_both(*inputs(1, 1, 1, 450, 450, 64), config))


FEATURES = [
    pytest.param({"sinks": torch.tensor([1.0, 9.0]), "softcap": 3.0, "scale": 0.3}, None, id="sinks-cap-scale"),
    pytest.param({"sinks": torch.tensor([-3.0, 6.0])}, [40, 0], id="sinks-padded"),
    pytest.param({"softcap": 50.0}, None, id="cap"),
    pytest.param({"scale": 0.5}, None, id="scale"),
]


@pytest.mark.parametrize(("features", "starts"), all_but_first(FEATURES, SLOW))
def test_sinks_caps_and_scales(features, starts, nan_filled):
    q, k, v, kv_start = drawn((len(starts or [0]), 2, 1, 140, 211, 64, starts))
    heads = (HeadConfig(1.0, 64, representatives=16, tail="mean"), HeadConfig(0.3, 128))
    agree(*run_both(q, k, v, LayerConfig(heads, TILE), kv_start, **features))


def test_a_cap_is_part_of_the_ranking(nan_filled):
    q, k, _ = inputs(1, 1, 1, 64, 330, 64)
    config = LayerConfig.uniform(1, segment=64, representatives=16, tile=TILE)
    ranking, _ = kernel_ranking(call_of(q, k, k, config, softcap=1.5))
    means = make_representatives(q[0, 0] * 0.125, 4)
    expected = log_weights(means, k[0, 0, :256], KEY_BLOCK, softcap=1.5) * LOG2E
    torch.testing.assert_close(ranking.score[0, 0, 0, :64].float(), expected, rtol=2e-3, atol=1e-2)
    assert (expected - log_weights(means, k[0, 0, :256], KEY_BLOCK) * LOG2E).abs().max() > 0.5


HEAD_DIMS = [(80, 80), (48, 32), (192, 128), (64, 96), (8, 8), (96, 96), (256, 256)]


@pytest.mark.parametrize(("head_dim", "value_dim"), all_but_first(HEAD_DIMS, SLOW, 2))
def test_other_head_dims_and_values_with_one_of_their_own(head_dim, value_dim, nan_filled):
    """The op itself: it fills up, runs the kernel, and cuts the output; the scale is that of the keys' head dim.

    Packed, with everything else that a layer may ask for, on every backend.
    """
    q, k, _ = inputs(1, 2, 1, 100, 150, head_dim)
    v = torch.randn(1, 1, 150, value_dim)
    config = LayerConfig.uniform(2, tau=0.0, segment=64, tile=TILE)
    out, lse, _ = s2o_attention(q, k, v, config, backend="triton", return_lse=True)
    torch.testing.assert_close(out.double(), naive_attention(q, k, v), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, log_sum_exp(q, k), rtol=1e-4, atol=1e-4)
    packed = [tensor[0].transpose(0, 1) for tensor in (q, k, v)]
    edges = [torch.tensor([0, length], dtype=torch.int32) for length in (100, 150)]
    for backend in ("triton", "reference", "dense"):
        options = {"scale": 0.2, "softcap": 4.0, "sinks": torch.tensor([1.0, 3.0])}
        alone = s2o_attention_varlen(*packed, *edges, 100, 150, config, backend=backend, **options)
        expected = naive_attention(q, k, v, **options)[0]
        torch.testing.assert_close(alone.transpose(0, 1).double(), expected, rtol=1e-4, atol=1e-5)


@SLOW
@pytest.mark.parametrize(("heads", "head_dim"), all_but_first([(2, 40), (3, 64), (1, 64)], EXHAUSTIVE))
def test_packed_sequences_are_sequences_on_their_own(heads, head_dim, nan_filled):
    q_lens, k_lens = [130, 0, 70, 1], [130, 0, 171, 90]
    parts, (q, k, v, cu_q, cu_k) = pack(q_lens, k_lens, heads, 1, head_dim)
    config = mixed_config(heads, 1.0)
    out, lse, stats = s2o_attention_varlen(
        q, k, v, cu_q, cu_k, 130, 220, config, backend="triton", return_stats=True, return_lse=True
    )
    outputs = zip((0, 2, 3), parts, unpacked(parts, out), unpacked(parts, lse), strict=True)
    for b, part, of_part, lse_of_part in outputs:
        own, own_lse, own_stats = s2o_attention(*part, config, backend="triton", return_stats=True, return_lse=True)
        torch.testing.assert_close(of_part, own[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse_of_part, own_lse[0], rtol=1e-5, atol=1e-6)
        assert torch.equal(stats.visited[b, :, : own_stats.visited.shape[2]], own_stats.visited[0])
        assert not stats.visited[b, :, own_stats.visited.shape[2] :].any()


def test_fp16_and_strides_as_transformers_hands_them_over(nan_filled):
    """Errors within what fp16 weights and outputs allow."""
    q, k, v = as_transformers(*inputs(1, 4, 2, 190, 190, 64, torch.float16))
    config = mixed_config(4, 0.0)
    out, _, _ = run_prefill(call_of(q, k, v, config))
    expected, _, _ = s2o_attention_reference(q.double(), k.double(), v.double(), config, scale=0.125)
    assert out.dtype == torch.float16
    # weights and output are each rounded to 11 bits, relative to values of |v| <= 4
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=4 * 2**-10)


@SLOW
def test_wide_strides_use_64_bit_offsets(monkeypatch, nan_filled):
    q, k, v = inputs(1, 1, 1, 150, 150, 64)
    config = mixed_config(1, 1.0)
    monkeypatch.setattr(prefill_module, "WIDE_ELEMENTS", 1)
    agree(*run_both(q, k, v, config))


@SLOW
def test_slicing_the_rows_changes_nothing(monkeypatch):
    q, k, v = inputs(1, 2, 1, 500, 530, 64)
    call = call_of(q, k, v, mixed_config(2, 1.0))
    whole = run_prefill(call)
    assert slice_rows(call, workspace=1) == [range(0, 128), range(128, 256), range(256, 384), range(384, 500)]
    # 2 heads, segments of 64 rows or more, 6 bytes a step of 4 keys and 4416 for a tail: 4 segments fit, then 2
    assert slice_rows(call, workspace=40000) == [range(0, 256), range(256, 384), range(384, 500)]
    monkeypatch.setattr(prefill_module, "WORKSPACE_BYTES", 1)
    sliced = run_prefill(call)
    torch.testing.assert_close(whole[0], sliced[0], rtol=1e-5, atol=1e-6)
    assert torch.equal(whole[1], sliced[1])


@SLOW
@pytest.mark.parametrize("starts", all_but_first([None, [30, 0]], EXHAUSTIVE), ids=["whole", "left-padded"])
@pytest.mark.parametrize("last_rows", [0, 128])
def test_the_order_in_which_heads_start_changes_nothing(last_rows, starts, monkeypatch, nan_filled):
    q, k, v, kv_start = drawn((len(starts or [0]), 4, 2, 330, 360, 16, starts))
    call = call_of(q, k, v, replace(mixed_config(4, 1.0), last_rows=last_rows), kv_start, lse=True)
    outputs = []
    for per_wave in (1, 2, 4):
        monkeypatch.setattr(prefill_module, "count_heads_per_wave", lambda *_, heads=per_wave: heads)
        outputs.append(run_prefill(call))
    for other in outputs[1:]:
        assert all(torch.equal(one, two) for one, two in zip(outputs[0], other, strict=True))
    agree(*run_both(q, k, v, call.config, call.kv_start, 0.125))


def test_dense_heads_start_first():
    s2o, dense = HeadConfig(1.0, 128), HeadConfig(mode="dense")
    config = LayerConfig((s2o, dense, s2o, dense), TILE)
    assert make_head_tables(config, torch.device("cpu")).launch_order.tolist() == [1, 3, 0, 2]
    alike = LayerConfig((s2o,) * 3, TILE)
    assert make_head_tables(alike, torch.device("cpu")).launch_order is None  # which needs no other kernel
    ending = replace(alike, last_rows=256)
    assert make_head_tables(ending, torch.device("cpu")).launch_order.tolist() == [
        0,
        1,
        2,
    ]  # whose last rows start first


@triton.jit
def _programs(OUT, LAUNCH_ORDER, waves, row_begin, q_len, last_rows, ROWS: tl.constexpr):
    tile, h, b, heads = assign_tile(LAUNCH_ORDER, waves, row_begin, q_len, last_rows, ROWS, True)
    number = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    tl.store(OUT + number, (b * heads + h) * 100 + tile)


@pytest.mark.parametrize(("row_begin", "last_rows", "before"), [(0, 128, 2), (0, 0, 5), (128, 256, 0), (64, 128, 1)])
def test_last_rows_of_all_heads_start_first_and_then_some_heads_take_turns(row_begin, last_rows, before):
    order, tiles, rows, per_wave = torch.tensor([2, 0, 3, 1], dtype=torch.int32), 5 - row_begin // 64, 64, 2
    started = torch.empty(2 * tiles * 4, dtype=torch.int32)
    _programs[4, tiles, 2](started, order, 4 // per_wave, row_begin, 300, last_rows, rows)
    ending = [(tile, head) for tile in reversed(range(before, tiles)) for head in order.tolist()]
    turns = [
        (tile, head) for wave in order.split(per_wave) for tile in reversed(range(before)) for head in wave.tolist()
    ]
    assert started.tolist() == [(b * 4 + head) * 100 + tile for b in range(2) for tile, head in ending + turns]


def test_as_many_heads_take_turns_as_the_cache_holds():
    gpu = Resources(132, 50 << 20)

    def per_wave(q_len, kv_len, gpu=gpu, heads=32):
        return count_heads_per_wave(CallShape(1, heads, heads // 4, q_len, kv_len, 128, 128), 4, gpu)

    assert [per_wave(1 << power, 1 << power) for power in range(12, 18)] == [32, 32, 16, 8, 4, 4]
    assert per_wave(16384, 16384, heads=20) == 10  # of 16: all rounds have as many
    assert per_wave(8192, 12000) == 16  # behind some keys, whose work differs still
    assert per_wave(8192, 131072) == 1  # behind so many that rows hardly differ
    assert per_wave(2048, 2048, Resources(132, 3 << 20)) == 8  # whose two KV heads the cache holds
    assert per_wave(512, 512) == 32  # no more than there are


@pytest.mark.parametrize(
    ("representatives", "starts", "length"),
    [
        (16, [30, 0], 330),
        *all_but_first([(1, [30, 0], 330), (16, None, 330), (1, None, 330)], SLOW, 0),
        *all_but_first([(1, [30, 0], 2600), (1, None, 2600), (16, [30, 0], 2600)], EXHAUSTIVE, 0),
    ],
)
def test_rank_scores_and_orders_every_prefix(starts, length, representatives, nan_filled, monkeypatch):
    monkeypatch.setattr(scores_module, "LOG_SUM_SAMPLE", 1 << 20)
    q, k, _, kv_start = drawn((2, 2, 1, 230, length, 64, starts))
    config = LayerConfig.uniform(2, segment=64, representatives=representatives, tile=TILE)
    call = call_of(q, k, k, config, kv_start)
    scores, order_of_steps = rank_of(q, k, config, kv_start)
    for b, h, n in itertools.product(range(2), range(2), range(4)):
        start, first = prefix_of(call, b, h, n)
        segment = q[b, h, n * 64 : (n + 1) * 64] * 0.125
        means = make_representatives(segment, 64 // representatives, length - 230 + n * 64, start)
        steps = (first - start) // KEY_BLOCK
        expected = log_weights(means, k[b, 0, start:first], KEY_BLOCK) * LOG2E
        ours = scores[b, h, n, :steps].float()
        torch.testing.assert_close(ours, expected, rtol=2e-3, atol=1e-2)  # fp16, and 1 of 1 keys in the denominator
        order, sure = bucket_order(ours)
        found = (order_of_steps[b, h, n, :steps].long() - start) // KEY_BLOCK
        assert torch.equal(found.sort().values, torch.arange(steps))
        assert torch.equal(found[sure[found]], order[sure[order]])


@SLOW
def test_a_sampled_denominator_is_near_the_exact_one(monkeypatch, nan_filled):
    q, k, _ = inputs(1, 1, 1, 64, 3000, 64)
    config = LayerConfig.uniform(1, segment=64, representatives=16, tile=TILE)
    monkeypatch.setattr(scores_module, "LOG_SUM_SAMPLE", 1 << 20)
    exact, _ = rank_of(q * 0.5, k, config)
    monkeypatch.setattr(scores_module, "LOG_SUM_SAMPLE", 3000 // 16)
    sampled, _ = rank_of(q * 0.5, k, config)
    difference = (sampled - exact)[0, 0, 0, : 2912 // KEY_BLOCK].float()
    assert difference.abs().max() < 1.0  # of a row: at most a factor of two
    assert difference.abs().mean() > 1e-3


@SLOW
@pytest.mark.parametrize(("splits", "starts", "head_dim"), [(3, [30, 0], 64), (1, None, 256)])
def test_tail_sums_are_those_of_the_order(splits, starts, head_dim, nan_filled, monkeypatch):
    monkeypatch.setattr(tail_module, "count_tail_splits", lambda programs, steps: splits)
    q, k, v, kv_start = drawn((2, 2, 1, 230, 500, head_dim, starts))
    config = LayerConfig.uniform(2, segment=64, representatives=16, tail="mean", tile=TILE)
    call = call_of(q, k, v, config, kv_start)
    ranking, tail = kernel_ranking(call)
    assert_tail_sums(tail, ranking, call)


@pytest.mark.parametrize(("splits", "head_dim", "starts"), [(2, 64, [30]), pytest.param(1, 128, None, marks=SLOW)])
def test_tail_sums_of_more_segments_at_once(splits, head_dim, starts, nan_filled, monkeypatch):
    """The last program has one segment, of the eight that it could have."""
    monkeypatch.setattr(tail_module, "count_tail_splits", lambda programs, steps: splits)
    q, k, v, kv_start = drawn((len(starts or [0]), 2, 1, 560, 700, head_dim, starts))
    heads = (HeadConfig(1.0, 64, representatives=16, tail="mean"), HeadConfig(1.0, 128, tail="mean"))
    call = call_of(q, k, v, LayerConfig(heads, TILE), kv_start)
    ranking, four = kernel_ranking(call)
    monkeypatch.setattr(tail_module, "MANY_SEGMENTS", 1)
    assert tail_module.count_tail_segments(9, head_dim) == 8
    eight = tail_module.sum_tails(ranking, tail_module.pool_values(v, call), call, range(560))
    for ours, expected in zip(eight, four, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert_tail_sums(eight, ranking, call)


def assert_tail_sums(tail, ranking, call):
    """The sums of a whole call are those of its order, in plain torch."""
    shape = call.shape
    for b, h in itertools.product(range(shape.batch), range(shape.query_heads)):
        for n in range(-(-shape.q_len // call.config.heads[h].segment)):
            start, first = prefix_of(call, b, h, n)
            steps = (first - start) // KEY_BLOCK
            weights = ranking.score[b, h, n, :steps].double().exp2()
            means = call.v[b, h // shape.group, start:first].double().view(steps, KEY_BLOCK, shape.head_dim).mean(1)
            place = (ranking.order[b, h, n, :steps].long() - start) // KEY_BLOCK
            for e, begin in enumerate(tail.first[b, h, n, :: BUCKETS // EDGES].tolist()):
                rest = place[begin:]
                on_the_border = float(weights[rest].max()) * 2 if len(rest) else 1e-6  # may count for either bucket
                mass, values = tail.mass[b, h, n, e].double(), tail.values[b, h, n, e].double()
                torch.testing.assert_close(mass, weights[rest].sum(), rtol=1e-4, atol=on_the_border)
                torch.testing.assert_close(values, weights[rest] @ means[rest], rtol=1e-4, atol=on_the_border * 4)


def test_few_long_segments_are_shared_and_many_or_short_ones_are_not():
    assert tail_module.count_tail_splits(32, 8192) == tail_module.TAIL_SPLITS
    assert tail_module.count_tail_splits(128, 8192) == 4
    assert tail_module.count_tail_splits(64, 1984) == 3
    assert tail_module.count_tail_splits(1024, 32768) == tail_module.count_tail_splits(8, 511) == 1


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


@SLOW
def test_the_coarse_order_is_nearly_the_full_order():
    """Along the order, nearly as much of the mass comes at each depth as along a full sort."""
    q, k, _ = inputs(1, 1, 1, 64, 12000, 64)
    scores, ranked = rank_of(q, k, LayerConfig.uniform(1, segment=64, tile=TILE))
    steps = (12000 - 64) // 32 * 32 // KEY_BLOCK
    weights = scores[0, 0, 0, :steps].double().mul(6).exp2()
    coarse = weights[ranked[0, 0, 0, :steps].long() // KEY_BLOCK].cumsum(0) / weights.sum()
    full = weights.sort(descending=True).values.cumsum(0) / weights.sum()
    for depth in (32, 64, 256, 1024):
        assert coarse[depth] >= 0.98 * full[depth]  # the least of three seeds is 0.991


@pytest.mark.parametrize("steps", [96, 160, 224, 480])
def test_the_order_knows_the_last_keys_however_long_the_prefix_is(steps, monkeypatch):
    """Recent keys often matter most: those behind the last whole multiple of the sample must be seen by it too."""
    monkeypatch.setattr(order_module, "SAMPLES", 64)
    direction = torch.full((64,), 0.125)
    q = direction.expand(1, 1, 64, 64)
    k = (
        torch.linspace(0, 6, steps * KEY_BLOCK + 64)[None, None, :, None] * direction * 8
    )  # scores rise with the position
    scores, ranked = rank_of(q.half(), k.half(), LayerConfig.uniform(1, segment=64, tile=TILE))
    weights = scores[0, 0, 0, :steps].double().exp2()
    full = weights.sort(descending=True).values
    assert steps % order_module.SAMPLES
    for depth in (8, 16, 32, 64):
        assert weights[ranked[0, 0, 0, :depth].long() // KEY_BLOCK].sum() >= 0.9 * full[:depth].sum()


def test_equal_scores_keep_their_neighbours():
    q, k, _ = inputs(1, 1, 1, 64, 1360, 64)
    _, ranked = rank_of(q * 0, k, LayerConfig.uniform(1, segment=64, tile=TILE))
    for begin in (0, 128, 256):
        steps = torch.arange(begin, min(begin + 128, 320), dtype=torch.int32)
        block = ranked[0, 0, 0, begin : begin + len(steps)]
        assert torch.equal(block.sort().values, steps * KEY_BLOCK)


def test_dense_heads_alone_give_the_kernel_an_order_of_the_type_it_expects(monkeypatch):
    """They read none, but a compiler types what would be read; the interpreter does not."""
    q, k, v = inputs(1, 2, 1, 100, 100, 64)
    config = LayerConfig.uniform(2, mode="dense", tile=TileConfig(64, 64, 2, 4, 2))
    types, launch = [], prefill_module.launch

    def recorded(kernel, grid, arguments, *rest, **options):
        types.append(arguments["RANKING"].order.dtype)
        launch(kernel, grid, arguments, *rest, **options)

    monkeypatch.setattr(prefill_module, "launch", recorded)
    out, _, _ = run_prefill(call_of(q, k, v, config, softcap=1.5))
    assert types == [torch.int32]
    torch.testing.assert_close(out, naive_attention(q, k, v, scale=0.125, softcap=1.5).float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_warmup_has_every_number_of_segments_that_kernels_are_compiled_for(head_dim):
    def forms(segments):
        return scores_module.count_segments_at_once(segments, 1, head_dim), tail_module.count_tail_segments(
            segments, head_dim
        )

    assert {forms(segments) for segments in range(1, 600)} == {forms(segments) for segments in SEGMENTS}
