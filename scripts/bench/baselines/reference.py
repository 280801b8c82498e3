"""Block-sparse attention in plain torch: what the kernel must compute, on any device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scripts.bench.baselines.pooling import block_means
from scripts.bench.baselines.selection import Selection, score_type


def attend_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    *,
    scale: float,
    out: Tensor,
) -> None:
    """Attention over the keys of a selection, in float32 (float64 for float64).

    Where a selection says what is pruned, each such block adds its number of keys times exp(score of its mean key) to
    the sum, and that times its mean value to the numerator.

    Args:
        q: [B, Hq, Lq, D]; k, v: [B, Hkv, Lk, D], not permuted.
        scale: multiplies the scores.
        out: [B, Hq, Lq, D], to write.
    """
    dtype, device = score_type(q.dtype), q.device
    grid = selection.grid
    full = grid.full(device) * grid.block_n
    mean_values = None if selection.pruned is None else block_means(v, grid.block_n).to(v.dtype)
    for head in range(q.shape[1] // grid.packed):
        kv_head = head * grid.packed // (q.shape[1] // k.shape[1])
        for b in range(q.shape[0]):
            keys, values = k[b, kv_head].to(dtype), v[b, kv_head].to(dtype)
            for i in range(grid.rows):
                end = min((i + 1) * grid.block_m, grid.q_len * grid.packed)
                rows = torch.arange(i * grid.block_m, end, device=device)
                at = b, head * grid.packed + rows % grid.packed, rows // grid.packed
                visited = _visited_keys(selection, b, head, kv_head, i, device)
                position = at[2] + grid.offset
                queries = q[at].to(dtype)
                scores = queries @ keys[visited].T * scale
                scores.masked_fill_(visited > position[:, None], float("-inf"))
                visited_values = values[visited]
                if selection.pruned is not None and selection.mean_keys is not None and mean_values is not None:
                    pruned = selection.pruned[b, head, i, : int(full[i]) // grid.block_n].nonzero()[:, 0]
                    mean_keys = selection.mean_keys[b, kv_head, pruned].to(dtype)
                    mean_scores = queries @ mean_keys.T * scale
                    scores = torch.cat([scores, mean_scores + math.log(grid.block_n)], 1)
                    visited_values = torch.cat([visited_values, mean_values[b, kv_head, pruned].to(dtype)])
                out[at] = (scores.softmax(-1) @ visited_values).to(out.dtype)


def _visited_keys(selection: Selection, b: int, head: int, kv_head: int, i: int, device: torch.device) -> Tensor:
    """The keys that a row block computes, in the order of the visit."""
    grid = selection.grid
    blocks = selection.blocks[b, head, i, : int(selection.counts[b, head, i])].long()
    keys = (blocks[:, None] * grid.block_n + torch.arange(grid.block_n, device=device)).flatten()
    keys = keys[keys < grid.kv_len]
    if selection.key_order is not None:
        keys = selection.key_order[b, kv_head, keys].long()
    return keys
