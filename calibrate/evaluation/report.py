"""Tables and pictures of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from rich.console import Console

from calibrate.evaluation.plan import FILES, PROMPTS, RETRIEVAL, RULER, EvaluationPlan
from calibrate.evaluation.results import DENSE_CAN, RULER_JUDGED, Row, Summary, group_rows
from calibrate.evaluation.run import make_digest
from calibrate.machine import MARK, format_json_file
from calibrate.model.models import in_full
from calibrate.report.figures import BAR, COLOURS, add_panels, render_png, try_drawing
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
from s2o_runtime.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WRAP = 34  # characters of a variant's name in one line
MARKERS = "osD^vPX*"
LOWEST_KL = 1e-7  # nats, where the axis ends: what is below is rounding
PANEL = (4.3, 3.4)  # inches of one length's axes
LINE, LETTER, HANDLE = 0.17, 0.075, 0.55  # inches: a legend's line, a letter of it, what stands before an entry
CAPTIONS = {
    "needles": "The share of needles found, by the prompt's length and the needle's depth in it.",
    "agreement": "Distance from the dense model's predictions, by position in the prompt.",
    "time": "Speed against quality: the time to the first token, and the distance from the dense model.",
}
POINT = 0.01  # of the share of right answers
TASK_NAMES = {**{task: task for task in RETRIEVAL}, PROMPTS: "your prompts"}


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


def write_report(summary: Summary, plan: EvaluationPlan) -> tuple[list[str], str]:
    """Write summary.json, the pictures and report.md into the plan's folder, each whole or not at all.

    Pictures of an earlier plan that this one has not are deleted. Returns the names of the files, and why there are no
    pictures, empty if there are.
    """
    pictures_by_name, failure = try_drawing(lambda: draw_pictures(summary))
    drawn = {f"{name}.png": picture for name, picture in (pictures_by_name or {}).items()}
    contents = {"summary.json": format_json_file(summary), **drawn}
    for name in FILES:
        (plan.out / name).unlink(missing_ok=True)
    contents["report.md"] = _write_page(summary, list(drawn)).encode()
    for name, data in contents.items():
        write_atomically(plan.out / name, data)
    return list(contents), failure


def list_tables(summary: Summary) -> list[Table]:
    """Lay out the tables of what was measured."""
    tokens = {"tokens": show("length", "d"), "variant": show("variant", "")}
    density = {"density": show("density", ".3f")}
    quality: Columns = {
        "budget": lambda row: row["budget"] or "-",
        "attention": show("attention_speedup", ".2f", "x"),
        "prefill": show("speedup", ".2f", "x"),
        "recall, dense": show("dense_accuracy", ".1%"),
        "recall": show("accuracy", ".1%"),
        "difference, 95%": _format_difference,
        "p": show("p", ".2g"),
        "p by prompt": show("p_by_prompt", ".2g"),
        "KL [nats]": show("kl", ".1e"),
        "same top-1": show("top1", ".2%"),
    }
    answers: Columns = {
        "task": lambda row: TASK_NAMES[row["task"]],
        "tokens": lambda row: f"{'up to ' if row['task'] == PROMPTS else ''}{row['length']}",
        "variant": lambda row: row["variant"],
        "right": lambda row: f"{row['found']} of {row['asked']}",
        "accuracy": show("accuracy", ".1%"),
        "kept of dense's": lambda row: f"{row['kept']} of {row['dense_found']}" if row["dense_can"] else "dense cannot",
        "difference, 95%": _format_difference,
        "log-lik.": show("log_likelihood", ".3f"),
    }
    of_ruler: Columns = {
        "task": lambda row: row["task"],
        **tokens,
        "score": show("score", ".1%"),
        "dense": show("dense_score", ".1%"),
        "difference, 95%": _format_difference,
        "p, Holm": lambda row: format_number(row.get("p_holm"), ".2g") if row["judged"] else "listed",
        "nats a token, 95%": lambda row: _format_nats(row["log_likelihood"]) if "log_likelihood" in row else "-",
    }
    text: Columns = {
        "perplexity": show("perplexity", ".4f"),
        "over dense": _format_over_dense,
    }
    time: Columns = {
        "first token [ms]": lambda row: f"{row['seconds'] * 1e3:.1f}",
        "fastest .. slowest": lambda row: f"{row['fastest'] * 1e3:.1f} .. {row['slowest'] * 1e3:.1f}",
        "vs dense": show("speedup", ".2f", "x"),
        "peak [GiB]": lambda row: "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / (1 << 30):.2f}",
    }
    compared = [row for row in summary["quality"] if {"asked", "kl"} & row.keys()]
    layouts = (
        ("quality beside dense", compared, tokens | quality, "rlr"),
        ("answers", summary["retrieval"], answers | density, "lrlr"),
        ("RULER", [row for row in summary["ruler"] if "low" in row] or summary["ruler"], of_ruler | density, "lrlr"),
        ("held-out text", summary["perplexity"], tokens | text | density, "rlr"),
        ("time to the first token, warm", summary["time"], tokens | time | density, "rlr"),
    )
    return [
        Table.from_rows(rows, columns, title, align=align, wrap="variant")
        for title, rows, columns, align in layouts
        if rows
    ]


def _format_difference(row: Row) -> str:
    """Format by how many points more answers are right than dense's, with the interval."""
    shares = {name: 100 * row[name] for name in ("difference", "low", "high") if name in row}
    return "{difference:+.1f} ({low:+.1f} .. {high:+.1f})".format(**shares) if shares else "-"


