"""Where dense attention is faster on this GPU, however little S2O computes: short prompts and short tails."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import ClassVar

import torch

from calibrate.journal import Journal
from calibrate.timing import medians
from calibrate.work.executor import Executor
from calibrate.work.items import WorkerState, WorkItem
from calibrate.work.measured import measured
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.config import MAX_TAU, HeadConfig, LayerConfig, Scores, TileConfig
from s2o_runtime.identity import Geometry
from s2o_runtime.reference.dense import dense_attention
from s2o_runtime.shapes import CallShape
from s2o_runtime.tiles import DECODE

LENGTHS = tuple(1 << power for power in range(9, 18))
TAIL_KEYS = (8192, 32768, 131072)  # keys that tails are timed behind
TAILS = tuple(1 << power for power in range(4, 14))  # queries; some beyond the end of a segment join them
ENDED_SEGMENTS = (1, 2, 4)
ROUNDS = 3
PAYS = 0.95  # of dense attention's time: what is nearly a tie in so few rounds may be slower in the next
TAIL_PAYS = 0.85  # the same for tails: with few row tiles the one that visits most is what takes the time


def with_crossover(
    config: LayerConfig, geometry: Geometry, device: torch.device, density: float = 0.0, faster_at: int | None = None
) -> TileConfig:
    """A layer's tile with its `dense_below`, in keys, and its `min_queries` measured.

    Args:
        config: the layer.
        geometry: the model's.
        device: the GPU.
        density: the query-key pairs that the layer computes over causal pairs, which calls have to pay for.
        faster_at: a length at which the layer itself was faster than dense attention, so that it does not go dense
            there; None if it was not timed.
    """
    bare, head, density = _bare(config.tile), _quickest(config), round(density, 2)
    return _with(
        config.tile, *_crossover(bare, head, config.grain, geometry, device, density, faster_at, config.scores)
    )


def _crossover(
    bare: TileConfig,
    head: HeadConfig,
    grain: int,
    geometry: Geometry,
    device: torch.device,
    density: float,
    faster_at: int | None,
    scores: Scores,
) -> tuple[int, int]:
    """`dense_below` and `min_queries` of a tile that has none, for layers of a density; as `with_crossover` says."""
    below = dense_below(bare, head, grain, geometry, device, density, scores)
    if faster_at is not None:
        below = min(below, faster_at)
    return below, min_queries(_with(bare, below, DECODE), head, grain, geometry, device, density, scores)


def _bare(tile: TileConfig) -> TileConfig:
    return replace(tile, dense_below=0, min_queries=0, tail_keys=0)


def _with(tile: TileConfig, below: int, fewest: int) -> TileConfig:
    """The tile with its crossovers: `dense_below` and `min_queries`, which was measured from `TAIL_KEYS` on."""
    return replace(tile, dense_below=below, min_queries=fewest, tail_keys=TAIL_KEYS[0]).validate()


@dataclass(frozen=True)
class Layer:
    """What of a layer its crossovers depend on.

    density: the query-key pairs that it computes over causal pairs. faster_at: a length at which it was faster than
    dense attention; None if it was not timed.
    """

    config: LayerConfig
    density: float
    faster_at: int | None


Case = tuple[float, int | None]  # the density, in hundredths, and `faster_at` of a layer


@dataclass(frozen=True)
class Crossovers(WorkItem):
    """The crossovers of layers that differ in their density only, as an item of work.

    tile: without crossovers. head: as `_quickest` says. Its result is `dense_below` and
    `min_queries` in each of the cases.
    """

    tile: TileConfig
    head: HeadConfig
    grain: int
    scores: Scores
    cases: tuple[Case, ...]
    stage: str = "crossovers"
    kind: ClassVar[str] = "crossover"
    timed: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"crossover of {self.tile}"

    @property
    def key(self) -> dict[str, object]:
        """What the measurement depends on beside the GPU and the model."""
        key = {"tile": asdict(self.tile), "head": repr(self.head), "grain": self.grain, "cases": self.cases}
        return key if self.scores == "input" else key | {"scores": self.scores}

    def run(self, worker: WorkerState) -> list[tuple[int, int]]:
        geometry, device = worker.loaded.geometry, worker.loaded.weights.device
        of_tile = self.tile, self.head, self.grain, geometry, device
        return [_crossover(*of_tile, *case, self.scores) for case in self.cases]


def crossovers(executor: Executor, layers: Mapping[Hashable, Layer], journal: Journal) -> dict[Hashable, TileConfig]:
    """The tiles of many layers with their crossovers, as `with_crossover` gives them.

    Args:
        executor: who measures; layers that differ in their density only are measured together.
        layers: by any name.
        journal: where they are kept.

    Returns:
        The tile of every layer, by its name.
    """
    alike: dict[tuple[TileConfig, HeadConfig, int, Scores], dict[Case, list[Hashable]]] = {}
    for name, layer in layers.items():
        config, case = layer.config, (round(layer.density, 2), layer.faster_at)
        cases_alike = alike.setdefault((_bare(config.tile), _quickest(config), config.grain, config.scores), {})
        cases_alike.setdefault(case, []).append(name)
    items = {group: Crossovers(*group, tuple(cases)) for group, cases in alike.items()}
    tiles: dict[Hashable, TileConfig] = {}
    results = measured(list(items.values()), executor, journal)
    for (group, item), of_cases in zip(items.items(), results, strict=True):
        for case, (below, fewest) in zip(item.cases, of_cases, strict=True):
            for name in alike[group][case]:
                tiles[name] = _with(layers[name].config.tile, below, fewest)
    return tiles


def _quickest(config: LayerConfig) -> HeadConfig:
    """A head that stops as early as it can, with the dearest ranking of the layer's heads."""
    ranked = [head for head in config.heads if head.mode == "s2o"] or [HeadConfig(segment=config.segment)]
    dearest = max(ranked, key=lambda head: (head.linear, head.representatives, head.tail))
    return replace(dearest, tau=MAX_TAU)


