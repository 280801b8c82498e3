"""FlashPrefill's block weights and choice of blocks (arXiv 2603.06199, 2608.19758).

Weights are products of queries with means of keys, summed up by row block. A program owns a row block of one head, and
visits the means of all key blocks that its last query sees. Of each tile of scores only the log-sum-exp of every column
is stored, so the scores never reach memory. A second kernel compares a row of weights with its largest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from s2o_runtime.kernels.launch import launch, list_strides
from s2o_runtime.kernels.primitives import LN2, LOG2E, MAX_REGISTERS
from scripts.bench.baselines.selection import Selection, parts

if TYPE_CHECKING:
    from scripts.bench.baselines.selection import Grid
    from scripts.bench.baselines.settings import FlashPrefill

KEY_BLOCKS = 64  # whose means a tile of scores has
STAGES = 2
LEAST_DEPTH = 16  # of a product on tensor cores
CHOSEN_AT_ONCE = 256  # key blocks that are compared together
CHOOSE_WARPS = 1


def mass_warps(block_m: int) -> int:
    """The warps of a program: one for each 16 rows."""
    return block_m // 16


@triton.jit(do_not_specialize=["first", "group", "q_len", "kv_len", "columns"])
def _mean_key_mass(
    Q, K_MEAN, MASS, qk_scale, first, group, q_len, kv_len, columns,
    stride_qb, stride_qh, stride_ql, stride_mb, stride_mh, stride_ml,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """MASS[b, n, i, c] = log of the sum of exp(score) over the rows of row block i that see all of key block c.

    A score is the product of a query and a mean of keys times qk_scale, in base 2. Programs: (row blocks, the last ones
    first; n; B), where n counts the heads of the grid from `first` on, each of PACKED query heads; `group` query heads
    share a KV head. T is the input type. DP: D filled up to a power of two.

        Q                   T [B, Hq, Lq, D], strides q
        K_MEAN              T [B, Hkv, columns, D], strides m
        MASS                float32 [B, n, row blocks, columns]: minus infinity beforehand, and where no row sees all
    """
    i = tl.num_programs(0) - 1 - tl.program_id(0)
    n = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    h = (first + n).to(tl.int64) * PACKED
    rows = i * BM + tl.arange(0, BM)
    real = rows < q_len * PACKED
    query = rows // PACKED
    position = tl.where(real, kv_len - q_len + query, -1)
    offs_d = tl.arange(0, DP)
    offs_c = tl.arange(0, BC)
    there = offs_d < D
    q = tl.load(
        Q
        + b * stride_qb
        + (h + rows % PACKED)[:, None] * stride_qh
        + query.to(tl.int64)[:, None] * stride_ql
        + offs_d[None, :],
        mask=real[:, None] & there[None, :],
        other=0.0,
    )
    mean_tile = K_MEAN + b * stride_mb + h // group * stride_mh + offs_c[None, :] * stride_ml + offs_d[:, None]
    out = MASS + ((b * tl.num_programs(1) + n) * tl.num_programs(0) + i) * columns + offs_c
    # blocks that the last query sees whole
    seen = (kv_len - q_len + tl.minimum((i * BM + BM - 1) // PACKED + 1, q_len)) // BLOCK_N
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
        part: of the heads of the grid, n of them.
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
            "columns": grid.columns, **list_strides("bhl", q=q, m=k_mean),
        },
        {
            "D": q.shape[3], "DP": max(LEAST_DEPTH, triton.next_power_of_2(q.shape[3])), "BM": grid.block_m,
            "BC": KEY_BLOCKS, "BLOCK_N": grid.block_n, "STAGES": STAGES, "PACKED": grid.packed,
        },
        num_warps=mass_warps(grid.block_m),
        num_stages=STAGES,
        maxnreg=MAX_REGISTERS,
    )  # fmt: skip
    return mass


@triton.jit(do_not_specialize=["log_share", "first", "window", "last", "head", "heads", "q_len", "kv_len", "columns"])
def _choose(
    MASS, BLOCKS, COUNTS, PRUNED, log_share, first, window, last, head, heads, q_len, kv_len, columns,
    BM: tl.constexpr, BC: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr, PRUNES: tl.constexpr,
):  # fmt: skip
    """The blocks of a row block whose weight is at least exp(log_share) of the largest, and those that always count.

    Programs: (row blocks; n; B), where n counts the `heads` of the grid from `head` on. What always counts: `first`
    blocks, the last `window` ones, what some row sees in part, and in the `last` row blocks everything.

        MASS                float32 [B, n, row blocks, columns], of `_mean_key_mass`
        BLOCKS              int32 [B, heads, row blocks, columns], to write: what is chosen, ascending
        COUNTS              int32 [B, heads, row blocks], to write: how many these are
        PRUNED              int8 [B, heads, row blocks, columns], to write: 1 for blocks that all rows see and that are
                            not chosen (PRUNES)
    """
    i = tl.program_id(0)
    n = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    row_blocks = tl.num_programs(0)
    mass = MASS + ((b * tl.num_programs(1) + n) * row_blocks + i) * columns
    at = (b * heads + head + n) * row_blocks + i
    # `Grid.full` and `Grid.visible`
    full = (kv_len - q_len + i * BM // PACKED + 1) // BLOCK_N
    visible = tl.minimum(kv_len - q_len + (i * BM + BM - 1) // PACKED, kv_len - 1) // BLOCK_N + 1
    largest = float("-inf")
    for c in tl.range(0, visible, BC):
        column = c + tl.arange(0, BC)
        weight = tl.load(mass + column, mask=column < visible, other=float("-inf"))
        largest = tl.maximum(largest, tl.max(weight, 0))
    everything = i >= row_blocks - last
    count = 0
    for c in tl.range(0, visible, BC):
        column = c + tl.arange(0, BC)
        seen = column < visible
        weight = tl.load(mass + column, mask=seen, other=float("-inf"))
        always = (column < first) | (column >= tl.minimum(full, visible - window)) | everything
        chosen = seen & ((weight >= largest + log_share) | always)
        tl.store(BLOCKS + at * columns + count + tl.cumsum(chosen.to(tl.int32), 0) - 1, column, mask=chosen)
        count += tl.sum(chosen.to(tl.int32), 0)
        if PRUNES:
            tl.store(PRUNED + at * columns + column, (seen & (chosen == 0)).to(tl.int8), mask=column < columns)
    tl.store(COUNTS + at, count)


def select_by_mass(
    q: Tensor, grid: Grid, mass_of: Callable[[slice], Tensor], settings: FlashPrefill, mean_keys: Tensor | None
) -> Selection:
    """Return what `flash_prefill.select` selects, given weights.

    Args:
        q: [B, Hq, Lq, D].
        grid: of q and of the keys.
        mass_of: called with a slice of n of the grid's heads; returns float32 [B, n, row blocks, key blocks].
        settings: of either version.
        mean_keys: of the selection; None for none, and then nothing is said of what is pruned.
    """
    shape = q.shape[0], q.shape[1] // grid.packed, grid.rows, grid.columns
    blocks = torch.empty(shape, dtype=torch.int32, device=q.device)
    counts = torch.empty(shape[:3], dtype=torch.int32, device=q.device)
    pruned = None if mean_keys is None else torch.empty(shape, dtype=torch.bool, device=q.device)
    for part in parts(shape[1], shape[0] * grid.rows * grid.columns):
        launch(
            _choose,
            (grid.rows, part.stop - part.start, shape[0]),
            {
                "MASS": mass_of(part), "BLOCKS": blocks, "COUNTS": counts,
                "PRUNED": None if pruned is None else pruned.view(torch.int8), "log_share": settings.log_share,
                "first": settings.first, "window": settings.window, "last": settings.last, "head": part.start,
                "heads": shape[1], "q_len": grid.q_len, "kv_len": grid.kv_len, "columns": grid.columns,
            },
            {
                "BM": grid.block_m, "BC": CHOSEN_AT_ONCE, "BLOCK_N": grid.block_n, "PACKED": grid.packed,
                "PRUNES": pruned is not None,
            },
            num_warps=CHOOSE_WARPS,
        )  # fmt: skip
    return Selection(grid, blocks, counts, pruned=pruned, mean_keys=mean_keys)
