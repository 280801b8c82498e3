"""Compute a checked call with a backend, densely, or within a window."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..call import PLAIN, Call, Scoring, cap_scores, softmax
from ..config import HEAD_DIMS, LayerConfig
from ..devices import launch_on
from ..errors import InputError
from ..reference.attention import Attended, s2o_attention_reference
from ..reference.dense import dense_attention, log_sum_exp, with_sink_key
from ..sequences import CallShape, call_shape, lay_out, list_sequences, measure_density
from ..tiles import pad_head_dim


@dataclass(frozen=True)
class AttentionStats:
    """The record of one call.

    >>> from s2o_runtime import s2o_attention
    >>> q, k, v = (torch.randn(1, 2, 256, 64) for _ in range(3))
    >>> s2o_attention(q, k, v, LayerConfig.uniform(2, mode="dense"), return_stats=True).stats.density.tolist()
    [1.0, 1.0]
    """

    backend: str  # that ran: "triton", "reference" or "dense"
    reason: str  # for this backend
    config: LayerConfig
    shape: CallShape
    kv_start: Tensor | None  # integers [B], the first key of each sequence that counts, as it was given
    visited: Tensor | None  # int32 [B, Hq, row tiles], the prefix keys that each row tile computed; None if dense
    cu_q: Tensor | None = None  # int32 [N + 1], where packed sequences begin, as they were given
    cu_k: Tensor | None = None

    @property
    def density(self) -> Tensor:
        """Query-key pairs computed over causal pairs, window included: float64 [Hq]; dense is 1.0."""
        if self.visited is None:
            return torch.ones(self.shape.query_heads, dtype=torch.float64)
        return measure_density(self.visited, self.config, self.shape, self.kv_start, self.cu_q, self.cu_k)


class Attention(NamedTuple):
    """The result of a call that was asked for more than the output. It always has three fields.

    >>> from s2o_runtime import s2o_attention
    >>> q, k, v = (torch.randn(1, 2, 256, 64) for _ in range(3))
    >>> out, lse, stats = s2o_attention(q, k, v, LayerConfig.uniform(2, tau=0.5, segment=128), return_lse=True)
    >>> lse.shape, stats
    (torch.Size([1, 2, 256]), None)
    """

    out: Tensor  # in the shape and type of q
    lse: Tensor | None  # float32, the log-sum-exp of the scores that each row computed; None without `return_lse`
    stats: AttentionStats | None  # None without `return_stats`

    @property
    def density(self) -> Tensor:
        """`stats.density`: float64 [Hq]. Raises InputError without `return_stats`."""
        if self.stats is None:
            raise InputError("the call kept no statistics: pass return_stats=True for its density")
        return self.stats.density


ROWS = 512  # computed together at least; a block of rows sees its own keys and window - 1 before them


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, scoring: Scoring = PLAIN, kv_start: Tensor | None = None
) -> Tensor:
    """Compute causal attention in which a query sees the last `window` keys up to its own.

    Query i stands at position Lk - Lq + i. Scores without a soft cap go through torch's SDPA; soft-capped ones are
    products in the type of q and a softmax in float32, as in transformers' eager attention.

    Args:
        q, k, v, kv_start: as for `dense_attention`.
        window: keys that a query sees, itself included; at least 1.

    Returns:
        [B, Hq, Lq, Dv] in the type of q; rows before `kv_start` are zero.
    """
    shape = call_shape(q, k, v, kv_start)
    scoring = scoring.checked(shape, q)
    rows = max(ROWS, window)
    blocks = []
    for begin in range(0, shape.q_len, rows):
        end = min(begin + rows, shape.q_len)
        first, last = max(0, shape.offset + begin - window + 1), shape.offset + end
        position = torch.arange(shape.offset + begin, last, device=q.device)[:, None]
        key = torch.arange(first, last, device=q.device)
        visible = (key <= position) & (key > position - window)
        if kv_start is not None:
            visible = (visible & (key >= kv_start[:, None, None]))[:, None]
        blocks.append(_attend_visible(q[:, :, begin:end], k[:, :, first:last], v[:, :, first:last], visible, scoring))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 2)


def _attend_visible(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scoring: Scoring) -> Tensor:
    """Attend from rows to the keys that `visible`, bool [.., rows, keys], marks; rows without any are zero."""
    scale, softcap, sinks = scoring
    assert scale is not None
    blind = ~visible.any(-1, keepdim=True)
    if softcap is None and sinks is not None:
        q, k, v = with_sink_key(q, k, v, sinks, scale)
        visible = F.pad(visible, (1, 0), value=True)
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
    if softcap is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible | blind, scale=scale)
        return out.masked_fill(blind, 0.0)
    scores = cap_scores((q @ k.transpose(2, 3) * scale).float(), softcap).masked_fill(~visible, float("-inf"))
    weights = softmax(scores.masked_fill(blind, 0.0), None if sinks is None else sinks.float()[None, :, None, None])
    return (weights.to(v.dtype) @ v).masked_fill(blind, 0.0)


def compute(call: Call, backend: str, out: Tensor | None = None) -> Attended:
    """Run a call with "triton", "reference" or "dense".

    out: of a packed call, a tensor that `supports_output`: written and returned.
    """
    if backend == "triton":
        outputs = _run_kernels(call, out)
    else:
        outputs = (_run_one_by_one if call.packed else _run_in_torch)(call, backend)
    if not call.packed:
        return outputs
    computed, visited, lse = outputs
    lse = None if lse is None else lse[0]
    if out is None:
        return Attended(computed[0].transpose(0, 1), visited, lse)
    if backend != "triton":
        out.copy_(computed[0].transpose(0, 1))
    return Attended(out, visited, lse)


def supports_output(out: Tensor, q: Tensor) -> bool:
    """Return whether the kernels can write the output of packed queries [Tq, Hq, D] straight into a tensor."""
    laid = out.is_contiguous() and not out.data_ptr() & 15 and out.shape[2] in HEAD_DIMS  # without padding
    # the kernels still read the queries when they write
    return laid and out.untyped_storage().data_ptr() != q.untyped_storage().data_ptr()


def _run_kernels(call: Call, given: Tensor | None) -> Attended:
    """Run S2O's kernels; other head dims run as the next larger one that holds q, k and v, filled with zeros."""
    from ..kernels.prefill import run_prefill

    value_dim, head_dim = call.shape.value_dim, pad_head_dim(call.shape.widest)
    shape = replace(call.shape, head_dim=head_dim, value_dim=head_dim)
    batched = (tensor.expand(shape.batch, -1, -1, -1) for tensor in (call.q, call.k, call.v))  # the packed ones
    q, k, v = (lay_out(tensor, head_dim, call.packed) for tensor in batched)
    # such as the column of a mask: kernels take one entry after the other
    positions = (call.kv_start, call.cu_q, call.cu_k)
    kv_start, cu_q, cu_k = (None if tensor is None else tensor.contiguous() for tensor in positions)
    sinks = call.scoring.sinks
    scoring = call.scoring._replace(sinks=None if sinks is None else sinks.contiguous())
    call = replace(call, q=q, k=k, v=v, shape=shape, scoring=scoring, kv_start=kv_start, cu_q=cu_q, cu_k=cu_k)
    given = None if given is None else given.transpose(0, 1)[None]
    with launch_on(q.device):
        out, visited, lse = run_prefill(call, given)
    return Attended(out if head_dim == value_dim else out[..., :value_dim], visited, lse)


