"""The report's pictures: densities of heads, errors against density, times of layers."""

from __future__ import annotations

from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from calibrate.report.contents import Report
from calibrate.report.figures import BAR, COLOURS, panels, png, svg, whole_numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CELL = 0.14  # inches of a cell of the heat map where there are many
DARK = 0.88  # the share of the colours that thin lines use: the last ones are too light for them
CAPTIONS = {
    "density": "The share of query-key pairs that every head computes, as calibrated; a cross marks dense heads.",
    "frontier": "Error against density of every layer: curves are predicted for other budgets, circles are what was "
    "chosen, on the prompts that layers were adjusted on.",
    "time": "The time of each layer's attention in front of dense attention's; predicted where there was no GPU.",
}
LOWEST = 1e-5  # times the budget: where the axis of errors ends; smaller errors, as of a dense layer, lie on its edge


def pictures(report: Report) -> dict[str, bytes]:
    """PNG files by the names "density", "frontier" and "time"."""
    draws = {"density": draw_density, "frontier": draw_frontier, "time": draw_time}
    return {name: png(partial(draw, report=report), _title(report)) for name, draw in draws.items()}


def elements(report: Report) -> dict[str, str]:
    """SVG elements by the names "frontier" and "time"; instead of "density" a page of HTML has maps of its own."""
    draws = {"frontier": draw_frontier, "time": draw_time}
    return {
        name: svg(partial(draw, report=report), _title(report), name, CAPTIONS[name]) for name, draw in draws.items()
    }


def _title(report: Report) -> str:
    return f"{report.model} on {report.device}"


def draw_density(figure: Figure, report: Report) -> None:
    """A map of layers and heads for each length whose heads are known, with a cross on every dense head."""
    lengths = [length for length in report.lengths if length.has_heads]
    layers, heads = len(lengths[0].layers), len(lengths[0].layers[0].heads)
    widest = 9.0 if len(lengths) == 1 else 5.0
    wide, high = (min(max(CELL * count, 2.4), most) for count, most in ((heads, widest), (layers, 9.0)))
    all_axes = panels(figure, [length.label for length in lengths], (wide, high), x="head", y="layer")
    cross = (30 * min(wide / heads, high / layers)) ** 2
    for axes, length in zip(all_axes, lengths, strict=True):
        densities = [[head.density for head in layer.heads] for layer in length.layers]
        image = axes.imshow(densities, vmin=0, vmax=1, cmap=COLOURS, aspect="auto", interpolation="nearest")
        dense = [
            (x, y)
            for y, layer in enumerate(length.layers)
            for x, head in enumerate(layer.heads)
            if head.mode == "dense"
        ]
        axes.scatter([x for x, _ in dense], [y for _, y in dense], marker="x", color="black", lw=0.8, s=cross)
        whole_numbers(axes.xaxis)
        whole_numbers(axes.yaxis, report.layer_numbers)
    figure.colorbar(image, ax=all_axes, label="density (cross: dense head)", **BAR)


def draw_frontier(figure: Figure, report: Report) -> None:
    """Error against density of each layer: what was predicted for other budgets, and what was chosen."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.ticker import LogLocator

    budget, last = report.budget, len(report.lengths[0].layers) - 1
    layer_colours = ScalarMappable(Normalize(0, max(1, last) / DARK), COLOURS)
    circle: dict[str, Any] = {"ls": "", "marker": "o", "ms": 5 if last < 12 else 3.5, "mec": "black", "mew": 0.6}
    circle |= {"zorder": 3, "clip_on": False, "in_layout": False}  # a circle at the edge is drawn whole
    errors = [layer.error for length in report.lengths for layer in length.layers if layer.error > 0]
    bottom = max(min([*errors, budget.value]) / 3, LOWEST * budget.value)  # curves fall towards density 1
    size = (5.5, 4.2) if len(report.lengths) == 1 else (4.2, 3.6)
    titles = [length.label for length in report.lengths]
    all_axes = panels(figure, titles, size, x="density", y=budget.kind, sharey=True)
    for axes, length in zip(all_axes, report.lengths, strict=True):
        axes.axhline(budget.value, color="black", lw=1, ls="--", label="budget")
        for number, layer in enumerate(length.layers):
            colour = layer_colours.cmap(number / max(1, last) * DARK)
            curve = [point for point in layer.frontier or () if min(point) > 0]  # as the budget rises
            axes.plot([x for x, _ in curve], [y for _, y in curve], color=colour, lw=0.8, alpha=0.8)
            axes.plot(layer.density, max(layer.error, bottom), color=colour, **circle)
        axes.grid(alpha=0.3)
    first = all_axes[0]
    first.set(xscale="log", yscale="log")
    first.set_ylim(bottom=bottom)
    first.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    first.xaxis.set_major_formatter("{x:g}")
    first.xaxis.set_minor_formatter("")
    first.plot([], [], color="grey", lw=0.8, label="a layer's choices, predicted")
    first.plot([], [], color="lightgrey", label="chosen, held out", **circle)
    figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    bar = figure.colorbar(layer_colours, ax=all_axes, label="layer", **BAR)
    bar.ax.set_ylim(0, max(1, last))
    whole_numbers(bar.ax.yaxis, report.layer_numbers)


def draw_time(figure: Figure, report: Report) -> None:
    """Bars of each layer's attention before those of dense attention; predicted shares where nothing was timed."""
    wide = min(max(0.2 * len(report.lengths[0].layers), 5.0), 12.0)
    lengths = [length for length in report.lengths if length.attention_seconds is not None or length.has_heads]
    all_axes = panels(figure, [length.label for length in lengths], (wide, 1.7), x="layer", y="", columns=1)
    for axes, length in zip(all_axes, lengths, strict=True):
        layers = length.layers
        if length.attention_seconds is not None:  # so it is known of every layer
            dense = [1e3 * (layer.dense_seconds or 0.0) for layer in layers]
            sparse = [1e3 * (layer.seconds or 0.0) for layer in layers]
            axes.set_ylabel("attention [ms]")
        else:
            dense = [1.0] * len(layers)
            sparse = [fmean(head.cost for head in layer.heads) for layer in layers]
            axes.set_ylabel("attention time,\npredicted, over dense")
        axes.bar(range(len(layers)), dense, width=0.85, color="lightgrey", label="dense")
        axes.bar(range(len(layers)), sparse, width=0.5, color="C0", label="S2O")
        axes.set_xlim(-0.7, len(layers) - 0.3)
        whole_numbers(axes.xaxis, report.layer_numbers)
    first = all_axes[0]
    figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
