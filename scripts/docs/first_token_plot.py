"""The picture of README: time to the first token against a prompt's length, cold and as a turn, stock and with S2O."""

from __future__ import annotations

import math
from collections import defaultdict
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from scripts.bench.first_token import OFF, S2O, STOCK, FirstTokenFile, FirstTokens, compare_turns
from scripts.docs.raw import RESULTS, result_file

PICTURE = RESULTS / "first-token.svg"
INK = "#808080"  # text and lines that read on white and on dark pages
STYLE: dict[Any, Any] = {  # of matplotlib
    "svg.hashsalt": "s2o",
    "font.size": 12,  # readable at a width of 400 pixels
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), INK
    ),
}
MODELS = {  # what is drawn, by the name that the bench was given; a row of panels for each model that was measured
    "qwen2.5-coder-1.5b-dequantised-q4": "Qwen2.5-Coder-1.5B",
    "qwen2.5-coder-1.5b-dequantised-q4-yarn": "Qwen2.5-Coder-1.5B",  # the same model, for longer prompts
    "qwen3-30b-a3b": "Qwen3-30B-A3B's sizes",
}
TURN = 2048  # new tokens behind a cached prefix
CHUNK = 8192  # tokens that a server reads at once, at most
KINDS = {"cold": "cold prompt", "turn": f"turn of {TURN} tokens"}  # which is behind a cached prefix


class EnginePair(NamedTuple):
    """Both engines at one length; off: S2O's with requests that opt out of it, the stock one in older files."""

    stock: FirstTokens
    s2o: FirstTokens
    off: FirstTokens

    def describe_gain(self) -> str:
        """Return how many times as fast S2O's first token was, with a 95% interval where each turn is recorded."""
        if not self.off.turns:
            return f"{self.off.seconds.median / self.s2o.seconds.median:.2f}x"
        return "{:.2f}x\n({:.2f}-{:.2f})".format(*compare_turns(self.off.turns, self.s2o.turns))


def find_points(model: str, kind: str) -> tuple[str, dict[int, EnginePair]]:
    """Return on which GPU and within which budget a model was measured, and its points by length.

    Numbers of different GPUs or budgets are never in one line: the pair with most lengths is taken, of equal ones the
    newest. There are no points where nothing was measured.
    """
    by_setting: defaultdict[str, dict[int, EnginePair]] = defaultdict(dict)
    files = [result_file(FirstTokenFile, path.name) for path in sorted(RESULTS.glob("first-token-*.json"))]
    for file in sorted(files, key=lambda file: file.date):  # the newest last, which counts
        if MODELS.get(file.settings["model"]) != model:
            continue
        rows = {(row.kind, row.engine): row for row in file.rows if row.kind.chunk <= CHUNK}
        for (of, engine), stock in sorted(rows.items(), key=lambda item: item[0][0].chunk):
            new = of.length - round(of.hit * of.length)
            if engine == STOCK and (new == TURN and of.hit > 0 if kind == "turn" else of.hit == 0 and new >= CHUNK):
                point = EnginePair(stock, rows[of, S2O], rows.get((of, OFF), stock))
                by_setting[_describe_setting(file)][of.length] = point
    setting = max(reversed(by_setting), key=lambda setting: len(by_setting[setting]), default="")
    return setting, dict(sorted(by_setting[setting].items()))


def _describe_setting(file: FirstTokenFile) -> str:
    gpu = file.device if isinstance(file.device, str) else str(file.device["name"])
    profile, density = file.settings["profile"], file.settings["density"]
    kind, _, value = Path(profile or "").stem.rpartition("-")
    budget = f"random weights, density {density:g}" if density else f"{kind.replace('-', '_')} {float(value):g}"
    return f"{gpu.removeprefix('NVIDIA ').split(' ')[0]}, {budget}"


def make_picture() -> bytes:
    """Return the picture as SVG, the same bytes for the same raw files."""
    panels = [(model, kind, *find_points(model, kind)) for model in dict.fromkeys(MODELS.values()) for kind in KINDS]
    panels = [panel for panel in panels if panel[3]]
    rows = math.ceil(len(panels) / 2)
    file = BytesIO()
    with rc_context(STYLE):
        figure = Figure((7.2, 3.9 * rows), layout="constrained")
        for place, panel in enumerate(panels, 1):
            _draw_panel(figure.add_subplot(rows, 2, place), *panel)
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _draw_panel(axes: Axes, model: str, kind: str, setting: str, points: dict[int, EnginePair]) -> None:
    """Draw seconds over tokens on log axes: medians, and bars from the lower to the upper quartile."""
    for name, label, colour, marker in (("stock", "stock vLLM", INK, "s"), ("s2o", "with S2O", "#2f81f7", "o")):
        spreads = [getattr(point, name).seconds for point in points.values()]
        medians = [spread.median for spread in spreads]
        bars = [[spread.median - spread.p25 for spread in spreads], [spread.p75 - spread.median for spread in spreads]]
        axes.errorbar(list(points), medians, bars, color=colour, marker=marker, lw=2, capsize=3, label=label)
    for length, point in points.items():
        place, slower = (length, point.s2o.seconds.median), point.s2o.seconds.median > point.stock.seconds.median
        beside: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "bottom" if slower else "top"}
        axes.annotate(point.describe_gain(), place, (0, 8 if slower else -8), color="#2f81f7", **beside)
    axes.set(xscale="log", yscale="log", xlabel="tokens of the prompt", ylabel="seconds to the first token")
    axes.set_title(f"{KINDS[kind]}\n{model}\n{setting}", fontsize="medium")
    axes.set_xticks(list(points), [str(length) for length in points])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.margins(0.25, 0.35)
