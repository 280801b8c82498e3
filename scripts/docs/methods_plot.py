"""The picture of README: time against error of every method."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from scripts.bench.schema import DENSE, EVERYTHING, FLASH, MethodRow
from scripts.docs.raw import METHODS, RESULTS, Bench

PICTURE = RESULTS / "methods-error.svg"
MARKERS = "osD^vPX*"


def svg(draw: Callable[[Figure], None]) -> bytes:
    """A picture as SVG, the same bytes for the same numbers."""
    file = BytesIO()
    with rc_context({"svg.hashsalt": "s2o"}):
        figure = Figure(layout="constrained")
        draw(figure)
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


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
        axes.set_title(f"{bench.length} tokens", fontsize="medium")
        axes.set(xscale="log", yscale="log", xlabel="rel_mse (mean of layers)")
        axes.grid(alpha=0.3)
    panels[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panels[0].yaxis.set_major_formatter("{x:g}")
    panels[0].yaxis.set_minor_formatter("")
    panels[0].set_ylabel("attention time over dense (cuDNN)")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    figure.suptitle("attention of the demo model on an NVIDIA H200", fontsize="medium")


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
