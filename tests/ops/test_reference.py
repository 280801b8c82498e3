"""The method in plain torch against loops over rows and keys: S2O, dense attention, windows; and what both promise."""

import importlib
import re
from dataclasses import dataclass, replace
from itertools import pairwise
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from s2o_runtime import config as config_module
from s2o_runtime import reference
from s2o_runtime.attention import compute
from s2o_runtime.attention.compute import window_attention
from s2o_runtime.call import Scoring
from s2o_runtime.config import LOOKBACKS, HeadConfig, LayerConfig, StopRule, TileConfig
from s2o_runtime.reference import dense
from s2o_runtime.reference.attention import State, s2o_attention_reference, with_tail
from s2o_runtime.reference.dense import dense_attention, exact_attention, log_sum_exp
from s2o_runtime.reference.ranking import make_representatives, rank
from s2o_runtime.sequences import call_shape, measure_density
from support.naive import naive_attention, naive_s2o
from support.pages import ROOT

TILE = TileConfig(block_m=64, block_n=32, chunk=2)
EXACT = {"rtol": 1e-9, "atol": 1e-11}  # of sums of some hundred numbers in float64


@dataclass(frozen=True)
class AttentionCase:
    """A call of the op.

    Attributes:
        sizes: batch, KV heads, query heads of each, queries, keys before them, head dim, that of values.
        starts: the first key of each sequence that counts, or None.
        config: of the layer.
        options: scale, softcap, and whether there are sinks.
    """

    sizes: tuple[int, int, int, int, int, int, int]
    starts: tuple[int, ...] | None
    config: LayerConfig
    options: tuple[float | None, float | None, bool]

    def tensors(self, dtype=torch.float64):
        """Random q, k and v [B, H, L, D]; queries are longer than keys, so that the scores differ."""
        batch, kv_heads, group, queries, past, head_dim, value_dim = self.sizes
        rng = torch.Generator().manual_seed(sum(self.sizes))
        q = 2 * torch.randn(batch, kv_heads * group, queries, head_dim, generator=rng, dtype=torch.float64)
        keys = batch, kv_heads, past + queries
        k, v = (torch.randn(*keys, dim, generator=rng, dtype=torch.float64) for dim in (head_dim, value_dim))
        return q.to(dtype), k.to(dtype), v.to(dtype)

    def arguments(self, dtype=torch.float64):
        """`kv_start`, `scale`, `softcap` and `sinks`."""
        scale, softcap, has_sinks = self.options
        sinks = torch.linspace(-1.0, 4.0, self.config.num_heads, dtype=dtype) if has_sinks else None
        starts = None if self.starts is None else torch.tensor(self.starts)
        return {"kv_start": starts, "scale": scale, "softcap": softcap, "sinks": sinks}


@st.composite
def attention_cases(draw, most_queries=200, most_past=400):
    """Batches with and without padding, of heads of all kinds, with whatever else a layer may ask for."""
    batch, kv_heads, group = draw(st.sampled_from([(1, 1, 1), (1, 1, 2), (1, 2, 1), (1, 2, 2), (2, 1, 2)]))
    queries = draw(st.integers(1, most_queries))
    past = draw(st.sampled_from([0, 0, draw(st.integers(1, most_past))]))
    starts = None
    if draw(st.booleans()):
        starts = tuple(draw(st.integers(0, queries + past)) for _ in range(batch))
    tile = TileConfig(*draw(st.sampled_from([(64, 32, 1), (64, 32, 2), (128, 32, 1), (64, 64, 2)])))
    heads = st.builds(
        HeadConfig,
        tau=st.sampled_from([0.0, 0.4, 1.0, 1e6]),
        segment=st.sampled_from([tile.rows, 2 * tile.rows]),
        mode=st.sampled_from(["s2o", "s2o", "s2o", "dense"]),
        stop_rule=st.sampled_from(StopRule),
        representatives=st.sampled_from([1, 16]),
        tail=st.sampled_from(["none", "mean"]),
    )
    layer = tuple(draw(heads) for _ in range(kv_heads * group))
    config = LayerConfig(layer, tile, draw(st.sampled_from([64, 64, 128, 256])), draw(st.sampled_from([0, 0, 128])))
    options = draw(st.sampled_from([None, 0.4])), draw(st.sampled_from([None, None, 2.0])), draw(st.booleans())
    dims = draw(st.sampled_from([(16, 16), (16, 24), (8, 4)]))
    return AttentionCase((batch, kv_heads, group, queries, past, *dims), starts, config, options)


