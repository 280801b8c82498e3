"""Attention over lists of key blocks, for every baseline; and the pooling that SpargeAttn decides by.

A program owns `BM` query rows of one head. It walks the row block's list of key blocks that all rows see whole, then
single keys if there are any, then the blocks on the diagonal, with a mask. Blocks are contiguous in memory, so the
loads of the main loop are pipelined as in dense attention; only where they begin comes from the list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from s2o_runtime.baselines.selection import SKIP_KEYS, SKIP_ROWS, index_table
from s2o_runtime.errors import InputError
from s2o_runtime.kernels.launch import launch
from s2o_runtime.kernels.layout import LOG2E
from s2o_runtime.kernels.prefill import MAX_REGISTERS

if TYPE_CHECKING:
    from s2o_runtime.baselines.selection import Selection

POOL_WARPS = 4
NOWHERE = 1 << 30  # the place of a key that does not exist


class Tile(NamedTuple):
    """Rows and keys of a tile, and Triton's launch options."""

    block_m: int
    block_n: int
    warps: int
    stages: int


# tests/aot.py compiles them all: by the first digits of the compute capability, then by head dim, the fastest first;
# the last one fits every block, and its 64 x 64 keys are what the skip decides about
TILES: dict[int, dict[int, tuple[Tile, ...]]] = {
    80: {64: (Tile(128, 64, 8, 3), Tile(64, 64, 4, 3)), 128: (Tile(128, 64, 8, 3), Tile(64, 64, 8, 3))},
    89: {64: (Tile(128, 64, 8, 3), Tile(64, 64, 4, 3)), 128: (Tile(128, 32, 8, 3), Tile(64, 64, 8, 2))},
    90: {
        64: (Tile(128, 64, 8, 3), Tile(64, 64, 4, 3)),
        128: (Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(64, 64, 4, 2)),
    },
    100: {64: (Tile(128, 64, 8, 3), Tile(64, 64, 4, 3)), 128: (Tile(128, 64, 8, 3), Tile(64, 64, 8, 2))},
    120: {64: (Tile(128, 64, 8, 3), Tile(64, 64, 4, 3)), 128: (Tile(128, 32, 8, 3), Tile(64, 64, 8, 2))},
}
HEAD_DIMS = (64, 128)


def family(capability: tuple[int, int]) -> int | None:
    """The key of `TILES` for a compute capability; None where nobody has compiled the kernel."""
    major, minor = capability
    if major == 8 and minor:
        return 89
    number = major * 10
    return number if number in TILES and (major != 9 or not minor) else None


def tile_for(head_dim: int, capability: tuple[int, int], block_m: int, block_n: int, skips: bool) -> Tile:
    """The first tile that divides a selection's blocks; with a skip, the one it is defined by."""
    number = family(capability)
    if number is None or head_dim not in HEAD_DIMS:
        raise InputError(f"head_dim {head_dim} on sm_{capability[0]}{capability[1]} has no block-sparse tile")
    for tile in TILES[number][head_dim]:
        fits = block_m % tile.block_m == 0 and block_n % tile.block_n == 0
        if fits and (not skips or (tile.block_m, tile.block_n) == (SKIP_ROWS, SKIP_KEYS)):
            return tile
    raise InputError(f"blocks of {block_m} x {block_n} have no block-sparse tile: use multiples of 64")


@triton.jit
def _absorb(q, k, v, m, l, acc, qk_scale, limit, real, visible, MASKED: tl.constexpr, SKIPS: tl.constexpr):
    """One tile of keys into the online softmax, in base 2: q [BM, D], k [D, BN], v [BN, D].

    SKIPS: where every score of a real row is below the row's maximum by `limit`, the product with v is left out, not l.
    """
    scores = tl.dot(q, k, input_precision="ieee")
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    highest = tl.max(scores, 1) * qk_scale
    m_new = tl.maximum(m, highest)
    # rows that have seen no key yet keep m = -inf; subtract 0 there, not -inf
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
    weights = tl.exp2(scores * qk_scale - m_safe[:, None])
    decay = tl.exp2(m - m_safe)
    l = l * decay + tl.sum(weights, 1)
    if SKIPS:
        # reduced as one row: Triton's layout pass for tensor memory fails on a plain vector
        below = tl.where(real, highest - m_safe, float("-inf"))
        if tl.max(tl.reshape(below, [1, below.shape[0]])) >= limit:
            acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    else:
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return m_new, l, acc


