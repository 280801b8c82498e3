"""A few rows of exact attention, which cost a small part of what all rows cost."""

from __future__ import annotations

import torch
from torch import Tensor

from s2o_runtime.scoring import Scoring, capped, softmax

SCORES = 2**27  # scores computed together, half a gigabyte in float32


def exact_rows(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, scoring: Scoring) -> Tensor:
    """Some rows of `exact_attention`, for the cost of these rows.

    Args:
        q: [1, Hq, Lq, D], any floating type. Query i stands at position Lk - Lq + i.
        k, v: [1, Hkv, Lk, D] and [1, Hkv, Lk, Dv].
        rows: which of the queries, int64 [R], ascending.
        scoring: what the layer makes of the products of q and k.

    Returns:
        [1, Hq, R, Dv] in float32, or float64 for float64 inputs.
    """
    heads, q_len, head_dim = q.shape[1:]
    kv_heads, kv_len = k.shape[1:3]
    group = heads // kv_heads
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = head_dim**-0.5 if scoring.scale is None else scoring.scale
    sinks = None if scoring.sinks is None else scoring.sinks.to(dtype).view(kv_heads, group, 1, 1)
    truth = torch.empty(kv_heads, group, len(rows), v.shape[3], dtype=dtype, device=q.device)
    together = max(1, SCORES // (group * kv_len))
    for head in range(kv_heads):  # one at a time: keys in float32 are large
        keys, values = k[0, head].to(dtype), v[0, head].to(dtype)
        for begin in range(0, len(rows), together):
            part = rows[begin : begin + together]
            last = int(part[-1]) + kv_len - q_len + 1
            part = part.to(q.device)
            queries = q[0, head * group : (head + 1) * group, part].to(dtype) * scale  # [G, R', D]
            hidden = torch.arange(last, device=q.device) > (part + kv_len - q_len)[:, None]  # [R', Lk']
            scores = capped(queries @ keys[:last].T, scoring.softcap).masked_fill_(hidden, -torch.inf)
            weights = softmax(scores, None if sinks is None else sinks[head])
            truth[head, :, begin : begin + together] = weights @ values[:last]
    return truth.view(1, heads, len(rows), -1)
