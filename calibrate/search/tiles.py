"""Which tiles are worth a trial on this GPU: legal ones, and of these the ones that are not hopelessly slow."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from calibrate.compiling import any_stride, compile_ahead, with_tiles
from calibrate.journal import Journal
from calibrate.timing import FAILURES, medians, reason
from calibrate.work.executor import Executor, WorkerState, WorkItem, measured, unmeasured
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.config import LayerConfig, TileConfig
from s2o_runtime.errors import ConfigError, InputError
from s2o_runtime.identity import Geometry
from s2o_runtime.tiles import candidate_tiles

CPU_TILES = tuple(TileConfig(block_m, 64, chunk) for block_m in (64, 128) for chunk in (2, 4, 8))
SLOWER = 1.2  # times the fastest tile: slower ones get no trial
LONGEST = 32768  # tiles are compared at this length at most
ROUNDS = 3

log = logging.getLogger("calibrate")


def tiles_for(executor: Executor, *, length: int, segments: Sequence[int], journal: Journal) -> tuple[TileConfig, ...]:
    """The tiles to try for a model: on a GPU those that are nearly the fastest for a whole prefix without any stop.

    A tile is legal if its rows divide every segment that is tried. Tiles that differ only in the stride of their stop
    check are not told apart: which is best depends on where heads stop.

    Args:
        executor: who times them; its device is what the tiles are for.
        length: of the prompts, in tokens.
        segments: those that are tried.
        journal: where times are kept.

    Returns:
        Those that get trials, the safe default first. The log says why the others do not.

    Raises:
        ConfigError: no tile is legal.
        InputError: no tile runs.
    """
    device = executor.device
    on_gpu = device.kind == "cuda"
    candidates = candidate_tiles(executor.geometry.head_dim, device.capability) if on_gpu else CPU_TILES
    legal, left_out = _legal(candidates, segments)
    if not on_gpu:
        return legal
    seconds = _times(legal, executor, min(length, LONGEST), max(segments), journal, left_out)
    limit = SLOWER * min(seconds.values())
    for tile, tile_seconds in seconds.items():
        if tile_seconds > limit:
            left_out[str(tile)] = f"{tile_seconds / limit * SLOWER:.2f} times as slow as the fastest"
    for name, why in left_out.items():
        log.info("tile %s gets no trial: %s", name, why)
    return tuple(tile for tile in legal if str(any_stride(tile)) not in left_out)


def _legal(candidates: Sequence[TileConfig], segments: Sequence[int]) -> tuple[tuple[TileConfig, ...], dict[str, str]]:
    """The tiles that fit all segments, and why the others do not."""
    left_out: dict[str, str] = {}
    for tile in candidates:
        crossed = [segment for segment in segments if segment % tile.rows]
        if crossed:
            left_out[str(any_stride(tile))] = f"its {tile.rows} rows do not divide segments of {crossed[0]}"
    legal = tuple(tile for tile in candidates if str(any_stride(tile)) not in left_out)
    if candidates and not legal:
        rows = min(tile.rows for tile in candidates)
        raise ConfigError(f"segments {tuple(segments)} fit no tile of this device: use multiples of {rows}")
    return legal, left_out


def _times(
    legal: Sequence[TileConfig],
    executor: Executor,
    length: int,
    segment: int,
    journal: Journal,
    left_out: dict[str, str],
) -> dict[TileConfig, float]:
    """The seconds of every tile that runs, whatever its stride; `left_out` gets the reason why another failed."""
    first_of = {any_stride(tile): tile for tile in reversed(legal)}
    items = {timed: TileTime(first_of[timed], length, segment) for timed in dict.fromkeys(map(any_stride, legal))}
    unknown = unmeasured(list(items.values()), executor, journal)
    if len(unknown) > 1:
        config = _whole_prefix(unknown[0].tile, executor.geometry, segment)
        executor.submit(Compilation(tuple(with_tiles(config, [item.tile for item in unknown])), length)).result()
    seconds: dict[TileConfig, float] = {}
    for timed, (tile_seconds, failed) in zip(items, measured(list(items.values()), executor, journal), strict=True):
        if failed:
            left_out[str(timed)] = failed
        else:
            seconds[timed] = tile_seconds
    if not seconds:
        why = next(iter(left_out.values()), f"head_dim {executor.geometry.head_dim} has none")
        raise InputError(f"no tile runs on this GPU ({why}): leave the model dense, or calibrate with --device cpu")
    return seconds


@dataclass(frozen=True)
class TileTime(WorkItem):
    """The time of one tile for a whole prefix without any stop, as an item of work."""

    tile: TileConfig
    length: int
    segment: int
    stage: str = "tiles"
    kind: ClassVar[str] = "tile"
    timed: ClassVar[bool] = True

    @property
    def key(self) -> dict[str, Any]:
        return {"tile": asdict(any_stride(self.tile)), "length": self.length, "segment": self.segment}

    def __str__(self) -> str:
        return f"tile {self.tile} at {self.length} tokens"

    def run(self, worker: WorkerState) -> tuple[float, str]:
        loaded = worker.loaded
        return _seconds(self.tile, loaded.geometry, loaded.weights.device, self.length, self.segment)


@dataclass(frozen=True)
class Compilation(WorkItem):
    """The kernels of several layers that are timed next, compiled beside one another, as an item of work.

    configs: one for each kernel. length: of the prompts that they are compiled on, in tokens.
    """

    configs: tuple[LayerConfig, ...]
    length: int
    stage: str = "tiles"

    def __str__(self) -> str:
        return f"compilation of {len(self.configs)} layers"

    def run(self, worker: WorkerState) -> None:
        geometry, where = worker.loaded.geometry, worker.loaded.weights.device
        q, k, v = random_inputs(geometry, self.length, self.length, torch.bfloat16, where)
        compile_ahead(partial(s2o_attention, q, k, v, config) for config in self.configs)


def _seconds(tile: TileConfig, geometry: Geometry, where: torch.device, length: int, segment: int) -> tuple[float, str]:
    """The median seconds of a call, and why it could not be made, "" if it could."""
    q, k, v = random_inputs(geometry, length, length, torch.bfloat16, where)
    config = _whole_prefix(tile, geometry, segment)
    try:
        return medians({"tile": partial(s2o_attention, q, k, v, config)}, where, ROUNDS)["tile"], ""
    except FAILURES as failure:
        return 0.0, reason(failure)


def random_inputs(
    geometry: Geometry, queries: int, keys: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries, keys and values of a layer, [1, H, L, D]."""
    q, k, v = (
        torch.randn(1, length, heads, geometry.head_dim, dtype=dtype, device=device).transpose(1, 2)
        for length, heads in ((queries, geometry.query_heads), (keys, geometry.kv_heads), (keys, geometry.kv_heads))
    )
    return q, k, v


def _whole_prefix(tile: TileConfig, geometry: Geometry, segment: int) -> LayerConfig:
    """A layer without any stop."""
    return LayerConfig.uniform(geometry.query_heads, segment=segment, tile=tile)
