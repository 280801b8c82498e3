"""A picture of the thresholds in a profile."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from calibrate.curves.curves import TAUS
from calibrate.report.figures import BAR, COLOURS, panels, png, whole_numbers
from s2o_runtime.profile import Profile

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def tau_picture(profile: Profile) -> bytes:
    """A PNG: for each length a map of layers and heads, coloured by tau.

    A dense head has a cross, another one without a threshold a ring.
    """
    return png(lambda figure: _draw(figure, profile), f"{profile.model_name} on {profile.device}")


def _draw(figure: Figure, profile: Profile) -> None:
    from matplotlib.colors import LogNorm

    norm = LogNorm(TAUS[0], TAUS[-1], clip=True)  # a tau of 0 has the colour of the smallest
    titles = [f"{length} tokens" for length in profile.lengths]
    all_axes = panels(figure, titles, (5.0, 4.0), x="head", y="layer")
    for axes, layers in zip(all_axes, profile.layers, strict=True):
        taus = [
            [max(head.tau, TAUS[0]) if head.mode == "s2o" else math.nan for head in layer.heads] for layer in layers
        ]
        image = axes.imshow(taus, norm=norm, cmap=COLOURS, aspect="auto", interpolation="nearest")
        dense = [(x, y) for y, layer in enumerate(layers) for x, head in enumerate(layer.heads) if head.mode == "dense"]
        axes.scatter([x for x, _ in dense], [y for _, y in dense], marker="x", lw=0.8, s=12, color="black")
        whole_numbers(axes.xaxis)
        whole_numbers(axes.yaxis, [profile.geometry.layer_number(index) for index in range(len(layers))])
    figure.colorbar(image, ax=all_axes, label="tau (cross: dense head)", **BAR)
