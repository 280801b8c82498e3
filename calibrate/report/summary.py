"""The summary of a profile, as plain data for tables, cards and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from calibrate.record import ProvenLength, Record, RecordedBudget, read_record
from s2o_runtime.config import HeadConfig, LayerConfig
from s2o_runtime.identity import split_fingerprint
from s2o_runtime.profile import Profile


def summarise_profile(profile: Profile) -> dict[str, Any]:
    """Return what a profile says of itself, as JSON; None where its record has no answer."""
    record = read_record(profile)
    buckets = zip(profile.lengths, profile.layers, strict=True)
    return {
        "model": profile.model_name,
        "architecture": str(profile.geometry),
        "fingerprint": split_fingerprint(profile.fingerprint)["fingerprint"],
        "device": str(profile.device),
        "budget": _format_budget(record.budget),
        "objective": record.objective,
        "proof": record.proof,
        "problems": list(record.problems or ()),
        "certificate": record.certificate.to_json() if record.certificate else None,
        "not_proven": list(record.not_proven or ()),
        "retiled": record.retiled.note if record.retiled else None,
        "unsupported_heads": profile.unsupported_heads,
        "lengths": [_summarise_length(profile, record, length, bucket) for length, bucket in buckets],
    }


def _format_budget(budget: RecordedBudget | None) -> str | None:
    if budget is None or budget.value is None:
        return None
    ceiling = "" if budget.ceiling_rel_mse is None else f" and rel_mse {budget.ceiling_rel_mse:g}"
    return f"{budget.kind} {budget.value:g}{ceiling} ({budget.scope})"


def _summarise_length(profile: Profile, record: Record, length: int, bucket: Sequence[LayerConfig]) -> dict[str, Any]:
    heads = [head for layer in bucket for head in layer.heads]
    source, densities = record.densities(length, profile.geometry.layers)
    proven, unit = record.find_proven(length) or ProvenLength(), (record.budget and record.budget.unit) or "mse"
    errors = [(layer.error(unit), layer.limit) for layer in proven.layers or ()]
    return {
        "length": length,
        "heads": len(heads),
        **count_heads(heads),
        "density": fmean(densities) if densities else None,
        "density_is": source,
        "layer_densities": densities,
        "error_over_limit": max(
            (error / limit for error, limit in errors if error is not None and limit), default=None
        ),
        "worst": max((layer.worst for layer in proven.layers or () if layer.worst is not None), default=None),
        "needles": None if proven.needles is None else list(proven.needles),
        "kl": proven.kl,
        "top1": proven.top1,
        "prefill_speedup": divide(proven.dense_prefill_seconds, proven.prefill_seconds),
    }


def count_heads(heads: Sequence[HeadConfig]) -> dict[str, Any]:
    """Return the range of the thresholds, None without any, and how many heads are dense or have a tail."""
    sparse = [head for head in heads if head.mode == "s2o"]
    taus = [head.tau for head in sparse]
    return {
        "tau_min": min(taus, default=None),
        "tau_max": max(taus, default=None),
        "dense_heads": len(heads) - len(sparse),
        "tails": sum(head.tail == "mean" for head in sparse),
    }


def divide(over: float | None, under: float | None) -> float | None:
    """Return the quotient; None unless both are above 0."""
    return over / under if over and under and over > 0 < under else None
