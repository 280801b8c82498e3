"""The baselines' kernels in the interpreter, against plain torch in float64."""

import math

import pytest
import torch

from s2o_runtime.errors import InputError
from s2o_runtime.tiles import SHARED_MEMORY
from scripts.bench.baselines.flash_prefill import head_mass, log_mass
from scripts.bench.baselines.kernels import antidiagonal
from scripts.bench.baselines.kernels.antidiagonal import antidiagonal_mass
from scripts.bench.baselines.kernels.block_sparse import pool_blocks
from scripts.bench.baselines.kernels.mean_keys import mean_key_mass, select_by_mass
from scripts.bench.baselines.pooling import block_means, pool_plain
from scripts.bench.baselines.run import attend, baseline_attention, select
from scripts.bench.baselines.selection import Grid
from scripts.bench.baselines.settings import PBS, Antidiagonal, FlashPrefill, FlashPrefillV2, SkipSoftmax, Sparge
from scripts.bench.baselines.tiles import antidiagonal_tile, block_sparse_tile, skip_tile
from scripts.bench.baselines.xattention import block_weights, head_weights
from support.kernels import fuse_products
from support.marks import INTERPRETED, all_but_first

SLOW = pytest.mark.slow(reason="more cases of a kernel in Triton's interpreter, seconds each")

pytestmark = INTERPRETED

SCALE = 0.2
SM_90 = (9, 0)  # whose tile the interpreter runs
GQA, SUFFIX, FEW, ONE, ODD = (  # batch, query heads, KV heads, queries, keys, head dim
    (1, 4, 2, 300, 300, 64), (2, 2, 1, 140, 331, 128), (1, 1, 1, 5, 5, 64), (1, 2, 2, 1, 200, 64),
    (1, 2, 1, 257, 257, 40),
)  # fmt: skip


def cases(*table):
    """Parameters whose ids say everything: settings or numbers, dtype, and B-H-KV-q-k-D. Three are for `make check`."""
    parameters = []
    for *others, shape in table:
        text = "-".join(str(one).removeprefix("torch.") for one in others)
        parameters.append(pytest.param(*others, shape, id="{}-B{}-H{}-KV{}-q{}-k{}-D{}".format(text, *shape)))
    return all_but_first(parameters, SLOW, 3)


def inputs(batch, heads, kv_heads, q_len, kv_len, head_dim, dtype=torch.float32):
    """Tensors as transformers hands them over, views of [B, L, H, D]; the first keys weigh more than the others."""
    q = torch.randn(batch, q_len, heads, head_dim) * 2 + 1
    k, v = (torch.randn(batch, kv_len, kv_heads, head_dim) for _ in range(2))
    k[:, :30] += 1.0
    return [x.to(dtype).transpose(1, 2) for x in (q, k, v)]


def in_plain_torch(q, k, v, selection, scale, **options):
    """In float64, as test_selection.py holds against explicit loops."""
    return attend(q.double(), k.double(), v.double(), selection, scale=scale, backend="reference", **options)


