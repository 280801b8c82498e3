"""Optuna over segment, grain, tile and scores, with the allocation of the budget as the inner step.

On a GPU the objective is the layer's measured time, on a CPU the time its density predicts. A space that has no more
points than the recipe has trials is searched exhaustively; in a larger one a tree-structured Parzen estimator (TPE)
proposes points, none of them twice. Layers with similar curves share one study, made on the first of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from calibrate.curves.curves import Curves
from calibrate.recipe import Recipe
from calibrate.search.allocate import Weights
from calibrate.search.choice import Choice, DenseReason, SearchPoint, choice_at, default_segment
from calibrate.timing import FAILURES, Timing, reason
from s2o_runtime.config import LayerConfig, TileConfig
from s2o_runtime.errors import ResourceError

log = logging.getLogger("calibrate")
optuna.logging.set_verbosity(optuna.logging.ERROR)  # failed trials are logged here, in one line each

RANDOM_TRIALS = 4  # before TPE proposes; Optuna's 10 would leave it few of the usual 16
PROPOSALS = 40  # of TPE for one trial; if all are known, a random point takes their place

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

    def create(self, length: int, layer: int, sampler: optuna.samplers.BaseSampler) -> optuna.Study:
        """A new study of one layer at one length."""
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


def open_storage(url: str | None) -> optuna.storages.BaseStorage | None:
    """The Optuna storage behind a URL such as sqlite:///studies.db; None for None.

    Raises:
        ResourceError: it cannot be opened. The text does not repeat the URL, which may hold a password.
    """
    if url is None:
        return None
    try:
        return optuna.storages.get_storage(url)
    except Exception as error:  # whatever SQLAlchemy and a database's driver raise
        raise ResourceError(
            f"--storage cannot be opened ({reason(error)}): give the URL of an Optuna storage, such as "
            "sqlite:///studies.db"
        ) from error


class NewPointsSampler(optuna.samplers.TPESampler):
    """TPE that proposes no point twice; where it has nothing new to propose, a random point that is new."""

    def __init__(self, parameters: Mapping[str, Sequence[Any]], seed: int) -> None:
        super().__init__(seed=seed, n_startup_trials=RANDOM_TRIALS, constant_liar=False)  # one trial runs at a time
        names = [name for name, values in parameters.items() if len(values) > 1]  # Optuna asks for no others
        self._distributions = {name: CategoricalDistribution(parameters[name]) for name in names}
        self._points = [
            dict(zip(names, values, strict=True)) for values in product(*(parameters[name] for name in names))
        ]
        self._random = random.Random(seed)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return dict(self._distributions)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        known = [
            {name: other.params[name] for name in self._distributions}
            for other in study.get_trials(deepcopy=False)
            if other.state.is_finished()
        ]
        for _ in range(PROPOSALS):
            proposed = super().sample_relative(study, trial, search_space)
            if proposed and proposed not in known:
                return proposed
        return self._random.choice([point for point in self._points if point not in known])


@dataclass
class LayerSearch:
    """The search for one group of layers at one length, on the curves of one of them.

    Attributes:
        layer, length: which layer, at how many tokens.
        curves: of the layer.
        recipe: says the grains, the budget and how many trials there are.
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
    weights: Weights | None = None
    tried: dict[SearchPoint, Choice] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    trials: int = 0

    @property
    def points(self) -> int:
        """How many search points there are."""
        return len(self.segments) * len(self.recipe.grains) * len(self.tiles) * len(self.recipe.scores)

    @_one_sentence()
    def run(
        self,
        studies: Studies,
        start_from: Sequence[SearchPoint] = (),
        on_trial: Callable[[], None] = lambda: None,
        out_of_time: Callable[[], bool] = lambda: False,
    ) -> Choice:
        """Search for the cheapest point.

        Args:
            studies: makes the study.
            start_from: points that were best for similar layers, tried first after the default.
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
            "grain": self.recipe.grains,
            "tile": tuple(tiles),
            "scores": self.recipe.scores,
        }
        seed, trials = self.recipe.seed + self.layer, self.recipe.trials
        sampler = NewPointsSampler(parameters, seed) if self.points > trials else _exhaustive_sampler(seed)
        study = studies.create(self.length, self.layer, sampler)
        recipe = self.recipe
        default = SearchPoint(default_segment(self.segments), recipe.grains[-1], self.tiles[0], recipe.scores[0])
        first = [point for point in dict.fromkeys((default, *start_from)) if self._has(point)]
        for point in first[:trials]:
            study.enqueue_trial(point._asdict() | {"tile": str(point.tile)})

        def point_of(params: Mapping[str, Any]) -> SearchPoint:
            return SearchPoint(params["segment"], params["grain"], tiles[params["tile"]], params["scores"])

        def objective(trial: optuna.Trial) -> float:
            params = {name: trial.suggest_categorical(name, parameters[name]) for name in parameters}
            return self._tried(point_of(params), trial)

        def after(study: optuna.Study, trial: FrozenTrial) -> None:
            self.trials += 1
            on_trial()
            if out_of_time():
                study.stop()

        study.optimize(objective, min(self.points, trials), catch=(TrialFailedError,), callbacks=[after])
        completed = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if not completed:
            return self._choice_at(default).as_dense(DenseReason.NO_TRIAL)
        # Optuna's best_trial does not say which of several equal ones it is
        best = min(completed, key=lambda trial: (trial.value, trial.number))
        return self.tried[point_of(best.params)].settled()

    def adopted(self, point: SearchPoint) -> Choice:
        """What was best for a similar layer, with this layer's own curves; dense if it fails or gains nothing."""
        if point.scores not in self.recipe.scores:  # the similar layer is dense, which has no scores of its own
            point = point._replace(scores=self.recipe.scores[0])
        choice = self._choice_at(point)
        try:
            return self._timed(choice).settled()
        except FAILURES as failure:
            return choice.as_dense(DenseReason.FAILED, self._failed(point, failure))

    def _choice_at(self, point: SearchPoint) -> Choice:
        return choice_at(point, self.curves, self.recipe, self.weights, self.recipe.last_rows_at(self.length))

    def _has(self, point: SearchPoint) -> bool:
        recipe = self.recipe
        shared = point.grain in recipe.grains and point.scores in recipe.scores
        return shared and point.segment in self.segments and point.tile in self.tiles

    def _tried(self, point: SearchPoint, trial: optuna.Trial) -> float:
        """The cost of a point; what it is made of goes into the trial's attributes."""
        choice = self._choice_at(point)
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
        log.warning("segment %d, grain %d, %s, %s scores failed: %s", *point, why)
        return why


def _exhaustive_sampler(seed: int) -> optuna.samplers.BaseSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.BruteForceSampler(seed=seed)


def _attributes(choice: Choice) -> dict[str, Any]:
    """What a trial says of its heads, one value for each; a head without a threshold has the tau None."""
    points = choice.allocation.points
    return {
        "mode": [point.head.mode for point in points],
        "tau": [point.head.tau if point.head.has_threshold else None for point in points],
        "density": [point.density for point in points],
        "error": [point.mse for point in points],
        "predicted_cost": choice.allocation.cost,
    }
