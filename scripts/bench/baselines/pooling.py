"""Means of blocks of rows, what is heaviest by them, and how alike the rows of a block are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.bench.baselines.selection import score_type, split, top_share


def block_means(x: Tensor, block: int) -> Tensor:
    """The means of blocks of rows; a shorter last block is the mean of the rows it has.

    Args:
        x: [B, H, L, D].

    Returns:
        float32 (float64 for float64) [B, H, ceil(L / block), D].
    """
    whole = x.shape[2] // block * block
    dtype = score_type(x.dtype)
    mean = split(x[:, :, :whole], 2, block).mean(3, dtype=dtype) if whole else x[:, :, :0].to(dtype)
    if whole == x.shape[2]:
        return mean
    return torch.cat([mean, x[:, :, whole:].mean(2, keepdim=True, dtype=dtype)], 2)


def heaviest_by_means(q_mean: Tensor, k_mean: Tensor, scale: float, candidates: Tensor, keep: float) -> Tensor:
    """The fewest key blocks of each row block that hold the share `keep` of the softmax of pooled scores.

    Args:
        q_mean: [B, n, row blocks, D], means of queries; k_mean: [B, n, key blocks, D], means of the keys they read.
        scale: multiplies the scores.
        candidates: bool that broadcasts to [B, n, row blocks, key blocks], the blocks that the softmax is over.
        keep: the share.

    Returns:
        bool [B, n, row blocks, key blocks].
    """
    return top_share(weigh_by_means(q_mean, k_mean, scale, candidates), keep, candidates)


def weigh_by_means(q_mean: Tensor, k_mean: Tensor, scale: float, candidates: Tensor) -> Tensor:
    """Return the softmax of pooled scores over the candidates, [..., row blocks, key blocks].

    Args:
        q_mean: [..., row blocks, D]; k_mean: [..., key blocks, D].
        scale, candidates: as for `heaviest_by_means`.
    """
    scores = (q_mean @ k_mean.transpose(-2, -1)).mul_(scale)
    weights = scores.masked_fill_(~candidates, float("-inf")).softmax(-1)
    return weights.masked_fill_(~candidates, 0.0)  # a row without candidates is NaN


def weigh_last_queries(q: Tensor, k: Tensor, head: int, last: int, scale: float) -> Tensor:
    """Compute the attention weights of the last queries of one head.

    Args:
        q: [B, Hq, Lq, D]; k: [B, Hkv, Lk, D].
        head: of the query heads.
        last: how many queries, or all where there are fewer.
        scale: multiplies the scores.

    Returns:
        float32 (float64 for float64) [B, rows, Lk].
    """
    queries = q[:, head, -last:]
    keys = k[:, head // (q.shape[1] // k.shape[1])]
    scores = (queries @ keys.transpose(1, 2)).to(score_type(q.dtype)).mul_(scale)
    rows = queries.shape[1]
    corner = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu_(1)
    scores[..., -rows:].masked_fill_(corner, float("-inf"))
    return scores.softmax(-1)


def pool(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The means [B, H, blocks, D] and the self-similarities [B, H, blocks] of blocks of rows, float32.

    The self-similarity is the mean cosine of all pairs of rows. It is computed as the squared length of the mean of the
    normalised rows, so a pair with a row of zeros counts as 0.

    Args:
        x: [B, H, L, D].
    """
    if x.is_cuda:
        from scripts.bench.baselines.kernels.block_sparse import pool_blocks  # imports triton

        return pool_blocks(x, block)
    return pool_plain(x, block)


def pool_plain(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """`pool` in plain torch."""
    directions = F.normalize(x.to(score_type(x.dtype)), dim=-1)
    return block_means(x, block), block_means(directions, block).square().sum(-1)
