"""The shape of one attention call: what fits together, and where its segments and tiles lie.

Query i stands at position `kv_len - q_len + i`. Segment n of a head holds the queries `n*S .. (n+1)*S - 1` of
this call. Its prefix is every key from `kv_start` up to the position of its first query, cut to a whole number
of tiles; the few keys that are cut off join the segment's dense window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from s2o_runtime.config import HeadConfig, LayerConfig, TileConfig
from s2o_runtime.errors import InputError


@dataclass(frozen=True)
class CallShape:
    """Sizes of one call; `offset` is the position of query 0."""

    batch: int
    query_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.query_heads // self.kv_heads

    @property
    def offset(self) -> int:
        return self.kv_len - self.q_len

    def row_tiles(self, block_m: int) -> int:
        return -(-self.q_len // block_m)

    def segments(self, segment: int) -> int:
        return -(-self.q_len // segment)

    def with_head_dim(self, head_dim: int) -> CallShape:
        return replace(self, head_dim=head_dim)


def call_shape(q: Tensor, k: Tensor, v: Tensor, kv_start: Tensor | None = None) -> CallShape:
    """Check `q [B, Hq, Lq, D]`, `k, v [B, Hkv, Lk, D]` and `kv_start [B]` against each other.

    Raises InputError naming the tensor that does not fit.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4:
            raise InputError(f"{name} has {tensor.ndim} dimensions: expected [batch, heads, length, head_dim]")
        if not tensor.dtype.is_floating_point:
            raise InputError(f"{name} is {tensor.dtype}: expected a floating point type")
        if tensor.dtype != q.dtype:
            raise InputError(f"{name} is {tensor.dtype} but q is {q.dtype}: convert them to one type")
        if tensor.device != q.device:
            raise InputError(f"{name} is on {tensor.device} but q on {q.device}: move them to one device")
        if 0 in tensor.shape:
            raise InputError(f"{name} is empty, shape {tuple(tensor.shape)}: every size must be at least 1")
    batch, query_heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    if v.shape != k.shape:
        raise InputError(f"v has shape {tuple(v.shape)} but k has {tuple(k.shape)}: they must be equal")
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise InputError(f"k has shape {tuple(k.shape)}: expected batch {batch} and head_dim {head_dim} as in q")
    if query_heads % kv_heads:
        raise InputError(f"{query_heads} query heads cannot share {kv_heads} KV heads: the first must be a multiple")
    if q_len > kv_len:
        raise InputError(f"q has {q_len} rows but there are {kv_len} keys: q_len may not exceed kv_len")
    if kv_start is not None:
        if kv_start.shape != (batch,) or kv_start.dtype not in (torch.int32, torch.int64):
            raise InputError(
                f"kv_start has shape {tuple(kv_start.shape)} and type {kv_start.dtype}: expected {batch} integers"
            )
        if kv_start.device != q.device:
            raise InputError(f"kv_start is on {kv_start.device} but q on {q.device}: move it")
    return CallShape(batch, query_heads, kv_heads, q_len, kv_len, head_dim)


def packed_shape(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int
) -> CallShape:  # fmt: skip
    """Check packed `q [Tq, Hq, D]`, `k, v [Tk, Hkv, D]` and where their sequences begin.

    Returns the number of sequences as `batch` and the maxima as lengths. Raises InputError. What the edges say is
    not read, which would wait for the device.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 3:
            raise InputError(f"{name} has {tensor.ndim} dimensions: expected [total length, heads, head_dim]")
    for name, edges in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if edges.ndim != 1 or len(edges) < 2 or edges.dtype != torch.int32 or edges.device != q.device:
            raise InputError(
                f"{name} is {edges.dtype} {tuple(edges.shape)} on {edges.device}: expected int32 [sequences + 1] on "
                f"{q.device}"
            )
    if len(cu_q) != len(cu_k):
        raise InputError(f"cu_seqlens_q has {len(cu_q)} entries, cu_seqlens_k {len(cu_k)}: they must be equal")
    if not 1 <= max_q <= max_k:
        raise InputError(
            f"max_seqlen_q is {max_q} and max_seqlen_k {max_k}: expected 1 <= max_seqlen_q <= max_seqlen_k"
        )
    queries, keys, values = (t[:1].transpose(0, 1)[None] for t in (q, k, v))
    one = call_shape(queries, keys, values)
    if k.shape[0] != v.shape[0]:
        raise InputError(f"v has length {v.shape[0]} but k {k.shape[0]}: they must be equal")
    return replace(one, batch=len(cu_q) - 1, q_len=max_q, kv_len=max_k)


def check_heads(config: LayerConfig, shape: CallShape) -> None:
    if config.num_heads != shape.query_heads:
        raise InputError(
            f"the config describes {config.num_heads} query heads but q has {shape.query_heads}: give one per head"
        )


def window_start(first_position: Tensor, start: Tensor, head: HeadConfig, tile: TileConfig) -> Tensor:
    """The first key of the dense window of a segment whose first query stands at `first_position`."""
    if head.mode == "dense":
        return start
    first = torch.maximum(first_position, start)
    return first - (first - start) % tile.block_n


def density(visited: Tensor, config: LayerConfig, shape: CallShape, kv_start: Tensor | None = None) -> Tensor:
    """Query-key pairs computed over causal pairs, per query head, window included; dense is 1.0.

    visited: [B, Hq, row tiles], the prefix keys each tile of `block_m` rows computed. Returns [Hq] float64.
    """
    start = torch.zeros(shape.batch, dtype=torch.int64) if kv_start is None else kv_start
    computed, causal = pairs(visited, config, shape.q_len, shape.offset, start.to(visited.device))
    return computed / causal.clamp_min(1.0)


def pairs(visited: Tensor, config: LayerConfig, q_len: int, offset: int, start: Tensor) -> tuple[Tensor, Tensor]:
    """Query-key pairs computed [Hq], and causal pairs [], over sequences of one length; float64.

    visited: [B, Hq, row tiles], of heads of other methods all keys; offset: the position of the first query;
    start: [B], the first key that counts.
    """
    row = torch.arange(q_len, device=visited.device)
    position = row[None, :] + offset
    causal = (position - start[:, None] + 1).clamp_min(0)
    real = causal > 0
    per_head = []
    for index, head in enumerate(config.heads):
        first_position = row // head.segment * head.segment + offset
        window = (position - window_start(first_position, start[:, None], head, config.tile) + 1).clamp_min(0)
        if head.mode == "blocks":  # all it computes counts as visited
            window = torch.zeros_like(causal)
        prefix = visited[:, index, row // config.tile.block_m].long() * real
        per_head.append((window + prefix).sum().double())
    return torch.stack(per_head), causal.sum().double()
