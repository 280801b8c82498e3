"""Tiles for another GPU: a profile's thresholds and segments stay, its kernels are tuned anew.

No model and no prompts are needed. How long a layer takes is decided by its shapes and by where its heads stop, so
synthetic queries and keys are timed whose heads visit as much as the profile's record says that the model's do.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calibrate.capture import Captured
from calibrate.costs import overhead
from calibrate.crossover import with_crossover
from calibrate.curves import TAUS, Method, Shape, measure
from calibrate.timing import FAILURES, Timing, against_dense, reason
from calibrate.versions import versions
from s2o_runtime.attention import s2o_attention
from s2o_runtime.config import HeadConfig, LayerConfig, TileConfig
from s2o_runtime.dense import dense_attention
from s2o_runtime.errors import InputError
from s2o_runtime.gpu import Rejected, candidate_tiles, default_tile, fit, identify
from s2o_runtime.identity import Geometry
from s2o_runtime.profile import Profile, load_profile, save_profile

LONGEST = 32768  # keys: longer buckets are timed at this length
ALIKE = 0.05  # layers whose densities, and whose rankings' shares of dense time, round to the same step are timed once
OTHER_HEIGHT = 1.05  # how much faster a tile of another height must be: which rows stop together moves the error
SEED = 0

log = logging.getLogger("calibrate")


@dataclass(frozen=True)
class Kind:
    """What layers have in common that are timed once.

    length: keys, at most `LONGEST`; segments: those of its heads, ascending; shape: of the profile's tile; density,
    ranking: in steps of `ALIKE`, the pairs computed and the time that ranking adds, both over dense attention's.
    """

    length: int
    segments: tuple[int, ...]
    grain: int
    shape: Shape
    density: int
    ranking: int


@dataclass(frozen=True)
class Retiled:
    """The profile that was written; kinds: its record of what was timed; dense_layers: how many became dense."""

    profile: Profile
    kinds: tuple[dict[str, Any], ...]
    dense_layers: int


_Place = tuple[int, int]  # bucket and layer
_Densities = list[list[float]]  # of every bucket and layer


def retile(profile: Path, device: str, out: Path) -> Retiled:
    """Write `profile` with tiles and crossovers for the GPU `device` to `out`; every threshold stays as it is.

    Each kind of layer is timed with every tile this GPU has for it and takes the fastest; where not even that beats
    dense attention, its layers become dense. A tile also decides where heads may stop, so the errors in the profile's
    record hold only nearly. To keep them from growing, no tile checks more often than the profile's: with a larger
    stride more keys, and more important ones, are weighed together, and a head stops later. If this GPU has no such
    tile, its tiles are given the profile's stride. A tile of another height must be faster by `OTHER_HEIGHT`. Buckets
    beyond `LONGEST` keys are timed at that length.

    On a CPU, where the reference runs any tile, only the device's identity changes.
    Raises ProfileError if the profile cannot be read, InputError if its record lacks densities or this device has no
    kernel for it.
    """
    old = load_profile(profile)
    where = torch.device(device)
    here = identify(where)
    suits = fit(old.device, here)
    if isinstance(suits, Rejected):
        raise InputError(f"{profile} cannot be tuned here: {suits.reason}")
    layers, dense_layers = old.layers, 0
    timed: tuple[dict[str, Any], ...] = ()
    if any(layer.block_heads for bucket in old.layers for layer in bucket):
        raise InputError(f"{profile} has heads of other methods than S2O, whose time depends on text: calibrate here")
    if here.kind == "cuda":
        candidates = candidate_tiles(old.geometry.head_dim, here.capability)
        spare = default_tile(old.geometry.head_dim, here.capability)
        layers, timed, dense_layers = _tuned(old, _densities(old, profile), candidates, spare, where)
    proof = old.record.get("proof")
    record = {
        "proof": f"held out on {old.device}" if proof == "held out" else proof,
        "retiled": {
            "from": str(old.device),
            "to": str(here),
            "versions": versions(),
            "kinds": list(timed),
            "dense_layers": dense_layers,
            "note": f"errors, densities and times elsewhere in this record are of {old.device}",
        },
    }
    new = replace(old, device=here, layers=layers, record=old.record | record)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_profile(new, out)
    return Retiled(new, timed, dense_layers)


def _tuned(
    profile: Profile, densities: _Densities, candidates: tuple[TileConfig, ...], spare: TileConfig, where: torch.device
) -> tuple[tuple[tuple[LayerConfig, ...], ...], tuple[dict[str, Any], ...], int]:
    """The new layers, the record of every kind, and how many layers became dense; `spare`: the tile of dense ones."""
    made = [[_dense(config, spare) for config in bucket] for bucket in profile.layers]
    timed, dense_layers = [], 0
    for kind, places in sorted(_kinds(profile, densities).items(), key=lambda each: each[0].length):
        bucket, layer = places[0]
        density, config = densities[bucket][layer], profile.layers[bucket][layer]
        tile, timing = _fastest(config, density, kind.length, candidates, profile.geometry, where)
        if tile is None or timing is None or timing.seconds >= timing.dense_seconds:
            dense_layers += len(places)
        else:
            for i, j in places:
                tuned = profile.layers[i][j].with_tile(tile)
                made[i][j] = tuned.with_tile(with_crossover(tuned, profile.geometry, where))
        timed.append(
            {
                "timed_at": kind.length,
                "layers": [[profile.lengths[i], j] for i, j in places],
                "density": density,
                "tile": None if tile is None else str(tile),
                "seconds": None if timing is None else timing.seconds,
                "dense_seconds": None if timing is None else timing.dense_seconds,
            }
        )
        log.info("%s", timed[-1])
    _inputs.cache_clear()
    return tuple(map(tuple, made)), tuple(timed), dense_layers


def _kinds(profile: Profile, densities: _Densities) -> dict[Kind, list[_Place]]:
    """The layers of every kind, without those that are dense as a whole."""
    found: dict[Kind, list[_Place]] = {}
    for bucket, length in enumerate(profile.lengths):
        for layer, config in enumerate(profile.layers[bucket]):
            if config.is_dense:
                continue
            ranked = _ranked(config)
            ranking = sum(overhead(_method(head, config.grain), head.tail) for head in ranked) / config.num_heads
            kind = Kind(
                min(length, LONGEST),
                tuple(sorted({head.segment for head in ranked})),
                config.grain,
                Shape.of(config.tile),
                round(densities[bucket][layer] / ALIKE),
                round(ranking / ALIKE),
            )
            found.setdefault(kind, []).append((bucket, layer))
    return found


def _densities(profile: Profile, path: Path) -> _Densities:
    """Each layer's density at each bucket, as it was proven, or else as it was predicted."""
    found: dict[int, list[float]] = {}
    try:
        for name in ("predicted", "held_out"):
            for entry in profile.record.get(name, ()):
                found[entry["length"]] = [float(layer["density"]) for layer in entry["layers"]]
        if any(len(each) != profile.geometry.layers for each in found.values()):
            raise ValueError("layers are missing")
        return [found[length] for length in profile.lengths]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"the record of {path} does not give every layer's density at {list(profile.lengths)} tokens: "
            "use a profile that s2o-calibrate wrote"
        ) from error


