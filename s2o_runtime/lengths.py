"""Prompt lengths on a log scale, as profiles and patched layers tell them apart."""

from __future__ import annotations

import math

MAX_LENGTH = 1 << 24  # tokens of a prompt that a profile may have settings for
STEPS_PER_OCTAVE = 8
BOUNDS_PER_OCTAVE = 16
LEAST_BOUND_STEP = 64


def get_length_step(length: int) -> int:
    """Return the length's step on a log scale of eight steps to the octave; equal steps share a configuration."""
    return round(math.log2(max(1, length)) * STEPS_PER_OCTAVE)


def round_up_length(length: int) -> int:
    """Return a bound of the length that others share, at most a sixteenth or 63 above it.

    Kernels of packed sequences read their lengths on the device; the host needs bounds, and calls of equal bounds can
    share their recorded launches. Programs and memory behind a sequence's end cost next to nothing.
    """
    step = max(LEAST_BOUND_STEP, (1 << length.bit_length() >> 1) // BOUNDS_PER_OCTAVE)
    return -(-length // step) * step


def is_far_apart(shorter: int, longer: int) -> bool:
    """Return whether a profile can tell two lengths apart."""
    return get_length_step(shorter) < get_length_step(longer)
