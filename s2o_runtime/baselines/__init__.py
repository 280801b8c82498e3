"""Sparse attention of other papers: each selects key blocks for a whole layer, one kernel computes attention over them.

They are what S2O is compared with, in evaluations and benches; docs/baselines.md describes each.
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
        Baseline,
        FlashPrefill,
        SkipSoftmax,
        Sparge,
        parse,
    )

__all__ = [
    "BASELINES",
    "PBS",
    "Antidiagonal",
    "Baseline",
    "BaselineStats",
    "FlashPrefill",
    "Selection",
    "SkipSoftmax",
    "Sparge",
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
