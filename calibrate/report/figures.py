"""What all pictures share: sizes, colours, panels, and the way to a PNG file or an SVG element.

matplotlib is imported inside the functions, because it takes most of a second that a command which draws nothing
should not wait for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from html import escape
from io import BytesIO
from typing import TYPE_CHECKING, Any, TypeVar

from calibrate.machine import MARK
from s2o_runtime.errors import first_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

T = TypeVar("T")
DPI = 120
COLOURS = "viridis"  # even in lightness, and told apart with every kind of colour vision
BAR: dict[str, Any] = {"fraction": 0.06, "aspect": 30, "pad": 0.015}  # a colour bar beside its axes


def png(draw: Callable[[Figure], None], title: str, pad: float = 0.04) -> bytes:
    """The bytes of a PNG file.

    Args:
        draw: puts axes into an empty figure.
        title: a line above the picture.
        pad: inches left free beside the axes.
    """
    return _saved(draw, title, pad, format="png", dpi=DPI, metadata={"Software": MARK})


def svg(draw: Callable[[Figure], None], title: str, name: str, description: str) -> str:
    """An SVG element that can stand in a page of HTML and refers to nothing outside itself.

    Args:
        draw: puts axes into an empty figure.
        title: a line above the picture.
        name: tells its ids from those of other pictures on the page.
        description: what it shows, for readers who cannot see it.
    """
    from matplotlib import rc_context

    without = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        text = _saved(draw, title, format="svg", metadata=without).decode()
    text = re.sub(r"\s+xmlns(:\w+)?=\"[^\"]*\"", "", text[text.index("<svg") :]).replace("xlink:href=", "href=")
    for reference in ('id="', 'href="#', "url(#"):
        text = text.replace(reference, f"{reference}{name}-")
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(description)}"', 1)


def attempt(draw: Callable[[], T]) -> tuple[T | None, str]:
    """Return what a function draws, or None and why it cannot: pictures that fail never fail a run."""
    try:
        return draw(), ""
    except Exception as error:  # whatever matplotlib raises
        return None, f"the pictures cannot be drawn ({type(error).__name__}: {first_line(error)})"


def _saved(draw: Callable[[Figure], None], title: str, pad: float = 0.04, **options: Any) -> bytes:
    """A figure's file; the options are those of matplotlib's `savefig`."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(layout=ConstrainedLayoutEngine(w_pad=pad))
    draw(figure)
    figure.suptitle(title, fontsize="medium", parse_math=False)
    file = BytesIO()
    figure.savefig(file, **options)
    return file.getvalue()


def panels(
    figure: Figure,
    titles: Sequence[str],
    size: tuple[float, float],
    *,
    x: str,
    y: str,
    columns: int = 3,
    sharey: bool = False,
) -> list[Axes]:
    """Axes with these titles, labelled at the outer edges of the figure.

    Args:
        figure: gets the size that the panels need.
        titles: one for each panel.
        size: about how many inches a panel is wide and high.
        x: the label below the lowest panels.
        y: the label beside the leftmost ones.
        columns: the most panels side by side.
        sharey: whether all panels have one vertical axis.
    """
    columns = min(columns, len(titles))
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


def whole_numbers(axis: Axis, numbers: Sequence[int] | None = None) -> None:
    """Ticks at whole numbers only.

    Args:
        axis: gets the ticks.
        numbers: what stands at the ticks 0, 1, ...; None for these themselves.
    """
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))
    if numbers is not None:
        axis.set_major_formatter(lambda place, _: str(dict(enumerate(numbers)).get(round(place), "")))
