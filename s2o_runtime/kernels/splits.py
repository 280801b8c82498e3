"""Calls whose keys are split: how many programs share the keys of a row tile, and one output made of theirs.

Where few queries stand behind many keys, such as in a chunk of a long prompt or an agent's turn, there are fewer row
tiles than a GPU can run at once, and a dense head's run long after the others are done. There several programs share
the keys of each row tile (flash-decoding):

- Dense heads and dense last rows: each program visits a range of the keys, that of the last split the diagonal and the
  sink too.
- Heads that stop: all of S programs compute the window and the first tile of the order, and each counts 1 / S of them.
  Number j visits the tiles 1 + j, 1 + j + S, ... alone. So all see the same falling gains, and the denominator of each
  is 1 / S of the whole one as far as its own tiles tell: gain, stop and tail follow the same rules as without splits,
  and each program stops on its own. The first tile is shared because no other is like it: of heads that look at few
  keys it has most of the sum, and programs that do not know of it visit half as many keys again.

A program writes its output and the log-sum-exp of its scores, and a small kernel weighs the outputs by these. It makes
no difference whether keys lie in one tensor, one sequence behind another or in the pages of a cache.
`count_key_splits` alone decides.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import Call
from ..devices import Resources
from .groups import Splits, Strides
from .launch import Argument, group_strides, launch, list_strides
from .primitives import LN2, RCP_LN2, head_pointer, load_sequence

DENSITY = 0.25  # the share of its keys that a head that stops is assumed to visit; the true one is not known in advance
MOST_SPLITS = 16
FEWEST_KEYS = 4096  # of a split: a head that stops visits 1024 of them, and its window, which is computed anew
SPLIT_BYTES = 64 << 20  # of workspace for the outputs of splits
COMBINED_ELEMENTS = 2048  # of a program of `_combine`
COMBINE_WARPS = 4


def count_key_splits(call: Call, programs: int, gpu: Resources) -> int:
    """Count the programs that share the keys of a row tile.

    As many as let the longest program take no less than an SM's share of the work: more visit more keys and were hardly
    faster (docs/results/short-calls-h200.txt). The number is a power of two, so that calls of nearby lengths are
    launched alike. Packed sequences count as if all were as long as the longest. programs: of a head without splits, in
    this launch.
    """
    shape, tables = call.shape, call.tables
    if shape.offset < shape.q_len or not tables.s2o_heads:
        return 1
    longest = 1.0 if tables.works_unevenly else DENSITY
    dense_rows = min(call.config.last_rows / shape.q_len, 1.0)  # the share of a head's programs that visit all keys
    of_head = dense_rows + (1 - dense_rows) * DENSITY
    of_sm = shape.batch * programs * (tables.dense_heads + of_head * tables.s2o_heads) / gpu.sm_count
    split_bytes = 4 * shape.batch * shape.query_heads * programs * call.config.tile.rows * shape.head_dim
    most = min(longest / of_sm, MOST_SPLITS, shape.kv_len // FEWEST_KEYS, SPLIT_BYTES // split_bytes)
    return 1 << int(math.log2(max(1, most)))


def allocate_splits(call: Call, splits: int, rows: int, device: torch.device) -> Splits:
    """Allocate what the programs of so many splits write. rows: of all row tiles of a slice."""
    size = call.shape.batch, splits, call.shape.query_heads
    return Splits(
        torch.empty(*size, rows, call.shape.head_dim, dtype=torch.float32, device=device),
        torch.empty(*size, rows, dtype=torch.float32, device=device),
        torch.empty(*size, rows // call.config.tile.block_m, dtype=torch.int32, device=device),
    )


@triton.jit(
    do_not_specialize=["q_len", "row_begin", "rows", "splits", "stride_cb", "stride_ch", "stride_eb", "stride_eh"]
)
def _combine(
    SPLIT_OUT, SPLIT_LSE, SPLIT_VISITED, OUT, LSE, VISITED, CU_Q, q_len, row_begin, rows, splits, stride_o: Strides,
    stride_cb, stride_ch, stride_eb, stride_eh,
    D: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr, PACKED: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Write to OUT[b, h, i] the mean of the splits' outputs, each weighted by e^(its log-sum-exp).

    Programs: (rows / ROWS, Hq, B). Row i of SPLIT_OUT is query row_begin + i of its sequence. A row without keys in any
    split is 0 and has a log-sum-exp of -inf. VISITED, as for `prefill._prefill`, gets the sums of SPLIT_VISITED; these
    and SPLIT_OUT and SPLIT_LSE are as in `groups.Splits`.
    """
    h = tl.program_id(1)
    b = tl.program_id(2)
    heads = tl.num_programs(1)
    first = tl.program_id(0) * ROWS
    at = (b * splits * heads + h).to(tl.int64) * rows + first  # of the first split
    further = heads.to(tl.int64) * rows  # to the next one
    if first % BM == 0 and row_begin + first < q_len:
        visited = 0
        for split in range(splits):
            visited += tl.load(SPLIT_VISITED + (at + split * further) // BM)
        head_tiles = VISITED + b.to(tl.int64) * stride_cb + h.to(tl.int64) * stride_ch
        tl.store(head_tiles + (row_begin + first) // BM, visited)
    q_first, _, q_len, _ = load_sequence(b, CU_Q, CU_Q, q_len, 0, PACKED)
    if row_begin + first < q_len:
        row = tl.arange(0, ROWS)
        inside = row_begin + first + row < q_len
        offs_d = tl.arange(0, D)
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        for split in range(splits):
            lse = tl.load(SPLIT_LSE + at + split * further + row, mask=inside, other=float("-inf"))
            highest = tl.maximum(highest, lse)
        highest = tl.where(highest == float("-inf"), 0.0, highest)  # subtract 0 there, not -inf
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D], tl.float32)
        for split in range(splits):
            of_split = at + split * further + row
            lse = tl.load(SPLIT_LSE + of_split, mask=inside, other=float("-inf"))
            out = tl.load(SPLIT_OUT + of_split[:, None] * D + offs_d[None, :], mask=inside[:, None], other=0.0)
            weight = tl.exp2((lse - highest) * RCP_LN2)
            total += weight
            acc += weight[:, None] * out
        acc = acc / tl.where(total == 0, 1.0, total)[:, None]
        head_row = q_first + row_begin + first + row
        out_row = head_pointer(OUT, stride_o, b, h) + head_row[:, None].to(tl.int64) * stride_o.row
        tl.store(out_row + offs_d[None, :], acc.to(OUT.dtype.element_ty), mask=inside[:, None])
        if HAS_LSE:
            lse_row = LSE + b.to(tl.int64) * stride_eb + h.to(tl.int64) * stride_eh + head_row
            tl.store(lse_row, highest + tl.log2(total) * LN2, mask=inside)


