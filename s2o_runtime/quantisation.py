"""Int8 keys and queries in plain torch: the rule that reference and kernels share.

The keys of a KV head are k_d = middle_d + n_d unit_d up to rounding, with integers n_d from -127 to 127 and a middle
and a unit for each channel d. Then q . k = q . middle + (q unit) . n: the first term is the same for all keys, so no
softmax sees it, and q unit, rounded to 8 bits with a scale for each row, meets the integers in products of integers. No
key has a scale of its own, so a product becomes a score by one multiplication, whichever keys are gathered.

A unit follows its channel's range only in part (SMOOTHING): keys would like each channel to use all levels, but then q
unit is uneven. This is SmoothQuant's balance (Xiao et al. 2023, section 4) between the two operands.

`round_as_cached` is another rounding: of keys and values in the fp8 cache of a server.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .config import KvCacheDtype

FP8_MAX = 448.0  # the largest number of e4m3
LEVELS = 127
SMOOTHING = 0.7
SMALLEST = 1e-30  # the largest entry of a row, or of all channels, counts at least so much
NARROWEST = 1e-3  # a channel's range counts at least so much of the widest one's


class Quantised(NamedTuple):
    """Rows in 8 bits."""

    levels: Tensor  # int8 [..., D]
    scale: Tensor  # float32 (float64 for float64) [...], above 0

    def restore(self) -> Tensor:
        """Return the rows [..., D] that the integers stand for, in the scales' type."""
        return self.levels.to(self.scale.dtype) * self.scale[..., None]


class QuantisedKeys(NamedTuple):
    """The keys of one KV head in 8 bits."""

    levels: Tensor  # int8 [Lk, D]
    unit: Tensor  # float32 (float64 for float64) [D], above 0
    middle: Tensor  # like unit


class Int8Operands(NamedTuple):
    """Queries and keys of one head, or of several, whose products are int8 scores.

    The last dimension of q and k holds what the keys' middle adds to all scores of a query.
    """

    q: Tensor  # [..., Lq, D + 1]
    k: Tensor  # [..., Lk, D + 1]
    unit: Tensor  # [..., D], of the keys' channels

    @classmethod
    def from_head(cls, q: Tensor, k: Tensor, start: int = 0) -> Int8Operands:
        """Make operands from scaled queries [Lq, D] and keys [Lk, D] of one head; start: the first key that counts."""
        levels, unit, middle = quantise_keys(k, start)
        keys = torch.cat([levels.to(unit.dtype), torch.ones_like(levels[:, :1], dtype=unit.dtype)], 1)
        return cls(torch.cat([quantise(q * unit).restore(), (q @ middle)[:, None]], 1), keys, unit)

    @classmethod
    def from_heads(cls, q: Tensor, k: Tensor) -> Int8Operands:
        """Make operands from scaled queries [H, Lq, D] and keys [H, Lk, D]."""
        of_heads = [cls.from_head(of_head, keys) for of_head, keys in zip(q, k, strict=True)]
        return cls(*(torch.stack(parts) for parts in zip(*of_heads, strict=True)))

    def representatives(self, means: Tensor) -> Tensor:
        """Round means of queries [..., R, D] to [..., R, D + 1], without the middle, which moves all scores alike."""
        rounded = quantise(means * self.unit[..., None, :]).restore()
        return torch.cat([rounded, torch.zeros_like(rounded[..., :1])], -1)


def quantise(rows: Tensor) -> Quantised:
    """Round rows [..., D], each with a scale of its own."""
    exact = rows if rows.dtype == torch.float64 else rows.float()
    scale = exact.abs().amax(-1).clamp_min(SMALLEST) * (1 / LEVELS)
    return Quantised((exact * (1 / scale)[..., None]).round().to(torch.int8), scale)


def quantise_keys(k: Tensor, start: int = 0) -> QuantisedKeys:
    """Round the keys [Lk, D] of one KV head; those before `start` do not count, and their levels mean nothing."""
    exact = k if k.dtype == torch.float64 else k.float()
    counted = exact[start:] if start < len(k) else torch.zeros_like(exact[:1])
    low, high = counted.amin(0), counted.amax(0)
    middle, half = (low + high) * 0.5, (high - low) * 0.5
    widest = half.amax().clamp_min(SMALLEST)
    unit = widest * (half / widest).clamp_min(NARROWEST) ** SMOOTHING * (1 / LEVELS)
    levels = ((exact - middle) * (1 / unit)).round().clamp(-LEVELS, LEVELS)
    return QuantisedKeys(levels.to(torch.int8), unit, middle)


def round_as_cached(tensor: Tensor, kv_cache_dtype: KvCacheDtype) -> Tensor:
    """Round keys or values as a server's cache does: "fp8" rounds to e4m3 with a scale of 1, and back.

    Numbers beyond what e4m3 has become its largest, 448, as in vLLM and SGLang.
    """
    if kv_cache_dtype == "auto":
        return tensor
    return tensor.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(tensor.dtype)
