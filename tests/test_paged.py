"""Keys and values in pages: the copy out of them, and the op on shuffled pages against the op on packed sequences."""

import pytest
import torch

from s2o_runtime import InputError, LayerConfig, TileConfig, s2o_attention_paged, s2o_attention_varlen
from s2o_runtime.attention.paged import gathered
from s2o_runtime.devices import interpreted
from s2o_runtime.pages import PagedKeys, packed_starts
from s2o_runtime.reference.pages import gather_pages_reference
from support.marks import all_but_first
from support.paging import LAYOUTS, paged

pytestmark = pytest.mark.usefixtures("small_sample")

SLOW = pytest.mark.slow(reason="Triton's interpreter runs a kernel's programs one after another")
INTERPRETED = pytest.mark.skipif(not interpreted(), reason="a GPU is here, so kernels are compiled: see tests/gpu")
CONFIG = LayerConfig.uniform(4, tau=1.0, segment=64, grain=4, tile=TileConfig(64, 32, 2, 4, 1))


def keys(lengths, kv_heads=2, head_dim=64, dtype=torch.float32):
    return torch.randn(2, sum(lengths), kv_heads, head_dim).to(dtype).unbind(0)


def pages_of(lengths, page_size, name, dtype=torch.float32, cache=None, head_dim=64, total_k=None, **scales):
    k, v = keys(lengths, dtype=dtype, head_dim=head_dim)
    k_cache, v_cache, table, cu_k = paged(k, v, lengths, page_size, name, cache)
    pages = PagedKeys(k_cache, v_cache, table, cu_k, max(lengths), total_k or sum(lengths), **scales)
    return k, v, pages.validate(dtype)


@pytest.mark.parametrize("gather", [gather_pages_reference, pytest.param(gathered, marks=INTERPRETED)])
@pytest.mark.parametrize("page_size", [1, 16, 48])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_key_is_found_in_its_page(gather, page_size, name, nan_filled):
    lengths = [37, 1, 16, 70]
    k, v, pages = pages_of(lengths, page_size, name)
    assert all(torch.equal(*pair) for pair in zip(gather(pages, torch.float32), (k, v), strict=True))


@INTERPRETED
def test_odd_head_dims_and_a_larger_output(nan_filled):
    """Rows behind the last key are nobody's."""
    k, _, pages = pages_of([20, 33], 16, LAYOUTS[0], torch.float16, head_dim=80, total_k=64)
    k_out, _ = gathered(pages, torch.float16)
    assert k_out.shape == (64, 2, 80)
    assert torch.equal(k_out[:53], k)
    assert gather_pages_reference(pages, torch.float16)[0][:53].equal(k)


@pytest.mark.parametrize("gather", [gather_pages_reference, pytest.param(gathered, marks=INTERPRETED)])
@pytest.mark.parametrize("scales", [{}, {"k_scale": [0.5], "v_scale": [1.0, 2.0]}], ids=["plain", "scaled"])
def test_keys_of_eight_bits_are_scaled(gather, scales, nan_filled):
    scales = {name: torch.tensor(values) for name, values in scales.items()}
    k, v, pages = pages_of([37, 20], 16, LAYOUTS[2], torch.float16, torch.float8_e4m3fn, **scales)
    for rows, out, scale in zip((k, v), gather(pages, torch.float16), ("k_scale", "v_scale"), strict=True):
        factor = scales.get(scale, torch.ones(1))[:, None]
        assert torch.equal(out, (rows.to(torch.float8_e4m3fn).float() * factor).half())


