"""Packed keys and values laid into the shuffled pages of a cache."""

from functools import partial

import torch

from s2o_runtime import s2o_attention_paged, s2o_attention_varlen
from s2o_runtime.sequences import make_packed_starts


def layout(name, pages, page_size, kv_heads, head_dim, dtype, device):
    """A cache of zeros: its k and its v as [pages, page size, Hkv, D] views, in one of the layouts that servers use."""
    zeros = partial(torch.zeros, dtype=dtype, device=device)
    if name == "two caches":  # (2, pages, page size, Hkv, D)
        return zeros(2, pages, page_size, kv_heads, head_dim).unbind(0)
    if name == "pages of two":  # (pages, 2, page size, Hkv, D)
        return zeros(pages, 2, page_size, kv_heads, head_dim).unbind(1)
    if name == "side by side":  # (pages, Hkv, page size, 2 D)
        return zeros(pages, kv_heads, page_size, 2 * head_dim).transpose(1, 2).split(head_dim, -1)
    assert name == "side by side, by tokens"  # the same, where memory has (pages, page size, Hkv, 2 D)
    return zeros(pages, page_size, kv_heads, 2 * head_dim).split(head_dim, -1)


LAYOUTS = ("two caches", "pages of two", "side by side", "side by side, by tokens")


def paged(k, v, lengths, page_size, name="side by side", dtype=None):
    """k and v [Tk, Hkv, D], sequences of these lengths packed, in pages that are scattered over a cache.

    What is no key of theirs is NaN. Returns k_cache, v_cache, block_table int32 [N, M] and cu_k int32 [N + 1].
    """
    needed = [-(-length // page_size) for length in lengths]
    pages, dtype = sum(needed) + 3, dtype or k.dtype
    shuffled = torch.randperm(pages)[: sum(needed)].split(needed)
    block_table = torch.full((len(lengths), max(needed) + 1), -1, dtype=torch.int32)
    page, slot = [], []
    for sequence, (own, length) in enumerate(zip(shuffled, lengths, strict=True)):
        block_table[sequence, : len(own)] = own
        for token in range(length):
            page.append(int(own[token // page_size]))
            slot.append(token % page_size)
    caches = layout(name, pages, page_size, k.shape[1], k.shape[2], dtype, k.device)
    for cache, rows in zip(caches, (k, v), strict=True):
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]  # indexing knows no fp8
        nan = torch.full((1,), float("nan"), device=k.device).to(dtype).view(bits)
        cache.view(bits)[:] = nan
        cache.view(bits)[page, slot] = rows.to(dtype).view(bits)
    cu_k = make_packed_starts(torch.tensor(lengths, dtype=torch.int32))
    return *caches, block_table.to(k.device), cu_k.to(k.device)


class PagedBatch:
    """Random queries of some sequences, packed, and their keys and values: packed, and in the pages of a cache.

    Args:
        queries, lengths: Queries and keys of each sequence.
        page_size, name: Of the pages and their layout.
        cache: The type of the cache, if it is narrower; keys and values are what it stands for.
        scales: `k_scale` and `v_scale` of such a cache.
        bounds: The most queries and keys that a call tells of; those of the longest sequences by default.
    """

    def __init__(
        self, queries, lengths, page_size=16, name="side by side", *, heads=4, kv_heads=2, head_dim=64,
        dtype=torch.float32, device="cpu", cache=None, scales=None, bounds=None,
    ):  # fmt: skip
        self.q = torch.randn(sum(queries), heads, head_dim, device=device).to(dtype)
        k, v = torch.randn(2, sum(lengths), kv_heads, head_dim, device=device).to(dtype).unbind(0)
        *self.caches, self.table, self.cu_k = paged(k, v, lengths, page_size, name, cache)
        self.scales = scales or {}
        if cache is not None:
            factors = (self.scales.get(name, torch.ones(1, device=device)) for name in ("k_scale", "v_scale"))
            k, v = ((rows.to(cache).float() * by[:, None]).to(dtype) for rows, by in zip((k, v), factors, strict=True))
        self.k, self.v = k, v
        self.cu_q = make_packed_starts(torch.tensor(queries, dtype=torch.int32)).to(device)
        self.bounds = bounds or (max(queries), max(lengths))

    def paged(self, config, **options):
        """The op on the pages."""
        return s2o_attention_paged(
            self.q, *self.caches, config, cu_q=self.cu_q, seq_lens=self.cu_k.diff(), block_table=self.table,
            max_q=self.bounds[0], max_k=self.bounds[1], **self.scales, **options,
        )  # fmt: skip

    def packed(self, config, **options):
        """The op on packed keys and values."""
        return s2o_attention_varlen(self.q, self.k, self.v, self.cu_q, self.cu_k, *self.bounds, config, **options)