@lru_cache(maxsize=256)
def dense_below(
    tile: TileConfig, head: HeadConfig, grain: int, geometry: Geometry, device: torch.device, density: float,
    scores: Scores = "input",
) -> int:  # fmt: skip
    """The shortest of `LENGTHS` at which a whole prompt beats dense attention.

    Its time is taken as a tail's is (`_pays`): shorter prompts compute a larger share of their pairs, not a smaller
    one. A prompt of one segment runs dense anyway, so there is nothing to compare.

    Args:
        tile: without a `dense_below` of its own.
        head: the settings of all heads.
        grain: of the layer.
        geometry: the model's.
        device: the GPU.
        density: the pairs that the layer computes over causal pairs.
        scores: of the layer.

    Returns:
        Tokens; twice the longest of `LENGTHS` if dense attention is faster at all of them.
    """
    for length in (length for length in LENGTHS if length > head.segment):
        if _pays(*seconds(tile, head, grain, geometry, device, length, length, scores), density):
            return length
    return 2 * LENGTHS[-1]


def min_queries(
    tile: TileConfig, head: HeadConfig, grain: int, geometry: Geometry, device: torch.device, density: float,
    scores: Scores = "input",
) -> int:  # fmt: skip
    """The fewest queries from which on calls behind a cached prefix beat dense attention.

    A tail's time is taken as `_pays` says. A query behind a segment's end ranks the whole prefix once more, so calls
    that end there are timed too. The count holds for every number of keys in `TAIL_KEYS` and for all longer tails that
    were timed.

    Args:
        tile: with its `dense_below` and `tail_keys`: what runs dense anyway, because it is no tail whose prefix is as
            long as its queries and has less work than such a prompt, is not compared.
        head, grain, geometry, device, scores: as for `dense_below`.
        density: the pairs that the layer computes over causal pairs.

    Returns:
        Queries, at least 2; twice the longest tail if dense attention is faster even there.
    """
    fewest = DECODE
    for keys in TAIL_KEYS:
        for queries, more in _from_the_longest(_tails(head, keys)):
            if CallShape(1, 1, 1, queries, keys, 1, 1).is_little_for(tile):
                continue
            try:
                s2o, dense = seconds(tile, head, grain, geometry, device, queries, keys, scores)
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
    tile: TileConfig,
    head: HeadConfig,
    grain: int,
    geometry: Geometry,
    device: torch.device,
    queries: int,
    keys: int,
    scores: Scores = "input",
) -> tuple[float, float]:
    """The median times of S2O, wherever its tile would go dense, and of dense attention for one call.

    Args:
        tile, head, grain, geometry, device: of all heads of the call.
        queries: the last positions.
        keys: all of them, those before the queries included.
        scores: of the call.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tile = replace(_bare(tile), min_queries=DECODE)  # so that no short call goes dense
    config = LayerConfig((head,) * geometry.query_heads, tile, grain=grain, scores=scores).validate()
    q, k, v = (
        torch.randn(1, length, heads, geometry.head_dim, dtype=dtype, device=device).transpose(1, 2)
        for length, heads in ((queries, geometry.query_heads), (keys, geometry.kv_heads), (keys, geometry.kv_heads))
    )
    times = medians(
        {
            "dense": partial(dense_attention, q, k, v),
            "s2o": partial(s2o_attention, q, k, v, config),
        },
        device,
        ROUNDS,
    )
    return times["s2o"], times["dense"]
