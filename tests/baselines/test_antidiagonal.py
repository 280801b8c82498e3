"""XAttention's kernels in the interpreter, against plain torch in float64, which test_baselines.py holds to loops."""

import pytest
import torch

from s2o_runtime.baselines.kernels import antidiagonal
from s2o_runtime.baselines.kernels.antidiagonal import antidiagonal_mass
from s2o_runtime.baselines.selection import Grid
from s2o_runtime.baselines.xattention import block_weights, head_weights
from s2o_runtime.devices import interpreted
from s2o_runtime.errors import InputError
from s2o_runtime.tiles import SHARED_MEMORY, antidiagonal_tile
from support.marks import all_but_first

SLOW = pytest.mark.slow(reason="more cases of a kernel in Triton's interpreter, seconds each")
EXHAUSTIVE = pytest.mark.exhaustive(reason="still more of them: `make test` runs some")

pytestmark = pytest.mark.skipif(not interpreted(), reason="a GPU is here, so kernels are compiled: see tests/gpu")

SCALE = 0.2
SM_90 = (9, 0)  # whose tile the interpreter runs
SHAPES = [
    pytest.param(1, 4, 2, 450, 450, 64, id="H4-KV2-L450-D64"),
    pytest.param(2, 2, 1, 140, 331, 128, id="B2-q140-kv331-D128"),
    pytest.param(1, 2, 1, 270, 1301, 96, id="q270-kv1301-D96"),
    pytest.param(1, 1, 1, 5, 5, 40, id="L5-D40"),
    pytest.param(1, 2, 2, 1, 300, 64, id="one-query"),
]
BLOCKS = [(4, 64), (4, 256), (8, 128), (16, 64), (16, 128), (32, 64), (64, 64), (64, 128), (64, 256)]


def inputs(batch, heads, kv_heads, q_len, kv_len, head_dim, dtype=torch.float32):
    """Tensors as transformers hands them over: views of [B, L, H, D]."""
    q = (torch.randn(batch, q_len, heads, head_dim) * 3).to(dtype)
    k = torch.randn(batch, kv_len, kv_heads, head_dim).to(dtype)
    return q.transpose(1, 2), k.transpose(1, 2)


def plain(q, k, heads, grid, stride):
    group = q.shape[1] // k.shape[1]
    each = [block_weights(q[:, h].double(), k[:, h // group].double(), grid, stride, SCALE) for h in heads]
    return torch.stack(each, 1)


@pytest.mark.parametrize(("stride", "block"), all_but_first(BLOCKS, EXHAUSTIVE))
@pytest.mark.parametrize(("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim"), all_but_first(SHAPES, SLOW))
def test_the_kernels_are_plain_torch(batch, heads, kv_heads, q_len, kv_len, head_dim, stride, block, nan_filled):
    q, k = inputs(batch, heads, kv_heads, q_len, kv_len, head_dim)
    grid = Grid.plain(q, k, block, block)
    ours = antidiagonal_mass(q, k, range(heads), grid, stride, SCALE, SM_90)
    expected = plain(q, k, range(heads), grid, stride)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-7)
    assert torch.equal(ours > 0, expected.float() > 0)


@pytest.mark.parametrize("capability", all_but_first([pytest.param((9, 0)), pytest.param((8, 0))], SLOW))
@pytest.mark.parametrize(("block_m", "block_n"), [(128, 64), (64, 256)])
def test_fp16_and_blocks_of_two_sizes(block_m, block_n, capability, nan_filled):
    q, k = inputs(1, 4, 2, 1190, 1333, 64, torch.float16)
    grid = Grid.plain(q, k, block_m, block_n)
    ours = antidiagonal_mass(q, k, (3, 0), grid, 8, SCALE, capability)
    torch.testing.assert_close(ours.double(), plain(q, k, (3, 0), grid, 8), rtol=1e-4, atol=1e-7)


def test_other_layouts(nan_filled):
    """The last dimension need not be the inner one."""
    q, k = (t.transpose(2, 3).contiguous().transpose(2, 3) for t in inputs(1, 2, 1, 200, 260, 64))
    assert q.stride(3) != 1
    grid = Grid.plain(q, k, 64, 64)
    ours = antidiagonal_mass(q, k, (0, 1), grid, 16, SCALE, SM_90)
    torch.testing.assert_close(ours.double(), plain(q, k, (0, 1), grid, 16), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("workspace", "launches"), all_but_first([(12_000, 2 * 2), (1 << 20, 2), (1, 4 * 3)], SLOW))
def test_slices_change_nothing(workspace, launches, monkeypatch, nan_filled):
    """1 byte: every row of tiles of every head by itself; a MiB: all at once; between: two and then one head."""
    q, k = inputs(1, 3, 1, 1090, 1100, 64)
    grid = Grid.plain(q, k, 128, 128)
    expected = antidiagonal_mass(q, k, range(3), grid, 8, SCALE, SM_90)
    counted = []
    monkeypatch.setattr(antidiagonal, "WORKSPACE_BYTES", workspace)
    launch = antidiagonal.launch
    monkeypatch.setattr(antidiagonal, "launch", lambda *args, **kwargs: counted.append(launch(*args, **kwargs)))
    assert torch.equal(antidiagonal_mass(q, k, range(3), grid, 8, SCALE, SM_90), expected)
    assert len(counted) == launches


def test_plain_torch_takes_the_rest():
    """Without a GPU nothing is launched, and each head gets its own keys."""
    q, k = inputs(2, 4, 2, 150, 222, 64)
    grid = Grid.plain(q, k, 64, 64)
    ours = head_weights(q.double(), k.double(), (3, 1), grid, 16, SCALE)
    torch.testing.assert_close(ours, plain(q, k, (3, 1), grid, 16), rtol=0, atol=0)


def test_every_gpu_of_the_block_sparse_kernel_has_a_tile():
    tiles = [antidiagonal_tile(divmod(number, 10)) for number in SHARED_MEMORY]
    assert antidiagonal_tile((8, 6)) == antidiagonal_tile((8, 9))
    # a tile holds whole blocks of rows and of keys, whatever the settings
    assert all(tile.block_m % 64 == 0 and tile.block_n % 64 == 0 for tile in tiles)
    with pytest.raises(InputError, match="sm_75 has no tile for antidiagonal scores: select with plain torch"):
        antidiagonal_tile((7, 5))
