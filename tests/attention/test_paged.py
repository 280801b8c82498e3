"""Keys and values in pages: the copy out of them, and the op on shuffled pages against the op on packed sequences."""

import re
from dataclasses import replace

import pytest
import torch

from s2o_runtime import HeadConfig, InputError, LayerConfig, TileConfig, s2o_attention_paged
from s2o_runtime.attention import paged as paged_op
from s2o_runtime.attention.paged import find_in_place_obstacle, gather_keys
from s2o_runtime.sequences import PagedKeys
from support.marks import INTERPRETED, pairwise
from support.paging import LAYOUTS, PagedBatch, paged

SLOW = pytest.mark.slow(reason="Triton's interpreter runs a kernel's programs one after another")
TILE = TileConfig(64, 32, 2, 4, 1)
CONFIG = LayerConfig.uniform(4, tau=1.0, segment=64, tile=TILE)
OF_ALL_KINDS = LayerConfig(
    (
        HeadConfig(tau=1.0, segment=64, representatives=16, tail="mean"),
        HeadConfig(mode="dense"),
        HeadConfig(tau=0.0, segment=128),
        HeadConfig(tau=20.0, segment=64),
    ),
    tile=TILE,
)
HOPPER = LayerConfig.uniform(4, segment=128, tile=TileConfig(64, 128, 4, 4, 2, True))
STEEP = LayerConfig.uniform(4, tau=1.0, segment=64, tile=TILE)


def keys(lengths, kv_heads=2, head_dim=64, dtype=torch.float32):
    return torch.randn(2, sum(lengths), kv_heads, head_dim).to(dtype).unbind(0)


def pages_of(lengths, page_size, name, dtype=torch.float32, cache=None, head_dim=64, total_k=None, **scales):
    k, v = keys(lengths, dtype=dtype, head_dim=head_dim)
    k_cache, v_cache, table, cu_k = paged(k, v, lengths, page_size, name, cache)
    pages = PagedKeys(k_cache, v_cache, table, cu_k, max(lengths), total_k or sum(lengths), **scales)
    return k, v, pages.validate(dtype)


@INTERPRETED
@pytest.mark.parametrize(("name", "page_size"), pairwise(LAYOUTS, [1, 16, 48], mark=SLOW, count=4))
def test_every_key_is_found_in_its_page(name, page_size, nan_filled):
    lengths = [37, 1, 16, 70]
    k, v, pages = pages_of(lengths, page_size, name)
    for gather in (PagedKeys.gathered, gather_keys):
        assert all(torch.equal(*pair) for pair in zip(gather(pages, torch.float32), (k, v), strict=True))


@INTERPRETED
def test_odd_head_dims_and_a_larger_output(nan_filled):
    """Rows behind the last key are nobody's."""
    k, _, pages = pages_of([20, 33], 16, LAYOUTS[0], torch.float16, head_dim=80, total_k=64)
    k_out, _ = gather_keys(pages, torch.float16)
    assert k_out.shape == (64, 2, 80)
    assert torch.equal(k_out[:53], k)
    assert pages.gathered(torch.float16)[0][:53].equal(k)


@pytest.mark.parametrize("gather", [PagedKeys.gathered, pytest.param(gather_keys, marks=INTERPRETED)])
@pytest.mark.parametrize("scales", [{}, {"k_scale": [0.5], "v_scale": [1.0, 2.0]}], ids=["plain", "scaled"])
def test_keys_of_eight_bits_are_scaled(gather, scales, nan_filled):
    scales = {name: torch.tensor(values) for name, values in scales.items()}
    k, v, pages = pages_of([37, 20], 16, LAYOUTS[2], torch.float16, torch.float8_e4m3fn, **scales)
    for rows, out, scale in zip((k, v), gather(pages, torch.float16), ("k_scale", "v_scale"), strict=True):
        factor = scales.get(scale, torch.ones(1))[:, None]
        assert torch.equal(out, (rows.to(torch.float8_e4m3fn).float() * factor).half())


def same(ours, expected):
    """Bit for bit, as far as they were asked for."""
    assert torch.equal(ours.out, expected.out)
    assert ours.lse is expected.lse is None or torch.equal(ours.lse, expected.lse)
    assert torch.equal(ours.density, expected.density)


def call(lengths, queries, page_size, name, backend, config=CONFIG, **options):
    """The op on pages and on packed keys, and what else both were given."""
    batch = PagedBatch(queries, lengths, page_size, name)
    batch.q *= 2
    ours = batch.paged(config, backend=backend, **options)
    options = {option: value for option, value in options.items() if option.startswith("return")}
    return ours, batch.packed(config, backend=backend, **options)


@pytest.mark.parametrize(
    ("backend", "name"), [("reference", LAYOUTS[0]), ("dense", LAYOUTS[1]), ("reference", LAYOUTS[2])]
)
def test_pages_change_nothing(backend, name, nan_filled):
    """Queries behind a cached prefix, a whole prompt, and one query."""
    ours, expected = call(
        [171, 130, 90], [70, 130, 1], 16, name, backend, return_lse=True, return_stats=True, total_k=400
    )
    same(ours, expected)
    assert ours.stats.backend == backend


