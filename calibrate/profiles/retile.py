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
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from calibrate.compiling import compile_ahead, with_tiles
from calibrate.curves.curves import TAUS, RankingConfig, Shape, estimate_overhead
from calibrate.curves.measure import measure
from calibrate.model.layers import Captured
from calibrate.record import RetiledLayers, Retiling, read_record, update_record
from calibrate.search.tiles import Layer, with_crossover
from calibrate.timing import FAILURES, Timing, time_against_dense
from calibrate.versions import collect_versions
from s2o_runtime.config import HeadConfig, LayerConfig, StopRule, TileConfig
from s2o_runtime.devices import decide_fit, identify
from s2o_runtime.errors import InputError, get_first_line
from s2o_runtime.identity import Geometry
from s2o_runtime.profile import Profile, load_profile, save_profile
from s2o_runtime.tiles import get_default_tile, list_candidate_tiles

LONGEST = 32768  # keys: longer buckets are timed at this length
ALIKE = 0.05  # layers whose densities, and whose rankings' shares of dense time, round to the same step are timed once
OTHER_HEIGHT = 1.05  # how much faster a tile of another height must be: which rows stop together moves the error
SEED = 0

log = logging.getLogger("calibrate")


@dataclass(frozen=True)
class TimingKey:
    """Common properties of the layers that are timed as one."""

    length: int  # keys, at most `LONGEST`
    segments: tuple[int, ...]  # of the layer's heads in queries, ascending
    shape: Shape  # of the profile's tile
    density: int  # pairs computed over dense attention's, in steps of `ALIKE`
    ranking: int  # time that ranking adds over dense attention's, in steps of `ALIKE`
    lookback: int  # keys before a segment that are always visited
    last_rows: int  # rows at a prompt's end that run dense


def retile(profile: Path, device: str, out: Path) -> Profile:
    """Write `profile` with tiles and crossovers for the GPU `device` to `out`; every threshold stays as it is.

    Layers alike are timed as one with every tile this GPU has for them and take the fastest; where not even that beats
    dense attention, they become dense. A tile also decides where heads may stop, so the errors in the profile's record
    hold only nearly (`list_legal_tiles` keeps them from growing). On a CPU, where the reference runs any tile, only the
    device's identity changes, and the note says so.

    Returns:
        The profile that was written; its record's `retiled` says what was timed, what became dense and was not tuned.

    Raises:
        ProfileError: the profile cannot be read.
        InputError: its record lacks densities, or this device has no kernel for it.
    """
    old, where = load_profile(profile), torch.device(device)
    record, here = read_record(old), identify(where)
    verdict = decide_fit(old.device, here)
    if verdict.tiles is None:
        raise InputError(f"{profile} cannot be tuned here: {verdict.reason}")
    layers, dense_layers = old.layers, 0
    timed: tuple[RetiledLayers, ...] = ()
    if here.kind == "cuda":
        candidates = list_candidate_tiles(old.geometry.head_dim, here.capability)
        safe = get_default_tile(old.geometry.head_dim, here.capability)
        densities = [record.densities(length, old.geometry.layers)[1] for length in old.lengths]
        if not all(densities):
            raise InputError(
                f"the record of {profile} does not give every layer's density at {list(old.lengths)} tokens: "
                "use a profile that s2o-calibrate wrote"
            )
        layers, timed, dense_layers = _tune_layers(old, densities, candidates, safe, where)
    untuned = "no tiles were tuned, because a CPU runs any: " if here.kind == "cpu" else ""
    retiling = Retiling(
        made_on=str(old.device),
        tuned_for=str(here),
        versions=collect_versions(),
        timed=timed,
        dense_layers=dense_layers,
        note=f"{untuned}errors, densities and times elsewhere in this record are of {old.device}",
    )
    updated = update_record(
        old,
        **({"proof": f"held out on {old.device}"} if record.proof == "held out" else {}),
        retiled=retiling,
        not_proven=(*(record.not_proven or ()), f"anything on {here}: what is proven is of {old.device}"),
    )
    new = replace(old, device=here, layers=layers, record=updated)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_profile(new, out)
    return new


