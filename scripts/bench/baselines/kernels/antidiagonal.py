"""XAttention's block weights (arXiv 2503.16428, Algorithm 1): sums along antidiagonals, softmax, sums over key blocks.

Groups of S queries, last first, and of S keys, first first, are rows of S * D numbers, and the sums are the product of
these two matrices. A tile of it reads q and k where they lie, S * D numbers deep, and of its scores only the
log-sum-exp of each row and key block is stored. A second kernel turns these into weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from s2o_runtime.kernels.launch import launch, list_strides
from s2o_runtime.kernels.primitives import LOG2E, MAX_REGISTERS
from s2o_runtime.tiles import Capability
from scripts.bench.baselines.tiles import antidiagonal_tile

if TYPE_CHECKING:
    from scripts.bench.baselines.selection import Grid

DEPTH = 64  # of a step of the product
SWEEP = 8  # rows of tiles that are computed together, so that their keys stay in L2
MASS_WARPS = 4
MASS_SCORES = 2048  # that the second kernel loads at once
WORKSPACE_BYTES = 256 << 20


@triton.jit(do_not_specialize=["group", "q_len", "kv_len", "groups", "columns"])
def _antidiagonal(
    Q, K, HEADS, LOCAL, qk_scale, group, q_len, kv_len, groups, columns,
    stride_qb, stride_qh, stride_ql, stride_kb, stride_kh, stride_kl,
    D: tl.constexpr, DEPTH: tl.constexpr, S: tl.constexpr, PER: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr, SWEEP: tl.constexpr,
):  # fmt: skip
    """LOCAL[b, n, g, c] = log-sum-exp in base 2 of query group g's scores with the PER groups of key block c.

    The score of two groups is the sum of the products of query S - 1 - s of one and key s of the other, times qk_scale.
    A group sees key groups that begin at or before its last query: minus infinity in blocks where it sees none, and
    nothing is written in tiles where no row sees any. Programs: (tiles of BM x BN groups, n, B), where n counts the
    chosen heads. T is the input type.

        Q                   T [B, Hq, Lq, D], strides q
        K                   T [B, Hkv, Lk, D], strides k
        HEADS               int32 [n]: the query head of each chosen one; a number would spill registers on sm_100
        LOCAL               float32 [B, n, groups, columns]

    group: query heads of a KV head; groups: of queries; columns: key blocks.
    """
    n = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    down = tl.cdiv(groups, BM)
    across = tl.num_programs(0) // down
    sweep = tl.program_id(0) // (SWEEP * across) * SWEEP
    height = tl.minimum(down - sweep, SWEEP)
    within = tl.program_id(0) % (SWEEP * across)
    row0 = (sweep + within % height) * BM
    key0 = within // height * BN
    offset = kv_len - q_len
    end = tl.minimum(offset + tl.minimum(row0 + BM, groups) * S, kv_len)
    if key0 * S < end:
        h = tl.load(HEADS + n).to(tl.int64)
        rows = row0 + tl.arange(0, BM)
        queries = rows * S + S - 1
        keys = (key0 + tl.arange(0, BN)) * S
        offs_d = tl.arange(0, DEPTH)
        q_tile = Q + b * stride_qb + h * stride_qh + queries.to(tl.int64)[:, None] * stride_ql + offs_d[None, :]
        k_tile = K + b * stride_kb + h // group * stride_kh + keys.to(tl.int64)[None, :] * stride_kl + offs_d[:, None]

        CHUNKS: tl.constexpr = (D + DEPTH - 1) // DEPTH
        scores = tl.zeros([BM, BN], tl.float32)
        for t in tl.range(0, S * CHUNKS, num_stages=STAGES):
            s = t // CHUNKS
            d = t % CHUNKS * DEPTH
            q_there = (queries < q_len + s)[:, None]
            k_there = (keys < kv_len - s)[None, :]
            if D % DEPTH:
                q_there &= (d + offs_d < D)[None, :]
                k_there &= (d + offs_d < D)[:, None]
            q = tl.load(q_tile + (d - s * stride_ql), mask=q_there, other=0.0)
            k = tl.load(k_tile + (d + s * stride_kl), mask=k_there, other=0.0)
            scores = tl.dot(q, k, scores, input_precision="ieee")

        seen = tl.minimum(offset + queries, kv_len - 1)
        if (key0 + BN - 1) * S > tl.minimum(offset + row0 * S + S - 1, kv_len - 1):
            scores = tl.where(keys[None, :] <= seen[:, None], scores, float("-inf"))
        if PER == 1:
            local = scores * qk_scale
        else:
            blocks = tl.reshape(scores, [BM, BN // PER, PER])
            highest = tl.max(blocks, 2) * qk_scale
            highest = tl.where(highest == float("-inf"), 0.0, highest)
            total = tl.sum(tl.exp2(blocks * qk_scale - highest[:, :, None]), 2)
            local = tl.where(total > 0, highest + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        column = key0 // PER + tl.arange(0, BN // PER)
        out = LOCAL + ((b * tl.num_programs(1) + n) * groups + row0) * columns  # offsets in a tile need 32 bits
        tl.store(
            out + (tl.arange(0, BM)[:, None] * columns + column[None, :]),
            local,
            mask=(rows < groups)[:, None] & (column < columns)[None, :],
        )


@triton.jit(do_not_specialize=["q_len", "kv_len", "groups", "columns", "n_first", "heads"])
def _mass(
    LOCAL, WEIGHTS, q_len, kv_len, groups, columns, n_first, heads,
    S: tl.constexpr, PER: tl.constexpr, ROWS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """WEIGHTS[b, n_first + n, i] = each key block's softmax mass, the mean over ROWS groups of row block i.

    Programs: (row blocks, n, B). BC: columns at once.

        LOCAL               float32 [B, n, groups, columns]: as `_antidiagonal` wrote it
        WEIGHTS             float32 [B, heads, row blocks, columns]
    """
    i = tl.program_id(0)
    n = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    end = tl.minimum(kv_len - q_len + (i + 1) * ROWS * S, kv_len)
    seen = (end + PER * S - 1) // (PER * S)
    rows = i * ROWS + tl.arange(0, ROWS)
    real = rows < groups
    offs_c = tl.arange(0, BC)
    local = LOCAL + ((b * tl.num_programs(1) + n) * groups + i * ROWS) * columns
    local += tl.arange(0, ROWS)[:, None] * columns + offs_c[None, :]
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    for c in range(0, seen, BC):
        x = tl.load(local + c, mask=real[:, None] & (c + offs_c < seen)[None, :], other=float("-inf"))
        m_new = tl.maximum(m, tl.max(x, 1))
        m_safe = tl.where(real, m_new, 0.0)  # every group sees the first key
        l = l * tl.exp2(m - m_safe) + tl.sum(tl.exp2(x - m_safe[:, None]), 1)
        m = m_new
    total = tl.where(real, m + tl.log2(tl.where(real, l, 1.0)), 0.0)
    count = tl.minimum(groups - i * ROWS, ROWS).to(tl.float32)
    out = WEIGHTS + ((b * heads + n_first + n) * tl.num_programs(0) + i) * columns + offs_c
    for c in range(0, columns, BC):
        x = tl.load(local + c, mask=real[:, None] & (c + offs_c < seen)[None, :], other=float("-inf"))
        tl.store(out + c, tl.sum(tl.exp2(x - total[:, None]), 0) / count, mask=c + offs_c < columns)


def antidiagonal_mass(
    q: Tensor, k: Tensor, part: slice, grid: Grid, stride: int, scale: float, capability: Capability
) -> Tensor:  # fmt: skip
    """Mean softmax mass of each block for some query heads.

    The score of `stride` queries and as many keys is the sum of their antidiagonal times scale / stride. The
    log-sum-exps in between take at most `WORKSPACE_BYTES`, or what one head needs.

    Args:
        q: [B, Hq, Lq, D], bfloat16 or float16, any D.
        k: [B, Hkv, Lk, D].
        part: of the query heads, n of them.
        grid: of q and k; its blocks and `stride`, which divides them, are powers of two.
        stride: queries, and keys, of a group.
        scale: multiplies the scores.
        capability: of the GPU, whose tile is used.

    Returns:
        float32 [B, n, row blocks, key blocks].

    Raises:
        InputError: the kernel has no tile for the GPU.

    Source:
        XAttention (arXiv 2503.16428), Algorithm 1, up to its threshold.
    """
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    tile = antidiagonal_tile(capability)
    batch, n = q.shape[0], part.stop - part.start
    per_row, per_column = grid.block_m // stride, grid.block_n // stride
    groups = -(-grid.q_len // stride)
    tiles = -(-groups // tile.block_m) * -(-grid.columns * per_column // tile.block_n)
    weights = torch.empty(batch, n, grid.rows, grid.columns, dtype=torch.float32, device=q.device)
    at_once = min(n, max(1, WORKSPACE_BYTES // (4 * batch * groups * grid.columns)))
    workspace = torch.empty(batch * at_once * groups * grid.columns, dtype=torch.float32, device=q.device)
    for n_first in range(0, n, at_once):
        heads = min(at_once, n - n_first)
        first_head = part.start + n_first
        numbers = torch.arange(first_head, first_head + heads, dtype=torch.int32, device=q.device)
        launch(
            _antidiagonal,
            (tiles, heads, batch),
            {
                "Q": q, "K": k, "HEADS": numbers, "LOCAL": workspace, "qk_scale": scale / stride * LOG2E,
                "group": q.shape[1] // k.shape[1], "q_len": grid.q_len, "kv_len": grid.kv_len, "groups": groups,
                "columns": grid.columns, **list_strides("bhl", q=q, k=k),
            },
            {
                "D": q.shape[3], "DEPTH": DEPTH, "S": stride, "PER": per_column, "BM": tile.block_m,
                "BN": tile.block_n, "STAGES": tile.stages, "SWEEP": SWEEP,
            },
            num_warps=tile.warps,
            num_stages=tile.stages,
            maxnreg=MAX_REGISTERS,
        )  # fmt: skip
        launch(
            _mass,
            (grid.rows, heads, batch),
            {
                "LOCAL": workspace, "WEIGHTS": weights, "q_len": grid.q_len, "kv_len": grid.kv_len, "groups": groups,
                "columns": grid.columns, "n_first": n_first, "heads": n,
            },
            {"S": stride, "PER": per_column, "ROWS": per_row, "BC": MASS_SCORES // per_row},
            num_warps=MASS_WARPS,
        )  # fmt: skip
    return weights
