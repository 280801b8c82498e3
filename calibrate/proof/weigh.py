"""Spend a budget of answers: what each layer may err, by what its errors do to the answers.

An error matters as far as it reaches an answer through the keys and values of later layers. How far differs between
layers by a factor of 100, which one backward pass tells (`model.sensitivity`); how much all layers may err together is
measured, because that pass underrates it several times.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from calibrate.curves.curves import Curves, Shape, dense_power, select_rankings
from calibrate.curves.measure import LayersCurves
from calibrate.model.sensitivity import Sensitivity
from calibrate.prompts.prompt import Prompt
from calibrate.proof.adjust import NO_CHANGE_WITHIN
from calibrate.proof.answers import measure_answers
from calibrate.proof.state import Candidate
from calibrate.proof.verify import Prompts, Prover
from calibrate.recipe import MAX_REL_MSE, Recipe
from calibrate.search.allocate import Allocation, ErrorWeights, allocate_together
from calibrate.search.choice import LayerBudget, make_constraints, make_default_point
from s2o_runtime.config import KvCacheDtype, LayerConfig, TileConfig
from s2o_runtime.errors import ConfigError

PROMPTS = 5  # of each length that a scale is measured on
NOISE_PROMPTS = 2  # that two dense kernels are compared on; `PROMPTS`, which are answered anyway, for the default
NOISE_ROOM = 2.0  # times the noise, below which the default budget does not go
SHARES = (2**-4, 2**-6, 2**-8)  # of the budget as sensitivities predict it, which is up to 100 times too little
NEXT_SHARES = (2.0, 0.5)  # times the share that the length before spends
SLOPES = (0.5, 2.0)  # that the logarithm of a measured KL may have in that of the predicted one
AIM = 0.68  # of the budget: 20 prompts' bound is 1.2 to 1.45 times their mean (docs/results/answer-variance.txt)
MIN_WEIGHT = 1e-6  # of the mean head's: a head that moves no answer may err as much as any may
KNEE = 0.1  # of the mean layer's weight: behind it single rows are not guarded, because no answer reads them
MIN_REL_MSE = 1e-5  # the least limit of a layer
LIMIT_ROOM = 2.0  # times what a layer is predicted to err: the limit that other text and each eighth are held to
MAX_STEP = 3.0  # times as much, or as little, in one change of the scale

log = logging.getLogger("calibrate")


def check_noise(prover: Prover, prompts: Prompts, recipe: Recipe, default: float) -> Recipe:
    """Return the recipe with a budget of answers above what two dense kernels differ by, also in the file's name.

    Args:
        prover, prompts: measures the adjust prompts, by length in tokens.
        recipe: its budget is a KL.
        default: the budget that is raised to twice the noise where it is below; another one was named by a user.

    It is the noise at the shortest length or at the longest, whichever is larger. Raises ConfigError for a named budget
    below it. On a CPU the noise is not known, which the log says.
    """
    budget, noise = recipe.budget.value, 0.0
    count = PROMPTS if budget == default else NOISE_PROMPTS
    for length in recipe.noise_lengths:  # the longest prompts have the most
        if (of_length := measure_noise(prover, prompts[length], count)) is None:
            log.info("the noise of two dense kernels is not known on a CPU: the budget of answers is taken as it is")
            return recipe
        noise = max(noise, of_length)
        if budget != default and budget < of_length:
            raise ConfigError(
                f"budget_kl {budget:g} is below the model's own noise, {of_length:.1e} nats per token between two "
                f"dense kernels at {length} tokens: allow at least {NOISE_ROOM * of_length:.1e}"
            )
    if budget == default and budget < NOISE_ROOM * noise:
        raised = replace(recipe.budget, value=float(f"{NOISE_ROOM * noise:.2g}"))  # as a file's name has it
        out = recipe.out.with_stem(str(raised)) if recipe.out.stem == str(recipe.budget) else recipe.out
        log.warning("two dense kernels differ by %.1e nats: the budget is %s, the profile %s", noise, raised, out)
        return replace(recipe, budget=raised, out=out)
    return recipe


def measure_noise(prover: Prover, prompts: Sequence[Prompt], count: int = NOISE_PROMPTS) -> float | None:
    """Return the mean KL between two dense kernels of the answers about the first `count` prompts of a length, in nats.

    None on a CPU, which has one kernel.
    """
    if prover.executor.device.kind != "cuda":
        return None
    (answers,) = measure_answers(prover, prompts[:count], [], noise=True)
    return max(statistics.fmean(prompt.kl for prompt in answers), 0.0)


def weigh_heads(costs: Sequence[float], layers: int) -> ErrorWeights:
    """Return the weights with which the mean over so many layers of weight times error is the predicted KL.

    costs: of each head of a layer, in nats per token for each unit of its mse.
    """
    mean = max(statistics.fmean(costs), 1e-30)
    heads = [max(cost / mean, MIN_WEIGHT) for cost in costs]
    return ErrorWeights(layers * mean * sum(heads), tuple(cost * len(heads) / sum(heads) for cost in heads))


def make_answer_budgets(
    prover: Prover,
    prompts: Prompts,
    curves: LayersCurves,
    tiles: Mapping[int, Sequence[TileConfig]],
    sensitivity: Sensitivity,
    recipe: Recipe,
) -> dict[int, list[LayerBudget]]:
    """Divide a budget of answers among the layers of each length.

    Args:
        prover, prompts: measures the adjust prompts, by length in tokens; `PROMPTS` of each length are used.
        curves: of every layer at every length.
        tiles: of each length, the one that trials begin with first.
        sensitivity: of every layer and head.
        recipe: its budget is a KL.

    Returns:
        What each layer may spend, by length.
    """
    budgets, shares = dict[int, list[LayerBudget]](), list(SHARES)
    for length, of_length in sorted(curves.items()):
        budgets[length], spent = _divide_budget(
            prover, prompts[length], of_length, tiles[length][0], sensitivity, recipe, shares
        )
        shares = [times * spent / recipe.budget.value for times in NEXT_SHARES]
    return budgets


def _divide_budget(
    prover: Prover,
    prompts: Sequence[Prompt],
    curves: Sequence[Curves],
    tile: TileConfig,
    sensitivity: Sensitivity,
    recipe: Recipe,
    shares: Sequence[float],
) -> tuple[list[LayerBudget], float]:
    """Return what each layer may spend, and what all together are predicted to move answers by, in nats per token.

    shares: of the budget, which are measured.
    """
    length, budget = prompts[0].length, recipe.budget.value
    point = make_default_point(recipe, length, tile)
    rankings = [select_rankings(layer, point.segment, Shape.from_tile(tile), point.lookback) for layer in curves]
    powers = [dense_power(layer) for layer in curves]
    weights = [weigh_heads(heads, len(curves)) for heads in sensitivity]
    costs = [of_layer.layer * power for of_layer, power in zip(weights, powers, strict=True)]  # of a unit of rel_mse
    mean_cost, base = statistics.fmean(costs), replace(make_constraints(recipe), head_cap=math.inf)
    constraints = [
        replace(base, head_mse=MAX_REL_MSE * power, worst_rows=base.worst_rows if cost >= KNEE * mean_cost else None)
        for cost, power in zip(costs, powers, strict=True)
    ]

    def allocate(kl: float) -> list[Allocation]:
        return allocate_together(rankings, weights, kl, constraints)

    predicted = [share * budget for share in shares]
    sources = [
        FixedConfigs(
            [LayerConfig(layer.heads, tile, point.lookback, recipe.count_last_rows(length)) for layer in allocate(kl)],
            recipe.kv_cache_dtype,
        )
        for kl in predicted
    ]
    answers = measure_answers(prover, prompts[:PROMPTS], sources)
    measured = [statistics.fmean(prompt.kl for prompt in of_source) for of_source in answers]
    spent = interpolate_budget(predicted, measured, AIM * budget)
    log.info("%d tokens: predicted KL of answers %s, measured %s: %.1e is spent", length, predicted, measured, spent)
    of_layers = zip(allocate(spent), powers, weights, constraints, strict=True)
    budgets = [
        LayerBudget(limit_layer(allocation, power), of_layer.mean(allocation), of_constraints, of_layer)
        for allocation, power, of_layer, of_constraints in of_layers
    ]
    return budgets, spent


class FixedConfigs:
    """A source of configurations: one for each layer, whatever the length."""

    def __init__(self, configs: Sequence[LayerConfig], kv_cache_dtype: KvCacheDtype) -> None:
        self.configs, self.kv_cache_dtype = [config.validate() for config in configs], kv_cache_dtype

    def layer_config(self, layer: int, length: int) -> LayerConfig:
        """Return a layer's configuration."""
        return self.configs[layer]


