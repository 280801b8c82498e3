"""The second stage: from curves to what every layer does at every length. Groups of layers share a search."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import repeat

import torch

from calibrate.curves.costs import overhead
from calibrate.curves.curves import TAUS, Curve, Curves, Method, Ranking, Shape, methods
from calibrate.curves.measure import LayersCurves
from calibrate.journal import Journal
from calibrate.model import capture
from calibrate.model.capture import Captured
from calibrate.model.models import LoadedModel
from calibrate.model.sensitivity import Sensitivity
from calibrate.prompts.prompt import PromptSet
from calibrate.recipe import Recipe
from calibrate.search.allocate import Allowed
from calibrate.search.choice import (
    Choice,
    SearchPoint,
    allowed,
    budget_mse,
    default_segment,
    predicted_kl,
    shared,
    weights_of,
)
from calibrate.search.groups import groups
from calibrate.search.study import LayerSearch, Studies, Timer
from calibrate.timing import FAILURES, HOPELESS, Timing, against_dense, reason
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.config import HeadConfig, LayerConfig, StopRule, TileConfig
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.reference.dense import dense_attention

log = logging.getLogger("calibrate")


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
        points: how many combinations of segment, grain and tile a search could try.
        tried: how many of them each group's search tried, none of them twice.
        uniform: the best single setting; None if dense attention is cheaper, and with a budget in KL.
    """

    choices: list[Choice]
    limits: list[float]
    groups: list[list[int]]
    failures: Counter[str]
    points: int
    tried: tuple[int, ...]
    uniform: Uniform | None = None

    @property
    def trials(self) -> int:
        """How many trials were run, of all groups together."""
        return sum(self.tried)

    @property
    def points_tried(self) -> str:
        """How much of the space was searched, in words: "12 of 12 points", of the group that tried fewest."""
        return f"{min(self.tried, default=0)} of {self.points} points"

    @property
    def predicted_kl(self) -> float:
        """Of a budget in KL, what is predicted of the choices, in nats per token."""
        return predicted_kl(self.choices)

    def sharing(self, recipe: Recipe, scale: float) -> Chosen:
        """The same search points with one budget over all layers, of which `scale` is spent (`shared`)."""
        choices, limits = shared(self.choices, recipe, scale)
        return replace(self, choices=choices, limits=limits)

    def spending(self, share: float, allowed: Allowed) -> Chosen:
        """The same choices with this share of the budget they were made for; dense layers stay as they are."""
        return replace(
            self,
            choices=[
                choice if choice.why_dense else choice.spending(choice.budget_mse * share, allowed)
                for choice in self.choices
            ],
        )


def choose(
    loaded: LoadedModel,
    curves: LayersCurves,
    tiles: Mapping[int, Sequence[TileConfig]],
    *,
    prompts: PromptSet,
    recipe: Recipe,
    device: DeviceIdentity,
    journal: Journal,
    on_trial: Callable[[str], None],
    sensitivity: Sensitivity | None = None,
) -> dict[int, Chosen]:
    """Search for the first layer of every group; the others take its point and spend their own budget.

    On a GPU one calibration prompt of each length moves through the model and is what calls are timed on.

    Args:
        loaded: the model.
        curves: of every layer at every length.
        tiles: those that get trials, by length, the safe default first.
        prompts: the first calibration prompt of each length is used.
        recipe: says the budget and how many trials there are.
        device: where the model runs.
        journal: where times are kept.
        on_trial: called after each trial with a text for a progress bar.
        sensitivity: of every layer and head, for a budget in KL.

    Returns:
        What was chosen, by length.

    Raises:
        ResourceError: the Optuna storage or the journal failed.
    """
    deadline = None if recipe.time_limit is None else time.monotonic() + recipe.time_limit
    studies = Studies(recipe, loaded.name, device.name)
    searches = [
        _LengthSearch(
            length,
            curves[length],
            tiles[length],
            recipe,
            studies,
            lambda: deadline is not None and time.monotonic() > deadline,
            sensitivity,
        )
        for length in recipe.lengths
    ]
    first_prompts = [prompts.calibration[length][0] for length in recipe.lengths]
    for layer, inputs in enumerate(_inputs(loaded, [prompt.ids for prompt in first_prompts], device)):
        for search, prompt in zip(searches, first_prompts, strict=True):
            captured = next(inputs)
            timer = None if captured is None else partial(_timed, captured, journal, layer, prompt.sha256)
            search.layer(layer, timer, on_trial)
    return {search.length: search.chosen() for search in searches}


def _inputs(
    loaded: LoadedModel, prompts: list[torch.Tensor], device: DeviceIdentity
) -> Iterator[Iterator[Captured | None]]:
    """For each layer, the attention inputs of every prompt; None for each without a GPU, where nothing is timed."""
    if device.kind == "cuda":
        yield from capture.layers(loaded, prompts)
    else:
        yield from (repeat(None) for _ in range(loaded.geometry.layers))


def _timed(prompt: Captured, journal: Journal, layer: int, sha256: str, config: LayerConfig, best: float) -> Timing:
    """The time of a configuration on a layer's inputs, from the journal if it is there.

    A time that was given up as hopeless is taken again if it is not hopeless against `best` seconds.
    """
    key = {"layer": layer, "prompt": sha256, "config": hashlib.sha256(repr(config).encode()).hexdigest()}
    known = journal.get("timing", key)
    if known is None or (known["rejected"] and known["seconds"] <= HOPELESS * best):
        known = asdict(_time(prompt, config, best))
        journal.put("timing", key, known)
    return Timing(**known)


