"""MInference's A-shape and vertical-slash heads (arXiv 2407.02490, section 3.2 and Algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from s2o_runtime.baselines.selection import (
    Grid,
    Selection,
    all_heads,
    as_slice,
    parts,
    read_heads,
    score_type,
    select_blocks,
    take,
    with_columns,
)
from s2o_runtime.baselines.settings import AShape, VerticalSlash


def select_a_shape(
    q: Tensor, k: Tensor, settings: AShape, *, scale: float, heads: Sequence[int] | None = None
) -> Selection:
    """Every key block with one of the first `sink` keys, or with one of the `local` last keys of any of its rows.

    Args:
        q: [B, Hq, Lq, D]; k: [B, Hkv, Lk, D].
        scale: not used; every baseline's selection takes it.
        heads: the query heads, all by default.
    """
    heads = all_heads(q, heads)
    grid = Grid.plain(q, k, settings.block, settings.block)
    block = torch.arange(grid.columns, device=q.device) * grid.block_n
    nearest = grid.first_position(q.device)[:, None] - settings.local + 1
    mask = (block < settings.sink) | (block + grid.block_n > nearest)

    def wanted(part: range) -> Tensor:
        return mask.expand(q.shape[0], len(part), -1, -1).clone()

    return select_blocks(q, k, grid, heads, wanted)


def select_vertical_slash(
    q: Tensor, k: Tensor, settings: VerticalSlash, *, scale: float, heads: Sequence[int] | None = None
) -> Selection:
    """Every key block that a chosen diagonal crosses, and the chosen columns outside of these as single keys.

    Args:
        q: [B, Hq, Lq, D]; k: [B, Hkv, Lk, D].
        scale: multiplies the scores.
        heads: the query heads, all by default.

    Source: MInference, Algorithm 2.
    """
    heads = all_heads(q, heads)
    grid = Grid.plain(q, k, settings.block, settings.block)
    columns, diagonals = lines(q, k, settings, heads, scale)
    # diagonals (position - key) that cross a block: from its last key at the first row to its first at the last row
    block = torch.arange(grid.columns, device=q.device) * grid.block_n
    lowest = (grid.first_position(q.device)[:, None] - block - grid.block_n + 1).clamp_min(0).flatten()
    highest = (grid.last_position(q.device)[:, None] - block + 1).clamp_min(0).flatten()
    before = torch.nn.functional.pad(diagonals.cumsum(-1, dtype=torch.int32), (1, 0))  # chosen ones below each

    def wanted(part: range) -> Tensor:
        chosen = before[:, as_slice(part)]
        crossed = chosen.index_select(-1, highest) > chosen.index_select(-1, lowest)
        return crossed.view(*crossed.shape[:2], grid.rows, grid.columns)

    return with_columns(select_blocks(q, k, grid, heads, wanted), columns)


def lines(
    q: Tensor, k: Tensor, settings: VerticalSlash, heads: Sequence[int], scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The columns and diagonals with the most attention from the last queries.

    Returns:
        The chosen columns, int64 [B, n, vertical], ascending; and whether a diagonal is chosen, bool [B, n, Lk], by its
        distance from the main one.
    """
    (batch, _, q_len, _), kv_len = q.shape, k.shape[2]
    last = min(settings.queries, q_len)
    vertical, slash = min(settings.vertical, kv_len), min(settings.slash, kv_len)
    kv_heads, slots = read_heads(heads, q.shape[1] // k.shape[1])
    corner = torch.ones(last, last, dtype=torch.bool, device=q.device).triu_(1)
    columns = torch.empty(batch, len(heads), vertical, dtype=torch.int64, device=q.device)
    diagonals = torch.zeros(batch, len(heads), kv_len, dtype=torch.bool, device=q.device)
    for part in parts(len(heads), batch * last * kv_len):
        at = as_slice(part)
        rows = take(q[:, :, q_len - last :], [heads[i] for i in part])
        keys = take(k, [kv_heads[slots[i]] for i in part])
        scores = (rows @ keys.transpose(2, 3)).to(score_type(q.dtype)).mul_(scale)
        scores[..., kv_len - last :].masked_fill_(corner, float("-inf"))
        weights = scores.softmax(-1)
        columns[:, at] = weights.sum(2).topk(vertical).indices.sort(-1).values
        chosen = diagonal_sums(weights).topk(slash).indices
        diagonals[:, at] = torch.zeros_like(diagonals[:, at]).scatter_(-1, chosen, True)
    return columns, diagonals


def diagonal_sums(weights: Tensor) -> Tensor:
    """Sums over each diagonal of [B, n, rows, Lk], the last row of which stands at the last key.

    Keys are reversed, so that each diagonal is a line of constant stride.

    Returns:
        [B, n, Lk], for distances 0 .. Lk - 1 between row and key.
    """
    batch, n, rows, length = weights.shape
    width = length + rows
    reversed_keys = torch.nn.functional.pad(weights.flip(-1), (0, rows))
    strides = (n * rows * width, rows * width, width - 1, 1)
    return reversed_keys.as_strided((batch, n, rows, length), strides, rows - 1).sum(2)
