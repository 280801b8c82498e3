"""What all kernels of one call share: its shape, and the per-head settings on the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from s2o_runtime.config import HeadConfig, LayerConfig, StopRule, config_obstacle
from s2o_runtime.errors import InputError
from s2o_runtime.pages import PageTable
from s2o_runtime.shapes import CallShape

# A head's flags: its StopRule in the bits of the first, and one bit each for the others.
STOP_RULE_BITS = 3
TAIL = 4  # the head has a tail
# No head has this bit. The prefill kernels still test it: without the test ptxas orders their loops otherwise (Triton
# 3.6), which is to be timed before the test goes.
ELSEWHERE = 8
FIRST_CHUNK = math.nan  # the threshold of a head with a linear tail: no gain is >= nan, while an infinite one is >= inf


class HeadTables(NamedTuple):
    """The per-head settings, on the device with one entry per query head, and what the launches need of them.

    tau: float32 [Hq], FIRST_CHUNK of a head with a linear tail; segment: int32 [Hq], 0 marks a head without a prefix;
    flags: int32 [Hq], see above; part: int32 [Hq], queries of a representative; representatives: int32 [Hq], of a
    segment; turns: int32 [Hq], the heads in the order in which their programs start, dense ones first, which have the
    most work; None where all are of one mode.
    dense: how many heads are dense; stopping: how many visit their prefix until their stop rule ends it, which those
    with a linear tail do not.
    counts: the different numbers of representatives; shortest: the shortest segment, 0 if there is none;
    shortest_part: the fewest queries of a representative; unit: a number of rows that every segment divides;
    tail: whether any head has a tail; linear: int32, the heads with a linear tail. These six are of the heads in mode
    "s2o".
    """

    tau: Tensor
    segment: Tensor
    flags: Tensor
    part: Tensor
    representatives: Tensor
    turns: Tensor | None
    dense: int
    stopping: int
    counts: tuple[int, ...]
    shortest: int
    shortest_part: int
    unit: int
    tail: bool
    linear: Tensor

    @property
    def several(self) -> bool:
        """Whether any head has more than one representative."""
        return self.counts[-1:] > (1,)


@dataclass(frozen=True)
class Call:
    """One call of the op. For packed sequences batch, q_len and kv_len of `shape` are their number and their maxima.

    scale: multiplies the scores; kv_start: int64 or int32 [B], the first key that counts, of a left-padded batch; cu_q,
    cu_k: int32 [B + 1], where packed sequences begin; softcap: bounds the scores, None for no bound; sinks: [Hq], what
    each head attends to beside its keys, any floating type, contiguous; pages: of packed
    sequences whose keys and values are rows of a cache, where these lie, None for others.
    """

    config: LayerConfig
    shape: CallShape
    scale: float
    tables: HeadTables
    kv_start: Tensor | None = None
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    pages: PageTable | None = None

    @property
    def cap(self) -> float:
        """The constant CAP of a kernel: the soft cap of scores in base 2, 0 for none."""
        return 0.0 if self.softcap is None else self.softcap * math.log2(math.e)

    @property
    def padded(self) -> bool:
        return self.kv_start is not None

    @property
    def packed(self) -> bool:
        return self.cu_q is not None

    @property
    def starts(self) -> dict[str, Tensor | None]:
        """The arguments KV_START, CU_Q and CU_K of a kernel."""
        return {"KV_START": self.kv_start, "CU_Q": self.cu_q, "CU_K": self.cu_k}

    @property
    def paging(self) -> dict[str, Tensor | int | None]:
        """The arguments of a kernel for PAGED."""
        if self.pages is None:
            return {"PAGES": None, "page_shift": 0, "page_rows": 0, "stride_pb": 0}
        table, shift, rows = self.pages
        return {"PAGES": table, "page_shift": shift, "page_rows": rows, "stride_pb": table.stride(0)}


@lru_cache(maxsize=4096)
def head_tables(config: LayerConfig, device: torch.device) -> HeadTables:
    """The tables of a layer on a device; they are kept for the calls to come.

    Raises:
        InputError: the kernels cannot compute such a layer.
    """
    if obstacle := config_obstacle(config):
        raise InputError(f'{obstacle}: run with backend="reference"')
    ranked = [head for head in config.heads if head.mode == "s2o"]

    def table(value: Callable[[HeadConfig], float], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor([value(head) for head in config.heads], dtype=dtype).to(device)

    modes = {head.mode for head in config.heads}
    linear = [number for number, head in enumerate(config.heads) if _is_linear(head)]
    turns = sorted(range(config.num_heads), key=lambda head: config.heads[head].mode != "dense")
    return HeadTables(
        tau=table(lambda head: FIRST_CHUNK if _is_linear(head) else head.tau, torch.float32),
        segment=table(lambda head: head.segment if head.mode == "s2o" else 0),
        flags=table(_flags),
        part=table(lambda head: head.segment // head.representatives if head.mode == "s2o" else 0),
        representatives=table(lambda head: head.representatives),
        turns=torch.tensor(turns, dtype=torch.int32).to(device) if len(modes) > 1 else None,
        dense=sum(head.mode == "dense" for head in config.heads),
        stopping=sum(not head.linear for head in ranked),
        counts=tuple(sorted({head.representatives for head in ranked})),
        shortest=min((head.segment for head in ranked), default=0),
        shortest_part=min((head.segment // head.representatives for head in ranked), default=0),
        unit=math.lcm(*(head.segment for head in ranked)),
        tail=any(head.tail for head in ranked),
        linear=torch.tensor(linear, dtype=torch.int32).to(device),
    )


def _flags(head: HeadConfig) -> int:
    if _is_linear(head):
        return int(StopRule.REST)
    return int(head.stop_rule) | TAIL * head.tail


def _is_linear(head: HeadConfig) -> bool:
    return head.mode == "s2o" and head.linear
