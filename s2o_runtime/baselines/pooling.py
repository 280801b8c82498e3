"""Means of blocks of rows, and how alike the rows of a block are."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from s2o_runtime.baselines.selection import as_slice, parts, split, wide


class Pooled(NamedTuple):
    """Blocks of rows: their means [B, H, blocks, D] and self-similarities [B, H, blocks]; float32."""

    mean: Tensor
    similarity: Tensor


def block_means(x: Tensor, block: int) -> Tensor:
    """x: [B, H, L, D] to [B, H, ceil(L / block), D]; the mean of a shorter last block is of its rows."""
    whole = x.shape[2] // block * block
    dtype = wide(x.dtype)
    mean = split(x[:, :, :whole], 2, block).mean(3, dtype=dtype) if whole else x[:, :, :0].to(dtype)
    if whole == x.shape[2]:
        return mean
    return torch.cat([mean, x[:, :, whole:].mean(2, keepdim=True, dtype=dtype)], 2)


def pool(x: Tensor, block: int) -> Pooled:
    """Means, and self-similarity: the mean cosine of all pairs of a block's rows, which is the square of the length of
    their mean direction. Rows of zeros have no direction and are like nothing.
    """
    if x.is_cuda:
        from s2o_runtime.kernels.block_sparse import pool_blocks  # imports triton

        return Pooled(*pool_blocks(x, block))
    return pool_plain(x, block)


def pool_plain(x: Tensor, block: int) -> Pooled:
    """`pool` in plain torch."""
    directions = [
        block_means(F.normalize(x[:, as_slice(part)].to(wide(x.dtype)), dim=-1), block)
        for part in parts(x.shape[1], x[:, 0].numel())
    ]
    return Pooled(block_means(x, block), torch.cat(directions, 1).square().sum(-1))
