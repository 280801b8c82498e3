"""BLASST, or skip-softmax (arXiv 2512.12087): dense attention that drops tiles of small weights as it meets them.

Nothing is selected before: every row block lists all key blocks that it sees, in ascending order, and the skip decides.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scripts.bench.baselines.selection import Grid, Selection, Skip
from scripts.bench.baselines.settings import SkipSoftmax

KEYS = 64  # of a tile: with 128 they would not fit the registers or the shared memory of every GPU


def select(q: Tensor, k: Tensor, settings: SkipSoftmax, *, scale: float) -> Selection:
    """All key blocks, with the skip.

    The lists of all row blocks and heads are views of one row of numbers.

    Args:
        q: [B, Hq, Lq, D]; k: [B, Hkv, Lk, D].
        scale: not used; every baseline's selection takes it.

    Source: BLASST, the test exp(largest score of the tile - largest so far) < threshold, and the threshold's inverse
    proportion to the length of the context.
    """
    grid = Grid.plain(q, k, settings.block, KEYS)
    shape = *q.shape[:2], grid.rows
    blocks = torch.arange(grid.columns, dtype=torch.int32, device=q.device).expand(*shape, -1)
    counts = grid.visible(q.device).int().expand(shape)
    # at 1 a tile is dropped unless it has a row's new maximum; above, nothing would be left
    threshold = min(1.0, settings.factor / grid.kv_len)
    limit = math.log(threshold) if threshold else -math.inf
    skip = Skip(limit, settings.block, KEYS, sum_too=True)
    return Selection(grid, blocks, counts, skip=skip)
