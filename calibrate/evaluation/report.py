"""What a user sees: the plan, and the tables and pictures of a summary, on the terminal and as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table

from calibrate.evaluation.plan import PROMPTS, Plan
from calibrate.evaluation.plots import pictures
from calibrate.evaluation.results import DENSE_CAN, Row, Summary
from s2o_runtime.profile import write_atomically

CAPTIONS = {
    "needles": "The share of needles found, by the prompt's length and the needle's depth in it.",
    "agreement": "Distance from the dense model's predictions, by position in the prompt.",
    "perplexity": "How much less a token of held-out text is expected than by the dense model, by position.",
    "time": "Speed against quality: the time to the first token, and the distance from the dense model.",
}
LEFT = ("task", "variant")  # columns of words
NAMES = {
    "needles": "one needle",
    "multi": "many needles",
    "variables": "variable tracking",
    PROMPTS: "your prompts",
}


@dataclass(frozen=True)
class Grid:
    """A table: what it shows, column names, rows of cells."""

    title: str
    names: tuple[str, ...]
    rows: list[tuple[str, ...]]


def plan_lines(plan: Plan, architecture: str, device: str, prompts: int) -> dict[str, Any]:
    """Every choice of a run in words. prompts: how many each variant reads."""
    return {
        "model": plan.model,
        "architecture": architecture,
        "weights": "random" if plan.random_weights else "the model's",
        "device": device,
        "variants": list(plan.variant_names),
        "lengths": list(plan.lengths),
        "tasks": list(plan.tasks),
        "depths": list(plan.depth_values),
        "samples": plan.samples,
        "needles of multi": plan.needles,
        "timed prefills": plan.repeats,
        "your prompts": None if plan.prompts is None else str(plan.prompts),
        "prompts": f"{prompts} for each of {len(plan.variant_names)} variants",
        "seed": plan.seed,
        "out": str(plan.out),
    }


def print_plan(lines: dict[str, Any], console: Console) -> None:
    width = max(map(len, lines))
    for name, value in lines.items():
        text = "; ".join(map(str, value)) if isinstance(value, list) else "none" if value is None else value
        console.print(f"{name:<{width}}  {text}", highlight=False, markup=False, soft_wrap=True)


def print_tables(summary: Summary, console: Console) -> None:
    for grid in grids(summary):
        table = Table(title=grid.title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name in grid.names:
            side: Literal["left", "right"] = "left" if name in LEFT else "right"
            table.add_column(name, justify=side, overflow="fold", no_wrap=name != "variant")
        for row in grid.rows:
            table.add_row(*(cell.replace(",", ", ") for cell in row))  # so that long settings wrap between options
        console.print(table, highlight=False, markup=False)
    for line in notes(summary):
        console.print(line, highlight=False, markup=False)


def write_report(summary: Summary, plan: Plan) -> list[str]:
    """Write summary.json, the pictures and report.md into the plan's folder; each appears whole or not at all."""
    drawn = {f"{name}.png": picture for name, picture in pictures(summary).items()}
    contents = {"summary.json": (json.dumps(summary, indent=1, allow_nan=False) + "\n").encode(), **drawn}
    for name in (*(f"{name}.png" for name in CAPTIONS), "report.md"):  # what an earlier plan drew is not this one's
        (plan.out / name).unlink(missing_ok=True)
    contents["report.md"] = _markdown(summary, list(drawn)).encode()
    for name, data in contents.items():
        write_atomically(plan.out / name, data)
    return list(contents)


def grids(summary: Summary) -> list[Grid]:
    """The tables of what was measured."""
    made = [_retrieval_grid(summary), _text_grid(summary), _time_grid(summary)]
    return [grid for grid in made if grid.rows]


def notes(summary: Summary) -> list[str]:
    """What a reader must know to read the tables, one sentence each."""
    lines = []
    for task, at in _beyond_dense(summary).items():
        shares = ", ".join(f"{accuracy:.0%} right at {length} tokens" for length, accuracy in at.items())
        lines.append(
            f"dense cannot do {NAMES[task]} ({shares}): below {DENSE_CAN:.0%} a task does not tell what a variant loses"
        )
    for row in summary["time"]:
        for reason, layers in row["dense"].items():
            if row["variant"] != summary["variants"][0]["name"]:
                lines.append(f"{row['variant']} at {row['length']} tokens: {layers} layers ran dense ({reason})")
    if summary["device"] == "cpu" and summary["time"]:
        lines.append("times are those of the plain reference on a CPU: they say nothing about a GPU")
    if summary["random_weights"]:
        lines.append("the weights were random: only times and memory mean anything")
    return lines


