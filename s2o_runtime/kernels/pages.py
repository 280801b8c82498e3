"""Keys and values out of their pages: a copy that packs sequences one behind another."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sequences import PagedKeys
from .launch import launch, list_strides

GATHER_ROWS = 64  # tokens of a program
GATHER_WARPS = 4


@triton.jit(do_not_specialize=["stride_tb"])  # as many pages as a server allows: any number
def _gather_pages(
    K, V, OUT_K, OUT_V, BLOCK_TABLE, CU_K, K_SCALE, V_SCALE,
    stride_kp, stride_kn, stride_kh, stride_vp, stride_vn, stride_vh, stride_tb, stride_oh,
    D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, SCALED: tl.constexpr,
    SCALE_STEP: tl.constexpr,
):  # fmt: skip
    """Copy token t of sequence b out of its page to OUT[h, CU_K[b] + t].

    Programs: (tokens of the longest sequence / ROWS, Hkv, N); those behind a sequence's end do nothing. T is the type
    of the queries, C that of the cache: T, or fp8, which is multiplied by its scale in float32 (SCALED).

        K, V                C [pages, PAGE, Hkv, D], strides k and v
        OUT_K, OUT_V        T [Hkv, total, D], stride o of a head, rows contiguous
        BLOCK_TABLE         int32 [N, M], stride t of a sequence
        K_SCALE, V_SCALE    float32 [1], or [Hkv] with a SCALE_STEP of 1

    WIDTH is D, or the next power of two.
    """
    h = tl.program_id(1)
    b = tl.program_id(2)
    first = tl.load(CU_K + b)
    length = tl.load(CU_K + b + 1) - first
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(0) * ROWS < length:
        inside = token < length
        page = tl.load(BLOCK_TABLE + b.to(tl.int64) * stride_tb + token // PAGE, mask=inside, other=0).to(tl.int64)
        slot = (token % PAGE).to(tl.int64)
        offs_d = tl.arange(0, WIDTH)[None, :]
        wanted = inside[:, None] & (offs_d < D)
        key = (page * stride_kp + slot * stride_kn + h.to(tl.int64) * stride_kh)[:, None] + offs_d
        value = (page * stride_vp + slot * stride_vn + h.to(tl.int64) * stride_vh)[:, None] + offs_d
        k = tl.load(K + key, mask=wanted)
        v = tl.load(V + value, mask=wanted)
        if SCALED:
            k = k.to(tl.float32) * tl.load(K_SCALE + h * SCALE_STEP)
            v = v.to(tl.float32) * tl.load(V_SCALE + h * SCALE_STEP)
        row = h.to(tl.int64) * stride_oh + (first + token)[:, None].to(tl.int64) * D + offs_d
        tl.store(OUT_K + row, k.to(OUT_K.dtype.element_ty), mask=wanted)
        tl.store(OUT_V + row, v.to(OUT_V.dtype.element_ty), mask=wanted)


def gather_pages(pages: PagedKeys, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Copy keys and values out of their pages, packed one sequence behind another: [total_k, Hkv, D] in `dtype` each.

    A KV head's rows are contiguous; those behind the last key are not written.
    """
    _, _, heads, head_dim = pages.k.shape
    device = pages.k.device
    out_k, out_v = (torch.empty(heads, pages.total_k, head_dim, dtype=dtype, device=device) for _ in range(2))
    k_scale, v_scale = _get_scales(pages)
    launch(
        _gather_pages,
        (-(-pages.max_k // GATHER_ROWS), heads, len(pages.cu_k) - 1),
        {
            "K": pages.k, "V": pages.v, "OUT_K": out_k, "OUT_V": out_v, "BLOCK_TABLE": pages.block_table,
            "CU_K": pages.cu_k, "K_SCALE": k_scale, "V_SCALE": v_scale, **list_strides("pnh", k=pages.k, v=pages.v),
            "stride_tb": pages.block_table.stride(0), "stride_oh": out_k.stride(0),
        },
        {
            "D": head_dim, "WIDTH": triton.next_power_of_2(head_dim), "PAGE": pages.page_size, "ROWS": GATHER_ROWS,
            "SCALED": pages.is_fp8, "SCALE_STEP": int(k_scale is not None and len(k_scale) > 1),
        },
        num_warps=GATHER_WARPS,
    )  # fmt: skip
    return out_k.transpose(0, 1), out_v.transpose(0, 1)


def _get_scales(pages: PagedKeys) -> tuple[Tensor | None, Tensor | None]:
    """Return the scales of an fp8 cache, both of one length; None for a cache of the queries' type."""
    if not pages.is_fp8:
        return None, None
    given = [scale for scale in (pages.k_scale, pages.v_scale) if scale is not None]
    count = max(map(len, given), default=1)
    scales = (_make_ones(count, pages.k.device) if scale is None else scale for scale in (pages.k_scale, pages.v_scale))
    k_scale, v_scale = (scale.contiguous() if len(scale) == count else scale.repeat(count) for scale in scales)
    return k_scale, v_scale


@lru_cache(maxsize=64)
def _make_ones(count: int, device: torch.device) -> Tensor:
    """Make the scales of a cache that has none; kept, so that a call launches nothing for them."""
    return torch.ones(count, device=device)
