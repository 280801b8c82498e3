"""The error of a few rows of attention's output, which costs a small part of what all rows cost."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from calibrate.curves.row_errors import row_errors

ROWS = 64  # rows drawn from each part of a prompt
LAST = 8  # the last part of a prompt is one of this many
SCORES = 2**27  # scores computed together, half a gigabyte in float32


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


def drawn_tiles(length: int, height: int, most: int, generator: torch.Generator) -> Tensor:
    """Rows of whole tiles, one tile from each of equal parts of a prompt; all rows if there are at most `most`.

    Args:
        length: Rows of the prompt.
        height: Rows of a tile.
        most: How many rows are drawn, a multiple of `height`.

    Returns:
        int64 [R] on the CPU, ascending.
    """
    if length <= most:
        return torch.arange(length)
    tiles = evenly_drawn(0, length // height, most // height, generator)
    return (tiles[:, None] * height + torch.arange(height)).flatten()


def sampled_rows(q: Tensor, k: Tensor, v: Tensor, out: Tensor, rows: Tensor, scale: float | None) -> RowSample:
    """Compare rows of an attention output with exact attention in float32.

    Args:
        q, out: [1, Hq, Lq, D], any floating type. Query i stands at position Lk - Lq + i.
        k, v: [1, Hkv, Lk, D].
        rows: Which of the queries, int64 [R].
        scale: Multiplies the scores; D ** -0.5 by default.
    """
    dense = exact_rows(q, k, v, rows, scale)
    ours = out[:, :, rows.to(out.device)].to(dense.dtype)
    return RowSample(
        mse=float((ours - dense).square().mean()),
        power=float(dense.square().mean()),
        off=row_errors(ours, dense)[0].cpu(),
    )


def exact_rows(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, scale: float | None) -> Tensor:
    """Some rows of `exact_attention`, for the cost of these rows.

    Args:
        q, k, v: As for `sampled_rows`.
        rows: Which of the queries, int64 [R], ascending.
        scale: Multiplies the scores; D ** -0.5 by default.

    Returns:
        [1, Hq, R, D] in float32, or float64 for float64 inputs.
    """
    heads, q_len, head_dim = q.shape[1:]
    kv_heads, kv_len = k.shape[1:3]
    group = heads // kv_heads
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = head_dim**-0.5 if scale is None else scale
    truth = torch.empty(kv_heads, group, len(rows), head_dim, dtype=dtype, device=q.device)
    together = max(1, SCORES // (group * kv_len))
    for head in range(kv_heads):  # one at a time: keys in float32 are large
        keys, values = k[0, head].to(dtype), v[0, head].to(dtype)
        for begin in range(0, len(rows), together):
            part = rows[begin : begin + together]
            last = int(part[-1]) + kv_len - q_len + 1
            part = part.to(q.device)
            queries = q[0, head * group : (head + 1) * group, part].to(dtype) * scale  # [G, R', D]
            hidden = torch.arange(last, device=q.device) > (part + kv_len - q_len)[:, None]  # [R', Lk']
            scores = (queries @ keys[:last].T).masked_fill_(hidden, -torch.inf)
            truth[head, :, begin : begin + together] = scores.softmax(-1) @ values[:last]
    return truth.view(1, heads, len(rows), head_dim)
