"""Views of vLLM's KV cache, whose layout differs between versions, as the paged op takes them.

One layer's cache is [pages, 2, page size, Hkv, D] up to 0.28 and [pages, Hkv, page size, 2 D] from 0.29 on, keys before
values. What lies next to what in memory is a matter of strides, which a user may set too; a view keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from s2o_runtime.errors import InputError

Layout = Literal["pages of two", "side by side"]
PROBED = (3, 16, 1, 16)  # pages, page size, KV heads and head dim, none of which is 2


def layout_of(cache_shape: Callable[..., Sequence[int]] | None) -> Layout:
    """The layout of a backend's caches.

    Args:
        cache_shape: the backend's `get_kv_cache_shape`; None where it has none, as from 0.32 on.

    Raises:
        InputError: no version that is known has such caches.
    """
    if cache_shape is None:
        return "side by side"
    shape = tuple(cache_shape(*PROBED))
    pages, page_size, kv_heads, head_dim = PROBED
    known: dict[tuple[int, ...], Layout] = {
        (pages, 2, page_size, kv_heads, head_dim): "pages of two",
        (pages, kv_heads, page_size, 2 * head_dim): "side by side",
    }
    if shape not in known:
        raise InputError(f"this vLLM's caches have shape {shape} for {PROBED}: expected one of {sorted(known)}")
    return known[shape]


def key_and_value_pages(cache: Tensor, layout: Layout, head_dim: int) -> tuple[Tensor, Tensor]:
    """The keys and the values of one layer's cache.

    Args:
        cache: in one of the layouts, with any strides.
        layout: which.
        head_dim: D.

    Returns:
        k and v, [pages, page size, Hkv, D] views.

    Raises:
        InputError: the cache has another shape.
    """
    dimensions, last = (4, 2 * head_dim) if layout == "side by side" else (5, head_dim)
    if cache.ndim != dimensions or cache.shape[-1] != last:
        raise InputError(
            f"the KV cache has shape {tuple(cache.shape)}: expected {dimensions} dimensions, the last of {last}, as "
            f'in layout "{layout}"'
        )
    if layout == "side by side":
        by_tokens = cache.transpose(1, 2)
        k, v = by_tokens[..., :head_dim], by_tokens[..., head_dim:]
    else:
        k, v = cache.unbind(1)
    if cache.dtype == torch.uint8:  # how vLLM stores fp8
        k, v = k.view(torch.float8_e4m3fn), v.view(torch.float8_e4m3fn)
    return k, v
