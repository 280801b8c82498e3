"""What a user sees before and after: the plan, the tables, and the report beside the profile.

What is shown afterwards comes from one plain dictionary, the summary that `outcome.py` makes: it is also the
report's JSON, so nothing is on the terminal, in the card or in a plot that is not in the file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from textwrap import shorten
from typing import Any
from urllib.parse import quote

from rich import box
from rich.console import Console
from rich.segment import Segments
from rich.table import Table

from calibrate.plots import Summary, checked_only, pictures
from calibrate.recipe import Recipe
from s2o_runtime.identity import Geometry
from s2o_runtime.profile import write_atomically

WIDTH = 120  # columns of a table on the terminal
SHOWN_REASON = 110  # characters of a failed trial's reason; the JSON has all of them
CAPTIONS = {
    "density": "The share of query-key pairs that every head computes, as calibrated; a cross marks dense heads.",
    "frontier": "Error against density of every layer: curves are predicted for other budgets, circles are what was "
    "chosen, on held-out prompts.",
    "time": "Time of every layer's attention before that of dense attention; predicted where there was no GPU.",
}


def plan(recipe: Recipe, geometry: Geometry, device: str, given: frozenset[str]) -> dict[str, str]:
    """Every choice of a run in words; what is not among the `given` options is marked as a default."""

    def said(choice: object, *options: str) -> str:
        text = ", ".join(map(str, choice)) or "none" if isinstance(choice, tuple) else str(choice)
        return text if given.intersection(options) else f"{text} (default)"

    segments = (f"{', '.join(map(str, recipe.segments_for(length)))} at {length}" for length in recipe.lengths)
    return {
        "model": recipe.model,
        "architecture": str(geometry),
        "weights": said("random" if recipe.random_weights else "the model's", "random_weights"),
        "device": said(device, "device"),
        "objective": "measured latency" if recipe.device.startswith("cuda") else "predicted latency (no GPU)",
        "budget": said(f"{recipe.budget.kind} {recipe.budget.value:g}", "budget_mse", "budget_rel_mse"),
        "budget scope": said(recipe.scope, "budget_scope"),
        "margin": said(f"{recipe.margin:.0%} of the budget is spent", "margin"),
        "worst rows": said(recipe.worst_rows or "off", "worst_rows"),
        "lengths": said(recipe.lengths, "lengths"),
        "check lengths": said(recipe.checked_lengths, "check_lengths"),
        "prompts": said(recipe.prompt_source, "prompts"),
        "prompts per length": f"{said(recipe.num_prompts, 'num_prompts')} to calibrate, "
        f"{said(recipe.held_out, 'held_out')} held out",
        "method": said(recipe.method, "method"),
        "segments": said("; ".join(segments), "segments"),
        "representatives": said(recipe.representatives, "representatives"),
        "grains": said(recipe.grains, "grains"),
        "tails": said(tuple("on" if tail else "off" for tail in recipe.tails), "tails"),
        "trials": f"{said(recipe.trials, 'trials')} for each of {geometry.layers} layers and "
        f"{len(recipe.lengths)} lengths",
        "time limit": said(f"{recipe.time_limit:g} s" if recipe.time_limit else "none", "time_limit"),
        "seed": said(recipe.seed, "seed"),
        "if the proof fails": said("written" if recipe.allow_regression else "not written", "allow_regression"),
        "journal": said(recipe.journal_path, "journal"),
        "out": said(recipe.out, "out"),
    }


def print_plan(plan: dict[str, Any], console: Console) -> None:
    width = max(map(len, plan))
    for name, value in plan.items():
        console.print(f"{name:<{width}}  {value}", highlight=False, markup=False, soft_wrap=True)


def print_tables(summary: Summary, console: Console) -> None:
    """Target against achieved: a table for each length, what follows from it, and all lengths side by side.

    Tables are laid out for 120 columns whatever the console has: nothing of them is ever cut off.
    """
    for length in summary["lengths"]:
        title = f"{length['length']} tokens, held-out prompts{checked_only(length)}"
        _print_grid(title, _layer_grid(summary, length), console)
        _print_lines([*_length_notes(summary, length), ""], console)
    if len(summary["lengths"]) > 1:
        _print_grid("all lengths, held-out prompts", _overview_grid(summary), console)
    _print_lines([*_closing_notes(summary), *(f"not proven: {problem}" for problem in summary["problems"])], console)


def write_report(summary: Summary, profile_path: Path) -> list[Path]:
    """Write the report beside a profile, or where one would be, and return its files.

    `<stem>.report.json` is the summary, `<stem>.report.md` a card with the tables, `<stem>.density.png`,
    `<stem>.frontier.png` and `<stem>.time.png` are plots; without matplotlib the card says that they are left out.
    The card also has summary["command"] and summary["data"], one line each, if they are given.
    """
    profile_path.parent.mkdir(parents=True, exist_ok=True)
    contents = {"report.json": (json.dumps(summary, indent=1) + "\n").encode()}
    contents |= {f"{name}.png": picture for name, picture in pictures(summary).items()}
    files = {name: profile_path.with_name(f"{profile_path.stem}.{name}") for name in (*contents, "report.md")}
    plots = {name: files[f"{name}.png"].name for name in CAPTIONS if f"{name}.png" in files}
    contents["report.md"] = _card(summary, profile_path, plots).encode()
    for name, data in contents.items():
        write_atomically(files[name], data)
    return list(files.values())


@dataclass(frozen=True)
class _Grid:
    """A table: column names, which may have two lines, and rows of cells."""

    names: tuple[str, ...]
    rows: list[tuple[str, ...]]


def _layer_grid(summary: Summary, length: Summary) -> _Grid:
    """One row a layer; "1/32: 6/2" says that 6 heads have 1 representative and 2 have 32."""
    settings = ("layer", "tau", "dense\nheads", "tails", "repr.", "segment", "grain", "tile")
    found = ("density", summary["budget"]["kind"], "error /\nlimit", "worst\nrow", "vs\ndense")
    return _Grid(settings + found, [_layer_cells(layer) for layer in length["layers"]])


def _layer_cells(layer: Summary) -> tuple[str, ...]:
    return (
        str(layer["layer"]),
        "-" if layer["tau_min"] is None else f"{_short(layer['tau_min'])} .. {_short(layer['tau_max'])}",
        str(layer["dense_heads"]),
        str(layer["tails"]),
        _shares(layer["representatives"]),
        str(layer["segment"]),
        str(layer["grain"]),
        layer["tile"],
        f"{layer['density']:.3f}",
        f"{layer['error']:.2e}",
        f"{layer['error_over_limit']:.0%}",
        f"{layer['worst']:.2g}",
        _speedup(layer["dense_seconds"], layer["seconds"]),
    )


def _overview_grid(summary: Summary) -> _Grid:
    """One row a length; the error is what the budget is about: the largest of any layer, or the mean of the layers."""
    budget = summary["budget"]
    error = "largest" if budget["scope"] == "layer" else "mean"
    names = ("length", "budget", f"{error}\n{budget['kind']}", "error /\nlimit", "density", "attention", "prefill")
    rows: list[tuple[str, ...]] = []
    for length in summary["lengths"]:
        layers = length["layers"]
        errors = [layer["error"] for layer in layers]
        rows.append(
            (
                f"{length['length']}{checked_only(length)}",
                f"{budget['value']:g}",
                f"{max(errors) if budget['scope'] == 'layer' else fmean(errors):.2e}",
                f"{max(layer['error_over_limit'] for layer in layers):.0%}",
                f"{fmean(layer['density'] for layer in layers):.3f}",
                _attention_speedup(length),
                _speedup(length["dense_prefill_seconds"], length["prefill_seconds"]),
                "-" if length["needles"] is None else "{} of {}".format(*length["needles"]),
                f"{length['kl']:.1e}",
            )
        )
    return _Grid((*names, "needles", "KL"), rows)


def _length_notes(summary: Summary, length: Summary) -> list[str]:
    """What there is to say below a length's table, one sentence each."""
    speedup = _speedup(length["dense_prefill_seconds"], length["prefill_seconds"])
    notes = [
        f"prefill of {length['length']} tokens on {summary['device']}: {length['prefill_seconds'] * 1e3:.1f} ms, "
        f"dense {length['dense_prefill_seconds'] * 1e3:.1f} ms ({speedup})",
        f"against the dense model: KL {length['kl']:.1e} nats, top-1 the same at {length['top1']:.2%} of positions"
        + ("" if length["needles"] is None else ", needles {} of {}".format(*length["needles"])),
    ]
    notes += [note] if (note := _against_uniform(length)) else []
    notes += [note] if (note := _methods_note(length["layers"])) else []
    reasons: dict[str, list[int]] = {}
    for layer in length["layers"]:
        if layer["why_dense"]:
            reasons.setdefault(layer["why_dense"], []).append(layer["layer"])
    notes += [f"{_layers(numbers)} dense: {reason}" for reason, numbers in reasons.items()]
    tightened = [layer["layer"] for layer in length["layers"] if layer["tightened"]]
    return notes + ([f"{_layers(tightened)} tightened on held-out prompts"] if tightened else [])


