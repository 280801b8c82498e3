"""Computing a call with the backend that was chosen."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from s2o_runtime.call import Call
from s2o_runtime.config import HEAD_DIMS
from s2o_runtime.devices import launching_on
from s2o_runtime.errors import InputError
from s2o_runtime.reference.attention import s2o_attention_reference
from s2o_runtime.reference.dense import dense_attention, log_sum_exp
from s2o_runtime.shapes import laid_out, packed_sequences
from s2o_runtime.tiles import padded_head_dim


class Outputs(NamedTuple):
    """What a backend computed.

    Attributes:
        out: [B, Hq, Lq, Dv], packed [Tq, Hq, Dv].
        visited: int32 [B, Hq, row tiles], the prefix keys that each row tile computed; None from dense attention.
        lse: float32 [B, Hq, Lq], packed [Hq, Tq]; None where it was not asked for.
    """

    out: Tensor
    visited: Tensor | None
    lse: Tensor | None


def compute(call: Call, backend: str, out: Tensor | None = None) -> Outputs:
    """Run a call with "triton", "reference" or "dense".

    Args:
        call: the call.
        backend: which of the three.
        out: of a packed call, a tensor that `takes_output`: written and returned.
    """
    if backend == "triton":
        outputs = _with_kernels(call, out)
    elif call.packed:
        outputs = _one_by_one(call, backend)
    else:
        outputs = _in_torch(call, backend)
    if not call.packed:
        return outputs
    computed, visited, lse = outputs
    lse = None if lse is None else lse[0]
    if out is None:
        return Outputs(computed[0].transpose(0, 1), visited, lse)
    if backend != "triton":
        out.copy_(computed[0].transpose(0, 1))
    return Outputs(out, visited, lse)


def takes_output(out: Tensor, q: Tensor) -> bool:
    """Whether the kernels can write the output of these packed queries, [Tq, Hq, D], straight into a tensor.

    They cannot if `out` shares memory with the queries, which they still read, or if the head dim is padded.
    """
    laid = out.is_contiguous() and not out.data_ptr() & 15 and out.shape[2] in HEAD_DIMS
    return laid and out.untyped_storage().data_ptr() != q.untyped_storage().data_ptr()


def _with_kernels(call: Call, given: Tensor | None = None) -> Outputs:
    """S2O's kernels; other head dims run as the next larger one that holds q, k and v, filled with zeros."""
    from s2o_runtime.kernels.prefill import s2o_prefill

    value_dim, head_dim = call.shape.value_dim, padded_head_dim(call.shape.widest)
    shape = replace(call.shape, head_dim=head_dim, value_dim=head_dim)
    batched = (tensor.expand(shape.batch, -1, -1, -1) for tensor in (call.q, call.k, call.v))  # the packed ones
    q, k, v = (laid_out(tensor, head_dim, call.packed) for tensor in batched)
    # such as the column of a mask: kernels take one entry after the other
    positions = (call.kv_start, call.cu_q, call.cu_k)
    kv_start, cu_q, cu_k = (None if tensor is None else tensor.contiguous() for tensor in positions)
    sinks = None if call.sinks is None else call.sinks.contiguous()
    scoring = call.scoring._replace(sinks=sinks)
    call = replace(call, q=q, k=k, v=v, shape=shape, scoring=scoring, kv_start=kv_start, cu_q=cu_q, cu_k=cu_k)
    given = None if given is None else given.transpose(0, 1)[None]
    with launching_on(q.device):
        out, visited, lse = s2o_prefill(call, given)
    return Outputs(out if head_dim == value_dim else out[..., :value_dim], visited, lse)


def _in_torch(call: Call, backend: str) -> Outputs:
    """The backends that need no kernel."""
    q, k, v, kv_start = call.q, call.k, call.v, call.kv_start
    scoring = call.scoring.arguments()
    if backend == "reference":
        out, visited, lse = s2o_attention_reference(q, k, v, call.config, kv_start=kv_start, **scoring)
        return Outputs(out, visited, lse.float() if call.with_lse else None)
    out = dense_attention(q, k, v, kv_start=kv_start, **scoring)
    return Outputs(out, None, log_sum_exp(q, k, kv_start=kv_start, **scoring) if call.with_lse else None)


def _one_by_one(call: Call, backend: str) -> Outputs:
    """Packed sequences, each as a call of its own."""
    assert call.cu_q is not None
    assert call.cu_k is not None
    q, shape = call.q, call.shape
    out = q.new_zeros(*q.shape[:3], shape.value_dim)
    lse = q.new_zeros(q.shape[:3], dtype=torch.float32) if call.with_lse else None
    visited: Tensor | None = None
    if backend == "reference":
        row_tiles = shape.row_tiles(call.config.tile.block_m)
        visited = torch.zeros(shape.batch, shape.query_heads, row_tiles, dtype=torch.int32, device=q.device)
    for name, edges, total, longest in (
        ("cu_seqlens_q", call.cu_q.tolist(), q.shape[2], shape.q_len),
        ("cu_seqlens_k", call.cu_k.tolist(), call.k.shape[2], shape.kv_len),
    ):
        if not all(0 <= begin <= end <= min(total, begin + longest) for begin, end in pairwise(edges)):
            raise InputError(f"{name} is {edges}: expected to ascend from 0 to {total} by at most {longest} at a time")
    for b, (rows, keys) in enumerate(packed_sequences(call.cu_q, call.cu_k)):
        if not len(rows):
            continue
        sequence = _in_torch(call.sequence(rows, keys), backend)
        out[:, :, rows.start : rows.stop] = sequence.out
        if visited is not None and sequence.visited is not None:
            visited[b, :, : sequence.visited.shape[2]] = sequence.visited[0]
        if lse is not None and sequence.lse is not None:
            lse[:, :, rows.start : rows.stop] = sequence.lse
    return Outputs(out, visited, lse)
