"""What a user sees of an evaluation: the plan, and the tables and pictures of its summary, printed and as Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from calibrate.evaluation.plan import PROMPTS, Plan
from calibrate.evaluation.quality_plots import pictures
from calibrate.evaluation.results import DENSE_CAN, Row, Summary
from calibrate.tables import Table, bullets, escaped, markdown, print_fields, print_lines, print_table
from s2o_runtime.files import write_atomically

CAPTIONS = {
    "needles": "The share of needles found, by the prompt's length and the needle's depth in it.",
    "agreement": "Distance from the dense model's predictions, by position in the prompt.",
    "perplexity": "How much less a token of held-out text is expected than by the dense model, by position.",
    "time": "Speed against quality: the time to the first token, and the distance from the dense model.",
}
TASK_NAMES = {
    "needles": "one needle",
    "multi": "many needles",
    "variables": "variable tracking",
    PROMPTS: "your prompts",
}


def plan_lines(plan: Plan, architecture: str, device: str, prompts: int) -> dict[str, Any]:
    """Every choice of a run, as JSON. prompts: how many each variant reads."""
    return {
        "model": plan.model,
        "architecture": architecture,
        "weights": "random" if plan.random_weights else "the model's",
        "tokenizer": plan.tokenizer or "the model's",
        "device": device,
        "variants": list(plan.variant_names),
        "lengths": list(plan.lengths),
        "tasks": list(plan.tasks),
        "depths": list(plan.depth_values),
        "samples": plan.samples,
        "needles of multi": plan.needles,
        "timed prefills": plan.repeats,
        "your prompts": None if plan.prompts is None else ", ".join(map(str, plan.prompts)),
        "prompts": f"{prompts} for each of {len(plan.variant_names)} variants",
        "seed": plan.seed,
        "out": str(plan.out),
    }


def print_plan(lines: dict[str, Any], console: Console) -> None:
    """Print what `plan_lines` gives."""

    def in_words(value: Any) -> object:
        return "; ".join(map(str, value)) if isinstance(value, list) else "none" if value is None else value

    print_fields({name: in_words(value) for name, value in lines.items()}, console)


def print_summary(summary: Summary, console: Console) -> None:
    """Print the tables, and below them what a reader must know to read them."""
    for table in tables(summary):
        spaced = [[cell.replace(",", ", ") for cell in row] for row in table.rows]  # long settings break at commas
        print_table(replace(table, rows=spaced), console)
    print_lines(notes(summary), console)


def write_report(summary: Summary, plan: Plan) -> list[str]:
    """Write summary.json, the pictures and report.md into the plan's folder, each whole or not at all.

    Returns:
        The names of the files. Pictures of an earlier plan that this one has not are deleted.
    """
    drawn = {f"{name}.png": picture for name, picture in pictures(summary).items()}
    contents = {"summary.json": (json.dumps(summary, indent=1, allow_nan=False) + "\n").encode(), **drawn}
    for name in (*(f"{name}.png" for name in CAPTIONS), "report.md"):
        (plan.out / name).unlink(missing_ok=True)
    contents["report.md"] = _page(summary, list(drawn)).encode()
    for name, data in contents.items():
        write_atomically(plan.out / name, data)
    return list(contents)


def tables(summary: Summary) -> list[Table]:
    """The tables of what was measured."""
    every = [_retrieval_table(summary), _text_table(summary), _time_table(summary)]
    return [table for table in every if table.rows]


def notes(summary: Summary) -> list[str]:
    """What a reader must know to read the tables, one sentence each."""
    lines = []
    for task, accuracies in _beyond_dense(summary).items():
        shares = ", ".join(f"{accuracy:.0%} right at {length} tokens" for length, accuracy in accuracies.items())
        lines.append(
            f"dense cannot do {TASK_NAMES[task]} ({shares}): below {DENSE_CAN:.0%} a task does not tell what a variant "
            "loses"
        )
    for row in summary["time"]:
        for reason, layers in row["dense"].items():
            if row["variant"] != summary["variants"][0]["name"]:
                counted = "1 layer" if layers == 1 else f"{layers} layers"
                lines.append(f"{row['variant']} at {row['length']} tokens: {counted} ran dense ({reason})")
    if summary["device"] == "cpu" and summary["time"]:
        lines.append("times are those of the plain reference on a CPU: they say nothing about a GPU")
    if summary["random_weights"]:
        lines.append("the weights were random: only times and memory mean anything")
    return lines


def _beyond_dense(summary: Summary) -> dict[str, dict[int, float]]:
    """The tasks that the dense model cannot do, with its accuracy at each length where that is so."""
    accuracies: dict[str, dict[int, float]] = {}
    for row in summary["retrieval"]:
        if not row["dense_can"]:
            accuracies.setdefault(row["task"], {})[row["length"]] = row["dense_accuracy"]
    return accuracies


def _retrieval_table(summary: Summary) -> Table:
    names = ("task", "tokens", "variant", "right", "accuracy", "kept of dense's", "log-lik.", "density")
    rows = [_retrieval_cells(row) for row in summary["retrieval"]]
    return Table(names, rows, "answers", align="lrlr", wrap="variant")


def _retrieval_cells(row: Row) -> tuple[str, ...]:
    kept = f"{row['kept']} of {row['dense_found']}" if row["dense_can"] else "dense cannot"
    shorter = "" if row["shortest"] == row["length"] else f"{row['shortest']} - "
    return (
        TASK_NAMES[row["task"]],
        f"{shorter}{row['length']}",
        row["variant"],
        f"{row['found']} of {row['asked']}",
        f"{row['accuracy']:.1%}",
        kept,
        f"{row['log_likelihood']:.3f}",
        f"{row['density']:.3f}",
    )


def _text_table(summary: Summary) -> Table:
    """Perplexity and agreement of a variant at a length, in one row."""
    names = ("tokens", "variant", "perplexity", "over dense", "KL [nats]", "same top-1", "density")
    rows: dict[tuple[str, int], Row] = {}
    for row in (*summary["perplexity"], *summary["agreement"]):
        rows.setdefault((row["variant"], row["length"]), {}).update(row)
    order = [variant["name"] for variant in summary["variants"]]
    ordered = sorted(rows.values(), key=lambda row: (row["length"], order.index(row["variant"])))
    return Table(names, [_text_cells(row) for row in ordered], "held-out text", align="rlr", wrap="variant")


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


def _time_table(summary: Summary) -> Table:
    names = ("tokens", "variant", "first token [ms]", "fastest .. slowest", "vs dense", "peak [GiB]", "density")
    rows = [_time_cells(row) for row in summary["time"]]
    return Table(names, rows, "time to the first token, warm", align="rlr", wrap="variant")


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


def _page(summary: Summary, files: Sequence[str]) -> str:
    """The report in Markdown. files: the pictures beside it."""
    plan = summary["plan"]
    parts = [
        f"# Evaluation of {escaped(summary['model'])}",
        f"{escaped(summary['architecture'])}, on {escaped(summary['device'])}, "
        + ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
        + f"; seed {plan['seed']}, {plan['samples']} prompts of each kind, length and depth.",
    ]
    if summary.get("command"):
        parts.append(f"```sh\n{summary['command']}\n```")
    for table in tables(summary):
        parts += [f"## {table.title[0].upper()}{table.title[1:]}", markdown(table)]
    if lines := notes(summary):
        parts += ["## Notes", bullets(lines)]
    if files:
        parts.append("## Pictures")
        parts += [f"![{file.removesuffix('.png')}]({file})\n\n{CAPTIONS[file.removesuffix('.png')]}" for file in files]
    else:
        parts.append("There are no pictures, because nothing was compared with dense.")
    return "\n\n".join(parts) + "\n"