def _methods_note(layers: Sequence[Summary]) -> str | None:
    """How many heads each method computes, if there are others than S2O and dense."""
    counts: Counter[str] = Counter()
    for layer in layers:
        counts.update(layer.get("methods", {}))
    if not set(counts) - {"s2o", "dense"}:
        return None
    return "heads by method: " + ", ".join(f"{count} {name}" for name, count in counts.most_common())


def _against_uniform(length: Summary) -> str | None:
    """How this compares with one setting for all heads, measured where both are, else predicted."""
    uniform = length["uniform"]
    if uniform is None:
        return None
    measured = _ratio(uniform["seconds"], length["attention_seconds"])
    ratio = measured or _ratio(uniform["cost"], length["cost"])
    if not ratio:
        return None
    verdict = f"{ratio:.2f}x faster" if ratio >= 1 else f"{1 / ratio:.2f}x slower"
    return (
        f"attention: {'' if measured else 'predicted '}{verdict} than the best single threshold at the same error "
        f"(tau {_short(uniform['tau'])}, segment {uniform['segment']}, repr. {uniform['representatives']}"
        f"{', tail' if uniform['tail'] else ''})"
    )


def _closing_notes(summary: Summary) -> list[str]:
    """What there is to say about all lengths together."""
    notes = [note] if (note := _prediction_note(summary)) else []
    if summary["failed_trials"]:
        notes.append(f"{summary['failed_trials']} of {summary['trials']} trials failed and were left out:")
        by_count = sorted(summary["failures"].items(), key=lambda item: -item[1])
        notes += [f"  {count}x {shorten(reason, SHOWN_REASON)}" for reason, count in by_count]
    return notes


