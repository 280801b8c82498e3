"""The report's pictures: densities of heads, errors against density, times of layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from statistics import fmean
from typing import TYPE_CHECKING, Any

from calibrate.costs import overhead
from calibrate.curves import Method

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

DPI = 120
CELL = 0.14  # inches of a cell of the heat map where there are many
COLOURS = "viridis"  # even in lightness, and read by every kind of colour vision
DARK = 0.88  # the share of it that thin lines use: its end is too light for them
LOWEST = 1e-5  # times the budget: where the axis of errors ends; what is below, such as a dense layer, lies on its edge
BAR: dict[str, Any] = {"fraction": 0.06, "aspect": 30, "pad": 0.015}

Summary = dict[str, Any]


def checked_only(length: Summary) -> str:
    return "" if length["calibrated"] else " (checked only)"


def pictures(summary: Summary) -> dict[str, bytes]:
    """PNGs by the keys of `CAPTIONS`; none where matplotlib is not installed."""
    return drawn(summary, {"density": draw_density, "frontier": draw_frontier, "time": draw_time})


def drawn(
    summary: Summary, draws: Mapping[str, Callable[[Figure, Summary], None]], pad: float = 0.04
) -> dict[str, bytes]:
    """PNGs by name, none where matplotlib is not installed. draws: what draws each; pad: inches beside axes."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        return {}
    pictures = {}
    for name, draw in draws.items():
        figure = Figure(layout=ConstrainedLayoutEngine(w_pad=pad))
        draw(figure, summary)
        figure.suptitle(f"{summary['model']} on {summary['device']}", fontsize="medium", parse_math=False)
        file = BytesIO()
        figure.savefig(file, format="png", dpi=DPI)
        pictures[name] = file.getvalue()
    return pictures


def draw_density(figure: Figure, summary: Summary) -> None:
    """A heat map of layers x heads for each length whose heads are known, with a cross on every dense head."""
    lengths = [length for length in summary["lengths"] if _has_heads(length)]
    layers, heads = len(lengths[0]["layers"]), len(lengths[0]["layers"][0]["heads"])
    widest = 9.0 if len(lengths) == 1 else 5.0
    wide, high = (min(max(CELL * count, 2.4), most) for count, most in ((heads, widest), (layers, 9.0)))
    panels = panels_of(figure, lengths, (wide, high), "head", "layer")
    cross = (30 * min(wide / heads, high / layers)) ** 2
    for axes, length in panels:
        densities = [[head["density"] for head in layer["heads"]] for layer in length["layers"]]
        image = axes.imshow(densities, vmin=0, vmax=1, cmap=COLOURS, aspect="auto", interpolation="nearest")
        modes = [
            (x, y, head["mode"]) for y, layer in enumerate(length["layers"]) for x, head in enumerate(layer["heads"])
        ]
        dense = [(x, y) for x, y, mode in modes if mode == "dense"]
        axes.scatter([x for x, _ in dense], [y for _, y in dense], marker="x", color="black", lw=0.8, s=cross)
        whole_numbers(axes.xaxis, axes.yaxis)
    figure.colorbar(image, ax=[axes for axes, _ in panels], label="density (cross: dense head)", **BAR)


