"""SpargeAttn (arXiv 2502.18137): compressed scores of self-similar blocks, TopCdf, and the skip of the product with v.

Without quantisation (its section 3.5) and without the Hilbert curve (3.7), which is for images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from s2o_runtime.baselines.pooling import heaviest_by_means, pool
from s2o_runtime.baselines.selection import (
    Grid,
    Selection,
    Skip,
    all_heads,
    as_slice,
    read_heads,
    select_blocks,
    take,
)
from s2o_runtime.baselines.settings import Sparge

SKIP_ROWS = 64  # of a tile whose product with v is skipped or not, on every GPU
SKIP_KEYS = 64


def select(q: Tensor, k: Tensor, settings: Sparge, *, scale: float, heads: Sequence[int] | None = None) -> Selection:
    """The key blocks of `heads` (all by default).

    Args:
        q: [B, Hq, Lq, D]; k: [B, Hkv, Lk, D].
        scale: multiplies the scores.

    Source: SpargeAttn, Algorithm 1, lines 4 to 6.
    """
    heads = all_heads(q, heads)
    grid = Grid.plain(q, k, settings.block, settings.block_k)
    kv_heads, slots = read_heads(heads, q.shape[1] // k.shape[1])
    queries = pool(take(q, heads), settings.block)
    keys = pool(take(k, kv_heads), settings.block_k)
    different_q = (queries.similarity < settings.similarity)[..., None]  # [B, n, row blocks, 1]
    different_k = (keys.similarity < settings.similarity)[:, :, None]  # [B, kv_heads, 1, key blocks]
    columns = torch.arange(grid.columns, device=q.device)
    visible = columns < grid.visible(q.device)[:, None]
    first = columns < settings.first

    def wanted(part: range) -> Tensor:
        part_slots = [slots[i] for i in part]
        always = take(different_k, part_slots)
        means = queries.mean[:, as_slice(part)], take(keys.mean, part_slots)
        heaviest = heaviest_by_means(*means, scale, visible & ~always, settings.keep)
        return heaviest | always | first | different_q[:, as_slice(part)]

    skip = None if settings.skip is None else Skip(settings.skip, SKIP_ROWS, SKIP_KEYS, sum_too=False)
    return replace(select_blocks(q, k, grid, heads, wanted), skip=skip)
