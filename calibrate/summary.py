"""What a profile says of itself, as plain data.

A record is foreign: anything in it may be missing, or not what it should be.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from s2o_runtime.config import LayerConfig
from s2o_runtime.profile import Profile


def summary(profile: Profile) -> dict[str, Any]:
    """What a profile says of itself, as JSON; None where its record is silent."""
    record, geometry = profile.record, profile.geometry
    kind, value, scope = (at(record, "budget", name) for name in ("kind", "value", "scope"))
    problems = at(record, "problems")
    buckets = zip(profile.lengths, profile.layers, strict=True)
    return {
        "model": profile.model_name,
        "architecture": str(geometry),
        "fingerprint": profile.fingerprint,
        "device": str(profile.device),
        "budget": None if number(value) is None else f"{kind} {value:g} ({scope})",
        "objective": at(record, "objective"),
        "proof": at(record, "proof"),
        "problems": [str(each) for each in problems] if isinstance(problems, list) else [],
        "retiled": at(record, "retiled", "note"),
        "lengths": [_length(profile, length, bucket) for length, bucket in buckets],
    }


def _length(profile: Profile, length: int, bucket: Sequence[LayerConfig]) -> dict[str, Any]:
    heads = [head for layer in bucket for head in layer.heads]
    sparse = [head for head in heads if head.mode == "s2o"]
    source, of_layers = densities(profile, length)
    proof = entry(profile, "held_out", length)
    kind = "rel_mse" if at(profile.record, "budget", "kind") == "rel_mse" else "mse"
    shares = [
        None if limit is None or error is None or not limit else error / limit
        for error, limit in zip(column(proof, kind), column(proof, "limit"), strict=False)
    ]
    return {
        "length": length,
        "tau_min": min((head.tau for head in sparse), default=None),
        "tau_max": max((head.tau for head in sparse), default=None),
        "heads": len(heads),
        "dense_heads": len(heads) - len(sparse),
        "tails": sum(head.tail for head in sparse),
        "density": fmean(of_layers) if of_layers else None,
        "density_is": source,
        "layer_densities": of_layers,
        "error_over_limit": max((share for share in shares if share is not None), default=None),
        "worst": max((each for each in column(proof, "worst") if each is not None), default=None),
        "needles": at(proof, "needles"),
        "kl": number(at(proof, "kl")),
        "top1": number(at(proof, "top1")),
        "prefill_speedup": _ratio(at(proof, "dense_prefill_seconds"), at(proof, "prefill_seconds")),
    }


def _ratio(over: Any, under: Any) -> float | None:
    over, under = number(over), number(under)
    return over / under if over and under and over > 0 < under else None


def densities(profile: Profile, length: int) -> tuple[str | None, list[float]]:
    """Each layer's density and whether it is "held out" or "predicted"; nothing where the record does not say."""
    for name in ("held_out", "predicted"):
        found = [each for each in column(entry(profile, name, length), "density") if each is not None]
        if len(found) == profile.geometry.layers:
            return name.replace("_", " "), found
    return None, []


def entry(profile: Profile, name: str, length: int) -> Any:
    """What the record's list of this name says of a length, None if nothing."""
    entries = at(profile.record, name)
    found = (each for each in entries if at(each, "length") == length) if isinstance(entries, list) else iter(())
    return next(found, None)


def column(entry: Any, name: str) -> list[float | None]:
    """A number of every layer of an `entry`."""
    layers = at(entry, "layers")
    return [number(at(layer, name)) for layer in layers] if isinstance(layers, list) else []


def at(value: Any, *path: str) -> Any:
    """What stands at a path of names, None if there is no such place."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def number(value: Any) -> float | None:
    """The value if it is a number."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
