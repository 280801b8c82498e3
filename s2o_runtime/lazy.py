"""Packages whose names are loaded on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def load_lazily(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, which imports the module that a name stands in.

    homes: the names by the module that they stand in, relative to the package.
    """

    def load(name: str) -> Any:
        for home, names in homes.items():
            if name in names:
                return getattr(import_module(f"{package}.{home}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return load
