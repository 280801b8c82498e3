"""The error limit of every layer under a budget of answers.

A budget of answers is what KL(dense || patched) may be at the rows that answer (`answers.py`). It becomes one limit for
each layer, in rel_mse, and from there on a calibration is the same as with any other budget. Sensitivities say how
layers share a KL (`model.sensitivity`): early layers reach the answers through all later keys and values, the last
layers hardly do. They do not say how large the KL is, because the errors of many rows add up where an answer reads
them; so some shares of the predicted KL are run, and the one that is spent is read off between them.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from calibrate.curves.curves import Curves, Shape, dense_power, select_rankings
from calibrate.model.sensitivity import Sensitivity
from calibrate.prompts.prompt import Prompt
from calibrate.proof.answers import AnswerKls, measure_answers
from calibrate.proof.verify import Prover
from calibrate.recipe import Recipe
from calibrate.search.allocate import Allocation, ErrorWeights, allocate_together
from calibrate.search.choice import make_constraints
from s2o_runtime.config import KvCacheDtype, LayerConfig, TileConfig

MAX_REL_MSE = 2e-2  # of a layer, and of a head relative to its layer's output: however little answers feel of it
MIN_REL_MSE = 1e-5  # of a layer: rounding in bfloat16 alone is some 3e-6
SHARES = (1.0, 0.25, 0.0625)  # of the budget, by prediction, that are run
AIM = 0.75  # share of the budget that the mean is to be: the bound of a certificate lies above the mean
PROMPTS = 5  # that the shares are run on
SLOPES = (0.5, 2.0)  # of log KL over log share; one outside is noise of rounding or of whole steps
MIN_WEIGHT = 1e-6  # of a head over the mean of its layer, so that allocation never divides by 0

log = logging.getLogger("calibrate")


@dataclass(frozen=True)
class FixedConfigs:
    """The configurations of all layers at one length (a `proof.layers.ConfigSource`)."""

    configs: tuple[LayerConfig, ...]
    kv_cache_dtype: KvCacheDtype = "auto"
    min_length: int = 0

    def layer_config(self, layer: int, length: int) -> LayerConfig:
        """Return a layer's configuration, whatever the length."""
        return self.configs[layer]


def weigh_answers(sensitivity: Sequence[float], layers: int) -> ErrorWeights:
    """Return the weights with which the mean over so many layers of weight times error is the predicted KL."""
    mean = max(statistics.fmean(sensitivity), 1e-30)
    heads = [max(cost / mean, MIN_WEIGHT) for cost in sensitivity]
    total = sum(heads)
    return ErrorWeights(layers * mean * total, tuple(cost * len(heads) / total for cost in heads))


def find_answer_limits(
    prover: Prover,
    curves: Sequence[Curves],
    tile: TileConfig,
    sensitivity: Sensitivity,
    prompts: Sequence[Prompt],
    recipe: Recipe,
) -> tuple[float, ...]:
    """Find the limits with which the model's answers keep to a recipe's budget, at the prompts' length.

    Args:
        prover: its executor holds the whole model.
        curves: of every layer at this length.
        tile: with which the trials run.
        sensitivity: of every layer and head.
        prompts: to adjust on; `PROMPTS` of them are run.
        recipe: its budget is a KL.

    Returns:
        The limit of each layer as a rel_mse, of which an allocation spends the recipe's margin.
    """
    length, budget = prompts[0].length, recipe.budget.value
    segments = recipe.select_segments(length)
    segment = segments[min(1, len(segments) - 1)]
    rankings = [select_rankings(layer, segment, Shape.from_tile(tile), recipe.scores[0]) for layer in curves]
    powers = [dense_power(layer) for layer in curves]
    weights = [weigh_answers(heads, len(curves)) for heads in sensitivity]
    constraints = replace(make_constraints(recipe), head_cap=math.inf)

    def allocate(kl: float) -> list[Allocation]:
        return allocate_together(rankings, weights, kl, constraints, [MAX_REL_MSE * power for power in powers])

    def configure(allocations: Sequence[Allocation]) -> FixedConfigs:
        last_rows = recipe.count_last_rows(length)
        configs = (LayerConfig(layer.heads, tile, recipe.scores[0], last_rows).validate() for layer in allocations)
        return FixedConfigs(tuple(configs), recipe.kv_cache_dtype)

    predicted = [share * budget for share in SHARES]
    sources = [configure(allocate(kl)) for kl in predicted]
    measured = [_mean_kl(kls) for kls in measure_answers(prover, prompts[:PROMPTS], sources)]
    spent = interpolate_budget(predicted, measured, AIM * budget)
    log.info("%d tokens: predicted KL of answers %s, measured %s: %.1e is spent", length, predicted, measured, spent)
    errors = [allocation.mse / power for allocation, power in zip(allocate(spent), powers, strict=True)]
    return tuple(min(max(error / recipe.margin, MIN_REL_MSE), MAX_REL_MSE) for error in errors)


def _mean_kl(prompts: Sequence[AnswerKls]) -> float:
    return max(statistics.fmean(prompt.kl for prompt in prompts), 0.0)


def interpolate_budget(predicted: Sequence[float], measured: Sequence[float], aim: float) -> float:
    """Return the predicted KL at which the measured one is `aim`, on lines through logarithms of falling pairs."""
    points = [(math.log(x), math.log(max(y, 1e-30))) for x, y in zip(predicted, measured, strict=True)]
    goal = math.log(aim)
    # the first pair of neighbours whose lower end is below the aim; beyond all of them the last pair goes on
    high, low = next((pair for pair in pairwise(points) if pair[1][1] <= goal), (points[-2], points[-1]))
    slope = min(max((high[1] - low[1]) / (high[0] - low[0]), SLOPES[0]), SLOPES[1])
    start = high if abs(high[1] - goal) < abs(low[1] - goal) else low
    return math.exp(start[0] + (goal - start[1]) / slope)
