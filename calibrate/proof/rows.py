"""The error of a few rows of attention's output, which costs a small part of what all rows cost."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from calibrate.curves.row_errors import row_errors
from s2o_runtime.scoring import Scoring, capped, softmax

ROWS = 64  # rows drawn from each part of a prompt
LAST = 8  # the last part of a prompt is one of this many


@dataclass(frozen=True)
class RowSample:
    """What some rows of one output are off by, each row in all heads.

    mse, power: The mean squared error and the mean square of the dense output, over rows, heads and D. off: Each
    row's relative error (`row_errors`), float32 [Hq, R].
    """

    mse: float
    power: float
    off: Tensor


def evenly_drawn(first: int, end: int, count: int, generator: torch.Generator) -> Tensor:
    """One row from each of `count` equal parts of the rows from `first` to `end`; all of them if they are fewer.

    Returns:
        int64 [R] on the CPU, ascending, each row at most once.
    """
    if end - first <= count:
        return torch.arange(first, end)
    draw = torch.rand(count, generator=generator, dtype=torch.float64)
    edges = torch.arange(count + 1) * (end - first) // count
    return first + edges[:-1] + (draw * (edges[1:] - edges[:-1])).long()


def sampled_rows(q: Tensor, k: Tensor, v: Tensor, out: Tensor, rows: Tensor, scoring: Scoring) -> RowSample:
    """Compare rows of an attention output with exact attention in float32.

    Args:
        q, out: [1, Hq, Lq, D] and [1, Hq, Lq, Dv], any floating type. Query i stands at position Lk - Lq + i.
        k, v: [1, Hkv, Lk, D] and [1, Hkv, Lk, Dv].
        rows: Which of the queries, int64 [R].
        scoring: What the layer makes of the products of q and k.
    """
    heads, q_len, head_dim = q.shape[1:]
    kv_heads, kv_len = k.shape[1:3]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = head_dim**-0.5 if scoring.scale is None else scoring.scale
    rows = rows.to(q.device)
    hidden = torch.arange(kv_len, device=q.device) > (rows + kv_len - q_len)[:, None]  # [R, Lk]
    queries = q[0, :, rows].to(dtype).view(kv_heads, heads // kv_heads, len(rows), head_dim) * scale
    truth = queries.new_empty(*queries.shape[:3], v.shape[3])
    sinks = None if scoring.sinks is None else scoring.sinks.to(dtype).view(kv_heads, -1, 1, 1)
    for head in range(kv_heads):  # one at a time: keys in float32 are large
        scores = capped(queries[head] @ k[0, head].to(dtype).T, scoring.softcap)  # [G, R, Lk]
        weights = softmax(scores.masked_fill_(hidden, -torch.inf), None if sinks is None else sinks[head])
        truth[head] = weights @ v[0, head].to(dtype)
    dense, ours = truth.view(1, heads, len(rows), -1), out[:, :, rows].to(dtype)
    return RowSample(
        mse=float((ours - dense).square().mean()),
        power=float(dense.square().mean()),
        off=row_errors(ours, dense)[0].cpu(),
    )