def combine(parts: Splits, out: Tensor, visited: Tensor, lse: Tensor | None, call: Call, rows: range) -> None:
    """Write the outputs, visited keys and log-sum-exps of a call whose keys were split, as for `prefill.prefill`.

    rows: query rows that `parts` are of.
    """
    shape = call.shape
    assert parts.split_out is not None
    at_once = COMBINED_ELEMENTS // shape.head_dim
    one_entry: dict[str, Argument] = {}
    if call.packed:
        one_entry = {"stride_o": Strides(0, *out.stride()[1:3]), "stride_eb": 0}
    launch(
        _combine,
        (-(-len(rows) // at_once), shape.query_heads, shape.batch),
        {
            **{name.upper(): part for name, part in parts._asdict().items()}, "OUT": out, "LSE": lse,
            "VISITED": visited, "CU_Q": call.cu_q, "q_len": shape.q_len, "row_begin": rows.start,
            "rows": parts.split_out.shape[3], "splits": parts.split_out.shape[1], **group_strides(o=out),
            **list_strides("bh", c=visited, e=lse), **one_entry,
        },
        {
            "D": shape.head_dim, "ROWS": at_once, "BM": call.config.tile.block_m, "PACKED": call.packed,
            "HAS_LSE": lse is not None,
        },
        num_warps=COMBINE_WARPS,
    )  # fmt: skip
