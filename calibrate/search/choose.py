"""Search the settings of every layer at every length."""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from sklearn.cluster import AgglomerativeClustering

from calibrate.compiling import compile_ahead, get_kernel_form, with_tiles
from calibrate.curves.curves import Curves, Shape, select_rankings
from calibrate.curves.measure import LayersCurves, get_forward
from calibrate.journal import Journal, gpu_key
from calibrate.model.estimate import measure_free_memory
from calibrate.model.layers import Captured
from calibrate.prompts.prompt import PromptSet
from calibrate.recipe import Recipe
from calibrate.search.allocate import allocate
from calibrate.search.choice import LayerBudget, LayerPlan, warn_of_unspent
from calibrate.search.study import LayerSearch, Studies
from calibrate.timing import FAILURES, Timing, time_against_dense
from calibrate.work.executor import Executor, Pending, WorkerState, WorkItem, run_at_once
from s2o_runtime.config import LayerConfig, TileConfig
from s2o_runtime.errors import get_first_line
from s2o_runtime.fields import group_by_key

BUDGETS = (0.1, 1.0, 10.0)  # times a layer's own
MAX_GROUP_WIDTH = 0.08  # of dense attention's time: layers of a group have costs that differ by less at every budget
MEMORY_SHARE = 0.25  # of the memory that would be free without them: inputs of layers that wait may take this


@dataclass(frozen=True)
class SearchResult:
    """Settings that a search chose at one length, layer by layer."""

    choices: list[LayerPlan]
    limits: list[float]  # the error every layer may have, in the budget's unit
    groups: list[list[int]]  # layer numbers that shared a search, made on the first of them
    failures: Counter[str]  # of trials, by reason
    tried: tuple[int, ...]  # number of search points that each group's search tried, none of them twice

    @property
    def trials(self) -> int:
        """Number of trials of all groups together."""
        return sum(self.tried)


def choose(
    executor: Executor,
    curves: LayersCurves,
    tiles: Mapping[int, Sequence[TileConfig]],
    budgets: Mapping[int, Sequence[LayerBudget]],
    *,
    prompts: PromptSet,
    recipe: Recipe,
    journal: Journal,
    on_trial: Callable[[str], object],
) -> dict[int, SearchResult]:
    """Search for the first layer of every group; the others take its point and spend their own budget.

    On a GPU one calibration prompt of each length moves through the model, and calls are timed on its inputs. Layers
    are searched concurrently as far as there are workers.

    Args:
        executor: times calls; its device is the one that is chosen for.
        curves: of every layer at every length.
        tiles: those that get trials, by length, the safe default first.
        budgets: of every layer at every length.
        prompts, recipe, journal: the first calibration prompt of each length is used; the journal keeps the times.
        on_trial: called after each trial with a text for a progress bar.

    Returns:
        The settings of all layers, by length.

    Raises:
        ResourceError: the Optuna storage or the journal failed.
    """
    deadline = math.inf if recipe.time_limit is None else time.monotonic() + recipe.time_limit
    studies = Studies(recipe, executor.name, executor.device.name)
    on_gpu = executor.device.kind == "cuda"

    def time_config(length: int, layer: int, config: LayerConfig) -> Timing:
        prompt = prompts.calibration[length][0].sha256
        return _time_call(CallTime(layer, length, prompt, config, tuple(tiles[length]), likely), executor, journal)

    def search_group(search: LayerSearch) -> LayerPlan:
        def report_trial() -> None:
            best = min((choice.cost for choice in search.tried.values()), default=math.nan)
            text = f"{best * 1e3:.2f} ms" if on_gpu else f"cost {best:.3f}"
            on_trial(f"layer {search.layer}, {search.length} tokens, best {text}")

        return search.run(studies, report_trial, lambda: time.monotonic() > deadline)

    def follow_best(search: LayerSearch, leader: Pending[LayerPlan]) -> LayerPlan:
        return search.apply_point(leader.result().point)

    searches: dict[tuple[int, int], LayerSearch] = {}
    groups: dict[int, list[list[int]]] = {}
    for length in recipe.lengths:
        executor.register_prompts([prompts.calibration[length][0]])
        groups[length] = group_layers(
            _predict_costs(curves[length], budgets[length], length, Shape.from_tile(tiles[length][0]), recipe)
        )
        for layer, (layer_curves, budget) in enumerate(zip(curves[length], budgets[length], strict=True)):
            timer = partial(time_config, length, layer) if on_gpu else None
            searches[length, layer] = LayerSearch(layer, length, layer_curves, budget, recipe, tiles[length], timer)
    leaders = {length: [searches[length, group[0]] for group in groups[length]] for length in groups}
    first_trials = [search.build_plan(search.default).config for length in groups for search in leaders[length]]
    likely = tuple({get_kernel_form(config): config for config in first_trials}.values())  # one for each kernel

    run = executor.run_async if on_gpu else run_at_once
    pending: dict[tuple[int, int], Pending[LayerPlan]] = {}
    for layer in range(executor.geometry.layers):  # layer by layer: a call may wait only for earlier ones
        for length in groups:
            search = searches[length, layer]
            leader = next(group[0] for group in groups[length] if layer in group)
            best = pending.get((length, leader))  # not there yet if this layer leads
            pending[length, layer] = run(partial(follow_best, search, best) if best else partial(search_group, search))
    chosen = {}
    for length in groups:
        choices = [pending[length, layer].result() for layer in range(len(curves[length]))]
        warn_of_unspent(choices, length)
        limits = [budget.limit for budget in budgets[length]]
        failures = sum((search.failures for search in leaders[length]), Counter[str]())
        trials = tuple(search.trials for search in leaders[length])
        chosen[length] = SearchResult(choices, limits, groups[length], failures, trials)
    return chosen


