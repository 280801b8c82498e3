"""Second pass: from curves to what every layer does at every length. Groups of layers share a study."""

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

from calibrate import capture
from calibrate.allocate import Allowed, allocate_together
from calibrate.capture import Captured
from calibrate.costs import overhead
from calibrate.curves import TAUS, Curve, Method, Shape, Way
from calibrate.groups import groups
from calibrate.journal import Journal
from calibrate.measure import LayersCurves
from calibrate.models import LoadedModel
from calibrate.prompts import PromptSet
from calibrate.recipe import Recipe
from calibrate.search import Choice, Curves, Place, Study, Timer, allowed, budget_mse, methods
from calibrate.timing import FAILURES, HOPELESS, Timing, against_dense, reason
from s2o_runtime.attention import s2o_attention
from s2o_runtime.config import HeadConfig, LayerConfig, TileConfig
from s2o_runtime.dense import dense_attention
from s2o_runtime.gpu import DeviceIdentity

log = logging.getLogger("calibrate")


@dataclass(frozen=True)
class Uniform:
    """The best single setting for all heads of all layers at the same mean error; seconds: of all layers together."""

    head: HeadConfig
    cost: float
    seconds: float | None = None


@dataclass(frozen=True)
class Chosen:
    """One length: every layer's choice, its limit in the budget's unit, and which layers shared a study."""

    choices: list[Choice]
    limits: list[float]
    groups: list[list[int]]
    failures: Counter[str]
    trials: int
    uniform: Uniform | None = None

    def spending(self, share: float, what: Allowed) -> Chosen:
        """The same choices with this share of the budget they were made for."""
        return replace(
            self,
            choices=[each if each.why_dense else each.spending(each.budget_mse * share, what) for each in self.choices],
        )


def choose(
    loaded: LoadedModel,
    prompts: PromptSet,
    curves: LayersCurves,
    tiles: Mapping[int, Sequence[TileConfig]],
    recipe: Recipe,
    device: DeviceIdentity,
    journal: Journal,
    on_trial: Callable[[str], None],
) -> dict[int, Chosen]:
    """A study for the first layer of every group; the others take its segment, grain and tile and spend their own
    budget. On a GPU one calibration prompt of each length moves through the model and is what calls are timed on."""
    deadline = None if recipe.time_limit is None else time.monotonic() + recipe.time_limit
    searches = [
        _LengthSearch(
            length, curves[length], tiles[length], recipe, lambda: deadline is not None and time.monotonic() > deadline
        )
        for length in recipe.lengths
    ]
    firsts = [prompts.calibration[length][0] for length in recipe.lengths]
    for layer, inputs in enumerate(_inputs(loaded, [prompt.ids for prompt in firsts], device)):
        for search, prompt in zip(searches, firsts, strict=True):
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
    key = {"layer": layer, "prompt": sha256, "config": hashlib.sha256(repr(config).encode()).hexdigest()}
    found = journal.get("timing", key)
    if found is None or (found["rejected"] and found["seconds"] <= HOPELESS * best):  # against a quicker one then
        found = asdict(_time(prompt, config, best))
        journal.put("timing", key, found)
    return Timing(**found)


def _time(prompt: Captured, config: LayerConfig, best: float) -> Timing:
    return against_dense(
        partial(s2o_attention, prompt.q, prompt.k, prompt.v, config, scale=prompt.scale),
        partial(dense_attention, prompt.q, prompt.k, prompt.v, scale=prompt.scale),
        prompt.q.device,
        best,
    )


