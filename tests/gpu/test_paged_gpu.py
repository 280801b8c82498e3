"""The copy out of pages on a GPU, and the op on shuffled pages against the op on packed sequences."""

import pytest
import torch

from s2o_runtime import HeadConfig, LayerConfig, TileConfig
from s2o_runtime.attention import paged as paged_op
from s2o_runtime.attention.paged import gather_keys
from s2o_runtime.kernels.pages import gather_pages
from s2o_runtime.sequences import PagedKeys
from support.marks import pairwise
from support.paging import LAYOUTS, PagedBatch

LENGTHS, QUERIES = [1500, 333, 2049, 640], [1500, 1, 700, 129]
HOPPER = TileConfig(64, 128, 4, 4, 2, specialized=True)
HOPPER_256 = TileConfig(64, 64, 4, 4, 2, specialized=True)


def batch_of(page_size, name, kv_heads=2, head_dim=128, **cache):
    """Eight query heads in bfloat16."""
    sizes = {"heads": 8, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": torch.bfloat16, "device": "cuda"}
    return PagedBatch(QUERIES, LENGTHS, page_size, name, **sizes, **cache)


@pytest.mark.parametrize(
    ("name", "kv_heads", "head_dim", "page_size"), pairwise(LAYOUTS, [(2, 128), (1, 80), (3, 256)], [16, 48, 1024])
)
def test_every_key_is_found_in_its_page(name, kv_heads, head_dim, page_size, nan_filled):
    batch = batch_of(page_size, name, kv_heads, head_dim)
    pages = PagedKeys(*batch.caches, batch.table, batch.cu_k, max(LENGTHS), sum(LENGTHS)).validate(torch.bfloat16)
    for out, expected in zip(gather_pages(pages, torch.bfloat16), (batch.k, batch.v), strict=True):
        assert torch.equal(out, expected)


SCALES = {"k_scale": [0.5, 0.3], "v_scale": [0.7, 2.0]}
HEADS = {
    "alike": (HeadConfig(tau=0.5, segment=128, representatives=16, tail="mean"),) * 8,
    "some dense": (
        *(HeadConfig(tau=0.5, segment=256, tail="mean"),) * 3,
        *(HeadConfig(mode="dense"),) * 2,
        *(HeadConfig(tau=5.0, segment=128, representatives=16),) * 3,
    ),
}


@pytest.mark.parametrize(
    ("scales", "cache", "backend"), pairwise([0, 1, 2], [torch.float8_e4m3fn, torch.float8_e5m2], ["triton", "dense"])
)
def test_a_cache_of_eight_bits_is_its_rounded_keys(backend, scales, cache, nan_filled):
    """The op on it is bit for bit the op on the keys and values that it stands for."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with 8-bit floating point")
    config = LayerConfig(HEADS["some dense"], tile=TileConfig(64, 64, 2, 4, 2))
    factors = {name: torch.tensor(numbers, device="cuda")[:scales] for name, numbers in SCALES.items() if scales}
    batch = batch_of(16, LAYOUTS[2], cache=cache, scales=factors)
    for _ in range(3):  # compiled, recorded, replayed
        ours = batch.paged(config, total_k=sum(LENGTHS), backend=backend)
        assert torch.equal(ours, batch.packed(config, backend=backend))


@pytest.mark.parametrize(
    ("name", "heads", "page_size", "tile", "head_dim"),
    pairwise(
        LAYOUTS,
        [("alike", 16), ("some dense", 64), ("alike", 48), ("alike", 1024)],
        [(TileConfig(64, 64, 2, 4, 2), 128), (HOPPER, 128), (HOPPER_256, 256)],
    ),
)
def test_pages_change_nothing(tile, head_dim, name, heads, page_size, nan_filled, monkeypatch):
    """Bit for bit: the kernels read the same numbers, wherever they lie; in pages of 48 they want a copy."""
    copies = []
    monkeypatch.setattr(paged_op, "gather_keys", lambda *pages: copies.append(pages) or gather_keys(*pages))
    config = LayerConfig(HEADS[heads], tile=tile)
    batch = batch_of(page_size, name, head_dim=head_dim)
    for _ in range(3):  # compiled, recorded, replayed
        out = torch.full_like(batch.q, float("nan"))
        ours = batch.paged(config, total_k=sum(LENGTHS), backend="triton", return_lse=True, out=out)
        expected = batch.packed(config, backend="triton", return_lse=True)
        assert torch.equal(out, expected.out)
        assert torch.equal(ours.lse, expected.lse)
    assert bool(copies) == (page_size == 48)
