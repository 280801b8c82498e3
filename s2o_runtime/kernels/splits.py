"""Dense heads that are split over keys: how many programs divide a row tile's keys, and one output made of theirs.

Where few queries stand behind many keys, such as in a chunk of a long prompt, a dense head has few programs and each of
them visits every key: they run long after the other heads are done. There the keys of one row tile are split among
several programs (flash-decoding), each writes its output and the log-sum-exp of its scores, and a small kernel weighs
the outputs by these. A split is a range of a sequence's keys, so it makes no difference whether they lie in one tensor,
one sequence behind another or in the pages of a cache. `count_key_splits` alone decides; the other heads compute what
they always do.
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
LONGEST = 0.7  # a dense head is split if a program of it takes more than this share of an SM's mean work
LAST = 0.25  # the last split may keep other SMs waiting for this share of an SM's mean work
SPLITS = (4, 16)  # the fewest, with which they are as short as other heads' programs, and the most
FEWEST_KEYS = 2048  # of a split: 30 us on an H200, where it costs 3 us to start and to write its output
SPLIT_BYTES = 64 << 20  # of workspace for the outputs of splits
COMBINED_ELEMENTS = 2048  # of a program of `_combine`
COMBINE_WARPS = 4


def count_key_splits(call: Call, programs: int, gpu: Resources) -> int:
    """Count the splits of a dense head's keys for a row tile, in a layer with heads of several modes.

    One, unless so many keys precede the queries that a dense program takes longer than the mean work of an SM. Splits
    are short enough to fill up what other heads' programs, which start before them, leave at their end. Their number is
    a power of two, so that calls of nearby lengths are launched alike. Packed sequences count as if all were as long as
    the longest. programs: of a head that is not split, in this launch.
    """
    shape, dense = call.shape, call.tables.dense_heads
    if not dense or shape.offset < shape.q_len:
        return 1
    programs_per_sm = shape.batch * programs * (dense + DENSITY * call.tables.s2o_heads) / gpu.sm_count
    if LONGEST * programs_per_sm > 1:
        return 1
    needed = max(2 / DENSITY, 1 / (LAST * programs_per_sm))  # half as long as other heads' programs, or less
    split_bytes = 4 * shape.batch * dense * programs * call.config.tile.rows * shape.head_dim
    fewest, most = SPLITS
    possible = min(most, shape.kv_len // FEWEST_KEYS, SPLIT_BYTES // split_bytes)
    return 1 if possible < fewest else 1 << int(min(math.ceil(math.log2(needed)), math.log2(possible)))


def allocate_splits(call: Call, splits: int, rows: int, device: torch.device) -> Splits:
    """Allocate what the splits of the dense heads of a call write. rows: of all row tiles of a slice."""
    size = call.shape.batch, splits * call.tables.dense_heads, rows
    return Splits(
        torch.empty(*size, call.shape.head_dim, dtype=torch.float32, device=device),
        torch.empty(size, dtype=torch.float32, device=device),
    )


@triton.jit(do_not_specialize=["q_len", "row_begin", "rows", "splits", "stride_eb", "stride_eh"])
def _combine(
    SPLIT_OUT, SPLIT_LSE, OUT, LSE, CU_Q, LAUNCH_ORDER, q_len, row_begin, rows, splits, stride_o: Strides, stride_eb,
    stride_eh,
    D: tl.constexpr, ROWS: tl.constexpr, PACKED: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Write to OUT[b, h, i] the mean of the splits' outputs, each weighted by e^(its log-sum-exp).

    Programs: (rows / ROWS, dense heads, B). Row i of SPLIT_OUT is query row_begin + i of its sequence. A row without
    keys in any split is 0 and has a log-sum-exp of -inf. SPLIT_OUT, SPLIT_LSE: as in `groups.Splits`.
    """
    b = tl.program_id(2)
    q_first, _, q_len, _ = load_sequence(b, CU_Q, CU_Q, q_len, 0, PACKED)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row_begin + row < q_len
    if row_begin + tl.program_id(0) * ROWS < q_len:
        h = tl.load(LAUNCH_ORDER + tl.program_id(1)).to(tl.int64)
        offs_d = tl.arange(0, D)
        dense = tl.num_programs(1)
        at = (b * splits * dense + tl.program_id(1)).to(tl.int64) * rows + row  # of the first split
        further = dense.to(tl.int64) * rows  # to the next one
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        for split in range(splits):
            highest = tl.maximum(highest, tl.load(SPLIT_LSE + at + split * further, mask=inside, other=float("-inf")))
        highest = tl.where(highest == float("-inf"), 0.0, highest)  # subtract 0 there, not -inf
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D], tl.float32)
        for split in range(splits):
            of_split = at + split * further
            lse = tl.load(SPLIT_LSE + of_split, mask=inside, other=float("-inf"))
            out = tl.load(SPLIT_OUT + of_split[:, None] * D + offs_d[None, :], mask=inside[:, None], other=0.0)
            weight = tl.exp2((lse - highest) * RCP_LN2)
            total += weight
            acc += weight[:, None] * out
        acc = acc / tl.where(total == 0, 1.0, total)[:, None]
        head_row = q_first + row_begin + row
        out_row = head_pointer(OUT, stride_o, b, h) + head_row[:, None].to(tl.int64) * stride_o.row
        tl.store(out_row + offs_d[None, :], acc.to(OUT.dtype.element_ty), mask=inside[:, None])
        if HAS_LSE:
            lse_row = LSE + b.to(tl.int64) * stride_eb + h * stride_eh + head_row
            tl.store(lse_row, highest + tl.log2(total) * LN2, mask=inside)


def combine(splits: Splits, out: Tensor, lse: Tensor | None, call: Call, rows: range) -> None:
    """Write the outputs of the dense heads whose keys were split to out and lse, as for `prefill.prefill`.

    rows: query rows that the splits are of.
    """
    shape, tables = call.shape, call.tables
    assert splits.split_out is not None
    at_once = COMBINED_ELEMENTS // shape.head_dim
    one_entry: dict[str, Argument] = {}
    if call.packed:
        one_entry = {"stride_o": Strides(0, *out.stride()[1:3]), "stride_eb": 0}
    launch(
        _combine,
        (-(-len(rows) // at_once), tables.dense_heads, shape.batch),
        {
            "SPLIT_OUT": splits.split_out, "SPLIT_LSE": splits.split_lse, "OUT": out, "LSE": lse, "CU_Q": call.cu_q,
            "LAUNCH_ORDER": tables.launch_order, "q_len": shape.q_len, "row_begin": rows.start,
            "rows": splits.split_out.shape[2],
            "splits": splits.split_out.shape[1] // tables.dense_heads, **group_strides(o=out),
            **list_strides("bh", e=lse), **one_entry,
        },
        {"D": shape.head_dim, "ROWS": at_once, "PACKED": call.packed, "HAS_LSE": lse is not None},
        num_warps=COMBINE_WARPS,
    )  # fmt: skip
