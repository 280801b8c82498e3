"""Tables of an evaluation."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from calibrate.evaluation.plan import FILES, PROMPTS, RULER, EvaluationPlan
from calibrate.evaluation.results import RULER_JUDGED, Row, Summary
from calibrate.machine import MARK, format_json_file
from calibrate.model.models import in_full
from calibrate.report.sections import Columns, show
from calibrate.tables import (
    Table,
    escape_markdown,
    format_bullets,
    format_markdown,
    format_number,
    print_fields,
    print_lines,
    print_table,
)
from s2o_runtime.fields import pluralize
from s2o_runtime.files import hash_file, write_atomically

POINT = 0.01  # of the share of right answers


def plan_lines(plan: EvaluationPlan, architecture: str, device: str, prompts: int) -> dict[str, Any]:
    """Return every choice of a run as JSON; `prompts` is how many each variant reads."""
    return {
        "model": in_full(plan.model),
        "architecture": architecture,
        "weights": "random" if plan.random_weights else "the model's",
        "tokenizer": plan.tokenizer or "the model's",
        "device": device,
        "variants": list(plan.variant_names),
        "lengths": list(plan.lengths),
        "tasks": list(plan.tasks),
        "prompts of each task": plan.samples,
        "questions of each": plan.needles,
        **({"prompts of each task of ruler": plan.ruler_prompts} if RULER in plan.tasks else {}),
        "timed prefills": plan.repeats,
        "your prompts": None if plan.prompts is None else ", ".join(map(str, plan.prompts)),
        "prompts": f"{prompts} for each of {len(plan.variant_names)} variants",
        "seed": plan.seed,
        "out": str(plan.out),
    }


def print_plan(lines: dict[str, Any], console: Console) -> None:
    """Print the result of `plan_lines`."""
    words = {name: "; ".join(map(str, line)) if isinstance(line, list) else line for name, line in lines.items()}
    print_fields({name: "none" if line is None else line for name, line in words.items()}, console)


def print_summary(summary: Summary, console: Console) -> None:
    """Print the tables, and below them what a reader must know to read them."""
    for table in list_tables(summary):
        spaced = [[cell.replace(",", ", ") for cell in row] for row in table.rows]  # long settings break at commas
        print_table(replace(table, rows=spaced), console)
    print_lines(list_notes(summary), console)


def write_report(summary: Summary, plan: EvaluationPlan) -> None:
    """Write summary.json and report.md into the plan's folder, each whole or not at all."""
    for name, data in zip(FILES, (_write_page(summary).encode(), format_json_file(summary)), strict=True):
        write_atomically(plan.out / name, data)


def list_tables(summary: Summary) -> list[Table]:
    """Lay out the tables of what was measured."""
    tokens = {"tokens": show("length", "d"), "variant": show("variant", "")}
    density = {"density": show("density", ".3f")}
    scores: Columns = {
        "score": show("score", ".1%"),
        "dense": show("dense_score", ".1%"),
        "difference, 95%": lambda row: _format_difference(row, 100, ".1f"),
    }
    quality: Columns = {
        "budget": lambda row: row["budget"] or "-",
        "attention": show("attention_speedup", ".2f", "x"),
        "prefill": show("speedup", ".2f", "x"),
        **scores,
        "p": show("p", ".2g"),
        "KL [nats]": show("kl", ".1e"),
        "worst eighth": show("worst_kl", ".1e"),
        "same top-1": show("top1", ".2%"),
    }
    answers: Columns = {
        "task": lambda row: "your prompts" if row["task"] == PROMPTS else row["task"],
        "tokens": lambda row: f"{'up to ' if row['task'] == PROMPTS else ''}{row['length']}",
        "variant": show("variant", ""),
        **scores,
        "p, Holm": lambda row: format_number(row.get("p_holm"), ".2g") if row["judged"] else "listed",
        "nats a token": show("log_likelihood", ".3f"),
        "over dense, 95%": lambda row: _format_difference(row.get("nats", {}), 1, ".4f"),
    }
    time: Columns = {
        "first token [ms]": lambda row: f"{row['seconds'] * 1e3:.1f}",
        "fastest .. slowest": lambda row: f"{row['fastest'] * 1e3:.1f} .. {row['slowest'] * 1e3:.1f}",
        "vs dense": show("speedup", ".2f", "x"),
        "peak [GiB]": lambda row: "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / (1 << 30):.2f}",
    }
    compared = [row for row in summary["quality"] if {"score", "kl"} & row.keys()]
    layouts = (
        ("quality beside dense", compared, tokens | quality, "rlr"),
        ("answers", summary["answers"], answers | density, "lrlr"),
        ("time to the first token, warm", summary["time"], tokens | time | density, "rlr"),
    )
    return [
        Table.from_rows(rows, columns, title, align=align, wrap="variant")
        for title, rows, columns, align in layouts
        if rows
    ]