def _predict_costs(
    curves: Sequence[Curves], budgets: Sequence[LayerBudget], length: int, shape: Shape, recipe: Recipe
) -> list[list[float]]:
    """Return every layer's cost with one tile shape and the first lookback, at all segments and `BUDGETS`."""
    costs: list[list[float]] = []
    for layer_curves, budget in zip(curves, budgets, strict=True):
        costs.append([])
        for segment in recipe.select_segments(length):
            segment_curves = select_rankings(layer_curves, segment, shape, recipe.lookbacks[0])
            costs[-1] += [
                allocate(segment_curves, share * budget.mse, budget.constraints, budget.weights).cost
                for share in BUDGETS
            ]
    return costs


def group_layers(costs: Sequence[Sequence[float]]) -> list[list[int]]:
    """Group layers by complete linkage: no costs of two layers of a group are `MAX_GROUP_WIDTH` apart.

    costs: of each layer, at the same segments and shares of the layer's own budget. Groups and their layers ascend.
    """
    if len(costs) < 2:
        return [[layer] for layer in range(len(costs))]
    clustering = AgglomerativeClustering(
        n_clusters=None, metric="chebyshev", linkage="complete", distance_threshold=MAX_GROUP_WIDTH
    )
    labels = clustering.fit_predict(costs).tolist()
    return list(group_by_key((label, layer) for layer, label in enumerate(labels)).values())


