"""Representatives: means of the queries of each part of a segment (Algorithm 1, line 7)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...call import Call
from ...sequences import Starts
from ..groups import Strides
from ..launch import group_strides, launch
from ..primitives import LOG2E, head_pointer, load_sequence

REPRESENTATIVE_WARPS = 4
REPRESENTATIVE_STAGES = 5  # a program's loads are all that it waits for, and few programs run beside it


@triton.jit(do_not_specialize=["q_len", "offset"])
def _representatives(
    Q, REP, STARTS: Starts, PART, REPRESENTATIVES, qk_scale, q_len, offset, stride_q: Strides,
    stride_r: Strides,
    D: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    HAS_START: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Write to REP[b, h, n] the mean of those queries of part n that count, times qk_scale; 0 if none does.

    Programs: (parts / PARTS, Hq, B). A program computes PARTS parts of a head with R representatives: one by a sum,
    several by a product with ones; those of other heads end at once. Reading the queries takes the time, so loads run
    ahead, and rows are summed across threads only at the end.
    """
    n = tl.program_id(0) * PARTS
    h = tl.program_id(1)
    b = tl.program_id(2)
    part = tl.load(PART + h)
    start = tl.load(STARTS.kv_start + b).to(tl.int32) if HAS_START else 0
    q_first, _, q_len, offset = load_sequence(b, STARTS.cu_q, STARTS.cu_k, q_len, offset, PACKED)
    end = tl.minimum((n + PARTS) * part, q_len)
    begin = tl.maximum(n * part, start - offset)
    if (part > 0) & (n * part < q_len) & (tl.load(REPRESENTATIVES + h) == R):
        offs_d = tl.arange(0, D)
        parts = n + tl.arange(0, PARTS)
        total = tl.zeros([PARTS if PARTS > 1 else ROWS, D], tl.float32)
        base = head_pointer(Q, stride_q, b, h)
        for row in tl.range(begin, end, ROWS, num_stages=STAGES):
            rows = row + tl.arange(0, ROWS)
            q = tl.load(
                base + (q_first + rows)[:, None].to(tl.int64) * stride_q.row + offs_d[None, :],
                mask=rows[:, None] < end,
                other=0.0,
            )
            if PARTS == 1:
                total += q.to(tl.float32)
            else:
                belongs = (rows // part)[None, :] == parts[:, None]
                total = tl.dot(belongs.to(q.dtype), q, total, input_precision="ieee")
        if PARTS == 1:
            total = tl.sum(total, 0)[None, :]
        size = tl.minimum((parts + 1) * part, q_len) - tl.maximum(parts * part, start - offset)
        mean = total * (qk_scale / tl.maximum(size, 1).to(tl.float32))[:, None]
        out = head_pointer(REP, stride_r, b, h) + parts[:, None].to(tl.int64) * stride_r.row
        tl.store(out + offs_d[None, :], mean.to(REP.dtype.element_ty), mask=(parts * part < q_len)[:, None])


def make_representatives(call: Call) -> Tensor:
    """Average the queries of all parts of all segments (Algorithm 1, line 7), for scores in base 2.

    A head of the call has a prefix. Returns REP: [B, Hq, parts, D] in q's type, times the scale of scores in base 2.
    Heads with longer parts use fewer rows; dense heads none.
    """
    q, shape, tables = call.q, call.shape, call.tables
    size = shape.batch, shape.query_heads, -(-shape.q_len // tables.min_rows_per_representative)
    out = torch.empty(*size, shape.head_dim, dtype=q.dtype, device=q.device)
    for count in tables.representative_counts:
        parts = count_parts_at_once(count)
        launch(
            _representatives,
            (-(-out.shape[2] // parts), shape.query_heads, shape.batch),
            {
                "Q": q, "REP": out, "STARTS": call.starts, "PART": tables.rows_per_representative,
                "REPRESENTATIVES": tables.representatives, "qk_scale": call.scale * LOG2E,
                "q_len": shape.q_len, "offset": shape.offset, **group_strides(q=q, r=out),
            },
            {
                "D": shape.head_dim, "R": count, "PARTS": parts, "ROWS": count_representative_rows(shape.head_dim),
                "STAGES": REPRESENTATIVE_STAGES, "HAS_START": call.kv_start is not None, "PACKED": call.packed,
            },
            num_warps=REPRESENTATIVE_WARPS,
        )  # fmt: skip
    return out


def count_parts_at_once(count: int) -> int:
    """Count the parts of a segment with `count` representatives that a program of `_representatives` computes."""
    return 1 if count < 8 else 16


def count_representative_rows(head_dim: int) -> int:
    """Count the query rows that a program of `_representatives` loads at once."""
    return 64 if head_dim <= 128 else 32
