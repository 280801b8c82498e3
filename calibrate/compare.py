"""What differs between two profiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from calibrate.summary import at, densities
from s2o_runtime.profile import Profile, described


def differences(a: Profile, b: Profile) -> dict[str, Any]:
    """Fields (what made the profiles), lengths that only one has, and layers whose settings differ."""
    common = [length for length in a.lengths if length in b.lengths]
    lengths = {
        f"only_{name}": sorted(set(one.lengths) - set(other.lengths)) for name, one, other in (("a", a, b), ("b", b, a))
    }
    same_shape = (a.geometry.layers, a.geometry.query_heads) == (b.geometry.layers, b.geometry.query_heads)
    return {
        "fields": dict(_changed_fields(_described(a), _described(b))),
        "lengths": lengths if any(lengths.values()) else {},
        "layers": [row for length in common for row in _changed_layers(a, b, length)] if same_shape else [],
    }


def _described(profile: Profile) -> dict[str, Any]:
    record = {name: at(profile.record, name) for name in ("budget", "objective", "proof", "recipe", "versions", "data")}
    document = described(profile)
    return {"model": document["model"], "device": document["device"], **record}


def _changed_fields(a: Any, b: Any, name: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    if isinstance(a, dict) and isinstance(b, dict):
        for each in dict.fromkeys([*a, *b]):
            yield from _changed_fields(a.get(each), b.get(each), f"{name}.{each}".lstrip("."))
    elif a != b:
        yield name, (a, b)


def _changed_layers(a: Profile, b: Profile, length: int) -> Iterator[dict[str, Any]]:
    """How many heads of each layer differ, and in what; a tile or grain counts for the layer."""
    (_, of_a), (_, of_b) = densities(a, length), densities(b, length)
    rows = zip(a.layers[a.lengths.index(length)], b.layers[b.lengths.index(length)], strict=True)
    for layer, (one, other) in enumerate(rows):
        pairs = [(asdict(x), asdict(y)) for x, y in zip(one.heads, other.heads, strict=True)]
        changed = Counter(name for x, y in pairs for name in x if x[name] != y[name])
        whole = [name for name in ("tile", "row_reduce", "grain") if getattr(one, name) != getattr(other, name)]
        before, after = (found[layer] if found else None for found in (of_a, of_b))
        if changed or whole or before != after:
            yield {
                "length": length,
                "layer": layer,
                "heads": sum(x != y for x, y in pairs),
                "changed": dict(changed) | dict.fromkeys(whole, 1),
                "densities": [before, after],
            }
