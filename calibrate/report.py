"""What a user sees before and after: the plan, the table, the same as JSON."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich import box
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
        "objective": "measured latency" if recipe.device.startswith("cuda") else "predicted latency (no GPU)",
        "budget": f"{recipe.budget.kind} {recipe.budget.value:g} per layer; {recipe.margin:.0%} of it is spent",
        "lengths": list(recipe.lengths),
        "prompts": str(recipe.prompts) if recipe.prompts else "the Python standard library's sources, with needles",
        "prompts per length": f"{recipe.num_prompts} to calibrate, {recipe.held_out} held out",
        "segments": {str(length): list(recipe.segments(length)) for length in recipe.lengths},
        "representatives": list(recipe.representatives),
        "grains": list(recipe.grains),
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
    heads = [head for head in choice.allocation.heads if head.mode == "s2o"]
    taus = [head.tau for head in heads]
    representatives = Counter(head.representatives for head in heads)
    return {
        "layer": index,
        "tau_min": min(taus, default=None),
        "tau_max": max(taus, default=None),
        "dense_heads": len(choice.allocation.heads) - len(heads),
        "tails": sum(head.tail for head in heads),
        "representatives": {str(count): representatives[count] for count in sorted(representatives)},
        "segment": choice.segment,
        "grain": choice.grain,
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
    """One row a layer, at most 120 columns wide; "1/32: 6/2" says that 6 heads have 1 representative and 2 have 32."""
    title = f"{length['length']} tokens, held-out prompts"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("layer", "tau", "dense", "tails", "repr.", "segment", "grain", "tile", "density"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in (budget["kind"], "budget", "vs dense"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in length["layers"]:
        taus = "-" if row["tau_min"] is None else f"{_short(row['tau_min'])} .. {_short(row['tau_max'])}"
        timed = row["seconds"] is not None and row["dense_seconds"] is not None
        table.add_row(
            str(row["layer"]),
            taus,
            str(row["dense_heads"]),
            str(row["tails"]),
            _shares(row["representatives"]),
            str(row["segment"]),
            str(row["grain"]),
            row["tile"],
            f"{row['density']:.3f}",
            f"{row['error']:.2e}",
            f"{row['error_over_budget']:.0%}",
            f"{row['dense_seconds'] / row['seconds']:.2f}x" if timed else "-",
        )
    return table


def _shares(counts: dict[str, int]) -> str:
    """{"1": 6, "32": 2} -> "1/32: 6/2" """
    return f"{'/'.join(counts)}: {'/'.join(map(str, counts.values()))}" if counts else "-"


def _short(tau: float) -> str:
    return f"{float(f'{tau:.2g}'):g}"  # 150, not 1.5e+02
