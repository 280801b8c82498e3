"""NaN and inf: a row that is NaN in dense attention because of its query or a key is NaN in S2O, on every path.

S2O may give NaN in more rows of the same heads, where a ranking or an estimate meets such a number, but not in padding.
A value that is not finite makes those rows NaN that visit or estimate its key; a head without a tail does not see it in
a key that it skips.
"""

import math

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from s2o_runtime.attention.api import s2o_attention, s2o_attention_varlen
from s2o_runtime.attention.compute import window_attention
from s2o_runtime.call import Scoring
from s2o_runtime.config import HeadConfig, LayerConfig
from s2o_runtime.kernels import prefill as prefill_module
from s2o_runtime.reference.dense import dense_attention, exact_attention
from support.kernels import DEVICE, DTYPE, HOPPER, ON_GPU, PLAIN
from support.layouts import edges_of
from support.marks import SLOW_KERNELS, all_but_first, pairwise

SCALE = 8 if ON_GPU else 1
LENGTH, SEGMENT, HEAD_DIM, PADDING = 250 * SCALE, 64 * SCALE, 64, 170 * SCALE
STOPS_AT_ONCE = 1e6
HEADS = (
    HeadConfig(STOPS_AT_ONCE, SEGMENT, representatives=16),
    HeadConfig(STOPS_AT_ONCE, SEGMENT, tail="mean"),
    HeadConfig(mode="dense"),
)
BAD = [math.nan, math.inf, -math.inf]
POSITIONS = [40 * SCALE, 90 * SCALE, LENGTH - 1]  # in the first segment, in the prefix of later ones, last
TILES = [PLAIN, HOPPER] if ON_GPU else [PLAIN]
PATHS = ["dense", "exact", "window", "soft-capped window", "reference", "kernels", "splits"]


def inputs(where="q", bad=0.0, position=0, on_host=False):
    """q, k, v and `kv_start` of two sequences, the second one padded, of which the first has one bad number."""
    generator = torch.Generator().manual_seed(position)
    sizes = (len(HEADS), 1, 1)
    q, k, v = (torch.randn(2, count, LENGTH, HEAD_DIM, generator=generator) for count in sizes)
    if not on_host:
        q, k, v = (tensor.to(DEVICE, DTYPE) for tensor in (q, k, v))
    {"q": q, "k": k, "v": v}[where][0, 0, position, 3] = bad
    return q, k, v, torch.tensor([0, PADDING], device=q.device)


def nan_rows(q, k, v, start, window):
    """Return which rows of dense attention are NaN, bool [B, Hq, L]: a softmax over visible keys alone."""
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=q.device).tril().triu(1 - window)
    seen = seen & (torch.arange(LENGTH, device=q.device) >= start[:, None, None])[:, None]
    scores = (q.double() @ k.double().mT).masked_fill(~seen, -math.inf)
    bad_scores = scores.isnan() & seen | (scores == math.inf)
    bad_values = v.isfinite().all(-1, keepdim=True).mT.logical_not() & seen
    return (bad_scores | bad_values).any(-1)


def drop_nan(monkeypatch):
    """Make maxima and minima drop NaN, as on a GPU; in the interpreter those of two tensors do not."""
    for name, function in (("maxnumf", np.fmax), ("minnumf", np.fmin)):
        binary = lambda self, lhs, rhs, function=function: self.binary_op(lhs, rhs, function)  # noqa: E731
        monkeypatch.setattr(InterpreterBuilder, f"create_{name}", binary)


@pytest.mark.parametrize(
    ("path", "where", "bad", "position", "tile"),
    pairwise(PATHS[:5], ["q", "k", "v"], BAD, POSITIONS, [PLAIN])
    + all_but_first(pairwise(PATHS[5:], ["k", "q", "v"], BAD, POSITIONS[1:], TILES), SLOW_KERNELS),
)
def test_where_dense_attention_is_nan_s2o_is(path, where, bad, position, tile, monkeypatch):
    q, k, v, start = inputs(where, bad, position, on_host=path in PATHS[:5])
    window, softcap, lse = LENGTH, None, None
    if "window" in path:
        window, softcap = 100, 20.0 if path.startswith("soft") else None
        out = window_attention(q, k, v, window, Scoring(softcap=softcap), start)
    elif path in ("dense", "exact"):
        out = {"dense": dense_attention, "exact": exact_attention}[path](q, k, v, kv_start=start)
    else:
        if not ON_GPU:
            drop_nan(monkeypatch)
        if path == "splits":
            monkeypatch.setattr(prefill_module, "count_key_splits", lambda *_: 3)
        config = LayerConfig(HEADS, tile)
        backend = "reference" if path == "reference" else "triton"
        out, lse, _ = s2o_attention(q, k, v, config, kv_start=start, backend=backend, return_lse=True)
    expected = nan_rows(q, k, v, start, window) & (softcap is None or not math.isinf(bad))
    if lse is not None and where != "v":
        assert not bool(lse[expected].isfinite().any())
    if lse is not None and where == "v":  # a head without a tail that skips the key does not see its value
        in_window = torch.arange(LENGTH, device=q.device) // SEGMENT == position // SEGMENT
        expected[:, 0] &= in_window
    not_finite = ~out.isfinite().all(-1)
    assert bool(not_finite[expected].all())
    assert not bool(not_finite[1].any())
    assert bool((out[1, :, :PADDING] == 0).all())


@pytest.mark.parametrize(
    ("backend", "bad"),
    [("reference", math.nan), ("dense", 6e4), pytest.param("triton", math.nan, marks=SLOW_KERNELS), ("triton", 6e4)],
)
def test_what_lies_in_padding_or_in_a_neighbour_reaches_no_other_row(backend, bad):
    config, pad = LayerConfig(HEADS, PLAIN), 40
    q, k, v = (tensor[:1] for tensor in inputs(on_host=backend != "triton")[:3])
    edges, longest = edges_of([pad, LENGTH - pad]).to(q.device), LENGTH - pad

    def rows(*tensors):
        padded = s2o_attention(*tensors, config, kv_start=torch.tensor([pad], device=q.device), backend=backend)
        packed = (tensor[0].transpose(0, 1).contiguous() for tensor in tensors)
        neighbour = s2o_attention_varlen(*packed, edges, edges, longest, longest, config, backend=backend)
        return padded[0, :, pad:].transpose(0, 1), neighbour[pad:]

    dirty = [tensor.clone() for tensor in (q, k, v)]
    for tensor in dirty:
        tensor[:, :, :pad] = bad
    for clean, other in zip(rows(q, k, v), rows(*dirty), strict=True):
        assert clean.isfinite().all()
        torch.testing.assert_close(other, clean, rtol=1e-5, atol=1e-5)
