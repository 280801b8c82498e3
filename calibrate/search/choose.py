"""Search what every layer does at every length."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar

import torch
from sklearn.cluster import AgglomerativeClustering

from calibrate.compiling import compile_ahead, form, with_tiles
from calibrate.curves.curves import TAUS, Curve, Curves, RankingConfig, Shape, dense_power, methods, overhead
from calibrate.curves.measure import LayersCurves, dense_forward
from calibrate.journal import Journal, taken_on
from calibrate.model.estimate import free_memory
from calibrate.model.layers import Captured
from calibrate.prompts.prompt import PromptSet
from calibrate.recipe import Recipe
from calibrate.search.allocate import SearchConstraints, allocate_each
from calibrate.search.choice import (
    Choice,
    SearchPoint,
    allocate_model_budget,
    budget_mse,
    default_segment,
    search_constraints,
    weights_of,
)
from calibrate.search.study import LayerSearch, Studies, Timer
from calibrate.timing import FAILURES, HOPELESS, Timing, against_dense, reason
from calibrate.work.executor import Executor, Pending, WorkerState, WorkItem, completed
from s2o_runtime.config import HeadConfig, LayerConfig, Tail, TileConfig

BUDGETS = (0.1, 1.0, 10.0)  # times a layer's own
APART = 0.08  # of dense attention's time: layers whose costs differ by more than this somewhere are searched apart


def groups(
    layers: Sequence[Mapping[int, Mapping[RankingConfig, Curve]]],
    budgets: Sequence[float],
    constraints: SearchConstraints,
) -> list[list[int]]:
    """Layers grouped by complete linkage: no two layers of a group are further apart than `APART`.

    Args:
        layers: of each layer, by segment, the curves of what its heads may choose.
        budgets: each layer's, as mean squared error.
        constraints: what heads may choose.

    Returns:
        Layer numbers, group by group, each ascending, the groups by their first layer.
    """
    if len(layers) < 2:
        return [[layer] for layer in range(len(layers))]
    costs = [
        [
            allocation.cost
            for curves in by_segment.values()
            for allocation in allocate_each(curves, [share * budget for share in BUDGETS], constraints)
        ]
        for by_segment, budget in zip(layers, budgets, strict=True)
    ]
    clustering = AgglomerativeClustering(
        n_clusters=None, metric="chebyshev", linkage="complete", distance_threshold=APART
    )
    labels = clustering.fit_predict(costs).tolist()
    return [
        [layer for layer, layer_label in enumerate(labels) if layer_label == label] for label in dict.fromkeys(labels)
    ]


log = logging.getLogger("calibrate")

KEPT = 0.25  # of the memory that would be free without them: what inputs of layers that wait may take


@dataclass(frozen=True)
class Uniform:
    """The best single setting for all heads of all layers at the same mean error, to compare with.

    Attributes:
        head: the setting.
        cost: predicted time over dense attention's.
        seconds: measured time of all layers together; None where it was not measured.
    """

    head: HeadConfig
    cost: float
    seconds: float | None = None


@dataclass(frozen=True)
class Chosen:
    """What was chosen at one length.

    Attributes:
        choices: every layer's.
        limits: the error every layer may have, in the budget's unit.
        groups: layer numbers that shared a search, made on the first of them.
        failures: what trials died of, and how often.
        tried: how many combinations of segment, tile and scores each group's search tried, none of them twice.
        uniform: the best single setting; None if dense attention is cheaper.
    """

    choices: list[Choice]
    limits: list[float]
    groups: list[list[int]]
    failures: Counter[str]
    tried: tuple[int, ...]
    uniform: Uniform | None = None

    @property
    def trials(self) -> int:
        """How many trials were run, of all groups together."""
        return sum(self.tried)

    def spending(self, share: float, constraints: SearchConstraints) -> Chosen:
        """The same choices with this share of the budget they were made for; dense layers stay as they are."""
        return replace(
            self,
            choices=[
                choice if choice.why_dense else choice.spending(choice.budget_mse * share, constraints)
                for choice in self.choices
            ],
        )


def choose(
    executor: Executor,
    curves: LayersCurves,
    tiles: Mapping[int, Sequence[TileConfig]],
    *,
    prompts: PromptSet,
    recipe: Recipe,
    journal: Journal,
    on_trial: Callable[[str], object],
) -> dict[int, Chosen]:
    """Search for the first layer of every group; the others take its point and spend their own budget.

    On a GPU one calibration prompt of each length moves through the model and is what calls are timed on. Layers are
    searched beside one another as far as there are workers.

    Args:
        executor: who times calls; its device is what the choice is for.
        curves: of every layer at every length.
        tiles: those that get trials, by length, the safe default first.
        prompts: the first calibration prompt of each length is used.
        recipe: says the budget and how many trials there are.
        journal: where times are kept.
        on_trial: called after each trial with a text for a progress bar.

    Returns:
        What was chosen, by length.

    Raises:
        ResourceError: the Optuna storage or the journal failed.
    """
    deadline = None if recipe.time_limit is None else time.monotonic() + recipe.time_limit
    studies = Studies(recipe, executor.name, executor.device.name)
    on_gpu = executor.device.kind == "cuda"
    searches: dict[int, _LengthSearch] = {}

    @cache
    def likely() -> tuple[LayerConfig, ...]:
        configs = [config for search in searches.values() for config in search.likely()]
        return tuple({form(config): config for config in configs}.values())

    def timed(length: int, layer: int, config: LayerConfig, best: float) -> Timing:
        prompt = prompts.calibration[length][0].sha256
        item = CallTime(layer, length, prompt, config, best, tuple(tiles[length]), likely())
        return _timed(item, executor, journal)

    for length in recipe.lengths:
        executor.register_prompts([prompts.calibration[length][0]])
        searches[length] = _LengthSearch(
            length,
            curves[length],
            tiles[length],
            recipe,
            studies,
            lambda: deadline is not None and time.monotonic() > deadline,
            on_trial,
            partial(timed, length) if on_gpu else None,
        )
    waiting: list[Pending[None]] = []
    for layer in range(executor.geometry.layers):
        for search in searches.values():
            waiting += search.begin(layer, executor)
    for pending in waiting:
        pending.result()
    return {length: search.chosen() for length, search in searches.items()}


@dataclass(frozen=True)
class CallTime(WorkItem):
    """The time of a configuration on one layer's inputs, as an item of work.

    best: the seconds of the best configuration so far. tiles: those that other trials try. likely: configurations that
    are timed later. When a layer comes that needs other kernels than those before it, they are compiled for all of
    these. Its result is a `Timing` as a mapping, or why the GPU cannot run the configuration, as a text.
    """

    layer: int
    length: int
    prompt: str
    config: LayerConfig
    best: float
    tiles: tuple[TileConfig, ...] = ()
    likely: tuple[LayerConfig, ...] = ()
    stage: str = "search"
    kind: ClassVar[str] = "timing"
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
        captured = self._captured(worker)
        compiled: set[Hashable] = worker.cached("compiled", set)
        if form(self.config) not in compiled:
            needed = {form(config): config for config in (*self.likely, self.config)}
            layers = [config for name, config in needed.items() if name not in compiled and not config.is_dense]
            compiled.update(needed)
            compile_ahead(captured.s2o(each) for config in layers for each in with_tiles(config, self.tiles))
        try:
            dense_seconds: dict[Hashable, float] = worker.cached("seconds of dense attention", dict)
            s2o, device = captured.s2o(self.config), captured.q.device
            timing = against_dense(s2o, captured.dense, device, self.best, dense_seconds.get(self.affinity))
            dense_seconds[self.affinity] = timing.dense_seconds
            return asdict(timing)
        except torch.OutOfMemoryError as failure:
            why = reason(failure)
        except FAILURES as failure:
            return reason(failure)
        if worker.cached("captured", CapturedLayers).keep_only(self.affinity):
            return self.run(worker)
        return why

    def _captured(self, worker: WorkerState) -> Captured:
        """The layer's inputs. Those of the layers before it come by on the way, and are kept for items to come."""
        kept = worker.cached("captured", CapturedLayers)
        captured = kept.get(self.affinity)
        if captured is None:
            forward = dense_forward(worker, (self.prompt,))
            for captured in forward.inputs_up_to(self.layer):
                kept.add((self.length, captured.layer), captured)
        assert captured is not None
        return captured


