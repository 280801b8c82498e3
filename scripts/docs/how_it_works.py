#!/usr/bin/env python3
"""Draw docs/how-it-works.svg: one segment of queries, from ranking to tail.

    python -m scripts.docs.how_it_works            writes the picture
    python -m scripts.docs.how_it_works --check    writes nothing, and fails if the picture is another

The weights of the 24 steps of keys are made up; order, gains and stop follow from them by the stop rule REST.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from s2o_runtime.files import write_atomically

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "how-it-works.svg"
WEIGHTS = (30, 2, 1, 1, 9, 1, 2, 1, 1, 24, 16, 1, 2, 1, 1, 1, 12, 1, 3, 1, 2, 4, 7, 10)  # of the prefix's steps
WINDOW = 60  # the weight of the segment itself, which is computed first
CHUNK = 3  # steps between two stop checks
TAU = 0.3
STEP, LEFT, TOP = 26, 30, 70  # pixels
VISITED, SKIPPED, DENSE, INK = "#3f6fb5", "#d5d9e0", "#e08a2c", "#22262c"


def order() -> list[int]:
    """The steps of the prefix, heavy ones first."""
    return sorted(range(len(WEIGHTS)), key=lambda step: (-WEIGHTS[step], step))


def gains() -> list[float]:
    """Of each chunk, in the order of visits: what it adds to the sum, relative to what was there."""
    total, out = float(WINDOW), []
    ranked = order()
    for first in range(0, len(ranked), CHUNK):
        added = sum(WEIGHTS[step] for step in ranked[first : first + CHUNK])
        out.append(added / total)
        total += added
    return out


def stop() -> int:
    """Chunks that are visited: REST stops once all chunks left would gain less than tau, if each gained as the last."""
    chunks = gains()
    return next(count for count, gain in enumerate(chunks, 1) if gain * (len(chunks) - count) < TAU)


def drawing() -> str:
    """The picture."""
    ranked, chunks, visited_chunks = order(), gains(), stop()
    visited = ranked[: visited_chunks * CHUNK]
    place = {step: number for number, step in enumerate(ranked, 1)}
    shapes = [*_keys(visited, place), *_visits(chunks, visited_chunks)]
    body = "\n".join(f"  {shape}" for shape in shapes)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 470" font-family="sans-serif" font-size="13" '
        f'fill="{INK}" role="img" aria-label="Rank, window, prefix, stop and tail of one segment">\n'
        f'  <rect width="820" height="470" rx="8" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _keys(visited: Sequence[int], place: dict[int, int]) -> list[str]:
    """The keys where they lie in memory, with their weights and their places in the order."""
    shapes = [_text(LEFT, 28, "1 rank: the segment's mean queries weigh every step of keys before it", bold=True)]
    shapes.append(_text(LEFT, 48, "numbers: the order of visits; the keys stay where they are"))
    base = TOP + 110
    for step, weight in enumerate(WEIGHTS):
        x, height = LEFT + step * STEP, 6 + 3 * weight
        color = VISITED if step in visited else SKIPPED
        shapes.append(_box(x, base - height, STEP - 4, height, color))
        shapes.append(_text(x + (STEP - 4) / 2, base + 16, str(place[step]), middle=True))
    x = LEFT + len(WEIGHTS) * STEP + 10
    shapes.append(f'<path d="M{x} {base}h100v-96z" fill="{DENSE}"/>')
    shapes.append(_text(x, base + 16, "2 window: the"))
    shapes.append(_text(x, base + 33, "segment, dense"))
    shapes.append(
        _text(LEFT, base + 40, "3 prefix: heavy steps are visited first (blue), light ones perhaps never (grey)")
    )
    return shapes


def _visits(chunks: Sequence[float], visited: int) -> list[str]:
    """What every chunk of visits adds, and where it stops."""
    base, width = 420, 70
    shapes = [_text(LEFT, 262, "4 stop: what each chunk of visits adds, next to what is there", bold=True)]
    for number, gain in enumerate(chunks):
        x, height = LEFT + number * width, 105 * gain + 3
        color = VISITED if number < visited else SKIPPED
        shapes.append(_box(x, base - height, width - 12, height, color))
        left = gain * (len(chunks) - number - 1)
        shapes.append(_text(x + (width - 12) / 2, base + 17, f"{left:.2f}", middle=True))
    x = LEFT + visited * width - 6
    shapes.append(f'<path d="M{x} 280V{base + 22}" stroke="{DENSE}" stroke-width="2" stroke-dasharray="5 4"/>')
    shapes.append(_text(x + 8, 292, f"what is left would add less than tau = {TAU:g}"))
    shapes.append(_text(x + 8, 330, "5 tail: the rest is estimated", bold=True))
    shapes.append(_text(x + 8, 350, "from the ranking's weights"))
    shapes.append(
        _text(LEFT, base + 38, "below each chunk: what all keys left would add if each added as much as these")
    )
    return shapes


def _box(x: float, y: float, width: float, height: float, color: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{color}"/>'


def _text(x: float, y: float, text: str, bold: bool = False, middle: bool = False) -> str:
    style = ' font-weight="bold"' * bold + ' text-anchor="middle" font-size="11"' * middle
    return f'<text x="{x:g}" y="{y:g}"{style}>{text}</text>'


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the picture is another")
    if parser.parse_args(argv).check:
        same = PICTURE.is_file() and PICTURE.read_text(encoding="utf-8") == drawing()
        if not same:
            print(f"{PICTURE.name} is not what is drawn: run python -m scripts.docs.how_it_works")
        return int(not same)
    write_atomically(PICTURE, drawing().encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
