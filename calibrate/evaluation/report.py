"""What a user sees of an evaluation: the plan, and the tables and pictures of its summary, printed and as Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from calibrate.evaluation.plan import PROMPTS, Plan
from calibrate.evaluation.quality_plots import pictures
from calibrate.evaluation.results import DENSE_CAN, Row, Summary
from calibrate.tables import Table, bullets, escaped, formatted, markdown, print_fields, print_lines, print_table
from s2o_runtime.files import write_atomically

CAPTIONS = {
    "needles": "The share of needles found, by the prompt's length and the needle's depth in it.",
    "agreement": "Distance from the dense model's predictions, by position in the prompt.",
    "time": "Speed against quality: the time to the first token, and the distance from the dense model.",
}
POINT = 0.01  # of the share of right answers
TASK_NAMES = {
    "needles": "needles",
    "alike": "keys that look alike",
    "variables": "variable tracking",
    "counting": "counting",
    "questions": "questions",
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
        "prompts of each task": plan.samples,
        "questions of each": plan.needles,
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
    every = [_quality_table(summary), _retrieval_table(summary), _text_table(summary), _time_table(summary)]
    return [table for table in every if table.rows]


def notes(summary: Summary) -> list[str]:
    """What a reader must know to read the tables, one sentence each."""
    lines = [note for row in summary["quality"] if (note := _precision(row, summary["plan"]["samples"])) is not None]
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


def _precision(row: Row, samples: int) -> str | None:
    """How many prompts it takes to tell whether a variant is within `POINT` of dense; None if these suffice."""
    half = (row["high"] - row["low"]) / 2 if "low" in row else 0.0
    if half <= POINT:
        return None
    return (
        f"{row['variant']} at {row['length']} tokens: the interval is {100 * half:.1f} points wide to each side; about "
        f"--num-prompts {math.ceil(samples * (half / POINT) ** 2)} make it {100 * POINT:g}"
    )


def _beyond_dense(summary: Summary) -> dict[str, dict[int, float]]:
    """The tasks that the dense model cannot do, with its accuracy at each length where that is so."""
    accuracies: dict[str, dict[int, float]] = {}
    for row in summary["retrieval"]:
        if not row["dense_can"]:
            accuracies.setdefault(row["task"], {})[row["length"]] = row["dense_accuracy"]
    return accuracies


def _quality_table(summary: Summary) -> Table:
    """What each variant keeps of dense's quality at a length, in one row."""
    answered = ("recall, dense", "recall", "difference, 95%", "p", "p by prompt")
    names = ("tokens", "variant", "budget", "attention", "prefill", *answered, "KL [nats]", "same top-1")
    rows = [_quality_cells(row) for row in summary["quality"] if {"asked", "kl", "same"} & row.keys()]
    return Table((*names, "same answers"), rows, "quality beside dense", align="rlr", wrap="variant")


def _quality_cells(row: Row) -> tuple[str, ...]:
    return (
        str(row["length"]),
        row["variant"],
        row["budget"] or "-",
        _times(row["attention_speedup"]),
        _times(row.get("speedup")),
        formatted(row.get("dense_accuracy"), ".1%"),
        formatted(row.get("accuracy"), ".1%"),
        _difference(row),
        formatted(row.get("p"), ".2g"),
        formatted(row.get("p_by_prompt"), ".2g"),
        formatted(row.get("kl"), ".1e"),
        formatted(row.get("top1"), ".2%"),
        formatted(row.get("same"), ".0%"),
    )


def _times(speedup: float | None) -> str:
    return "-" if speedup is None else f"{speedup:.2f}x"


def _difference(row: Row) -> str:
    """How many points more answers are right than dense's, with the interval."""
    if "difference" not in row:
        return "-"
    return f"{100 * row['difference']:+.1f} ({100 * row['low']:+.1f} .. {100 * row['high']:+.1f})"


def _retrieval_table(summary: Summary) -> Table:
    names = ("task", "tokens", "variant", "right", "accuracy", "kept of dense's", "difference, 95%", "log-lik.")
    rows = [_retrieval_cells(row) for row in summary["retrieval"]]
    return Table((*names, "density"), rows, "answers", align="lrlr", wrap="variant")


def _retrieval_cells(row: Row) -> tuple[str, ...]:
    kept = f"{row['kept']} of {row['dense_found']}" if row["dense_can"] else "dense cannot"
    up_to = "up to " if row["task"] == PROMPTS else ""
    return (
        TASK_NAMES[row["task"]],
        f"{up_to}{row['length']}",
        row["variant"],
        f"{row['found']} of {row['asked']}",
        f"{row['accuracy']:.1%}",
        kept,
        _difference(row),
        f"{row['log_likelihood']:.3f}",
        f"{row['density']:.3f}",
    )


def _text_table(summary: Summary) -> Table:
    """Perplexity and greedy answers of a variant at a length, in one row."""
    names = ("tokens", "variant", "perplexity", "over dense", "same answers", "same tokens", "density")
    rows: dict[tuple[int, str], Row] = {}
    for row in (*summary["perplexity"], *summary["greedy"]):
        rows.setdefault((row["length"], row["variant"]), {}).update(row)
    ordered = sorted(rows.values(), key=lambda row: int(row["length"]))
    return Table(names, list(map(_text_cells, ordered)), "held-out text", align="rlr", wrap="variant")


def _text_cells(row: Row) -> tuple[str, ...]:
    ratio = row["perplexity"] / row["dense_perplexity"] if "perplexity" in row else None
    return (
        str(row["length"]),
        row["variant"],
        formatted(row.get("perplexity"), ".4f"),
        "-" if ratio is None else f"{ratio - 1:+.2%}".replace("-0.00%", "+0.00%"),
        formatted(row.get("same"), ".0%"),
        f"{row['prefix']:.1f} of {row['answer_tokens']:.1f}" if "prefix" in row else "-",
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
        + f"; seed {plan['seed']}, {plan['samples']} prompts of each task and length, {plan['needles']} questions each",
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
