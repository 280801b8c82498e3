"""A picture of the thresholds in a profile."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from calibrate.curves.curves import TAUS
from calibrate.report.figures import BAR, COLOURS, panels, png, svg, whole_numbers
from s2o_runtime.profile import Profile

if TYPE_CHECKING:
    from matplotlib.figure import Figure


CAPTION = "The threshold of every head at every length: the larger, the more a head skips; a cross is a dense head."


def tau_picture(profile: Profile) -> bytes:
    """A PNG: for each length a map of layers and heads, coloured by tau.

    A dense head has a cross, another one without a threshold a ring.
    """
    return png(lambda figure: _draw(figure, profile), f"{profile.model_name} on {profile.device}")


def tau_element(profile: Profile) -> str:
    """The same as an SVG element."""
    return svg(lambda figure: _draw(figure, profile), f"{profile.model_name} on {profile.device}", "tau", CAPTION)


def _draw(figure: Figure, profile: Profile) -> None:
    from matplotlib.colors import LogNorm

    norm = LogNorm(TAUS[0], TAUS[-1], clip=True)  # a tau of 0 has the colour of the smallest
    titles = [f"{length} tokens" for length in profile.lengths]
    all_axes = panels(figure, titles, (5.0, 4.0), x="head", y="layer")
    for axes, layers in zip(all_axes, profile.layers, strict=True):
        taus = [
            [max(head.tau, TAUS[0]) if head.has_threshold else math.nan for head in layer.heads] for layer in layers
        ]
        image = axes.imshow(taus, norm=norm, cmap=COLOURS, aspect="auto", interpolation="nearest")
        heads = [(head, x, y) for y, layer in enumerate(layers) for x, head in enumerate(layer.heads)]
        for is_dense, marker in ((True, "x"), (False, "o")):
            marked = [(x, y) for head, x, y in heads if not head.has_threshold and (head.mode == "dense") == is_dense]
            look: dict[str, Any] = {"color": "black"} if is_dense else {"edgecolors": "black", "facecolors": "none"}
            axes.scatter([x for x, _ in marked], [y for _, y in marked], marker=marker, lw=0.8, s=12, **look)
        whole_numbers(axes.xaxis)
        whole_numbers(axes.yaxis, [profile.geometry.layer_number(index) for index in range(len(layers))])
    figure.colorbar(image, ax=all_axes, label="tau (cross: dense head; ring: linear tail)", **BAR)
