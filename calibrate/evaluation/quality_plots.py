"""The pictures of an evaluation: needles by depth and length, agreement by position, time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from textwrap import fill
from typing import TYPE_CHECKING, Any

from calibrate.report.figures import BAR, COLOURS, panels, png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from calibrate.evaluation.results import Row, Summary

WRAP = 34  # characters of a variant's name in one line
MARKERS = "osD^vPX*"
LOWEST_KL = 1e-7  # nats, where the axis ends: what is below is rounding
PANEL = (4.3, 3.4)  # inches of one length's axes
LINE, LETTER, HANDLE = 0.17, 0.075, 0.55  # inches: a legend's line, a letter of it, what stands before an entry


def pictures(summary: Summary) -> dict[str, bytes]:
    """PNG files by name, of what was measured."""
    draws = {
        "needles": (draw_needles, bool(summary["heat"])),
        "agreement": (draw_agreement, bool(summary["agreement"])),
        "time": (draw_time, bool(summary["agreement"] and summary["time"])),
    }
    title = f"{summary['model']} on {summary['device']}"
    return {
        name: png(partial(draw, summary=summary), title, pad=0.1)  # so that the ticks of two axes do not touch
        for name, (draw, has_data) in draws.items()
        if has_data
    }


def draw_needles(figure: Figure, summary: Summary) -> None:
    """A heat map for each variant: length across, depth down, the share of needles found as colour and number."""
    heats = summary["heat"]
    across, down = len(heats[0]["lengths"]), len(heats[0]["depths"])
    size = (min(max(0.75 * across, 2.6), 7.0), min(max(0.42 * down, 1.6), 5.0))
    titles = [_wrapped(heat["variant"], WRAP) for heat in heats]
    all_axes = panels(figure, titles, size, x="prompt length [tokens]", y="depth of the needle", sharey=True)
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
    """KL from the dense model's predictions, by position."""
    rows = summary["agreement"]
    lengths = _lengths(rows)
    all_axes = panels(figure, _titles(lengths), PANEL, x="share of the prompt", y="KL from dense [nats]", sharey=True)
    for axes, length in zip(all_axes, lengths, strict=True):
        for style, row in _styled(summary, rows, length):
            middles = [(part + 0.5) / len(row["parts"]) for part in range(len(row["parts"]))]
            axes.plot(middles, [max(part["kl"], LOWEST_KL) for part in row["parts"]], **style)
        axes.set(yscale="log", xlim=(0, 1))
        axes.xaxis.set_major_formatter("{x:.0%}")
        axes.grid(alpha=0.3)
    _legend(figure, all_axes[0])


def draw_time(figure: Figure, summary: Summary) -> None:
    """Speed against quality: the speedup to the first token, and KL from the dense model."""
    speedups = {(row["variant"], row["length"]): row["speedup"] for row in summary["time"]}
    lengths = [length for length in _lengths(summary["agreement"]) if length in _lengths(summary["time"])]
    x, y = "speedup over dense, to the first token", "KL from dense [nats]"
    all_axes = panels(figure, _titles(lengths), PANEL, x=x, y=y, sharey=True)
    for axes, length in zip(all_axes, lengths, strict=True):
        axes.axvline(1, color="black", lw=1, ls="--", label="dense")
        for style, row in _styled(summary, summary["agreement"], length):
            axes.plot(speedups[row["variant"], length], max(row["kl"], LOWEST_KL), **style | {"ls": "", "ms": 8})
        axes.xaxis.set_major_formatter("{x:g}x")
        axes.grid(alpha=0.3)
        axes.margins(x=0.15, y=0.3)
        axes.set_yscale("log")
    _legend(figure, all_axes[0])


def _styled(summary: Summary, rows: Sequence[Row], length: int) -> list[tuple[dict[str, Any], Row]]:
    """The rows of a length with their variant's colour and marker, the same in every picture."""
    variants = [variant["name"] for variant in summary["variants"][1:]]
    return [(_style(row["variant"], variants.index(row["variant"])), row) for row in rows if row["length"] == length]


def _style(name: str, index: int) -> dict[str, Any]:
    look = {"color": f"C{index % 10}", "marker": MARKERS[index % len(MARKERS)], "ms": 4.5, "lw": 1.2}
    return {**look, "label": _wrapped(name, 2 * WRAP), "clip_on": False}


def _legend(figure: Figure, axes: Axes) -> None:
    """A legend below the axes, in as many columns as fit; the figure grows by its lines."""
    handles, labels = axes.get_legend_handles_labels()
    label_lines = [label.splitlines() for label in labels]
    width, height = figure.get_size_inches()
    columns = max(1, int(width / (LETTER * max(len(line) for lines in label_lines for line in lines) + HANDLE)))
    rows = -(-len(labels) // columns) * max(map(len, label_lines))
    figure.set_size_inches(width, height + LINE * rows)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize="small")


def _wrapped(name: str, width: int) -> str:
    """A variant's name in lines that end between settings."""
    return fill(name.replace(",", ", "), width, break_on_hyphens=False)


def _titles(lengths: Sequence[int]) -> list[str]:
    return [f"{length} tokens" for length in lengths]


def _lengths(rows: Sequence[Row]) -> list[int]:
    return sorted({row["length"] for row in rows})
