"""Choose the tiles worth a trial, and measure from which length on they are faster than dense attention."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from calibrate.compiling import compile_ahead, get_kernel_form, without_stride
from calibrate.journal import Journal
from calibrate.search.dense_kernels import list_dense_kernels
from calibrate.timing import FAILURES, measure_medians
from calibrate.work.executor import Executor, WorkerState, WorkItem, find_unmeasured, measure_items
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.config import KEY_BLOCK, MAX_TAU, HeadConfig, LayerConfig, TileConfig
from s2o_runtime.errors import ConfigError, InputError, get_first_line
from s2o_runtime.identity import Geometry
from s2o_runtime.reference.dense import dense_attention
from s2o_runtime.sequences import CallShape
from s2o_runtime.tiles import DECODE, list_candidate_tiles

CPU_TILES = tuple(TileConfig(block_m, 64, chunk) for block_m in (64, 128) for chunk in (2, 4, 8))
MAX_SLOWDOWN = 1.2  # times the fastest tile: slower ones get no trial
TIE = 1.02  # times the fastest of one size: the first within it is taken, each time the same
LONGEST = 32768  # tiles are compared at this length at most
ROUNDS = 3

LENGTHS = tuple(1 << power for power in range(9, 18))
MIN_TAIL_KEYS = 8192  # with half of them 2048 queries win against FlashAttention 2 alone (bench-tails-h200.json)
TAILS = tuple(1 << power for power in range(4, 14))  # queries; some beyond the end of a segment join them
ENDED_SEGMENTS = (1, 2, 4)
COMPILED_SEGMENTS = 4  # of the prompt that kernels are compiled on
MAX_SHARE = 0.95  # of dense attention's time: a near tie in so few rounds may be slower in the next
MAX_TAIL_SHARE = 0.85  # the same for tails: with few row tiles the one that visits most is what takes the time

log = logging.getLogger("calibrate")


def choose_tiles(
    executor: Executor, *, length: int, segments: Sequence[int], journal: Journal
) -> tuple[TileConfig, ...]:
    """Choose the tiles to try for a model: on a GPU those nearly the fastest for a whole prefix without any stop.

    A tile is legal if its rows divide every segment that is tried. Tiles that differ only in the stride of their stop
    check are not told apart: which is best depends on where heads stop. Of those of one size, whose heads stop alike,
    the fastest is tried, or the first that is nearly so (docs/results/search-trials-h200.txt).

    Returns:
        Those that get trials, the safe default first. The log says why the others do not.

    Raises:
        ConfigError: no tile is legal.
        InputError: no tile runs.
    """
    device = executor.device
    on_gpu = device.kind == "cuda"
    candidates = list_candidate_tiles(executor.geometry.head_dim, device.capability) if on_gpu else CPU_TILES
    excluded: dict[TileConfig, str] = {}  # the reason, by the tile without its stride
    for tile in candidates:
        if crossed := [segment for segment in segments if segment % tile.rows]:
            excluded[without_stride(tile)] = f"its {tile.rows} rows do not divide segments of {crossed[0]}"
    legal = tuple(tile for tile in candidates if without_stride(tile) not in excluded)
    if candidates and not legal:
        rows = min(tile.rows for tile in candidates)
        raise ConfigError(f"segments {tuple(segments)} fit no tile of this device: use multiples of {rows}")
    if not on_gpu:
        return legal
    seconds: dict[TileConfig, float] = {}
    first_of = {without_stride(tile): tile for tile in reversed(legal)}
    items = [TileTime(tile, min(length, LONGEST), max(segments)) for tile in legal if tile in first_of.values()]
    unknown = find_unmeasured(items, executor, journal)
    if len(unknown) > 1:
        configs = tuple(item.make_config(executor.geometry) for item in unknown)
        executor.submit(Compilation(configs, items[0].length)).result()
    for item, (tile_seconds, failed) in zip(items, measure_items(items, executor, journal), strict=True):
        tile = without_stride(item.tile)
        if failed:
            excluded[tile] = failed
        else:
            seconds[tile] = tile_seconds
    if not seconds:
        cause = next(iter(excluded.values()), f"head_dim {executor.geometry.head_dim} has none")
        raise InputError(f"no tile runs on this GPU ({cause}): leave the model dense, or calibrate with --device cpu")
    fastest = min(seconds.values())
    for tile, tile_seconds in seconds.items():
        size = tile.rows, tile.block_n  # which decide with the stride where heads stop
        alike = [other for other in seconds if (other.rows, other.block_n) == size]
        first = next(other for other in alike if seconds[other] <= TIE * min(seconds[one] for one in alike))
        if tile_seconds > MAX_SLOWDOWN * fastest:
            excluded[tile] = f"{tile_seconds / fastest:.2f} times as slow as the fastest"
        elif first != tile:
            excluded[tile] = f"{first} has its size and is as fast or faster"
    for tile, cause in excluded.items():
        log.info("tile %s gets no trial: %s", str(tile), cause)
    return tuple(tile for tile in legal if without_stride(tile) not in excluded)


@dataclass(frozen=True)
class TileTime(WorkItem):
    """Measurement of one tile for a whole prefix without any stop: its median seconds, and why it failed, if it did."""

    tile: TileConfig
    length: int
    segment: int
    stage: str = "tiles"
    kind: ClassVar[str] = "tile"
    timed: ClassVar[bool] = True

    @property
    def key(self) -> dict[str, Any]:
        return {"tile": asdict(without_stride(self.tile)), "length": self.length, "segment": self.segment}

    def __str__(self) -> str:
        return f"tile {self.tile} at {self.length} tokens"

    def make_config(self, geometry: Geometry) -> LayerConfig:
        """Return the layer that is timed."""
        return LayerConfig.uniform(geometry.query_heads, segment=self.segment, tile=self.tile)

    def run(self, worker: WorkerState) -> tuple[float, str]:
        geometry, device = worker.loaded.geometry, worker.loaded.weights.device
        q, k, v = draw_inputs(geometry, self.length, self.length, torch.bfloat16, device)
        call = partial(s2o_attention, q, k, v, self.make_config(geometry))
        try:
            return measure_medians({"tile": call}, device, ROUNDS)["tile"], ""
        except FAILURES as failure:
            return 0.0, get_first_line(failure)


@dataclass(frozen=True)
class Compilation(WorkItem):
    """Compilation of the kernels of several layers that are timed next, on several cores."""

    configs: tuple[LayerConfig, ...]  # one for each kernel
    length: int  # of the prompts that they are compiled on, in tokens
    stage: str = "tiles"

    def __str__(self) -> str:
        return f"compilation of {len(self.configs)} layers"

    def run(self, worker: WorkerState) -> None:
        geometry, device = worker.loaded.geometry, worker.loaded.weights.device
        q, k, v = draw_inputs(geometry, self.length, self.length, torch.bfloat16, device)
        compile_ahead(partial(s2o_attention, q, k, v, config) for config in self.configs)


def draw_inputs(
    geometry: Geometry, queries: int, keys: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw random queries, keys and values of a layer, [1, H, L, D]."""
    q, k, v = (
        torch.randn(1, length, heads, geometry.head_dim, dtype=dtype, device=device).transpose(1, 2)
        for length, heads in ((queries, geometry.query_heads), (keys, geometry.kv_heads), (keys, geometry.kv_heads))
    )
    return q, k, v


