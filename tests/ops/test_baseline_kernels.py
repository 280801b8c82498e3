"""The baselines' kernels against plain torch in float64, which test_selection.py holds against explicit loops."""

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
from scripts.bench.baselines.settings import PBS, Antidiagonal, FlashPrefill, FlashPrefillV2, Sparge
from scripts.bench.baselines.tiles import antidiagonal_tile, block_sparse_tile
from scripts.bench.baselines.xattention import block_weights, head_weights
from support.kernels import DTYPES, ON_GPU, relative_error
from support.kernels import inputs as kernel_inputs
from support.layouts import as_transformers
from support.marks import COMPILED, INTERPRETED, MORE_CASES, SLOW_KERNELS, all_but_first, pairwise

pytestmark = pytest.mark.usefixtures("nan_filled")

HERE = torch.cuda.get_device_capability() if ON_GPU else (9, 0)  # whose tile the interpreter runs
ODD_DIM = 96 if ON_GPU else 40
SHAPES = [
    pytest.param(shape, id="B{}-H{}-KV{}-q{}-k{}-D{}".format(*shape))
    for shape in (
        [(1, 4, 2, 1000, 1000, 128), (1, 2, 2, 2049, 2049, 64), (1, 8, 1, 7, 7, 128), (1, 2, 1, 1, 1500, 128)]
        + [(2, 4, 2, 700, 1999, 128), (1, 3, 1, 900, 900, 96)]
        if ON_GPU
        else [(1, 4, 2, 300, 300, 64), (2, 2, 1, 140, 331, 128), (1, 1, 1, 5, 5, 64), (1, 2, 2, 1, 200, 64)]
        + [(1, 2, 1, 257, 257, 40), (1, 6, 2, 200, 341, 64)]
    )
]
SETTINGS = [
    PBS(0.6, 128, 64),
    FlashPrefillV2(0.6, 64, first=0, window=1, last=1),
    Sparge(0.5, 0.3),
    Antidiagonal(0.6),
    FlashPrefill(0.6, 64, window=1, last=1),
    PBS(0.6, 256, 128),
    FlashPrefillV2(0.9, first=0, window=1, last=0),
    FlashPrefillV2(0.6, 64, first=0, window=0, last=1, correct=False),
]


def inputs(*sizes):
    """Clustered keys and drifting queries as transformers hands them over, views of [B, L, H, D]."""
    return as_transformers(*kernel_inputs(*sizes))


def scale_of(q):
    return q.shape[3] ** -0.5


@pytest.mark.parametrize(
    ("settings", "shape", "dtype"),
    all_but_first(pairwise(SETTINGS, SHAPES, DTYPES, mark=MORE_CASES, count=14), SLOW_KERNELS, 3),
)
def test_the_kernel_computes_what_is_selected(settings, shape, dtype):
    q, k, v = inputs(*shape, dtype)
    selection = select(q, k, settings)
    out = attend(q, k, v, selection, backend="triton")
    truth = attend(q.double(), k.double(), v.double(), selection, backend="reference")
    assert out.dtype == dtype
    if dtype == torch.float32:
        torch.testing.assert_close(out.double(), truth, rtol=1e-4, atol=1e-5)
    else:  # weights and output, each within 2^-8
        assert relative_error(out, truth.float()) <= 6e-3
    _, stats = baseline_attention(q, k, v, settings, backend="triton")
    assert torch.equal(stats.counts, selection.counts)


@pytest.mark.parametrize(("length", "head_dim", "block"), [(200, 64, 64), (130, ODD_DIM, 128), (5, 128, 64)])
def test_pooling_is_that_of_torch(length, head_dim, block):
    x = inputs(2, 3, 1, length, length, head_dim)[0]
    rounding = {"rtol": 1e-2, "atol": 1e-2} if ON_GPU else {"rtol": 1e-5, "atol": 1e-6}  # of means to bf16
    for ours, expected in zip(pool_blocks(x, block), pool_plain(x, block), strict=True):
        torch.testing.assert_close(ours, expected, **rounding)