def _prediction_note(summary: Summary) -> str | None:
    """The layers that were furthest from what was predicted: of the error as a share of the limit, of the time."""
    errors, times = [], []
    for length in summary["lengths"]:
        for layer in length["layers"]:
            place = f"layer {layer['layer']} at {length['length']} tokens"
            predicted, found = layer["predicted_error"], layer["error"]
            if predicted is not None and layer["limit"]:
                said = f"{place}: {predicted:.2e}, held out {found:.2e}"
                errors.append((abs(found - predicted) / layer["limit"], said))
            predicted, found = layer["predicted_seconds"], layer["seconds"]
            if predicted and found is not None:
                said = f"{place}: {predicted * 1e3:.3g} ms, measured {found * 1e3:.3g} ms"
                times.append((abs(found - predicted) / predicted, said))
    largest = [(max(errors), "error by {:.0%} of the limit ({})")] if errors else []
    largest += [(max(times), "time by {:.0%} ({})")] if times else []
    if not largest:
        return None
    return "furthest from what was predicted: " + ", ".join(form.format(*deviation) for deviation, form in largest)


def _attention_speedup(length: Summary) -> str:
    """The layers' attention together; where it was not measured, what is predicted."""
    if length["attention_seconds"] is not None:
        return _speedup(length["dense_attention_seconds"], length["attention_seconds"])
    predicted = _speedup(1.0, length["cost"])
    return predicted if predicted == "-" else f"{predicted} predicted"


def _speedup(dense: float | None, seconds: float | None) -> str:
    ratio = _ratio(dense, seconds)
    return "-" if ratio is None else f"{ratio:.2f}x"


def _ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or not under else over / under


def _shares(counts: dict[str, int]) -> str:
    """{"1": 6, "32": 2} -> "1/32: 6/2" """
    return f"{'/'.join(counts)}: {'/'.join(map(str, counts.values()))}" if counts else "-"


def _short(tau: float) -> str:
    return f"{float(f'{tau:.2g}'):g}"  # 150, not 1.5e+02


