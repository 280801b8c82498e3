"""Optuna over segment, tile and scores, with the allocation of the budget as the inner step.

On a GPU the objective is the layer's measured time, on a CPU the time its density predicts. What a point costs is
predicted before any is tried, so the points come in that order, and those that are predicted to be much slower than the
best are no trials. Layers with similar curves share one study, made on the first of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import product
from operator import attrgetter
from typing import Any

import optuna
from optuna.trial import FrozenTrial

from calibrate.curves.curves import Curves, Shape
from calibrate.recipe import Recipe
from calibrate.search.allocate import ErrorWeights
from calibrate.search.choice import Choice, ChosenDense, SearchPoint, choice_at, default_segment
from calibrate.timing import FAILURES, Timing, reason
from s2o_runtime.config import LayerConfig, TileConfig
from s2o_runtime.errors import ConfigError, ResourceError

log = logging.getLogger("calibrate")
optuna.logging.set_verbosity(optuna.logging.ERROR)  # failed trials are logged here, in one line each

# times the least predicted cost: dearer points get no trial. Of what searches chose so far, the ratio of measured to
# predicted cost varied between a model's layers by 5 to 18% (calibrate-*-h200.json in docs/results).
PROMISING = 1.3

Timer = Callable[[LayerConfig, float], Timing]  # times a configuration, given the best seconds so far


class TrialFailedError(Exception):
    """The GPU could not run what a trial names; other errors are not a trial's, and end the search."""


class Studies:
    """Makes the Optuna studies of one calibration.

    Without `recipe.storage` they are kept in memory. With it they are kept in that Optuna storage under the name
    "MODEL, DEVICE, BUDGET, LENGTH tokens, layer LAYER (DIGEST)", where DIGEST stands for all settings of the recipe. A
    run of the same recipe replaces its studies. So does one that continues an interrupted run: its trials are run again
    in the same order, and take their times from the journal.

    Raises:
        ResourceError: the storage cannot be opened.
    """

    def __init__(self, recipe: Recipe, model: str, device: str) -> None:
        self._storage = open_storage(recipe.storage)
        self._begin = f"{model}, {device}, {recipe.budget}"
        self._digest = hashlib.sha256(json.dumps(recipe.record(), sort_keys=True).encode()).hexdigest()[:8]

    def create(self, length: int, layer: int) -> optuna.Study:
        """A new study of one layer at one length, whose trials all are enqueued: its sampler draws nothing."""
        sampler = optuna.samplers.RandomSampler()
        if self._storage is None:
            return optuna.create_study(sampler=sampler)
        name = f"{self._begin}, {length} tokens, layer {layer} ({self._digest})"
        with suppress(KeyError):
            optuna.delete_study(study_name=name, storage=self._storage)
        return optuna.create_study(storage=self._storage, study_name=name, sampler=sampler)


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Turn what a storage raises while it is used into this package's error."""
    try:
        yield
    except optuna.exceptions.StorageInternalError as error:
        raise ResourceError(
            f"the Optuna storage failed ({reason(error)}): run the same command again, or leave --storage out; what "
            "was measured so far is kept"
        ) from error


def check_storage(url: str) -> None:
    """Raise ConfigError for what is no URL of a database that Optuna can use; nothing is opened or made."""
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        make_url(url).get_dialect()
    except ArgumentError as error:  # also for a kind of database that SQLAlchemy does not know
        what = "--storage is no URL of a database that is known here"
        raise ConfigError(f"{what}: give one such as sqlite:///studies.db") from error


def open_storage(url: str | None) -> optuna.storages.BaseStorage | None:
    """The Optuna storage behind a URL such as sqlite:///studies.db; None for None.

    Raises:
        ConfigError: it is no such URL.
        ResourceError: it cannot be opened. No text repeats the URL, which may hold a password.
    """
    if url is None:
        return None
    check_storage(url)
    try:
        return optuna.storages.get_storage(url)
    except Exception as error:  # whatever SQLAlchemy and a database's driver raise
        raise ResourceError(
            f"--storage cannot be opened ({reason(error)}): give the URL of an Optuna storage, such as "
            "sqlite:///studies.db"
        ) from error


