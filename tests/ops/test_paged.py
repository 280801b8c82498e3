"""Keys and values in pages: the copy out of them, and the op on shuffled pages against the op on packed sequences."""

import re

import pytest
import torch

from s2o_runtime import HeadConfig, InputError, LayerConfig, s2o_attention_paged
from s2o_runtime.attention import paged as paged_op
from s2o_runtime.attention.paged import find_in_place_obstacle, gather_keys
from s2o_runtime.kernels import prefill as prefill_module
from s2o_runtime.kernels.pages import gather_pages
from s2o_runtime.sequences import PagedKeys
from support.kernels import DEVICE, DTYPE, HOPPER, ON_GPU, PLAIN, TILE, TILES
from support.marks import INTERPRETED, MORE_CASES, all_but_first, pairwise
from support.paging import LAYOUTS, PagedBatch

SLOW = pytest.mark.slow(reason="Triton's interpreter runs a kernel's programs one after another")
CONFIG = LayerConfig.uniform(4, tau=1.0, segment=64, tile=TILE)
SPECIALIZED = LayerConfig.uniform(4, segment=128, tile=HOPPER)
LENGTHS, QUERIES = ([1500, 333, 2049, 640], [1500, 1, 700, 129]) if ON_GPU else ([371, 330, 90], [270, 330, 1])

PAGE_SIZES = [16, 64, 48, 1024] if ON_GPU else [4, 64, 48]


def config_of(tile):
    """Heads of all kinds."""
    kinds = (
        HeadConfig(1.0, tile.rows, representatives=16, tail="mean"),
        HeadConfig(mode="dense"),
        HeadConfig(0.0, 2 * tile.rows),
        HeadConfig(20.0, tile.rows),
    )
    return LayerConfig(kinds, tile, 64, 128)


def batch_of(page_size=16, name=LAYOUTS[2], **options):
    return PagedBatch(QUERIES, LENGTHS, page_size, name, **{"heads": 4, "dtype": DTYPE, "device": DEVICE} | options)


@pytest.mark.parametrize(
    ("name", "kv_heads", "head_dim", "page_size"),
    pairwise(LAYOUTS, [(2, 64), (1, 80), (4, 256)], [16, 48, 1024] if ON_GPU else [1, 16, 48], mark=SLOW, count=4),
)
def test_every_key_is_found_in_its_page(name, kv_heads, head_dim, page_size, nan_filled):
    """Rows behind the last key are nobody's."""
    batch = batch_of(page_size, name, kv_heads=kv_heads, head_dim=head_dim)
    pages = PagedKeys(*batch.caches, batch.table, batch.cu_k, max(LENGTHS), len(batch.k) + 11).validate(DTYPE)
    for gather in (PagedKeys.gathered, gather_keys, gather_pages):
        for out, expected in zip(gather(pages, DTYPE), (batch.k, batch.v), strict=True):
            assert len(out) == len(expected) + 11
            assert torch.equal(out[: len(expected)], expected)


SCALES = {"k_scale": [0.5, 0.3], "v_scale": [0.7, 2.0]}


@pytest.mark.parametrize(
    ("scales", "cache", "backend"),
    pairwise([0, 1, 2], [torch.float8_e4m3fn, torch.float8_e5m2], ["reference", "dense"])
    + all_but_first([(2, torch.float8_e4m3fn, "triton"), (1, torch.float8_e5m2, "triton")], SLOW, 0),
)
def test_a_cache_of_eight_bits_is_its_rounded_keys(scales, cache, backend, nan_filled):
    """The op on it is bit for bit the op on the keys and values that it stands for."""
    if ON_GPU and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with 8-bit floating point")
    factors = {name: torch.tensor(numbers, device=DEVICE)[:scales] for name, numbers in SCALES.items() if scales}
    batch = batch_of(cache=cache, scales=factors)
    options = {"backend": backend, "return_stats": True}
    for _ in range(3 if ON_GPU else 1):  # compiled, recorded, replayed
        same(batch.paged(config_of(PLAIN), **options), batch.packed(config_of(PLAIN), **options))


