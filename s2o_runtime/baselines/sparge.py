"""SpargeAttn (arXiv 2502.18137): compressed scores of self-similar blocks, TopCdf, and the skip of the product with v.

Without quantisation (its section 3.5) and without the Hilbert curve (3.7), which is for images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from s2o_runtime.baselines.pooling import pool
from s2o_runtime.baselines.selection import (
    Grid,
    Selection,
    all_heads,
    as_slice,
    read_heads,
    select_blocks,
    take,
    top_share,
)
from s2o_runtime.baselines.settings import Sparge


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
    visible = torch.arange(grid.columns, device=q.device) < grid.visible(q.device)[:, None]

    def wanted(part: range) -> Tensor:
        part_slots = [slots[i] for i in part]
        always = take(different_k, part_slots)
        candidates = visible & ~always
        scores = (queries.mean[:, as_slice(part)] @ take(keys.mean, part_slots).transpose(2, 3)).mul_(scale)
        weights = scores.masked_fill_(~candidates, float("-inf")).softmax(-1).masked_fill_(~candidates, 0.0)
        return top_share(weights, settings.keep, candidates) | always | different_q[:, as_slice(part)]

    return replace(select_blocks(q, k, grid, heads, wanted), skip=settings.skip)