def _time(prompt: Captured, config: LayerConfig, best: float) -> Timing:
    return against_dense(
        partial(s2o_attention, prompt.q, prompt.k, prompt.v, config, scale=prompt.scale),
        partial(dense_attention, prompt.q, prompt.k, prompt.v, scale=prompt.scale),
        prompt.q.device,
        best,
    )


class _LengthSearch:
    """One length: its groups, their searches as their first layers come by, and what the other layers make of them."""

    def __init__(
        self,
        length: int,
        curves: Sequence[Curves],
        tiles: Sequence[TileConfig],
        recipe: Recipe,
        studies: Studies,
        out_of_time: Callable[[], bool],
        sensitivity: Sensitivity | None = None,
    ) -> None:
        self.length = length
        self._curves, self._tiles, self._recipe = curves, tiles, recipe
        self._studies, self._out_of_time = studies, out_of_time
        self._segments = recipe.segments_for(length)
        self._weights = [
            weights_of(of_layer, recipe, of_heads, len(curves))
            for of_layer, of_heads in zip(curves, sensitivity or repeat(None, len(curves)), strict=True)
        ]
        budgets = [budget_mse(weights, recipe) for weights in self._weights]
        shape, grain = Shape.of(tiles[0]), recipe.grains[-1]
        by_segment = [
            {segment: methods(of_layer, segment, grain, shape) for segment in self._segments} for of_layer in curves
        ]
        self._groups = groups(by_segment, budgets, allowed(recipe))
        self._first_of_group = {layer: group[0] for group in self._groups for layer in group}
        self._best: dict[int, SearchPoint] = {}  # by the first layer of a group
        self._choices: list[Choice] = []
        self._points = 0
        self._tried: list[int] = []
        self._failures: Counter[str] = Counter()
        default = default_segment(self._segments)
        self._uniform = None  # a KL belongs to no single setting, because its search goes on in the proof
        if not recipe.budget.is_kl:
            self._uniform = _uniform([of_segment[default] for of_segment in by_segment], budgets, recipe.tails)
        self._uniform_seconds = 0.0

    def layer(self, layer: int, timer: Timer | None, on_trial: Callable[[str], None]) -> None:
        """Choose for the next layer."""
        curves, recipe = self._curves[layer], self._recipe
        weights = self._weights[layer]
        search = LayerSearch(layer, self.length, curves, recipe, self._segments, self._tiles, timer, weights)
        first = self._first_of_group[layer]
        if layer == first:

            def tried() -> None:
                best = min((choice.cost for choice in search.tried.values()), default=float("nan"))
                text = f"{best * 1e3:.2f} ms" if timer else f"cost {best:.3f}"
                on_trial(f"layer {layer}, {self.length} tokens, best {text}")

            choice = search.run(self._studies, list(self._best.values()), tried, self._out_of_time)
            self._points = search.points
            self._tried.append(search.trials)
            self._failures += search.failures
            self._best[layer] = choice.point
        else:
            choice = search.adopted(self._best[first])
        self._choices.append(choice)
        if self._uniform is not None and timer is not None:
            self._time_uniform(self._uniform.head, len(choice.allocation.points), timer)

    def _time_uniform(self, head: HeadConfig, heads: int, timer: Timer) -> None:
        """Add the next layer's time with the single setting; if one cannot be timed, there is no sum of them."""
        config = LayerConfig((head,) * heads, self._tiles[0], grain=self._recipe.grains[-1]).validate()
        try:
            self._uniform_seconds += timer(config, math.inf).seconds
        except FAILURES as failure:
            log.warning("the single setting for all heads cannot be timed: %s", reason(failure))
            self._uniform_seconds = math.nan

    def chosen(self) -> Chosen:
        """What was chosen, once every layer has come by."""
        recipe = self._recipe
        choices, limits = self._choices, [recipe.budget.value] * len(self._choices)
        if recipe.scope == "model":
            choices, limits = shared(self._choices, recipe)
        timed = self._uniform_seconds > 0.0  # neither without a timer nor NaN
        uniform = self._uniform and replace(self._uniform, seconds=self._uniform_seconds if timed else None)
        return Chosen(choices, limits, self._groups, self._failures, self._points, tuple(self._tried), uniform)


def _uniform(
    layers: Sequence[Mapping[Method, Curve]], budgets: Sequence[float], tails: Sequence[bool]
) -> Uniform | None:
    """The cheapest setting for all heads of all layers whose error over its layer's budget is at most 1 on average."""
    best: Uniform | None = None
    over = torch.tensor(budgets, dtype=torch.float64)[:, None, None]
    for method in layers[0]:
        if not isinstance(method, Ranking):
            continue
        density = torch.stack([curves[method].density for curves in layers]).mean((0, 1))
        for tail in tails:
            errors = torch.stack([curves[method].tail_mse if tail else curves[method].mse for curves in layers])
            spent = (errors / over).mean((0, 1))
            costs = density + overhead(method, tail) + layers[0][method].fixed_cost
            for tau, share, cost in zip(TAUS, spent.tolist(), costs.tolist(), strict=True):
                if share <= 1.0 and cost < (1.0 if best is None else best.cost):
                    head = HeadConfig(tau, method.segment, "s2o", StopRule.REST, method.representatives, tail)
                    best = Uniform(head, cost)
    return best