@dataclass(frozen=True)
class CallTime(WorkItem):
    """Measurement of a configuration's time on one layer's inputs.

    Its result is a `Timing` as a mapping, or a text: why the GPU cannot run the configuration. A configuration that
    needs other kernels than those before it has them compiled for `tiles`, those of other trials, and for `likely`,
    configurations that are timed later.
    """

    layer: int
    length: int
    prompt: str
    config: LayerConfig
    tiles: tuple[TileConfig, ...] = ()
    likely: tuple[LayerConfig, ...] = ()
    stage: str = "search"
    kind: ClassVar[str] = "call"
    timed: ClassVar[bool] = True

    @property
    def affinity(self) -> Hashable:
        return self.length, self.layer

    @property
    def key(self) -> dict[str, Any]:
        digest = hashlib.sha256(repr(self.config).encode()).hexdigest()
        return {"layer": self.layer, "prompt": self.prompt, "config": digest}

    def __str__(self) -> str:
        return f"timing of layer {self.layer} at {self.length} tokens"

    def run(self, worker: WorkerState) -> dict[str, Any] | str:
        captured = self._capture(worker)
        compiled: set[Hashable] = worker.cached("compiled", set)
        if get_kernel_form(self.config) not in compiled:
            needed = {get_kernel_form(config): config for config in (*self.likely, self.config)}
            layers = [config for name, config in needed.items() if name not in compiled and not config.is_dense]
            compiled.update(needed)
            compile_ahead(captured.s2o(tiled) for config in layers for tiled in with_tiles(config, self.tiles))
        try:
            dense_seconds: dict[int, float] = worker.cached("seconds of dense attention", dict)  # it is alike in layers
            s2o, device = captured.s2o(self.config), captured.q.device
            timing = time_against_dense(s2o, captured.dense, device, dense_seconds.get(self.length))
            dense_seconds[self.length] = timing.dense_seconds
            return asdict(timing)
        except FAILURES as failure:
            # inputs that are kept for later items may be what leaves too little memory: forget them and try again
            is_full = isinstance(failure, torch.OutOfMemoryError)
            if not (is_full and worker.cached("captured", CapturedLayers).keep_only(self.affinity)):
                return get_first_line(failure)
        return self.run(worker)

    def _capture(self, worker: WorkerState) -> Captured:
        """Return the layer's inputs, and keep those of the layers before it for later items."""
        kept = worker.cached("captured", CapturedLayers)
        if (captured := kept.find(self.affinity)) is None:
            for captured in get_forward(worker, (self.prompt,)).inputs_up_to(self.layer):
                kept.add((self.length, captured.layer), replace(captured, out=None))  # calls need no truth
        assert captured is not None
        return captured


class CapturedLayers(OrderedDict[Hashable, Captured]):
    """Cache of layers' inputs on a worker: those used last, as many as memory has room for.

    Searches of several groups take turns on a worker, which would have to move through the model for each turn.
    """

    def find(self, name: Hashable) -> Captured | None:
        """Return a layer's inputs, and keep them longer; None if they are not kept."""
        if name in self:
            self.move_to_end(name)
        return self.get(name)

    def add(self, name: Hashable, captured: Captured) -> None:
        """Keep a layer's inputs, and forget others while all take more than `MEMORY_SHARE`."""
        self[name] = captured
        self.move_to_end(name)
        taken = sum(map(_count_bytes, self.values()))
        room = MEMORY_SHARE * (measure_free_memory(captured.q.device) + taken)
        while len(self) > 1 and taken > room:
            taken -= _count_bytes(self.popitem(last=False)[1])

    def keep_only(self, name: Hashable) -> bool:
        """Forget all other layers' inputs; return True if there were any."""
        others = self.keys() - {name}
        for other in others:
            del self[other]
        return bool(others)


def _count_bytes(captured: Captured) -> int:
    """Return the bytes that a layer's inputs hold, which may be views of one tensor."""
    storages = [tensor.untyped_storage() for tensor in (captured.q, captured.k, captured.v)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _time_call(item: CallTime, executor: Executor, journal: Journal) -> Timing:
    """Return the time of a configuration on a layer's inputs, from the journal if it is there.

    Raises:
        RuntimeError: the GPU cannot run the configuration. That is not kept: another run may have more memory.
    """
    key = {**item.key, **gpu_key(executor.device)}
    timing = journal.get(item.kind, key)
    if timing is None:
        timing = executor.submit(item).result()
        if isinstance(timing, str):
            raise RuntimeError(timing)
        journal.put(item.kind, key, timing)
    return Timing(**timing)
