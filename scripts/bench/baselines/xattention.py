"""XAttention's antidiagonal scores (arXiv 2503.16428, Algorithm 1).

The rows of `stride` adjacent queries in reverse order, and those of `stride` adjacent keys, are concatenated: the
product of the two is the sum of an antidiagonal of the score matrix. A softmax over these sums approximates the
attention to a block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from s2o_runtime.devices import get_capability
from scripts.bench.baselines.selection import Grid, Selection, score_type, select_blocks, split, top_share
from scripts.bench.baselines.settings import Antidiagonal
from scripts.bench.baselines.tiles import has_kernels


def select(q: Tensor, k: Tensor, settings: Antidiagonal, *, scale: float) -> Selection:
    """The key blocks of a layer.

    Args:
        q: [B, Hq, Lq, D]; k: [B, Hkv, Lk, D].
        scale: multiplies the scores.

    Source: XAttention, Algorithm 1.
    """
    grid = Grid.plain(q, k, settings.block, settings.block)
    columns = torch.arange(grid.columns, device=q.device)
    candidates = columns < grid.visible(q.device)[:, None]

    def wanted(part: slice) -> Tensor:
        weights = head_weights(q, k, part, grid, settings.stride, scale)
        return top_share(weights, settings.keep, candidates) | (columns < settings.first)

    return select_blocks(q, grid, wanted)


def head_weights(q: Tensor, k: Tensor, part: slice, grid: Grid, stride: int, scale: float) -> Tensor:
    """Mean softmax mass of each block, by a kernel where there is one for the device and the type.

    Args:
        q: [B, Hq, Lq, D]; k: [B, Hkv, Lk, D].
        part: of the query heads, n of them.
        stride: the distance of the antidiagonals.
        scale: multiplies the scores.

    Returns:
        [B, n, row blocks, key blocks].
    """
    if has_kernels(q):
        from scripts.bench.baselines.kernels.antidiagonal import antidiagonal_mass  # imports triton

        return antidiagonal_mass(q, k, part, grid, stride, scale, get_capability(q.device))
    group, heads = q.shape[1] // k.shape[1], range(part.start, part.stop)
    return torch.stack([block_weights(q[:, h], k[:, h // group], grid, stride, scale) for h in heads], 1)


def block_weights(q: Tensor, k: Tensor, grid: Grid, stride: int, scale: float) -> Tensor:
    """`head_weights` of one head in plain torch, [B, row blocks, key blocks]; q: [B, Lq, D], k: [B, Lk, D]."""
    q_len, per_row, per_column = q.shape[1], grid.block_m // stride, grid.block_n // stride
    rows = _grouped(q, stride, grid.rows * grid.block_m, last_first=True)
    keys = _grouped(k, stride, grid.columns * grid.block_n)
    group = torch.arange(grid.rows * per_row, device=q.device)[:, None]
    key = torch.arange(grid.columns * per_column, device=q.device) * stride
    scores = (rows @ keys.transpose(1, 2)).to(score_type(q.dtype)).mul_(scale / stride)
    hidden = (key > grid.offset + group * stride + stride - 1) | (key >= grid.kv_len)
    weight = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
    mass = split(weight, 2, per_column).sum(-1)  # [B, groups, key blocks]
    real = group * stride < q_len
    count = real.view(-1, per_row).sum(1)[:, None]
    return split(mass.mul_(real), 1, per_row).sum(2) / count


def _grouped(x: Tensor, stride: int, length: int, last_first: bool = False) -> Tensor:
    """[B, L, D] filled with zeros up to `length`, `stride` rows side by side: [B, length / stride, stride * D]."""
    x = split(F.pad(x, (0, 0, 0, length - x.shape[1])), 1, stride)
    return (x.flip(2) if last_first else x).flatten(2)
