"""What the pictures of docs/results share."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

Draw = Callable[[Figure], None]


def svg(draw: Draw) -> bytes:
    """A picture as SVG, the same bytes for the same numbers."""
    file = BytesIO()
    with rc_context({"svg.hashsalt": "s2o"}):
        figure = Figure(layout="constrained")
        draw(figure)
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def plain_numbers(axis: Any) -> None:
    """Label a logarithmic axis 0.05 instead of with a power of ten."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def legend(figure: Figure, columns: int, **options: Any) -> None:
    """One legend below all panels, with each name once."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=min(columns, len(handles)), **options
    )
