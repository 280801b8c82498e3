"""SpargeAttn (arXiv 2502.18137): compressed scores of self-similar blocks, TopCdf, and the skip of the product with v.

Without quantisation (its section 3.5) and without the Hilbert curve (3.7), which is for images.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scripts.bench.baselines.pooling import heaviest_by_means, pool
from scripts.bench.baselines.selection import Grid, Selection, of_query_heads, select_blocks
from scripts.bench.baselines.settings import Sparge


def select(q: Tensor, k: Tensor, settings: Sparge, *, scale: float) -> Selection:
    """The key blocks of a layer.

    Args:
        q: [B, Hq, Lq, D]; k: [B, Hkv, Lk, D].
        scale: multiplies the scores.

    Source: SpargeAttn, Algorithm 1, lines 4 to 6.
    """
    group = q.shape[1] // k.shape[1]
    grid = Grid.plain(q, k, settings.block, settings.block_k)
    (q_means, q_similarity), (k_means, k_similarity) = pool(q, settings.block), pool(k, settings.block_k)
    different_q = (q_similarity < settings.similarity)[..., None]  # [B, Hq, row blocks, 1]
    different_k = (k_similarity < settings.similarity)[:, :, None]  # [B, Hkv, 1, key blocks]
    columns = torch.arange(grid.columns, device=q.device)
    visible = columns < grid.visible(q.device)[:, None]
    first = columns < settings.first

    def wanted(part: slice) -> Tensor:
        always = of_query_heads(different_k, group, part)
        means = q_means[:, part], of_query_heads(k_means, group, part)
        heaviest = heaviest_by_means(*means, scale, visible & ~always, settings.keep)
        return heaviest | always | first | different_q[:, part]

    return select_blocks(q, grid, wanted)