def _format_difference(row: Row, scale: float, form: str) -> str:
    """Format how much more than dense's something is, with the interval."""
    if "low" not in row:
        return "-"
    difference, low, high = (format(scale * row[name], f"+{form}") for name in ("difference", "low", "high"))
    return f"{difference} ({low} .. {high})"


def describe_ruler(row: Row) -> str:
    """Return one sentence on RULER's tasks together: a row of a summary's ruler_pooled."""
    judged, listed = (pluralize(len(row[name]), "task") for name in ("judged", "listed"))
    low, high = RULER_JUDGED
    scores = ""
    if row["judged"]:
        scores = "dense {dense_score:.1%}, patched {score:.1%}, difference in points ".format(**row)
        worse = ", ".join(row["worse"]) or "none"
        scores += f"{_format_difference(row, 100, '.1f')}, {worse} significantly worse by Holm; "
    return (
        f"RULER at {row['length']} tokens: {scores}{judged} judged, {listed} listed, where dense scores under "
        f"{low:.0%} or over {high:.0%}; log-likelihood of all right answers over dense's, nats per token "
        f"{_format_difference(row['nats'], 1, '.4f')}"
    )


def list_ruler(summary: Summary, profile: Path) -> list[str]:
    """List what the summary of an evaluation says of a profile on RULER; the profile is told by its file's content."""
    names = {variant["name"] for variant in summary["variants"] if variant["identity"] == hash_file(profile)}
    return [describe_ruler(row) for row in summary.get("ruler_pooled", ()) if row["variant"] in names]


def list_notes(summary: Summary) -> list[str]:
    """List what a reader must know to read the tables, one sentence each."""
    lines = []
    for row in summary["quality"]:
        half = (row["high"] - row["low"]) / 2 if "low" in row else 0.0
        if half > POINT:
            enough = math.ceil(summary["plan"]["samples"] * (half / POINT) ** 2)  # an interval narrows by the root
            lines.append(
                f"{row['variant']} at {row['length']} tokens: the interval is {100 * half:.1f} points wide to each "
                f"side; about --num-prompts {enough} make it {100 * POINT:g}"
            )
    lines += [f"{row['variant']}: {describe_ruler(row)}" for row in summary["ruler_pooled"]]
    for row in summary["time"]:
        if row["variant"] != summary["variants"][0]["name"]:
            lines += [
                f"{row['variant']} at {row['length']} tokens: {pluralize(layers, 'layer')} ran dense ({reason})"
                for reason, layers in row["dense"].items()
            ]
    if summary["device"] == "cpu" and summary["time"]:
        lines.append("times are those of the plain reference on a CPU: they say nothing about a GPU")
    if summary["random_weights"]:
        lines.append("the weights were random: only times and memory mean anything")
    return lines


def _write_page(summary: Summary) -> str:
    """Write the report in Markdown."""
    model, architecture, device = (escape_markdown(summary[name]) for name in ("model", "architecture", "device"))
    versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    prompts = "seed {seed}, {samples} prompts of each task and length, {needles} questions each".format(
        **summary["plan"]
    )
    if RULER in summary["plan"]["tasks"]:
        prompts += f", {summary['plan']['ruler_prompts']} of RULER's"
    parts = [f"# Evaluation of {model}", f"<!-- {MARK} -->", f"{architecture}, on {device}, {versions}; {prompts}"]
    if summary.get("command"):
        parts.append(f"```sh\n{summary['command']}\n```")
    for table in list_tables(summary):
        parts += [f"## {table.title[0].upper()}{table.title[1:]}", format_markdown(table)]
    if lines := list_notes(summary):
        parts += ["## Notes", format_bullets(lines)]
    return "\n\n".join(parts) + "\n"
