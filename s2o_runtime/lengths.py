"""Prompt lengths on a log scale: what a profile, and a patched layer, tell apart."""

from __future__ import annotations

import math

STEPS_PER_OCTAVE = 8


def length_step(length: int) -> int:
    """The length's place on a log scale with eight steps to the octave; equal steps share a configuration."""
    return round(math.log2(max(1, length)) * STEPS_PER_OCTAVE)


def far_apart(shorter: int, longer: int) -> bool:
    """Whether a profile can tell two lengths apart."""
    return length_step(shorter) < length_step(longer)
