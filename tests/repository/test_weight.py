"""The gate on weight: how much code each room may have. Run as a script, it prints the table: `make check` does."""

import ast
import io
import math
import token
import tokenize
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
SLACK = 1.03  # a cap further above what is there than this must be lowered: caps fall with every step
UNALLOCATED = "unallocated"  # code lines that no room has yet: a cap that rises takes them from here

# Room -> the most lines of code, and the most tokens a line (so that nothing is gained by longer lines). A file counts
# in the longest room that its path begins with. A cap rises only where another falls by as much, or with UNALLOCATED.
CAPS: dict[str, tuple[int, float]] = {
    "calibrate": (1835, 9.9),
    "calibrate/commands": (640, 8.8),
    "calibrate/curves": (652, 12.2),
    "calibrate/evaluation": (937, 10.9),
    "calibrate/model": (1507, 9.8),
    "calibrate/profiles": (361, 9.9),
    "calibrate/prompts": (976, 11.8),
    "calibrate/proof": (1901, 11.0),
    "calibrate/report": (1369, 10.3),
    "calibrate/search": (872, 10.6),
    "calibrate/work": (484, 9.7),
    "s2o_runtime": (1720, 9.8),
    "s2o_runtime/attention": (660, 10.6),
    "s2o_runtime/doctor": (543, 9.2),
    "s2o_runtime/huggingface": (1191, 9.7),
    "s2o_runtime/kernels": (2298, 12.4),
    "s2o_runtime/monitor": (506, 11.6),
    "s2o_runtime/profile": (568, 9.6),
    "s2o_runtime/reference": (404, 12.9),
    "s2o_runtime/serving": (971, 10.3),
    "s2o_runtime/sglang": (464, 9.3),
    "s2o_runtime/vllm": (540, 8.9),
    "scripts": (248, 9.0),
    "scripts/bench": (1428, 11.3),
    "scripts/bench/baselines": (1114, 12.5),
    "scripts/demo_model": (357, 10.5),
    "scripts/docs": (744, 10.4),
    "scripts/study": (115, 13.1),
    "tests": (17590, 12.4),
    "tests/support": (1879, 12.1),
    UNALLOCATED: (34, 0.0),
}

FSTRING_START, FSTRING_END = getattr(token, "FSTRING_START", None), getattr(token, "FSTRING_END", None)
CODE = {token.OP, token.NAME, token.NUMBER, token.STRING, FSTRING_START}


class Weight(NamedTuple):
    """The weight of some sources: lines that have code, and tokens of code."""

    lines: int
    tokens: int

    @property
    def tokens_per_line(self) -> float:
        """Tokens a line of code, rounded up to tenths; 0.0 without code."""
        return math.ceil(round(10 * self.tokens / self.lines, 6)) / 10 if self.lines else 0.0


def weigh(text: str) -> Weight:
    """Count code as tinygrad's sz.py does: neither comments, docstrings and blank lines nor line breaks.

    A string that is a statement is a docstring. An f-string is one token on every Python, as it is up to 3.11.
    """
    docstrings = {
        (node.lineno, node.col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    tokens, lines, fstrings = 0, set(), 0
    for item in tokenize.generate_tokens(io.StringIO(text).readline):
        if fstrings or (item.type in CODE and item.start not in docstrings):
            tokens += not fstrings
            lines.update(range(item.start[0], item.end[0] + 1))
        fstrings += (item.type == FSTRING_START) - (item.type == FSTRING_END)
    return Weight(len(lines), tokens)


def room_of(path: str) -> str:
    """Return the longest room that a path in the repository begins with."""
    return max((room for room in CAPS if path.startswith(f"{room}/")), key=len)


def weigh_rooms() -> dict[str, Weight]:
    """Return what each room of `CAPS` weighs now."""
    weights = {room: Weight(0, 0) for room in CAPS if room != UNALLOCATED}
    for package in sorted({room.partition("/")[0] for room in weights}):
        for path in (ROOT / package).rglob("*.py"):
            room, weight = room_of(path.relative_to(ROOT).as_posix()), weigh(path.read_text(encoding="utf-8"))
            weights[room] = Weight(weights[room].lines + weight.lines, weights[room].tokens + weight.tokens)
    return weights


def violations(caps: dict[str, tuple[int, float]], weights: dict[str, Weight]) -> list[str]:
    """Return a sentence for each number over its cap, and for each cap with more slack than `SLACK`."""
    sentences = []
    for room, weight in weights.items():
        counts = ((weight.lines, caps[room][0], "lines"), (weight.tokens_per_line, caps[room][1], "tokens a line"))
        for count, cap, unit in counts:
            if count > cap:
                sentences.append(f"{room} has {count} {unit}, its cap is {cap}: take away as much as you add")
            elif cap > math.ceil(10 * SLACK * count) / 10:
                sentences.append(f"{room} has {count} {unit}, its cap is {cap}: lower the cap to {count}")
    return sentences


def test_every_room_is_within_its_cap_and_every_cap_is_close():
    assert not violations(CAPS, weigh_rooms())


@pytest.mark.parametrize(
    ("lines", "tokens", "sentences"),
    [
        (100, 1000, []),
        (97, 970, []),  # within the slack
        (101, 1000, ["a has 101 lines, its cap is 100: take away as much as you add"]),
        (100, 1001, ["a has 10.1 tokens a line, its cap is 10.0: take away as much as you add"]),
        (96, 960, ["a has 96 lines, its cap is 100: lower the cap to 96"]),
        (100, 960, ["a has 9.6 tokens a line, its cap is 10.0: lower the cap to 9.6"]),
    ],
)
def test_a_cap_holds_in_both_directions(lines, tokens, sentences):
    assert violations({"a": (100, 10.0)}, {"a": Weight(lines, tokens)}) == sentences


@pytest.mark.parametrize(
    ("text", "lines", "tokens"),
    [
        ('"""Module."""\n\n# why\nx = 1  # what\n', 1, 3),
        ('def f():\n    """Two\n    lines."""\n    return """\n    data"""\n', 3, 7),
        ("f(\n    a,\n\n    b,\n)\n", 4, 7),
        ("x = f'{a + b} of {c!r:>{width}}'\n", 1, 3),
        ("x = f'''{a}\nof\n'''\n", 3, 3),
        ("'a'.join(b)\n", 1, 6),
        ("x = 1; y = 2\n", 1, 7),
    ],
)
def test_code_is_counted_in_lines_and_tokens(text, lines, tokens):
    assert weigh(text) == Weight(lines, tokens)


def print_table() -> None:
    """Print each room's code lines and tokens a line beside their caps, and the sums of packages."""
    weights = weigh_rooms()
    print(f"{'room':<28}{'lines':>8}{'cap':>8}{'tokens':>9}{'cap':>7}")
    for room, (cap, density_cap) in CAPS.items():
        weight = weights.get(room, Weight(0, 0))
        print(f"{room:<28}{weight.lines:>8}{cap:>8}{weight.tokens_per_line:>9}{density_cap:>7}")
    source = [room for room in CAPS if room.partition("/")[0] in ("calibrate", "s2o_runtime", UNALLOCATED)]
    for name, rooms in {"source": source, "all": list(CAPS)}.items():
        lines = sum(weights[room].lines for room in rooms if room in weights)
        print(f"{name:<28}{lines:>8}{sum(CAPS[room][0] for room in rooms):>8}")


if __name__ == "__main__":
    print_table()
