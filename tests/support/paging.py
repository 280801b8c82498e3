"""Packed keys and values laid into the shuffled pages of a cache."""

from functools import partial

import torch

from s2o_runtime.pages import packed_starts


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
    cu_k = packed_starts(torch.tensor(lengths, dtype=torch.int32))
    return *caches, block_table.to(k.device), cu_k.to(k.device)
