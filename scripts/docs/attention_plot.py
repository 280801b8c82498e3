"""The picture of the attention bench: time against density."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.bench.schema import OF_FORM, AttentionEntry, AttentionFile, AttentionRow, Spread
from scripts.docs.plots import legend, plain_numbers

TARGET_RATE = 0.75


def draw_attention(file: AttentionFile, figure: Figure) -> None:
    """A panel for each length, a colour for each tile and form of S2O."""
    lengths = sorted({entry.length for entry in file.results})
    figure.set_size_inches(max(5.0 * len(lengths), 7.0), 5.2)
    device = file.device if isinstance(file.device, str) else file.device["name"]
    setting = f"{device}, {file.settings['data']} data\n"
    setting += "{heads[0]}/{heads[1]} heads of {head_dim}, batch {batch}, {dtype}".format(**file.settings)
    colours: dict[str, str] = {}
    for index, length in enumerate(lengths, 1):
        axes = figure.add_subplot(1, len(lengths), index)
        _panel(axes, [entry for entry in file.results if entry.length == length], file.settings["segment"], colours)
        axes.set_title(f"{length} tokens\n{setting}", fontsize="medium")
    legend(figure, 3)


def _panel(axes: Axes, entries: list[AttentionEntry], segment: int, colours: dict[str, str]) -> None:
    """Dense, ideal and target lines, and every series with its spread, on logarithmic axes."""
    dense = 1e3 * entries[0].dense.seconds.median
    lowest = min(row.density for entry in entries for row in entry.rows)
    axes.axhline(dense, color="black", lw=1.2, label=f"dense ({entries[0].dense.backend})")
    for rate, line, name in ((1.0, "--", "ideal"), (TARGET_RATE, "-.", "target")):
        ends = [lowest * dense / rate, dense / rate]
        axes.plot([lowest, 1], ends, line, color="grey", label=f"{name}: {rate:.0%} of dense's rate")
    for entry in entries:
        for form in dict.fromkeys(row.form for row in entry.rows):
            series = f"{entry.tile_name}, segment {segment}{OF_FORM.get(form, '')}"
            colour = colours.setdefault(series, f"C{len(colours)}")
            rows = sorted((row for row in entry.rows if row.form == form), key=lambda row: row.density)
            _series(axes, [(row, row.seconds) for row in rows], fmt="o-", color=colour, label=series)
            alone = [(row, row.prefill_seconds) for row in rows if row.prefill_seconds]
            _series(axes, alone, fmt="x:", color=colour, label=f"{series}, without ranking")
    axes.set(xscale="log", yscale="log", xlabel="density", ylabel="ms (median; bars: p25 to p75)")
    plain_numbers(axes.xaxis)
    plain_numbers(axes.yaxis)
    axes.grid(alpha=0.3)


def _series(axes: Axes, points: list[tuple[AttentionRow, Spread]], **look: Any) -> None:
    if points:
        low = [1e3 * (time.median - time.p25) for _, time in points]
        high = [1e3 * (time.p75 - time.median) for _, time in points]
        density, middle = [row.density for row, _ in points], [1e3 * time.median for _, time in points]
        axes.errorbar(density, middle, [low, high], ms=5, lw=1.3, **look)
