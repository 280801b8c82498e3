"""The errors of the rows of attention's output against dense attention.

A few rows of a prompt may carry a third of its error, so that an error of some rows says little about all. Dense
attention in the model's own type costs a prefill no more than one more attention, and its rounding (in bfloat16 some
3e-6 of the output's mean square) only adds to the error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from calibrate.curves.row_errors import row_errors


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