def examples(count):
    """So many cases, the same in every run."""
    return settings(max_examples=count, derandomize=True, deadline=None)


PADDED = LayerConfig((HeadConfig(0.4, 64, tail="mean"),), TileConfig(64, 32, 1))  # whose first segment is padding only


@examples(40)
@given(attention_cases(), st.sampled_from([False, False, True]))
@example(AttentionCase((1, 1, 1, 180, 0, 16, 16), (100,), PADDED, (None, None, False)), False)
@example(AttentionCase((1, 1, 1, 180, 400, 16, 16), None, replace(PADDED, last_rows=128), (None, None, False)), False)
def test_the_reference_is_the_naive_loops(case, paper_literal):
    """Output, log-sum-exps and density; permuted queries leave the tiles that density counts."""
    (q, k, v), options = case.tensors(), case.arguments()
    out, visited, lse = s2o_attention_reference(q, k, v, case.config, paper_literal=paper_literal, **options)
    expected, logs, pairs, causal = naive_s2o(q, k, v, case.config, paper_literal=paper_literal, **options)
    torch.testing.assert_close(out, expected, **EXACT)
    torch.testing.assert_close(lse, logs, **EXACT)
    if not paper_literal and causal:
        density = measure_density(visited, case.config, call_shape(q, k, v), options["kv_start"])
        torch.testing.assert_close(density, torch.tensor(pairs).double() / causal, rtol=1e-12, atol=0)


@examples(30)
@given(attention_cases())
def test_tau_zero_is_dense_and_more_tau_never_visits_more(case):
    (q, k, v), options = case.tensors(), case.arguments()
    exact = s2o_attention_reference(q, k, v, case.config.as_exact(), **options)
    torch.testing.assert_close(exact.out, naive_attention(q, k, v, **options), **EXACT)
    ascending = [exact.visited]
    for tau in (1e-3, 0.2, 1.0, 1e6):
        heads = tuple(replace(head, tau=tau) for head in case.config.heads)
        ascending.append(s2o_attention_reference(q, k, v, replace(case.config, heads=heads), **options).visited)
    assert all((more <= less).all() for less, more in pairwise(ascending))


@examples(30)
@given(attention_cases(), st.sampled_from([1, 7, 33, 400]), st.sampled_from([16, 512]))
def test_dense_attention_and_windows_are_the_naive_attention(case, window, rows):
    """In float32, in blocks of some rows."""
    (q, k, v), options = case.tensors(torch.float32), case.arguments(torch.float32)
    starts = options["kv_start"]
    scoring = Scoring(options["scale"], options["softcap"], options["sinks"])
    expected = naive_attention(q, k, v, **options)
    with mock.patch.object(dense, "EXACT_ROWS", rows), mock.patch.object(compute, "ROWS", rows):
        for attention in (dense_attention, exact_attention):
            torch.testing.assert_close(attention(q, k, v, **options).double(), expected, rtol=1e-4, atol=1e-5)
        limited = window_attention(q, k, v, window, scoring, starts).double()
    torch.testing.assert_close(limited, naive_attention(q, k, v, window=window, **options), rtol=1e-4, atol=1e-5)
    never_stops = s2o_attention_reference(q.double(), k.double(), v.double(), case.config.as_exact(), **options)
    torch.testing.assert_close(log_sum_exp(q, k, **options), never_stops.lse.float(), rtol=1e-4, atol=1e-4)


def test_exact_attention_keeps_float64_and_raises_half_types():
    q, k, v = (torch.randn(1, 1, 8, 16, dtype=torch.float16) for _ in range(3))
    assert exact_attention(q, k, v).dtype == torch.float32
    out = exact_attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(out, naive_attention(q, k, v), rtol=1e-12, atol=1e-14)


