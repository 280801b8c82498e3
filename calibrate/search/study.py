"""Search segment, tile and lookback with Optuna; the budget's allocation is the inner step.

On a GPU the objective is the layer's measured time, on a CPU the time that its density predicts. The cost of all points
is predicted before any is tried: they are tried in that order, without those that are predicted to be much slower than
the best. Layers with similar curves share one study, made on the first of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product, starmap
from operator import attrgetter
from typing import Any

import optuna

from calibrate.curves.curves import Curves, Shape
from calibrate.recipe import Recipe
from calibrate.search.choice import (
    CalibrationDense,
    LayerBudget,
    LayerPlan,
    SearchPoint,
    build_plan,
    make_default_point,
)
from calibrate.timing import FAILURES, Timing
from s2o_runtime.config import LayerConfig, TileConfig
from s2o_runtime.errors import ConfigError, ResourceError, get_first_line

log = logging.getLogger("calibrate")
optuna.logging.set_verbosity(optuna.logging.ERROR)  # failed trials are logged here, in one line each

# times the least predicted cost: dearer points get no trial. In 20 searches the fastest point's prediction was at most
# 1.08 times the least: the ratio of measured to predicted cost varies within a layer by 1.3 to 9.2%
# (docs/results/search-trials-h200.txt).
MAX_PREDICTED_COST = 1.15

Timer = Callable[[LayerConfig], Timing]  # times a configuration


class TrialFailedError(Exception):
    """Failure of a trial whose configuration the GPU cannot run; other errors end the search."""


class Studies:
    """Factory of the Optuna studies of one calibration.

    Without `recipe.storage` they are kept in memory. With it they are kept in that Optuna storage under the name
    "MODEL, DEVICE, BUDGET, LENGTH tokens, layer LAYER (DIGEST)", where DIGEST stands for all settings of the recipe. A
    run of the same recipe replaces its studies. So does one that continues an interrupted run: its trials are run again
    in the same order, and take their times from the journal. Raises ResourceError if the storage cannot be opened.
    """

    def __init__(self, recipe: Recipe, model: str, device: str) -> None:
        self._storage = open_storage(recipe.storage)
        self._begin = f"{model}, {device}, {recipe.budget}"
        self._digest = hashlib.sha256(json.dumps(recipe.record(), sort_keys=True).encode()).hexdigest()[:8]

    def create(self, length: int, layer: int) -> optuna.Study:
        """Create the study of one layer at one length; all trials are enqueued, so its sampler draws nothing."""
        sampler = optuna.samplers.RandomSampler()
        if self._storage is None:
            return optuna.create_study(sampler=sampler)
        name = f"{self._begin}, {length} tokens, layer {layer} ({self._digest})"
        with suppress(KeyError):
            optuna.delete_study(study_name=name, storage=self._storage)
        return optuna.create_study(storage=self._storage, study_name=name, sampler=sampler)


def check_storage(url: str) -> None:
    """Raise ConfigError if this is no URL of a database that Optuna can use; nothing is opened or made."""
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        make_url(url).get_dialect()
    except ArgumentError as error:  # also for a kind of database that SQLAlchemy does not know
        problem = "--storage is no URL of a database that is known here: give one such as sqlite:///studies.db"
        raise ConfigError(problem) from error


def open_storage(url: str | None) -> optuna.storages.BaseStorage | None:
    """Return the Optuna storage behind a URL such as sqlite:///studies.db; None for None.

    Raises ConfigError or ResourceError; no text repeats the URL, which may hold a password.
    """
    if url is None:
        return None
    check_storage(url)
    try:
        return optuna.storages.get_storage(url)
    except Exception as error:  # whatever SQLAlchemy and a database's driver raise
        raise ResourceError(
            f"--storage cannot be opened ({get_first_line(error)}): give the URL of an Optuna storage, such as "
            "sqlite:///studies.db"
        ) from error


@dataclass
class LayerSearch:
    """Search for one group of layers at one length, on the curves of one of them."""

    layer: int
    length: int
    curves: Curves
    budget: LayerBudget
    recipe: Recipe
    tiles: Sequence[TileConfig]  # those that get trials, the safe default first
    timer: Timer | None = None  # on this layer's inputs; None on a CPU
    tried: dict[SearchPoint, LayerPlan] = field(default_factory=dict)  # without points that failed
    failures: Counter[str] = field(default_factory=Counter)  # by reason
    _allocated: dict[Hashable, LayerPlan] = field(default_factory=dict)

    @property
    def trials(self) -> int:
        """Number of points that were tried, with those that failed."""
        return len(self.tried) + self.failures.total()

    @property
    def default(self) -> SearchPoint:
        """Point that is tried first, whatever is predicted of it."""
        return make_default_point(self.recipe, self.length, self.tiles[0])

    def list_candidates(self) -> list[SearchPoint]:
        """Return the points to try, in order: the default, and those that may win, by rising predicted cost."""
        recipe = self.recipe
        axes = product(recipe.select_segments(self.length), self.tiles, recipe.lookbacks)
        costs = {point: self.build_plan(point).allocation.cost for point in starmap(SearchPoint, axes)}
        limit = MAX_PREDICTED_COST * min(costs.values())
        by_cost = sorted((point for point, cost in costs.items() if cost <= limit), key=costs.__getitem__)
        return list(dict.fromkeys((self.default, *by_cost)))[: recipe.trials]

    def run(
        self,
        studies: Studies,
        on_trial: Callable[[], None] = lambda: None,
        out_of_time: Callable[[], bool] = lambda: False,
    ) -> LayerPlan:
        """Return the choice at the cheapest point; dense if nothing beats dense attention, or everything failed.

        on_trial is called after each trial, and then out_of_time, which makes it the last if it returns True. Raises
        ResourceError if the Optuna storage failed.
        """
        tiles = {str(tile): tile for tile in self.tiles}
        segments, lookbacks = self.recipe.select_segments(self.length), self.recipe.lookbacks
        parameters: dict[str, tuple[Any, ...]] = {"segment": segments, "tile": tuple(tiles), "lookback": lookbacks}

        def evaluate_trial(trial: optuna.Trial) -> float:
            params = {name: trial.suggest_categorical(name, values) for name, values in parameters.items()}
            return self._try_point(SearchPoint(**params | {"tile": tiles[params["tile"]]}), trial)

        try:
            study = studies.create(self.length, self.layer)
            for point in self.list_candidates():
                study.enqueue_trial(point._asdict() | {"tile": str(point.tile)})
                study.optimize(evaluate_trial, 1, catch=(TrialFailedError,))
                on_trial()
                if out_of_time():
                    break
        except optuna.exceptions.StorageInternalError as error:
            raise ResourceError(
                f"the Optuna storage failed ({get_first_line(error)}): run the same command again, or leave "
                "--storage out; what was measured so far is kept"
            ) from error
        if not self.tried:
            return self.build_plan(self.default).as_dense(CalibrationDense.NO_TRIAL)
        return min(self.tried.values(), key=attrgetter("cost")).dense_if_no_gain()  # of equal ones the first

    def apply_point(self, point: SearchPoint) -> LayerPlan:
        """Return the choice at a similar layer's best point; dense if that fails or gains nothing here."""
        choice = self.build_plan(point)
        try:
            return self._add_timing(choice).dense_if_no_gain()
        except FAILURES as failure:
            return choice.as_dense(CalibrationDense.FAILED, self._count_failure(point, failure))

    def build_plan(self, point: SearchPoint) -> LayerPlan:
        """Return the choice at one point, not timed; tiles of one shape have the same curves."""
        key = point.segment, point.lookback, Shape.from_tile(point.tile)
        if key not in self._allocated:
            last_rows = self.recipe.count_last_rows(self.length)
            self._allocated[key] = build_plan(point, self.curves, self.budget, last_rows)
        choice = self._allocated[key]
        return replace(choice, point=choice.point._replace(tile=point.tile))

    def _try_point(self, point: SearchPoint, trial: optuna.Trial) -> float:
        """Return the cost of a point; its heads' settings go into the trial's attributes, one value for each head."""
        choice = self.build_plan(point)
        heads = choice.allocation.points
        attributes = {
            "mode": [chosen.head.mode for chosen in heads],
            "tau": [chosen.head.tau if chosen.head.mode == "s2o" else None for chosen in heads],
            "density": [chosen.density for chosen in heads],
            "error": [chosen.mse for chosen in heads],
            "predicted_cost": choice.allocation.cost,
            "layer": self.layer,
            "length": self.length,
        }
        for name, value in attributes.items():
            trial.set_user_attr(name, value)
        try:
            self.tried[point] = self._add_timing(choice)
        except FAILURES as failure:
            cause = self._count_failure(point, failure)
            trial.set_user_attr("failed", cause)
            raise TrialFailedError(cause) from failure
        return self.tried[point].cost

    def _add_timing(self, choice: LayerPlan) -> LayerPlan:
        """Return the choice with its time, on a GPU."""
        if self.timer is None:
            return choice
        return replace(choice, timing=self.timer(choice.config))

    def _count_failure(self, point: SearchPoint, failure: Exception) -> str:
        """Count and log the reason why a point failed, and return it."""
        cause = get_first_line(failure)
        self.failures[cause] += 1
        log.warning("segment %d, %s, lookback %d failed: %s", *point, cause)
        return cause
