"""Find the fastest setting of each method that was measured: at equal error, and under chunks.

Nothing is interpolated. With each row the command is printed that measures it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from scripts.bench.schema import CALIBRATED, DENSE_NAMES, EVERYTHING, PROVEN, MethodRow, MethodsEntry

POINT = 0.01  # of the answers, which a setting may lose against dense


def fastest(rows: Iterable[MethodRow], keeps: Callable[[MethodRow], bool] = lambda row: True) -> dict[str, MethodRow]:
    """Of each method the fastest row that is kept, if there is one.

    Of calibrated settings only the proven ones count. Sparse methods whose setting computes everything count as dense.
    """
    best: dict[str, MethodRow] = {}
    for row in sorted(rows, key=lambda row: row.seconds):
        counts = row.density < EVERYTHING or row.method in DENSE_NAMES
        if counts and (row.method != CALIBRATED or row.setting.endswith(PROVEN)) and keeps(row):
            best.setdefault(row.method, row)
    return best


def at_error(rows: Iterable[MethodRow], error: float) -> dict[str, MethodRow]:
    """The fastest rows with a rel_mse of at most `error`."""
    return fastest(rows, lambda row: row.rel_mse <= error)


def differences(entry: MethodsEntry, evaluation: Mapping[str, Any]) -> dict[str, float]:
    """The share of questions that each variant answers more than dense, by `identity_of`.

    Args:
        entry: what was timed.
        evaluation: the summary.json of s2o-eval, whose variants answered the same questions. A profile is told by the
            digest of its file, another setting by its text.
    """
    identities = {variant["name"]: variant["identity"] for variant in evaluation["variants"]}
    answered = [row for row in evaluation["quality"] if row["length"] == entry.length and "difference" in row]
    return {identities[row["variant"]]: row["difference"] for row in answered}


def identity_of(row: MethodRow) -> str:
    """Return what s2o-eval tells a row's variant by: the digest of a profile's file, or a setting's text."""
    return row.profile or text_of(row.method, row.setting)


def text_of(method: str, setting: str) -> str:
    """A setting as `--methods` and s2o-eval's `--setting` take it; those of S2O begin with no name."""
    return setting if method.startswith("S2O") else f"{method}:{setting}"


def candidates(rows: Sequence[MethodRow], errors: Iterable[float]) -> list[MethodRow]:
    """Return what is worth running in chunks and on questions: the rows at each error, each method's fastest."""
    chosen = [row for board in (*(at_error(rows, error) for error in errors), fastest(rows)) for row in board.values()]
    return [row for row in rows if row in chosen]


def print_boards(entry: MethodsEntry, errors: Iterable[float]) -> None:
    """Print the boards of a length: at each of these rel_mse, and under chunks."""
    for error in errors:
        print_rows(f"{entry.length} tokens, rel_mse of at most {error:g}", at_error(entry.rows, error).values())
    whole = min((row.seconds for row in entry.rows if row.method in DENSE_NAMES), default=0.0)
    for chunk, turn in dict.fromkeys((row.chunk, row.turn) for row in entry.chunked):
        of_calls = f"in chunks of {chunk} (dense whole {1e3 * whole:.2f} ms)" if chunk else f"the last {turn} alone"
        rows = [row for row in entry.chunked if (row.chunk, row.turn) == (chunk, turn)]
        print_rows(f"{entry.length} tokens, {of_calls}", rows)


def print_rows(title: str, rows: Iterable[MethodRow]) -> None:
    """Print rows of measurements, and below each the command that measures it again."""
    print(f"{title}: method, setting, ms (selecting), against dense, density, rel_mse, worst row")
    for row in rows:
        speedup = "-" if row.speedup is None else f"{row.speedup:.2f}x"
        print(
            f"  {row.method:24} {row.setting:48} {row.seconds * 1e3:9.2f} ({row.selecting_seconds * 1e3:6.2f})"
            f" {speedup:>7} {row.density:6.3f} {row.rel_mse:9.2e} {row.worst:8.2e}\n    {row.command}",
            flush=True,
        )
