"""Tiles for another GPU: a profile's thresholds and segments stay, its kernels are tuned anew.

No model and no prompts are needed. How long a layer takes is decided by its shapes and by where its heads stop, so
synthetic queries and keys are timed whose heads visit as much as the profile's record says that the model's do.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from calibrate.compiling import compile_ahead, with_tiles
from calibrate.curves.curves import TAUS, RankingConfig, Shape, overhead
from calibrate.curves.measure import measure
from calibrate.model.layers import Captured
from calibrate.search.tiles import Layer, with_crossover
from calibrate.timing import FAILURES, Timing, against_dense, reason
from calibrate.versions import versions
from s2o_runtime.config import HeadConfig, LayerConfig, Scores, StopRule, TileConfig
from s2o_runtime.devices import fit, identify
from s2o_runtime.errors import InputError
from s2o_runtime.identity import Geometry
from s2o_runtime.profile import Profile, load_profile, save_profile
from s2o_runtime.profile.record import RetiledLayers, Retiling
from s2o_runtime.tiles import candidate_tiles, default_tile

LONGEST = 32768  # keys: longer buckets are timed at this length
ALIKE = 0.05  # layers whose densities, and whose rankings' shares of dense time, round to the same step are timed once
OTHER_HEIGHT = 1.05  # how much faster a tile of another height must be: which rows stop together moves the error
SEED = 0

log = logging.getLogger("calibrate")


@dataclass(frozen=True)
class TimingKey:
    """What the layers have in common that are timed as one.

    length: keys, at most `LONGEST`.
    segments: those of the layer's heads in queries, ascending.
    shape: of the profile's tile.
    density, ranking: the pairs computed and the time that ranking adds, both over dense attention's, in steps of
        `ALIKE`.
    last_rows: those at a prompt's end that run dense.
    """

    length: int
    segments: tuple[int, ...]
    shape: Shape
    density: int
    ranking: int
    scores: Scores = "input"
    last_rows: int = 0


_Layer = tuple[int, int]  # indices of its bucket and of the layer in it
_Densities = list[list[float]]  # of every bucket and layer


def retile(profile: Path, device: str, out: Path) -> Profile:
    """Write `profile` with tiles and crossovers for the GPU `device` to `out`; every threshold stays as it is.

    Layers alike are timed as one with every tile this GPU has for them and take the fastest; where not even that beats
    dense attention, they become dense. A tile also decides where heads may stop, so the errors in the profile's
    record hold only nearly. To keep them from growing, no tile checks more often than the profile's: with a larger
    stride more keys, and more important ones, are weighed together, and a head stops later. If this GPU has no such
    tile, its tiles are given the profile's stride. A tile of another height must be faster by `OTHER_HEIGHT`. Buckets
    beyond `LONGEST` keys are timed at that length. On a CPU, where the reference runs any tile, only the device's
    identity changes, and the note says so.

    Args:
        profile: the file of a calibrated profile.
        device: torch's name of the device.
        out: the file to write.

    Returns:
        The profile that was written; its record's `retiled` says what was timed, what became dense, and what was not
        tuned.

    Raises:
        ProfileError: the profile cannot be read.
        InputError: its record lacks densities, or this device has no kernel for it.
    """
    old = load_profile(profile)
    where = torch.device(device)
    here = identify(where)
    verdict = fit(old.device, here)
    if verdict.tiles is None:
        raise InputError(f"{profile} cannot be tuned here: {verdict.reason}")
    layers, dense_layers = old.layers, 0
    timed: tuple[RetiledLayers, ...] = ()
    if here.kind == "cuda":
        candidates = candidate_tiles(old.geometry.head_dim, here.capability)
        safe = default_tile(old.geometry.head_dim, here.capability)
        layers, timed, dense_layers = _tuned(old, _densities(old, profile), candidates, safe, where)
    note = f"errors, densities and times elsewhere in this record are of {old.device}"
    if here.kind == "cpu":
        note = f"no tiles were tuned, because a CPU runs any: {note}"
    retiling = Retiling(
        made_on=str(old.device),
        tuned_for=str(here),
        versions=versions(),
        timed=timed,
        dense_layers=dense_layers,
        note=note,
    )
    proof = old.record.proof
    proof = f"held out on {old.device}" if proof == "held out" else proof
    not_proven = (*(old.record.not_proven or ()), f"anything on {here}: what is proven is of {old.device}")
    record = replace(old.record, proof=proof, retiled=retiling, not_proven=not_proven)
    new = replace(old, device=here, layers=layers, record=record)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_profile(new, out)
    return new


def _tuned(
    profile: Profile, densities: _Densities, candidates: tuple[TileConfig, ...], safe: TileConfig, where: torch.device
) -> tuple[tuple[tuple[LayerConfig, ...], ...], tuple[RetiledLayers, ...], int]:
    """The new layers, what was timed, and how many layers became dense; safe: the tile of dense layers."""
    new_layers = [[config.as_dense().with_tile(safe) for config in bucket] for bucket in profile.layers]
    timed, dense_layers = [], 0
    groups = sorted(_alike(profile, densities).items(), key=lambda item: item[0].length)
    compile_ahead(_traces([(key, profile.layers[i][j]) for key, ((i, j), *_) in groups], profile.geometry, where))
    for key, alike in groups:
        bucket, layer = alike[0]
        density, config = densities[bucket][layer], profile.layers[bucket][layer]
        tile, timing = _fastest(config, density, key.length, candidates, profile.geometry, where)
        if tile is None or timing is None or timing.seconds >= timing.dense_seconds:
            dense_layers += len(alike)
        else:
            for i, j in alike:
                tuned = profile.layers[i][j].with_tile(tile)
                crossing = Layer(tuned, density, key.length)
                new_layers[i][j] = tuned.with_tile(with_crossover(crossing, profile.geometry, where))
        timed.append(
            RetiledLayers(
                timed_at=key.length,
                layers=tuple((profile.lengths[i], j) for i, j in alike),
                density=density,
                tile=None if tile is None else str(tile),
                seconds=None if timing is None else timing.seconds,
                dense_seconds=None if timing is None else timing.dense_seconds,
            )
        )
        log.info("%s", timed[-1].to_json())
    _inputs.cache_clear()
    return tuple(map(tuple, new_layers)), tuple(timed), dense_layers


def _alike(profile: Profile, densities: _Densities) -> dict[TimingKey, list[_Layer]]:
    """The layers that are timed as one, without those that are dense as a whole."""
    layers: dict[TimingKey, list[_Layer]] = {}
    for bucket, length in enumerate(profile.lengths):
        for layer, config in enumerate(profile.layers[bucket]):
            if config.is_dense:
                continue
            ranked = _ranked(config)
            ranking = sum(overhead(_ranking(head, config), head.tail) for head in ranked) / config.num_heads
            key = TimingKey(
                min(length, LONGEST),
                tuple(sorted({head.segment for head in ranked})),
                Shape.of(config.tile),
                round(densities[bucket][layer] / ALIKE),
                round(ranking / ALIKE),
                config.scores,
                config.last_rows,
            )
            layers.setdefault(key, []).append((bucket, layer))
    return layers


def _densities(profile: Profile, path: Path) -> _Densities:
    """Each layer's density at each bucket, as it was proven, or else as it was predicted."""
    densities = [profile.record.densities(length, profile.geometry.layers)[1] for length in profile.lengths]
    if not all(densities):
        raise InputError(
            f"the record of {path} does not give every layer's density at {list(profile.lengths)} tokens: "
            "use a profile that s2o-calibrate wrote"
        )
    return densities


