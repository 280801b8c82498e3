"""Prism (arXiv 2602.08426): pooled scores in two bands of RoPE's frequencies, each with a temperature of its own.

The mean of a block cancels what RoPE turns fast. So dimensions of high and of low frequency are scored apart, and the
scores of each band are divided by how much of the mean's length the band has, which restores what was cancelled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from s2o_runtime.baselines.pooling import block_means, heaviest_by_means
from s2o_runtime.baselines.selection import (
    Grid,
    Selection,
    all_heads,
    as_slice,
    read_heads,
    select_blocks,
    take,
)
from s2o_runtime.baselines.settings import Prism

LEAST_SHARE = 1e-6  # of a band, so that nothing is divided by 0


def select(q: Tensor, k: Tensor, settings: Prism, *, scale: float, heads: Sequence[int] | None = None) -> Selection:
    """The key blocks of `heads` (all by default): what either band chooses, and the first blocks.

    Args:
        q: [B, Hq, Lq, D], k: [B, Hkv, Lk, D], with RoPE as transformers applies it: dimensions i and D / 2 + i turn
            together, the faster the smaller i is.
        scale: multiplies the scores.

    Source: Prism's dual-band estimation with energy-based temperatures.
    """
    heads = all_heads(q, heads)
    grid = Grid.plain(q, k, settings.block, settings.block)
    kv_heads, slots = read_heads(heads, q.shape[1] // k.shape[1])
    q_mean = block_means(take(q, heads), settings.block)
    k_mean = block_means(take(k, kv_heads), settings.block)
    candidates = torch.arange(grid.columns, device=q.device) < grid.visible(q.device)[:, None]
    half = q.shape[3] // 2
    high, low = (max(1, round(share * half)) for share in (settings.high, settings.low))
    bands = []
    for begin, end in ((0, high), (half - low, half)):
        q_band, k_band = band(q_mean, begin, end), band(k_mean, begin, end)
        bands.append((q_band, k_band, energy_share(q_band, q_mean), energy_share(k_band, k_mean)))

    def wanted(part: range) -> Tensor:
        of_part, part_slots = as_slice(part), [slots[i] for i in part]
        chosen = candidates.new_zeros(q.shape[0], len(part), grid.rows, grid.columns)
        for q_band, k_band, q_share, k_share in bands:
            temperature = (q_share[:, of_part] * take(k_share, part_slots)).clamp_min(LEAST_SHARE)
            keys = take(k_band, part_slots)
            chosen |= heaviest_by_means(q_band[:, of_part], keys, scale / temperature, candidates, settings.keep)
        chosen[..., : settings.first] = True
        return chosen

    return select_blocks(q, k, grid, heads, wanted)


def band(mean: Tensor, begin: int, end: int) -> Tensor:
    """Dimensions begin .. end of each half of [B, H, blocks, D]."""
    half = mean.shape[3] // 2
    return torch.cat([mean[..., begin:end], mean[..., half + begin : half + end]], 3)


def energy_share(of_band: Tensor, mean: Tensor) -> Tensor:
    """The root of the share of the means' squared length that a band has, over all blocks: [B, H, 1, 1].

    The temperature of Prism, sqrt(d / D) rms(band of q) / rms(q) rms(band of k) / rms(k), and the root of d by which
    its scores are divided, are together the root of D times two of these.
    """
    energy = mean.square().sum((2, 3), keepdim=True)
    return (of_band.square().sum((2, 3), keepdim=True) / energy.clamp_min(torch.finfo(mean.dtype).tiny)).sqrt()
