"""One model's calibration: the type (`profile`), its file (`file`) and what is read of its record (`record`).

Names are loaded on first use, because the type needs torch and the record does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import load_lazily

if TYPE_CHECKING:
    from .file import METADATA_KEY, SCHEMA, load_profile, make_document, save_profile, serialize
    from .profile import Profile
    from .record import BUDGET_KINDS

__all__ = [
    "BUDGET_KINDS",
    "METADATA_KEY",
    "SCHEMA",
    "Profile",
    "load_profile",
    "make_document",
    "save_profile",
    "serialize",
]

_HOMES = {
    "file": ("METADATA_KEY", "SCHEMA", "make_document", "load_profile", "save_profile", "serialize"),
    "profile": ("Profile",),
    "record": ("BUDGET_KINDS",),
}

__getattr__ = load_lazily(__name__, _HOMES)