def _tune_layers(
    profile: Profile,
    densities: Sequence[Sequence[float]],
    candidates: tuple[TileConfig, ...],
    safe: TileConfig,
    where: torch.device,
) -> tuple[tuple[tuple[LayerConfig, ...], ...], tuple[RetiledLayers, ...], int]:
    """Return the new layers, what was timed, and how many layers became dense.

    densities: of every bucket and layer. candidates, safe: the tiles to time, and that of dense layers.
    """
    new_layers = [[config.as_dense().with_tile(safe) for config in bucket] for bucket in profile.layers]
    timed, dense_layers = [], 0
    groups = sorted(_group_layers(profile, densities).items(), key=lambda item: item[0].length)
    compile_ahead(_list_traces(profile, groups, where))
    for key, group in groups:
        bucket, layer = group[0]
        density, config = densities[bucket][layer], profile.layers[bucket][layer]
        tile, timing = _find_fastest(config, density, key.length, candidates, profile.geometry, where)
        if tile is None or timing is None or timing.seconds >= timing.dense_seconds:
            dense_layers += len(group)
        else:
            for i, j in group:
                tuned = profile.layers[i][j].with_tile(tile)
                crossing = Layer(tuned, profile.lengths[i], density)
                new_layers[i][j] = tuned.with_tile(with_crossover(crossing, profile.geometry, where))
        timed.append(
            RetiledLayers(
                timed_at=key.length,
                layers=tuple((profile.lengths[i], j) for i, j in group),
                density=density,
                tile=None if tile is None else str(tile),
                seconds=None if timing is None else timing.seconds,
                dense_seconds=None if timing is None else timing.dense_seconds,
            )
        )
        log.info("%s", timed[-1].to_json())
    _make_inputs.cache_clear()
    return tuple(map(tuple, new_layers)), tuple(timed), dense_layers


def _group_layers(profile: Profile, densities: Sequence[Sequence[float]]) -> dict[TimingKey, list[tuple[int, int]]]:
    """Return the (bucket, layer) that are timed as one, without layers that are dense as a whole."""
    layers: dict[TimingKey, list[tuple[int, int]]] = {}
    for bucket, layer in product(range(len(profile.lengths)), range(profile.geometry.layers)):
        config = profile.layers[bucket][layer]
        if ranked := _list_ranked(config):
            ranking = sum(estimate_overhead(_get_ranking(head, config), head.tail) for head in ranked)
            key = TimingKey(
                min(profile.lengths[bucket], LONGEST),
                tuple(sorted({head.segment for head in ranked})),
                Shape.from_tile(config.tile),
                round(densities[bucket][layer] / ALIKE),
                round(ranking / config.num_heads / ALIKE),
                config.lookback,
                config.last_rows,
            )
            layers.setdefault(key, []).append((bucket, layer))
    return layers


def _find_fastest(
    config: LayerConfig,
    density: float,
    length: int,
    candidates: tuple[TileConfig, ...],
    geometry: Geometry,
    where: torch.device,
) -> tuple[TileConfig | None, Timing | None]:
    """Return the tile to take for a layer and its time; None if no tile fits, or every one failed."""
    prompt = _make_inputs(geometry, length, where)
    stopping = _with_density(prompt, config, density)
    best: tuple[TileConfig | None, Timing | None] = None, None
    least, dense_seconds = math.inf, None
    tiles = list_legal_tiles(config, candidates)
    compile_ahead(map(prompt.s2o, with_tiles(stopping, tiles)))
    for tile in tiles:
        try:
            timing = time_against_dense(prompt.s2o(stopping.with_tile(tile)), prompt.dense, where, dense_seconds)
        except FAILURES as failure:
            log.warning("tile %s failed: %s", tile, get_first_line(failure))
            continue
        dense_seconds = timing.dense_seconds
        seconds = timing.seconds * (1.0 if tile.block_m == config.tile.block_m else OTHER_HEIGHT)
        if seconds < least:
            best, least = (tile, timing), seconds
    return best


