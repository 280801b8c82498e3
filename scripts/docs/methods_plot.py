"""The picture of README: speed against error, of S2O and of the best others."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from scripts.bench.schema import EVERYTHING, ONE_SETTING, MethodRow
from scripts.docs.raw import METHODS, RESULTS, S2O, Bench

PICTURE = RESULTS / "speed-at-error.svg"
INK = "#808080"  # text and lines that read on white and on dark pages


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
    others = [method for method in METHODS if method not in (S2O, ONE_SETTING)]
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


def _beats(row: MethodRow, other: MethodRow) -> bool:
    """Return whether a row is no slower and no less exact than another, and one of both by more than nothing."""
    pairs = [(row.seconds, other.seconds), (row.rel_mse, other.rel_mse)]
    return all(mine <= its for mine, its in pairs) and any(mine < its for mine, its in pairs)
