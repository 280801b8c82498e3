"""The baselines on a GPU in bf16 and fp16: their kernels against plain torch."""

import pytest
import torch

from s2o_runtime.reference.dense import dense_attention, exact_attention
from scripts.bench.baselines.flash_prefill import head_mass, log_mass
from scripts.bench.baselines.pooling import block_means, pool, pool_plain
from scripts.bench.baselines.run import attend, baseline_attention, select
from scripts.bench.baselines.selection import Grid
from scripts.bench.baselines.settings import PBS, Antidiagonal, FlashPrefill, FlashPrefillV2, SkipSoftmax, Sparge
from scripts.bench.baselines.xattention import block_weights, head_weights
from support.gpu import relative_error
from support.marks import pairwise

SHAPES = [
    pytest.param((1, 4, 2, 1000, 1000, 128), id="H4-L1000-D128"),
    pytest.param((1, 2, 2, 2049, 2049, 64), id="H2-L2049-D64"),
    pytest.param((1, 8, 1, 7, 7, 128), id="L7"),
    pytest.param((1, 2, 1, 1, 1500, 128), id="one-query"),
    pytest.param((2, 4, 2, 700, 1999, 128), id="B2-q700-kv1999"),
    pytest.param((1, 3, 1, 900, 900, 96), id="D96-is-padded"),
]
SETTINGS = [
    FlashPrefill(0.5, 64, window=1, last=1),
    FlashPrefillV2(0.5, 64, first=0, window=1, last=1),
    FlashPrefillV2(0.5, last=2),
    PBS(0.6, 512, 64),
    PBS(0.6, permute_queries=True),
    Sparge(0.6, 0.5),
    Sparge(0.8, 0.0, -2.0),
    Antidiagonal(0.6, 8, 64),
    SkipSoftmax(30.0),
    SkipSoftmax(1e4, 64),
]
DTYPES = [torch.bfloat16, torch.float16]
LONG = 1 << 20


