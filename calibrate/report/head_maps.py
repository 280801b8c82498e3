"""Tau, density and error of every head at every calibrated length, as maps of layers and heads for the HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from calibrate.curves.curves import TAUS
from calibrate.report.contents import HeadReport, Report
from calibrate.report.figures import COLOURS
from calibrate.report.shown import two_digits

LEVELS = 64  # colours of a map
EQUAL_CONTRAST = math.sqrt(0.05 * 1.05) - 0.05  # the luminance on which black and white are as easy to read
DECADES = 4  # below the largest error, where the colours of errors end


@dataclass(frozen=True)
class HeadMap:
    """One quantity of heads, and its scale of colours, which is the same at every length.

    Attributes:
        name: what the map is called.
        value: the quantity; None where a head has none.
        text: how a value is shown.
        low: the value with the first colour; smaller ones have it too.
        high: the value with the last colour.
        logarithmic: whether the colours are even in the value's logarithm.
    """

    name: str
    value: Callable[[HeadReport], float | None]
    text: Callable[[float], str]
    low: float
    high: float
    logarithmic: bool = True

    def level(self, value: float) -> int:
        """The number of a value's colour, from 0 to `LEVELS` - 1."""
        clipped = min(max(value, self.low), self.high)
        scale = math.log if self.logarithmic else float
        low, high = scale(self.low), scale(self.high)
        share = (scale(clipped) - low) / (high - low) if high > low else 0.0
        return round(share * (LEVELS - 1))


def head_maps(report: Report) -> list[HeadMap]:
    """The maps of tau, density and error; the last one ends at the largest error of any head of the report."""
    errors = [head.error for length in report.lengths for layer in length.layers for head in layer.heads]
    highest = max(errors, default=0.0) or report.budget.value
    return [
        HeadMap("tau", _threshold, two_digits, TAUS[0], TAUS[-1]),
        HeadMap("density", lambda head: head.density, lambda value: f"{value:.2f}", 0.0, 1.0, logarithmic=False),
        HeadMap(report.budget.unit, lambda head: head.error, _short, highest / 10**DECADES, highest),
    ]


def _threshold(head: HeadReport) -> float | None:
    return None if head.mode == "dense" else head.tau


def colours() -> list[tuple[str, str]]:
    """For each level its colour, and black or white, whichever is easier to read on it."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    backgrounds = [colormaps[COLOURS](level / (LEVELS - 1))[:3] for level in range(LEVELS)]
    return [(to_hex(rgb), "#000000" if _luminance(rgb) > EQUAL_CONTRAST else "#ffffff") for rgb in backgrounds]


def _luminance(colour: tuple[float, ...]) -> float:
    """The relative luminance of an sRGB colour, as the Web Content Accessibility Guidelines define it."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _short(error: float) -> str:
    """3e-4, as narrow as it can be; 0 for a head without an error."""
    return f"{error:.0e}".replace("e-0", "e-").replace("e+0", "e+") if error else "0"
