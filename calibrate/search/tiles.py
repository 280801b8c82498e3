"""Tiles worth a trial, and the length from which they are faster than dense attention."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from calibrate.compiling import any_stride, compile_ahead, form, with_tiles
from calibrate.journal import Journal
from calibrate.timing import FAILURES, medians, reason
from calibrate.work.executor import Executor, WorkerState, WorkItem, measured, unmeasured
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.config import GRAIN, MAX_TAU, HeadConfig, LayerConfig, Scores, TileConfig
from s2o_runtime.errors import ConfigError, InputError
from s2o_runtime.identity import Geometry
from s2o_runtime.reference.dense import dense_attention
from s2o_runtime.sequences import CallShape
from s2o_runtime.tiles import DECODE, candidate_tiles

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


LENGTHS = tuple(1 << power for power in range(9, 18))
TAIL_KEYS = (8192, 32768, 131072)  # keys that tails are timed behind
TAILS = tuple(1 << power for power in range(4, 14))  # queries; some beyond the end of a segment join them
ENDED_SEGMENTS = (1, 2, 4)
SEGMENTS = 4  # of the prompt that kernels are compiled on
ROUNDS = 3
PAYS = 0.95  # of dense attention's time: what is nearly a tie in so few rounds may be slower in the next
TAIL_PAYS = 0.85  # the same for tails: with few row tiles the one that visits most is what takes the time


@dataclass(frozen=True)
class CrossoverKey:
    """What layers have in common whose crossovers differ by their density only.

    tile: without crossovers. head: the settings of all heads of a timed call. scores: of the layers.
    """

    tile: TileConfig
    head: HeadConfig
    scores: Scores = "input"

    @classmethod
    def of(cls, config: LayerConfig) -> CrossoverKey:
        """A layer's key: its heads' dearest ranking, in a head that stops as early as it can."""
        ranked = [head for head in config.heads if head.mode == "s2o"] or [HeadConfig(segment=config.segment)]
        dearest = max(ranked, key=lambda head: (head.representatives, head.tail == "mean"))
        bare = replace(config.tile, dense_below=0, min_queries=0, tail_keys=0)
        return cls(bare, replace(dearest, tau=MAX_TAU), config.scores)

    def call(self, geometry: Geometry) -> LayerConfig:
        """What is timed: all heads alike, with a tile that sends no short call to dense attention."""
        tile = replace(self.tile, dense_below=0, min_queries=DECODE, tail_keys=0)
        return LayerConfig((self.head,) * geometry.query_heads, tile, scores=self.scores).validate()


@dataclass(frozen=True)
class Layer:
    """What of a layer its crossovers depend on.

    density: the query-key pairs that it computes over causal pairs, which calls have to pay for. faster_at: a length at
    which it was faster than dense attention, so that it does not go dense there; None if it was not timed.
    """

    config: LayerConfig
    density: float = 0.0
    faster_at: int | None = None

    @property
    def case(self) -> Case:
        """What it differs by from others of its key."""
        return round(self.density, 2), self.faster_at


Case = tuple[float, int | None]  # the density, in hundredths, and `faster_at` of a layer


def with_crossover(layer: Layer, geometry: Geometry, device: torch.device) -> TileConfig:
    """A layer's tile with its `dense_below`, in keys, and its `min_queries` measured on a GPU."""
    return _with(layer.config.tile, *_crossover(CrossoverKey.of(layer.config), geometry, device, layer.case))


def _crossover(key: CrossoverKey, geometry: Geometry, device: torch.device, case: Case) -> tuple[int, int]:
    """`dense_below` and `min_queries` of layers of one key and density."""
    density, faster_at = case
    below = dense_below(key, geometry, device, density)
    if faster_at is not None:
        below = min(below, faster_at)
    return below, min_queries(replace(key, tile=_with(key.tile, below, DECODE)), geometry, device, density)


def _with(tile: TileConfig, below: int, fewest: int) -> TileConfig:
    """The tile with its crossovers: `dense_below` and `min_queries`, which was measured from `TAIL_KEYS` on."""
    return replace(tile, dense_below=below, min_queries=fewest, tail_keys=TAIL_KEYS[0]).validate()


@dataclass(frozen=True)
class Crossovers(WorkItem):
    """The crossovers of layers of one key, as an item of work: `dense_below` and `min_queries` of each case."""

    of: CrossoverKey
    cases: tuple[Case, ...]
    stage: str = "crossovers"
    kind: ClassVar[str] = "crossover"
    timed: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"crossover of {self.of.tile}"

    @property
    def key(self) -> dict[str, object]:
        """What the measurement depends on beside the GPU and the model."""
        tile, head, scores = self.of.tile, self.of.head, self.of.scores
        key = {"tile": asdict(tile), "head": repr(head), "grain": GRAIN, "cases": self.cases}
        return key if scores == "input" else key | {"scores": scores}

    def run(self, worker: WorkerState) -> list[tuple[int, int]]:
        geometry, device = worker.loaded.geometry, worker.loaded.weights.device
        return [_crossover(self.of, geometry, device, case) for case in self.cases]


