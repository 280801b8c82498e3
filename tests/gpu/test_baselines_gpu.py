"""The baselines on a GPU in bf16 and fp16: the kernel against plain torch with the same selection."""

import pytest
import torch

from s2o_runtime.attention.api import s2o_attention
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
    baseline_attention,
    select,
)
from s2o_runtime.baselines.flash_prefill import head_mass, log_mass
from s2o_runtime.baselines.pooling import block_means, pool, pool_plain
from s2o_runtime.baselines.selection import Grid
from s2o_runtime.baselines.xattention import block_weights, head_weights
from s2o_runtime.config import HeadConfig, LayerConfig, TileConfig
from s2o_runtime.reference.dense import dense_attention, exact_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

MIXED = (
    HeadConfig(2.0, 256, tail=True, representatives=32),
    HeadConfig(mode="baseline", baseline=PBS(0.6)),
    HeadConfig(mode="dense"),
    HeadConfig(mode="baseline", baseline=Sparge(0.6, 0.5)),
)
TILES = {"specialised": TileConfig(64, 128, 4, 4, 2, True), "plain": TileConfig(64, 64, 4, 4, 2)}
SHAPES = [
    pytest.param(1, 4, 2, 1000, 1000, 128, id="H4-L1000-D128"),
    pytest.param(1, 2, 2, 2049, 2049, 64, id="H2-L2049-D64"),
    pytest.param(1, 8, 1, 7, 7, 128, id="L7"),
    pytest.param(1, 2, 1, 1, 1500, 128, id="one-query"),
    pytest.param(2, 4, 2, 700, 1999, 128, id="B2-q700-kv1999"),
    pytest.param(1, 3, 1, 900, 900, 96, id="D96-is-padded"),
]
SETTINGS = [
    FlashPrefill(0.5, window=1, last=1),
    FlashPrefill(0.5, 64, window=1, last=1),
    Prism(0.6),
    Prism(0.6, block=64),
    PBS(0.6, permute=False),
    PBS(0.6),
    PBS(0.6, 512, 64),
    PBS(0.6, permute_queries=True),
    Sparge(0.6, 0.5),
    AShape(100, 300),
    VerticalSlash(150, 30),
    Antidiagonal(0.6),
    Antidiagonal(0.6, 8, 64),
]
LONG = 8192


