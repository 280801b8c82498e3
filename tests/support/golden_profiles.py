"""The profiles in tests/golden, which were written once and must be read for ever, and a profile of least size.

Beside each file is what must be found in it: the fields of the profile without its record, in their order.
"""

from __future__ import annotations

import json
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

from s2o_runtime.config import HeadConfig, LayerConfig
from s2o_runtime.devices import DeviceIdentity
from s2o_runtime.identity import Geometry
from s2o_runtime.profile import Profile

# every value that a head or a layer may have, and every field of a record: of the newest version; of those without
# lookbacks, whose heads with int8 scores are dense in this one; and of those with grains of 1, 2 and 8 and up to 64
# representatives, whose heads are too
GOLDEN = ("schema8_lookback", "schema8_grain4", "schema8")


def minimal() -> Profile:
    """One bucket, one layer, one head, defaults, nothing recorded."""
    device = DeviceIdentity("cpu", "cpu")
    return Profile("m", Geometry("llama", 1, 1, 1, 64), "", device, (512,), ((LayerConfig((HeadConfig(),)),),))


def path_of(name: str) -> Path:
    return Path(__file__).parents[1] / "golden" / f"{name}.safetensors"


def values_of(profile: Profile) -> list[Any]:
    """The fields of a profile as JSON has them, without its record."""
    values = [getattr(profile, field.name) for field in fields(profile) if field.name != "record"]
    return json.loads(json.dumps(values, default=astuple))


def field_paths(value: Any, path: str = "") -> set[str]:
    """Return where a document's values are: {"a": [{"b": 1}]} -> {"a[].b"}; a list of plain values is one field."""
    if isinstance(value, dict):
        return {leaf for name, item in value.items() for leaf in field_paths(item, f"{path}.{name}".lstrip("."))}
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return {leaf for item in value for leaf in field_paths(item, f"{path}[]")}
    return {path}
