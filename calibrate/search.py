"""Optuna over segment and tile, with the allocation of the budget as the inner step.

A trial names a segment length and a tile; the thresholds follow from the measured curves. On a GPU the
objective is the layer's measured time, on a CPU its density.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import optuna
import torch

from calibrate.allocate import Allocation, allocate
from calibrate.capture import Captured
from calibrate.curves import Curve, Shape, head_config, mean_curve, measure
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

    seconds, dense_seconds: measured on one prompt, None on a CPU.
    """

    segment: int
    tile: TileConfig
    curve: Curve
    budget_mse: float
    allocation: Allocation
    seconds: float | None = None
    dense_seconds: float | None = None

    @property
    def config(self) -> LayerConfig:
        heads = tuple(head_config(tau, self.segment) for tau in self.allocation.taus)
        return LayerConfig(heads, self.tile).validate()

    def tightened(self, factor: float) -> Choice:
        """The same segment and tile with less predicted error."""
        budget = self.allocation.mse * factor
        return replace(self, budget_mse=budget, allocation=allocate(self.curve, budget))


@dataclass
class LayerSearch:
    """One layer at one length: its prompts, and everything measured on them so far."""

    prompts: list[Captured]
    recipe: Recipe
    device: DeviceIdentity
    curves: dict[tuple[int, Shape], Curve] = field(default_factory=dict)
    tried: dict[tuple[int, TileConfig], Choice] = field(default_factory=dict)
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

    def curve(self, segment: int, shape: Shape) -> Curve:
        """The mean curve of the prompts; one pass measures every shape of a segment."""
        if (segment, shape) not in self.curves:
            shapes = sorted({Shape.of(tile) for tile in self.tiles()}, key=lambda s: (s.block_m, s.stride))
            measured = [measure(prompt, segment, shapes) for prompt in self.prompts]
            for each in shapes:
                self.curves[segment, each] = mean_curve([one[each] for one in measured])
        return self.curves[segment, shape]

    def choice(self, segment: int, tile: TileConfig) -> Choice:
        """The budget spent on one segment and tile, and on a GPU the time it takes."""
        if (segment, tile) not in self.tried:
            curve = self.curve(segment, Shape.of(tile))
            budget = self.recipe.budget.value * self.recipe.margin
            if self.recipe.budget.kind == "rel_mse":
                budget *= curve.dense_power
            choice = Choice(segment, tile, curve, budget, allocate(curve, budget))
            self.tried[segment, tile] = self._timed(choice) if self.on_gpu else choice
        return self.tried[segment, tile]

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
        return choice.seconds if choice.seconds is not None else choice.allocation.density


def search(work: LayerSearch, seed: int, on_trial: Callable[[], None]) -> Choice:
    """The best choice for one layer at one length; `on_trial` is called after each trial.

    A layer that does not beat dense attention becomes dense.
    """
    segments = work.recipe.segments(work.length)
    tiles = {str(tile): tile for tile in work.tiles()}
    names = tuple(tiles)

    def objective(trial: optuna.Trial) -> float:
        segment = trial.suggest_categorical("segment", segments)
        tile = tiles[trial.suggest_categorical("tile", names)]
        try:
            choice = work.choice(segment, tile)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            if not work.on_gpu:
                raise
            work.failures += 1
            log.warning("segment %d with %s failed: %s", segment, tile, str(error).splitlines()[0])
            raise optuna.TrialPruned from error
        trial.set_constraint("error", choice.allocation.mse - choice.budget_mse)
        return work.cost(choice)

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    study.enqueue_trial({"segment": segments[-1] if len(segments) < 2 else segments[1], "tile": _default_name(work)})
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
    segment = work.recipe.segments(work.length)[0]
    tile = _default_tile(work)
    curve = work.curve(segment, Shape.of(tile))
    return Choice(segment, tile, curve, 0.0, allocate(curve, 0.0))


def as_dense(choice: Choice) -> Choice:
    """The same layer with every head dense."""
    dense = Allocation(tuple(point._replace(mse=0.0, density=1.0, tau=-1) for point in choice.allocation.points))
    return replace(choice, allocation=dense, seconds=choice.dense_seconds)