@pytest.mark.parametrize(
    ("settings", "dtype", "shape"),
    cases(
        (PBS(0.6, 128, 64, permute_queries=True), torch.float32, GQA),
        (SkipSoftmax(1e6, 64), torch.float16, (1, 2, 1, 300, 460, 64)),
        (Sparge(0.5, 0.3), torch.float32, ODD),
        (FlashPrefillV2(0.6, 64, first=0, window=1, last=1), torch.float32, (1, 6, 2, 200, 341, 64)),
        (FlashPrefillV2(0.6, 64, first=0, window=1, last=1), torch.float16, SUFFIX),
        (FlashPrefillV2(0.9, first=0, window=1, last=0), torch.float32, (1, 4, 1, 130, 600, 40)),
        (FlashPrefillV2(0.6, 64, first=0, window=0, last=1, correct=False), torch.float16, GQA),
        (FlashPrefillV2(), torch.float32, ONE),
        (PBS(0.6, 128, 64), torch.float16, SUFFIX),
        (PBS(0.6, 256, 128), torch.float32, ODD),
        (PBS(0.6, 128, 64, permute_queries=True), torch.float32, ONE),
        (Sparge(0.5, 0.3), torch.float32, SUFFIX),
        (Sparge(1.0, skip=-1.0), torch.float32, (1, 2, 1, 300, 460, 64)),
        (Sparge(1.0, skip=-3.0), torch.float16, GQA),
        (Antidiagonal(0.6), torch.float32, GQA),
        (FlashPrefill(0.6, 64, window=1, last=1), torch.float32, SUFFIX),
        (FlashPrefill(0.6, 64, window=1, last=1), torch.float16, FEW),
        (SkipSoftmax(30.0), torch.float32, SUFFIX),
        (SkipSoftmax(30.0, 64), torch.float32, ODD),
        (SkipSoftmax(1e6), torch.float32, (1, 1, 1, 1, 333, 64)),
    ),
)
def test_the_kernel_computes_what_is_selected(settings, dtype, shape, nan_filled):
    """And leaves out as many pairs as plain torch, which counts half of them as computed."""
    q, k, v = inputs(*shape, dtype)
    selection = select(q, k, settings, scale=SCALE)
    left_out = {backend: torch.full((shape[1],), math.nan, dtype=torch.float64) for backend in ("triton", "reference")}
    out = attend(q, k, v, selection, scale=SCALE, left_out=left_out["triton"], backend="triton")
    expected = in_plain_torch(q, k, v, selection, SCALE, left_out=left_out["reference"])
    assert out.dtype == dtype
    # in fp16 weights and output are each rounded to 11 bits, relative to values of |v| <= 4
    tolerances = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-3, "atol": 4 * 2**-10}
    torch.testing.assert_close(out.double(), expected, **tolerances)
    assert left_out["triton"].tolist() == left_out["reference"].tolist()
    assert (float(left_out["triton"].sum()) > 0) == (selection.skip is not None)
    _, stats = baseline_attention(q, k, v, settings, scale=SCALE, backend="triton")
    assert torch.equal(stats.counts, selection.counts)
    assert stats.left_out is None or torch.equal(stats.left_out, left_out["triton"])
    assert (stats.left_out is None) == (selection.skip is None)


@pytest.mark.parametrize(("q_len", "kv_len", "block"), [(1, 333, 64), (129, 129, 128)], ids=["one", "tile-of-one-row"])
def test_a_tile_with_a_new_maximum_is_kept_whatever_a_compiler_fuses(q_len, kv_len, block, nan_filled, monkeypatch):
    """From a factor of the context's length on, tiles without a new maximum are left out, the first one never."""
    q, k, v = inputs(1, 4, 2, q_len, kv_len, 64)
    selection = select(q, k, SkipSoftmax(1e9, block))
    fuse_products(monkeypatch)
    out = attend(q, k, v, selection, scale=0.3, backend="triton")
    torch.testing.assert_close(out.double(), in_plain_torch(q, k, v, selection, 0.3), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("length", "head_dim", "block"), [(200, 64, 64), (130, 40, 128), (5, 128, 64)])
