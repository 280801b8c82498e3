"""What differs between two profiles."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from calibrate.tables import Table, formatted
from s2o_runtime.config import plain
from s2o_runtime.profile import Profile, described

COMPARED = ("budget", "objective", "proof", "recipe", "versions", "data")  # parts of a record that made a profile


def differences(a: Profile, b: Profile) -> dict[str, Any]:
    """What differs between two profiles, as JSON.

    Returns:
        fields: the values in both of each field that differs, by its dotted name, among those that made the profiles.
        lengths: the lengths that only one has, none if they have the same.
        layers: one entry for each layer whose settings or density differ, at the lengths that both have.
    """
    common = [length for length in a.lengths if length in b.lengths]
    lengths = {
        f"only_{name}": sorted(set(one.lengths) - set(other.lengths)) for name, one, other in (("a", a, b), ("b", b, a))
    }
    same_shape = (a.geometry.layers, a.geometry.query_heads) == (b.geometry.layers, b.geometry.query_heads)
    return {
        "fields": dict(_changed_fields(_compared(a), _compared(b))),
        "lengths": lengths if any(lengths.values()) else {},
        "layers": [row for length in common for row in _changed_layers(a, b, length)] if same_shape else [],
    }


def difference_parts(changes: Mapping[str, Any]) -> Iterator[Table | str]:
    """What `differences` returns, in tables and lines."""
    if not any(changes.values()):
        yield "the profiles are the same"
        return
    fields = [(name, _short(a), _short(b)) for name, (a, b) in changes["fields"].items()]
    yield Table(("field", "a", "b"), fields, "fields")
    for name, lengths in changes["lengths"].items():
        if lengths:
            yield f"lengths in {name.removeprefix('only_')} only: {', '.join(map(str, lengths))}"
    rows = [
        (
            str(row["length"]),
            str(row["layer"]),
            str(row["heads"]),
            ", ".join(f"{name} {count}" for name, count in row["changed"].items()),
            *(formatted(density, ".3f") for density in row["densities"]),
        )
        for row in changes["layers"]
    ]
    yield Table(("length", "layer", "heads that differ", "in", "density a", "density b"), rows, "layers", wrap="in")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 36 else f"{text[:34]}.."


def _compared(profile: Profile) -> dict[str, Any]:
    document = described(profile)
    record = {name: document["record"].get(name) for name in COMPARED}
    return {"model": document["model"], "device": document["device"], **record}


def _changed_fields(a: Any, b: Any, name: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys([*a, *b]):
            yield from _changed_fields(a.get(key), b.get(key), f"{name}.{key}".lstrip("."))
    elif a != b:
        yield name, (a, b)


def _changed_layers(a: Profile, b: Profile, length: int) -> Iterator[dict[str, Any]]:
    """How many heads of each layer differ, and in what; a tile counts for the layer."""
    densities = [profile.record.densities(length, profile.geometry.layers)[1] for profile in (a, b)]
    rows = zip(a.layers[a.lengths.index(length)], b.layers[b.lengths.index(length)], strict=True)
    for layer, (one, other) in enumerate(rows):
        pairs = [(plain(x), plain(y)) for x, y in zip(one.heads, other.heads, strict=True)]
        changed = Counter(name for x, y in pairs for name in x if x[name] != y[name])
        whole = [name for name in ("tile", "scores", "last_rows") if getattr(one, name) != getattr(other, name)]
        before, after = (layer_densities[layer] if layer_densities else None for layer_densities in densities)
        if changed or whole or before != after:
            yield {
                "length": length,
                "layer": layer,
                "heads": sum(x != y for x, y in pairs),
                "changed": dict(changed) | dict.fromkeys(whole, 1),
                "densities": [before, after],
            }
