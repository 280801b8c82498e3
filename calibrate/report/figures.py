"""Draw a calibration and a profile."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from io import BytesIO
from typing import TYPE_CHECKING, Any, TypeVar

from calibrate.curves.curves import TAUS
from calibrate.machine import MARK
from calibrate.prompts.questions import EIGHTHS
from calibrate.proof.verify import EIGHTH_OVER_LIMIT
from calibrate.report.contents import HeadReport, Report
from calibrate.report.sections import format_speedup, format_tau
from s2o_runtime.config import HeadConfig
from s2o_runtime.errors import get_first_line
from s2o_runtime.profile import Profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

T = TypeVar("T")
Panel = tuple[str, Sequence[Sequence[tuple[str, float]]]]  # title; by layer and head the mode, and the colour's value
DPI = 120
COLOURS = "viridis"  # even in lightness, and told apart with every kind of colour vision
BAR: dict[str, Any] = {"fraction": 0.06, "aspect": 30, "pad": 0.015}  # a colour bar beside its axes


def render_png(draw: Callable[[Figure], None], title: str) -> bytes:
    """Return a PNG file: what `draw` puts into an empty figure below a title."""
    return _save_figure(draw, title, format="png", dpi=DPI, metadata={"Software": MARK})


def render_svg(draw: Callable[[Figure], None], title: str, name: str, description: str) -> str:
    """Return an SVG element that can stand in a page of HTML and refers to nothing outside itself.

    draw, title: as in `render_png`. name: tells its ids from those of other pictures on the page. description: for
    readers who cannot see it.
    """
    from matplotlib import rc_context

    without = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        text = _save_figure(draw, title, format="svg", metadata=without).decode()
    text = re.sub(r"\s+xmlns(:\w+)?=\"[^\"]*\"", "", text[text.index("<svg") :]).replace("xlink:href=", "href=")
    for reference in ('id="', 'href="#', "url(#"):
        text = text.replace(reference, f"{reference}{name}-")
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(description)}"', 1)


def try_drawing(draw: Callable[[], T]) -> tuple[T | None, str]:
    """Return what a function draws, or None and why it cannot: pictures that fail never fail a run."""
    try:
        return draw(), ""
    except Exception as error:  # whatever matplotlib raises
        return None, f"the pictures cannot be drawn ({type(error).__name__}: {get_first_line(error)})"


def _save_figure(draw: Callable[[Figure], None], title: str, **options: Any) -> bytes:
    """Return a figure's file; the options are those of matplotlib's `savefig`."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(layout=ConstrainedLayoutEngine(w_pad=0.04))
    draw(figure)
    figure.suptitle(title, fontsize="medium", parse_math=False)
    file = BytesIO()
    figure.savefig(file, **options)
    return file.getvalue()


def add_panels(
    figure: Figure,
    titles: Sequence[str],
    size: tuple[float, float],
    *,
    x: str,
    y: str,
    sharey: bool = False,
) -> list[Axes]:
    """Return axes with these titles, at most three in a row, labelled x and y at the outer edges of the figure.

    size: about how many inches a panel is wide and high; the figure gets what all of them need. sharey: matplotlib's.
    """
    columns = min(3, len(titles))
    rows = math.ceil(len(titles) / columns)
    figure.set_size_inches(size[0] * columns + 1.5, size[1] * rows + 1.2)
    grid = list(figure.subplots(rows, columns, sharex=True, sharey=sharey, squeeze=False).flat)
    for unused in grid[len(titles) :]:
        unused.remove()
    for index, (axes, title) in enumerate(zip(grid, titles, strict=False)):
        lowest = index + columns >= len(titles)
        axes.set_title(title, fontsize="medium")
        axes.set(xlabel=x if lowest else "", ylabel="" if index % columns else y)
        axes.tick_params(labelbottom=lowest)
    return grid[: len(titles)]


def _set_whole_ticks(axis: Axis, numbers: Sequence[int] | None = None) -> None:
    """Tick an axis at whole numbers only, where `numbers`, or else the positions 0, 1, ... themselves, are shown."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))
    if numbers is not None:
        axis.set_major_formatter(lambda position, _: str(dict(enumerate(numbers)).get(round(position), "")))


def _draw_maps(
    figure: Figure,
    panels: Sequence[Panel],
    numbers: Sequence[int],
    size: tuple[float, float],
    cross: float,
    label: str,
    **scale: Any,
) -> None:
    """Draw a map of layers, with their numbers, and heads for each panel; a cross of this size marks dense heads."""
    all_axes = add_panels(figure, [title for title, _ in panels], size, x="head", y="layer")
    for axes, (_, rows) in zip(all_axes, panels, strict=True):
        values = [[value for _, value in row] for row in rows]
        image = axes.imshow(values, cmap=COLOURS, aspect="auto", interpolation="nearest", **scale)
        dense = [(x, y) for y, row in enumerate(rows) for x, (mode, _) in enumerate(row) if mode == "dense"]
        axes.scatter([x for x, _ in dense], [y for _, y in dense], marker="x", color="black", lw=0.8, s=cross)
        _set_whole_ticks(axes.xaxis)
        _set_whole_ticks(axes.yaxis, numbers)
    figure.colorbar(image, ax=all_axes, label=f"{label} (cross: dense head)", **BAR)


LEVELS = 64  # colours of a map
EQUAL_CONTRAST = math.sqrt(0.05 * 1.05) - 0.05  # the luminance on which black and white are as easy to read
DECADES = 4  # below the largest error, where the colours of errors end


@dataclass(frozen=True)
class HeadMap:
    """One quantity of heads, and its scale of colours, which is the same at every length."""

    name: str
    value: Callable[[HeadReport], float | None]  # None where a head has none
    text: Callable[[float], str]
    low: float  # has the first colour, as smaller ones have
    high: float  # has the last colour
    logarithmic: bool = True  # whether the colours are even in the value's logarithm

    def find_level(self, value: float) -> int:
        """Return the number of a value's colour, from 0 to `LEVELS` - 1."""
        clipped = min(max(value, self.low), self.high)
        scale = math.log if self.logarithmic else float
        low, high = scale(self.low), scale(self.high)
        share = (scale(clipped) - low) / (high - low) if high > low else 0.0
        return round(share * (LEVELS - 1))


