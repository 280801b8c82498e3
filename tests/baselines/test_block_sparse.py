"""The block-sparse kernel in the interpreter, against masked softmax in float64 over the same selection."""

import math

import pytest
import torch

from s2o_runtime.baselines import (
    PBS,
    Antidiagonal,
    AShape,
    FlashPrefill,
    Prism,
    SkipSoftmax,
    Sparge,
    VerticalSlash,
    attend,
    select,
)
from s2o_runtime.baselines.kernels.block_sparse import pool_blocks
from s2o_runtime.baselines.pooling import pool_plain
from s2o_runtime.baselines.run import baseline_attention
from s2o_runtime.baselines.selection import Selection
from s2o_runtime.devices import interpreted
from s2o_runtime.errors import InputError
from s2o_runtime.tiles import block_sparse_tile, skip_tile
from support.kernels import fuse_products
from support.marks import all_but_first
from support.naive import naive_attention

SLOW = pytest.mark.slow(reason="more cases of a kernel in Triton's interpreter, seconds each")
EXHAUSTIVE = pytest.mark.exhaustive(reason="still more of them: `make test` runs some")

pytestmark = pytest.mark.skipif(not interpreted(), reason="a GPU is here, so kernels are compiled: see tests/gpu")

SHAPES = [
    pytest.param(1, 4, 2, 300, 300, 64, id="H4-KV2-L300-D64"),
    pytest.param(2, 2, 1, 140, 331, 128, id="B2-q140-kv331-D128"),
    pytest.param(1, 1, 1, 5, 5, 64, id="L5"),
    pytest.param(1, 2, 2, 1, 200, 64, id="one-query"),
    pytest.param(1, 2, 1, 257, 257, 40, id="D40-is-padded"),
]
SETTINGS = [
    PBS(0.6, 64, 64, permute=False),
    Prism(0.6),
    PBS(0.6, 128, 64),
    PBS(0.6, 256, 128),
    PBS(0.6, 128, 64, permute_queries=True),
    PBS(0.6, 128, 64, permute=False, permute_queries=True),
    Sparge(0.5, 0.3),
    AShape(10, 20, 64),
    VerticalSlash(70, 4, 64, 64),
    Antidiagonal(0.6),
    FlashPrefill(0.6, 64, window=1, last=1),
]


def inputs(batch, heads, kv_heads, q_len, kv_len, head_dim, dtype=torch.float32):
    """Tensors as transformers hands them over: views of [B, L, H, D]."""
    q = (torch.randn(batch, q_len, heads, head_dim) * 2).to(dtype)
    k, v = (torch.randn(batch, kv_len, kv_heads, head_dim).to(dtype) for _ in range(2))
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def masked_softmax(q, k, v, selection, scale, skips=True):
    """(output, log-sum-exp) in float64 from one dense mask; heads that are not selected are NaN."""
    out = torch.full(q.shape, math.nan, dtype=torch.float64)
    lse = torch.full(q.shape[:3], math.nan, dtype=torch.float64)
    group, offset = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    causal = torch.arange(k.shape[2]) <= torch.arange(q.shape[2])[:, None] + offset
    for b in range(q.shape[0]):
        for n, head in enumerate(selection.heads):
            mask = torch.zeros(q.shape[2], k.shape[2], dtype=torch.bool)
            for i in range(selection.counts.shape[2]):
                rows = torch.arange(i * selection.block_m, min((i + 1) * selection.block_m, q.shape[2]))
                if selection.row_order is not None:
                    rows = selection.row_order[b, n, rows].long()
                for block in selection.blocks[b, n, i, : selection.counts[b, n, i]].tolist():
                    keys = torch.arange(block * selection.block_n, min((block + 1) * selection.block_n, k.shape[2]))
                    if selection.key_order is not None:
                        keys = selection.key_order[b, selection.slots[n], keys].long()
                    mask[rows[:, None], keys] = True
                if selection.columns is not None:
                    keys = selection.columns[b, n, i, : selection.column_counts[b, n, i]].long()
                    assert not mask[rows[:, None], keys].any()  # no key is computed twice
                    mask[rows[:, None], keys] = True
            scores = q[b, head].double() @ k[b, head // group].double().T * scale
            scores.masked_fill_(~(mask & causal), -math.inf)
            weights = scores.softmax(-1)
            skip = selection.skip
            if skips and skip is not None:
                dropped = torch.zeros_like(mask)
                best = torch.full((len(scores),), -math.inf).double()
                for begin in range(0, k.shape[2], skip.keys):
                    tile = slice(begin, begin + skip.keys)
                    local = scores[:, tile].amax(1)
                    best = torch.maximum(best, local)
                    for first in range(0, len(scores), skip.rows):
                        rows = slice(first, first + skip.rows)
                        dropped[rows, tile] = not ((local - best)[rows] >= skip.limit).any()
                if skip.sum_too:
                    scores = scores.masked_fill(dropped, -math.inf)
                    weights = scores.softmax(-1)
                weights = weights.masked_fill(dropped, 0.0)
            out[b, head] = weights @ v[b, head // group].double()
            lse[b, head] = scores.logsumexp(-1)
    return out, lse


def run(q, k, v, selection, scale, left_out=None):
    out = torch.full_like(q, math.nan)
    lse = torch.full(q.shape[:3], math.nan)
    given = {"scale": scale, "out": out, "lse": lse, "left_out": left_out}
    assert attend(q, k, v, selection, **given, backend="triton") is out
    return out, lse


@pytest.mark.parametrize("settings", all_but_first(SETTINGS, SLOW, count=3), ids=str)
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim"), all_but_first(SHAPES, EXHAUSTIVE)
)
def test_the_kernel_computes_what_is_selected(
    batch, heads, kv_heads, q_len, kv_len, head_dim, settings, nan_filled
):  # fmt: skip
    q, k, v = inputs(batch, heads, kv_heads, q_len, kv_len, head_dim)
    selection = select(q, k, settings, scale=0.2)
    ours, expected = run(q, k, v, selection, 0.2), masked_softmax(q, k, v, selection, 0.2)
    torch.testing.assert_close(ours[0].double(), expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[1].double(), expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "settings",
    all_but_first(
        [
            PBS(1.0, permute_queries=True),
            Prism(1.0),
            FlashPrefill(0.0, first=0, window=0, last=0),
            SkipSoftmax(0.0),
            PBS(1.0),
            VerticalSlash(400, 3),
        ],
        SLOW,
    ),
    ids=str,
)
def test_everything_kept_is_dense(settings, nan_filled):
    """Whatever is permuted: the result is in the order of the queries, over all keys."""
    q, k, v = inputs(1, 2, 1, 390, 400, 64)
    out, stats = baseline_attention(q, k, v, settings, backend="triton")
    torch.testing.assert_close(out.double(), naive_attention(q, k, v), rtol=1e-4, atol=1e-5)
    assert stats.density.tolist() == [1.0, 1.0]
    assert (stats.backend, stats.reason) == ("triton", "asked for")


@pytest.mark.parametrize("settings", [PBS(0.6, 128, 64), VerticalSlash(70, 4)], ids=str)
def test_fp16(settings, nan_filled):
    q, k, v = inputs(1, 2, 1, 300, 300, 64, torch.float16)
    selection = select(q, k, settings)
    out, _ = run(q, k, v, selection, 0.125)
    assert out.dtype == torch.float16
    # weights and output are each rounded to 11 bits, relative to values of |v| <= 4
    expected, _ = masked_softmax(q, k, v, selection, 0.125)
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=4 * 2**-10)


