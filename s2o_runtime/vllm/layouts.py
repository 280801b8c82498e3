"""Views of vLLM's KV cache, whose layout differs between versions, as the paged op takes them."""

from __future__ import annotations

import torch
from torch import Tensor

from s2o_runtime.errors import InputError


def key_and_value_pages(cache: Tensor, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """The keys and the values of one layer's cache: k and v, [pages, page size, Hkv, D] views.

    Args:
        cache: [pages, 2, page size, Hkv, D] as up to 0.28, or [pages, Hkv, page size, 2 D], keys before values, as from
            0.29 on. Strides are a matter of settings too; a view keeps them.
        kv_heads, head_dim: Hkv and D.

    Raises:
        InputError: the cache has another shape.
    """
    if cache.ndim == 5 and cache.shape[1] == 2 and cache.shape[3:] == (kv_heads, head_dim):
        k, v = cache.unbind(1)
    elif cache.ndim == 4 and (cache.shape[1], cache.shape[3]) == (kv_heads, 2 * head_dim):
        by_tokens = cache.transpose(1, 2)
        k, v = by_tokens[..., :head_dim], by_tokens[..., head_dim:]
    else:
        raise InputError(
            f"the KV cache has shape {tuple(cache.shape)}: expected [pages, {kv_heads}, page size, {2 * head_dim}] or "
            f"[pages, 2, page size, {kv_heads}, {head_dim}]"
        )
    if cache.dtype == torch.uint8:  # how vLLM stores fp8
        k, v = k.view(torch.float8_e4m3fn), v.view(torch.float8_e4m3fn)
    return k, v