def make_head_maps(report: Report) -> list[HeadMap]:
    """Return the maps of tau, density and error; the last one ends at the largest error of any head of the report."""
    errors = [head.error for length in report.lengths for layer in length.layers for head in layer.heads]
    highest = max(errors, default=0.0) or report.budget.value

    def threshold(head: HeadReport) -> float | None:
        return None if head.mode == "dense" else head.tau

    def short(error: float) -> str:  # 3e-4, as narrow as it can be
        return f"{error:.0e}".replace("e-0", "e-").replace("e+0", "e+") if error else "0"

    return [
        HeadMap("tau", threshold, format_tau, TAUS[0], TAUS[-1]),
        HeadMap("density", lambda head: head.density, lambda value: f"{value:.2f}", 0.0, 1.0, logarithmic=False),
        HeadMap(report.budget.unit, lambda head: head.error, short, highest / 10**DECADES, highest),
    ]


def list_colours() -> list[tuple[str, str]]:
    """Return each level's colour, and black or white, whichever is easier to read on it."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    backgrounds = [colormaps[COLOURS](level / (LEVELS - 1))[:3] for level in range(LEVELS)]
    return [(to_hex(rgb), "#000000" if _compute_luminance(rgb) > EQUAL_CONTRAST else "#ffffff") for rgb in backgrounds]


def _compute_luminance(colour: tuple[float, ...]) -> float:
    """Return the relative luminance of an sRGB colour, as the Web Content Accessibility Guidelines define it."""
    linear = [channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4 for channel in colour]
    return sum(weight * channel for weight, channel in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


CAPTION = "The threshold of every head at every length: the larger, the more a head skips; a cross is a dense head."


def draw_tau_png(profile: Profile) -> bytes:
    """Return a PNG: for each length a map of layers and heads, coloured by tau; a dense head has a cross."""
    return render_png(partial(_draw_taus, profile=profile), f"{profile.model_name} on {profile.device}")


def draw_tau_svg(profile: Profile) -> str:
    """Return the same as an SVG element."""
    return render_svg(partial(_draw_taus, profile=profile), f"{profile.model_name} on {profile.device}", "tau", CAPTION)


def _draw_taus(figure: Figure, profile: Profile) -> None:
    from matplotlib.colors import LogNorm

    def get_colour(head: HeadConfig) -> float:
        return max(head.tau, TAUS[0]) if head.mode == "s2o" else math.nan

    norm = LogNorm(TAUS[0], TAUS[-1], clip=True)  # a tau of 0 has the colour of the smallest
    numbers = [profile.geometry.get_layer_number(index) for index in range(profile.geometry.layers)]
    panels = [
        (f"{length} tokens", [[(head.mode, get_colour(head)) for head in layer.heads] for layer in layers])
        for length, layers in zip(profile.lengths, profile.layers, strict=True)
    ]
    _draw_maps(figure, panels, numbers, (5.0, 4.0), 12, "tau", norm=norm)


CELL = 0.14  # inches of a cell of the heat map where there are many
DARK = 0.88  # the share of the colours that thin lines use: the last ones are too light for them
CAPTIONS = {
    "summary": "What is gained, and what is lost on the prompts that layers were adjusted on: in each "
    "layer, and in each eighth of the prompts by the layer that errs most there. Dashed lines are what is allowed.",
    "density": "The share of query-key pairs that every head computes, as calibrated; a cross marks dense heads.",
    "frontier": "Error against density of every layer: curves are predicted for other budgets, circles are what was "
    "chosen, on the prompts that layers were adjusted on.",
}
LOWEST = 1e-5  # times the budget: where the axis of errors ends; smaller errors, as of a dense layer, lie on its edge


def draw_pngs(report: Report) -> dict[str, bytes]:
    """Return PNG files by the names "summary", "density" and "frontier"."""
    draws = {"summary": draw_summary, "density": draw_density, "frontier": draw_frontier}
    title = f"{report.model} on {report.device}"
    return {name: render_png(partial(draw, report=report), title) for name, draw in draws.items()}


def draw_svgs(report: Report) -> dict[str, str]:
    """Return elements of HTML by the names "frontier" and "summary", whose panels stand side by side where they can.

    For "density" a page of HTML has maps of its own.
    """
    title = f"{report.model} on {report.device}"
    frontier = render_svg(partial(draw_frontier, report=report), title, "frontier", CAPTIONS["frontier"])
    panels = [
        render_svg(partial(draw_summary, report=report, names=[name]), "", f"summary{number}", name)
        for number, name in enumerate(SUMMARY)
    ]
    return {"frontier": frontier, "summary": f'<div class="panels">{"".join(panels)}</div>'}


def draw_summary(figure: Figure, report: Report, names: Sequence[str] = ()) -> None:
    """Draw what is gained at each length, and what is lost in each layer and at each place in the prompts.

    names: the panels of `SUMMARY`; all of them if none is named.
    """
    names = names or list(SUMMARY)
    figure.set_size_inches(4.2 * len(names), 3.4)
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False).flat, names, strict=True):
        axes.set_title(name, fontsize="medium")
        SUMMARY[name](axes, report)


def _draw_gain(axes: Axes, report: Report) -> None:
    """Draw how many times as fast as dense attention is at each length, and a prefill where it was timed."""
    positions = range(len(report.lengths))  # the bars stand side by side, however far apart the lengths are
    timed = None not in [row.attention_seconds for row in report.lengths]
    attention = [row.attention_speedup or 0.0 for row in report.lengths]
    name = "attention" if timed else "attention, predicted"
    series = [axes.bar(positions, attention, -0.4, align="edge" if timed else "center", label=name)]
    if timed:
        prefill = [row.prefill_speedup or 0.0 for row in report.lengths]
        series.append(axes.bar(positions, prefill, 0.4, align="edge", label="prefill"))
    for bars in series:
        axes.bar_label(bars, fmt=lambda speedup: format_speedup(speedup or None), fontsize="small")
    axes.set(xlabel="tokens", ylabel="times as fast as dense", xlim=(-0.6, len(positions) - 0.4))
    axes.set_xticks(positions, [str(row.length) for row in report.lengths])
    _finish_panel(axes, 1.0)


def _draw_layer_loss(axes: Axes, report: Report) -> None:
    for row in report.lengths:
        axes.plot([layer.error_over_limit for layer in row.layers], marker="o", ms=3, label=row.label)
    axes.set(xlabel="layer", ylabel="error over its limit")
    _set_whole_ticks(axes.xaxis, report.layer_numbers)
    _finish_panel(axes, 1.0)


def _draw_place_loss(axes: Axes, report: Report) -> None:
    for row in report.lengths:
        by_eighth = zip(*(layer.eighths for layer in row.layers if layer.eighths), strict=True)
        axes.plot([max(errors) for errors in by_eighth], marker="o", ms=3, label=row.label)
    axes.set(xlabel="eighth of the prompt", ylabel="error over its limit, of the worst layer")
    axes.set_xticks(range(EIGHTHS), [str(eighth) for eighth in range(1, EIGHTHS + 1)])
    _finish_panel(axes, EIGHTH_OVER_LIMIT)


def _finish_panel(axes: Axes, bound: float) -> None:
    """Add a line at the bound, and a legend with room above what is drawn."""
    axes.axhline(bound, color="black", lw=1, ls="--")
    axes.margins(y=0.35)
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", ncols=2, frameon=False, fontsize="small")


SUMMARY: dict[str, Callable[[Axes, Report], None]] = {  # what people look for first
    "what is gained, by length": _draw_gain,
    "what is lost, by layer": _draw_layer_loss,
    "what is lost, by place in the prompt": _draw_place_loss,
}


def draw_density(figure: Figure, report: Report) -> None:
    """Draw a map of layers and heads for each length whose heads are known, with a cross on every dense head."""
    lengths = [length for length in report.lengths if length.has_heads]
    layers, heads = len(lengths[0].layers), len(lengths[0].layers[0].heads)
    widest = 9.0 if len(lengths) == 1 else 5.0
    wide, high = (min(max(CELL * count, 2.4), most) for count, most in ((heads, widest), (layers, 9.0)))
    cross = (30 * min(wide / heads, high / layers)) ** 2
    panels = [
        (length.label, [[(head.mode, head.density) for head in layer.heads] for layer in length.layers])
        for length in lengths
    ]
    _draw_maps(figure, panels, report.layer_numbers, (wide, high), cross, "density", vmin=0, vmax=1)


def draw_frontier(figure: Figure, report: Report) -> None:
    """Draw error against density of each layer: what was predicted for other budgets, and what was chosen."""
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
    all_axes = add_panels(figure, titles, size, x="density", y=budget.unit, sharey=True)
    for axes, length in zip(all_axes, report.lengths, strict=True):
        if budget.kind == budget.unit:
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
    _set_whole_ticks(bar.ax.yaxis, report.layer_numbers)
