"""The pictures of the methods' bench: time against error, and where the time goes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.bench.schema import DENSE, MethodRow
from scripts.docs.plots import legend, plain_numbers
from scripts.docs.results_data import NEAR, Bench, attending, is_dense, is_sparse, nearest, on_front, useful

MARKERS = "osD^vPX*"
COLOURS = (*(f"C{index}" for index in range(10)), "navy", "olive")  # the cycle of matplotlib has ten


def styles_of(compared: Sequence[Bench]) -> dict[str, dict[str, Any]]:
    """Colour and marker of every method that can be sparse, the same in all panels."""
    names = dict.fromkeys(method for bench in compared for method in bench.methods if is_sparse(bench.of(method)))
    return {
        name: {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "zorder": 3}
        for index, name in enumerate(names)
    }


def draw_errors(compared: Sequence[Bench], figure: Figure) -> None:
    """Time over dense against rel_mse: a panel for each length, a line for each method and form of its settings.

    A line joins the settings of a method that no other setting of it beats; the others are marks beside it.
    """
    figure.set_size_inches(4.6 * len(compared) + 0.4, 6.4)
    styles = styles_of(compared)
    panels = figure.subplots(1, len(compared), sharex=True, sharey=True, squeeze=False)[0]
    for axes, bench in zip(panels, compared, strict=True):
        for method, style in styles.items():
            _lines(axes, bench, method, style)
        front = sorted(
            (row.rel_mse, row.seconds / bench.dense)
            for row in bench.rows
            if on_front(row, bench.rows) and not is_dense(row)
        )
        band: dict[str, Any] = {"color": "gold", "alpha": 0.6, "zorder": 1, "solid_capstyle": "round"}
        axes.plot(*zip(*front, strict=True), lw=9, label="Pareto front", **band)
        for method in bench.methods:
            if method.startswith("dense"):
                line = "-" if method == DENSE else "--"
                level = bench.of(method)[0].seconds / bench.dense
                axes.axhline(level, color="black", ls=line, lw=1.1, zorder=2, label=method)
        axes.set_title(f"{bench.length} tokens", fontsize="medium")
        axes.set(xscale="log", yscale="log", xlabel="rel_mse (mean of layers)")
        axes.grid(alpha=0.3)
    plain_numbers(panels[0].yaxis)
    panels[0].set_ylabel("attention time over dense (cuDNN)")
    legend(figure, 4, frameon=False, fontsize="small")
    figure.suptitle(_title(compared), fontsize="medium", parse_math=False)


def _lines(axes: Axes, bench: Bench, method: str, style: dict[str, Any]) -> None:
    s2o = method.startswith("S2O")
    forms: dict[tuple[str, ...], list[MethodRow]] = {}
    for row in bench.of(method):
        if not is_dense(row):
            forms.setdefault(tuple(re.findall(r"(\w+)=", row.setting)), []).append(row)
    for index, rows in enumerate(forms.values()):
        look = style | {"lw": 2.0 if s2o else 1.0, "ms": 6 if s2o else 4.5, "mfc": style["color"] if s2o else "none"}
        best = useful(rows)
        beaten = [row for row in rows if row not in best]
        for points, line in ((best, {"label": None if index else method}), (beaten, {"ls": ""})):
            if points:
                xy = sorted((row.rel_mse, row.seconds / bench.dense) for row in points)
                axes.plot(*zip(*xy, strict=True), **look, **line)


def draw_times(compared: Sequence[Bench], figure: Figure) -> None:
    """Bars of selecting and attending, at each method's setting nearest to an error: a panel for each length."""
    by_size = sorted(compared, key=lambda bench: -len(bench.methods))  # the bench with most methods sets their order
    methods = list(dict.fromkeys(method for bench in by_size for method in bench.methods))
    figure.set_size_inches(4.6 * len(compared) + 2.0, 0.42 * len(methods) + 1.6)
    panels = figure.subplots(1, len(compared), squeeze=False)[0]
    for axes, bench in zip(panels, compared, strict=True):
        rows = [nearest(bench.of(method), NEAR) for method in bench.methods]
        heights = [methods.index(method) for method in bench.methods]
        selecting, rest = [1e3 * row.selecting_seconds for row in rows], [1e3 * attending(row) for row in rows]
        axes.barh(heights, selecting, color="C1", label="selecting")
        axes.barh(heights, rest, left=selecting, color="C0", label="attending")
        for height, row in zip(heights, rows, strict=True):
            text = " ".join(("", row.setting, f"({row.rel_mse:.0e})")).replace("  ", " ")
            axes.text(1e3 * row.seconds, height, text, va="center", fontsize="x-small", parse_math=False)
        axes.set_yticks(range(len(methods)), methods, fontsize="small")
        axes.set_ylim(len(methods) - 0.4, -0.6)
        axes.tick_params(labelleft=axes is panels[0])
        axes.set_xlim(right=1.75 * max(1e3 * row.seconds for row in rows))  # room for the text behind the bars
        axes.set(xlabel="ms")
        axes.set_title(f"{bench.length} tokens", fontsize="medium")
    legend(figure, 2, frameon=False)
    title = f"{_title(compared)}: each method's setting nearest to rel_mse {NEAR:.0e} (its rel_mse in brackets)"
    figure.suptitle(title, fontsize="medium", parse_math=False)


def _title(compared: Sequence[Bench]) -> str:
    """Model and device of all panels."""
    names = []
    for bench in compared:
        file = bench.source.file
        device = file.device if isinstance(file.device, str) else file.device["name"]
        names.append(f"{file.settings['data']} on {device}")
    return "; ".join(dict.fromkeys(names))