def _list_traces(
    profile: Profile, groups: Sequence[tuple[TimingKey, list[tuple[int, int]]]], where: torch.device
) -> Iterable[Callable[[], object]]:
    """Return measurements of curves, one for each kernel that `_with_density` needs."""
    traces: dict[Hashable, Callable[[], object]] = {}
    for key, ((bucket, layer), *_) in groups:
        if key.shape not in traces:
            config = profile.layers[bucket][layer]
            inputs = _make_inputs(profile.geometry, key.length, where)
            ranking = _get_ranking(_list_ranked(config)[0], config)
            traces[key.shape] = partial(measure, inputs, [ranking], [key.shape])
    return traces.values()


def list_legal_tiles(config: LayerConfig, candidates: tuple[TileConfig, ...]) -> list[TileConfig]:
    """Return the tiles a layer may take in place of its own: whole tiles in every segment, and no smaller stride.

    With a larger stride more keys, and more important ones, are weighed together, so a head stops later and errs less.
    """
    least = config.tile.stride
    enough = [tile for tile in candidates if tile.stride >= least]
    if not enough:  # the GPU's tiles are given the profile's stride
        raised = (replace(tile, chunk=-(-least // tile.block_n)).validate() for tile in candidates)
        enough = list(dict.fromkeys(raised))
    return [tile for tile in enough if not any(head.segment % tile.rows for head in _list_ranked(config))]


def _with_density(prompt: Captured, config: LayerConfig, density: float) -> LayerConfig:
    """Return the layer with thresholds at which its heads, given the synthetic inputs, compute `density` of pairs."""
    ranked = _list_ranked(config)
    computed = density * config.num_heads - sum(head.mode == "dense" for head in config.heads)
    target = computed / max(len(ranked), 1)
    shape = Shape.from_tile(config.tile)
    densities_of = {
        ranking: measure(prompt, [ranking], [shape], config.last_rows)[ranking, shape].density
        for ranking in {_get_ranking(head, config) for head in ranked}
    }
    heads = list(config.heads)
    for index, head in enumerate(heads):
        if head.mode == "s2o":
            tau = interpolate_tau(densities_of[_get_ranking(head, config)][index], target)
            heads[index] = replace(head, tau=tau, stop_rule=StopRule.REST)
    return replace(config, heads=tuple(heads))


def interpolate_tau(densities: Tensor, target: float) -> float:
    """Return the tau of a head with this density, from those at `TAUS` [T], interpolated in log tau.

    Beyond what was measured it is the nearest of `TAUS`, or 0, which computes everything.

    >>> interpolate_tau(torch.linspace(1.0, 0.5, len(TAUS)), 0.75)
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
def _make_inputs(geometry: Geometry, length: int, where: torch.device) -> Captured:
    """Return random queries, keys and values of a model's shapes, bfloat16 [1, heads, length, head_dim].

    Some keys are long, so that few matter to many queries.
    """
    generator = torch.Generator(where).manual_seed(SEED)
    q, k, v = (
        torch.randn(1, length, heads, geometry.head_dim, generator=generator, device=where)
        for heads in (geometry.query_heads, geometry.kv_heads, geometry.kv_heads)
    )
    q += 1.0  # keys then matter to all queries alike, as far as they point that way
    k *= 4 * torch.rand(1, length, geometry.kv_heads, 1, generator=generator, device=where).square()
    q, k, v = (tensor.bfloat16().transpose(1, 2) for tensor in (q, k, v))
    return Captured(q, k, v, geometry.head_dim**-0.5)


def _list_ranked(config: LayerConfig) -> list[HeadConfig]:
    return [head for head in config.heads if head.mode == "s2o"]


def _get_ranking(head: HeadConfig, config: LayerConfig) -> RankingConfig:
    return RankingConfig(head.segment, head.representatives, config.lookback)
