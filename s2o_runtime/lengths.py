"""Prompt lengths on a log scale, as profiles and patched layers tell them apart."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

MAX_LENGTH = 1 << 24  # tokens of a prompt that a profile may have settings for
BOUNDS_PER_OCTAVE = 16
LEAST_BOUND_STEP = 64


def find_nearest(lengths: Sequence[int], length: int) -> int:
    """Return the index of the length that is nearest on a log scale; of two equally near, the longer.

    lengths: ascending, at least one.
    """
    # two lengths are equally near to their geometric mean; whole numbers leave no tie to rounding
    return sum(length * length >= shorter * longer for shorter, longer in pairwise(lengths))


def round_up_length(length: int) -> int:
    """Return a bound of the length that others share, at most a sixteenth or 63 above it.

    Kernels of packed sequences read their lengths on the device; the host needs bounds, and calls of equal bounds can
    share their recorded launches. Programs and memory behind a sequence's end cost next to nothing.
    """
    step = max(LEAST_BOUND_STEP, (1 << length.bit_length() >> 1) // BOUNDS_PER_OCTAVE)
    return -(-length // step) * step
