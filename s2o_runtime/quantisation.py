"""Rounding of keys and values, as the fp8 cache of a server does it."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import KvCacheDtype

FP8_MAX = 448.0  # the largest number of e4m3


def round_as_cached(tensor: Tensor, kv_cache_dtype: KvCacheDtype) -> Tensor:
    """Round keys or values as a server's cache does: "fp8" rounds to e4m3 with a scale of 1, and back.

    Numbers beyond what e4m3 has become its largest, 448, as in vLLM and SGLang.
    """
    if kv_cache_dtype == "auto":
        return tensor
    return tensor.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(tensor.dtype)
