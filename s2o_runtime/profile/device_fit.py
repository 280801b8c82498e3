"""A profile as it can run on the GPU at hand: as it is, with tiles that are safe there, or not at all."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from s2o_runtime.config import MAX_CHUNK, LayerConfig, TileConfig
from s2o_runtime.devices import fit, identify
from s2o_runtime.profile.profile import Profile
from s2o_runtime.tiles import candidate_tiles

log = logging.getLogger("s2o_runtime")


def fitted(profile: Profile, device: torch.device) -> tuple[Profile, str | None]:
    """The profile as it can run on this device, and why it cannot, if so; a warning says what was not proven here."""
    here = identify(device)
    verdict = fit(profile.device, here)
    if verdict.tiles == "profile":
        return profile, None
    log.warning("%s", verdict.reason)
    if verdict.tiles is None:
        return profile, verdict.reason
    tiles = candidate_tiles(profile.geometry.head_dim, here.capability)
    layers = tuple(tuple(with_safe_tile(layer, tiles) for layer in bucket) for bucket in profile.layers)
    return replace(profile, layers=layers), None


def with_safe_tile(config: LayerConfig, tiles: Sequence[TileConfig]) -> LayerConfig:
    """A layer with a tile of another GPU that stops its heads where the layer's own tile does.

    The same tau means the same error only with as many keys between two stop checks and as many rows that stop
    together. So the stride is kept, rounded up to whole tiles, and the height where the GPU has a tile of it. The
    layer becomes dense if no tile fits its segments, and stays as it is where the GPU has no tile at all.

    Args:
        config: a layer of a profile.
        tiles: the GPU's tiles, the safest first.
    """
    segments = {head.segment for head in config.heads if head.mode == "s2o"}
    if config.is_dense or not segments or not tiles:
        return config
    chunks = ((tile, -(-config.tile.stride // tile.block_n)) for tile in tiles)
    fitting = [
        replace(tile, chunk=chunk)
        for tile, chunk in chunks
        if chunk <= MAX_CHUNK and not any(segment % tile.rows for segment in segments)
    ]
    if not fitting:
        return config.as_dense()
    return config.with_tile(min(fitting, key=lambda tile: tile.block_m != config.tile.block_m))
