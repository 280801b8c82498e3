"""The error of single rows of attention's output: a mean over a layer can hide a few rows that went wrong."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

WORST = 0.99  # the quantile over row tiles that stands for the worst rows


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
    power = truth.square().sum(-1)
    scale = power.maximum(power.mean(-1, keepdim=True)).clamp(min=1e-30)
    return ((out.float() - truth).square().sum(-1) / scale).sqrt()


def tile_worst(errors: Tensor, block: int = 64) -> Tensor:
    """The largest of each `block` adjacent row errors: [..., L] -> [..., ceil(L / block)]."""
    padded = F.pad(errors, (0, -errors.shape[-1] % block))
    return padded.view(*padded.shape[:-1], -1, block).amax(-1)
