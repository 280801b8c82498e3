"""What a profile says of itself: as plain data for JSON and cards, and as lines and a table for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from calibrate.report.certified import adjusted_on, statement
from calibrate.tables import Number, Table, formatted, kept_of
from s2o_runtime.config import HeadConfig, LayerConfig, plain
from s2o_runtime.profile import Profile, described
from s2o_runtime.profile.record import ProvenLength, RecordedBudget

COLUMNS = ("length", "tau", "dense heads", "tails", "density", "of", "error / limit", "worst row", "needles", "KL")


def summary(profile: Profile) -> dict[str, Any]:
    """What a profile says of itself, as JSON; None where its record has no answer."""
    record = profile.record
    buckets = zip(profile.lengths, profile.layers, strict=True)
    return {
        "model": profile.model_name,
        "architecture": str(profile.geometry),
        "fingerprint": profile.fingerprint,
        "device": str(profile.device),
        "budget": _budget(record.budget),
        "objective": record.objective,
        "proof": record.proof,
        "problems": list(record.problems or ()),
        "certificate": record.certificate.to_json() if record.certificate else None,
        "not_proven": list(record.not_proven or ()),
        "retiled": record.retiled.note if record.retiled else None,
        "lengths": [_length(profile, length, bucket) for length, bucket in buckets],
    }


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
        tail_counts(row["tails"], row["linear_tails"]),
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


def tail_counts(tails: int, linear_tails: int) -> Number:
    """The heads with a tail, and beside them those with a linear one: "6+2 lin."."""
    return Number(f"{tails}+{linear_tails} lin." if linear_tails else str(tails), tails + linear_tails)


def times(ratio: float | None) -> str:
    """2.0 -> "2.00x"; "-" for None."""
    return "-" if ratio is None else Number(f"{ratio:.2f}x", ratio)


def _budget(budget: RecordedBudget | None) -> str | None:
    if budget is None or budget.value is None:
        return None
    if budget.kind == "kl":
        return f"KL {budget.value:g} (nats per token)"
    return f"{budget.kind} {budget.value:g} ({budget.scope})"


def _length(profile: Profile, length: int, bucket: Sequence[LayerConfig]) -> dict[str, Any]:
    heads = [head for layer in bucket for head in layer.heads]
    source, densities = profile.record.densities(length, profile.geometry.layers)
    proven = profile.record.proven_at(length) or ProvenLength()
    return {
        "length": length,
        "heads": len(heads),
        **head_counts(heads),
        "density": fmean(densities) if densities else None,
        "density_is": source,
        "layer_densities": densities,
        "error_over_limit": max(_shares_of_limits(profile, proven), default=None),
        "worst": max((layer.worst for layer in proven.layers or () if layer.worst is not None), default=None),
        "needles": None if proven.needles is None else list(proven.needles),
        "kl": proven.kl,
        "top1": proven.top1,
        "prefill_speedup": ratio(proven.dense_prefill_seconds, proven.prefill_seconds),
    }


def head_counts(heads: Sequence[HeadConfig]) -> dict[str, Any]:
    """The range of the thresholds, None without any, and how many heads are dense and have tails of both kinds."""
    sparse = [head for head in heads if head.mode == "s2o"]
    taus = [head.tau for head in sparse if head.has_threshold]
    return {
        "tau_min": min(taus, default=None),
        "tau_max": max(taus, default=None),
        "dense_heads": len(heads) - len(sparse),
        "tails": sum(head.tail for head in sparse),
        "linear_tails": sum(head.linear for head in sparse),
    }


def _shares_of_limits(profile: Profile, proven: ProvenLength) -> list[float]:
    """The errors of the layers over their limits, of those that have both."""
    budget = profile.record.budget
    unit = (budget and budget.unit) or "mse"
    pairs = [(layer.error(unit), layer.limit) for layer in proven.layers or ()]
    return [error / limit for error, limit in pairs if error is not None and limit]


def ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over and under and over > 0 < under else None