def _layers(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> "layers 0-2, 5" """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"layer {text}" if text.isdigit() else f"layers {text}"


def _print_grid(title: str, grid: _Grid, console: Console) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for name in grid.names:
        table.add_column(name, justify="right", no_wrap=name != "repr.")  # what gives way if many counts are chosen
    for row in grid.rows:
        table.add_row(*row)
    segments = Segments(console.render(table, console.options.update_width(WIDTH)))
    console.print(segments, soft_wrap=True, end="")


def _print_lines(lines: Iterable[str], console: Console) -> None:
    for line in lines:
        console.print(line, highlight=False, markup=False)


def _card(summary: Summary, profile_path: Path, plots: dict[str, str]) -> str:
    """The report as Markdown. plots: file names by the keys of `CAPTIONS`, empty without matplotlib."""
    budget = summary["budget"]
    of = "of every layer" if budget["scope"] == "layer" else "in the mean over the layers"
    parts = [
        f"# S2O profile of {summary['model']}",
        f"Sparse attention for {summary['model']} ({summary['architecture']}), calibrated on {summary['device']} to at "
        f"most {budget['value']:g} {budget['kind']} {of} against dense attention.",
        *_verdict(summary, profile_path),
        *_usage(summary),
        "## Target against achieved",
        _markdown(_overview_grid(summary)),
        "Error, density and needles are those of held-out prompts. Attention and prefill are speedups over dense.",
        *_bullets(_closing_notes(summary)),
        "## How it was made",
        _markdown(_Grid(("", ""), _facts(summary))),
    ]
    for length in summary["lengths"]:
        parts += [f"## {length['length']} tokens{checked_only(length)}", _markdown(_layer_grid(summary, length))]
        parts += _bullets(_length_notes(summary, length) + _studies(length))
    parts.append("## Plots")
    parts += [f"![{name}]({quote(file)})\n\n{CAPTIONS[name]}" for name, file in plots.items()]
    if not plots:
        parts.append("The plots were left out because matplotlib is not installed (`pip install matplotlib`).")
    parts += ["## What was not shown", *_bullets(_not_shown(summary))]
    return "\n\n".join(parts) + "\n"


def _verdict(summary: Summary, profile_path: Path) -> list[str]:
    if summary["met"] and summary["out"]:
        return ["**Proven on held-out prompts**: the profile is within its budget at every length below."]
    written = "the profile is" if summary["out"] else "no profile was written, and what follows is"
    parts = [f"**Not proven**: {written} not known to be within its budget.", *_bullets(summary["problems"])]
    if not summary["out"] and profile_path.exists():
        parts.append(f"`{profile_path.name}` beside this file is of an earlier run.")
    return parts


def _usage(summary: Summary) -> list[str]:
    parts = []
    if summary["out"]:
        parts += [
            "## Use",
            f"```python\nimport s2o_runtime\ns2o_runtime.patch(model, {json.dumps(summary['out'])})\n```",
        ]
    if summary.get("command"):
        parts += ["Made by", f"```sh\n{summary['command']}\n```"]
    return parts


def _facts(summary: Summary) -> list[tuple[str, ...]]:
    phases = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in summary["phases"].items())
    calibrated = [str(length["length"]) for length in summary["lengths"] if length["calibrated"]]
    data = [("data", summary["data"])] if summary.get("data") else []
    return [
        ("model", f"{summary['model']} ({summary['architecture']})"),
        ("weights", "random" if summary["random_weights"] else "the model's"),
        ("hardware", summary["device"]),
        ("versions", ", ".join(f"{name} {version}" for name, version in summary["versions"].items())),
        *data,
        ("seed", str(summary["seed"])),
        ("lengths", ", ".join(calibrated)),
        ("worst row", "not limited" if summary["worst_rows"] is None else f"at most {summary['worst_rows']:g}"),
        ("time", f"{summary['calibration_seconds']:.0f} s ({phases})"),
        ("trials", f"{summary['trials']}, of which {summary['failed_trials']} failed"),
        ("journal", f"{summary['journal']['path']}, {summary['journal']['reused']} measurements reused"),
    ]


def _studies(length: Summary) -> list[str]:
    shared = [_layers(group) for group in length["groups"] if len(group) > 1]
    return [f"shared a study: {'; '.join(shared)}"] if shared else []


def _not_shown(summary: Summary) -> list[str]:
    """What a reader might take for shown although it is not."""
    lengths = summary["lengths"]
    calibrated = [length["length"] for length in lengths if length["calibrated"]]
    checked = [str(length["length"]) for length in lengths if not length["calibrated"]]
    notes = []
    if not summary["met"]:
        notes.append("That the error is within the budget: see the problems at the top.")
    if summary["random_weights"]:
        notes.append("Anything about the trained model: the weights were random, so errors and densities are not its.")
    if checked:
        notes.append(
            f"That {', '.join(checked)} tokens are served as well as they could be: their settings are other lengths'."
        )
    if any(length["attention_seconds"] is None for length in lengths):
        notes.append("How fast it is: there was no GPU, and a CPU runs the plain reference.")
    if any(length["needles"] is None for length in lengths):
        notes.append("Whether needles are found: the prompts of some lengths ask for none.")
    if summary["worst_rows"] is None:
        notes.append("A limit on the worst rows: only means are limited.")
    if calibrated:
        notes.append(f"Prompts below {min(calibrated)} tokens: they stay dense.")
    longest = max(length["length"] for length in lengths)
    return [*notes, f"Prompts beyond {longest} tokens, and text unlike the held-out prompts."]


def _markdown(grid: _Grid) -> str:
    head = [" ".join(name.split("\n")) for name in grid.names]
    lines = [head, ["--:" if any(head) else ":--"] * len(head), *grid.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _bullets(lines: Sequence[str]) -> list[str]:
    """One Markdown list, or nothing; a line that is indented belongs to the one before."""
    items = [f"{' ' * (len(line) - len(line.lstrip()))}- {line.lstrip()}" for line in lines]
    return ["\n".join(items)] if items else []
