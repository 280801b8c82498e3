"""The prefill kernels against the reference, which follows the ranking that the kernels made; and what they rest on.

In a GPU's 16 bits both compute the same keys in the same order, so `agree` bounds rounding alone: the kernels' own
ranking is held against a full sort in test_ranking.py.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
import triton
import triton.language as tl

from s2o_runtime.attention.api import s2o_attention, s2o_attention_varlen
from s2o_runtime.attention.warmup import SEGMENTS, warmup
from s2o_runtime.call import make_head_tables
from s2o_runtime.config import KEY_BLOCK, LOOKBACKS, HeadConfig, LayerConfig, StopRule, TileConfig
from s2o_runtime.devices import Resources
from s2o_runtime.kernels import launch as launch_module
from s2o_runtime.kernels import prefill as prefill_module
from s2o_runtime.kernels.prefill import Ranker, count_heads_per_wave, run_prefill, slice_rows
from s2o_runtime.kernels.primitives import assign_tile
from s2o_runtime.kernels.rank.order import BUCKETS
from s2o_runtime.kernels.rank.tail import EDGES, count_tail_segments
from s2o_runtime.reference.attention import s2o_attention_reference
from s2o_runtime.reference.dense import exact_attention, log_sum_exp
from s2o_runtime.reference.ranking import RankedPrefix
from s2o_runtime.sequences import CallShape, call_shape, measure_density
from s2o_runtime.tiles import list_candidate_tiles
from support.kernels import (
    DEVICE,
    DTYPE,
    DTYPES,
    HOPPER,
    HOPPER_256,
    ON_GPU,
    PLAIN,
    SHAPES,
    TILE,
    TILES,
    agree,
    call_of,
    drawn,
    inputs,
    mixed_config,
    prefix_of,
    relative_error,
)  # fmt: skip
from support.layouts import as_transformers, pack, unpacked
from support.marks import COMPILED, INTERPRETED, MORE_CASES, SLOW_KERNELS, all_but_first, pairwise
from support.naive import naive_attention

pytestmark = pytest.mark.usefixtures("nan_filled")

LAYERS = {
    "rest": {"tau": 1.0},
    "paper": {"tau": 0.1, "stop_rule": StopRule.PAPER},
    "last-rows": {"tau": 20.0, "last_rows": 128, "lookback": 128},
    "exact": {"tau": 0.0, "lookback": 256},
    "at-once": {"tau": 1000.0, "lookback": 128},
}
FEATURES = ["plain", "sinks", "cap", "scale", "all"]


def ranking_of(call, ranking, b, h, n):
    """Return what the kernels made of a segment's ranking, as the reference wants it."""
    start, first = prefix_of(call, b, h, n)
    steps = (first - start) // KEY_BLOCK
    order = ranking.order[b, h, n, :steps].long()[:, None] + torch.arange(KEY_BLOCK, device=DEVICE)
    mass = torch.zeros(steps + 1, device=DEVICE)
    values = torch.zeros(steps + 1, call.shape.head_dim, device=DEVICE)
    if call.config.heads[h].tail == "mean":
        last = torch.full((1,), steps, device=DEVICE)
        begins = torch.cat([ranking.first[b, h, n, :: BUCKETS // EDGES].long(), last])
        masses, sums = (
            torch.cat([of_edges, torch.zeros_like(of_edges[:1])]).float()
            for of_edges in (ranking.mass[b, h, n], ranking.sums[b, h, n])
        )
        at = torch.arange(steps, device=DEVICE)
        edge = (begins[:EDGES] <= at[:, None]).sum(1) - 1
        share = (begins[edge + 1] - at) / (begins[edge + 1] - begins[edge])  # between two edges the rest shrinks evenly
        mass[:steps] = masses[edge + 1].lerp(masses[edge], share)
        values[:steps] = sums[edge + 1].lerp(sums[edge], share[:, None])
    return RankedPrefix(order.flatten(), mass, values, KEY_BLOCK)


def run_both(q, k, v, config, kv_start=None, scale=None, splits=1, **features):
    """The kernels, and the reference, of so many splits, following the ranking that the kernels made."""
    call = call_of(q, k, v, config, kv_start, scale, True, **features)
    ranking = None if config.is_dense else partial(ranking_of, call, Ranker(call).rank(range(call.shape.q_len)))
    options = {"kv_start": kv_start, "scale": scale, "splits": splits, **features}
    expected = s2o_attention_reference(q, k, v, config, ranking_of=ranking, **options)
    return run_prefill(call), expected


def features_of(name, heads):
    """Sinks, a soft cap below the largest scores, a scale: what some models ask for."""
    sinks = torch.linspace(-2.0, 9.0, heads, device=DEVICE, dtype=DTYPE)
    every = {"sinks": sinks, "cap": 3.0, "scale": 0.11}
    names = {"sinks": "sinks", "cap": "softcap", "scale": "scale"}
    return {names[key]: value for key, value in every.items() if name in (key, "all")}


FORMS = {  # what a call may be besides: of the module `prefill`, what is set
    "plain": {},
    "views": {},
    "split": {"count_key_splits": lambda *_: 2},
    "in-16-splits": {"count_key_splits": lambda *_: 16},  # most are empty
    "one-head-a-turn": {"count_heads_per_wave": lambda *_: 1},
    "sliced": {"WORKSPACE_BYTES": 1},
    "64-bit-offsets": {"WIDE_ELEMENTS": 1},
}


@pytest.mark.parametrize(
    ("shape", "layer", "form", "features", "tile", "head_dim", "dtype"),
    all_but_first(pairwise(SHAPES, LAYERS, FORMS, FEATURES, TILES, DTYPES, mark=MORE_CASES, count=24), SLOW_KERNELS, 3),
)
def test_prefill_equals_the_reference(shape, layer, form, features, tile, head_dim, dtype, monkeypatch):
    """Every row, its log-sum-exp, and where each row tile stops.

    The order must be the kernels' own. With the paper's rule, which looks at one chunk alone, the order inside a bucket
    of ranks decides what the last chunks bring: of 300 queries behind 1400 keys, at thresholds of 0.1 and 0.03, the
    reference errs by 0.0450 and 0.0216 where it sorts, and the kernels by 0.0475 and 0.0260 with as many keys. Along
    the kernels' order the reference stops at the same chunks, and the outputs differ by 2e-7.
    """
    q, k, v, kv_start = drawn(shape, head_dim, dtype)
    options = features_of(features, shape[1])
    config = mixed_config(shape[1], tile=tile, **LAYERS[layer])
    settings = {"count_key_splits": lambda *_: 1} | FORMS[form]
    for name, value in settings.items():
        monkeypatch.setattr(prefill_module, name, value)
    if form == "views":
        q, k, v = as_transformers(q, k, v)
    splits = settings["count_key_splits"]()
    agree(*run_both(q, k, v, config, kv_start, splits=splits, **options), tile.block_m)


@COMPILED
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_every_candidate_tile_of_this_gpu_is_exact(head_dim):
    q, k, v = inputs(1, 4, 2, 1333, 1333, head_dim)
    truth, logs = exact_attention(q, k, v), log_sum_exp(q, k)
    for tile in {replace(tile, chunk=2) for tile in list_candidate_tiles(head_dim, torch.cuda.get_device_capability())}:
        config = LayerConfig.uniform(4, tau=0.0, segment=256, tile=tile)
        out, lse, stats = s2o_attention(q, k, v, config, backend="triton", return_lse=True, return_stats=True)
        assert relative_error(out, truth) <= 6e-3, tile  # bf16 weights and output, each within 2^-8
        torch.testing.assert_close(lse, logs, rtol=0, atol=2e-3)
        assert stats.density.tolist() == pytest.approx([1.0] * 4)


RINGS = [(HOPPER, 64), (HOPPER_256, 256)]
RINGS += [(replace(HOPPER, num_stages=3), 128), (replace(HOPPER, block_n=64, num_stages=4), 128)]


@COMPILED
@pytest.mark.parametrize(
    ("shape", "tau", "lookback", "tile", "head_dim"), pairwise(SHAPES, [0.0, 0.3, 1.0], LOOKBACKS, RINGS)
)
def test_the_hopper_kernel_is_the_plain_kernel(shape, tau, lookback, tile, head_dim):
    """The same keys in the same order; weights are rounded after a maximum that tiles reach in another order."""
    q, k, v, kv_start = drawn(shape, head_dim)
    kinds = (HeadConfig(tau, 128), HeadConfig(tau, 256), HeadConfig(mode="dense"))
    config = LayerConfig(tuple(kinds[h % 3] for h in range(shape[1])), tile, lookback)
    plain = config.with_tile(TileConfig(64, tile.block_n, 2, 8 if head_dim > 128 else 4, 1))
    ours, theirs = (run_prefill(call_of(q, k, v, each, kv_start, lse=True)) for each in (config, plain))
    agree(ours, theirs, tile.block_m, error=4e-3, lse_error=1e-4, apart=0.0)


@COMPILED
@pytest.mark.parametrize(
    ("starts", "tile", "head_dim"), pairwise([None, [300, 1700]], [(PLAIN, 128), (HOPPER, 128), (HOPPER_256, 256)])
)
def test_heads_that_stop_are_as_near_to_dense_as_the_reference(starts, tile, head_dim):
    """Along one order they stop at the same chunks; with a full sort for buckets there, nearly so, and so err nearly.

    Segments of 512 and 256 rows are beside one another. Buckets blur which chunk is the last of a row tile.
    """
    q, k, v, kv_start = drawn((2, 4, 2, 1100, 2500, starts), head_dim)
    heads = (
        HeadConfig(0.5, 512, representatives=16, tail="mean"),
        HeadConfig(0.3, 256, representatives=16),
        HeadConfig(0.05, 256, stop_rule=StopRule.PAPER),
        HeadConfig(1.0, 256, tail="mean"),
    )
    config, options = LayerConfig(heads, tile), features_of("all", 4)
    ours, along_our_order = run_both(q, k, v, config, kv_start, **options)
    agree(ours, along_our_order, tile.block_m)
    options["kv_start"] = kv_start
    theirs, truth = s2o_attention_reference(q, k, v, config, **options), exact_attention(q, k, v, **options)
    density, expected = (measure_density(each[1], config, call_shape(q, k, v), kv_start) for each in (ours, theirs))
    chunk = tile.stride / (2500 - 1100 / 2)  # over the mean keys of a row
    torch.testing.assert_close(density, expected, rtol=0, atol=chunk)
    for h in range(4):
        error, reference = (relative_error(each[0][:, h], truth[:, h]) for each in (ours, theirs))
        assert error <= 2.0 * reference + 6e-3  # coarse order, sampled denominators, 16 edges, bf16


HEAD_DIMS = [(80, 80), (48, 32), (192, 128), (64, 96), (8, 8), (96, 96), (256, 256)]


@pytest.mark.parametrize(("head_dim", "value_dim"), all_but_first(HEAD_DIMS, SLOW_KERNELS, 2))
def test_other_head_dims_and_values_with_one_of_their_own(head_dim, value_dim):
    """The op itself: it fills up, runs the kernel, and cuts the output; the scale is that of the keys' head dim.

    Packed, with everything else that a layer may ask for, on every backend.
    """
    q, k, _ = inputs(1, 2, 1, 100, 150, head_dim)
    v = inputs(1, 2, 1, 100, 150, value_dim)[2]
    tile = TileConfig(64, 32, 2, 8, 2) if head_dim > 128 and ON_GPU else PLAIN
    host = [tensor.cpu() for tensor in (q, k, v)]
    config = LayerConfig.uniform(2, tau=0.0, segment=128, tile=tile)
    close = {"rtol": 2e-2, "atol": 2e-2} if ON_GPU else {"rtol": 1e-4, "atol": 1e-5}  # |v| < 4 in bf16
    out, lse, _ = s2o_attention(q, k, v, config, backend="triton", return_lse=True)
    torch.testing.assert_close(out.double().cpu(), naive_attention(*host), **close)
    torch.testing.assert_close(lse, log_sum_exp(q, k), rtol=1e-4, atol=4e-3 if ON_GPU else 1e-4)
    packed = [tensor[0].transpose(0, 1) for tensor in (q, k, v)]
    edges = [torch.tensor([0, length], dtype=torch.int32, device=DEVICE) for length in (100, 150)]
    options = {"scale": 0.2, "softcap": 4.0, "sinks": torch.tensor([1.0, 3.0])}
    expected = naive_attention(*host, **options)[0]
    options["sinks"] = options["sinks"].to(DEVICE)
    for backend in ("triton", "reference", "dense"):
        alone = s2o_attention_varlen(*packed, *edges, 100, 150, config, backend=backend, **options)
        torch.testing.assert_close(alone.transpose(0, 1).double().cpu(), expected, **close)


@pytest.mark.slow(reason="every sequence on its own too, in Triton's interpreter")
@pytest.mark.parametrize(
    ("tile", "head_dim", "splits"), all_but_first(pairwise([TILES[0], TILES[-1]], [8, 1]), MORE_CASES, 1)
)
def test_packed_sequences_are_sequences_on_their_own(tile, head_dim, splits, monkeypatch):
    """One has no tokens, one so few keys that splits are empty, one no more keys than queries."""
    monkeypatch.setattr(prefill_module, "count_key_splits", lambda *_: splits)  # which follow from the longest sequence
    q_lens, k_lens = (
        ([700, 0, 129, 1500, 1], [700, 0, 640, 1500, 300]) if ON_GPU else ([130, 0, 70, 1], [130, 0, 171, 90])
    )
    parts, packed = pack(q_lens, k_lens, 4, 2, head_dim)
    config = mixed_config(4, 1.0, tile=tile, last_rows=128)
    options = {"backend": "triton", "return_stats": True, "return_lse": True, **features_of("sinks", 4)}
    out, lse, stats = s2o_attention_varlen(*packed, max(q_lens), max(k_lens), config, **options)
    numbers = [number for number, length in enumerate(q_lens) if length]
    for b, part, of_part, lse_of_part in zip(numbers, parts, unpacked(parts, out), unpacked(parts, lse), strict=True):
        alone = s2o_attention(*part, config, **options)
        tiles = alone.stats.visited.shape[2]
        ours = of_part[None], stats.visited[b : b + 1, :, :tiles], lse_of_part[None]
        agree(ours, (alone.out, alone.stats.visited, alone.lse), tile.block_m, error=4e-3, lse_error=1e-4, apart=0.01)
        assert splits > 1 or torch.equal(of_part, alone.out[0])
        assert not stats.visited[b, :, tiles:].any()


def test_slices_of_rows_fit_the_workspace():
    call = call_of(*inputs(1, 2, 1, 500, 530, 64), mixed_config(2, 1.0, tile=TILE))
    assert slice_rows(call, workspace=1) == [range(0, 128), range(128, 256), range(256, 384), range(384, 500)]
    # 2 heads, segments of 64 rows or more, 6 bytes a step of 4 keys and 4416 for a tail: 4 segments fit, then 2
    assert slice_rows(call, workspace=40000) == [range(0, 256), range(256, 384), range(384, 500)]


def test_dense_heads_start_first():
    s2o, dense = HeadConfig(1.0, 128), HeadConfig(mode="dense")
    tables = [
        make_head_tables(LayerConfig(heads, TILE, last_rows=last_rows), torch.device("cpu"))
        for heads, last_rows in (((s2o, dense, s2o, dense), 0), ((s2o,) * 3, 0), ((s2o,) * 3, 256))
    ]
    assert [table.launch_order.tolist() for table in tables] == [[1, 3, 0, 2], [0, 1, 2], [0, 1, 2]]
    assert [table.works_unevenly for table in tables] == [True, False, True]  # by modes, and by the last rows


@triton.jit
def _programs(OUT, LAUNCH_ORDER, waves, row_begin, q_len, last_rows, ROWS: tl.constexpr):
    tile, h, b, heads, _ = assign_tile(LAUNCH_ORDER, waves, row_begin, q_len, last_rows, 1, ROWS, True, False)
    number = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    tl.store(OUT + number, (b * heads + h) * 100 + tile)


@pytest.mark.parametrize(("row_begin", "last_rows", "before"), [(0, 128, 2), (0, 0, 5), (128, 256, 0), (64, 128, 1)])
def test_last_rows_of_all_heads_start_first_and_then_some_heads_take_turns(row_begin, last_rows, before):
    order, tiles, per_wave = torch.tensor([2, 0, 3, 1], dtype=torch.int32, device=DEVICE), 5 - row_begin // 64, 2
    started = torch.empty(2 * tiles * 4, dtype=torch.int32, device=DEVICE)
    _programs[4, tiles, 2](started, order, 4 // per_wave, row_begin, 300, last_rows, 64)
    ending = [(tile, head) for tile in reversed(range(before, tiles)) for head in order.tolist()]
    waves = [wave.tolist() for wave in order.split(per_wave)]
    turns = [(tile, head) for wave in waves for tile in reversed(range(before)) for head in wave]
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


@INTERPRETED
def test_dense_heads_alone_give_the_kernel_an_order_of_the_type_it_expects(monkeypatch):
    """They read none, but a compiler types what would be read; the interpreter does not."""
    q, k, v = inputs(1, 2, 1, 100, 100, 64)
    types, launch = [], prefill_module.launch

    def recorded(kernel, grid, arguments, *rest, **options):
        types.append(arguments["RANKING"].order.dtype)
        launch(kernel, grid, arguments, *rest, **options)

    monkeypatch.setattr(prefill_module, "launch", recorded)
    config = LayerConfig.uniform(2, mode="dense", tile=TileConfig(64, 64, 2, 4, 2))
    agree(*run_both(q, k, v, config, softcap=1.5), 64)
    assert types == [torch.int32]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_warmup_has_every_number_of_segments_that_kernels_are_compiled_for(head_dim):
    def forms(counts):
        return {count_tail_segments(count, head_dim) for count in counts}

    assert forms(range(1, 600)) == forms(SEGMENTS)


@COMPILED
@pytest.mark.parametrize(("tile", "features"), [(PLAIN, "plain"), (HOPPER, "plain"), (PLAIN, "all")])
def test_after_warmup_nothing_compiles(tile, features):
    config = mixed_config(6, 0.5, tile=tile)
    options = {name: value for name, value in features_of(features, 6).items() if name != "scale"}
    launch_module._compiled.clear()
    warmup(config, kv_heads=3, head_dim=64, padded=True, **options | ({"sinks": DTYPE} if options else {}))
    known = set(launch_module._compiled)
    for queries, keys in ((129, 129), (1000, 1000), (2048, 2048), (3333, 3333), (9999, 9999), (700, 60000)):
        tensors = as_transformers(*inputs(1, 6, 3, queries, keys, 64))
        for start in (None, torch.tensor([5], device="cuda")):
            s2o_attention(*tensors, config, kv_start=start, backend="triton", **options)
    assert set(launch_module._compiled) == known