@triton.jit(
    do_not_specialize=[
        "q_len", "kv_len", "row_unit", "key_unit", "stride_lb", "stride_lh", "stride_lr", "stride_cb", "stride_ch",
        "stride_xb", "stride_xh", "stride_xr", "stride_pb", "stride_ph", "stride_rb", "stride_rh", "stride_eb",
        "stride_eh",
    ]
)  # fmt: skip
def _block_sparse(
    Q, K, V, BLOCKS, COUNTS, COLUMNS, COLUMN_COUNTS, KEY_AT, ROW_AT, HEADS, SLOTS, OUT, LSE,
    qk_scale, limit, q_len, kv_len, row_unit, key_unit,
    stride_qb, stride_qh, stride_ql, stride_kb, stride_kh, stride_kl, stride_vb, stride_vh, stride_vl,
    stride_ob, stride_oh, stride_ol, stride_lb, stride_lh, stride_lr, stride_cb, stride_ch,
    stride_xb, stride_xh, stride_xr, stride_pb, stride_ph, stride_rb, stride_rh, stride_eb, stride_eh,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, KEYS_MOVED: tl.constexpr, ROWS_MOVED: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    SKIPS: tl.constexpr, HAS_LSE: tl.constexpr, NOWHERE: tl.constexpr,
):  # fmt: skip
    # the last rows have the longest lists, as a rule: they go first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    n = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    h = tl.load(HEADS + n).to(tl.int64)
    slot = tl.load(SLOTS + n).to(tl.int64)
    row0 = tile * BM
    i = row0 // BLOCK_M
    offset = kv_len - q_len

    offs_n = tl.arange(0, BN)
    offs_d = tl.arange(0, D)
    rows = row0 + tl.arange(0, BM)
    real = rows < q_len
    at = tl.load(ROW_AT + b * stride_rb + n * stride_rh + rows, mask=real, other=0) if ROWS_MOVED else rows
    position = offset + at
    place = at.to(tl.int64)[:, None]
    q = tl.load(Q + b * stride_qb + h * stride_qh + place * stride_ql + offs_d[None, :], mask=real[:, None], other=0.0)
    k_tile = K + b * stride_kb + slot * stride_kh + offs_n[None, :] * stride_kl + offs_d[:, None]
    v_tile = V + b * stride_vb + slot * stride_vh + offs_n[:, None] * stride_vl + offs_d[None, :]

    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)

    # where the diagonal begins and ends for this row block; `Grid.full` and `Grid.visible`
    first = offset + i * BLOCK_M // row_unit * row_unit
    last = tl.minimum(first + row_unit, kv_len) - 1
    begin = (first + 1) // key_unit * key_unit
    end = tl.minimum((last // key_unit + 1) * key_unit, kv_len)
    boundary = (end - begin + BLOCK_N - 1) // BLOCK_N

    # blocks that every row sees whole
    chosen = tl.load(COUNTS + b * stride_cb + n * stride_ch + i) - boundary
    blocks = BLOCKS + b * stride_lb + n * stride_lh + i * stride_lr
    PER_BLOCK: tl.constexpr = BLOCK_N // BN
    for t in tl.range(0, chosen * PER_BLOCK, num_stages=STAGES):
        key = (tl.load(blocks + t // PER_BLOCK) * BLOCK_N + t % PER_BLOCK * BN).to(tl.int64)
        k = tl.load(k_tile + key * stride_kl)
        v = tl.load(v_tile + key * stride_vl)
        m, l, acc = _absorb(q, k, v, m, l, acc, qk_scale, limit, real, True, False, SKIPS)

    if HAS_COLUMNS:  # single keys that every row sees
        width = tl.load(COLUMN_COUNTS + b * stride_cb + n * stride_ch + i)
        columns = COLUMNS + b * stride_xb + n * stride_xh + i * stride_xr
        k_base = K + b * stride_kb + slot * stride_kh
        v_base = V + b * stride_vb + slot * stride_vh
        for c in tl.range(0, width, BN, num_stages=STAGES):
            listed = c + offs_n < width
            key = tl.load(columns + c + offs_n, mask=listed, other=0).to(tl.int64)
            k = tl.load(k_base + key[None, :] * stride_kl + offs_d[:, None])
            v = tl.load(v_base + key[:, None] * stride_vl + offs_d[None, :])
            m, l, acc = _absorb(q, k, v, m, l, acc, qk_scale, limit, real, listed[None, :], True, SKIPS)

    for t in tl.range(0, (end - begin + BN - 1) // BN, num_stages=1):
        j = begin + t * BN
        keys = j + offs_n
        exists = keys < kv_len
        where = keys
        if KEYS_MOVED:
            where = tl.load(KEY_AT + b * stride_pb + slot * stride_ph + keys, mask=exists, other=NOWHERE)
        k = tl.load(k_tile + j.to(tl.int64) * stride_kl, mask=exists[None, :], other=0.0)
        v = tl.load(v_tile + j.to(tl.int64) * stride_vl, mask=exists[:, None], other=0.0)
        visible = where[None, :] <= position[:, None]
        m, l, acc = _absorb(q, k, v, m, l, acc, qk_scale, limit, real, visible, True, SKIPS)

    out = OUT + b * stride_ob + h * stride_oh + place * stride_ol + offs_d[None, :]
    tl.store(out, (acc / l[:, None]).to(OUT.dtype.element_ty), mask=real[:, None])
    if HAS_LSE:
        lse = (m + tl.log2(l)) * 0.6931471805599453
        tl.store(LSE + b * stride_eb + h * stride_eh + at, lse, mask=real)


def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float, out: Tensor, lse: Tensor | None = None,
    capability: tuple[int, int] = (9, 0),
) -> None:  # fmt: skip
    """The heads of `selection`, written into their places of out [B, Hq, Lq, D] and lse [B, Hq, Lq].

    q: [B, Hq, Lq, D]; k, v: one entry of the second dimension for each number in `selection.slots`, permuted as
    `selection.key_order` says; the last dimension contiguous, D 64 or 128.
    """
    grid, n = selection.grid, len(selection.heads)
    skips = selection.skip is not None
    tile = tile_for(q.shape[3], capability, grid.block_m, grid.block_n, skips)
    heads, slots = (index_table(numbers, q.device) for numbers in (selection.heads, selection.slots))
    # what is not there is never read, but needs a pointer
    columns, column_counts, key_at, row_at = (
        heads if table is None else table
        for table in (selection.columns, selection.column_counts, selection.key_order, selection.row_order)
    )
    launch(
        _block_sparse,
        (-(-grid.q_len // tile.block_m), n, q.shape[0]),
        (
            q, k, v, selection.blocks, selection.counts, columns, column_counts, key_at, row_at, heads, slots, out,
            heads if lse is None else lse,
        ),
        (
            scale * LOG2E, (selection.skip or 0.0) * LOG2E, grid.q_len, grid.kv_len, grid.row_unit, grid.key_unit,
        ),
        (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3]),
        {
            "D": q.shape[3], "BM": tile.block_m, "BN": tile.block_n, "BLOCK_M": grid.block_m, "BLOCK_N": grid.block_n,
            "STAGES": tile.stages, "KEYS_MOVED": selection.key_order is not None,
            "ROWS_MOVED": selection.row_order is not None, "HAS_COLUMNS": selection.columns is not None,
            "SKIPS": skips, "HAS_LSE": lse is not None, "NOWHERE": NOWHERE,
        },
        (
            *selection.blocks.stride()[:3], *selection.counts.stride()[:2],
            *((0, 0, 0) if selection.columns is None else columns.stride()[:3]),
            *((0, 0) if selection.key_order is None else key_at.stride()[:2]),
            *((0, 0) if selection.row_order is None else row_at.stride()[:2]),
            *((0, 0) if lse is None else lse.stride()[:2]),
        ),
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=MAX_REGISTERS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["length", "blocks"])
def _pool(
    X, MEAN, SIMILARITY, length, blocks, stride_xb, stride_xh, stride_xl,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mean and mean direction of BLOCK rows: D numbers each, filled up to DP."""
    i = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2)
    rows = i * BLOCK + tl.arange(0, BLOCK)
    offs_d = tl.arange(0, DP)
    base = X + b.to(tl.int64) * stride_xb + h.to(tl.int64) * stride_xh + (i * BLOCK).to(tl.int64) * stride_xl
    x = tl.load(
        base + tl.arange(0, BLOCK)[:, None] * stride_xl + offs_d[None, :],
        mask=(rows[:, None] < length) & (offs_d[None, :] < D),
        other=0.0,
    ).to(tl.float32)
    count = tl.minimum(length - i * BLOCK, BLOCK).to(tl.float32)
    at = (b.to(tl.int64) * tl.num_programs(1) + h) * blocks + i
    tl.store(MEAN + at * D + offs_d, tl.sum(x, 0) / count, mask=offs_d < D)
    norm = tl.sqrt(tl.sum(x * x, 1))
    direction = tl.sum(x / tl.maximum(norm, 1e-12)[:, None], 0) / count
    tl.store(SIMILARITY + at, tl.sum(direction * direction, 0))


def pool_blocks(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Means [B, H, blocks, D] and self-similarities [B, H, blocks] of x [B, H, L, D]; float32."""
    x = x if x.stride(3) == 1 else x.contiguous()
    batch, heads, length, head_dim = x.shape
    blocks = -(-length // block)
    mean = x.new_empty(batch, heads, blocks, head_dim, dtype=torch.float32)
    similarity = x.new_empty(batch, heads, blocks, dtype=torch.float32)
    launch(
        _pool, (blocks, heads, batch), (x, mean, similarity), (length, blocks), x.stride()[:3],
        {"D": head_dim, "DP": triton.next_power_of_2(head_dim), "BLOCK": block}, num_warps=POOL_WARPS,
    )  # fmt: skip
    return mean, similarity
