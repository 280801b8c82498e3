"""The error of single rows of attention's output: a mean over a layer can hide a few rows that went wrong."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

WORST = 0.99  # the quantile of the errors, of rows or of row tiles, that stands for the worst rows


def row_errors(out: Tensor, truth: Tensor) -> Tensor:
    """The relative error of every row: the norm of what it is off by, over its norm.

    It is |out - truth| over |truth|, or over the root mean square of |truth| in the head where that is larger, so that
    a row whose values cancel out is not taken for a bad one.

    Args:
        out, truth: outputs [B, H, L, D].

    Returns:
        float32 [B, H, L].
    """
    truth = truth.float()
    return relative_errors((out.float() - truth).square().sum(-1), truth.square().sum(-1))


def relative_errors(squared: Tensor, power: Tensor) -> Tensor:
    """The same from each row's squared error and squared norm of the truth, float32 [..., L]."""
    scale = power.maximum(power.mean(-1, keepdim=True)).clamp(min=1e-30)
    return (squared / scale).sqrt()


def worst_of(errors: Tensor, dim: int = -1) -> Tensor:
    """The `WORST` quantile of errors, by the nearest rank: one of the errors, so that a root may be taken after it.

    Args:
        errors: of rows or of row tiles, of any shape and floating type; nan counts as the largest.
        dim: the dimension that goes.

    Returns:
        float64, without that dimension.
    """
    count = errors.shape[dim]
    rank = min(count, int(WORST * (count - 1) + 0.5) + 1)  # kthvalue counts from 1
    return errors.kthvalue(rank, dim).values.double()


def tile_worst(errors: Tensor, block: int = 64) -> Tensor:
    """The largest of each `block` adjacent row errors: [..., L] -> [..., ceil(L / block)]."""
    padded = F.pad(errors, (0, -errors.shape[-1] % block))
    return padded.view(*padded.shape[:-1], -1, block).amax(-1)
