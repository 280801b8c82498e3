"""Sparse attention by other papers, behind one interface: each selects key blocks, one kernel computes them.

They are in the runtime because a calibrated profile may give single heads to a baseline. docs/baselines.md describes
each.
Names are loaded on first use: settings need no torch, and only a call on a GPU imports triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from s2o_runtime.baselines.run import BaselineStats, attend, baseline_attention, select
    from s2o_runtime.baselines.selection import Selection
    from s2o_runtime.baselines.settings import (
        BASELINES,
        PBS,
        Antidiagonal,
        AShape,
        Baseline,
        FlashPrefill,
        Prism,
        SkipSoftmax,
        Sparge,
        VerticalSlash,
        parse,
    )

__all__ = [
    "BASELINES",
    "PBS",
    "AShape",
    "Antidiagonal",
    "Baseline",
    "BaselineStats",
    "FlashPrefill",
    "Prism",
    "Selection",
    "SkipSoftmax",
    "Sparge",
    "VerticalSlash",
    "attend",
    "baseline_attention",
    "parse",
    "select",
]

_HOMES = {
    "run": ("BaselineStats", "attend", "baseline_attention", "select"),
    "selection": ("Selection",),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), "settings")
    return getattr(import_module(f"s2o_runtime.baselines.{home}"), name)