@dataclass(frozen=True)
class CrossoverKey:
    """Settings shared by layers whose crossovers differ by their density only."""

    tile: TileConfig  # without crossovers
    head: HeadConfig  # of all heads of a timed call

    @classmethod
    def from_layer(cls, config: LayerConfig) -> CrossoverKey:
        """Return a layer's key: its heads' dearest ranking, in a head that stops as early as it can."""
        ranked = [head for head in config.heads if head.mode == "s2o"] or [HeadConfig(segment=config.segment)]
        dearest = max(ranked, key=lambda head: (head.representatives, head.tail == "mean"))
        bare = replace(config.tile, dense_below=0, min_queries=0, tail_keys=0)
        return cls(bare, replace(dearest, tau=MAX_TAU))

    def make_config(self, geometry: Geometry) -> LayerConfig:
        """Return the layer that is timed: all heads alike, with a tile that sends no short call to dense attention."""
        tile = replace(self.tile, dense_below=0, min_queries=DECODE, tail_keys=0)
        return LayerConfig((self.head,) * geometry.query_heads, tile).validate()


Case = tuple[float, int]  # the density, in hundredths, and the bucket of a layer


@dataclass(frozen=True)
class Layer:
    """The part of a layer that its crossovers depend on."""

    config: LayerConfig
    length: int  # the bucket that it is of, in tokens
    density: float = 0.0  # query-key pairs that it computes over causal pairs: calls have to pay for them

    @property
    def case(self) -> Case:
        """Its difference to others of its key."""
        return round(self.density, 2), self.length


