"""One call of the op, checked, as every backend takes it; and the per-head settings that its kernels read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from s2o_runtime.config import HeadConfig, LayerConfig
from s2o_runtime.pages import PageTable
from s2o_runtime.scoring import PLAIN, Scoring
from s2o_runtime.shapes import CallShape, Packed, call_shape, check_heads, packed_shape

# A head's flags: its StopRule in the bits of the first, and one bit each for the others.
STOP_RULE_BITS = 3
TAIL = 4  # `tail` of the head is "mean"


class HeadTables(NamedTuple):
    """The per-head settings, on the device with one entry per query head, and what the launches need of them.

    tau: float32 [Hq]; segment: int32 [Hq], 0 marks a head without a prefix;
    flags: int32 [Hq], see above; part: int32 [Hq], queries of a representative; representatives: int32 [Hq], of a
    segment; launch_order: int32 [Hq], the heads in the order in which their programs start, dense ones first, as they
    have the most work; None where all are of one mode and no last rows are dense.
    dense: how many heads are dense; stopping: how many visit their prefix until their stop rule ends it.
    counts: the different numbers of representatives; shortest: the shortest segment, 0 if there is none;
    shortest_part: the fewest queries of a representative; unit: a number of rows that every segment divides;
    tail: whether `tail` of any head is "mean". These five are of the heads in mode "s2o".
    """

    tau: Tensor
    segment: Tensor
    flags: Tensor
    part: Tensor
    representatives: Tensor
    launch_order: Tensor | None
    dense: int
    stopping: int
    counts: tuple[int, ...]
    shortest: int
    shortest_part: int
    unit: int
    tail: bool

    @property
    def several(self) -> bool:
        """Whether any head has more than one representative."""
        return self.counts[-1:] > (1,)


class Starts(NamedTuple):
    """Where the sequences of a call begin: the fields of `Call` that kernels take together."""

    kv_start: Tensor | None
    cu_q: Tensor | None
    cu_k: Tensor | None


@dataclass(frozen=True)
class Call:
    """The tensors and settings of one call; `of` and `of_packed` make one.

    Attributes:
        q, k, v: [B, Hq, Lq, D], [B, Hkv, Lk, D] and [B, Hkv, Lk, Dv]. Packed sequences lie one behind another along
            the length of a single batch entry, which kernels get expanded to B (stride 0).
        config: of the layer.
        shape: the sizes; for packed sequences batch, q_len and kv_len are their number and maxima.
        scoring: the factor of the scores, which is filled in, their cap and the sinks.
        kv_start: integers [B], the first key of each sequence that counts; None for 0.
        cu_q, cu_k: int32 [B + 1], where packed sequences begin; None for a batch.
        with_lse: whether the log-sum-exps are to be computed.
        pages: where the keys of packed sequences are among k and v, which then are all rows of a cache; None where k
            and v are the sequences' own. Only the kernels take such calls.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    config: LayerConfig
    shape: CallShape
    scoring: Scoring
    kv_start: Tensor | None = None
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    with_lse: bool = False
    pages: PageTable | None = None

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        config: LayerConfig,
        *,
        scoring: Scoring = PLAIN,
        kv_start: Tensor | None = None,
        with_lse: bool = False,
    ) -> Call:
        """A call of `s2o_attention`. Raises InputError and ConfigError as the op does."""
        shape = call_shape(q, k, v, kv_start)
        check_heads(config.validate(), shape)
        return cls(q, k, v, config, shape, scoring.checked(shape, q), kv_start, with_lse=with_lse)

    @classmethod
    def of_packed(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        config: LayerConfig,
        packed: Packed,
        *,
        scoring: Scoring = PLAIN,
        with_lse: bool = False,
    ) -> Call:
        """A call of `s2o_attention_varlen`. Raises InputError and ConfigError as the op does."""
        shape = packed_shape(q, k, v, packed)
        check_heads(config.validate(), shape)
        scoring = scoring.checked(shape, q)
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        return cls(q, k, v, config, shape, scoring, None, packed.cu_q, packed.cu_k, with_lse)

    def sequence(self, rows: range, keys: range) -> Call:
        """One of the packed sequences as a call of its own, from its rows and keys."""
        q = self.q[:, :, rows.start : rows.stop]
        k, v = (tensor[:, :, keys.start : keys.stop] for tensor in (self.k, self.v))
        shape = replace(self.shape, batch=1, q_len=len(rows), kv_len=len(keys))
        return replace(self, q=q, k=k, v=v, shape=shape, cu_q=None, cu_k=None)

    @property
    def padded(self) -> bool:
        """Whether sequences have keys in front that do not count."""
        return self.kv_start is not None

    @property
    def packed(self) -> bool:
        """Whether the sequences are packed."""
        return self.cu_q is not None

    @property
    def scale(self) -> float:
        """What multiplies the scores."""
        assert self.scoring.scale is not None
        return self.scoring.scale

    @property
    def sinks(self) -> Tensor | None:
        """[Hq], what each head attends to beside its keys."""
        return self.scoring.sinks

    @property
    def cap(self) -> float:
        """The constant CAP of a kernel: the soft cap of scores in base 2, 0 for none."""
        return 0.0 if self.scoring.softcap is None else self.scoring.softcap * math.log2(math.e)

    @cached_property
    def tables(self) -> HeadTables:
        """The settings of its heads on its device."""
        return head_tables(self.config, self.q.device)

    @property
    def starts(self) -> Starts:
        """The argument STARTS of a kernel."""
        return Starts(self.kv_start, self.cu_q, self.cu_k)

    @property
    def paging(self) -> dict[str, Tensor | int | None]:
        """The arguments of a kernel for PAGED."""
        if self.pages is None:
            return {"PAGES": None, "page_shift": 0, "page_rows": 0, "stride_pb": 0}
        table, shift, rows = self.pages
        return {"PAGES": table, "page_shift": shift, "page_rows": rows, "stride_pb": table.stride(0)}


@lru_cache(maxsize=4096)
def head_tables(config: LayerConfig, device: torch.device) -> HeadTables:
    """The tables of a layer on a device; they are kept for the calls to come."""
    ranked = [head for head in config.heads if head.mode == "s2o"]

    def table(value: Callable[[HeadConfig], float], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor([value(head) for head in config.heads], dtype=dtype).to(device)

    modes = {head.mode for head in config.heads}
    order = sorted(range(config.num_heads), key=lambda head: config.heads[head].mode != "dense")
    return HeadTables(
        tau=table(lambda head: head.tau, torch.float32),
        segment=table(lambda head: head.segment if head.mode == "s2o" else 0),
        flags=table(lambda head: int(head.stop_rule) | TAIL * (head.tail == "mean")),
        part=table(lambda head: head.segment // head.representatives if head.mode == "s2o" else 0),
        representatives=table(lambda head: head.representatives),
        launch_order=torch.tensor(order, dtype=torch.int32).to(device) if len(modes) > 1 or config.last_rows else None,
        dense=sum(head.mode == "dense" for head in config.heads),
        stopping=len(ranked),
        counts=tuple(sorted({head.representatives for head in ranked})),
        shortest=min((head.segment for head in ranked), default=0),
        shortest_part=min((head.segment // head.representatives for head in ranked), default=0),
        unit=math.lcm(*(head.segment for head in ranked)),
        tail=config.has_tail,
    )