def _beyond_dense(summary: Summary) -> dict[str, dict[int, float]]:
    """The tasks that the dense model cannot do, with its accuracy at each length where that is so."""
    found: dict[str, dict[int, float]] = {}
    for row in summary["retrieval"]:
        if not row["dense_can"]:
            found.setdefault(row["task"], {})[row["length"]] = row["dense_accuracy"]
    return found


def _retrieval_grid(summary: Summary) -> Grid:
    names = ("task", "tokens", "variant", "right", "accuracy", "kept of dense's", "log-lik.", "density")
    return Grid("answers", names, [_retrieval_cells(row) for row in summary["retrieval"]])


def _retrieval_cells(row: Row) -> tuple[str, ...]:
    kept = f"{row['kept']} of {row['dense_found']}" if row["dense_can"] else "dense cannot"
    shorter = "" if row["shortest"] == row["length"] else f"{row['shortest']} - "
    return (
        NAMES[row["task"]],
        f"{shorter}{row['length']}",
        row["variant"],
        f"{row['found']} of {row['asked']}",
        f"{row['accuracy']:.1%}",
        kept,
        f"{row['log_likelihood']:.3f}",
        f"{row['density']:.3f}",
    )


def _text_grid(summary: Summary) -> Grid:
    """Perplexity and agreement of a variant at a length, in one row."""
    names = ("tokens", "variant", "perplexity", "over dense", "KL [nats]", "same top-1", "density")
    rows: dict[tuple[str, int], Row] = {}
    for row in (*summary["perplexity"], *summary["agreement"]):
        rows.setdefault((row["variant"], row["length"]), {}).update(row)
    order = [variant["name"] for variant in summary["variants"]]
    made = sorted(rows.values(), key=lambda row: (row["length"], order.index(row["variant"])))
    return Grid("held-out text", names, [_text_cells(row) for row in made])


def _text_cells(row: Row) -> tuple[str, ...]:
    ratio = row["perplexity"] / row["dense_perplexity"] if "perplexity" in row else None
    return (
        str(row["length"]),
        row["variant"],
        "-" if ratio is None else f"{row['perplexity']:.4f}",
        "-" if ratio is None else f"{ratio - 1:+.2%}".replace("-0.00%", "+0.00%"),
        f"{row['kl']:.1e}" if "kl" in row else "-",
        f"{row['top1']:.2%}" if "top1" in row else "-",
        f"{row['density']:.3f}",
    )


def _time_grid(summary: Summary) -> Grid:
    names = ("tokens", "variant", "first token [ms]", "fastest .. slowest", "vs dense", "peak [GiB]", "density")
    return Grid("time to the first token, warm", names, [_time_cells(row) for row in summary["time"]])


def _time_cells(row: Row) -> tuple[str, ...]:
    peak = row["peak_bytes"]
    return (
        str(row["length"]),
        row["variant"],
        f"{row['seconds'] * 1e3:.1f}",
        f"{row['fastest'] * 1e3:.1f} .. {row['slowest'] * 1e3:.1f}",
        f"{row['speedup']:.2f}x",
        "-" if peak is None else f"{peak / (1 << 30):.2f}",
        f"{row['density']:.3f}",
    )


def _markdown(summary: Summary, files: Iterable[str]) -> str:
    plan = summary["plan"]
    parts = [
        f"# Evaluation of {summary['model']}",
        f"{summary['architecture']}, on {summary['device']}, "
        + ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
        + f"; seed {plan['seed']}, {plan['samples']} prompts of each kind, length and depth.",
    ]
    if summary.get("command"):
        parts.append(f"```sh\n{summary['command']}\n```")
    for grid in grids(summary):
        parts += [f"## {grid.title[0].upper()}{grid.title[1:]}", _table(grid)]
    if lines := notes(summary):
        parts += ["## Notes", "\n".join(f"- {line}" for line in lines)]
    files = list(files)
    if files:
        parts.append("## Pictures")
        parts += [f"![{file.removesuffix('.png')}]({file})\n\n{CAPTIONS[file.removesuffix('.png')]}" for file in files]
    else:
        parts.append("There are no pictures: nothing was compared, or matplotlib is not installed.")
    return "\n\n".join(parts) + "\n"


def _table(grid: Grid) -> str:
    rules = [":--" if name in LEFT else "--:" for name in grid.names]
    lines = [list(grid.names), rules, *map(list, grid.rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
