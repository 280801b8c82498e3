"""What a ranking costs at one length on this GPU beside what `costs.overhead` says; without a GPU, as recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from calibrate.curves.costs import fixed_cost, overhead
from calibrate.curves.curves import RankingConfig
from calibrate.journal import Journal, taken_on
from calibrate.recipe import Recipe
from calibrate.timing import FAILURES, medians
from calibrate.work.executor import Executor, WorkerState, WorkItem, measured
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.config import GRAIN, MAX_TAU, LayerConfig
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.identity import Geometry
from s2o_runtime.reference.dense import dense_attention
from s2o_runtime.tiles import candidate_tiles

KIND = "ranking cost"  # of entries in a journal
ROUNDS = 5


def ranking_cost(executor: Executor, length: int, recipe: Recipe, journal: Journal) -> float:
    """The share of dense attention's time that every head's ranking takes at a length beside `costs.overhead`.

    On a GPU it is measured once and kept in the journal; elsewhere, and where the GPU cannot run the call, it is
    `costs.fixed_cost`.
    """
    if executor.device.kind != "cuda":
        return fixed_cost(length)
    return float(measured([_item(executor.geometry, length, recipe)], executor, journal)[0])


def _item(geometry: Geometry, length: int, recipe: Recipe) -> RankingCost:
    ranking = RankingConfig(recipe.segments_for(length)[-1])
    return RankingCost(length, ranking, (geometry.query_heads, geometry.kv_heads, geometry.head_dim))


@dataclass(frozen=True)
class RankingCost(WorkItem):
    """The measurement of `ranking_cost` as an item of work; heads: query heads, KV heads, head dim."""

    length: int
    ranking: RankingConfig
    heads: tuple[int, int, int]
    stage: str = "ranking cost"
    kind: ClassVar[str] = KIND
    timed: ClassVar[bool] = True

    @property
    def key(self) -> dict[str, Any]:
        return {"length": self.length, "segment": self.ranking.segment, "grain": GRAIN, "heads": list(self.heads)}

    def __str__(self) -> str:
        return f"cost of ranking {self.length} tokens"

    def run(self, worker: WorkerState) -> float:
        return _measured(worker.loaded.geometry, worker.loaded.weights.device, self.length, self.ranking)


def stored_cost(
    entries: Sequence[tuple[Mapping[str, Any], Any]],
    geometry: Geometry,
    device: DeviceIdentity,
    length: int,
    recipe: Recipe,
) -> float:
    """The same from a journal's entries of `KIND`; `costs.fixed_cost` if there is none for this length and GPU."""
    key = {**_item(geometry, length, recipe).key, **taken_on(device)}
    return next((float(value) for entry, value in entries if entry == key), fixed_cost(length))


def _measured(geometry: Geometry, device: torch.device, length: int, ranking: RankingConfig) -> float:
    """From a call that stops as early as it can: its time less that of the pairs it computes and of `overhead`."""
    tiles = [
        tile
        for tile in candidate_tiles(geometry.head_dim, torch.cuda.get_device_capability(device))
        if ranking.segment % tile.rows == 0
    ]
    if not tiles:
        return fixed_cost(length)
    q, k, v = (
        torch.randn(1, length, heads, geometry.head_dim, dtype=torch.bfloat16, device=device).transpose(1, 2)
        for heads in (geometry.query_heads, geometry.kv_heads, geometry.kv_heads)
    )
    config = LayerConfig.uniform(geometry.query_heads, tau=MAX_TAU, segment=ranking.segment, tile=tiles[0])
    try:
        seconds = medians(
            {"s2o": partial(s2o_attention, q, k, v, config), "dense": partial(dense_attention, q, k, v)}, device, ROUNDS
        )
        stats = s2o_attention(q, k, v, config, return_stats=True).stats
    except FAILURES:
        return fixed_cost(length)
    assert stats is not None
    return beside(seconds["s2o"] / seconds["dense"], float(stats.density.mean()), ranking)


def beside(share: float, density: float, ranking: RankingConfig) -> float:
    """What a call takes, as a share of dense attention's time, beside its pairs and `overhead`; not below 0."""
    return max(0.0, share - density - overhead(ranking, "none"))