def same(ours, expected):
    """Bit for bit, as far as they were asked for."""
    assert torch.equal(ours.out, expected.out)
    assert ours.lse is expected.lse is None or torch.equal(ours.lse, expected.lse)
    assert torch.equal(ours.density, expected.density)


@pytest.mark.parametrize(
    ("name", "page_size", "backend", "splits", "tile", "head_dim"),
    all_but_first(
        [(LAYOUTS[0], 16, "reference", 1, PLAIN, 64), (LAYOUTS[1], 4, "dense", 1, PLAIN, 64)]
        + pairwise(LAYOUTS, PAGE_SIZES, ["triton"], [8, 1], TILES[::2], mark=MORE_CASES, count=4),
        SLOW, 2,
    ),
)  # fmt: skip
def test_pages_change_nothing(name, page_size, backend, splits, tile, head_dim, nan_filled, monkeypatch):
    """Bit for bit: the kernels read the same numbers, wherever they lie; only in pages of 48 they want a copy."""
    copies = []
    monkeypatch.setattr(prefill_module, "count_key_splits", lambda *_: splits)
    monkeypatch.setattr(paged_op, "gather_keys", lambda *pages: copies.append(pages) or gather_keys(*pages))
    batch = batch_of(page_size, name, head_dim=head_dim)
    options = {"backend": backend, "return_lse": page_size != 64, "return_stats": True}  # splits keep theirs anyway
    sinks = torch.linspace(-1.0, 4.0, 4, device=DEVICE).to(DTYPE)
    options |= {"softcap": 4.0, "sinks": sinks} if page_size in (16, 64) else {}
    for _ in range(3 if ON_GPU else 1):  # compiled, recorded, replayed
        out = torch.full_like(batch.q, float("nan"))
        ours = batch.paged(config_of(tile), total_k=len(batch.k), out=out, **options)
        assert ours.out is out
        assert ours.stats.backend == backend
        same(ours, batch.packed(config_of(tile), **options))
    assert bool(copies) == (page_size == 48 or backend != "triton")


@INTERPRETED  # as compiled kernels take no float32
@pytest.mark.parametrize(
    ("change", "config", "said"),
    [
        ({}, CONFIG, None),
        ({"k": torch.zeros(9, 16, 2, 64).half()}, CONFIG, "the cache is torch.float16"),
        ({"page": 48}, CONFIG, "pages have 48 tokens, not a power of two"),
        ({"v": torch.zeros(9, 2, 16, 64).transpose(1, 2)}, CONFIG, "are not alike rows"),
        ({"k": torch.zeros(16, 9, 2, 64).transpose(0, 1)}, CONFIG, "are not alike rows"),
        ({"page": 2}, CONFIG, "pages have 2 tokens, fewer than the 4 of a step"),
        ({"width": 80}, CONFIG, "head_dim 80 is filled up with zeros"),
        ({"between": 66}, CONFIG, None),
        ({"between": 66}, SPECIALIZED, "multiples of 16 bytes"),
        ({"pages": 1 << 21}, CONFIG, None),
        ({"pages": 1 << 21}, SPECIALIZED, r"2\^31 elements or more"),
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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"k_cache": torch.zeros(9, 16, 2, 64).half()}, r"k_cache is torch\.float16: expected torch\.float32"),
        ({"v_cache": torch.zeros(9, 16, 2, 32)}, r"v_cache is torch\.float32 \(9, 16, 2, 32\) but k_cache"),
        ({"k_cache": torch.zeros(9, 16, 64, 2).mT}, r"k_cache has shape .* the last dimension contiguous"),
        ({"block_table": torch.zeros(2, 9, dtype=torch.int32)}, r"block_table is torch\.int32 \(2, 9\)"),
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
    numbers = torch.tensor([0, 50, 100], dtype=torch.int32)
    table = torch.zeros(1, 9, dtype=torch.int32)
    others = {"cu_q": numbers[:2], "seq_lens": numbers[2:], "block_table": table, "max_q": 50, "max_k": 100}
    given = {**tensors, **others, **change}
    with pytest.raises(InputError, match=said):
        s2o_attention_paged(*(given.pop(name) for name in tensors), CONFIG, **given)
