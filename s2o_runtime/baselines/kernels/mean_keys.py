"""FlashPrefill's block weights (arXiv 2603.06199): products of queries with means of keys, summed up by row block.

A program owns a row block of one head, and visits the means of all key blocks that its last query sees. Of each tile of
scores only the log-sum-exp of every column is stored, so the scores never reach memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from s2o_runtime.kernels.launch import launch, strides
from s2o_runtime.kernels.primitives import LN2, LOG2E, MAX_REGISTERS

if TYPE_CHECKING:
    from s2o_runtime.baselines.selection import Grid

KEY_BLOCKS = 64  # whose means a tile of scores has
STAGES = 2
LEAST_DEPTH = 16  # of a product on tensor cores


def mass_warps(block_m: int) -> int:
    """The warps of a program: one for each 16 rows."""
    return block_m // 16


@triton.jit(do_not_specialize=["first", "group", "q_len", "kv_len", "columns"])
def _mean_key_mass(
    Q, K_MEAN, MASS, qk_scale, first, group, q_len, kv_len, columns,
    stride_qb, stride_qh, stride_ql, stride_mb, stride_mh, stride_ml,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """MASS[b, n, i, c] = log of the sum of exp(score) over the queries of row block i that see all of key block c.

    A score is the product of a query and a mean of keys times qk_scale, in base 2. Programs: (row blocks, the last ones
    first; n; B), where n counts the query heads from `first` on, of which `group` share a KV head. T is the input type.
    DP: D filled up to a power of two.

        Q                   T [B, Hq, Lq, D], strides q
        K_MEAN              T [B, Hkv, columns, D], strides m
        MASS                float32 [B, n, row blocks, columns]: minus infinity beforehand, and where no query sees all
    """
    i = tl.num_programs(0) - 1 - tl.program_id(0)
    n = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    h = (first + n).to(tl.int64)
    rows = i * BM + tl.arange(0, BM)
    real = rows < q_len
    position = tl.where(real, kv_len - q_len + rows, -1)
    offs_d = tl.arange(0, DP)
    offs_c = tl.arange(0, BC)
    there = offs_d < D
    q = tl.load(
        Q + b * stride_qb + h * stride_qh + rows.to(tl.int64)[:, None] * stride_ql + offs_d[None, :],
        mask=real[:, None] & there[None, :],
        other=0.0,
    )
    mean_tile = K_MEAN + b * stride_mb + h // group * stride_mh + offs_c[None, :] * stride_ml + offs_d[:, None]
    out = MASS + ((b * tl.num_programs(1) + n) * tl.num_programs(0) + i) * columns + offs_c
    # blocks that the last query sees whole
    seen = tl.minimum(kv_len - q_len + tl.minimum(i * BM + BM, q_len), kv_len) // BLOCK_N
    for c in tl.range(0, seen, BC, num_stages=STAGES):
        column = c + offs_c
        k = tl.load(mean_tile + c * stride_ml, mask=(column < seen)[None, :] & there[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * qk_scale
        scores = tl.where(((column + 1) * BLOCK_N - 1)[None, :] <= position[:, None], scores, float("-inf"))
        highest = tl.max(scores, 0)
        safe = tl.where(highest == float("-inf"), 0.0, highest)
        total = tl.sum(tl.exp2(scores - safe[None, :]), 0)
        log = tl.where(total > 0, safe + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(out + c, log * LN2, mask=column < seen)


def mean_key_mass(q: Tensor, k_mean: Tensor, part: slice, grid: Grid, scale: float) -> Tensor:
    """The logarithm of each block's weight for some query heads, as `flash_prefill.log_mass` says.

    Args:
        q: [B, Hq, Lq, D], bfloat16 or float16, D up to 128.
        k_mean: [B, Hkv, key blocks, D] in the type of q.
        part: of the query heads, n of them.
        grid: of q and of the keys; its row blocks are a power of two.
        scale: multiplies the scores.

    Returns:
        float32 [B, n, row blocks, key blocks].
    """
    q, k_mean = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k_mean))
    heads = part.stop - part.start
    shape = q.shape[0], heads, grid.rows, grid.columns
    mass = torch.full(shape, float("-inf"), dtype=torch.float32, device=q.device)
    launch(
        _mean_key_mass,
        (grid.rows, heads, q.shape[0]),
        {
            "Q": q, "K_MEAN": k_mean, "MASS": mass, "qk_scale": scale * LOG2E, "first": part.start,
            "group": q.shape[1] // k_mean.shape[1], "q_len": grid.q_len, "kv_len": grid.kv_len,
            "columns": grid.columns, **strides("bhl", q=q, m=k_mean),
        },
        {
            "D": q.shape[3], "DP": max(LEAST_DEPTH, triton.next_power_of_2(q.shape[3])), "BM": grid.block_m,
            "BC": KEY_BLOCKS, "BLOCK_N": grid.block_n, "STAGES": STAGES,
        },
        num_warps=mass_warps(grid.block_m),
        num_stages=STAGES,
        maxnreg=MAX_REGISTERS,
    )  # fmt: skip
    return mass
