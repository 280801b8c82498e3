"""The pictures of an evaluation: needles by depth and length, agreement and perplexity by position, time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from textwrap import fill
from typing import TYPE_CHECKING, Any

from calibrate.report.figures import BAR, COLOURS, png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from calibrate.evaluation.results import Row, Summary

WRAP = 34  # characters of a variant's name in one line
MARKERS = "osD^vPX*"
LOWEST_KL = 1e-7  # nats, where the axis ends: what is below is rounding
PANEL = (4.3, 3.4)  # inches of one length's axes
COLUMNS = 3
LINE, LETTER, HANDLE = 0.17, 0.075, 0.55  # inches: a legend's line, a letter of it, what stands before an entry


def pictures(summary: Summary) -> dict[str, bytes]:
    """PNG files by name, of what was measured."""
    draws = {
        "needles": (draw_needles, bool(summary["heat"])),
        "agreement": (draw_agreement, bool(summary["agreement"])),
        "perplexity": (draw_perplexity, _compares(summary["perplexity"])),
        "time": (draw_time, bool(summary["agreement"]) and _compares(summary["time"])),
    }
    title = f"{summary['model']} on {summary['device']}"
    return {
        name: png(partial(draw, summary=summary), title, pad=0.1)  # so that the ticks of two axes do not touch
        for name, (draw, has_data) in draws.items()
        if has_data
    }


def draw_needles(figure: Figure, summary: Summary) -> None:
    """A heat map for each variant: length across, depth down, the share of needles found as colour and number."""
    first = summary["heat"][0]
    across, down = len(first["lengths"]), len(first["depths"])
    size = (min(max(0.75 * across, 2.6), 7.0), min(max(0.42 * down, 1.6), 5.0))
    panels = _grid(figure, len(summary["heat"]), size, sharey=True)
    for index, (axes, heat) in enumerate(zip(panels, summary["heat"], strict=True)):
        image = axes.imshow(heat["accuracy"], vmin=0, vmax=1, cmap=COLOURS, aspect="auto", interpolation="nearest")
        for y, row in enumerate(heat["accuracy"]):
            for x, share in enumerate(row):
                colour = "black" if share > 0.6 else "white"
                axes.text(x, y, f"{share:.0%}", ha="center", va="center", color=colour, fontsize="small")
        axes.set_xticks(range(across), [_tokens(length) for length in heat["lengths"]])
        axes.set_yticks(range(down), [f"{depth:.0%}" for depth in heat["depths"]])
        axes.set_title(_wrapped(heat["variant"], WRAP), fontsize="small", parse_math=False)
        axes.set(xlabel="prompt length [tokens]", ylabel="" if index % COLUMNS else "depth of the needle")
    label = f"needles found, of {first['samples']} each"
    figure.colorbar(image, ax=list(panels), label=label, format="{x:.0%}", **BAR)


def draw_agreement(figure: Figure, summary: Summary) -> None:
    """Above KL from the dense model's predictions, below the share of other most likely tokens, by position."""
    rows = summary["agreement"]
    lengths = _lengths(rows)
    columns = min(COLUMNS, len(lengths))
    bands = -(-len(lengths) // columns)
    figure.set_size_inches(PANEL[0] * columns + 0.4, (2 * PANEL[1] - 1.4) * bands + 0.8)
    grid = figure.subplots(2 * bands, columns, squeeze=False)
    for index, length in enumerate(lengths):
        band, column = divmod(index, columns)
        kl, top1 = grid[2 * band][column], grid[2 * band + 1][column]
        if index:
            kl.sharey(grid[0][0])
            top1.sharey(grid[1][0])
        for style, row in _styled(summary, rows, length):
            middles = [(part["from"] + part["to"]) / 2 for part in row["parts"]]
            kl.plot(middles, [max(part["kl"], LOWEST_KL) for part in row["parts"]], **style)
            top1.plot(middles, [1 - part["top1"] for part in row["parts"]], **style)
        kl.set_title(f"{length} tokens", fontsize="medium")
        kl.set(yscale="log", ylabel="" if column else "KL from dense [nats]")
        top1.set(ylabel="" if column else "other top-1 than dense")
        top1.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
        for axes in (kl, top1):
            _position_axis(axes, length)
            axes.grid(alpha=0.3)
        kl.set_xlabel("")
        kl.tick_params(labelbottom=False)
    grid[1][0].set_ylim(bottom=0)
    for unused in grid.reshape(bands, 2, columns)[-1, :, (len(lengths) - 1) % columns + 1 :].flat:
        unused.remove()
    _legend(figure, grid[0][0])


def draw_perplexity(figure: Figure, summary: Summary) -> None:
    """How much larger the loss on held-out text is than the dense model's, in nats a token, by position."""
    rows = [row for row in summary["perplexity"] if row["variant"] != summary["variants"][0]["name"]]
    lengths = _lengths(rows)
    panels = _grid(figure, len(lengths), PANEL, sharey=True)
    for axes, length in zip(panels, lengths, strict=True):
        axes.axhline(0, color="black", lw=1, ls="--", label="dense")
        for style, row in _styled(summary, rows, length):
            middles = [(part["from"] + part["to"]) / 2 for part in row["parts"]]
            axes.plot(middles, [part["nll"] - part["dense_nll"] for part in row["parts"]], **style)
        dense = next(row["dense_perplexity"] for row in rows if row["length"] == length)
        axes.set_title(f"{length} tokens, dense perplexity {dense:.3g}", fontsize="medium")
        _position_axis(axes, length)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("more loss than dense [nats a token]")
    panels[0].margins(y=0.15)
    _legend(figure, panels[0])


def draw_time(figure: Figure, summary: Summary) -> None:
    """Speed against quality: the speedup to the first token, and KL from the dense model."""
    seconds = {(row["variant"], row["length"]): row for row in summary["time"]}
    lengths = [length for length in _lengths(summary["agreement"]) if length in _lengths(summary["time"])]
    panels = _grid(figure, len(lengths), PANEL, sharey=True)
    for axes, length in zip(panels, lengths, strict=True):
        axes.axvline(1, color="black", lw=1, ls="--", label="dense")
        for style, row in _styled(summary, summary["agreement"], length):
            speedup = seconds[row["variant"], length]["speedup"]
            axes.plot(speedup, max(row["kl"], LOWEST_KL), **style | {"ls": "", "ms": 8})
        dense = seconds[summary["variants"][0]["name"], length]["seconds"]
        axes.set_title(f"{length} tokens, dense {dense * 1e3:.0f} ms", fontsize="medium")
        axes.set_xlabel("speedup over dense, to the first token")
        axes.xaxis.set_major_formatter("{x:g}x")
        axes.grid(alpha=0.3)
        axes.margins(x=0.15)
    panels[0].set(yscale="log", ylabel="KL from dense [nats]")
    panels[0].margins(y=0.3)
    _legend(figure, panels[0])


def _grid(figure: Figure, count: int, size: tuple[float, float], *, sharey: bool) -> list[Axes]:
    """Axes of about `size` inches, at most `COLUMNS` side by side."""
    columns = min(COLUMNS, count)
    rows = -(-count // columns)
    figure.set_size_inches(size[0] * columns + 1.4, (size[1] + 0.7) * rows + 0.5)
    axes = list(figure.subplots(rows, columns, sharey=sharey, squeeze=False).flat)
    for unused in axes[count:]:
        unused.remove()
    return axes[:count]


def _styled(summary: Summary, rows: Sequence[Row], length: int) -> list[tuple[dict[str, Any], Row]]:
    """The rows of a length with their variant's colour and marker, the same in every picture."""
    indices = {variant["name"]: index for index, variant in enumerate(summary["variants"])}
    return [(_style(row["variant"], indices[row["variant"]] - 1), row) for row in rows if row["length"] == length]


def _style(name: str, index: int) -> dict[str, Any]:
    return {
        "color": f"C{index % 10}",
        "marker": MARKERS[index % len(MARKERS)],
        "ms": 4.5,
        "lw": 1.2,
        "label": _wrapped(name, 2 * WRAP),
        "clip_on": False,
    }


def _legend(figure: Figure, axes: Axes) -> None:
    """A legend below the axes, in as many columns as fit; the figure grows by its lines."""
    handles, labels = axes.get_legend_handles_labels()
    label_lines = [label.splitlines() for label in labels]
    width, height = figure.get_size_inches()
    columns = max(1, int(width / (LETTER * max(len(line) for lines in label_lines for line in lines) + HANDLE)))
    rows = -(-len(labels) // columns) * max(map(len, label_lines))
    figure.set_size_inches(width, height + LINE * rows)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize="small")


def _position_axis(axes: Axes, length: int) -> None:
    axes.set_xlim(0, length)
    axes.set_xticks([index * length / 4 for index in range(5)])
    axes.xaxis.set_major_formatter(lambda value, _: _tokens(round(value)))
    axes.set_xlabel("position [tokens]")


def _wrapped(name: str, width: int) -> str:
    """A variant's name in lines that end between settings."""
    return fill(name.replace(",", ", "), width, break_on_hyphens=False)


def _tokens(count: int) -> str:
    return f"{count / 1024:g}K" if count >= 1024 and count % 256 == 0 else str(count)


def _lengths(rows: Sequence[Row]) -> list[int]:
    return sorted({row["length"] for row in rows})


def _compares(rows: Sequence[Row]) -> bool:
    return len({row["variant"] for row in rows}) > 1
