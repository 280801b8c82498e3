"""The keys as the kernels of a call read them: themselves, or rounded to 8 bits once for ranking and prefill.

`quantisation` has the rule in plain torch. One kernel finds the range of every channel, in parts, and one rounds: both
read every key once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import quantisation
from ..call import Call
from .groups import Strides
from .launch import group_strides, launch
from .primitives import RCP_LEVELS, ROUNDING, SMALLEST, head_pointer, load_sequence

RANGE_PARTS = 32  # programs that share the keys of a head; so many ranges each program of `_quantise_keys` reads
RANGE_ELEMENTS = 8192  # that are loaded at once
RANGE_WARPS = 8
QUANTISE_ELEMENTS = 16384  # of a program
QUANTISE_WARPS = 8

LEVELS = tl.constexpr(float(quantisation.LEVELS))
SMOOTHING = tl.constexpr(quantisation.SMOOTHING)
NARROWEST = tl.constexpr(quantisation.NARROWEST)


class Keys(NamedTuple):
    """The keys of a call."""

    rows: Tensor  # [B, Hkv, Lk, D], in the type of the inputs or int8
    unit: Tensor | None  # float32 [B, Hkv, D], of int8 rows as in `quantisation.QuantisedKeys`
    middle: Tensor | None  # likewise


@triton.jit
def _find_smallest(rows):
    """Find the smallest entry of each column of float32 [R, D]; NaN if it has one, which `tl.min` drops."""
    return tl.where(tl.max((rows != rows).to(tl.int32), 0) > 0, float("nan"), tl.min(rows, 0))


@triton.jit(do_not_specialize=["kv_len"])
def _channel_ranges(
    K, LOW, HIGH, KV_START, CU_K, kv_len, stride_k: Strides,
    D: tl.constexpr, ROWS: tl.constexpr, HAS_START: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Write to LOW[b, h, p] and HIGH[b, h, p] the smallest and largest entry of every channel in part p of the keys.

    Programs: (parts, Hkv, B). A part holds every so many-th group of ROWS keys; one without keys has inf and -inf. LOW,
    HIGH: T [B, Hkv, parts, D].
    """
    part = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2)
    start = tl.load(KV_START + b).to(tl.int32) if HAS_START else 0
    k_first, _, kv_len, _ = load_sequence(b, CU_K, CU_K, kv_len, 0, PACKED)
    offs_d = tl.arange(0, D)
    base = head_pointer(K, stride_k, b, h) + offs_d[None, :]
    low = tl.full([ROWS, D], float("inf"), tl.float32)
    high = tl.full([ROWS, D], float("-inf"), tl.float32)
    for t0 in tl.range(start + part * ROWS, kv_len, tl.num_programs(0) * ROWS, num_stages=3):
        t = tl.minimum(t0 + tl.arange(0, ROWS), kv_len - 1)
        k = tl.load(base + (k_first + t)[:, None].to(tl.int64) * stride_k.row).to(tl.float32)
        low = tl.minimum(low, k, propagate_nan=tl.PropagateNan.ALL)
        high = tl.maximum(high, k, propagate_nan=tl.PropagateNan.ALL)
    at = ((b * tl.num_programs(1) + h).to(tl.int64) * tl.num_programs(0) + part) * D + offs_d
    tl.store(LOW + at, _find_smallest(low).to(LOW.dtype.element_ty))
    tl.store(HIGH + at, (-_find_smallest(-high)).to(HIGH.dtype.element_ty))