def call(lengths, queries, page_size, name, backend, **options):
    """The op on pages and on packed keys, and what else both were given."""
    k, v = keys(lengths)
    q = torch.randn(sum(queries), 4, 64) * 2
    cu_q = packed_starts(torch.tensor(queries, dtype=torch.int32))
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    k_cache, v_cache, table, cu_k = paged(k, v, lengths, page_size, name)
    ours = s2o_attention_paged(
        q, k_cache, v_cache, CONFIG,
        cu_q=cu_q, seq_lens=seq_lens, block_table=table, max_q=max(queries), max_k=max(lengths), backend=backend,
        **options,
    )  # fmt: skip
    options = {option: value for option, value in options.items() if option.startswith("return")}
    expected = s2o_attention_varlen(q, k, v, cu_q, cu_k, max(queries), max(lengths), CONFIG, backend=backend, **options)
    return ours, expected


@pytest.mark.parametrize("name", all_but_first(LAYOUTS, SLOW))
@pytest.mark.parametrize("backend", ["reference", "dense", pytest.param("triton", marks=[INTERPRETED, SLOW])])
def test_pages_change_nothing(backend, name, nan_filled):
    """Queries behind a cached prefix, a whole prompt, and one query."""
    ours, expected = call(
        [171, 130, 90], [70, 130, 1], 16, name, backend, return_lse=True, return_stats=True, total_k=400
    )
    assert torch.equal(ours.out, expected.out)
    assert torch.equal(ours.lse, expected.lse)
    assert ours.stats.backend == backend
    assert torch.equal(ours.density, expected.density)


def test_the_output_may_be_given():
    out = torch.full((70, 4, 64), float("nan"))
    ours, expected = call([171], [70], 16, LAYOUTS[1], "reference", out=out)
    assert ours is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"k_cache": torch.zeros(9, 16, 2, 64).half()}, r"k_cache is torch\.float16: expected torch\.float32"),
        ({"v_cache": torch.zeros(9, 16, 2, 32)}, r"v_cache is torch\.float32 \(9, 16, 2, 32\) but k_cache"),
        ({"k_cache": torch.zeros(9, 16, 64, 2).mT}, r"k_cache has shape .* the last dimension contiguous"),
        ({"block_table": torch.zeros(2, 9, dtype=torch.int32)}, r"block_table is torch\.int32 \(2, 9\)"),
        ({"block_table": torch.zeros(1, 9)}, r"block_table is torch\.float32"),
        ({"max_k": 200}, r"max_k is 200 but a row of block_table has 9 pages of 16"),
        ({"total_k": 99}, r"total_k is 99 but max_k 100"),
        ({"seq_lens": torch.tensor([100, 1], dtype=torch.int32)}, r"seq_lens is torch\.int32 \(2,\)"),
        ({"k_scale": torch.ones(1)}, r"k_scale is given but the cache is torch\.float32"),
        ({"out": torch.zeros(50, 4, 32)}, r"out is torch\.float32 \(50, 4, 32\) on cpu: expected"),
        ({"q": torch.zeros(50, 3, 64)}, r"3 query heads cannot share 2 KV heads"),
    ],
)
def test_what_does_not_fit_is_one_sentence(change, said):
    tensors = {"q": torch.zeros(50, 4, 64), "k_cache": torch.zeros(9, 16, 2, 64), "v_cache": torch.zeros(9, 16, 2, 64)}
    others = {
        "cu_q": torch.tensor([0, 50], dtype=torch.int32),
        "seq_lens": torch.tensor([100], dtype=torch.int32),
        "block_table": torch.zeros(1, 9, dtype=torch.int32),
        "max_q": 50,
        "max_k": 100,
    }
    given = {**tensors, **others, **change}
    with pytest.raises(InputError, match=said):
        s2o_attention_paged(*(given.pop(name) for name in tensors), CONFIG, **given)


def test_pages_may_not_be_larger_than_a_kernel_was_tried_with():
    k, _, pages = pages_of([37], 1024, LAYOUTS[0])
    assert torch.equal(gather_pages_reference(pages, torch.float32)[0], k)
    with pytest.raises(InputError, match="pages have 2048 tokens: use at most 1024"):
        pages_of([37], 2048, LAYOUTS[0])