class CapturedLayers:
    """The inputs of layers that a worker may be asked to time, those that it used last: as many as memory has room for.

    Searches of several groups of layers take turns on a worker, and it would move through the model for each turn.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, Captured] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, name: Hashable) -> Captured | None:
        """A layer's inputs; None if they are not kept."""
        if name in self._kept:
            self._kept.move_to_end(name)
        return self._kept.get(name)

    def add(self, name: Hashable, captured: Captured) -> None:
        """Keep a layer's inputs, and forget others where all together take more than their share of the free memory."""
        self._kept[name] = captured
        self._kept.move_to_end(name)
        taken = sum(_size(other) for other in self._kept.values())
        room = KEPT * (free_memory(captured.q.device) + taken)
        while len(self._kept) > 1 and taken > room:
            _, forgotten = self._kept.popitem(last=False)
            taken -= _size(forgotten)

    def keep_only(self, name: Hashable) -> bool:
        """Forget all other layers' inputs; returns whether there were any."""
        others = self._kept.keys() - {name}
        for other in others:
            del self._kept[other]
        return bool(others)


def _size(captured: Captured) -> int:
    """The bytes that a layer's inputs hold, which may be parts of one tensor."""
    storages = [tensor.untyped_storage() for tensor in (captured.q, captured.k, captured.v)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _timed(item: CallTime, executor: Executor, journal: Journal) -> Timing:
    """The time of a configuration on a layer's inputs, from the journal if it is there.

    A time that was given up as hopeless is taken again if it is not hopeless against the item's `best` seconds.

    Raises:
        RuntimeError: the GPU cannot run the configuration.
    """
    key = {**item.key, **taken_on(executor.device)}
    timing = journal.get(item.kind, key)
    if timing is None or (timing["rejected"] and timing["seconds"] <= HOPELESS * item.best):
        timing = executor.submit(item).result()
        if isinstance(timing, str):
            raise RuntimeError(timing)
        journal.put(item.kind, key, timing)
    return Timing(**timing)


class _LengthSearch:
    """One length: its groups, the searches on their first layers, and what the other layers make of them."""

    def __init__(
        self,
        length: int,
        curves: Sequence[Curves],
        tiles: Sequence[TileConfig],
        recipe: Recipe,
        studies: Studies,
        out_of_time: Callable[[], bool],
        on_trial: Callable[[str], object],
        timer: Callable[[int, LayerConfig, float], Timing] | None,
    ) -> None:
        """timer: times a configuration on a layer's inputs, given the best seconds so far; None without a GPU."""
        self.length = length
        self._curves, self._tiles, self._recipe = curves, tiles, recipe
        self._studies, self._out_of_time, self._on_trial, self._timer = studies, out_of_time, on_trial, timer
        self._segments = recipe.segments_for(length)
        self._weights = [weights_of(layer_curves, recipe) for layer_curves in curves]
        budgets = [budget_mse(weights, recipe) for weights in self._weights]
        shape = Shape.of(tiles[0])
        by_segment = [
            {segment: methods(layer_curves, segment, shape, recipe.scores[0]) for segment in self._segments}
            for layer_curves in curves
        ]
        self._groups = groups(by_segment, budgets, search_constraints(recipe))
        self._first_of_group = {layer: group[0] for group in self._groups for layer in group}
        self._points: dict[int, Pending[SearchPoint]] = {}  # the best one, by the first layer of a group
        self._choices: dict[int, Choice] = {}
        default = default_segment(self._segments)
        tails = search_constraints(recipe).tails
        self._uniform = _uniform([segment_curves[default] for segment_curves in by_segment], budgets, tails)
        self._uniform_seconds: dict[int, float] = {}
        self._searches = [
            LayerSearch(
                layer,
                length,
                layer_curves,
                recipe,
                self._segments,
                tiles,
                None if timer is None else partial(timer, layer),
                weights,
            )
            for layer, (layer_curves, weights) in enumerate(zip(curves, self._weights, strict=True))
        ]

    def begin(self, layer: int, executor: Executor) -> list[Pending[Any]]:
        """Begin to choose for a layer, the layers in their order; all is done when what is returned is."""
        search = self._searches[layer]
        run = executor.background if self._timer is not None else completed
        first = self._first_of_group[layer]
        pending: list[Pending[Any]]
        if layer == first:
            self._points[layer] = run(partial(self._search, search))
            pending = [self._points[layer]]
        else:
            pending = [run(partial(self._adopt, search, self._points[first]))]
        if (config := self._uniform_config(layer)) is not None and search.timer is not None:
            pending.append(run(partial(self._time_uniform, layer, config, search.timer)))
        return pending

    def likely(self) -> list[LayerConfig]:
        """What is going to be timed first of every search, and of the single setting."""
        first = [self._searches[group[0]] for group in self._groups]
        uniform = self._uniform_config(0)
        return [search.choice_at(search.default).config for search in first] + ([] if uniform is None else [uniform])

    def _search(self, search: LayerSearch) -> SearchPoint:
        """The best point of a group."""

        def tried() -> None:
            best = min((choice.cost for choice in search.tried.values()), default=float("nan"))
            text = f"{best * 1e3:.2f} ms" if search.timer else f"cost {best:.3f}"
            self._on_trial(f"layer {search.layer}, {self.length} tokens, best {text}")

        choice = search.run(self._studies, tried, self._out_of_time)
        self._choices[search.layer] = choice
        return choice.point

    def _adopt(self, search: LayerSearch, point: Pending[SearchPoint]) -> None:
        self._choices[search.layer] = search.adopted(point.result())

    def _uniform_config(self, layer: int) -> LayerConfig | None:
        """What a layer runs with the single setting; None if there is none."""
        if self._uniform is None:
            return None
        heads = next(iter(self._curves[layer].values())).density.shape[0]
        scores = self._recipe.scores[0]
        last_rows = self._recipe.last_rows_at(self.length)
        return LayerConfig((self._uniform.head,) * heads, self._tiles[0], scores, last_rows).validate()

    def _time_uniform(self, layer: int, config: LayerConfig, timer: Timer) -> None:
        """Add a layer's time with the single setting; if any layer cannot be timed, the total is not reported."""
        try:
            self._uniform_seconds[layer] = timer(config, math.inf).seconds
        except FAILURES as failure:
            log.warning("the single setting for all heads cannot be timed: %s", reason(failure))
            self._uniform_seconds[layer] = math.nan

    def chosen(self) -> Chosen:
        """What was chosen, once every layer has come by."""
        recipe = self._recipe
        choices = [self._choices[layer] for layer in range(len(self._curves))]
        limits = [recipe.budget.limit(dense_power(layer_curves)) for layer_curves in self._curves]
        if recipe.scope == "model":
            choices, limits = allocate_model_budget(choices, recipe)
        seconds = sum(self._uniform_seconds[layer] for layer in sorted(self._uniform_seconds))
        timed = seconds > 0.0  # neither without a timer nor NaN
        uniform = self._uniform and replace(self._uniform, seconds=seconds if timed else None)
        searched = [self._searches[group[0]] for group in self._groups]
        failures = sum((search.failures for search in searched), Counter[str]())
        tried = tuple(search.trials for search in searched)
        return Chosen(choices, limits, self._groups, failures, tried, uniform)


def _uniform(
    layers: Sequence[Mapping[RankingConfig, Curve]], budgets: Sequence[float], allowed: Sequence[Tail]
) -> Uniform | None:
    """The cheapest setting for all heads of all layers whose error over its layer's budget is at most 1 on average."""
    best: Uniform | None = None
    over = torch.tensor(budgets, dtype=torch.float64)[:, None, None]
    for method in layers[0]:
        density = torch.stack([curves[method].density for curves in layers]).mean((0, 1))
        for tail in allowed:
            errors = torch.stack([curves[method].errors(tail)[0] for curves in layers])
            spent = (errors / over).mean((0, 1))
            costs = density + overhead(method, tail) + layers[0][method].fixed_cost
            for tau, share, cost in zip(TAUS, spent.tolist(), costs.tolist(), strict=True):
                if share <= 1.0 and cost < (1.0 if best is None else best.cost):
                    head = HeadConfig(tau, method.segment, representatives=method.representatives, tail=tail)
                    best = Uniform(head, cost)
    return best