@pytest.mark.parametrize(
    ("scales", "backend", "cache"),
    [
        pytest.param(None, "reference", torch.float8_e5m2, id="plain-reference"),
        pytest.param(None, "dense", torch.float8_e4m3fn, id="plain-dense"),
        pytest.param([0.5], "reference", torch.float8_e4m3fn, id="per-tensor"),
        pytest.param([0.5, 2.0], "dense", torch.float8_e5m2, id="per-head"),
    ],
)
def test_a_cache_of_eight_bits_is_its_rounded_keys(backend, scales, cache, nan_filled):
    """Bit for bit the op on the keys and values that the cache stands for."""
    given = {} if scales is None else {"k_scale": torch.tensor(scales), "v_scale": torch.tensor(scales[::-1])}
    batch = PagedBatch([70, 130, 1], [171, 130, 90], cache=cache, scales=given)
    options = {"backend": backend, "return_stats": True}
    same(batch.paged(OF_ALL_KINDS, **options), batch.packed(OF_ALL_KINDS, **options))


@pytest.fixture
def copies(monkeypatch):
    """The pages that were copied, call by call."""
    made = []

    def spied(pages, dtype):
        made.append(pages)
        return gather_keys(pages, dtype)

    monkeypatch.setattr(paged_op, "gather_keys", spied)
    return made


@INTERPRETED
@SLOW
@pytest.mark.parametrize(
    ("config", "page_size"),
    [(OF_ALL_KINDS, 4), (STEEP, 64), (OF_ALL_KINDS, 48)],
    ids=["4, a step each", "64", "48, no power of two"],
)
def test_the_kernels_read_keys_where_they_lie(config, page_size, copies, nan_filled):
    ours, expected = call(
        [171, 70, 90], [40, 70, 1], page_size, LAYOUTS[1], "triton", config, return_lse=True, return_stats=True
    )
    same(ours, expected)
    assert len(copies) == (page_size == 48)


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_of_a_cache_are_its_keys(name):
    lengths = [37, 1, 70]
    k, v, pages = pages_of(lengths, 16, name)
    assert pages.find_rows_obstacle(torch.float32) is None
    table, shift, apart = pages.table
    key = torch.cat([torch.arange(length) for length in lengths])
    sequence = torch.arange(3).repeat_interleave(torch.tensor(lengths))
    row = table[sequence, key >> shift] * apart + key % 16
    for rows, expected in zip(pages.rows, (k, v), strict=True):
        assert torch.equal(rows[row], expected)


@pytest.mark.parametrize(
    ("change", "config", "said"),
    [
        ({}, CONFIG, None),
        ({"k": torch.zeros(9, 16, 2, 64).half()}, CONFIG, "the cache is torch.float16"),
        ({"page": 48}, CONFIG, "pages have 48 tokens, not a power of two"),
        ({"v": torch.zeros(9, 2, 16, 64).transpose(1, 2)}, CONFIG, "are not alike rows"),
        ({"k": torch.zeros(16, 9, 2, 64).transpose(0, 1)}, CONFIG, "are not alike rows"),
        ({}, replace(CONFIG, scores="int8"), "int8 scores are of keys that were rounded"),
        ({"page": 2}, CONFIG, "pages have 2 tokens, fewer than the 4 of a step"),
        ({"width": 80}, CONFIG, "head_dim 80 is filled up with zeros"),
        ({"between": 66}, CONFIG, None),
        ({"between": 66}, HOPPER, "multiples of 16 bytes"),
        ({"pages": 1 << 21}, CONFIG, None),
        ({"pages": 1 << 21}, HOPPER, r"2\^31 elements or more"),
    ],
)
def test_why_a_copy_is_wanted(change, config, said):
    pages, page, width = change.get("pages", 9), change.get("page", 16), change.get("width", 64)
    between = change.get("between", width)  # elements from one row to the next, of two heads
    empty = torch.empty(pages, page, 2, between, device="meta")[..., :width]  # no memory
    k, v = (change.get(name, empty) for name in "kv")
    table = torch.zeros(1, 9, dtype=torch.int32)
    keys = PagedKeys(k, v, table, torch.tensor([0, 9 * page]), 9 * page, 9 * page)
    obstacle = find_in_place_obstacle(keys, config, torch.float32)
    assert obstacle is None if said is None else re.search(said, obstacle)


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
        ({"is_causal": True}, r"^s2o_attention_paged\(\) has no argument is_causal"),
    ],
)
def test_what_does_not_fit_is_one_sentence(change, said):
    tensors = {"q": torch.zeros(50, 4, 64), "k_cache": torch.zeros(9, 16, 2, 64), "v_cache": torch.zeros(9, 16, 2, 64)}
    numbers = torch.tensor([0, 50, 100], dtype=torch.int32)
    table = torch.zeros(1, 9, dtype=torch.int32)
    others = {"cu_q": numbers[:2], "seq_lens": numbers[2:], "block_table": table, "max_q": 50, "max_k": 100}
    given = {**tensors, **others, **change}
    with pytest.raises(InputError, match=said):
        s2o_attention_paged(*(given.pop(name) for name in tensors), CONFIG, **given)


def test_pages_may_not_be_larger_than_a_kernel_was_tried_with():
    k, _, pages = pages_of([37], 1024, LAYOUTS[0])
    assert torch.equal(pages.gathered(torch.float32)[0], k)
    with pytest.raises(InputError, match="pages have 2048 tokens, more than 1024: use smaller ones"):
        pages_of([37], 2048, LAYOUTS[0])