def test_a_sink_is_as_exact_in_bfloat16_as_in_float32():
    """Its score is a sum of terms of the type of q: one term alone would be off by 2^-9 of the score."""
    q, k, v = (torch.randn(1, 2, 40, 32, dtype=torch.bfloat16) for _ in range(3))
    sinks = torch.tensor([20.3, -float("inf")])
    out = dense_attention(q * 0.1, k, v, scale=0.3, sinks=sinks)
    expected = naive_attention(q * 0.1, k, v, scale=0.3, sinks=sinks)
    off = (out.double() - expected).norm(dim=(2, 3)) / expected.norm(dim=(2, 3))
    assert float(off.max()) < 0.01  # rounding of weights and output; with a sink of 20.25, which is one term, 0.05


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
    q, k, v = (torch.randn(1, 1, n, 16, dtype=torch.float64) for n in (64, 2000, 2000))
    q, v = q * 0.2, v + 1.0
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
        moved = with_tail(before, after, ranking, begin, end, len(ranking.order))
        most = brought * (prefix - end) / chunk
        assert (moved.l - after.l <= most + 1e-12 * moved.l).all()
        share = (moved.l - after.l) / moved.l
        rest = v[ranking.order[end:]]
        farthest = (rest.norm(dim=-1).max() if len(rest) else 0.0) + after.output().norm(dim=-1)
        assert ((moved.output() - after.output()).norm(dim=-1) <= share * farthest * (1 + 1e-9) + 1e-12).all()
    assert torch.equal(moved.l, after.l)  # nothing is left


def test_the_first_rows_of_a_segment_see_their_neighbours(monkeypatch):
    """Of local attention, whose scores fall with the distance. Without a lookback those rows err most, which is why."""
    monkeypatch.setattr(config_module, "LOOKBACKS", (0, *LOOKBACKS))
    angle = torch.arange(1024, dtype=torch.float64)[:, None] * torch.logspace(-2, 0, 16, dtype=torch.float64)
    q = k = torch.cat([angle.cos(), angle.sin()], 1)[None, None]  # scores are sums over cosines of the distance
    v = torch.randn(1, 1, 1024, 16, dtype=torch.float64)
    truth, first_rows, others = naive_attention(q, k, v, scale=1.0), {}, {}
    for lookback in (0, *LOOKBACKS):
        config = LayerConfig.uniform(1, tau=1e6, segment=256, tile=TILE, lookback=lookback)
        off = (s2o_attention_reference(q, k, v, config, scale=1.0).out - truth).square().mean((0, 1, 3)).view(4, 256)
        first_rows[lookback], others[lookback] = float(off[1:, :8].mean()), float(off[1:, 8:].mean())
    assert first_rows[0] > 10 * others[0]
    for lookback in LOOKBACKS:
        assert first_rows[lookback] < 0.02 * first_rows[0]
        assert first_rows[lookback] < 2 * others[lookback]


def test_one_thread_is_the_first_to_call_each_function_of_mkl():
    mkl = "a?cos|a?sin|a?tan|tanh|erfc?|exp2?|expm1|log|log10|log1p|log2|sqrt"  # what torch's x86 wheels leave to it
    rooms = "s2o_runtime/call.py", "s2o_runtime/reference/*.py", "calibrate/curves/*.py", "calibrate/model/*.py"
    sources = [path.read_text(encoding="utf-8") for room in rooms for path in ROOT.glob(room)]
    used = {name for source in sources for name in re.findall(rf"(?<!math)\.({mkl})_?\(", source)}
    assert used | {"cos", "sin"} == set(reference.CALLED_ALONE_FIRST)
    single_numbers = [(torch.float32, 1), (torch.float64, 1)]  # no work for a second thread
    with mock.patch.multiple(torch, **dict.fromkeys(reference.CALLED_ALONE_FIRST, mock.DEFAULT)) as functions:
        importlib.reload(reference)
    for function in functions.values():
        assert [(call.args[0].dtype, call.args[0].numel()) for call in function.call_args_list] == single_numbers
