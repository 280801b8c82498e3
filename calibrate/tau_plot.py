"""A picture of the thresholds in a profile."""

from __future__ import annotations

import math
from io import BytesIO

from calibrate.curves import TAUS
from calibrate.plots import BAR, COLOURS, DPI, panels_of, whole_numbers
from s2o_runtime.errors import InputError
from s2o_runtime.profile import Profile


def drawn(profile: Profile) -> bytes:
    """A PNG: layers x heads for each length, coloured by tau, a cross on every dense head. Raises InputError without
    matplotlib."""
    try:
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise InputError("a picture needs matplotlib: pip install matplotlib") from error

    figure = Figure(layout="constrained")
    norm = LogNorm(TAUS[0], TAUS[-1], clip=True)  # 0 is at its lower end
    lengths = [{"length": length, "calibrated": True} for length in profile.lengths]
    panels = panels_of(figure, lengths, (5.0, 4.0), "head", "layer")
    for (axes, _), bucket in zip(panels, profile.layers, strict=True):
        taus = [[math.nan if h.mode == "dense" else max(h.tau, TAUS[0]) for h in layer.heads] for layer in bucket]
        image = axes.imshow(taus, norm=norm, cmap=COLOURS, aspect="auto", interpolation="nearest")
        dense = [(x, y) for y, layer in enumerate(bucket) for x, head in enumerate(layer.heads) if head.mode == "dense"]
        axes.scatter([x for x, _ in dense], [y for _, y in dense], marker="x", color="black", lw=0.8, s=12)
        whole_numbers(axes.xaxis, axes.yaxis)
    figure.colorbar(image, ax=[axes for axes, _ in panels], label="tau (cross: dense head)", **BAR)
    figure.suptitle(f"{profile.model_name} on {profile.device}", fontsize="medium", parse_math=False)
    file = BytesIO()
    figure.savefig(file, format="png", dpi=DPI)
    return file.getvalue()
