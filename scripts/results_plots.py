"""The pictures of docs/results.md."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from results_data import (
    DENSE,
    NEAR,
    Bench,
    Row,
    attending,
    is_dense,
    is_sparse,
    nearest,
    on_front,
    useful,
)

from s2o_runtime.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "osD^vPX*"


def pictures(compared: Sequence[Bench]) -> dict[str, bytes]:
    """The SVGs by file name, the same bytes for the same numbers."""
    if not compared:
        return {}
    drawn = {"methods-error.svg": draw_error, "methods-time.svg": draw_time}
    return {name: _svg(partial(draw, compared)) for name, draw in drawn.items()}


def _svg(draw: Callable[[Figure], None]) -> bytes:
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise InputError(f"{error.name} is not installed: run pip install -e '.[calibrate]'") from None
    file = BytesIO()
    with rc_context({"svg.hashsalt": "s2o"}):
        figure = Figure(layout="constrained")
        draw(figure)
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def looks(compared: Sequence[Bench]) -> dict[str, dict[str, Any]]:
    """Colour and marker of every method that can be sparse, the same in all panels."""
    names = dict.fromkeys(method for bench in compared for method in bench.methods if is_sparse(bench.of(method)))
    return {
        name: {"color": f"C{index % 10}", "marker": MARKERS[index % len(MARKERS)], "zorder": 3}
        for index, name in enumerate(names)
    }


def draw_error(compared: Sequence[Bench], figure: Figure) -> None:
    """Time over dense against rel_mse: a panel for each length, a line for each method and form of its settings.

    The line joins what none of its own settings beats; the others are marks beside it.
    """
    figure.set_size_inches(4.6 * len(compared) + 0.4, 6.4)
    styles = looks(compared)
    panels = figure.subplots(1, len(compared), sharex=True, sharey=True, squeeze=False)[0]
    for axes, bench in zip(panels, compared, strict=True):
        for method, style in styles.items():
            _lines(axes, bench, method, style)
        front = sorted(
            (row["rel_mse"], row["seconds"] / bench.dense)
            for row in bench.rows
            if on_front(row, bench.rows) and not is_dense(row)
        )
        band: dict[str, Any] = {"color": "gold", "alpha": 0.6, "zorder": 1, "solid_capstyle": "round"}
        axes.plot(*zip(*front, strict=True), lw=9, label="Pareto front", **band)
        for method in bench.methods:
            if method.startswith("dense"):
                style = "-" if method == DENSE else "--"
                level = bench.of(method)[0]["seconds"] / bench.dense
                axes.axhline(level, color="black", ls=style, lw=1.1, zorder=2, label=method)
        axes.set_title(f"{bench.length} tokens", fontsize="medium")
        axes.set(xscale="log", yscale="log", xlabel="rel_mse (mean of layers)")
        axes.grid(alpha=0.3)
    _plain_numbers(panels[0])
    panels[0].set_ylabel("attention time over dense (cuDNN)")
    legend = {name: handle for axes in panels for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(
        list(legend.values()), list(legend), loc="outside lower center", ncols=4, frameon=False, fontsize="small"
    )
    figure.suptitle(_where(compared), fontsize="medium", parse_math=False)


def _lines(axes: Axes, bench: Bench, method: str, style: dict[str, Any]) -> None:
    own = method.startswith("S2O")
    forms: dict[tuple[str, ...], list[Row]] = {}
    for row in bench.of(method):
        if not is_dense(row):
            forms.setdefault(tuple(re.findall(r"(\w+)=", row["setting"])), []).append(row)
    for index, rows in enumerate(forms.values()):
        look = style | {"lw": 2.0 if own else 1.0, "ms": 6 if own else 4.5, "mfc": style["color"] if own else "none"}
        best = useful(rows)
        for some in (best, [row for row in rows if row not in best]):  # a line, and marks beside it
            points = sorted((row["rel_mse"], row["seconds"] / bench.dense) for row in some)
            if points:
                label = method if some is best and not index else None
                axes.plot(*zip(*points, strict=True), label=label, **look | ({} if some is best else {"ls": ""}))


def _plain_numbers(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator

    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")


def draw_time(compared: Sequence[Bench], figure: Figure) -> None:
    """Bars of selecting and attending, at each method's setting nearest to an error: a panel for each length."""
    by_size = sorted(compared, key=lambda bench: -len(bench.methods))  # whoever has most methods says their order
    methods = list(dict.fromkeys(method for bench in by_size for method in bench.methods))
    figure.set_size_inches(4.6 * len(compared) + 2.0, 0.42 * len(methods) + 1.6)
    panels = figure.subplots(1, len(compared), squeeze=False)[0]
    for axes, bench in zip(panels, compared, strict=True):
        rows = [nearest(bench.of(method), NEAR) for method in bench.methods]
        places = [methods.index(method) for method in bench.methods]
        selecting, rest = [1e3 * row["selecting_seconds"] for row in rows], [1e3 * attending(row) for row in rows]
        axes.barh(places, selecting, color="C1", label="selecting")
        axes.barh(places, rest, left=selecting, color="C0", label="attending")
        for place, row in zip(places, rows, strict=True):
            text = " ".join(("", row["setting"], f"({row['rel_mse']:.0e})")).replace("  ", " ")
            axes.text(1e3 * row["seconds"], place, text, va="center", fontsize="x-small", parse_math=False)
        axes.set_yticks(range(len(methods)), methods, fontsize="small")
        axes.set_ylim(len(methods) - 0.4, -0.6)
        axes.tick_params(labelleft=axes is panels[0])
        axes.set_xlim(right=1.75 * max(1e3 * row["seconds"] for row in rows))  # room for the text behind the bars
        axes.set(xlabel="ms")
        axes.set_title(f"{bench.length} tokens", fontsize="medium")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False)
    title = f"{_where(compared)}: each method's setting nearest to rel_mse {NEAR:.0e} (its rel_mse in brackets)"
    figure.suptitle(title, fontsize="medium", parse_math=False)


def _where(compared: Sequence[Bench]) -> str:
    """Model and device of all panels."""
    places = ((bench.source.record["settings"]["data"], bench.source.record["device"]["name"]) for bench in compared)
    return "; ".join(dict.fromkeys(f"{data} on {device}" for data, device in places))