@dataclass
class LayerSearch:
    """The search for one group of layers at one length, on the curves of one of them.

    Attributes:
        layer, length: which layer, at how many tokens.
        curves: of the layer.
        recipe: says the scores, the budget and how many trials there are.
        segments: those worth trying.
        tiles: those that get trials, the safe default first.
        timer: times a configuration on this layer's inputs; None on a CPU.
        weights: what the errors of the layer and its heads count; None is what a budget that is no KL says.
        tried: what each search point came to, without those that failed.
        failures: what trials died of, and how often.
        trials: how many were run, each at another point.
    """

    layer: int
    length: int
    curves: Curves
    recipe: Recipe
    segments: Sequence[int]
    tiles: Sequence[TileConfig]
    timer: Timer | None
    weights: ErrorWeights | None = None
    tried: dict[SearchPoint, Choice] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    trials: int = 0
    _allocated: dict[Hashable, Choice] = field(default_factory=dict)

    @property
    def default(self) -> SearchPoint:
        """The point that is tried first, whatever is predicted of it."""
        return SearchPoint(default_segment(self.segments), self.tiles[0], self.recipe.scores[0])

    def promising(self) -> list[SearchPoint]:
        """The points to try, in order: the default, and those that may win by their predicted cost, the least first."""
        recipe = self.recipe
        points = [SearchPoint(*each) for each in product(self.segments, self.tiles, recipe.scores)]
        costs = {point: self.choice_at(point).allocation.cost for point in points}
        most = PROMISING * min(costs.values())
        by_cost = sorted((point for point in points if costs[point] <= most), key=costs.__getitem__)
        return list(dict.fromkeys((self.default, *by_cost)))[: recipe.trials]

    @_one_sentence()
    def run(
        self,
        studies: Studies,
        on_trial: Callable[[], None] = lambda: None,
        out_of_time: Callable[[], bool] = lambda: False,
    ) -> Choice:
        """Search for the cheapest point.

        Args:
            studies: makes the study.
            on_trial: called after each trial.
            out_of_time: asked after each trial whether it was the last.

        Returns:
            The best choice, of equally good ones the first that was tried; dense if nothing beats dense attention, or
            everything failed.

        Raises:
            ResourceError: the Optuna storage failed.
        """
        tiles = {str(tile): tile for tile in self.tiles}
        parameters: dict[str, tuple[Any, ...]] = {
            "segment": tuple(self.segments),
            "tile": tuple(tiles),
            "scores": self.recipe.scores,
        }
        study = studies.create(self.length, self.layer)

        def objective(trial: optuna.Trial) -> float:
            params = {name: trial.suggest_categorical(name, values) for name, values in parameters.items()}
            return self._tried(SearchPoint(**params | {"tile": tiles[params["tile"]]}), trial)

        def after(study: optuna.Study, trial: FrozenTrial) -> None:
            self.trials += 1
            on_trial()

        for point in self.promising():
            study.enqueue_trial(point._asdict() | {"tile": str(point.tile)})
            study.optimize(objective, 1, catch=(TrialFailedError,), callbacks=[after])
            if out_of_time():
                break
        if not self.tried:
            return self.choice_at(self.default).as_dense(ChosenDense.NO_TRIAL)
        return min(self.tried.values(), key=attrgetter("cost")).dense_if_no_gain()  # of equal ones the first

    def adopted(self, point: SearchPoint) -> Choice:
        """What was best for a similar layer, with this layer's own curves; dense if it fails or gains nothing."""
        if point.scores not in self.recipe.scores:  # the similar layer is dense, which has no scores of its own
            point = point._replace(scores=self.recipe.scores[0])
        choice = self.choice_at(point)
        try:
            return self._timed(choice).dense_if_no_gain()
        except FAILURES as failure:
            return choice.as_dense(ChosenDense.FAILED, self._failed(point, failure))

    def choice_at(self, point: SearchPoint) -> Choice:
        """The budget spent at one point, not timed; tiles of one shape have the same curves."""
        key = point.segment, point.scores, Shape.of(point.tile)
        if key not in self._allocated:
            last_rows = self.recipe.last_rows_at(self.length)
            self._allocated[key] = choice_at(point, self.curves, self.recipe, self.weights, last_rows)
        choice = self._allocated[key]
        return replace(choice, point=choice.point._replace(tile=point.tile))

    def _tried(self, point: SearchPoint, trial: optuna.Trial) -> float:
        """The cost of a point; what it is made of goes into the trial's attributes."""
        choice = self.choice_at(point)
        for name, value in (_attributes(choice) | {"layer": self.layer, "length": self.length}).items():
            trial.set_user_attr(name, value)
        try:
            self.tried[point] = self._timed(choice)
        except FAILURES as failure:
            why = self._failed(point, failure)
            trial.set_user_attr("failed", why)
            raise TrialFailedError(why) from failure
        return self.tried[point].cost

    def _timed(self, choice: Choice) -> Choice:
        """The choice with the time it takes, on a GPU."""
        if self.timer is None:
            return choice
        best = min((tried.cost for tried in self.tried.values()), default=math.inf)
        return replace(choice, timing=self.timer(choice.config, best))

    def _failed(self, point: SearchPoint, failure: Exception) -> str:
        """Count what a point died of, and say it."""
        why = reason(failure)
        self.failures[why] += 1
        log.warning("segment %d, %s, %s scores failed: %s", *point, why)
        return why


def _attributes(choice: Choice) -> dict[str, Any]:
    """What a trial says of its heads, one value for each; a head without a threshold has the tau None."""
    points = choice.allocation.points
    return {
        "mode": [point.head.mode for point in points],
        "tau": [point.head.tau if point.head.mode == "s2o" else None for point in points],
        "density": [point.density for point in points],
        "error": [point.mse for point in points],
        "predicted_cost": choice.allocation.cost,
    }
