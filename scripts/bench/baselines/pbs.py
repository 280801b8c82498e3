"""PBS-Attn: permuted block-sparse attention (arXiv 2510.21270, Algorithm 1 and appendix B).

Keys are sorted inside each segment by the mean softmax of the last block of queries (equations 10 and 11), blocks of
the sorted keys are chosen by mean pooling (Algorithm 2). The segments on the diagonal are outside the softmax and
always computed, masked by where each key really stands; rows see all of the segments before them, so sorting does not
hurt causality.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from scripts.bench.baselines.pooling import block_means, heaviest_by_means, weigh_last_queries
from scripts.bench.baselines.selection import Grid, Selection, of_query_heads, score_type, select_blocks, split
from scripts.bench.baselines.settings import PBS


def select(q: Tensor, k: Tensor, settings: PBS, *, scale: float) -> Selection:
    """The key blocks of a layer, and how keys are permuted.

    Query heads that share a KV head share the order of its keys.

    Args:
        q: [B, Hq, Lq, D]; k: [B, Hkv, Lk, D].
        scale: multiplies the scores.

    Source: PBS-Attn, Algorithm 1.
    """
    block, segment, group = settings.block, settings.segment, q.shape[1] // k.shape[1]
    grid = Grid(q.shape[2], k.shape[2], block, block, segment)
    key_order = sort_keys(last_block_scores(q, k, block, scale), segment)
    keys = permuted(k, key_order)
    q_mean, k_mean = block_means(q, block), block_means(keys, block)
    candidates = torch.arange(grid.columns, device=q.device) < grid.full(q.device)[:, None]

    def wanted(part: slice) -> Tensor:
        keys_of_part = of_query_heads(k_mean, group, part)
        mask = heaviest_by_means(q_mean[:, part], keys_of_part, scale, candidates, settings.keep)
        mask[..., : settings.first] = True
        return mask

    return replace(select_blocks(q, grid, wanted), key_order=key_order, keys=keys)


def last_block_scores(q: Tensor, k: Tensor, block: int, scale: float) -> Tensor:
    """Equation 10: the mean softmax of the last `block` queries, summed over the heads that read a KV head.

    Returns:
        float32 (float64 for float64) [B, Hkv, Lk].
    """
    scores = torch.zeros(k.shape[:3], dtype=score_type(q.dtype), device=q.device)
    for head in range(q.shape[1]):
        weights = weigh_last_queries(q, k, head, block, scale)
        scores[:, head // (q.shape[1] // k.shape[1])] += weights.mean(1)  # a sum orders keys as the mean would
    return scores


def sort_keys(scores: Tensor, segment: int) -> Tensor:
    """Order keys by falling score inside each whole segment (equation 11); keys behind the last one stay.

    Args:
        scores: [B, Hkv, Lk].

    Returns:
        int32 [B, Hkv, Lk].
    """
    length = scores.shape[2]
    whole = length // segment * segment
    order = torch.arange(length, device=scores.device).expand(scores.shape).clone()
    if whole:
        local = split(scores[..., :whole], 2, segment).sort(dim=-1, descending=True, stable=True).indices
        base = torch.arange(0, whole, segment, device=scores.device)[:, None]
        order[..., :whole] = (local + base).flatten(2)
    return order.int()


def permuted(x: Tensor, order: Tensor) -> Tensor:
    """Rows of x [B, H, L, D] in the order [B, H, L], contiguous."""
    batch, heads = x.shape[:2]
    b = torch.arange(batch, device=x.device)[:, None, None]
    h = torch.arange(heads, device=x.device)[:, None]
    return x[b, h, order.long()]
