"""FlexPrefill (arXiv 2502.20766): columns and diagonals of a sample of queries, or all pairs of blocks by their means.

The last block of queries is the sample. Where means estimate its attention well a head is query-aware, and blocks are
chosen by means for all row blocks together; otherwise the columns and diagonals that hold the sample's attention are
computed in all row blocks.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.bench.baselines.pooling import block_means, weigh_by_means, weigh_last_queries
from scripts.bench.baselines.selection import Grid, Selection, of_query_heads, select_blocks, split, top_share
from scripts.bench.baselines.settings import FlexPrefill


def select(q: Tensor, k: Tensor, settings: FlexPrefill, *, scale: float) -> Selection:
    """Select the key blocks of a layer.

    Args:
        q: [B, Hq, Lq, D]; k: [B, Hkv, Lk, D].
        scale: multiplies the scores.

    Source: FlexPrefill, the choice of a head's pattern, and for each pattern the choice of what is computed.
    """
    block, group = settings.block, q.shape[1] // k.shape[1]
    grid = Grid.plain(q, k, block, block)
    column = torch.arange(grid.columns, device=q.device)
    visible = grid.visible(q.device)[:, None]
    candidates = column < visible
    q_means = block_means(q, block)
    k_means = block_means(k, block)
    vertical, slash = sum_lines(q, k, block, scale)
    sample_mean = q[:, :, -block:].mean(2, keepdim=True, dtype=q_means.dtype)
    every_head = of_query_heads(k_means, group, slice(None))
    # the last row block sees every key block, as the sample does
    estimated = weigh_by_means(sample_mean, every_head, scale, candidates[-1:])
    distance = measure_distance(estimated[:, :, 0], sum_blocks(vertical, block))
    query_aware = distance < settings.tau
    columns = choose_blocks(vertical, query_aware, column < settings.first, settings)
    diagonals = choose_blocks(slash, query_aware, column == grid.columns - 1, settings)
    # Diagonals are named by the key blocks that they pass in the last row block. In any row block a diagonal passes the
    # key block that is as many before the last visible one.
    diagonal = (column + grid.columns - visible).clamp_max(grid.columns - 1)

    def wanted(part: slice) -> Tensor:
        mask = columns[:, part, None] | diagonals[:, part][..., diagonal]
        by_means = query_aware[:, part]
        queries = q_means[:, part][by_means]
        keys = of_query_heads(k_means, group, part)[by_means]
        weights = weigh_by_means(queries, keys, scale, candidates)  # [heads by means, row blocks, key blocks]
        heaviest = top_share(weights.flatten(1), settings.keep, candidates.flatten())
        mask[by_means] |= heaviest.view_as(weights)
        return mask

    return select_blocks(q, grid, wanted)


def sum_lines(q: Tensor, k: Tensor, last: int, scale: float) -> tuple[Tensor, Tensor]:
    """Sum the weights of the last queries, averaged over them, along columns and along diagonals.

    Args:
        q: [B, Hq, Lq, D]; k: [B, Hkv, Lk, D].
        last: how many queries.
        scale: multiplies the scores.

    Returns:
        Two times float32 (float64 for float64) [B, Hq, Lk], by key: of its column, and of the diagonal on which the
        last query sees it.
    """
    vertical, slash = [], []
    for head in range(q.shape[1]):  # by head, because weights are as large as `last` times Lk
        weights = weigh_last_queries(q, k, head, last, scale)
        rows = weights.shape[1]
        vertical.append(weights.mean(1))
        # A row that is n rows before the last moves n keys on: read with one entry less to a row, each begins later.
        # What moves behind the last key is hidden, and so 0.
        padded = F.pad(weights.flip(1), (0, rows))
        entries = padded.flatten(1)[:, :-rows]
        skewed = split(entries, 1, padded.shape[2] - 1)
        slash.append(skewed.mean(1)[:, : k.shape[2]])
    return torch.stack(vertical, 1), torch.stack(slash, 1)


def sum_blocks(lines: Tensor, block: int) -> Tensor:
    """Return the sums over blocks of lines [B, H, L]: [B, H, blocks]."""
    whole = F.pad(lines, (0, -lines.shape[2] % block))
    return split(whole, 2, block).sum(3)


def measure_distance(p: Tensor, q: Tensor) -> Tensor:
    """Return the square root of the Jensen-Shannon divergence, in nats, of distributions [..., n]: [...]."""
    entropy = torch.special.entr
    mixed = entropy((p + q) / 2)
    mean = (entropy(p) + entropy(q)) / 2
    divergence: Tensor = (mixed - mean).sum(-1)
    return divergence.clamp_min(0.0).sqrt()  # rounding can leave it below 0


def choose_blocks(lines: Tensor, query_aware: Tensor, always: Tensor, settings: FlexPrefill) -> Tensor:
    """Choose the heaviest blocks of lines, which are columns or diagonals.

    There are as many as the fewest lines that hold the share `keep` would fill if they were adjacent, and one more;
    of a query-aware head as few as may be.

    Args:
        lines: [B, H, L], the weight of each.
        query_aware: bool [B, H].
        always: bool [blocks], what is chosen first.

    Returns:
        bool [B, H, blocks].
    """
    block = settings.block
    least = max(math.ceil(settings.least_keys / block), settings.first)
    fewest = top_share(lines, settings.keep, lines >= 0.0).sum(-1)
    count = (fewest // block + 1).clamp_min(least)
    count = count.masked_fill(query_aware, least)
    weights = sum_blocks(lines, block)
    falling = weights.masked_fill(always, math.inf).argsort(-1, descending=True)
    rank = falling.argsort(-1)
    return rank < count[..., None]
