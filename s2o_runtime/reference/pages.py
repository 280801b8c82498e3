"""Keys and values out of their pages, in plain torch: what the kernel in kernels/pages.py is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from s2o_runtime.pages import PagedKeys


def gather_pages_reference(pages: PagedKeys, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Copy keys and values out of their pages, packed one sequence behind another.

    Args:
        pages: where they lie.
        dtype: of the result; an fp8 cache is scaled in float32 and rounded to it.

    Returns:
        k and v, [total_k, Hkv, D]; rows behind the last key repeat it.
    """
    token = torch.arange(pages.total_k, device=pages.k.device, dtype=torch.int32)
    edges = pages.cu_k
    sequence = torch.searchsorted(edges[1:].contiguous(), token, right=True).clamp_max(len(edges) - 2)
    position = torch.minimum(token - edges[sequence], edges[sequence + 1] - edges[sequence] - 1).clamp_min(0)
    page = pages.block_table[sequence, position // pages.page_size].long()
    slot = (position % pages.page_size).long()
    k, v = (_rows(cache, page, slot) for cache in (pages.k, pages.v))
    return _scaled(k, pages.k_scale, dtype), _scaled(v, pages.v_scale, dtype)


def _rows(cache: Tensor, page: Tensor, slot: Tensor) -> Tensor:
    """[total_k, Hkv, D] of a cache; indexing knows no fp8, so such rows are moved as bytes."""
    if cache.dtype.itemsize > 1:
        return cache[page, slot]
    return cache.view(torch.uint8)[page, slot].view(cache.dtype)


def _scaled(rows: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    if rows.dtype == dtype:
        return rows
    return (rows.float() if scale is None else rows.float() * scale[:, None]).to(dtype)
