"""Sparse attention of other papers: each selects key blocks for a whole layer, one kernel computes attention over them.

They are what S2O is compared with, in evaluations and benches; README.md beside this file describes each.
Names are loaded on first use: settings need no torch, and only a call on a GPU imports triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from s2o_runtime.lazy import lazily

if TYPE_CHECKING:
    from s2o_runtime.baselines.run import BaselineStats, attend, baseline_attention, select
    from s2o_runtime.baselines.selection import Selection
    from s2o_runtime.baselines.settings import (
        BASELINES,
        PBS,
        Antidiagonal,
        Baseline,
        FlashPrefill,
        FlashPrefillV2,
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
    "FlashPrefillV2",
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
    "settings": (
        "BASELINES",
        "PBS",
        "Antidiagonal",
        "Baseline",
        "FlashPrefill",
        "FlashPrefillV2",
        "SkipSoftmax",
        "Sparge",
        "parse",
    ),
}

__getattr__ = lazily(__name__, _HOMES)
