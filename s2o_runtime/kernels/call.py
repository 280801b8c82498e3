"""Everything about one call that its kernels share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from s2o_runtime.config import HeadConfig, LayerConfig
from s2o_runtime.shapes import CallShape

RULES = ("raw", "share", "rest")
TAIL = 4
SKIP = 8


class HeadTables(NamedTuple):
    """The per-head parameters on the device, one entry per query head. A segment of 0 marks a head without prefix."""

    tau: Tensor  # float32 [Hq]
    segment: Tensor  # int32 [Hq]
    rule: Tensor  # int32 [Hq], the threshold's number in RULES, plus TAIL for heads with a tail; SKIP: not computed
    part: Tensor  # int32 [Hq], queries of a representative
    representatives: Tensor  # int32 [Hq], of a segment
    counts: tuple[int, ...]  # the different numbers of representatives of the s2o heads
    shortest: int  # the shortest segment of the s2o heads, 0 if all heads are dense
    shortest_part: int  # the fewest queries of a representative
    unit: int  # a number of rows that every segment divides
    tail: bool  # whether any head has a tail

    @property
    def several(self) -> bool:
        return self.counts[-1:] > (1,)


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
    ranked = [head for head in config.heads if head.mode == "s2o"]

    def table(value: Callable[[HeadConfig], float], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor([value(head) for head in config.heads], dtype=dtype).to(device)

    return HeadTables(
        table(lambda head: head.tau, torch.float32),
        table(lambda head: head.segment if head.mode == "s2o" else 0),
        table(lambda head: SKIP if head.mode == "blocks" else RULES.index(head.threshold) + TAIL * head.tail),
        table(lambda head: head.segment // head.representatives if head.mode == "s2o" else 0),
        table(lambda head: head.representatives),
        tuple(sorted({head.representatives for head in ranked})),
        min((head.segment for head in ranked), default=0),
        min((head.segment // head.representatives for head in ranked), default=0),
        math.lcm(*(head.segment for head in ranked)),
        any(head.tail for head in ranked),
    )