def interpolate_budget(predicted: Sequence[float], measured: Sequence[float], aim: float) -> float:
    """Return the predicted KL at which the measured one is `aim`, on lines through logarithms of falling pairs."""
    points = [(math.log(x), math.log(max(y, 1e-30))) for x, y in zip(predicted, measured, strict=True)]
    goal = math.log(aim)
    # the first pair of neighbours whose lower end is below the aim; beyond all of them the last pair goes on
    high, low = next((pair for pair in pairwise(points) if pair[1][1] <= goal), (points[-2], points[-1]))
    slope = (high[1] - low[1]) / (high[0] - low[0])
    if not low[1] <= goal < high[1]:  # between two measurements the line holds, whatever its slope
        slope = min(max(slope, SLOPES[0]), SLOPES[1])
    start = high if abs(high[1] - goal) < abs(low[1] - goal) else low
    return math.exp(start[0] + (goal - start[1]) / slope)


def scale_to_answers(prover: Prover, prompts: Prompts, candidate: Candidate) -> Candidate:
    """Return the candidate whose layers spend so much more, or less, that its answers are where they may be.

    The search chose other segments and tiles than the budgets were measured with.

    prover, prompts: measures the adjust prompts, by length in tokens.
    """
    for length in candidate.recipe.lengths:
        (answers,) = measure_answers(prover, prompts[length], [candidate])
        kl = max(statistics.fmean(prompt.kl for prompt in answers), 1e-30)
        times = min(max(AIM * candidate.recipe.budget.value / kl, 1 / MAX_STEP), MAX_STEP)
        log.info("%d tokens: KL of answers %.1e as chosen, %.2f times that may be spent", length, kl, times)
        if not 1 / NO_CHANGE_WITHIN <= times <= NO_CHANGE_WITHIN:
            candidate = spend_answers(candidate, length, times)
    return candidate


