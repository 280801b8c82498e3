"""MeanPooling block selection (PBS-Attn, Algorithm 2), with the first blocks and the diagonal always computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from s2o_runtime.baselines.pooling import block_means
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
from s2o_runtime.baselines.settings import MeanPooling


def select(
    q: Tensor, k: Tensor, settings: MeanPooling, *, scale: float, heads: Sequence[int] | None = None
) -> Selection:
    """The key blocks of `heads` (all by default).

    Args:
        q: [B, Hq, Lq, D]; k: [B, Hkv, Lk, D].
        scale: multiplies the scores.

    Source: PBS-Attn, Algorithm 2.
    """
    heads = all_heads(q, heads)
    grid = Grid.plain(q, k, settings.block, settings.block)
    kv_heads, slots = read_heads(heads, q.shape[1] // k.shape[1])
    q_mean = block_means(take(q, heads), settings.block)
    k_mean = block_means(take(k, kv_heads), settings.block)
    candidates = torch.arange(grid.columns, device=q.device) < grid.visible(q.device)[:, None]
    wanted = by_share(
        q_mean, k_mean, slots=slots, candidates=candidates, scale=scale, keep=settings.keep, first=settings.first
    )
    return select_blocks(q, k, grid, heads, wanted)


def by_share(
    q_mean: Tensor, k_mean: Tensor, *, slots: Sequence[int], candidates: Tensor, scale: float, keep: float, first: int
) -> Callable[[range], Tensor]:
    """The `wanted` of `select_blocks`: the heaviest candidates by the softmax of pooled scores.

    Args:
        q_mean: [B, n, row blocks, D], means of queries; k_mean: [B, kv_heads, key blocks, D], means of keys.
        slots: for each of the n heads the index of the KV head that it reads.
        candidates: bool [row blocks, key blocks], the blocks that the softmax is over.
        scale: multiplies the scores.
        keep: the share of a row's mass that the chosen blocks hold.
        first: blocks at the beginning that are always chosen.
    """

    def wanted(part: range) -> Tensor:
        keys = take(k_mean, [slots[i] for i in part])
        scores = (q_mean[:, as_slice(part)] @ keys.transpose(2, 3)).mul_(scale)
        weights = scores.masked_fill_(~candidates, float("-inf")).softmax(-1)
        weights = weights.masked_fill_(~candidates, 0.0)  # a row without candidates is NaN
        mask = top_share(weights, keep, candidates)
        mask[..., :first] = True
        return mask

    return wanted
