"""Dense attention by the fastest code for a call, where nothing has chosen a tile."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from ..call import PLAIN, Scoring
from ..config import HEAD_DIMS, LayerConfig, TileConfig
from ..devices import get_capability
from ..reference.dense import dense_attention, get_preferred_backend
from ..tiles import list_candidate_tiles
from .api import s2o_attention


def fastest_dense_attention(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring = PLAIN, kv_start: Tensor | None = None
) -> Tensor:
    """Compute `dense_attention`, on a GPU soft-capped scores, which SDPA does not know, in S2O's kernel if it can."""
    widest = max(q.shape[3], v.shape[3])
    if scoring.softcap is not None and q.is_cuda and widest <= HEAD_DIMS[-1] and get_preferred_backend() is None:
        tiles = list_candidate_tiles(widest, get_capability(q.device))
        if tiles:
            config = _make_dense_config(q.shape[1], tiles[0])
            out: Tensor = s2o_attention(q, k, v, config, kv_start=kv_start, **scoring.arguments())
            return out
    return dense_attention(q, k, v, kv_start=kv_start, **scoring.arguments())


@lru_cache(maxsize=64)
def _make_dense_config(heads: int, tile: TileConfig) -> LayerConfig:
    return LayerConfig.uniform(heads, mode="dense", tile=tile)
