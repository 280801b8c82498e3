"""What the ops return beside the output: log-sum-exps, and what the call did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from s2o_runtime.config import LayerConfig
from s2o_runtime.errors import InputError
from s2o_runtime.shapes import CallShape, density, packed_density


@dataclass(frozen=True)
class AttentionStats:
    """What one call did.

    Attributes:
        backend: the code that ran: "triton", "reference" or "dense".
        reason: why this backend was chosen.
        config: the config of the call.
        shape: the sizes of the call.
        kv_start: integers [B], the first key of each sequence that counts, as it was given.
        visited: int32 [B, Hq, row tiles], the prefix keys that each row tile computed; None when the call was dense.
        cu_q, cu_k: int32 [N + 1], where packed sequences begin, as they were given.

    >>> from s2o_runtime import s2o_attention
    >>> q, k, v = (torch.randn(1, 2, 256, 64) for _ in range(3))
    >>> s2o_attention(q, k, v, LayerConfig.uniform(2, mode="dense"), return_stats=True).stats.density.tolist()
    [1.0, 1.0]
    """

    backend: str
    reason: str
    config: LayerConfig
    shape: CallShape
    kv_start: Tensor | None
    visited: Tensor | None
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None

    @property
    def density(self) -> Tensor:
        """Query-key pairs computed over causal pairs, window included: float64 [Hq]; dense is 1.0."""
        if self.visited is None:
            return torch.ones(self.shape.query_heads, dtype=torch.float64)
        if self.cu_q is None or self.cu_k is None:
            return density(self.visited, self.config, self.shape, self.kv_start)
        return packed_density(self.visited, self.config, self.cu_q, self.cu_k)


class Attention(NamedTuple):
    """The result of a call that was asked for more than the output. It always has three fields.

    Attributes:
        out: the output, in the shape and type of q.
        lse: float32, the log-sum-exp of the scores that each row computed; None without `return_lse`.
        stats: what the call did; None without `return_stats`.

    >>> from s2o_runtime import s2o_attention
    >>> q, k, v = (torch.randn(1, 2, 256, 64) for _ in range(3))
    >>> out, lse, stats = s2o_attention(q, k, v, LayerConfig.uniform(2, tau=0.5, segment=128), return_lse=True)
    >>> lse.shape, stats
    (torch.Size([1, 2, 256]), None)
    """

    out: Tensor
    lse: Tensor | None
    stats: AttentionStats | None

    @property
    def density(self) -> Tensor:
        """`stats.density`: float64 [Hq]. Raises InputError without `return_stats`."""
        if self.stats is None:
            raise InputError("the call kept no statistics: pass return_stats=True for its density")
        return self.stats.density
