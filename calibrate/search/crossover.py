"""The length below which dense attention is faster on this GPU, however little S2O computes."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

import torch

from calibrate.timing import medians
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.config import MAX_TAU, HeadConfig, LayerConfig, TileConfig
from s2o_runtime.identity import Geometry
from s2o_runtime.reference.dense import dense_attention

LENGTHS = tuple(1 << power for power in range(9, 18))
ROUNDS = 3


def with_crossover(config: LayerConfig, geometry: Geometry, device: torch.device) -> TileConfig:
    """A layer's tile with its `dense_below` measured, in tokens."""
    uncrossed = replace(config.tile, dense_below=0)
    below = dense_below(uncrossed, _quickest(config), config.grain, geometry, device)
    return replace(config.tile, dense_below=below).validate()


def _quickest(config: LayerConfig) -> HeadConfig:
    """A head that stops as early as it can, with the dearest ranking of the layer's heads."""
    ranked = [head for head in config.heads if head.mode == "s2o"] or [HeadConfig(segment=config.heads[0].segment)]
    dearest = max(ranked, key=lambda head: (head.representatives, head.tail))
    return replace(dearest, tau=MAX_TAU)


@lru_cache(maxsize=256)
def dense_below(tile: TileConfig, head: HeadConfig, grain: int, geometry: Geometry, device: torch.device) -> int:
    """The shortest of `LENGTHS` at which a call that stops as early as it can beats dense attention.

    Such a call computes the window and one chunk; with a lower threshold it would take longer. A prompt of one segment
    runs dense anyway, so there is nothing to compare.

    Args:
        tile: without a `dense_below` of its own.
        head: the settings of all heads.
        grain: of the layer.
        geometry: the model's.
        device: the GPU.

    Returns:
        Tokens; twice the longest of `LENGTHS` if dense attention is faster at all of them.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = LayerConfig((head,) * geometry.query_heads, tile, grain=grain).validate()
    for length in (length for length in LENGTHS if length > head.segment):
        q, k, v = (
            torch.randn(1, length, heads, geometry.head_dim, dtype=dtype, device=device).transpose(1, 2)
            for heads in (geometry.query_heads, geometry.kv_heads, geometry.kv_heads)
        )
        seconds = medians(
            {
                "dense": partial(dense_attention, q, k, v),
                "s2o": partial(s2o_attention, q, k, v, config),
            },
            device,
            ROUNDS,
        )
        if seconds["s2o"] < seconds["dense"]:
            return length
    return 2 * LENGTHS[-1]