@pytest.mark.parametrize("skip", [-1.0, -3.0])
def test_the_skip_leaves_out_the_product_and_keeps_the_sum(skip, nan_filled):
    q, k, v = inputs(1, 2, 1, 300, 460, 64)
    k[:, :, 130:190] *= 2.0  # a block that the ones behind it are far below
    selection = select(q, k, Sparge(0.8, 0.0, skip), scale=0.3)
    ours, expected = run(q, k, v, selection, 0.3), masked_softmax(q, k, v, selection, 0.3)
    torch.testing.assert_close(ours[0].double(), expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[1].double(), expected[1], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(expected[0], masked_softmax(q, k, v, selection, 0.3, skips=False)[0], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "block"),
    all_but_first([
        pytest.param(1, 2, 1, 300, 460, 64, 128, id="q300-kv460-rows128"),
        pytest.param(2, 2, 2, 200, 200, 128, 64, id="B2-L200-D128-rows64"),
        pytest.param(1, 1, 1, 1, 333, 64, 128, id="one-query"),
        pytest.param(1, 2, 1, 257, 257, 40, 64, id="D40-is-padded"),
    ], SLOW),
)  # fmt: skip
@pytest.mark.parametrize("factor", [30.0, 1e6])
def test_skip_softmax_drops_tiles_from_the_sum_too(
    batch, heads, kv_heads, q_len, kv_len, head_dim, block, factor, dtype, nan_filled
):  # fmt: skip
    """The output, the log-sum-exp of what joined, and how many pairs did not, beside plain torch's count."""
    q, k, v = inputs(batch, heads, kv_heads, q_len, kv_len, head_dim)
    q, k[:, :, :30] = q + 1.0, k[:, :, :30] + 1.0  # the first tile is far above the others
    q, k, v = (t.to(dtype) for t in (q, k, v))
    scale = head_dim**-0.5
    selection = select(q, k, SkipSoftmax(factor, block))
    left_out, expected_left_out = (torch.full((heads,), math.nan, dtype=torch.float64) for _ in range(2))
    ours, expected = run(q, k, v, selection, scale, left_out), masked_softmax(q, k, v, selection, scale)
    # weights and output of 11 bits in fp16, as in `test_fp16`
    tolerances = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-3, "atol": 4 * 2**-10}
    torch.testing.assert_close(ours[0].double(), expected[0], **tolerances)
    torch.testing.assert_close(ours[1].double(), expected[1], rtol=1e-4, atol=1e-4)
    attend(q, k, v, selection, scale=scale, left_out=expected_left_out, backend="reference")
    assert left_out.tolist() == expected_left_out.tolist()
    assert float(left_out.sum()) > 0
    assert not torch.equal(expected[0], masked_softmax(q, k, v, selection, scale, skips=False)[0])


