"""The errors of the rows of attention's output: of all rows against dense attention, of a few against exact attention.

A few rows of a prompt may carry a third of its error, so that an error of some rows says little about all. Dense
attention in the model's own type costs a prefill no more than one more attention, and its rounding (in bfloat16 some
3e-6 of the output's mean square) only adds to the error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from calibrate.curves.row_errors import row_errors
from s2o_runtime.scoring import Scoring, capped, softmax

SCORES = 2**27  # scores computed together, half a gigabyte in float32


@dataclass(frozen=True)
class RowErrors:
    """What every row of one output is off by.

    squares, powers: Means over heads and Dv of the squared error and of the dense output's squares, float64 [Lq]. off:
    Each row's relative error (`row_errors`), float32 [Hq, Lq].
    """

    squares: Tensor
    powers: Tensor
    off: Tensor

    def mse_and_power(self, first: int = 0) -> tuple[float, float]:
        """The mean squared error and the mean square of the dense output, over the rows from `first`."""
        mse, power = torch.stack([self.squares[first:], self.powers[first:]]).mean(1).tolist()
        return mse, power


def errors_of_rows(out: Tensor, dense: Tensor) -> RowErrors:
    """The errors of all rows.

    Args:
        out, dense: [1, Hq, Lq, Dv] of one prompt, any floating type: an attention output, and dense attention's.
    """
    heads, rows, value_dim = out.shape[1:]
    squares, powers = torch.zeros(2, rows, dtype=torch.float64, device=out.device)
    off = torch.empty(heads, rows, dtype=torch.float32, device=out.device)
    for head in range(heads):  # one at a time: a long output in float32 is large
        ours, truth = out[:, head : head + 1].float(), dense[:, head : head + 1].float()
        squares += (ours - truth).square().sum(-1)[0, 0]
        powers += truth.square().sum(-1)[0, 0]
        off[head] = row_errors(ours, truth)[0, 0]
    return RowErrors(squares / (heads * value_dim), powers / (heads * value_dim), off)


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


def exact_rows(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, scoring: Scoring) -> Tensor:
    """Some rows of `exact_attention`, for the cost of these rows.

    Args:
        q: [1, Hq, Lq, D], any floating type. Query i stands at position Lk - Lq + i.
        k, v: [1, Hkv, Lk, D] and [1, Hkv, Lk, Dv].
        rows: Which of the queries, int64 [R], ascending.
        scoring: What the layer makes of the products of q and k.

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
