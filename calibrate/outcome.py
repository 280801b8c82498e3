"""A finished calibration as plain data: what is printed, reported and given out as JSON."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from calibrate.allocate import allocate
from calibrate.choose import Chosen
from calibrate.pipeline import Result
from calibrate.recipe import Recipe
from calibrate.search import Choice, allowed
from calibrate.verify import LayerProof, LengthProof
from calibrate.versions import versions

FRONTIER = tuple(10 ** (step / 2) for step in range(-4, 5))  # times a layer's budget


def summary(recipe: Recipe, result: Result) -> dict[str, Any]:
    """The outcome, all of it JSON."""
    geometry = result.profile.geometry
    return {
        "out": str(recipe.out) if result.written else None,
        "met": result.met,
        "problems": list(result.problems),
        "model": recipe.model,
        "architecture": str(geometry),
        "device": str(result.device),
        "random_weights": recipe.random_weights,
        "budget": {"kind": recipe.budget.kind, "value": recipe.budget.value, "scope": recipe.scope},
        "worst_rows": recipe.worst_rows or None,
        "calibration_seconds": round(sum(result.seconds.values()), 3),
        "phases": {name: round(seconds, 3) for name, seconds in result.seconds.items()},
        "trials": sum(each.trials for each in result.chosen.values()),
        "failed_trials": sum(sum(each.failures.values()) for each in result.chosen.values()),
        "failures": dict(sum((each.failures for each in result.chosen.values()), Counter())),
        "journal": {"path": str(recipe.journal_path), "reused": result.journal_reused},
        "versions": versions(),
        "seed": recipe.seed,
        "data": recipe.prompt_source,
        "lengths": [_length(recipe, result, length, proof) for length, proof in sorted(result.proofs.items())],
    }


def _length(recipe: Recipe, result: Result, length: int, proof: LengthProof) -> dict[str, Any]:
    chosen = result.chosen.get(length)
    return {
        "length": length,
        "calibrated": chosen is not None,
        "kl": proof.kl,
        "top1": proof.top1,
        "needles": None if proof.needles is None else list(proof.needles),
        "prefill_seconds": proof.prefill_seconds,
        "dense_prefill_seconds": proof.dense_prefill_seconds,
        "uniform": _uniform(chosen),
        "cost": None if chosen is None else _mean([choice.allocation.cost for choice in chosen.choices]),
        "attention_seconds": _total([layer.seconds for layer in proof.layers]),
        "dense_attention_seconds": _total([layer.dense_seconds for layer in proof.layers]),
        "groups": [] if chosen is None else chosen.groups,
        "layers": [
            _layer(recipe, result, length, index, layer, None if chosen is None else chosen.choices[index])
            for index, layer in enumerate(proof.layers)
        ],
    }


def _uniform(chosen: Chosen | None) -> dict[str, Any] | None:
    if chosen is None or chosen.uniform is None:
        return None
    head = chosen.uniform.head
    return {
        "tau": head.tau,
        "segment": head.segment,
        "representatives": head.representatives,
        "tail": head.tail,
        "cost": chosen.uniform.cost,
        "seconds": chosen.uniform.seconds,
    }


def _predicted_seconds(choice: Choice, choices: Sequence[Choice]) -> float | None:
    """What a layer's attention will take; None where it was not timed.

    A call is timed in turns with dense attention, so what is certain is their ratio: the GPU may be slower for a while.
    Dense attention takes the same for every layer of a length.
    """
    if choice.timing is None or choice.seconds is None:
        return None
    dense = statistics.median(each.timing.dense_seconds for each in choices if each.timing is not None)
    return dense * choice.seconds / choice.timing.dense_seconds


def _layer(
    recipe: Recipe, result: Result, length: int, index: int, proof: LayerProof, choice: Choice | None
) -> dict[str, Any]:
    config = result.configs[length, index]
    heads = [head for head in config.heads if head.mode == "s2o"]
    taus = [head.tau for head in heads]
    representatives = Counter(head.representatives for head in heads)
    error, limit = proof.error(recipe.budget), result.limits[length, index]
    return {
        "layer": index,
        "tau_min": min(taus, default=None),
        "tau_max": max(taus, default=None),
        "dense_heads": sum(head.mode == "dense" for head in config.heads),
        "methods": dict(Counter(head.blocks.name if head.blocks else head.mode for head in config.heads)),
        "tails": sum(head.tail for head in heads),
        "representatives": {str(count): representatives[count] for count in sorted(representatives)},
        "segment": config.heads[0].segment,
        "grain": config.grain,
        "tile": str(config.tile),
        "why_dense": None if choice is None else choice.why_dense,
        "density": proof.density,
        "error": error,
        "limit": limit,
        "error_over_limit": error / limit if limit else 0.0,
        "predicted_error": None if choice is None else _in_unit(recipe, choice, choice.allocation.mse),
        "held_out_mse": proof.mse,
        "held_out_rel_mse": proof.rel_mse,
        "worst": proof.worst,
        "tightened": result.tightened[length, index],
        "predicted_seconds": None if choice is None else _predicted_seconds(choice, result.chosen[length].choices),
        "seconds": proof.seconds,
        "dense_seconds": proof.dense_seconds,
        "heads": _heads(recipe, choice) if choice is not None else [],
        "frontier": None if choice is None else _frontier(recipe, choice),
    }


def _heads(recipe: Recipe, choice: Choice) -> list[dict[str, Any]]:
    return [
        {
            "mode": point.head.mode,
            "tau": point.head.tau,
            "representatives": point.head.representatives,
            "tail": point.head.tail,
            "blocks": None if point.head.blocks is None else str(point.head.blocks),
            "density": point.density,
            "cost": point.cost,
            "error": _in_unit(recipe, choice, point.mse),
        }
        for point in choice.allocation.points
    ]


def _frontier(recipe: Recipe, choice: Choice) -> list[list[float]]:
    """Density and error of the layer at budgets around its own."""
    found = []
    for times in FRONTIER:
        made = allocate(choice.curves, choice.budget_mse * times, allowed(recipe))
        found.append([made.density, _in_unit(recipe, choice, made.mse)])
    return found


def _in_unit(recipe: Recipe, choice: Choice, mse: float) -> float:
    return recipe.budget.error(mse, next(iter(choice.curves.values())).dense_power)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _total(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