def spend_answers(candidate: Candidate, length: int, times: float) -> Candidate:
    """Return the candidate whose layers at one length are predicted to move answers by so many times as much.

    The layers share it anew, each by what its errors do to answers. A layer that may spend less than it was given, as
    it was tightened, does not get more if all together get less. A length without curves has its thresholds scaled.
    """
    layers = range(candidate.geometry.layers)
    live = [layer for layer in layers if not candidate.layer_config(layer, length).is_dense]
    if not live or length not in candidate.chosen:
        for layer in live:
            candidate = candidate.with_share(layer, length, times)
        return candidate
    chosen = candidate.chosen[length]
    plans = [chosen.choices[layer] for layer in live]
    predicted = sum(plan.budget.weights.layer * plan.spent for plan in plans) / len(plans)
    allocations = allocate_together(
        [plan.curves for plan in plans],
        [plan.budget.weights for plan in plans],
        times * predicted,
        [plan.budget.constraints for plan in plans],
    )
    choices, limits = list(chosen.choices), list(chosen.limits)
    for layer, plan, allocation in zip(live, plans, allocations, strict=True):
        spent = plan.budget.weights.mean(allocation)
        if times > 1 or spent < plan.spent:
            budget = replace(plan.budget, mse=spent)
            choices[layer] = replace(plan, budget=budget, allocation=allocation, timing=None)
            limits[layer] = limit_layer(allocation, dense_power(plan.curves))
    changed = replace(chosen, choices=choices, limits=limits)
    return replace(candidate, chosen={**candidate.chosen, length: changed})


def limit_layer(allocation: Allocation, power: float) -> float:
    """Return the limit of a layer's rel_mse, by what is allocated and the dense output's mean square."""
    return min(max(LIMIT_ROOM * allocation.mse / power, MIN_REL_MSE), MAX_REL_MSE)