def inputs(batch, heads, kv_heads, q_len, kv_len, head_dim, dtype=torch.bfloat16):
    """Clustered keys and drifting queries, as transformers hands them over: views of [B, L, H, D]."""
    generator = torch.Generator("cuda").manual_seed(q_len + kv_len + heads)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    topics = normal(16, head_dim)
    key_topics = topics[torch.arange(kv_len, device="cuda") // 96 % 16][:, None]
    drift = topics[torch.arange(q_len, device="cuda") // 256 % 16][:, None]
    q = normal(batch, q_len, heads, head_dim) + drift
    k = normal(batch, kv_len, kv_heads, head_dim) * 0.6 + key_topics
    return [t.to(dtype).transpose(1, 2) for t in (q, k, normal(batch, kv_len, kv_heads, head_dim))]


@pytest.mark.parametrize(("settings", "shape", "dtype"), pairwise(SETTINGS, SHAPES, DTYPES))
def test_the_kernel_is_plain_torch(shape, settings, dtype, nan_filled):
    """Scores on the edge of a skip may fall either way: then outputs and what is left out agree closely."""
    q, k, v = inputs(*shape, dtype)
    selection = select(q, k, settings)
    made = []
    for backend, of_type in (("triton", dtype), ("reference", torch.float32)):
        left_out = torch.full((shape[1],), torch.nan, dtype=torch.float64, device="cuda")
        tensors = (t.to(of_type) for t in (q, k, v))
        made.append((attend(*tensors, selection, left_out=left_out, backend=backend), left_out))
    (out, left_out), (truth, expected_left_out) = made
    assert relative_error(out, truth) <= (2e-2 if selection.skip else 6e-3)  # weights and output, each within 2^-8
    causal = sum(range(shape[4] - shape[3] + 1, shape[4] + 1))  # pairs of a head in a sequence
    assert float((left_out - expected_left_out).abs().max()) <= 0.01 * shape[0] * causal


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "settings",
    [FlashPrefill(0.0), PBS(1.0, permute_queries=True), Sparge(1.0), Antidiagonal(1.0), SkipSoftmax(0.0, 64)],
    ids=str,
)
def test_everything_kept_is_dense(settings, head_dim, nan_filled):
    q, k, v = inputs(1, 4, 2, 3001, 3333, head_dim)
    truth = exact_attention(q, k, v)
    out, stats = baseline_attention(q, k, v, settings)
    assert (stats.backend, stats.reason) == ("triton", "the kernel supports this call")
    # one rounding of weights and one of the output: no worse than twice what SDPA makes of the same inputs
    assert relative_error(out, truth) <= 2 * relative_error(dense_attention(q, k, v), truth) + 1e-3
    torch.testing.assert_close(stats.density, torch.ones_like(stats.density), rtol=0, atol=1e-12)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_pooling_is_that_of_torch(head_dim, nan_filled):
    x = inputs(2, 3, 1, 1000, 1000, head_dim)[0]
    for ours, expected in zip(pool(x, 64), pool_plain(x, 64), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "block", "dtype"),
    pairwise([*SHAPES, pytest.param((1, 2, 1, 5000, 8191, 128), id="q5000-kv8191")], [64, 128], DTYPES),
)
def test_block_weights_are_those_of_torch(shape, block, dtype, nan_filled, monkeypatch):
    """FlashPrefill's logarithms of weights, and XAttention's weights of strides 4 and 64.

    Products of 16-bit numbers are exact in float32. Tensor cores cut each of at most 512 sums off at 2^-23 of a score,
    at most 50 here: 1e-3 in a score and in the logarithm of a weight.
    """
    q, k, _ = inputs(*shape, dtype)
    part, scale, grid = slice(shape[1] // 2, shape[1]), shape[5] ** -0.5, Grid.plain(q, k, block, block)
    k_mean = block_means(k, block).to(dtype)
    monkeypatch.setattr("scripts.bench.baselines.flash_prefill.head_mass", None)  # plain torch cannot step in
    monkeypatch.setattr("scripts.bench.baselines.xattention.block_weights", None)
    mass = log_mass(q, k_mean, part, grid, scale)
    weights = {stride: head_weights(q, k, part, grid, stride, scale) for stride in (4, 64)}
    for i, head in enumerate(range(part.start, part.stop)):
        slot = head * shape[2] // shape[1]
        expected = head_mass(q[:, head].double(), k_mean[:, slot].double(), grid, scale)
        torch.testing.assert_close(mass[:, i].double(), expected, rtol=0, atol=1e-3)
        for stride, ours in weights.items():
            expected = block_weights(q[:, head].double(), k[:, slot].double(), grid, stride, scale)
            torch.testing.assert_close(ours[:, i].double(), expected, rtol=1.2e-3, atol=1e-7)


def test_block_weights_of_a_million_tokens():
    """Behind 2^31 elements, the last of 17 heads: offsets need 64 bits, and XAttention's rows come in slices."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k = (
        torch.randn(1, LONG, 17, 128, generator=generator, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for _ in range(2)
    )
    grid, last = Grid.plain(q, k, 128, 128), Grid(256, LONG, 128, 128, 128, 128)  # the last queries see all keys
    k_mean = block_means(k, 128).bfloat16()
    mass = log_mass(q, k_mean, slice(16, 17), grid, 128**-0.5)
    expected = head_mass(q[:, 16, -256:].double(), k_mean[:, 16].double(), last, 128**-0.5)
    torch.testing.assert_close(mass[:, 0, -2:].double(), expected, rtol=0, atol=1e-3)
    weights = head_weights(q, k, slice(16, 17), grid, 16, 128**-0.5)
    expected = block_weights(q[:, 16, -256:].double(), k[:, 16].double(), last, 16, 128**-0.5)
    torch.testing.assert_close(weights[:, 0, -2:].double(), expected, rtol=1.2e-3, atol=1e-9)


def test_memory_at_128k():
    """Selecting takes less than a GiB besides what it returns and what permuting copies."""
    q, k, _ = inputs(1, 32, 8, 131072, 131072, 128)
    for settings in (FlashPrefill(), FlashPrefillV2(), PBS(), Sparge(), Antidiagonal(), SkipSoftmax()):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        selection = select(q, k, settings)
        torch.cuda.synchronize()
        held = (selection.blocks, selection.counts, selection.keys, selection.key_order)
        kept = sum(t.untyped_storage().nbytes() for t in held if t is not None)
        assert torch.cuda.max_memory_allocated() - before - kept <= 1 << 30, settings
        del selection, held
