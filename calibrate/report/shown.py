"""How a profile is shown: as lines and a table, and as a whole in JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from calibrate.report.certified import adjusted_on, statement
from calibrate.report.summary import summary
from calibrate.tables import Number, Table, formatted, kept_of
from s2o_runtime.config import plain
from s2o_runtime.profile import Profile, described

COLUMNS = (
    "length", "tau", "dense\nheads", "tails", "density", "of", "error /\nlimit", "worst\nrow", "needles", "KL"
)  # fmt: skip


def summary_parts(profile: Profile) -> Iterator[Table | str]:
    """The summary in lines and a table, with what was proven."""
    contents = summary(profile)
    for name in ("model", "architecture", "device", "budget", "objective", "proof"):
        yield f"{name:<12}  {contents[name] or 'not recorded'}"
    if (contents["proof"] or "").startswith("held out"):
        yield statement(profile.record.certificate, adjusted_on(profile.record))
    yield from (f"not proven: {sentence}" for sentence in (*contents["problems"], *contents["not_proven"]))
    if contents["retiled"]:
        yield contents["retiled"]
    if contents["unsupported_heads"]:
        count = contents["unsupported_heads"]
        yield f"dense here: {count} heads, whose tail, grain or representatives this version does not have"
    yield Table(COLUMNS, [length_cells(row) for row in contents["lengths"]])
    yield f"prompts below {profile.min_length} tokens stay dense"


def exported(profile: Profile) -> dict[str, Any]:
    """A profile as JSON: the fields of the file's document, and `buckets` with every layer in place of the tensors."""
    buckets = [
        {"length": length, "layers": [plain(layer) for layer in bucket]}
        for length, bucket in zip(profile.lengths, profile.layers, strict=True)
    ]
    document = described(profile)
    record = document.pop("record")
    return document | {"buckets": buckets, "record": record}


def length_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of `COLUMNS` for one of `summary`'s lengths."""
    return (
        str(row["length"]),
        tau_range(row["tau_min"], row["tau_max"]),
        f"{row['dense_heads']} of {row['heads']}",
        str(row["tails"]),
        formatted(row["density"], ".3f"),
        row["density_is"] or "-",
        formatted(row["error_over_limit"], ".0%"),
        formatted(row["worst"], ".2g"),
        "-" if row["needles"] is None else kept_of(*row["needles"]),
        formatted(row["kl"], ".1e"),
    )


def tau_range(smallest: float | None, largest: float | None) -> str:
    """Both thresholds, of which the smallest is what tables are sorted by; "-" without thresholds."""
    if smallest is None or largest is None:
        return "-"
    return Number(f"{two_digits(smallest)} .. {two_digits(largest)}", smallest)


def two_digits(tau: float) -> str:
    """A threshold as it is shown."""
    return f"{float(f'{tau:.2g}'):g}"  # 150, not 1.5e+02


def times(ratio: float | None) -> str:
    """2.0 -> "2.00x"; "-" for None."""
    return "-" if ratio is None else Number(f"{ratio:.2f}x", ratio)