def inputs(batch, heads, kv_heads, q_len, kv_len, head_dim, dtype=torch.bfloat16):
    """Clustered keys and drifting queries, as transformers hands them over: views of [B, L, H, D]."""
    generator = torch.Generator("cuda").manual_seed(q_len + kv_len + heads)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    topics = normal(16, head_dim)
    k = (
        normal(batch, kv_len, kv_heads, head_dim) * 0.6
        + topics[torch.arange(kv_len, device="cuda") // 96 % 16][:, None]
    )
    drift = topics[torch.arange(q_len, device="cuda") // 256 % 16][:, None] * 0.8
    q = normal(batch, q_len, heads, head_dim) * 0.6 + drift
    v = normal(batch, kv_len, kv_heads, head_dim)
    return (t.to(dtype).transpose(1, 2) for t in (q, k, v))


def relative_error(out, truth):
    return float((out.float() - truth.float()).norm() / truth.float().norm().clamp_min(1e-6))


def both(q, k, v, selection):
    """(output, log-sum-exp) of the kernel, and of plain torch in float32."""
    made = []
    for backend, dtype in (("triton", q.dtype), ("reference", torch.float32)):
        tensors = tuple(t.to(dtype) for t in (q, k, v))
        lse = torch.full(q.shape[:3], torch.nan, device="cuda")
        made.append((attend(*tensors, selection, lse=lse, backend=backend), lse))
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim"), SHAPES)
def test_the_kernel_is_plain_torch(
    batch, heads, kv_heads, q_len, kv_len, head_dim, settings, dtype, nan_filled
):  # fmt: skip
    q, k, v = inputs(batch, heads, kv_heads, q_len, kv_len, head_dim, dtype)
    selection = select(q, k, settings)
    (out, lse), (truth, truth_lse) = both(q, k, v, selection)
    assert not out.isnan().any()
    assert relative_error(out, truth) <= 6e-3  # weights and output, each within 2^-8
    torch.testing.assert_close(lse, truth_lse, rtol=0, atol=2e-3)


@pytest.mark.parametrize("skip", [-2.0, -6.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_skip_is_plain_torchs(head_dim, skip, nan_filled):
    """Scores on the edge of the skip may fall either way, so the outputs agree closely, not to rounding."""
    q, k, v = inputs(1, 4, 2, 1500, 1500, head_dim)
    q = q * 2
    selection = select(q, k, Sparge(0.8, 0.0, skip))
    (out, lse), (truth, truth_lse) = both(q, k, v, selection)
    assert relative_error(out, truth) <= 2e-2
    torch.testing.assert_close(lse, truth_lse, rtol=0, atol=2e-3)
    whole, _ = both(q, k, v, select(q, k, Sparge(0.8, 0.0)))[1]
    assert relative_error(truth, whole) > 0  # something was skipped


@pytest.mark.parametrize("factor", [30.0, 1e4])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize(("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim"), SHAPES)
def test_skip_softmax_is_plain_torchs(batch, heads, kv_heads, q_len, kv_len, head_dim, block, factor, nan_filled):
    """Tiles on the edge may fall either way: the outputs agree closely, and nearly as many tiles are left out."""
    q, k, v = inputs(batch, heads, kv_heads, q_len, kv_len, head_dim)
    q = q * 2
    selection = select(q, k, SkipSoftmax(factor, block))
    results, counts = [], []
    for backend, dtype in (("triton", q.dtype), ("reference", torch.float32)):
        left_out = torch.full((heads,), torch.nan, dtype=torch.float64, device="cuda")
        tensors = tuple(t.to(dtype) for t in (q, k, v))
        results.append(attend(*tensors, selection, left_out=left_out, backend=backend))
        counts.append(left_out)
    assert relative_error(*results) <= 2e-2
    pairs = selection.tally.causal
    assert float((counts[0] - counts[1]).abs().max()) <= 0.01 * pairs
    if factor == 1e4 and kv_len > 1000 and q_len > 500:
        assert float(counts[0].sum()) > 0  # something was skipped


@pytest.mark.parametrize(
    "settings",
    [
        FlashPrefill(0.0),
        Prism(1.0),
        PBS(1.0),
        PBS(1.0, permute_queries=True),
        Sparge(1.0),
        VerticalSlash(1 << 14, 0),
        SkipSoftmax(0.0),
        SkipSoftmax(0.0, 64),
    ],
    ids=str,
)
def test_everything_kept_is_dense(settings, nan_filled):
    q, k, v = inputs(1, 4, 2, 3001, 3333, 128)
    truth = exact_attention(q, k, v)
    out, stats = baseline_attention(q, k, v, settings, backend="triton")
    # one rounding of weights and one of the output: no worse than twice what SDPA makes of the same inputs
    assert relative_error(out, truth) <= 2 * relative_error(dense_attention(q, k, v), truth) + 1e-3
    torch.testing.assert_close(stats.density, torch.ones_like(stats.density), rtol=0, atol=1e-12)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "settings",
    [
        FlashPrefill(),
        Prism(),
        PBS(),
        Sparge(),
        Sparge(skip=-8.0),
        AShape(),
        VerticalSlash(),
        Antidiagonal(),
        SkipSoftmax(),
        SkipSoftmax(block=64),
    ],
    ids=str,
)
def test_every_method_at_8k(settings, head_dim, nan_filled):
    q, k, v = inputs(1, 8, 2, LONG, LONG, head_dim)
    out, stats = baseline_attention(q, k, v, settings)
    assert (stats.backend, stats.reason) == ("triton", "the kernel supports this call")
    selection = select(q, k, settings)
    truth, left_out = torch.empty_like(q), torch.zeros(8, dtype=torch.float64, device="cuda")
    attend(q, k, v, selection, out=truth, left_out=left_out, backend="reference")
    assert relative_error(out, truth) <= (2e-2 if selection.skip else 8e-3)
    tally = selection.tally._replace(left_out=left_out)
    # tiles on the edge of a skip may fall either way
    tolerance = 2e-3 if selection.skip else 0.0
    torch.testing.assert_close(stats.density, tally.computed / tally.causal, rtol=0, atol=tolerance)
    assert ((stats.density > 0) & (stats.density <= 1)).all()
    assert relative_error(out, exact_attention(q, k, v)) < 1.0


def test_heads_of_several_methods_fill_one_output(nan_filled):
    q, k, v = inputs(1, 6, 2, 1111, 1111, 128)
    each = [PBS(0.7), AShape(128, 512), Sparge(0.7), PBS(0.7)]
    heads = [5, 1, 0, 3]
    out, _ = baseline_attention(q, k, v, each, heads=heads, out=torch.full_like(q, torch.nan))
    assert out[:, [2, 4]].isnan().all()
    assert not out[:, heads].isnan().any()
    for settings in set(each):
        members = [head for head, own in zip(heads, each, strict=True) if own == settings]
        alone, _ = baseline_attention(q, k, v, settings, heads=members)
        torch.testing.assert_close(out[:, members], alone[:, members], rtol=0, atol=0)


def test_left_padding(nan_filled):
    q, k, v = inputs(3, 4, 2, 900, 900, 64)
    starts = torch.tensor([0, 333, 899], device="cuda")
    out, _ = baseline_attention(q, k, v, Prism(1.0), kv_start=starts)
    truth = exact_attention(q, k, v, kv_start=starts)
    assert relative_error(out, truth) <= 6e-3
    assert torch.equal(out.abs().sum(-1) == 0, truth.abs().sum(-1) == 0)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_pooling_is_that_of_torch(head_dim, block, nan_filled):
    x, _, _ = inputs(2, 3, 1, 1000, 1000, head_dim)
    ours, expected = pool(x, block), pool_plain(x, block)
    torch.testing.assert_close(ours.mean, expected.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.similarity, expected.similarity, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize(("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim"), [
    *SHAPES,
    pytest.param(1, 2, 1, 5000, 8191, 128, id="q5000-kv8191"),
])  # fmt: skip
def test_block_weights_are_those_of_torch(
    batch, heads, kv_heads, q_len, kv_len, head_dim, block, dtype, nan_filled
):  # fmt: skip
    """Products of 16-bit numbers are exact in float32; at most 128 are added: within 1e-3 of a score of at most 50."""
    q, k = list(inputs(batch, heads, kv_heads, q_len, kv_len, head_dim, dtype))[:2]
    chosen = list(range(heads))[::-1]
    slots = [h * kv_heads // heads for h in chosen]
    k_mean, grid = block_means(k, block).to(dtype), Grid.plain(q, k, block, block)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("s2o_runtime.baselines.flash_prefill.head_mass", None)  # plain torch cannot step in
        ours = log_mass(q, k_mean, chosen, slots, grid, head_dim**-0.5)
    for i, (head, slot) in enumerate(zip(chosen, slots, strict=True)):
        expected = head_mass(q[:, head].double(), k_mean[:, slot].double(), grid, head_dim**-0.5)
        torch.testing.assert_close(ours[:, i].double(), expected, rtol=0, atol=1e-3)


def test_block_weights_of_a_million_tokens():
    """Behind 2^31 elements, the last of 17 heads: offsets need 64 bits."""
    length, heads = 1 << 20, 17
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(1, length, heads, 128, generator=generator, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    k_mean = torch.randn(1, 1, length // 128, 128, generator=generator, device="cuda", dtype=torch.bfloat16)
    ours = log_mass(q, k_mean, (heads - 1,), (0,), Grid(length, length, 128, 128, 128, 128), 128**-0.5)
    last = Grid(256, length, 128, 128, 128, 128)  # the last queries see all keys
    expected = head_mass(q[:, -1, -256:].double(), k_mean[:, 0].double(), last, 128**-0.5)
    torch.testing.assert_close(ours[:, 0, -2:].double(), expected, rtol=0, atol=1e-3)


def antidiagonals(q, k, heads, stride, block):
    """(grid, weights by the kernels)"""
    grid = Grid.plain(q, k, block, block)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("s2o_runtime.baselines.xattention.block_weights", None)  # plain torch cannot step in
        return grid, head_weights(q, k, heads, grid, stride, q.shape[3] ** -0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("stride", "block"), [(4, 256), (8, 64), (16, 128), (32, 128), (32, 64), (64, 64)])
@pytest.mark.parametrize(("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim"), [
    *SHAPES,
    pytest.param(1, 2, 1, 5000, 8191, 128, id="q5000-kv8191"),
])  # fmt: skip
def test_antidiagonal_weights_are_those_of_torch(
    batch, heads, kv_heads, q_len, kv_len, head_dim, stride, block, dtype, nan_filled
):  # fmt: skip
    """Products of bf16 and fp16 are exact in float32 and added 16 at a time: at most 512 additions (stride 64, D 128).

    Tensor cores cut each off at 2^-23 of a sum, at most 10 here: 6e-4 in a score, so in a weight and in its row's sum.
    """
    q, k = list(inputs(batch, heads, kv_heads, q_len, kv_len, head_dim, dtype))[:2]
    chosen = list(range(heads))[::-1]
    grid, ours = antidiagonals(q, k, chosen, stride, block)
    for i, h in enumerate(chosen):
        of_head = q[:, h].double(), k[:, h * kv_heads // heads].double()
        expected = block_weights(*of_head, grid, stride, head_dim**-0.5)
        torch.testing.assert_close(ours[:, i].double(), expected, rtol=1.2e-3, atol=1e-7)


def test_slices_of_antidiagonal_weights(nan_filled, monkeypatch):
    q, k, _ = inputs(1, 3, 1, 5000, 5555, 128)
    _, whole = antidiagonals(q, k, (0, 1, 2), 16, 128)
    monkeypatch.setattr("s2o_runtime.baselines.kernels.antidiagonal.WORKSPACE_BYTES", 1)
    _, sliced = antidiagonals(q, k, (0, 1, 2), 16, 128)
    assert torch.equal(whole, sliced)


def test_antidiagonal_weights_of_a_million_tokens():
    """Behind 2^31 elements, the last of 17 heads: offsets need 64 bits, and rows come in slices."""
    length, heads = 1 << 20, 17
    generator = torch.Generator("cuda").manual_seed(0)
    q, k = (
        torch.randn(1, length, heads, 128, generator=generator, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for _ in range(2)
    )
    _, ours = antidiagonals(q, k, (heads - 1,), 16, 128)
    torch.testing.assert_close(ours.sum(-1), torch.ones_like(ours[..., 0]), rtol=0, atol=1e-4)
    q, k = q[:, -1, -256:].double(), k[:, -1].double()  # the last queries see all keys
    grid = Grid(256, length, 128, 128, 128, 128)
    expected = block_weights(q, k, grid, 16, 128**-0.5)
    torch.testing.assert_close(ours[:, 0, -2:].double(), expected, rtol=1.2e-3, atol=1e-9)


def test_memory_at_128k():
    """Selecting takes less than a GiB besides what it returns and what permuting copies."""
    q, k, _ = inputs(1, 32, 8, 131072, 131072, 128)
    for settings in (FlashPrefill(), Prism(), PBS(), Sparge(), VerticalSlash(), Antidiagonal(), SkipSoftmax()):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        selection = select(q, k, settings)
        torch.cuda.synchronize()
        kept = sum(
            t.untyped_storage().nbytes()
            for t in (selection.blocks, selection.counts, selection.columns, selection.keys, selection.key_order)
            if t is not None and t.data_ptr() != k.data_ptr()
        )
        assert torch.cuda.max_memory_allocated() - before - kept <= 1 << 30, settings
        del selection


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("start", [None, 300], ids=["whole", "padded"])
def test_one_layer_of_several_methods(tile, start):
    """Every head is what it is alone, whichever kernel computes its neighbours; calls that come again are the same."""
    if tile == "specialised" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the specialised kernel is for sm_90")
    q, k, v = inputs(1, 4, 2, 3001, 3001, 128)
    kv_start = None if start is None else torch.tensor([start], device="cuda")
    config = LayerConfig(MIXED, TILES[tile], grain=4)
    no_blocks = tuple(HeadConfig(mode="dense") if head.mode == "baseline" else head for head in MIXED)
    ours = s2o_attention(q, k, v, LayerConfig(no_blocks, TILES[tile], grain=4), kv_start=kv_start, backend="triton")
    for _ in range(5):
        out, _, stats = s2o_attention(q, k, v, config, kv_start=kv_start, backend="triton", return_stats=True)
        assert torch.equal(out[:, ::2], ours[:, ::2])
        for head in (1, 3):
            alone, method = baseline_attention(q, k, v, MIXED[head].baseline, kv_start=kv_start, heads=[head])
            torch.testing.assert_close(out[:, head], alone[:, head], rtol=2e-2, atol=2e-3)
            assert float(stats.density[head]) == pytest.approx(float(method.density[0]), rel=0.01)