def test_pooling_is_that_of_torch(length, head_dim, block, nan_filled):
    x = inputs(2, 3, 1, length, length, head_dim)[0]
    for ours, expected in zip(pool_blocks(x, block), pool_plain(x, block), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def by_torch(weights_of, q, k, part, *arguments):
    """[B, n, row blocks, key blocks] of some query heads in float64; k is read by equally many query heads each."""
    group, heads = q.shape[1] // k.shape[1], range(part.start, part.stop)
    return torch.stack([weights_of(q[:, h].double(), k[:, h // group].double(), *arguments) for h in heads], 1)


@pytest.mark.parametrize(
    ("block", "dtype", "shape"),
    cases(
        (64, torch.float16, SUFFIX),
        (128, torch.float32, (1, 1, 1, 256, 256, 96)),
        (64, torch.float32, (1, 4, 2, 100, 4500, 40)),
        (64, torch.float16, (1, 1, 1, 5, 5, 8)),
        (128, torch.float16, ONE),
        (64, torch.float32, GQA),
    ),
)
def test_flash_prefills_weights_are_those_of_torch(block, dtype, shape, nan_filled):
    q, k, _ = inputs(*shape, dtype)
    k_mean, grid = block_means(k, block).to(dtype), Grid.plain(q, k, block, block)
    part = slice(shape[1] // 2, shape[1])
    ours = mean_key_mass(q, k_mean, part, grid, SCALE)
    # products of 16-bit numbers are exact in float32, so both types differ by float32's sums only
    torch.testing.assert_close(ours.double(), by_torch(head_mass, q, k_mean, part, grid, SCALE), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        FlashPrefillV2(0.5, 64, first=1, window=2, last=1),
        FlashPrefillV2(0.9, 64, first=0, window=0, last=0),
        FlashPrefillV2(0.0, 128, first=0, window=0, last=0),
        FlashPrefill(0.7, 64, window=1, last=2),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "shape", [(2, 6, 2, 150, 341, 64), ONE, (1, 4, 2, 70, 17000, 16)], ids=["packed", "one", "long"]
)
def test_flash_prefills_choice_is_that_of_torch(settings, shape, nan_filled, monkeypatch):
    """By the same weights, also with a head at a time; what is pruned is what is whole and not chosen."""
    q, k, _ = inputs(*shape)
    expected = select(q, k, settings, scale=SCALE)
    grid, k_mean = expected.grid, block_means(k, settings.block)
    monkeypatch.setattr(
        "scripts.bench.baselines.kernels.mean_keys.parts", lambda n, _: [slice(i, i + 1) for i in range(n)]
    )

    def mass_of(part):
        return log_mass(q, k_mean, part, grid, SCALE)

    ours = select_by_mass(q, grid, mass_of, settings, expected.mean_keys)
    assert torch.equal(ours.counts, expected.counts)
    for at in torch.cartesian_prod(*map(torch.arange, ours.counts.shape)).tolist():
        count, full = int(ours.counts[tuple(at)]), int(grid.full(q.device)[at[2]])
        assert torch.equal(ours.blocks[tuple(at)][:count], expected.blocks[tuple(at)][:count])
        if expected.pruned is not None:
            assert torch.equal(ours.pruned[tuple(at)][:full], expected.pruned[tuple(at)][:full])


def test_packed_weights_are_those_of_torch(nan_filled):
    q, k, _ = inputs(2, 6, 2, 150, 341, 40)
    k_mean, grid = block_means(k, 64), Grid.plain(q, k, 64, 64, packed=True)
    ours = mean_key_mass(q, k_mean, slice(1, 2), grid, SCALE)
    expected = log_mass(q.double(), k_mean.double(), slice(1, 2), grid, SCALE)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-4)


def test_flash_prefills_weights_are_sums_over_the_rows_that_see_a_whole_block():
    """Written out for one pair of blocks: of 64 queries from position 100 on, 37 see all of keys 64 to 127."""
    q, k, _ = inputs(1, 1, 1, 64, 164, 16, torch.float64)
    k_mean = block_means(k, 64)
    mass = log_mass(q, k_mean, slice(0, 1), Grid.plain(q, k, 64, 64), SCALE)
    rows = [math.exp(SCALE * float(q[0, 0, r] @ k_mean[0, 0, 1])) for r in range(27, 64)]
    assert float(mass[0, 0, 0, 1]) == pytest.approx(math.log(sum(rows)))
    assert mass[0, 0, 0].isinf().tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("stride", "block_m", "block_n", "dtype", "shape"),
    cases(
        (8, 128, 128, torch.float16, SUFFIX),
        (16, 64, 64, torch.float32, GQA),
        (64, 64, 64, torch.float32, (1, 2, 1, 270, 1301, 96)),
        (4, 64, 64, torch.float32, FEW),
        (4, 256, 256, torch.float16, SUFFIX),
        (8, 64, 256, torch.float16, (1, 4, 2, 1190, 1333, 64)),
        (16, 128, 64, torch.float32, ODD),
        (32, 64, 64, torch.float32, ONE),
        (64, 256, 256, torch.float16, GQA),
    ),
)
@pytest.mark.parametrize("capability", [SM_90, pytest.param((8, 0), marks=SLOW)], ids=["sm_90", "sm_80"])
def test_xattentions_weights_are_those_of_torch(capability, stride, block_m, block_n, dtype, shape, nan_filled):
    q, k, _ = inputs(*shape, dtype)
    grid, part = Grid.plain(q, k, block_m, block_n), slice(shape[1] // 2, shape[1])
    ours = antidiagonal_mass(q, k, part, grid, stride, SCALE, capability)
    expected = by_torch(block_weights, q, k, part, grid, stride, SCALE)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-7)


def test_weights_of_other_layouts(nan_filled):
    """The last dimension need not be the inner one."""
    q, k, _ = inputs(1, 2, 1, 200, 260, 64)
    strange_q, strange_k = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k))
    assert strange_q.stride(3) != 1
    grid = Grid.plain(q, k, 64, 64)
    for weights in (
        lambda q, k: antidiagonal_mass(q, k, slice(0, 2), grid, 16, SCALE, SM_90),
        lambda q, k: mean_key_mass(q, block_means(k, 64).contiguous(), slice(0, 2), grid, SCALE),
    ):
        torch.testing.assert_close(weights(strange_q, strange_k), weights(q, k), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("workspace", "launches"), [(12_000, 2 * 2), pytest.param(1, 4 * 3, marks=SLOW)])
def test_slices_of_xattentions_weights_change_nothing(workspace, launches, monkeypatch, nan_filled):
    """1 byte: every row of tiles of every head by itself; otherwise two and then one head."""
    q, k, _ = inputs(1, 3, 1, 1090, 1100, 64)
    grid = Grid.plain(q, k, 128, 128)
    expected = antidiagonal_mass(q, k, slice(0, 3), grid, 8, SCALE, SM_90)
    counted, launch = [], antidiagonal.launch
    monkeypatch.setattr(antidiagonal, "WORKSPACE_BYTES", workspace)
    monkeypatch.setattr(antidiagonal, "launch", lambda *args, **kwargs: counted.append(launch(*args, **kwargs)))
    assert torch.equal(antidiagonal_mass(q, k, slice(0, 3), grid, 8, SCALE, SM_90), expected)
    assert len(counted) == launches


def test_plain_torch_takes_the_rest():
    """Without a GPU nothing is launched, and each head gets its own keys."""
    q, k, _ = inputs(2, 4, 2, 150, 222, 64, torch.float64)
    grid = Grid.plain(q, k, 64, 64)
    ours = head_weights(q, k, slice(1, 4), grid, 16, SCALE)
    torch.testing.assert_close(ours, by_torch(block_weights, q, k, slice(1, 4), grid, 16, SCALE), rtol=0, atol=0)


def test_every_gpu_has_tiles():
    for capability in (divmod(number, 10) for number in SHARED_MEMORY):
        tile = antidiagonal_tile(capability)  # which holds whole blocks of rows and of keys, whatever the settings
        assert tile.block_m % 64 == tile.block_n % 64 == 0
        for head_dim in (64, 128):
            for block_m in (64, 128, 256):
                for block_n in (64, 128, 256):
                    tile = block_sparse_tile(head_dim, capability, block_m, block_n)
                    assert block_m % tile.block_m == block_n % tile.block_n == 0
            for rows in (64, 128):
                assert skip_tile(head_dim, capability, rows, 64)[:2] == (rows, 64)


def test_what_has_no_tile_is_refused():
    with pytest.raises(InputError, match="head_dim 128 on sm_75 has no block-sparse tile: run it with the reference"):
        block_sparse_tile(128, (7, 5), 64, 64)
    with pytest.raises(InputError, match="blocks of 32 x 64 have no block-sparse tile: use multiples of 64"):
        block_sparse_tile(128, (9, 0), 32, 64)
    with pytest.raises(InputError, match="sm_80 has no tile of 128 x 128 for a skip: use 128 x 64 or 64 x 64"):
        skip_tile(128, (8, 0), 128, 128)
    with pytest.raises(InputError, match="sm_75 has no tile for antidiagonal scores: select with plain torch"):
        antidiagonal_tile((7, 5))
    q, k, v = inputs(1, 1, 1, 20, 20, 192)
    with pytest.raises(InputError, match=r'head_dim 192 is not supported by the block-sparse kernel .*"reference"'):
        baseline_attention(q, k, v, PBS(), backend="triton")
