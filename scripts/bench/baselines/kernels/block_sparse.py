"""Attention over lists of key blocks, for every baseline; and the pooling that SpargeAttn decides by.

A program owns `BM` query rows of one head, or of all heads that read one KV head. It walks the row block's list of key
blocks that all rows see whole, then the blocks on the diagonal, with a mask. Before them it may visit the means of the
blocks that are not listed. Blocks are contiguous in memory, so the
loads of the main loop are pipelined as in dense attention; only where they begin comes from the list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from s2o_runtime.devices import get_capability, is_interpreted
from s2o_runtime.kernels.groups import Strides
from s2o_runtime.kernels.launch import group_strides, launch, list_strides
from s2o_runtime.kernels.primitives import LOG2E, MAX_REGISTERS, head_pointer, online_softmax_update
from scripts.bench.baselines.tiles import block_sparse_tile

if TYPE_CHECKING:
    from scripts.bench.baselines.selection import Selection

INTERPRETED = (9, 0)  # the compute capability whose tiles the interpreter runs
POOL_WARPS = 4
MEANS_AT_ONCE = 32  # of blocks that are not listed; more spill registers at head dim 128
MEAN_STAGES = 3
NOWHERE = tl.constexpr(1 << 30)  # the position of a key that does not exist


class BlockLists(NamedTuple):
    """The key blocks that each row block computes: the tensors of `selection.Selection`."""

    blocks: Tensor
    counts: Tensor
    key_order: Tensor | None
    pruned: Tensor | None


class BlockMeans(NamedTuple):
    """The mean key and value of each key block, which stand for the blocks that are not listed."""

    mean_keys: Tensor | None
    mean_values: Tensor | None


class BlockSparseSizes(NamedTuple):
    """The sizes that the baselines' kernel is compiled for.

    D, BM, BN, STAGES: as in `groups.Sizes`; BLOCK_M, BLOCK_N: query rows and keys of a selection's block, multiples of
    BM and BN; PACKED: query heads in the rows of a program; BC, MEAN_STAGES: block means of a tile, and stages of their
    loop.
    """

    D: int
    BM: int
    BN: int
    BLOCK_M: int
    BLOCK_N: int
    STAGES: int
    PACKED: int
    BC: int
    MEAN_STAGES: int


class BlockSparseMode(NamedTuple):
    """The options that the baselines' kernel is compiled with; `_block_sparse` says what each changes."""

    KEYS_MOVED: bool
    HAS_MEANS: bool


# The types of the kernel's constexpr parameters.
CONSTANTS: dict[str, Any] = {"SIZES": BlockSparseSizes, "MODE": BlockSparseMode}