def by_torch(weights_of, q, k, part, *arguments):
    """[B, n, row blocks, key blocks] of some query heads in float64; k is read by equally many query heads each."""
    group, heads = q.shape[1] // k.shape[1], range(part.start, part.stop)
    return torch.stack([weights_of(q[:, h].double(), k[:, h // group].double(), *arguments) for h in heads], 1)


# Products of 16-bit numbers are exact in float32. Tensor cores cut each of at most 512 sums off at 2^-23 of a score, at
# most 50 here: 1e-3 in a score and in the logarithm of a weight.
LOGARITHMS = {"rtol": 0, "atol": 1e-3} if ON_GPU else {"rtol": 1e-4, "atol": 1e-4}
WEIGHTS = {"rtol": 1.2e-3, "atol": 1e-7} if ON_GPU else {"rtol": 1e-4, "atol": 1e-7}


@pytest.mark.parametrize(
    ("shape", "block", "dtype"),
    all_but_first(
        pairwise([*SHAPES, pytest.param((1, 2, 1, 100, 4500, ODD_DIM), id="k4500")], [64, 128], DTYPES), SLOW_KERNELS, 2
    ),
)  # fmt: skip
def test_flash_prefills_weights_are_those_of_torch(shape, block, dtype):
    q, k, _ = inputs(*shape, dtype)
    k_mean, grid = block_means(k, block).to(dtype), Grid.plain(q, k, block, block)
    part = slice(shape[1] // 2, shape[1])
    ours = mean_key_mass(q, k_mean, part, grid, scale_of(q))
    torch.testing.assert_close(ours.double(), by_torch(head_mass, q, k_mean, part, grid, scale_of(q)), **LOGARITHMS)


def test_packed_weights_are_those_of_torch():
    q, k, _ = inputs(2, 6, 2, 150, 341, ODD_DIM)
    k_mean, grid = block_means(k, 64).to(q.dtype), Grid.plain(q, k, 64, 64, packed=True)
    ours = mean_key_mass(q, k_mean, slice(1, 2), grid, scale_of(q))
    on_host = (tensor.double().cpu() for tensor in (q, k_mean))  # where no kernel runs
    expected = log_mass(*on_host, slice(1, 2), grid, scale_of(q))
    torch.testing.assert_close(ours.double().cpu(), expected, **LOGARITHMS)


@INTERPRETED
@pytest.mark.parametrize(
    ("settings", "shape"),
    pairwise(
        [
            FlashPrefillV2(0.5, 64, first=1, window=2, last=1),
            FlashPrefillV2(0.0, 128, first=0, window=0, last=0),
            FlashPrefill(0.7, 64, window=1, last=2),
        ],
        [pytest.param(shape, id=f"k{shape[4]}") for shape in ((2, 6, 2, 150, 341, 64), (1, 4, 2, 70, 17000, 16))],
    ),
)
def test_flash_prefills_choice_is_that_of_torch(settings, shape, monkeypatch):
    """By the same weights, also with a head at a time; what is pruned is what is whole and not chosen."""
    q, k, _ = inputs(*shape)
    expected = select(q, k, settings)
    grid, k_mean = expected.grid, block_means(k, settings.block)
    monkeypatch.setattr(
        "scripts.bench.baselines.kernels.mean_keys.parts", lambda n, _: [slice(i, i + 1) for i in range(n)]
    )

    def mass_of(part):
        return log_mass(q, k_mean, part, grid, scale_of(q))

    ours = select_by_mass(q, grid, mass_of, settings, expected.mean_keys)
    assert torch.equal(ours.counts, expected.counts)
    for at in torch.cartesian_prod(*map(torch.arange, ours.counts.shape)).tolist():
        count, full = int(ours.counts[tuple(at)]), int(grid.full(q.device)[at[2]])
        assert torch.equal(ours.blocks[tuple(at)][:count], expected.blocks[tuple(at)][:count])
        if expected.pruned is not None:
            assert torch.equal(ours.pruned[tuple(at)][:full], expected.pruned[tuple(at)][:full])


CAPABILITIES = [pytest.param(pair, id=f"sm{pair[0]}{pair[1]}") for pair in ([HERE] if ON_GPU else [HERE, (8, 0)])]
STRIDES = [(8, 128, 128), (16, 64, 64), (64, 64, 64), (4, 256, 256), (8, 64, 256), (16, 128, 64), (64, 256, 256)]


@pytest.mark.parametrize(
    ("shape", "stride", "block_m", "block_n", "dtype", "capability"),
    all_but_first(pairwise(SHAPES, STRIDES, DTYPES, CAPABILITIES, mark=MORE_CASES, count=16), SLOW_KERNELS, 3),
)
def test_xattentions_weights_are_those_of_torch(shape, stride, block_m, block_n, dtype, capability):
    q, k, _ = inputs(*shape, dtype)
    grid, part = Grid.plain(q, k, block_m, block_n), slice(shape[1] // 2, shape[1])
    ours = antidiagonal_mass(q, k, part, grid, stride, scale_of(q), capability)
    torch.testing.assert_close(ours.double(), by_torch(block_weights, q, k, part, grid, stride, scale_of(q)), **WEIGHTS)


@INTERPRETED
def test_slices_of_xattentions_weights_change_nothing(monkeypatch):
    """Two heads and then one."""
    q, k, _ = inputs(1, 3, 1, 1090, 1100, 64)
    grid = Grid.plain(q, k, 128, 128)
    expected = antidiagonal_mass(q, k, slice(0, 3), grid, 8, scale_of(q), HERE)
    counted, launch = [], antidiagonal.launch
    monkeypatch.setattr(antidiagonal, "WORKSPACE_BYTES", 12_000)
    monkeypatch.setattr(antidiagonal, "launch", lambda *args, **kwargs: counted.append(launch(*args, **kwargs)))
    assert torch.equal(antidiagonal_mass(q, k, slice(0, 3), grid, 8, scale_of(q), HERE), expected)
    assert len(counted) == 2 * 2


def test_every_gpu_has_tiles():
    for capability in (divmod(number, 10) for number in SHARED_MEMORY):
        tile = antidiagonal_tile(capability)  # which holds whole blocks of rows and of keys, whatever the settings
        assert tile.block_m % 64 == tile.block_n % 64 == 0
        for head_dim in (64, 128):
            for block_m in (64, 128, 256):
                for block_n in (64, 128, 256):
                    tile = block_sparse_tile(head_dim, capability, block_m, block_n)
                    assert block_m % tile.block_m == block_n % tile.block_n == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: block_sparse_tile(128, (7, 5), 64, 64), "head_dim 128 on sm_75 has no block-sparse tile: run it with"),
        (lambda: block_sparse_tile(128, (9, 0), 32, 64), "blocks of 32 x 64 have no block-sparse tile: use multiples"),
        (lambda: antidiagonal_tile((7, 5)), "sm_75 has no tile for antidiagonal scores: select with plain torch"),
        (
            lambda: baseline_attention(*inputs(1, 1, 1, 20, 20, 192), PBS(), backend="triton"),
            r'head_dim 192 is not supported by the block-sparse kernel .*"reference"',
        ),
    ],
)
def test_what_has_no_tile_is_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()


@COMPILED
def test_block_weights_of_a_million_tokens():
    """Behind 2^31 elements, the last of 17 heads: offsets need 64 bits."""
    long = 1 << 20
    q, k = (
        torch.randn(1, long, 17, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(2)
    )  # fmt: skip
    grid, last = Grid.plain(q, k, 128, 128), Grid(256, long, 128, 128, 128)  # the last queries see all keys
    k_mean = block_means(k, 128).bfloat16()
    mass = log_mass(q, k_mean, slice(16, 17), grid, 128**-0.5)
    expected = head_mass(q[:, 16, -256:].double(), k_mean[:, 16].double(), last, 128**-0.5)
    torch.testing.assert_close(mass[:, 0, -2:].double(), expected, rtol=0, atol=1e-3)
    weights = head_weights(q, k, slice(16, 17), grid, 16, 128**-0.5)
    expected = block_weights(q[:, 16, -256:].double(), k[:, 16].double(), last, 16, 128**-0.5)
    torch.testing.assert_close(weights[:, 0, -2:].double(), expected, rtol=1.2e-3, atol=1e-9)
