"""Optuna over segment, grain and tile, with the allocation of the budget as the inner step.

A trial names a segment length, a grain and a tile; each head's threshold, representatives and tail follow from the
measured curves. On a GPU the objective is the layer's measured time, on a CPU the time its density predicts. Layers
with similar curves share one study, made on the first of them.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import optuna

from calibrate.allocate import Allocation, Allowed, allocate
from calibrate.curves import Curve, Method, Shape, Way
from calibrate.recipe import Recipe
from calibrate.timing import FAILURES, Timing, reason
from s2o_runtime.config import LayerConfig, TileConfig

log = logging.getLogger("calibrate")
optuna.logging.set_verbosity(optuna.logging.WARNING)

Curves = Mapping[tuple[Way, Shape | None], Curve]  # of one layer at one length
Timer = Callable[[LayerConfig, float], Timing]  # times a configuration, given the best seconds so far
Place = tuple[int, int, TileConfig]  # segment, grain and tile: what a trial names


@dataclass(frozen=True)
class Choice:
    """What was chosen for one layer at one length, and what it is predicted to do.

    curves: of every ranking a head could choose; timing: None on a CPU; why_dense: None unless the layer was made
    dense as a whole.
    """

    segment: int
    grain: int
    tile: TileConfig
    curves: Mapping[Way, Curve]
    budget_mse: float
    allocation: Allocation
    timing: Timing | None = None
    why_dense: str | None = None

    @property
    def place(self) -> Place:
        return self.segment, self.grain, self.tile

    @property
    def config(self) -> LayerConfig:
        return LayerConfig(self.allocation.heads, self.tile, grain=self.grain).validate()

    @property
    def cost(self) -> float:
        """What a study minimises: seconds, without a GPU the predicted share of dense attention's."""
        return self.allocation.cost if self.timing is None else self.timing.seconds

    @property
    def seconds(self) -> float | None:
        """What the layer's attention will take; None where it was not timed."""
        if self.timing is None:
            return None
        return self.timing.dense_seconds if self.config.is_dense else self.timing.seconds

    def spending(self, budget_mse: float, allowed: Allowed) -> Choice:
        """The same segment, grain and tile with another budget."""
        return replace(self, budget_mse=budget_mse, allocation=allocate(self.curves, budget_mse, allowed), timing=None)

    def as_dense(self, why: str) -> Choice:
        """The same layer with every head dense."""
        return replace(self, allocation=self.allocation.as_dense(), why_dense=why)


def allowed(recipe: Recipe) -> Allowed:
    return Allowed(recipe.tails, recipe.worst_rows or None, recipe.allows_s2o)


def budget_mse(curves: Curves, recipe: Recipe) -> float:
    """What a layer's calibration may spend, as mean squared error."""
    spent = recipe.budget.value * recipe.margin
    return spent if recipe.budget.kind == "mse" else spent * next(iter(curves.values())).dense_power


def methods(curves: Curves, segment: int, grain: int, shape: Shape) -> dict[Way, Curve]:
    """The curves that heads choose among once segment, grain and tile are fixed; none if none is of these."""
    found: dict[Way, Curve] = {
        way: curve
        for (way, each), curve in curves.items()
        if isinstance(way, Method) and (way.segment, way.grain, each) == (segment, grain, shape)
    }
    return found and found | {way: curve for (way, _), curve in curves.items() if not isinstance(way, Method)}


@dataclass
class Study:
    """The search for one group of layers at one length, on the curves of one of them.

    segments: those worth trying; tiles: those that get trials, the safe default first; timer: None on a CPU.
    trials: how many were run; failures: what trials died of, and how often.
    """

    curves: Curves
    recipe: Recipe
    segments: Sequence[int]
    tiles: Sequence[TileConfig]
    timer: Timer | None
    tried: dict[Place, Choice] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    trials: int = 0

    def run(
        self, seed: int, start_from: Sequence[Place], on_trial: Callable[[], None], out_of_time: Callable[[], bool]
    ) -> Choice:
        """The best choice; `on_trial` is called after each trial. Dense if nothing beats it or everything failed.

        start_from: places that were best for neighbours, tried first after the default.
        """
        tiles = {str(tile): tile for tile in self.tiles}
        sampler = optuna.samplers.TPESampler(seed=seed)
        study = optuna.create_study(sampler=sampler)
        default = (
            self.segments[-1] if len(self.segments) < 2 else self.segments[1],
            self.recipe.grains[-1],
            self.tiles[0],
        )
        for segment, grain, tile in dict.fromkeys((default, *start_from)):
            if segment in self.segments and tile in self.tiles:
                study.enqueue_trial({"segment": segment, "grain": grain, "tile": str(tile)})

        def objective(trial: optuna.Trial) -> float:
            segment = trial.suggest_categorical("segment", tuple(self.segments))
            grain = trial.suggest_categorical("grain", self.recipe.grains)
            tile = tiles[trial.suggest_categorical("tile", tuple(tiles))]
            try:
                choice = self.choice(segment, grain, tile)
            except FAILURES as failure:
                self._failed((segment, grain, tile), failure)
                raise optuna.TrialPruned from failure
            trial.set_constraint("error", choice.allocation.mse - choice.budget_mse)
            return choice.cost

        for done in range(self.recipe.trials):
            if done and out_of_time():
                break
            study.optimize(objective, n_trials=1)
            self.trials += 1
            on_trial()
        best = min(self.tried.values(), key=lambda choice: choice.cost, default=None)
        return self.spent(default).as_dense("no trial ran") if best is None else self.settled(best)

    def adopted(self, place: Place) -> Choice:
        """What another layer's study found best, with this layer's own curves. Dense if it fails or gains nothing."""
        try:
            return self.settled(self.choice(*place))
        except FAILURES as failure:
            return self.spent(place).as_dense(self._failed(place, failure))

    def _failed(self, place: Place, failure: Exception) -> str:
        """Count what a trial died of; on a CPU nothing is run that could fail, so there it is a bug."""
        if self.timer is None:
            raise failure
        why = reason(failure)
        self.failures[why] += 1
        log.warning("segment %d, grain %d, %s failed: %s", *place, why)
        return why

    def choice(self, segment: int, grain: int, tile: TileConfig) -> Choice:
        """The budget spent on one segment, grain and tile, and on a GPU the time it takes."""
        place = (segment, grain, tile)
        if place not in self.tried:
            found = self.spent(place)
            if self.timer is not None:
                best = min((each.cost for each in self.tried.values()), default=math.inf)
                found = replace(found, timing=self.timer(found.config, best))
            self.tried[place] = found
        return self.tried[place]

    def spent(self, place: Place) -> Choice:
        segment, grain, tile = place
        curves = self.methods(segment, grain, tile)
        budget = budget_mse(self.curves, self.recipe)
        return Choice(segment, grain, tile, curves, budget, allocate(curves, budget, allowed(self.recipe)))

    def methods(self, segment: int, grain: int, tile: TileConfig) -> dict[Way, Curve]:
        return methods(self.curves, segment, grain, Shape.of(tile))

    def settled(self, choice: Choice) -> Choice:
        """The choice, made dense where it gains nothing."""
        if choice.config.is_dense:
            return replace(choice, why_dense="no head gains anything within the budget")
        timing = choice.timing
        if timing is not None and timing.seconds >= timing.dense_seconds:
            return choice.as_dense(f"{timing.seconds * 1e3:.2f} ms against {timing.dense_seconds * 1e3:.2f} ms dense")
        if timing is None and choice.cost >= 1.0:
            return choice.as_dense("predicted no faster than dense")
        return choice