def _run_in_torch(call: Call, backend: str) -> Attended:
    """Run one of the backends that need no kernel."""
    q, k, v, kv_start = call.q, call.k, call.v, call.kv_start
    scoring = call.scoring.arguments()
    if backend == "reference":
        out, visited, lse = s2o_attention_reference(q, k, v, call.config, kv_start=kv_start, **scoring)
        return Attended(out, visited, lse.float() if call.with_lse and lse is not None else None)
    out = dense_attention(q, k, v, kv_start=kv_start, **scoring)
    return Attended(out, None, log_sum_exp(q, k, kv_start=kv_start, **scoring) if call.with_lse else None)


def _run_one_by_one(call: Call, backend: str) -> Attended:
    """Run packed sequences, each as a call of its own."""
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
    for sequence in list_sequences(call.starts, shape):
        of_sequence = _run_in_torch(call.take(sequence), backend)
        sequence.take(out, sequence.rows).copy_(of_sequence.out)
        if visited is not None and of_sequence.visited is not None:
            visited[sequence.number, :, : of_sequence.visited.shape[2]] = of_sequence.visited[0]
        if lse is not None and of_sequence.lse is not None:
            sequence.take(lse, sequence.rows).copy_(of_sequence.lse)
    return Attended(out, visited, lse)