def with_crossover(layer: Layer, geometry: Geometry, device: torch.device) -> TileConfig:
    """Measure a layer's crossovers on a GPU, and return its tile with them."""
    key = CrossoverKey.from_layer(layer.config)
    return replace(layer.config.tile, **_measure_crossover(key, geometry, device, layer.case))


def _measure_crossover(key: CrossoverKey, geometry: Geometry, device: torch.device, case: Case) -> dict[str, Any]:
    """Measure the fields of tiles that are crossovers, by name, of layers of one key, bucket and density."""
    density, length = case
    # A layer that is slower at its length becomes dense as a whole, so its prompts do not by `dense_below`.
    below = min(find_dense_below(key, geometry, device, density), length)
    crossed: dict[str, Any] = {"dense_below": below, "tail_keys": find_tail_keys(length), "min_queries": DECODE}
    timed = replace(key, tile=replace(key.tile, **crossed))
    return crossed | {"min_queries": find_min_queries(timed, geometry, device, density, length)}


def find_tail_keys(length: int) -> int:
    """Return the fewest keys that tails of a bucket's prompts are timed behind.

    That is a quarter of the length: chunks with fewer keys take a sixteenth of a prompt's dense time, and a layer that
    loses there wins behind more keys, where a head's first chunk is a small part of what it visits.

    >>> find_tail_keys(131072), find_tail_keys(16384), find_tail_keys(2048)
    (32768, 8192, 2048)
    """
    return min(length, max(length // 4, MIN_TAIL_KEYS))


@dataclass(frozen=True)
class Crossovers(WorkItem):
    """Measurement of the crossovers of each case of layers of one key."""

    of: CrossoverKey
    cases: tuple[Case, ...]
    stage: str = "crossovers"
    kind: ClassVar[str] = "crossover"
    timed: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"crossover of {self.of.tile}"

    @property
    def key(self) -> dict[str, object]:
        return {
            "tile": asdict(self.of.tile), "head": repr(self.of.head), "grain": KEY_BLOCK, "cases": self.cases,
        }  # fmt: skip

    def run(self, worker: WorkerState) -> list[dict[str, Any]]:
        geometry, device = worker.loaded.geometry, worker.loaded.weights.device
        return [_measure_crossover(self.of, geometry, device, case) for case in self.cases]


def measure_crossovers(
    executor: Executor, layers: Mapping[Hashable, Layer], journal: Journal
) -> dict[Hashable, TileConfig]:
    """Return the tiles of many layers, by any name, with their crossovers, as `with_crossover` measures them.

    Layers that differ in their bucket and density only are one item of work.
    """
    keys = {name: CrossoverKey.from_layer(layer.config) for name, layer in layers.items()}
    cases: dict[CrossoverKey, dict[Case, None]] = {}
    for name, layer in layers.items():
        cases.setdefault(keys[name], {})[layer.case] = None
    items = [Crossovers(key, tuple(key_cases)) for key, key_cases in cases.items()]
    configs = [item.of.make_config(executor.geometry) for item in find_unmeasured(items, executor, journal)]
    if len(kernels := {(without_stride(config.tile), get_kernel_form(config)): config for config in configs}) > 1:
        length = COMPILED_SEGMENTS * max(config.segment for config in kernels.values())
        executor.submit(Compilation(tuple(kernels.values()), length, stage=Crossovers.stage)).result()
    by_case = {
        (item.of, case): crossover
        for item, item_crossovers in zip(items, measure_items(items, executor, journal), strict=True)
        for case, crossover in zip(item.cases, item_crossovers, strict=True)
    }
    return {name: replace(layer.config.tile, **by_case[keys[name], layer.case]) for name, layer in layers.items()}


@lru_cache(maxsize=256)
def find_dense_below(key: CrossoverKey, geometry: Geometry, device: torch.device, density: float) -> int:
    """Find the shortest of `LENGTHS` at which a whole prompt beats dense attention; twice the longest if none does.

    Shorter prompts compute a larger share of their pairs than the layer's density, not a smaller one. A prompt of one
    segment runs dense anyway, so there is nothing to compare. density: as `_is_faster` takes it.
    """
    for length in (length for length in LENGTHS if length > key.head.segment):
        if _is_faster(*time_calls(key, geometry, device, length, length), density, MAX_SHARE):
            return length
    return 2 * LENGTHS[-1]


def find_min_queries(key: CrossoverKey, geometry: Geometry, device: torch.device, density: float, length: int) -> int:
    """Find the fewest queries from which on calls behind a cached prefix beat dense attention in prompts of a length.

    A query behind a segment's end ranks the whole prefix once more, so calls that end there are timed too. The count
    holds with the fewest keys (`find_tail_keys`), with those of the length, and for all longer tails that were timed.

    The key's tile has `dense_below` and `tail_keys`: calls that run dense anyway, because their prefix is not longer
    than their queries and their work is less than such a prompt's, are not compared. density: as `_is_faster` takes it.
    It is at least 2, and twice the longest tail if dense attention is faster even there.
    """

    def loses(queries: int, keys: int) -> bool:
        if queries >= keys or CallShape(1, 1, 1, queries, keys, 1, 1).is_little_for(key.tile):
            return False
        try:
            s2o, dense = time_calls(key, geometry, device, queries, keys)
        except torch.OutOfMemoryError:  # where a model's weights leave no room for so many keys
            return False
        return not _is_faster(s2o, dense, density, MAX_TAIL_SHARE)

    ended = {count * key.head.segment + 1 for count in ENDED_SEGMENTS}
    longer = 2 * TAILS[-1]
    for queries in sorted({queries for queries in {*TAILS, *ended} if queries <= TAILS[-1]}, reverse=True):
        if any(loses(queries, keys) for keys in sorted({find_tail_keys(length), length})):
            return longer
        longer = queries
    return DECODE


def _is_faster(s2o: float, dense: float, density: float, share: float) -> bool:
    """Return True if a layer's call takes less than a share of dense attention's seconds.

    It takes the seconds of a call that stops as early as it can, and `density`, its pairs over causal ones, of dense's.
    """
    return s2o + density * dense < share * dense


def time_calls(
    key: CrossoverKey, geometry: Geometry, device: torch.device, queries: int, keys: int
) -> tuple[float, float]:
    """Measure median times of S2O, wherever its tile would go dense, and of dense attention, for the last queries."""
    s2o, dense = (_time_call(config, geometry, device, queries, keys) for config in (key.make_config(geometry), None))
    return s2o, dense


@lru_cache(maxsize=4096)
def _time_call(config: LayerConfig | None, geometry: Geometry, device: torch.device, queries: int, keys: int) -> float:
    """Measure the median time of a layer's call for the last queries, or of dense attention, which all share.

    Dense attention behind a prefix is that of the fastest kernel: torch's own choice is FlashAttention 2 there.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = draw_inputs(geometry, queries, keys, dtype, device)
    calls: dict[str, Callable[[], Tensor]] = {"dense": partial(dense_attention, q, k, v)}
    if config is not None:
        calls = {"s2o": partial(s2o_attention, q, k, v, config)}
    for kernel in list_dense_kernels(device) if config is None and queries < keys else ():
        with suppress(*FAILURES):  # nobody runs a kernel that does not take the call
            kernel(q, k, v)
            calls[kernel.__name__] = partial(kernel, q, k, v)
    return min(measure_medians(calls, device, ROUNDS).values())
