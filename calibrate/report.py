"""What a user sees before and after: the plan, the table, the same as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from calibrate.pipeline import Result
from calibrate.recipe import Recipe
from calibrate.search import Choice
from calibrate.verify import LayerProof
from s2o_runtime.identity import Geometry


def plan(recipe: Recipe, geometry: Geometry, device: str) -> dict[str, Any]:
    """Every choice of a run, defaulted ones included."""
    return {
        "model": recipe.model,
        "architecture": f"{geometry.architecture}, {geometry.layers} layers, {geometry.query_heads} query heads, "
        f"{geometry.kv_heads} KV heads, head dim {geometry.head_dim}",
        "device": device,
        "objective": "measured latency" if recipe.device.startswith("cuda") else "density (no GPU)",
        "budget": f"{recipe.budget.kind} {recipe.budget.value:g} per layer; {recipe.margin:.0%} of it is spent",
        "lengths": list(recipe.lengths),
        "prompts": str(recipe.prompts) if recipe.prompts else "the Python standard library's sources, with needles",
        "prompts per length": f"{recipe.num_prompts} to calibrate, {recipe.held_out} held out",
        "segments": {str(length): list(recipe.segments(length)) for length in recipe.lengths},
        "trials": f"{recipe.trials} for each of {geometry.layers} layers and {len(recipe.lengths)} lengths",
        "seed": recipe.seed,
        "out": str(recipe.out),
    }


def print_plan(plan: dict[str, Any], console: Console) -> None:
    width = max(map(len, plan))
    for name, value in plan.items():
        console.print(f"{name:<{width}}  {value}", highlight=False, markup=False, soft_wrap=True)


def summary(recipe: Recipe, result: Result) -> dict[str, Any]:
    """The outcome, for `--json`."""
    return {
        "out": str(recipe.out) if result.met else None,
        "met": result.met,
        "model": recipe.model,
        "device": str(result.profile.device),
        "budget": {"kind": recipe.budget.kind, "value": recipe.budget.value},
        "calibration_seconds": round(result.seconds, 3),
        "failed_trials": result.failures,
        "lengths": [
            {
                "length": length,
                "prefill_seconds": result.times[length].patched,
                "dense_prefill_seconds": result.times[length].dense,
                "layers": [
                    _row(recipe, index, choice, layer)
                    for index, (choice, layer) in enumerate(zip(result.choices[length], layers, strict=True))
                ],
            }
            for length, layers in result.proofs.items()
        ],
    }


def _row(recipe: Recipe, index: int, choice: Choice, proof: LayerProof) -> dict[str, Any]:
    taus = [tau for tau in choice.allocation.taus if tau is not None]
    return {
        "layer": index,
        "tau_min": min(taus, default=None),
        "tau_max": max(taus, default=None),
        "dense_heads": len(choice.allocation.taus) - len(taus),
        "segment": choice.segment,
        "tile": str(choice.tile),
        "density": proof.density,
        "error": proof.error(recipe.budget),
        "error_over_budget": proof.error(recipe.budget) / recipe.budget.value,
        "predicted_mse": choice.allocation.mse,
        "held_out_mse": proof.mse,
        "held_out_rel_mse": proof.rel_mse,
        "seconds": choice.seconds,
        "dense_seconds": choice.dense_seconds,
    }


def print_tables(summary: dict[str, Any], console: Console) -> None:
    for length in summary["lengths"]:
        console.print(_table(summary["budget"], length))
        ratio = length["dense_prefill_seconds"] / length["prefill_seconds"]
        console.print(
            f"prefill of {length['length']} tokens on {summary['device']}: {length['prefill_seconds'] * 1e3:.1f} ms, "
            f"dense {length['dense_prefill_seconds'] * 1e3:.1f} ms ({ratio:.2f}x)\n",
            highlight=False,
        )
    if summary["failed_trials"]:
        console.print(f"{summary['failed_trials']} trials failed to compile or run and were left out", highlight=False)


def _table(budget: dict[str, Any], length: dict[str, Any]) -> Table:
    table = Table(title=f"{length['length']} tokens, held-out prompts", title_justify="left")
    for name in ("layer", "tau", "dense heads", "segment", "tile", "density", budget["kind"], "of budget", "vs dense"):
        table.add_column(name, justify="right")
    for row in length["layers"]:
        taus = "-" if row["tau_min"] is None else f"{row['tau_min']:.3g} .. {row['tau_max']:.3g}"
        timed = row["seconds"] is not None and row["dense_seconds"] is not None
        table.add_row(
            str(row["layer"]),
            taus,
            str(row["dense_heads"]),
            str(row["segment"]),
            row["tile"],
            f"{row['density']:.3f}",
            f"{row['error']:.2e}",
            f"{row['error_over_budget']:.0%}",
            f"{row['dense_seconds'] / row['seconds']:.2f}x" if timed else "-",
        )
    return table