@pytest.mark.parametrize("factor", [1e6, 1e9])
@pytest.mark.parametrize(
    ("q_len", "kv_len", "block"),
    [pytest.param(1, 333, 64, id="one-query"), pytest.param(129, 129, 128, id="a-tile-of-one-row")],
)
def test_a_tile_with_a_new_maximum_is_kept_whatever_a_compiler_fuses(
    q_len, kv_len, block, factor, nan_filled, monkeypatch
):
    """From a factor of the context's length on, tiles without a new maximum are left out, the first one never."""
    q, k, v = inputs(1, 4, 2, q_len, kv_len, 64)
    scale = 0.3
    selection = select(q, k, SkipSoftmax(factor, block))
    fuse_products(monkeypatch)
    counts = [torch.full((4,), math.nan, dtype=torch.float64) for _ in range(2)]
    ours, expected = run(q, k, v, selection, scale, counts[0]), masked_softmax(q, k, v, selection, scale)
    torch.testing.assert_close(ours[0].double(), expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[1].double(), expected[1], rtol=1e-4, atol=1e-4)
    attend(q, k, v, selection, scale=scale, left_out=counts[1], backend="reference")
    assert counts[0].tolist() == counts[1].tolist()
    if q_len == 1:
        assert float(counts[0].sum()) > 0  # some tiles have no new maximum


def test_what_is_left_out_counts_as_half(nan_filled):
    """Both backends say so in the statistics, and in the visits that `density` is made of."""
    q, k, v = inputs(1, 2, 1, 300, 460, 64)
    k[:, :, :64] *= 4.0
    densities = [
        baseline_attention(q, k, v, SkipSoftmax(1e6, 64), scale=0.3, backend=backend)[1].density
        for backend in ("triton", "reference")
    ]
    assert torch.equal(*densities)
    assert ((densities[0] > 0.5) & (densities[0] < 0.99)).all()


def test_heads_that_are_not_selected_are_left_alone(nan_filled):
    q, k, v = inputs(1, 6, 3, 200, 200, 64)
    selection = select(q, k, PBS(0.6, 128, 64), heads=(5, 2))
    out, lse = run(q, k, v, selection, 0.125)
    expected, _ = masked_softmax(q, k, v, selection, 0.125)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert lse[:, [0, 1, 3, 4]].isnan().all()


def test_other_heads_of_a_padded_head_dim_are_left_alone(nan_filled):
    q, k, v = inputs(1, 3, 1, 100, 100, 40)
    selection = select(q, k, AShape(10, 20, 64), heads=(1,))
    out, _ = run(q, k, v, selection, 0.2)
    expected, _ = masked_softmax(q, k, v, selection, 0.2)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("length", "head_dim", "block"), [(200, 64, 64), (130, 40, 128), (5, 128, 64)])
def test_pooling_is_that_of_torch(length, head_dim, block, nan_filled):
    x, _, _ = inputs(2, 3, 1, length, length, head_dim)
    expected = pool_plain(x, block)
    mean, similarity = pool_blocks(x, block)
    torch.testing.assert_close(mean, expected.mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(similarity, expected.similarity, rtol=1e-5, atol=1e-6)


def test_every_block_has_a_tile():
    for capability in [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]:
        for head_dim in (64, 128):
            for block_m in (64, 128, 256):
                for block_n in (64, 128, 256):
                    tile = block_sparse_tile(head_dim, capability, block_m, block_n)
                    assert block_m % tile.block_m == 0
                    assert block_n % tile.block_n == 0
            for rows in (64, 128):
                assert skip_tile(head_dim, capability, rows, 64)[:2] == (rows, 64)
    with pytest.raises(InputError, match="head_dim 128 on sm_75 has no block-sparse tile: run it with the reference"):
        block_sparse_tile(128, (7, 5), 64, 64)
    with pytest.raises(InputError, match="blocks of 32 x 64 have no block-sparse tile: use multiples of 64"):
        block_sparse_tile(128, (9, 0), 32, 64)
    with pytest.raises(InputError, match="sm_80 has no tile of 128 x 128 for a skip: use 128 x 64 or 64 x 64"):
        skip_tile(128, (8, 0), 128, 128)


def test_large_head_dims_are_refused():
    q, k, v = inputs(1, 1, 1, 20, 20, 192)
    with pytest.raises(InputError, match=r'head_dim 192 is not supported by the block-sparse kernel .*"reference"'):
        baseline_attention(q, k, v, PBS(), backend="triton")
    assert isinstance(select(q, k, PBS()), Selection)
