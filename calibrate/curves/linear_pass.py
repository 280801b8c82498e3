"""The curves of linear tails: what every head does that visits one chunk and estimates the rest to first order.

There is no threshold, so each ranking and spacing of checks is run, and becomes a curve of one point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from calibrate.curves import trace_pass
from calibrate.curves.curves import Curve, RankingConfig, Shape, head_norms, pairs_from, window_pairs
from calibrate.curves.row_errors import row_errors, tile_worst, worst_of
from calibrate.model.layers import Captured
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.config import LayerConfig, TileConfig
from s2o_runtime.devices import capability
from s2o_runtime.tiles import candidate_tiles

BLOCK_N = 64  # keys of a tile where no kernel runs; every stride is a multiple of it


@torch.no_grad()
def measure(
    prompt: Captured, rankings: Sequence[RankingConfig], shapes: Sequence[Shape], last_rows: int = 0
) -> dict[tuple[RankingConfig, Shape], Curve]:
    """One prompt's errors and density with a linear tail in every head.

    Args:
        prompt: the layer's q, k and v.
        rankings: with linear tails, all of one segment length.
        shapes: of the tiles that may run the layer.
        last_rows: so many rows at the prompt's end are dense.

    Returns:
        A curve of one point for every ranking and shape; none if the layer's scores have a soft cap.
    """
    if not rankings or prompt.softcap is not None:
        return {}
    dense = prompt.truth()
    power = float(head_norms(dense).mean()) / dense.shape[3]
    curves: dict[tuple[RankingConfig, Shape], Curve] = {}
    for ranking in rankings:
        for stride in sorted({shape.stride for shape in shapes}):
            tile, backend = _tile(prompt, ranking.segment, stride)
            config = _config(prompt, ranking, tile, last_rows)
            out = s2o_attention(
                prompt.q, prompt.k, prompt.v, config, **prompt.scoring.arguments(), backend=backend
            )  # fmt: skip
            mse = torch.stack([_squared(ours, truth) for ours, truth in zip(out[0], dense[0], strict=True)])
            errors = row_errors(out, dense)[0]
            visited = density(prompt.q.shape[2], config)
            for shape in shapes:
                if shape.stride == stride:
                    worst = worst_of(tile_worst(errors, shape.block_m))
                    curves[ranking, shape] = _one_point(mse, worst, visited, power)
    return curves


def density(length: int, config: LayerConfig) -> float:
    """The share of the causal pairs that a head of the layer with a linear tail computes."""
    tile, segment, rows = config.tile, config.segment, config.dense_from(length)
    pairs = window_pairs(range(rows), segment, tile.block_n) + pairs_from(rows, length)
    for begin in range(0, rows, segment):
        prefix = begin // tile.block_n * tile.block_n
        pairs += min(segment, rows - begin) * min(tile.stride, prefix)
    return pairs / (length * (length + 1) / 2)


def _config(prompt: Captured, ranking: RankingConfig, tile: TileConfig, last_rows: int) -> LayerConfig:
    return LayerConfig.uniform(
        prompt.q.shape[1], segment=ranking.segment, grain=ranking.grain, tile=tile, far="linear", last_rows=last_rows
    )


def _tile(prompt: Captured, segment: int, stride: int) -> tuple[TileConfig, Literal["triton", "reference"]]:
    """A tile with so many keys between checks, and what runs it: a GPU's kernels where they can."""
    if trace_pass.supports(prompt):
        widest = max(prompt.q.shape[3], prompt.v.shape[3])
        for tile in candidate_tiles(widest, capability(prompt.q.device)):
            if segment % tile.rows == 0 and stride % tile.block_n == 0:
                return replace(tile, chunk=stride // tile.block_n), "triton"
    return TileConfig(64, BLOCK_N, stride // BLOCK_N, 4, 2), "reference"


def _squared(out: Tensor, truth: Tensor) -> Tensor:
    return (out.float() - truth.float()).square().mean()


def _one_point(mse: Tensor, worst: Tensor, visited: float, power: float) -> Curve:
    mse, worst = (values.double().cpu()[:, None] for values in (mse, worst))
    return Curve(mse, mse, worst, worst, torch.full_like(mse, visited), power)