def _fastest(
    config: LayerConfig, density: float, length: int, candidates: tuple[TileConfig, ...], geometry: Geometry,
    where: torch.device,
) -> tuple[TileConfig | None, Timing | None]:  # fmt: skip
    """The tile to take for a layer and its time; None if no tile fits, or every one failed."""
    prompt = _inputs(geometry, length, where)
    stopping = _stopping(prompt, config, density)
    best: tuple[TileConfig | None, Timing | None] = None, None
    least = math.inf
    tiles = legal_tiles(config, candidates)

    compile_ahead(map(prompt.s2o, with_tiles(stopping, tiles)))
    for tile in tiles:
        try:
            timing = against_dense(prompt.s2o(stopping.with_tile(tile)), prompt.dense, where, least)
        except FAILURES as failure:
            log.warning("tile %s failed: %s", tile, reason(failure))
            continue
        seconds = timing.seconds * (1.0 if tile.block_m == config.tile.block_m else OTHER_HEIGHT)
        if seconds < least:
            best, least = (tile, timing), seconds
    return best


def _traces(
    layers: Sequence[tuple[TimingKey, LayerConfig]], geometry: Geometry, where: torch.device
) -> Iterable[Callable[[], object]]:
    """Measurements of curves, one for each kernel that `_stopping` needs."""
    first_of: dict[Hashable, Callable[[], object]] = {}
    for key, config in layers:
        ranked = _ranked(config)
        if ranked and (key.shape, key.scores) not in first_of:
            measured = partial(
                measure, _inputs(geometry, key.length, where), [_ranking(ranked[0], config)], [key.shape]
            )
            first_of[key.shape, key.scores] = measured
    return first_of.values()


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
    computed = density * config.num_heads - sum(head.mode == "dense" for head in config.heads)
    target = computed / max(len(ranked), 1)
    shape = Shape.of(config.tile)
    densities_of = {
        ranking: measure(prompt, [ranking], [shape], config.last_rows)[ranking, shape].density
        for ranking in {_ranking(head, config) for head in ranked}
    }
    heads = tuple(
        head
        if head.mode == "dense"
        else replace(head, tau=tau_for(densities_of[_ranking(head, config)][index], target), stop_rule=StopRule.REST)
        for index, head in enumerate(config.heads)
    )
    return replace(config, heads=heads)


def tau_for(densities: Tensor, target: float) -> float:
    """The tau of a head with this density, from those at `TAUS` [T], interpolated in log tau.

    Beyond what was measured the nearest of `TAUS`, or 0, which computes everything.

    >>> tau_for(torch.linspace(1.0, 0.5, len(TAUS)), 0.75)
    1.0
    """
    falling = densities.cummin(0).values.tolist()
    if target >= falling[0]:
        return 0.0 if 1.0 - target < target - falling[0] else TAUS[0]
    for upper in range(1, len(TAUS)):
        if falling[upper] <= target:
            share = (falling[upper - 1] - target) / (falling[upper - 1] - falling[upper])
            return math.exp((1 - share) * math.log(TAUS[upper - 1]) + share * math.log(TAUS[upper]))
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
    q, k, v = (tensor.bfloat16().transpose(1, 2) for tensor in (q, k, v))
    return Captured(q, k, v, geometry.head_dim**-0.5)


def _ranked(config: LayerConfig) -> list[HeadConfig]:
    return [head for head in config.heads if head.mode == "s2o"]


def _ranking(head: HeadConfig, config: LayerConfig) -> RankingConfig:
    return RankingConfig(head.segment, head.representatives, config.scores)
