"""Where segments, windows and prefixes lie: the device side of `shapes.window_start`."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = 1.4426950408889634


@triton.jit
def window_start(n, segment, offset, start, BN: tl.constexpr):
    """The first key of the window of segment n, so that the prefix before it is a whole number of tiles."""
    first = tl.maximum(offset + n * segment, start)
    return start + (first - start) // BN * BN
