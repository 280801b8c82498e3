"""Two pictures: speed against error of S2O and of the best others, for README; time against error of every method."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from scripts.bench.schema import DENSE, EVERYTHING, FLASH, ONE_SETTING, MethodRow
from scripts.docs.raw import METHODS, RESULTS, S2O, Bench

README_PICTURE = RESULTS / "speed-at-error.svg"
PICTURE = RESULTS / "methods-error.svg"
INK = "#808080"  # text and lines that read on white and on dark pages
MARKERS = "osD^vPX*"


def svg(draw: Callable[[Figure], None]) -> bytes:
    """A picture as SVG, the same bytes for the same numbers."""
    file = BytesIO()
    with rc_context({"svg.hashsalt": "s2o"}):
        figure = Figure(layout="constrained")
        draw(figure)
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def draw_speed(compared: Bench, figure: Figure) -> None:
    """Times faster than dense over rel_mse at one length: S2O, the best of all other methods, and dense at 1.

    A line joins the settings that no other setting of its group beats. Letters stay readable at a width of 400 pixels.
    """
    figure.set_size_inches(5.4, 3.9)
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    others = [method for method in METHODS if method not in (DENSE, FLASH, S2O, ONE_SETTING)]
    groups = (
        ("S2O, calibrated", [S2O], "#2f81f7", "o", 2.5),
        ("S2O, one setting", [ONE_SETTING], "#3fa66b", "s", 1.5),
        (f"best of {len(others)} others", others, "#e8700a", "^", 1.5),
    )
    for name, methods, colour, marker, width in groups:
        rows = [row for method in methods for row in compared.of(method) if row.density < EVERYTHING]
        best = [row for row in rows if not any(_beats(other, row) for other in rows)]
        xy = sorted((row.rel_mse, compared.dense / row.seconds) for row in best)
        axes.plot(*zip(*xy, strict=True), color=colour, marker=marker, lw=width, ms=6, label=name)
    axes.axhline(1, color=INK, lw=2.5, ls="--", label="dense (cuDNN)")
    axes.set(xscale="log", yscale="log", xlim=(3e-5, 1e-1), ylim=(0.7, 10))
    axes.set_xlabel("error of the output (rel_mse)", color=INK, fontsize=13)
    axes.set_ylabel("times faster than dense", color=INK, fontsize=13)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.tick_params(which="both", colors=INK, labelsize=13)
    axes.grid(alpha=0.3, color=INK)
    for spine in axes.spines.values():
        spine.set_color(INK)
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=12.5, labelcolor=INK)


def draw_errors(benches: Sequence[Bench], figure: Figure) -> None:
    """Time over dense against rel_mse: a panel for each length, a line for each method and form of its settings.

    A line joins the settings of a method that no other setting of it beats; the others are marks beside it.
    """
    figure.set_size_inches(4.6 * len(benches) + 0.4, 6.0)
    sparse = [method for method in METHODS if method not in (DENSE, FLASH)]
    styles = {
        method: {"color": f"C{index}", "marker": MARKERS[index % len(MARKERS)]} for index, method in enumerate(sparse)
    }
    panels = figure.subplots(1, len(benches), sharex=True, sharey=True, squeeze=False)[0]
    for axes, bench in zip(panels, benches, strict=True):
        for method, style in styles.items():
            _lines(axes, bench, method, style)
        for method, line in ((DENSE, "-"), (FLASH, "--")):
            level = bench.of(method)[0].seconds / bench.dense
            axes.axhline(level, color="black", ls=line, lw=1.1, label=METHODS[method])
        axes.set_title(f"{bench.model}, {bench.length} tokens\n{bench.gpu}", fontsize="medium")
        axes.set(xscale="log", yscale="log", xlabel="rel_mse (mean of layers)")
        axes.grid(alpha=0.3)
    panels[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panels[0].yaxis.set_major_formatter("{x:g}")
    panels[0].yaxis.set_minor_formatter("")
    panels[0].set_ylabel("attention time over dense (cuDNN)")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False, fontsize="small")


def _lines(axes: Axes, bench: Bench, method: str, style: dict[str, Any]) -> None:
    s2o = method.startswith("S2O")
    forms: dict[tuple[str, ...], list[MethodRow]] = {}
    for row in bench.of(method):
        if row.density < EVERYTHING:
            forms.setdefault(tuple(re.findall(r"(\w+)=", row.setting)), []).append(row)
    look = style | {"lw": 2.0 if s2o else 1.0, "ms": 6 if s2o else 4.5, "mfc": style["color"] if s2o else "none"}
    for index, rows in enumerate(forms.values()):
        best = [row for row in rows if not any(_beats(other, row) for other in rows)]
        beaten = [row for row in rows if row not in best]
        for points, line in ((best, {"label": None if index else METHODS[method].strip("*")}), (beaten, {"ls": ""})):
            if points:
                xy = sorted((row.rel_mse, row.seconds / bench.dense) for row in points)
                axes.plot(*zip(*xy, strict=True), **look, **line)


def _beats(row: MethodRow, other: MethodRow) -> bool:
    """Whether a row is no slower and no less exact than another, and one of both by more than nothing."""
    pairs = [(row.seconds, other.seconds), (row.rel_mse, other.rel_mse)]
    return all(mine <= its for mine, its in pairs) and any(mine < its for mine, its in pairs)
