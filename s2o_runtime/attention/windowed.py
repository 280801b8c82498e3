"""Attention in a sliding window, some rows at a time: memory and time grow with the prompt, not with its square."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from s2o_runtime.reference.dense import with_sink_key
from s2o_runtime.scoring import PLAIN, Scoring, capped, softmax
from s2o_runtime.shapes import call_shape

ROWS = 512  # computed together at least; a block of rows sees its own keys and window - 1 before them


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, scoring: Scoring = PLAIN, kv_start: Tensor | None = None
) -> Tensor:
    """Causal attention in which a query sees the last `window` keys up to its own.

    Query i stands at position Lk - Lq + i. Scores without a soft cap go through torch's SDPA; soft-capped ones are
    products in the type of q and a softmax in float32, as in transformers' eager attention.

    Args:
        q: [B, Hq, Lq, D], any floating type; k: [B, Hkv, Lk, D] and v: [B, Hkv, Lk, Dv], like it.
        window: keys that a query sees, itself included; at least 1.
        scoring: the factor of the scores, their cap and the sinks.
        kv_start: int32 or int64 [B], the first key of each sequence that counts; None if all do.

    Returns:
        [B, Hq, Lq, Dv] in the type of q; rows before `kv_start` are zero.

    Raises:
        InputError: the tensors do not fit one another.
    """
    shape = call_shape(q, k, v, kv_start)
    scoring = scoring.checked(shape, q)
    rows = max(ROWS, window)
    blocks = []
    for begin in range(0, shape.q_len, rows):
        end = min(begin + rows, shape.q_len)
        first, last = max(0, shape.offset + begin - window + 1), shape.offset + end
        position = torch.arange(shape.offset + begin, last, device=q.device)[:, None]
        key = torch.arange(first, last, device=q.device)
        visible = (key <= position) & (key > position - window)
        if kv_start is not None:
            visible = (visible & (key >= kv_start[:, None, None]))[:, None]
        blocks.append(_masked(q[:, :, begin:end], k[:, :, first:last], v[:, :, first:last], visible, scoring))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 2)


def _masked(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scoring: Scoring) -> Tensor:
    """Attention of some rows in which `visible`, bool [.., rows, keys], says who sees whom; others' rows are zero."""
    scale, softcap, sinks = scoring
    assert scale is not None
    blind = ~visible.any(-1, keepdim=True)
    if softcap is None and sinks is not None:
        q, k, v = with_sink_key(q, k, v, sinks, scale)
        visible = F.pad(visible, (1, 0), value=True)
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
    if softcap is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible | blind, scale=scale)
        return out.masked_fill(blind, 0.0)
    scores = capped((q @ k.transpose(2, 3) * scale).float(), softcap).masked_fill(~visible, float("-inf"))
    weights = softmax(scores.masked_fill(blind, 0.0), None if sinks is None else sinks.float()[None, :, None, None])
    return (weights.to(v.dtype) @ v).masked_fill(blind, 0.0)