@triton.jit(
    do_not_specialize=[
        "group", "q_len", "kv_len", "key_unit", "stride_lb", "stride_lh", "stride_lr", "stride_cb",
        "stride_ch", "stride_pb", "stride_ph", "stride_xb", "stride_xh", "stride_xr",
    ]
)  # fmt: skip
def _block_sparse(
    Q, K, V, LISTS: BlockLists, MEANS: BlockMeans, OUT,
    qk_scale, group, q_len, kv_len, key_unit,
    stride_q: Strides, stride_k: Strides, stride_v: Strides, stride_o: Strides, stride_m: Strides,
    stride_lb, stride_lh, stride_lr, stride_cb, stride_ch, stride_pb, stride_ph, stride_xb, stride_xh,
    stride_xr,
    SIZES: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Attention of one row tile over its row block's list of key blocks.

    The softmax is over the listed keys, then over the blocks on the diagonal with a causal mask. Programs: (row tiles,
    the last ones first; H; B), where H is Hq / PACKED: row r is query r // PACKED of head r % PACKED of those of a
    program. T is the input type. Constants are the fields of SIZES and MODE (`BlockSparseSizes`, `BlockSparseMode`); a
    tensor with the name of a constant behind it is read only if that constant is true, and may be absent otherwise.

        Q, OUT              T [B, Hq, Lq, D], strides q and o
        K, V                T [B, Hkv, Lk, D], strides k and v, permuted as LISTS.key_order says
        LISTS.blocks        int32 [B, H, row blocks, width], strides l: key blocks of each row block, boundary last
        LISTS.counts        int32 [B, H, row blocks], strides c: how many of them count
        LISTS.key_order     int32 [B, Hkv, Lk], strides p: the position of each permuted key (KEYS_MOVED)
        LISTS.pruned        int8 [B, H, row blocks, key blocks], strides x: 1 for whole blocks that are not listed
                            (HAS_MEANS)
        MEANS.mean_keys, .mean_values
                            T [B, Hkv, key blocks, D], strides m: what stands for each key of those (HAS_MEANS)

    qk_scale: the scores' scale times log2(e); group: query heads of a KV head; key_unit: keys
    that are permuted among one another (`selection.Grid`).
    """
    D: tl.constexpr = SIZES.D
    BM: tl.constexpr = SIZES.BM
    BN: tl.constexpr = SIZES.BN
    BLOCK_M: tl.constexpr = SIZES.BLOCK_M
    BLOCK_N: tl.constexpr = SIZES.BLOCK_N
    STAGES: tl.constexpr = SIZES.STAGES
    PACKED: tl.constexpr = SIZES.PACKED
    BC: tl.constexpr = SIZES.BC
    MEAN_STAGES: tl.constexpr = SIZES.MEAN_STAGES
    # the last rows have the longest lists, as a rule: they go first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    kv_head = h * PACKED // group
    row0 = tile * BM
    i = row0 // BLOCK_M
    offset = kv_len - q_len

    offs_n = tl.arange(0, BN)
    offs_d = tl.arange(0, D)
    rows = row0 + tl.arange(0, BM)
    real = rows < q_len * PACKED
    query = rows // PACKED
    position = offset + query
    q_row = query.to(tl.int64)[:, None]
    q_head = (h * PACKED + rows % PACKED)[:, None] if PACKED > 1 else h
    q = tl.load(
        head_pointer(Q, stride_q, b, q_head) + q_row * stride_q.row + offs_d[None, :], mask=real[:, None], other=0.0
    )
    k_tile = head_pointer(K, stride_k, b, kv_head) + offs_n[None, :] * stride_k.row + offs_d[:, None]
    v_tile = head_pointer(V, stride_v, b, kv_head) + offs_n[:, None] * stride_v.row + offs_d[None, :]

    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)

    # where the diagonal begins and ends for this row block; `Grid.full` and `Grid.visible`
    first = offset + i * BLOCK_M // PACKED
    last = tl.minimum(offset + (i * BLOCK_M + BLOCK_M - 1) // PACKED, kv_len - 1)
    begin = (first + 1) // key_unit * key_unit
    end = tl.minimum((last // key_unit + 1) * key_unit, kv_len)
    boundary = (end - begin + BLOCK_N - 1) // BLOCK_N

    if MODE.HAS_MEANS:
        offs_c = tl.arange(0, BC)
        pruned = LISTS.pruned + b * stride_xb + h * stride_xh + i * stride_xr + offs_c
        mean_key = (
            head_pointer(MEANS.mean_keys, stride_m, b, kv_head) + offs_c[None, :] * stride_m.row + offs_d[:, None]
        )
        mean_value = (
            head_pointer(MEANS.mean_values, stride_m, b, kv_head) + offs_c[:, None] * stride_m.row + offs_d[None, :]
        )
        whole = begin // BLOCK_N
        for j in tl.range(0, whole, BC, num_stages=MEAN_STAGES):
            exists = j + offs_c < whole
            left = tl.load(pruned + j, mask=exists, other=0) != 0
            k = tl.load(mean_key + j * stride_m.row, mask=exists[None, :], other=0.0)
            v = tl.load(mean_value + j * stride_m.row, mask=exists[:, None], other=0.0)
            m, l, acc = online_softmax_update(q, k, v, m, l, acc, qk_scale, left[None, :], True)
        # each mean stands for BLOCK_N keys of the same score and value
        l *= BLOCK_N
        acc *= BLOCK_N

    # blocks that every row sees whole
    chosen = tl.load(LISTS.counts + b * stride_cb + h * stride_ch + i) - boundary
    blocks = LISTS.blocks + b * stride_lb + h * stride_lh + i * stride_lr
    PER_BLOCK: tl.constexpr = BLOCK_N // BN
    for t in tl.range(0, chosen * PER_BLOCK, num_stages=STAGES):
        key = (tl.load(blocks + t // PER_BLOCK) * BLOCK_N + t % PER_BLOCK * BN).to(tl.int64)
        k = tl.load(k_tile + key * stride_k.row)
        v = tl.load(v_tile + key * stride_v.row)
        m, l, acc = online_softmax_update(q, k, v, m, l, acc, qk_scale, True, False)

    for t in tl.range(0, (end - begin + BN - 1) // BN, num_stages=1):
        j = begin + t * BN
        keys = j + offs_n
        exists = keys < kv_len
        key_position = keys
        if MODE.KEYS_MOVED:
            key_order = LISTS.key_order + b * stride_pb + kv_head * stride_ph
            key_position = tl.load(key_order + keys, mask=exists, other=NOWHERE)
        k = tl.load(k_tile + j.to(tl.int64) * stride_k.row, mask=exists[None, :], other=0.0)
        v = tl.load(v_tile + j.to(tl.int64) * stride_v.row, mask=exists[:, None], other=0.0)
        visible = key_position[None, :] <= position[:, None]
        m, l, acc = online_softmax_update(q, k, v, m, l, acc, qk_scale, visible, True)

    out = head_pointer(OUT, stride_o, b, q_head) + q_row * stride_o.row + offs_d[None, :]
    tl.store(out, (acc / l[:, None]).to(OUT.dtype.element_ty), mask=real[:, None])


def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, means: tuple[Tensor, Tensor] | None, selection: Selection, scale: float,
    out: Tensor,
) -> None:  # fmt: skip
    """Attention of a layer over what a selection lists.

    Args:
        q: [B, Hq, Lq, D], bfloat16 or float16, D 64 or 128; the last dimension of every tensor is contiguous.
        k, v: [B, Hkv, Lk, D], permuted as `selection.key_order` says.
        means: of the keys and of the values of each block, contiguous [B, Hkv, key blocks, D], if the selection has
            mean keys.
        selection: of blocks.
        scale: multiplies the scores.
        out: [B, Hq, Lq, D], to write.

    Raises:
        InputError: the kernel has no tile for the head dim, the GPU or the selection's blocks.
    """
    here = INTERPRETED if is_interpreted() else get_capability(q.device)
    grid, heads = selection.grid, q.shape[1] // selection.grid.packed
    tile = block_sparse_tile(q.shape[3], here, grid.block_m, grid.block_n)
    row_tiles = -(-grid.q_len * grid.packed // tile.block_m)
    pruned = None if selection.pruned is None else selection.pruned.view(torch.int8)
    launch(
        _block_sparse,
        (row_tiles, heads, q.shape[0]),
        {
            "Q": q, "K": k, "V": v, "OUT": out,
            "LISTS": BlockLists(selection.blocks, selection.counts, selection.key_order, pruned),
            "MEANS": BlockMeans(*(means or (None, None))),
            "qk_scale": scale * LOG2E, "group": q.shape[1] // k.shape[1], "q_len": grid.q_len, "kv_len": grid.kv_len,
            "key_unit": grid.key_unit,
            **group_strides(q=q, k=k, v=v, o=out, m=k if means is None else means[0]),
            **list_strides("bhr", l=selection.blocks, x=pruned),
            **list_strides("bh", c=selection.counts, p=selection.key_order),
        },
        {
            "SIZES": BlockSparseSizes(
                D=q.shape[3], BM=tile.block_m, BN=tile.block_n, BLOCK_M=grid.block_m, BLOCK_N=grid.block_n,
                STAGES=tile.stages, PACKED=grid.packed, BC=MEANS_AT_ONCE, MEAN_STAGES=MEAN_STAGES,
            ),
            "MODE": BlockSparseMode(
                KEYS_MOVED=selection.key_order is not None, HAS_MEANS=means is not None
            ),
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=MAX_REGISTERS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["length", "blocks"])
def _pool(
    X, MEAN, SIMILARITY, length, blocks, stride_xb, stride_xh, stride_xl,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mean of BLOCK rows, and the squared length of the mean of their directions, which is their self-similarity.

    Programs: (blocks, H, B). DP: D filled up to a power of two. T is the input type.

        X                   T [B, H, L, D], strides x
        MEAN                float32 [B, H, blocks, D]
        SIMILARITY          float32 [B, H, blocks]
    """
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
        _pool,
        (blocks, heads, batch),
        {
            "X": x, "MEAN": mean, "SIMILARITY": similarity, "length": length, "blocks": blocks,
            **list_strides("bhl", x=x),
        },
        {"D": head_dim, "DP": triton.next_power_of_2(head_dim), "BLOCK": block},
        num_warps=POOL_WARPS,
    )  # fmt: skip
    return mean, similarity
