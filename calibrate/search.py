"""Optuna over segment, grain and tile, with the allocation of the budget as the inner step.

A trial names a segment length, a grain and a tile; each head's threshold, representatives and tail follow from the
measured curves. On a GPU the objective is the layer's measured time, on a CPU the time its density predicts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import optuna
import torch

from calibrate.allocate import Allocation, allocate
from calibrate.capture import Captured
from calibrate.curves import Curve, Method, Shape, mean_curve, measure
from calibrate.recipe import Recipe
from calibrate.timing import medians
from s2o_runtime.attention import s2o_attention
from s2o_runtime.config import LayerConfig, TileConfig
from s2o_runtime.dense import dense_attention
from s2o_runtime.gpu import DeviceIdentity, candidate_tiles, default_tile

CPU_TILES = tuple(TileConfig(block_m, 64, chunk) for block_m in (64, 128) for chunk in (2, 4, 8))

log = logging.getLogger("calibrate")
optuna.logging.set_verbosity(optuna.logging.WARNING)


@dataclass(frozen=True)
class Choice:
    """What was chosen for one layer at one length, and what it is predicted to do.

    curves: of every ranking a head could choose; seconds, dense_seconds: measured on one prompt, None on a CPU.
    """

    segment: int
    grain: int
    tile: TileConfig
    curves: Mapping[Method, Curve]
    budget_mse: float
    allocation: Allocation
    seconds: float | None = None
    dense_seconds: float | None = None

    @property
    def config(self) -> LayerConfig:
        return LayerConfig(self.allocation.heads, self.tile, grain=self.grain).validate()

    def tightened(self, factor: float) -> Choice:
        """The same segment, grain and tile with less predicted error."""
        budget = self.allocation.mse * factor
        return replace(self, budget_mse=budget, allocation=allocate(self.curves, budget))


@dataclass
class LayerSearch:
    """One layer at one length: its prompts, and everything measured on them so far."""

    prompts: list[Captured]
    recipe: Recipe
    device: DeviceIdentity
    curves: dict[tuple[Method, Shape], Curve] = field(default_factory=dict)
    tried: dict[tuple[int, int, TileConfig], Choice] = field(default_factory=dict)
    failures: int = 0

    @property
    def length(self) -> int:
        return int(self.prompts[0].q.shape[2])

    @property
    def on_gpu(self) -> bool:
        return self.device.kind == "cuda"

    def tiles(self) -> tuple[TileConfig, ...]:
        if not self.on_gpu:
            return CPU_TILES
        return candidate_tiles(int(self.prompts[0].q.shape[3]), self.device.capability)

    def measured(self, segment: int, grain: int, shape: Shape) -> dict[Method, Curve]:
        """The mean curves of the prompts for every number of representatives; one pass measures every shape."""
        methods = [Method(segment, each, grain) for each in self.recipe.representatives]
        if (methods[0], shape) not in self.curves:
            shapes = sorted({Shape.of(tile) for tile in self.tiles()}, key=lambda s: (s.block_m, s.stride))
            found = [measure(prompt, methods, shapes) for prompt in self.prompts]
            self.curves |= {key: mean_curve([one[key] for one in found]) for key in found[0]}
        return {method: self.curves[method, shape] for method in methods}

    def choice(self, segment: int, grain: int, tile: TileConfig) -> Choice:
        """The budget spent on one segment, grain and tile, and on a GPU the time it takes."""
        if (segment, grain, tile) not in self.tried:
            curves = self.measured(segment, grain, Shape.of(tile))
            budget = self.recipe.budget.value * self.recipe.margin
            if self.recipe.budget.kind == "rel_mse":
                budget *= next(iter(curves.values())).dense_power
            choice = Choice(segment, grain, tile, curves, budget, allocate(curves, budget))
            self.tried[segment, grain, tile] = self._timed(choice) if self.on_gpu else choice
        return self.tried[segment, grain, tile]

    def _timed(self, choice: Choice) -> Choice:
        prompt = self.prompts[0]
        config = choice.config
        times = medians(
            {
                "dense": lambda: dense_attention(prompt.q, prompt.k, prompt.v, scale=prompt.scale),
                "s2o": lambda: s2o_attention(prompt.q, prompt.k, prompt.v, config, scale=prompt.scale),
            },
            prompt.q.device,
        )
        return replace(choice, seconds=times["s2o"], dense_seconds=times["dense"])

    def cost(self, choice: Choice) -> float:
        return choice.seconds if choice.seconds is not None else choice.allocation.cost


def search(work: LayerSearch, seed: int, on_trial: Callable[[], None]) -> Choice:
    """The best choice for one layer at one length; `on_trial` is called after each trial.

    A layer that does not beat dense attention becomes dense.
    """
    segments, grains = work.recipe.segments(work.length), work.recipe.grains
    tiles = {str(tile): tile for tile in work.tiles()}
    names = tuple(tiles)

    def objective(trial: optuna.Trial) -> float:
        segment = trial.suggest_categorical("segment", segments)
        grain = trial.suggest_categorical("grain", grains)
        tile = tiles[trial.suggest_categorical("tile", names)]
        try:
            choice = work.choice(segment, grain, tile)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            if not work.on_gpu:
                raise
            work.failures += 1
            log.warning("segment %d, grain %d, %s failed: %s", segment, grain, tile, str(error).splitlines()[0])
            raise optuna.TrialPruned from error
        trial.set_constraint("error", choice.allocation.mse - choice.budget_mse)
        return work.cost(choice)

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    first = segments[-1] if len(segments) < 2 else segments[1]
    study.enqueue_trial({"segment": first, "grain": grains[-1], "tile": _default_name(work)})
    study.optimize(objective, n_trials=work.recipe.trials, callbacks=[lambda *_: on_trial()])
    best = min(work.tried.values(), key=work.cost, default=None)
    if best is None:
        return dense_choice(work)
    slower = best.seconds is not None and best.dense_seconds is not None and best.seconds >= best.dense_seconds
    return as_dense(best) if slower else best


def _default_name(work: LayerSearch) -> str:
    default = _default_tile(work)
    return str(default if default in work.tiles() else work.tiles()[0])


def _default_tile(work: LayerSearch) -> TileConfig:
    return default_tile(int(work.prompts[0].q.shape[3]), work.device.capability) if work.on_gpu else TileConfig()


def dense_choice(work: LayerSearch) -> Choice:
    """Everything dense, when nothing else ran."""
    tile = _default_tile(work)
    segment, grain = work.recipe.segments(work.length)[0], work.recipe.grains[0]
    curves = work.measured(segment, grain, Shape.of(tile))
    return as_dense(Choice(segment, grain, tile, curves, 0.0, allocate(curves, 0.0)))


def as_dense(choice: Choice) -> Choice:
    """The same layer with every head dense."""
    return replace(choice, allocation=choice.allocation.as_dense(), seconds=choice.dense_seconds)