@triton.jit(do_not_specialize=["kv_len"])
def _quantise_keys(
    K, LOW, HIGH, OUT, UNIT, MIDDLE, CU_K, kv_len, stride_k: Strides, stride_o: Strides,
    D: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Write key t in 8 bits to OUT[b, h, t], and UNIT and MIDDLE of its head, as `quantisation.quantise_keys` does.

    Programs: (keys / ROWS, Hkv, B); the first one of a head writes its unit and middle. LOW, HIGH: as `_channel_ranges`
    wrote them. OUT: int8 [B, Hkv, Lk, D], strides o. UNIT, MIDDLE: float32 [B, Hkv, D].
    """
    h = tl.program_id(1)
    b = tl.program_id(2)
    k_first, _, kv_len, _ = load_sequence(b, CU_K, CU_K, kv_len, 0, PACKED)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if (tl.program_id(0) * ROWS < kv_len) | (tl.program_id(0) == 0):
        inside = t < kv_len
        offs_d = tl.arange(0, D)
        row = (k_first + t)[:, None].to(tl.int64)
        keys = head_pointer(K, stride_k, b, h) + row * stride_k.row + offs_d[None, :]
        k = tl.load(keys, mask=inside[:, None], other=0.0).to(tl.float32)
        of_head = (b * tl.num_programs(1) + h).to(tl.int64)
        ranges = (of_head * PARTS + tl.arange(0, PARTS)[:, None]) * D + offs_d[None, :]
        low = _find_smallest(tl.load(LOW + ranges).to(tl.float32))
        high = -_find_smallest(-tl.load(HIGH + ranges).to(tl.float32))
        none = low > high  # where no key counts
        low = tl.where(none, 0.0, low)
        high = tl.where(none, 0.0, high)
        middle = (low + high) * 0.5
        half = (high - low) * 0.5
        widest = tl.maximum(tl.max(half, 0), SMALLEST)
        share = tl.maximum(half / widest, NARROWEST, propagate_nan=tl.PropagateNan.ALL)
        unit = widest * tl.exp2(tl.log2(share) * SMOOTHING) * RCP_LEVELS
        levels = tl.minimum(tl.maximum((k - middle[None, :]) * (1.0 / unit)[None, :], -LEVELS), LEVELS)
        # as in `primitives.quantise`
        rounded = (levels + ROUNDING).to(tl.int32, bitcast=True).to(tl.int8)
        out = head_pointer(OUT, stride_o, b, h) + row * stride_o.row + offs_d[None, :]
        tl.store(out, rounded, mask=inside[:, None])
        if tl.program_id(0) == 0:
            tl.store(UNIT + of_head * D + offs_d, unit)
            tl.store(MIDDLE + of_head * D + offs_d, middle)


def read_keys(call: Call) -> Keys:
    """Return the keys as the kernels of a call read them: rounded to 8 bits if its scores are int8."""
    k = call.k
    if call.config.scores != "int8":
        return Keys(k, None, None)
    shape = call.shape
    heads = shape.batch, shape.kv_heads
    low, high = (torch.empty(*heads, RANGE_PARTS, shape.head_dim, dtype=k.dtype, device=k.device) for _ in range(2))
    unit, middle = (torch.empty(*heads, shape.head_dim, dtype=torch.float32, device=k.device) for _ in range(2))
    rows = torch.empty(1 if call.packed else shape.batch, *k.shape[1:], dtype=torch.int8, device=k.device)
    rows = rows.expand(shape.batch, -1, -1, -1)
    launch(
        _channel_ranges,
        (RANGE_PARTS, shape.kv_heads, shape.batch),
        {
            "K": k, "LOW": low, "HIGH": high, "KV_START": call.kv_start, "CU_K": call.cu_k, "kv_len": shape.kv_len,
            **group_strides(k=k),
        },
        {
            "D": shape.head_dim, "ROWS": RANGE_ELEMENTS // shape.head_dim, "HAS_START": call.kv_start is not None,
            "PACKED": call.packed,
        },
        num_warps=RANGE_WARPS,
    )  # fmt: skip
    at_once = QUANTISE_ELEMENTS // shape.head_dim
    launch(
        _quantise_keys,
        (-(-shape.kv_len // at_once) or 1, shape.kv_heads, shape.batch),
        {
            "K": k, "LOW": low, "HIGH": high, "OUT": rows, "UNIT": unit, "MIDDLE": middle, "CU_K": call.cu_k,
            "kv_len": shape.kv_len, **group_strides(k=k, o=rows),
        },
        {"D": shape.head_dim, "ROWS": at_once, "PARTS": RANGE_PARTS, "PACKED": call.packed},
        num_warps=QUANTISE_WARPS,
    )  # fmt: skip
    return Keys(rows, unit, middle)