def _format_nats(comparison: Row) -> str:
    """Format how many nats per token more a right answer's log-likelihood is than dense's, with the interval."""
    return "{difference:+.4f} ({low:+.4f} .. {high:+.4f})".format(**comparison)


def describe_ruler(row: Row) -> str:
    """Return one sentence on RULER's tasks together: a row of a summary's ruler_pooled."""
    counts = {name: pluralize(len(row[name]), "task") for name in ("judged", "listed")}
    low, high = RULER_JUDGED
    worse = f"{', '.join(row['worse']) or 'none'} significantly worse by Holm"
    scores = (
        "dense {dense_score:.1%}, patched {score:.1%}, difference in points ".format(**row) if row["judged"] else ""
    )
    scores += f"{_format_difference(row)}, {worse}; " if row["judged"] else ""
    return (
        f"RULER at {row['length']} tokens: {scores}{counts['judged']} judged, {counts['listed']} listed, where dense "
        f"scores under {low:.0%} or over {high:.0%}; nats per token of all right answers {_format_nats(row['nats'])}"
    )


def list_ruler(summary: Summary, profile: Path) -> list[str]:
    """List what the summary of an evaluation says of a profile on RULER; the profile is told by its file's content."""
    names = {variant["name"] for variant in summary["variants"] if variant["identity"] == make_digest(profile)}
    return [describe_ruler(row) for row in summary.get("ruler_pooled", ()) if row["variant"] in names]


def _format_over_dense(row: Row) -> str:
    """Format how much higher a perplexity is than dense's."""
    return f"{row['perplexity'] / row['dense_perplexity'] - 1:+.2%}".replace("-0.00%", "+0.00%")


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
    for (task,), rows in group_rows((row for row in summary["retrieval"] if not row["dense_can"]), "task").items():
        accuracies = {row["length"]: row["dense_accuracy"] for row in rows}
        shares = ", ".join(f"{accuracy:.0%} right at {length} tokens" for length, accuracy in accuracies.items())
        lines.append(
            f"dense cannot do {TASK_NAMES[task]} ({shares}): below {DENSE_CAN:.0%} a task does not tell what a variant "
            "loses"
        )
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


def _write_page(summary: Summary, files: Sequence[str]) -> str:
    """Write the report in Markdown; `files` are the pictures beside it."""
    model, architecture, device = (escape_markdown(summary[name]) for name in ("model", "architecture", "device"))
    versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    prompts = "seed {seed}, {samples} prompts of each task and length, {needles} questions each".format(
        **summary["plan"]
    )
    if summary["ruler"]:
        prompts += f", {summary['plan']['ruler_prompts']} of RULER's"
    parts = [f"# Evaluation of {model}", f"<!-- {MARK} -->", f"{architecture}, on {device}, {versions}; {prompts}"]
    if summary.get("command"):
        parts.append(f"```sh\n{summary['command']}\n```")
    for table in list_tables(summary):
        parts += [f"## {table.title[0].upper()}{table.title[1:]}", format_markdown(table)]
    if lines := list_notes(summary):
        parts += ["## Notes", format_bullets(lines)]
    names = [file.removesuffix(".png") for file in files]
    parts.append("## Pictures" if names else "There are no pictures, because nothing was compared with dense.")
    parts += [f"![{name}]({name}.png)\n\n{CAPTIONS[name]}" for name in names]
    return "\n\n".join(parts) + "\n"


def draw_pictures(summary: Summary) -> dict[str, bytes]:
    """Draw PNG files of what was measured, by name."""
    draws = {
        "needles": (draw_needles, summary["heat"]),
        "agreement": (draw_agreement, summary["agreement"]),
        "time": (draw_time, summary["agreement"] and summary["time"]),
    }
    title = f"{summary['model']} on {summary['device']}"
    return {
        name: render_png(partial(draw, summary=summary), title, pad=0.1)  # so that the ticks of two axes do not touch
        for name, (draw, rows) in draws.items()
        if rows
    }


