"""FlashPrefill (arXiv 2603.06199, 2608.19758): block weights of queries and mean keys, cut at a share of the largest.

No weights are sorted or summed up in order: a block is chosen by comparing it with the largest of its row of blocks.
Version 2 packs the query heads of a KV head into common row blocks, and lets the mean of a block that is not chosen
stand for it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from scripts.bench.baselines.pooling import block_means
from scripts.bench.baselines.selection import Grid, Selection, score_type, select_blocks, split
from scripts.bench.baselines.settings import FlashPrefill, FlashPrefillV2
from scripts.bench.baselines.tiles import BLOCK_SPARSE_HEAD_DIMS, has_kernels


def select(q: Tensor, k: Tensor, settings: FlashPrefill, *, scale: float) -> Selection:
    """The key blocks of a layer.

    Args:
        q: [B, Hq, Lq, D]; k: [B, Hkv, Lk, D].
        settings: of either version.
        scale: multiplies the scores.

    Source: FlashPrefill, the search of blocks and the thresholding by the largest score; version 2, equations 1 to 3,
    12 and 13, and for what is pruned 5 and 6.
    """
    grid = Grid.plain(q, k, settings.block, settings.block, settings.packed)
    k_mean = block_means(k, settings.block).to(k.dtype)
    mean_keys = k_mean if isinstance(settings, FlashPrefillV2) and settings.correct else None
    mass_of = partial(log_mass, q, k_mean, grid=grid, scale=scale)
    if _has_kernels(q):
        from scripts.bench.baselines.kernels.mean_keys import select_by_mass  # imports triton

        return select_by_mass(q, grid, mass_of, settings, mean_keys)
    column = torch.arange(grid.columns, device=q.device)
    row = torch.arange(grid.rows, device=q.device)[:, None]
    always = (column < settings.first) | (row >= grid.rows - settings.last)
    always |= column >= grid.visible(q.device)[:, None] - settings.window

    def wanted(part: slice) -> Tensor:
        mass = mass_of(part)
        least = mass.amax(-1, keepdim=True) + settings.log_share
        return (mass >= least).logical_or_(always)

    return select_blocks(q, grid, wanted, mean_keys)


def log_mass(q: Tensor, k_mean: Tensor, part: slice, grid: Grid, scale: float) -> Tensor:
    """The logarithm of each block's weight, by a kernel where there is one for the device and the type.

    The weight is the sum of exp(scale q . mean of keys) over the rows of the row block that see the whole key block.

    Args:
        q: [B, Hq, Lq, D].
        k_mean: [B, Hkv, key blocks, D] in the type of q.
        part: of the Hq / packed heads of the grid, n of them.
        scale: multiplies the scores.

    Returns:
        float32 (float64 for float64) [B, n, row blocks, key blocks]; minus infinity where no row sees all of a block.
    """
    if _has_kernels(q):
        from scripts.bench.baselines.kernels.mean_keys import mean_key_mass

        return mean_key_mass(q, k_mean, part, grid, scale)
    group = q.shape[1] // grid.packed // k_mean.shape[1]
    rows = split(q, 1, grid.packed).transpose(2, 3).flatten(2, 3)  # [B, Hq / packed, Lq * packed, D]
    return torch.stack(
        [head_mass(rows[:, head], k_mean[:, head // group], grid, scale) for head in range(part.start, part.stop)], 1
    )


def _has_kernels(q: Tensor) -> bool:
    return q.shape[3] <= BLOCK_SPARSE_HEAD_DIMS[-1] and has_kernels(q)


def head_mass(q: Tensor, k_mean: Tensor, grid: Grid, scale: float) -> Tensor:
    """`log_mass` of one head in plain torch, [B, row blocks, key blocks].

    Args:
        q: [B, Lq * packed, D], the rows of the grid.
        k_mean: [B, key blocks, D].
        scale: multiplies the scores.
    """
    last_key = (torch.arange(grid.columns, device=q.device) + 1) * grid.block_n - 1
    rows = torch.arange(grid.rows * grid.block_m, device=q.device)
    queries = torch.nn.functional.pad(q, (0, 0, 0, len(rows) - q.shape[1]))
    scores = (queries @ k_mean.transpose(1, 2)).to(score_type(q.dtype)).mul_(scale)
    position = rows // grid.packed + grid.offset
    hidden = (last_key > position[:, None]) | (rows[:, None] >= q.shape[1])
    return split(scores.masked_fill_(hidden, float("-inf")), 1, grid.block_m).logsumexp(2)
