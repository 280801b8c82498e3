"""PBS-Attn: permuted block-sparse attention (arXiv 2510.21270, Algorithm 1 and appendix B).

Keys are sorted inside each segment by the mean softmax of the last block of queries (equations 10 and 11), blocks of
the sorted keys are chosen by mean pooling (Algorithm 2). The segments on the diagonal are outside the softmax and
always computed, masked by where each key really stands; rows see all of the segments before them, so sorting does not
hurt causality.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from s2o_runtime.baselines.pooling import block_means, heaviest_by_means
from s2o_runtime.baselines.selection import (
    Grid,
    Selection,
    all_heads,
    as_slice,
    parts,
    read_heads,
    score_type,
    select_blocks,
    split,
    take,
)
from s2o_runtime.baselines.settings import PBS


def select(q: Tensor, k: Tensor, settings: PBS, *, scale: float, heads: Sequence[int] | None = None) -> Selection:
    """The key blocks of `heads` (all by default), and how keys (and queries) are permuted.

    Query heads that share a KV head share the order of its keys.

    Args:
        q: [B, Hq, Lq, D]; k: [B, Hkv, Lk, D].
        scale: multiplies the scores.

    Source: PBS-Attn, Algorithm 1.
    """
    heads = all_heads(q, heads)
    block, segment = settings.block, settings.segment
    kv_heads, slots = read_heads(heads, q.shape[1] // k.shape[1])
    grid = Grid(
        q.shape[2], k.shape[2], block, block,
        segment if settings.permute_queries else block, segment if settings.permute else block,
    )  # fmt: skip
    keys, key_order, rows, row_order = take(k, kv_heads), None, take(q, heads), None
    if settings.permute:
        key_order = sorted_keys(last_block_scores(q, k, heads, block, scale), segment)
        keys = permuted(keys, key_order)
    k_mean = block_means(keys, block)
    if settings.permute_queries:
        row_order = clustered_queries(rows, k_mean, slots, segment)
        rows = permuted(rows, row_order)
    permutes = settings.permute or settings.permute_queries
    behind = grid.full(q.device) if permutes else grid.visible(q.device)  # mean pooling's softmax is over all it sees
    candidates = torch.arange(grid.columns, device=q.device) < behind[:, None]
    q_mean = block_means(rows, block)

    def wanted(part: range) -> Tensor:
        keys_of_part = take(k_mean, [slots[i] for i in part])
        mask = heaviest_by_means(q_mean[:, as_slice(part)], keys_of_part, scale, candidates, settings.keep)
        mask[..., : settings.first] = True
        return mask

    chosen = select_blocks(q, k, grid, heads, wanted)
    return replace(
        chosen, key_order=key_order, keys=None if key_order is None else keys, row_order=row_order
    )  # fmt: skip


def last_block_scores(q: Tensor, k: Tensor, heads: Sequence[int], block: int, scale: float) -> Tensor:
    """Equation 10: the mean softmax of the last `block` queries, summed over the `heads` that read a KV head.

    Returns:
        float32 (float64 for float64) [B, kv_heads, Lk].
    """
    group, (batch, _, q_len, _), kv_len = q.shape[1] // k.shape[1], q.shape, k.shape[2]
    kv_heads, slots = read_heads(heads, group)
    last = min(block, q_len)
    scores = torch.zeros(batch, len(kv_heads), kv_len, dtype=score_type(q.dtype), device=q.device)
    corner = torch.ones(last, last, dtype=torch.bool, device=q.device).triu_(1)
    for head, slot in zip(heads, slots, strict=True):
        raw = q[:, head, q_len - last :] @ k[:, kv_heads[slot]].transpose(1, 2)
        weights = raw.to(scores.dtype).mul_(scale)
        weights[..., kv_len - last :].masked_fill_(corner, float("-inf"))
        scores[:, slot] += weights.softmax(-1).mean(1)  # a sum orders keys as the mean would
    return scores


def sorted_keys(scores: Tensor, segment: int) -> Tensor:
    """Equation 11: keys by falling score inside each whole segment, keys behind the last one as they are.

    Args:
        scores: [B, kv_heads, Lk].

    Returns:
        int32 [B, kv_heads, Lk].
    """
    length = scores.shape[2]
    whole = length // segment * segment
    order = torch.arange(length, device=scores.device).expand(scores.shape).clone()
    if whole:
        local = split(scores[..., :whole], 2, segment).sort(dim=-1, descending=True, stable=True).indices
        base = torch.arange(0, whole, segment, device=scores.device)[:, None]
        order[..., :whole] = (local + base).flatten(2)
    return order.int()


def clustered_queries(q: Tensor, k_mean: Tensor, slots: Sequence[int], segment: int) -> Tensor:
    """Section 4.3: the queries of each whole segment by the key block whose mean they are most similar to.

    Args:
        q: [B, n, Lq, D]; k_mean: [B, kv_heads, blocks, D].
        slots: for each of the n heads the index of the KV head that it reads.

    Returns:
        int32 [B, n, Lq]; queries behind the last whole segment stay.
    """
    batch, n, q_len, _ = q.shape
    whole = q_len // segment * segment
    order = torch.arange(q_len, device=q.device).expand(batch, n, q_len).clone()
    if not whole:
        return order.int()
    centroids = torch.nn.functional.normalize(k_mean, dim=-1).to(q.dtype)
    base = torch.arange(0, whole, segment, device=q.device)[:, None]
    for part in parts(n, batch * whole * k_mean.shape[2]):
        at = as_slice(part)
        # the length of a query does not change which centroid is nearest in angle
        cluster = (q[:, at, :whole] @ take(centroids, [slots[i] for i in part]).transpose(2, 3)).argmax(-1)
        local = split(cluster, 2, segment).sort(dim=-1, stable=True).indices
        order[:, at, :whole] = (local + base).flatten(2)
    return order.int()


def permuted(x: Tensor, order: Tensor) -> Tensor:
    """Rows of x [B, H, L, D] in the order [B, H, L], contiguous."""
    batch, heads = x.shape[:2]
    b = torch.arange(batch, device=x.device)[:, None, None]
    h = torch.arange(heads, device=x.device)[:, None]
    return x[b, h, order.long()]
