"""Block-sparse attention in plain torch: what the kernel must compute, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from s2o_runtime.baselines.selection import SKIP_KEYS, SKIP_ROWS, Selection, score_type


def attend_reference(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, scale: float, out: Tensor, lse: Tensor | None = None
) -> None:
    """Attention of the selection's heads over the keys selected for them, in float32 (float64 for float64).

    Args:
        q: [B, Hq, Lq, D]; k, v: [B, Hkv, Lk, D], not permuted.
        scale: multiplies the scores.
        out: [B, Hq, Lq, D], whose heads of the selection are written.
        lse: [B, Hq, Lq], whose heads of the selection get the log-sum-exp of the computed scores.
    """
    dtype, device = score_type(q.dtype), q.device
    for n, head in enumerate(selection.heads):
        kv_head = selection.kv_heads[selection.slots[n]]
        for b in range(q.shape[0]):
            keys, values = k[b, kv_head].to(dtype), v[b, kv_head].to(dtype)
            for i in range(selection.grid.rows):
                rows = _rows(selection, b, n, i, device)
                visited = _visited_keys(selection, b, n, i, device)
                position = rows + selection.grid.offset
                scores = q[b, head, rows].to(dtype) @ keys[visited].T * scale
                scores.masked_fill_(visited > position[:, None], float("-inf"))
                log_sums = scores.logsumexp(-1)
                weights = (scores - log_sums[:, None]).exp()
                if selection.skip is not None:
                    weights = weights.masked_fill(_skipped(scores, visited, selection.skip), 0.0)
                out[b, head, rows] = (weights @ values[visited]).to(out.dtype)
                if lse is not None:
                    lse[b, head, rows] = log_sums.to(lse.dtype)


def _rows(selection: Selection, b: int, n: int, i: int, device: torch.device) -> Tensor:
    """The queries of row block i of head n in sequence b."""
    begin = i * selection.block_m
    end = min(begin + selection.block_m, selection.grid.q_len)
    if selection.row_order is not None:
        return selection.row_order[b, n, begin:end].long()
    return torch.arange(begin, end, device=device)


def _visited_keys(selection: Selection, b: int, n: int, i: int, device: torch.device) -> Tensor:
    """The keys that a row block computes, in the order of the visit: those of its blocks, then single ones."""
    grid = selection.grid
    blocks = selection.blocks[b, n, i, : int(selection.counts[b, n, i])].long()
    keys = (blocks[:, None] * grid.block_n + torch.arange(grid.block_n, device=device)).flatten()
    keys = keys[keys < grid.kv_len]
    if selection.key_order is not None:
        keys = selection.key_order[b, selection.slots[n], keys].long()
    if selection.columns is not None and selection.column_counts is not None:
        keys = torch.cat([keys, selection.columns[b, n, i, : int(selection.column_counts[b, n, i])].long()])
    return keys


def _skipped(scores: Tensor, keys: Tensor, skip: float) -> Tensor:
    """Which scores [rows, keys] are in tiles where none comes within `skip` of its row's maximum so far.

    Tiles are `SKIP_ROWS` rows by the keys of one `SKIP_KEYS` block; blocks come in ascending order, unpermuted.
    """
    _, sizes = torch.unique_consecutive(keys // SKIP_KEYS, return_counts=True)
    ends = sizes.cumsum(0).tolist()
    highest = torch.stack(
        [scores[:, end - size : end].amax(1) for end, size in zip(ends, sizes.tolist(), strict=True)], 1
    )  # [rows, tiles]
    below = highest - highest.cummax(1).values.clamp_min(torch.finfo(scores.dtype).min)
    skipped = torch.zeros_like(scores, dtype=torch.bool)
    for begin in range(0, len(scores), SKIP_ROWS):
        skipped_tiles = below[begin : begin + SKIP_ROWS].amax(0) < skip
        skipped[begin : begin + SKIP_ROWS] = skipped_tiles.repeat_interleave(sizes)
    return skipped