class _LengthSearch:
    """One length: its groups, their studies as their first layers come by, and what the other layers make of them."""

    def __init__(
        self, length: int, curves: Sequence[Curves], tiles: Sequence[TileConfig], recipe: Recipe,
        out_of_time: Callable[[], bool],
    ) -> None:  # fmt: skip
        self.length = length
        self._curves, self._tiles, self._recipe, self._out_of_time = curves, tiles, recipe, out_of_time
        self._segments, self._allowed = recipe.segments_for(length), allowed(recipe)
        budgets = [budget_mse(each, recipe) for each in curves]
        shape, grain = Shape.of(tiles[0]), recipe.grains[-1]
        by_segment = [{s: methods(each, s, grain, shape) for s in self._segments} for each in curves]
        self._groups = groups(by_segment, budgets, self._allowed)
        self._group_of = {layer: group[0] for group in self._groups for layer in group}
        self._studies: dict[int, Study] = {}
        self._best: dict[int, Place] = {}
        self._choices: list[Choice] = []
        self._trials = 0
        self._failures: Counter[str] = Counter()
        usual = self._segments[min(1, len(self._segments) - 1)]
        self._uniform = _uniform([each[usual] for each in by_segment], budgets, recipe.tails)
        self._uniform_seconds = 0.0

    def layer(self, layer: int, timer: Timer | None, on_trial: Callable[[str], None]) -> None:
        """Choose for the next layer."""
        study = Study(self._curves[layer], self._recipe, self._segments, self._tiles, timer)
        first = self._group_of[layer]
        if layer == first:

            def tried() -> None:
                best = min((each.cost for each in study.tried.values()), default=float("nan"))
                text = f"{best * 1e3:.2f} ms" if timer else f"cost {best:.3f}"
                on_trial(f"layer {layer}, {self.length} tokens, best {text}")

            choice = study.run(
                self._recipe.seed + layer, list(dict.fromkeys(self._best.values())), tried, self._out_of_time
            )
            self._trials += study.trials
            self._failures += study.failures
            self._best[layer] = choice.place
        else:
            choice = study.adopted(self._best[first])
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
        recipe = self._recipe
        choices, limits = self._choices, [recipe.budget.value] * len(self._choices)
        if recipe.scope == "model":
            powers = [next(iter(each.values())).dense_power for each in self._curves]
            choices, limits = shared(self._choices, powers, recipe)
        timed = self._uniform_seconds > 0.0  # neither without a timer nor NaN
        uniform = self._uniform and replace(self._uniform, seconds=self._uniform_seconds if timed else None)
        return Chosen(choices, limits, self._groups, self._failures, self._trials, uniform)


def shared(choices: Sequence[Choice], powers: Sequence[float], recipe: Recipe) -> tuple[list[Choice], list[float]]:
    """One budget over all layers: what each may spend of it, and its limit with the margin given back.

    powers: the mean square of every layer's dense output. Layers that are dense for a reason take no part.
    """
    units = [1.0 if recipe.budget.kind == "mse" else 1.0 / power for power in powers]
    live = [i for i, choice in enumerate(choices) if choice.why_dense is None]
    if not live:
        return list(choices), [recipe.budget.value] * len(choices)
    budget = recipe.budget.value * recipe.margin * len(choices) / len(live)
    allocations = allocate_together(
        [choices[i].curves for i in live], [units[i] for i in live], budget, allowed(recipe)
    )
    made, limits = list(choices), [0.0] * len(choices)
    for i, allocation in zip(live, allocations, strict=True):
        new = replace(made[i], allocation=allocation, budget_mse=allocation.mse, timing=None)
        made[i] = replace(new, why_dense="other layers gain more") if new.config.is_dense else new
        limits[i] = allocation.mse * units[i] / recipe.margin
    return made, limits


def _uniform(layers: Sequence[Mapping[Way, Curve]], budgets: Sequence[float], tails: Sequence[bool]) -> Uniform | None:
    """The cheapest setting that all heads of all layers share whose error over its layer's budget is 1 on average."""
    found: Uniform | None = None
    over = torch.tensor(budgets, dtype=torch.float64)[:, None, None]
    for method in layers[0]:
        if not isinstance(method, Method):
            continue
        density = torch.stack([curves[method].density for curves in layers]).mean((0, 1))
        for tail in tails:
            errors = torch.stack([curves[method].tail_mse if tail else curves[method].mse for curves in layers])
            spent = (errors / over).mean((0, 1))
            for tau, share, cost in zip(TAUS, spent.tolist(), (density + overhead(method, tail)).tolist(), strict=True):
                if share <= 1.0 and cost < (1.0 if found is None else found.cost):
                    head = HeadConfig(tau, method.segment, "s2o", "rest", method.representatives, tail)
                    found = Uniform(head, cost)
    return found