def draw_needles(figure: Figure, summary: Summary) -> None:
    """Draw a heat map for each variant: length across, depth down, the share of needles as colour and number."""
    heats = summary["heat"]
    across, down = len(heats[0]["lengths"]), len(heats[0]["depths"])
    size = (min(max(0.75 * across, 2.6), 7.0), min(max(0.42 * down, 1.6), 5.0))
    titles = [_wrap_name(heat["variant"], WRAP) for heat in heats]
    all_axes = add_panels(figure, titles, size, x="prompt length [tokens]", y="depth of the needle", sharey=True)
    for axes, heat in zip(all_axes, heats, strict=True):
        image = axes.imshow(heat["accuracy"], vmin=0, vmax=1, cmap=COLOURS, aspect="auto", interpolation="nearest")
        for y, row in enumerate(heat["accuracy"]):
            for x, share in enumerate(row):
                colour = "black" if share > 0.6 else "white"
                axes.text(x, y, f"{share:.0%}", ha="center", va="center", color=colour, fontsize="small")
        axes.set_xticks(range(across), list(map(str, heat["lengths"])))
        axes.set_yticks(range(down), [f"{depth:.0%}" for depth in heat["depths"]])
    figure.colorbar(image, ax=all_axes, label="needles found", format="{x:.0%}", **BAR)


def draw_agreement(figure: Figure, summary: Summary) -> None:
    """Draw KL from the dense model's predictions, by position."""
    for axes, rows in _make_panels(figure, summary["agreement"], "share of the prompt"):
        for row in rows:
            middles = [(part + 0.5) / len(row["parts"]) for part in range(len(row["parts"]))]
            axes.plot(middles, [max(part["kl"], LOWEST_KL) for part in row["parts"]], **_choose_style(summary, row))
        axes.set(yscale="log", xlim=(0, 1))
        axes.xaxis.set_major_formatter("{x:.0%}")
        axes.grid(alpha=0.3)
    _add_legend(figure)


def draw_time(figure: Figure, summary: Summary) -> None:
    """Draw speed against quality: the speedup to the first token, and KL from the dense model."""
    speedups = {(row["variant"], row["length"]): row["speedup"] for row in summary["time"]}
    timed = [row for row in summary["agreement"] if (row["variant"], row["length"]) in speedups]
    for axes, rows in _make_panels(figure, timed, "speedup over dense, to the first token"):
        axes.axvline(1, color="black", lw=1, ls="--", label="dense")
        for row in rows:
            x, style = speedups[row["variant"], row["length"]], _choose_style(summary, row) | {"ls": "", "ms": 8}
            axes.plot(x, max(row["kl"], LOWEST_KL), **style)
        axes.xaxis.set_major_formatter("{x:g}x")
        axes.grid(alpha=0.3)
        axes.margins(x=0.15, y=0.3)
        axes.set_yscale("log")
    _add_legend(figure)


def _make_panels(figure: Figure, rows: Sequence[Row], x: str) -> list[tuple[Axes, list[Row]]]:
    """Make axes for the rows of each length."""
    by_length = dict(sorted(group_rows(rows, "length").items()))
    titles = [f"{length} tokens" for (length,) in by_length]
    all_axes = add_panels(figure, titles, PANEL, x=x, y="KL from dense [nats]", sharey=True)
    return list(zip(all_axes, by_length.values(), strict=True))


def _choose_style(summary: Summary, row: Row) -> dict[str, Any]:
    """Choose the colour and marker of a row's variant, the same in every picture."""
    index = [variant["name"] for variant in summary["variants"][1:]].index(row["variant"])
    look = {"color": f"C{index % 10}", "marker": MARKERS[index % len(MARKERS)], "ms": 4.5, "lw": 1.2}
    return {**look, "label": _wrap_name(row["variant"], 2 * WRAP), "clip_on": False}


def _add_legend(figure: Figure) -> None:
    """Add a legend below the axes, in as many columns as fit; the figure grows by its lines."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    label_lines = [label.splitlines() for label in labels]
    width, height = figure.get_size_inches()
    columns = max(1, int(width / (LETTER * max(len(line) for lines in label_lines for line in lines) + HANDLE)))
    rows = -(-len(labels) // columns) * max(map(len, label_lines))
    figure.set_size_inches(width, height + LINE * rows)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize="small")


def _wrap_name(name: str, width: int) -> str:
    """Break a variant's name into lines that end between settings."""
    return fill(name.replace(",", ", "), width, break_on_hyphens=False)
