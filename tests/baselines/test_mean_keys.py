"""FlashPrefill's kernel in the interpreter, against plain torch in float64, which test_baselines.py holds to loops."""

import math

import pytest
import torch

from s2o_runtime.baselines.flash_prefill import head_mass, log_mass
from s2o_runtime.baselines.kernels.mean_keys import mean_key_mass
from s2o_runtime.baselines.pooling import block_means
from s2o_runtime.baselines.selection import Grid
from s2o_runtime.devices import interpreted
from support.marks import all_but_first

SLOW = pytest.mark.slow(reason="more cases of a kernel in Triton's interpreter, seconds each")

pytestmark = pytest.mark.skipif(not interpreted(), reason="a GPU is here, so kernels are compiled: see tests/gpu")

SCALE = 0.2
SHAPES = [
    pytest.param(1, 4, 2, 450, 450, 64, 64, id="H4-KV2-L450-D64"),
    pytest.param(2, 2, 1, 140, 331, 128, 64, id="B2-q140-kv331-D128"),
    pytest.param(1, 2, 1, 270, 1301, 96, 128, id="q270-kv1301-D96"),
    pytest.param(1, 1, 1, 100, 4500, 40, 64, id="two-tiles-of-key-blocks-D40"),
    pytest.param(1, 1, 1, 5, 5, 8, 64, id="L5-D8"),
    pytest.param(1, 2, 2, 1, 300, 64, 128, id="one-query"),
    pytest.param(1, 1, 1, 256, 256, 64, 128, id="the-diagonal-is-seen-whole-by-one"),
]


def inputs(batch, heads, kv_heads, q_len, kv_len, head_dim, block, dtype=torch.float32):
    """Queries as transformers hands them over, a view of [B, L, H, D], and the means of keys."""
    q = (torch.randn(batch, q_len, heads, head_dim) * 3).to(dtype).transpose(1, 2)
    k = torch.randn(batch, kv_len, kv_heads, head_dim).transpose(1, 2)
    return q, (block_means(k, block) * 8).to(dtype), Grid(q_len, kv_len, block, block, block, block)


def plain(q, k_mean, heads, slots, grid):
    each = [
        head_mass(q[:, h].double(), k_mean[:, s].double(), grid, SCALE) for h, s in zip(heads, slots, strict=True)
    ]  # fmt: skip
    return torch.stack(each, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "block"), all_but_first(SHAPES, SLOW)
)
def test_the_kernel_is_plain_torch(batch, heads, kv_heads, q_len, kv_len, head_dim, block, dtype, nan_filled):
    q, k_mean, grid = inputs(batch, heads, kv_heads, q_len, kv_len, head_dim, block, dtype)
    chosen = list(range(heads))[::-1]
    slots = [h * kv_heads // heads for h in chosen]
    ours = mean_key_mass(q, k_mean, chosen, slots, grid, SCALE)
    # products of 16-bit numbers are exact in float32, so both types differ by float32's sums only
    torch.testing.assert_close(ours.double(), plain(q, k_mean, chosen, slots, grid), rtol=1e-4, atol=1e-4)


def test_weights_are_sums_of_exponentials_of_the_rows_that_see_a_whole_block():
    """Written out for one pair of blocks: of 64 queries from position 100 on, 37 see all of keys 64 to 127."""
    q, k_mean, grid = inputs(1, 1, 1, 64, 164, 16, 64, torch.float64)
    mass = log_mass(q, k_mean, [0], [0], grid, SCALE)
    rows = [math.exp(SCALE * float(q[0, 0, r] @ k_mean[0, 0, 1])) for r in range(27, 64)]
    assert float(mass[0, 0, 0, 1]) == pytest.approx(math.log(sum(rows)))
    assert mass[0, 0, 0].isinf().tolist() == [False, False, True]


def test_other_layouts(nan_filled):
    """The last dimension need not be the inner one."""
    q, k_mean, grid = inputs(1, 2, 1, 200, 260, 64, 64)
    strange = [t.transpose(2, 3).contiguous().transpose(2, 3) for t in (q, k_mean)]
    assert strange[0].stride(3) != 1
    ours = mean_key_mass(*strange, (0, 1), (0, 0), grid, SCALE)
    torch.testing.assert_close(ours, mean_key_mass(q, k_mean, (0, 1), (0, 0), grid, SCALE), rtol=0, atol=0)