def crossovers(executor: Executor, layers: Mapping[Hashable, Layer], journal: Journal) -> dict[Hashable, TileConfig]:
    """The tiles of many layers with their crossovers, as `with_crossover` gives them.

    Args:
        executor: who measures; layers that differ in their density only are measured together.
        layers: by any name.
        journal: where they are kept.

    Returns:
        The tile of every layer, by its name.
    """
    cases: dict[CrossoverKey, dict[Case, None]] = {}
    for layer in layers.values():
        cases.setdefault(CrossoverKey.of(layer.config), {})[layer.case] = None
    items = [Crossovers(key, tuple(key_cases)) for key, key_cases in cases.items()]
    calls = [item.of.call(executor.geometry) for item in unmeasured(items, executor, journal)]
    if len(kernels := {(any_stride(config.tile), form(config)): config for config in calls}) > 1:
        length = SEGMENTS * max(config.segment for config in kernels.values())
        executor.submit(Compilation(tuple(kernels.values()), length, stage=Crossovers.stage)).result()
    found = {
        (item.of, case): crossover
        for item, item_crossovers in zip(items, measured(items, executor, journal), strict=True)
        for case, crossover in zip(item.cases, item_crossovers, strict=True)
    }
    return {
        name: _with(layer.config.tile, *found[CrossoverKey.of(layer.config), layer.case])
        for name, layer in layers.items()
    }


@lru_cache(maxsize=256)
def dense_below(key: CrossoverKey, geometry: Geometry, device: torch.device, density: float) -> int:
    """The shortest of `LENGTHS` at which a whole prompt beats dense attention.

    Its time is taken as a tail's is (`_pays`): shorter prompts compute a larger share of their pairs, not a smaller
    one. A prompt of one segment runs dense anyway, so there is nothing to compare.

    Args:
        key: of the layer.
        geometry: the model's.
        device: the GPU.
        density: the pairs that the layer computes over causal pairs.

    Returns:
        Tokens; twice the longest of `LENGTHS` if dense attention is faster at all of them.
    """
    for length in (length for length in LENGTHS if length > key.head.segment):
        if _pays(*seconds(key, geometry, device, length, length), density):
            return length
    return 2 * LENGTHS[-1]


def min_queries(key: CrossoverKey, geometry: Geometry, device: torch.device, density: float) -> int:
    """The fewest queries from which on calls behind a cached prefix beat dense attention.

    A tail's time is taken as `_pays` says. A query behind a segment's end ranks the whole prefix once more, so calls
    that end there are timed too. The count holds for every number of keys in `TAIL_KEYS` and for all longer tails that
    were timed.

    Args:
        key: of the layer, its tile with `dense_below` and `tail_keys`: what runs dense anyway, because it is no tail
            whose prefix is as long as its queries and has less work than such a prompt, is not compared.
        geometry, device, density: as for `dense_below`.

    Returns:
        Queries, at least 2; twice the longest tail if dense attention is faster even there.
    """
    fewest = DECODE
    for keys in TAIL_KEYS:
        for queries, more in _from_the_longest(_tails(key.head, keys)):
            if CallShape(1, 1, 1, queries, keys, 1, 1).is_little_for(key.tile):
                continue
            try:
                s2o, dense = seconds(key, geometry, device, queries, keys)
            except torch.OutOfMemoryError:  # where a model's weights leave no room for so many keys
                continue
            if not _pays(s2o, dense, density, TAIL_PAYS):
                fewest = max(fewest, more)
                break
    return fewest


def _pays(s2o: float, dense: float, density: float, share: float = PAYS) -> bool:
    """Whether a call takes less than a share of dense attention's time if it takes the time `s2o` of one that stops as
    early as it can, and `density` of dense attention's time for the keys that the layer visits."""
    return s2o + density * dense < share * dense


def _tails(head: HeadConfig, keys: int) -> list[int]:
    """The queries of the calls that are timed behind a prefix, `keys` with their own, ascending."""
    ended = {count * head.segment + 1 for count in ENDED_SEGMENTS}
    return sorted(queries for queries in {*TAILS, *ended} if queries < min(keys, TAILS[-1] + 1))


def _from_the_longest(tails: list[int]) -> Iterator[tuple[int, int]]:
    """Every tail with the next longer one, the longest first; behind the longest stands its double."""
    return zip(reversed(tails), [2 * tails[-1], *reversed(tails[1:])], strict=True)


@lru_cache(maxsize=1024)
def seconds(
    key: CrossoverKey, geometry: Geometry, device: torch.device, queries: int, keys: int
) -> tuple[float, float]:
    """The median times of S2O, wherever its tile would go dense, and of dense attention for one call.

    Args:
        key, geometry, device: of all heads of the call.
        queries: the last positions.
        keys: all of them, those before the queries included.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = key.call(geometry)
    q, k, v = random_inputs(geometry, queries, keys, dtype, device)
    times = medians(
        {"dense": partial(dense_attention, q, k, v), "s2o": partial(s2o_attention, q, k, v, config)}, device, ROUNDS
    )
    return times["s2o"], times["dense"]