def _fastest(
    config: LayerConfig, density: float, length: int, candidates: tuple[TileConfig, ...], geometry: Geometry,
    where: torch.device,
) -> tuple[TileConfig | None, Timing | None]:  # fmt: skip
    """The tile to take for a layer and its time; None if no tile fits, or every one failed."""
    prompt = _inputs(geometry, length, where)
    stopping = _stopping(prompt, config, density)
    best: tuple[TileConfig | None, Timing | None] = None, None
    least = math.inf
    for tile in legal_tiles(config, candidates):
        try:
            timing = against_dense(
                partial(s2o_attention, prompt.q, prompt.k, prompt.v, stopping.with_tile(tile), scale=prompt.scale),
                partial(dense_attention, prompt.q, prompt.k, prompt.v, scale=prompt.scale),
                where,
                least,
            )
        except FAILURES as failure:
            log.warning("tile %s failed: %s", tile, reason(failure))
            continue
        seconds = timing.seconds * (1.0 if tile.block_m == config.tile.block_m else OTHER_HEIGHT)
        if seconds < least:
            best, least = (tile, timing), seconds
    return best


def legal_tiles(config: LayerConfig, candidates: tuple[TileConfig, ...]) -> list[TileConfig]:
    """The tiles a layer may take in place of its own: whole tiles in every segment, and no smaller stride."""
    least = config.tile.stride
    enough = [tile for tile in candidates if tile.stride >= least]
    if not enough:
        raised = (replace(tile, chunk=-(-least // tile.block_n)).validate() for tile in candidates)
        enough = list(dict.fromkeys(raised))
    return [tile for tile in enough if not any(head.segment % tile.rows for head in _ranked(config))]


def _stopping(prompt: Captured, config: LayerConfig, density: float) -> LayerConfig:
    """The layer with thresholds at which its heads, given the synthetic inputs, compute `density` of the pairs."""
    ranked = _ranked(config)
    wanted = (density * config.num_heads - (config.num_heads - len(ranked))) / len(ranked)
    shape = Shape.of(config.tile)
    of_method = {
        method: measure(prompt, [method], [shape])[method, shape].density
        for method in {_method(head, config.grain) for head in ranked}
    }
    heads = tuple(
        head
        if head.mode == "dense"
        else replace(head, tau=tau_for(of_method[_method(head, config.grain)][index], wanted), threshold="rest")
        for index, head in enumerate(config.heads)
    )
    return replace(config, heads=heads)


def tau_for(densities: Tensor, wanted: float) -> float:
    """The tau of a head with this density, from those at `TAUS` [T], interpolated in log tau.

    Beyond what was measured the nearest of `TAUS`, or 0, which computes everything.

    >>> tau_for(torch.linspace(1.0, 0.5, len(TAUS)), 0.75)
    1.0
    """
    falling = densities.cummin(0).values.tolist()
    if wanted >= falling[0]:
        return 0.0 if 1.0 - wanted < wanted - falling[0] else TAUS[0]
    for place in range(1, len(TAUS)):
        if falling[place] <= wanted:
            share = (falling[place - 1] - wanted) / (falling[place - 1] - falling[place])
            return math.exp((1 - share) * math.log(TAUS[place - 1]) + share * math.log(TAUS[place]))
    return TAUS[-1]


@lru_cache(maxsize=1)
def _inputs(geometry: Geometry, length: int, where: torch.device) -> Captured:
    """Random queries, keys and values of a model's shapes; some keys are long, so that few matter to many queries."""
    generator = torch.Generator(where).manual_seed(SEED)
    q, k, v = (
        torch.randn(1, length, heads, geometry.head_dim, generator=generator, device=where)
        for heads in (geometry.query_heads, geometry.kv_heads, geometry.kv_heads)
    )
    q += 1.0  # keys then matter to all queries alike, as far as they point that way
    k *= 4 * torch.rand(1, length, geometry.kv_heads, 1, generator=generator, device=where).square()
    q, k, v = (each.bfloat16().transpose(1, 2) for each in (q, k, v))
    return Captured(q, k, v, geometry.head_dim**-0.5)


def _ranked(config: LayerConfig) -> list[HeadConfig]:
    return [head for head in config.heads if head.mode == "s2o"]


def _method(head: HeadConfig, grain: int) -> Method:
    return Method(head.segment, head.representatives, grain)


def _dense(config: LayerConfig, tile: TileConfig) -> LayerConfig:
    heads = tuple(replace(head, mode="dense") for head in config.heads)
    return replace(config, heads=heads, tile=tile).validate()
