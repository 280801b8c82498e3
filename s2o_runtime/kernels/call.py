"""Everything about one call that its kernels share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from s2o_runtime.config import LayerConfig
from s2o_runtime.shapes import CallShape


class HeadTables(NamedTuple):
    """The per-head parameters on the device, one entry per query head. A segment of 0 marks a dense head."""

    tau: Tensor  # float32 [Hq]
    segment: Tensor  # int32 [Hq]
    share: Tensor  # int32 [Hq], 1 where tau is in units of the uniform share
    shortest: int  # the shortest segment of the s2o heads, 0 if all heads are dense
    unit: int  # a number of rows that every segment divides


@dataclass(frozen=True)
class Call:
    """One call of the op; for packed sequences batch, q_len and kv_len of `shape` are their number and maxima."""

    config: LayerConfig
    shape: CallShape
    scale: float
    tables: HeadTables
    kv_start: Tensor | None = None
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None

    @property
    def padded(self) -> bool:
        return self.kv_start is not None

    @property
    def packed(self) -> bool:
        return self.cu_q is not None

    @property
    def starts(self) -> tuple[Tensor, Tensor, Tensor]:
        """KV_START, CU_Q, CU_K for a kernel: those that are not there are never read, but need a pointer."""
        spare = self.tables.segment
        return (
            spare if self.kv_start is None else self.kv_start,
            spare if self.cu_q is None else self.cu_q,
            spare if self.cu_k is None else self.cu_k,
        )


@lru_cache(maxsize=4096)
def head_tables(config: LayerConfig, device: torch.device) -> HeadTables:
    segments = [0 if head.mode == "dense" else head.segment for head in config.heads]
    ranked = [segment for segment in segments if segment]
    return HeadTables(
        torch.tensor([head.tau for head in config.heads], dtype=torch.float32).to(device),
        torch.tensor(segments, dtype=torch.int32).to(device),
        torch.tensor([head.threshold == "share" for head in config.heads], dtype=torch.int32).to(device),
        min(ranked, default=0),
        math.lcm(*ranked),
    )
