"""Where sequences, segments, windows and prefixes lie: the device side of `shapes.py`."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = 1.4426950408889634


@triton.jit
def sequence(b, CU_Q, CU_K, q_len, offset, PACKED: tl.constexpr):
    """Where sequence b begins in q and in k, its number of queries, and the position of its first query.

    Packed sequences lie one behind the other; others have a batch index, one length and one offset.
    """
    q_first = 0
    k_first = 0
    if PACKED:
        q_first = tl.load(CU_Q + b).to(tl.int32)
        k_first = tl.load(CU_K + b).to(tl.int32)
        q_len = tl.load(CU_Q + b + 1).to(tl.int32) - q_first
        offset = tl.load(CU_K + b + 1).to(tl.int32) - k_first - q_len
    return q_first, k_first, q_len, offset


@triton.jit
def window_start(n, segment, offset, start, BN: tl.constexpr):
    """The first key of the window of segment n, so that the prefix before it is a whole number of tiles."""
    first = tl.maximum(offset + n * segment, start)
    return start + (first - start) // BN * BN
