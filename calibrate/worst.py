"""The error of single rows of attention: a layer's mean can hide a few rows that went wrong."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

WORST = 0.99  # the share of row tiles that are no worse than what is said of the worst rows


def row_errors(out: Tensor, truth: Tensor) -> Tensor:
    """The relative error of every row, float32 [B, H, L], of outputs [B, H, L, D].

    |out - truth|^2 over the larger of |truth|^2 and the mean of |truth|^2 over the rows of the head, so that a row
    whose values cancel out does not count for more than it is worth.
    """
    truth = truth.float()
    power = truth.square().sum(-1)
    scale = power.maximum(power.mean(-1, keepdim=True)).clamp(min=1e-30)
    return (out.float() - truth).square().sum(-1) / scale


def tile_worst(errors: Tensor, block: int = 64) -> Tensor:
    """The largest of `block` adjacent row errors: [..., L] in, [..., ceil(L / block)] out."""
    padded = F.pad(errors, (0, -errors.shape[-1] % block))
    return padded.view(*padded.shape[:-1], -1, block).amax(-1)
