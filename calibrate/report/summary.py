"""What a profile says of itself, as plain data for tables, cards and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from s2o_runtime.config import HeadConfig, LayerConfig
from s2o_runtime.identity import split_fingerprint
from s2o_runtime.profile import Profile
from s2o_runtime.profile.record import ProvenLength, RecordedBudget


def summary(profile: Profile) -> dict[str, Any]:
    """What a profile says of itself, as JSON; None where its record has no answer."""
    record = profile.record
    buckets = zip(profile.lengths, profile.layers, strict=True)
    return {
        "model": profile.model_name,
        "architecture": str(profile.geometry),
        "fingerprint": split_fingerprint(profile.fingerprint)["fingerprint"],
        "device": str(profile.device),
        "budget": _budget(record.budget),
        "objective": record.objective,
        "proof": record.proof,
        "problems": list(record.problems or ()),
        "certificate": record.certificate.to_json() if record.certificate else None,
        "not_proven": list(record.not_proven or ()),
        "retiled": record.retiled.note if record.retiled else None,
        "unsupported_heads": profile.unsupported_heads,
        "lengths": [_length(profile, length, bucket) for length, bucket in buckets],
    }


def _budget(budget: RecordedBudget | None) -> str | None:
    if budget is None or budget.value is None:
        return None
    ceiling = "" if budget.ceiling_rel_mse is None else f" and rel_mse {budget.ceiling_rel_mse:g}"
    return f"{budget.kind} {budget.value:g}{ceiling} ({budget.scope})"


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
    """The range of the thresholds, None without any, and how many heads are dense and have a tail."""
    sparse = [head for head in heads if head.mode == "s2o"]
    taus = [head.tau for head in sparse]
    return {
        "tau_min": min(taus, default=None),
        "tau_max": max(taus, default=None),
        "dense_heads": len(heads) - len(sparse),
        "tails": sum(head.tail == "mean" for head in sparse),
    }


def _shares_of_limits(profile: Profile, proven: ProvenLength) -> list[float]:
    """The errors of the layers over their limits, of those that have both."""
    budget = profile.record.budget
    unit = (budget and budget.unit) or "mse"
    pairs = [(layer.error(unit), layer.limit) for layer in proven.layers or ()]
    return [error / limit for error, limit in pairs if error is not None and limit]


def ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over and under and over > 0 < under else None
