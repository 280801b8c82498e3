"""The per-head parameters of a layer as small device tensors, made once per config and device."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from s2o_runtime.config import LayerConfig


class HeadTables(NamedTuple):
    """One entry per query head. A segment of 0 marks a dense head."""

    tau: Tensor  # float32 [Hq]
    segment: Tensor  # int32 [Hq]
    share: Tensor  # int32 [Hq], 1 where tau is in units of the uniform share


@lru_cache(maxsize=1024)
def head_tables(config: LayerConfig, device: torch.device) -> HeadTables:
    return HeadTables(
        torch.tensor([head.tau for head in config.heads], dtype=torch.float32, device=device),
        torch.tensor([segment_or_zero(head.mode, head.segment) for head in config.heads], dtype=torch.int32).to(device),
        torch.tensor([head.threshold == "share" for head in config.heads], dtype=torch.int32, device=device),
    )


def segment_or_zero(mode: str, segment: int) -> int:
    return 0 if mode == "dense" else segment