def draw_frontier(figure: Figure, summary: Summary) -> None:
    """Error against density of each layer: what was predicted for other budgets, and what was chosen."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.ticker import LogLocator

    budget, last = summary["budget"], len(summary["lengths"][0]["layers"]) - 1
    of_layer = ScalarMappable(Normalize(0, max(1, last) / DARK), COLOURS)
    circle: dict[str, Any] = {"ls": "", "marker": "o", "ms": 5 if last < 12 else 3.5, "mec": "black", "mew": 0.6}
    circle |= {"zorder": 3, "clip_on": False, "in_layout": False}  # whole where the error is 0, at the edge
    errors = [layer["error"] for length in summary["lengths"] for layer in length["layers"] if layer["error"] > 0]
    bottom = max(min([*errors, budget["value"]]) / 3, LOWEST * budget["value"])  # curves fall towards density 1
    size = (5.5, 4.2) if len(summary["lengths"]) == 1 else (4.2, 3.6)
    panels = panels_of(figure, summary["lengths"], size, "density", budget["kind"], sharey=True)
    for axes, length in panels:
        axes.axhline(budget["value"], color="black", lw=1, ls="--", label="budget")
        for layer in length["layers"]:
            colour = of_layer.to_rgba(layer["layer"])
            curve = sorted(point for point in layer["frontier"] or () if min(point) > 0)
            axes.plot([x for x, _ in curve], [y for _, y in curve], color=colour, lw=0.8, alpha=0.8)
            axes.plot(layer["density"], max(layer["error"], bottom), color=colour, **circle)
        axes.grid(alpha=0.3)
    axes = panels[0][0]
    axes.set(xscale="log", yscale="log")
    axes.set_ylim(bottom=bottom)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.plot([], [], color="grey", lw=0.8, label="a layer's choices, predicted")
    axes.plot([], [], color="lightgrey", label="chosen, held out", **circle)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    bar = figure.colorbar(of_layer, ax=[axes for axes, _ in panels], label="layer", **BAR)
    bar.ax.set_ylim(0, max(1, last))
    whole_numbers(bar.ax.yaxis)


def draw_time(figure: Figure, summary: Summary) -> None:
    """Bars of each layer's attention before those of dense attention; predicted shares where nothing was timed."""
    wide = min(max(0.2 * len(summary["lengths"][0]["layers"]), 5.0), 12.0)
    lengths = [length for length in summary["lengths"] if _was_timed(length) or _has_heads(length)]
    panels = panels_of(figure, lengths, (wide, 1.7), "layer", "", columns=1)
    for axes, length in panels:
        layers = length["layers"]
        numbers = [layer["layer"] for layer in layers]
        if _was_timed(length):
            dense, taken = ([1e3 * layer[name] for layer in layers] for name in ("dense_seconds", "seconds"))
            axes.set_ylabel("attention [ms]")
        else:
            dense, taken = [1.0] * len(layers), [predicted_cost(layer) for layer in layers]
            axes.set_ylabel("attention time,\npredicted, over dense")
        axes.bar(numbers, dense, width=0.85, color="lightgrey", label="dense")
        axes.bar(numbers, taken, width=0.5, color="C0", label="S2O")
        axes.set_xlim(-0.7, len(layers) - 0.3)
        whole_numbers(axes.xaxis)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)


def _has_heads(length: Summary) -> bool:
    """A length that was only checked says nothing about single heads."""
    return all(layer["heads"] for layer in length["layers"])


def _was_timed(length: Summary) -> bool:
    return all(layer[name] is not None for layer in length["layers"] for name in ("seconds", "dense_seconds"))


def predicted_cost(layer: Summary) -> float:
    """The time of a layer's attention over dense, from the densities of its heads and what ranking takes."""
    costs = []
    for head in layer["heads"]:
        ranking = overhead(Method(layer["segment"], head["representatives"], layer["grain"]), head["tail"])
        of_mode = {"dense": 1.0, "blocks": head.get("cost")}
        costs.append(of_mode.get(head["mode"], head["density"] + ranking))
    return fmean(costs)


def panels_of(
    figure: Figure,
    lengths: Sequence[Summary],
    size: tuple[float, float],
    x: str,
    y: str,
    *,
    columns: int = 3,
    sharey: bool = False,
) -> list[tuple[Axes, Summary]]:
    """Axes for each length, about `size` inches wide and high, with that length; labelled at the outer edges."""
    columns = min(columns, len(lengths))
    rows = math.ceil(len(lengths) / columns)
    figure.set_size_inches(size[0] * columns + 1.5, size[1] * rows + 1.2)
    grid = list(figure.subplots(rows, columns, sharex=True, sharey=sharey, squeeze=False).flat)
    for axes in grid[len(lengths) :]:
        axes.remove()
    for index, (axes, length) in enumerate(zip(grid, lengths, strict=False)):
        lowest = index + columns >= len(lengths)
        axes.set_title(f"{length['length']} tokens{checked_only(length)}", fontsize="medium")
        axes.set(xlabel=x if lowest else "", ylabel="" if index % columns else y)
        axes.tick_params(labelbottom=lowest)
    return list(zip(grid, lengths, strict=False))


def whole_numbers(*axes: Axis) -> None:
    from matplotlib.ticker import MaxNLocator

    for axis in axes:
        axis.set_major_locator(MaxNLocator(integer=True))
