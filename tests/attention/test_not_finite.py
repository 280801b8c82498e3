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
from s2o_runtime.config import HeadConfig, LayerConfig, TileConfig
from s2o_runtime.devices import is_interpreted
from s2o_runtime.kernels import prefill as prefill_module
from s2o_runtime.reference.dense import dense_attention, exact_attention
from support.marks import INTERPRETED, pairwise

LENGTH, SEGMENT, HEADS, HEAD_DIM, PADDING = 250, 64, 2, 64, 170
TILE = TileConfig(block_m=64, block_n=32, chunk=2, num_warps=4, num_stages=1)
STOPS_AT_ONCE = 1e6
OF_HEADS = {
    "plain": HeadConfig(STOPS_AT_ONCE, SEGMENT, representatives=16),
    "tail": HeadConfig(STOPS_AT_ONCE, SEGMENT, tail="mean"),
    "dense": HeadConfig(mode="dense"),
}
BAD = [math.nan, math.inf, -math.inf]
POSITIONS = [40, 90, 249]  # in the first segment, in the prefix of later ones, last
SLOW = pytest.mark.slow(reason="more numbers in Triton's interpreter, seconds each")


def inputs(where, bad, position, heads=HEADS):
    """q, k, v and `kv_start` of two sequences, the second one padded, of which the first has one bad number."""
    generator = torch.Generator().manual_seed(position)
    q, k, v = (torch.randn(2, count, LENGTH, HEAD_DIM, generator=generator) for count in (heads, 1, 1))
    {"q": q, "k": k, "v": v}[where][0, 0, position, 3] = bad
    return q, k, v, torch.tensor([0, PADDING])


def nan_rows(q, k, v, start, window=LENGTH):
    """Which rows of dense attention are NaN, bool [B, Hq, L]: a softmax over visible keys alone."""
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(1 - window)
    seen = seen & (torch.arange(LENGTH) >= start[:, None, None])[:, None]
    scores = (q.double() @ k.double().mT).masked_fill(~seen, -math.inf)
    bad_scores = scores.isnan() & seen | (scores == math.inf)
    bad_values = v.isfinite().all(-1, keepdim=True).mT.logical_not() & seen
    return (bad_scores | bad_values).any(-1)


def check(out, expected, start):
    """NaN wherever it is expected, and numbers in sequences and heads without such a number; zero in padding."""
    found = ~out.isfinite().all(-1)
    assert bool(found[expected].all())
    assert not bool(found[1].any())
    assert bool((out[1, :, : int(start[1])] == 0).all())


@pytest.mark.parametrize(
    ("path", "where", "bad", "position"),
    pairwise(["reference", "dense", "exact", "window", "soft-capped window"], ["q", "k", "v"], BAD, POSITIONS),
)
def test_in_plain_torch(path, where, bad, position):
    q, k, v, start = inputs(where, bad, position)
    if path == "reference":
        for head in OF_HEADS.values():
            config = LayerConfig((head,) * HEADS, TILE)
            out = s2o_attention(q, k, v, config, kv_start=start, backend="reference")
            check(out, seen_by([head] * HEADS, nan_rows(q, k, v, start), where, position), start)
        return
    window, softcap = (100, 20.0 if path.startswith("soft") else None) if "window" in path else (LENGTH, None)
    if window < LENGTH:
        out = window_attention(q, k, v, window, Scoring(softcap=softcap), start)
    else:
        out = {"dense": dense_attention, "exact": exact_attention}[path](q, k, v, kv_start=start)
    check(out, nan_rows(q, k, v, start, window) & (softcap is None or not math.isinf(bad)), start)


@pytest.mark.parametrize("bad", [math.nan, 6e4])
@pytest.mark.parametrize(("backend", "head"), [*pairwise(["reference", "triton"], list(OF_HEADS)), ("dense", "plain")])
def test_what_lies_in_padding_or_in_a_neighbour_reaches_no_other_row(backend, head, bad):
    if backend == "triton" and not is_interpreted():
        pytest.skip("a GPU is here, so kernels are compiled")
    config, pad = LayerConfig((OF_HEADS[head],) * HEADS, TILE), 40
    q, k, v = (torch.randn(1, heads, LENGTH, HEAD_DIM) for heads in (HEADS, 1, 1))
    edges, longest = torch.tensor([0, pad, LENGTH], dtype=torch.int32), LENGTH - pad

    def rows(*tensors):
        padded = s2o_attention(*tensors, config, kv_start=torch.tensor([pad]), backend=backend)
        packed = (tensor[0].transpose(0, 1).contiguous() for tensor in tensors)
        neighbour = s2o_attention_varlen(*packed, edges, edges, longest, longest, config, backend=backend)
        return padded[0, :, pad:].transpose(0, 1), neighbour[pad:]

    dirty = [tensor.clone() for tensor in (q, k, v)]
    for tensor in dirty:
        tensor[:, :, :pad] = bad
    for clean, other in zip(rows(q, k, v), rows(*dirty), strict=True):
        assert clean.isfinite().all()
        torch.testing.assert_close(other, clean, rtol=1e-5, atol=1e-5)


def seen_by(heads, expected, where, position):
    """Rows that must be NaN: of a value that a head without a tail skips, only those whose window has its key."""
    if where != "v":
        return expected
    skip = torch.tensor([head.mode == "s2o" and head.tail == "none" for head in heads])
    in_window = torch.arange(LENGTH) // SEGMENT == position // SEGMENT
    return expected & (in_window | ~skip[:, None])


@pytest.fixture
def drop_nan(monkeypatch):
    """Maxima and minima drop NaN, as on a GPU; in Triton's interpreter those of two tensors do not."""
    for name, function in (("maxnumf", np.fmax), ("minnumf", np.fmin)):
        binary = lambda self, lhs, rhs, function=function: self.binary_op(lhs, rhs, function)  # noqa: E731
        monkeypatch.setattr(InterpreterBuilder, f"create_{name}", binary)


@INTERPRETED
@pytest.mark.usefixtures("drop_nan")
@pytest.mark.parametrize(
    ("bad", "path", "where"), pairwise(BAD, ["kernels", "splits", "int8"], ["q", "k", "v"], mark=SLOW, count=1)
)
def test_in_kernels(path, where, bad, monkeypatch):
    position = POSITIONS[1]
    heads = list(OF_HEADS.values())
    q, k, v, start = inputs(where, bad, position, len(heads))
    config = LayerConfig(tuple(heads), TILE, scores="int8" if path == "int8" else "input")
    if path == "splits":
        monkeypatch.setattr(prefill_module, "count_key_splits", lambda *_: 3)
    out, lse, _ = s2o_attention(q, k, v, config, kv_start=start, backend="triton", return_lse=True)
    expected = seen_by(heads, nan_rows(q, k, v, start), where, position)
    check(out, expected, start)
    if where != "v":
        assert not bool(lse[expected].isfinite().any())
