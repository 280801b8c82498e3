"""One call of the op: its heads, sequences and scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from .config import HeadConfig, LayerConfig
from .errors import InputError
from .sequences import (
    CallShape,
    Packed,
    PageTable,
    Sequence,
    Starts,
    call_shape,
    check_heads,
    check_packed,
    check_tensor,
)


class ScoringOptions(TypedDict, total=False):
    """The fields of `Scoring` as optional arguments."""

    scale: float | None
    softcap: float | None
    sinks: Tensor | None


class Scoring(NamedTuple):
    """The weights of products: with x = scale * q . k, a score is s = softcap * tanh(x / softcap), or x without it.

    The weight of key j is exp(s_j) / (sum_t exp(s_t) + exp(sink)), without the last term where there are no sinks.
    """

    scale: float | None = None  # positive; None for D ** -0.5, with D the head dim of q and k
    softcap: float | None = None  # bounds the scores (Gemma 2); positive, None for no bound
    sinks: Tensor | None = None  # [Hq], any floating type, of each query head (gpt-oss); None for nothing

    def checked(self, shape: CallShape, q: Tensor) -> Scoring:
        """Return the scoring of a call of these sizes and queries with the default scale filled in.

        Raises InputError if a number is not positive, or the sinks do not fit the call.
        """
        scale = validate_scale(self.scale, shape.head_dim)
        softcap, sinks = self.softcap, self.sinks
        if softcap is not None and not (softcap > 0 and math.isfinite(softcap)):
            raise InputError(f"softcap is {softcap}: expected a positive number, or None for scores without a cap")
        if sinks is not None:
            check_tensor("sinks", sinks)
            if sinks.shape != (shape.query_heads,) or not sinks.dtype.is_floating_point:
                raise InputError(
                    f"sinks have shape {tuple(sinks.shape)} and type {sinks.dtype}: expected a floating point number "
                    f"for each of the {shape.query_heads} query heads"
                )
            if sinks.device != q.device:
                raise InputError(f"sinks are on {sinks.device} but q on {q.device}: move them to one device")
        return Scoring(scale, None if softcap is None else float(softcap), sinks)

    @property
    def beyond_sdpa(self) -> str | None:
        """The part that torch's SDPA and block-sparse kernels cannot compute, as text; None for nothing."""
        if self.softcap is not None:
            return f"scores that are soft-capped at {self.softcap:g}"
        return "learned sinks" if self.sinks is not None else None

    def arguments(self) -> dict[str, Any]:
        """Return the scoring as the keyword arguments of the attention functions."""
        return self._asdict()


PLAIN = Scoring()


def without_gradients(sinks: Tensor | None) -> Tensor | None:
    """Detach sinks where no gradients are wanted: a model's are parameters, whose calls have no plan."""
    return sinks.detach() if isinstance(sinks, Tensor) and not torch.is_grad_enabled() else sinks


def cap_scores(scores: Tensor, softcap: float | None) -> Tensor:
    """Cap scores of any shape softly, `softcap * tanh(scores / softcap)`; without a cap return themselves."""
    return scores if softcap is None else (scores / softcap).tanh() * softcap


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Compute the weights of scores [..., L] that share their denominators with sinks [..., 1], where there are any."""
    if sinks is None:
        return scores.softmax(-1)
    return torch.cat([sinks.expand(*scores.shape[:-1], 1), scores], -1).softmax(-1)[..., 1:]


def validate_scale(scale: float | None, head_dim: int) -> float:
    """Return the factor of the scores: `scale`, which must be positive and finite, or `head_dim ** -0.5` for None."""
    if scale is None:
        return float(head_dim**-0.5)
    if not 0 < scale < math.inf:
        raise InputError(f"scale is {scale}: expected a positive number")
    return scale


# A head's flags: its StopRule in the bits of the first, and one bit each for the others.
STOP_RULE_BITS = 3
TAIL = 4  # `tail` of the head is "mean"


class HeadTables(NamedTuple):
    """The per-head settings, on the device with one entry per query head, and what the launches need of them."""

    tau: Tensor  # float32 [Hq]
    segment: Tensor  # int32 [Hq], 0 marks a head without a prefix
    flags: Tensor  # int32 [Hq], see above
    representatives: Tensor  # int32 [Hq], of a segment
    # int32 [Hq], the heads in the order in which their programs start, dense ones first, as they have the most work
    launch_order: Tensor
    works_unevenly: bool  # heads of both modes, or dense last rows, so that the order matters
    dense_heads: int  # how many heads are of this mode, and how many of the other; what follows is of the latter
    s2o_heads: int
    representative_counts: tuple[int, ...]  # different ones
    shortest_segment: int  # 0 if there is none
    min_rows_per_representative: int
    row_multiple: int  # of every segment
    tail: bool  # of any head is "mean"


@dataclass(frozen=True)
class Call:
    """The tensors and settings of one call; `from_tensors` makes one.

    Packed sequences lie one behind another along the length of a single batch entry, which kernels get expanded to B
    (stride 0).
    """

    q: Tensor  # [B, Hq, Lq, D]
    k: Tensor  # [B, Hkv, Lk, D]
    v: Tensor  # [B, Hkv, Lk, Dv]
    config: LayerConfig
    shape: CallShape  # for packed sequences batch, q_len and kv_len are their number and maxima
    scoring: Scoring  # with the scale filled in
    kv_start: Tensor | None = None  # as in `Starts`, like the next two
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    with_lse: bool = False
    # of packed sequences whose k and v are all rows of a cache, for the kernels alone; None where k and v are their own
    pages: PageTable | None = None

    @classmethod
    def from_tensors(
        cls, q: Tensor, k: Tensor, v: Tensor, config: LayerConfig, packed: Packed | None = None,
        *, scoring: Scoring = PLAIN, kv_start: Tensor | None = None, with_lse: bool = False,
    ) -> Call:  # fmt: skip
        """Make a call from tensors of `s2o_attention`, or with `packed` `s2o_attention_varlen`. Raises as they do."""
        shape = call_shape(q, k, v, kv_start) if packed is None else check_packed(q, k, v, packed)
        check_heads(config.validate(), shape)
        scoring = scoring.checked(shape, q)
        if packed is not None:
            q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        starts = Starts(kv_start) if packed is None else packed.starts
        return cls(q, k, v, config, shape, scoring, *starts, with_lse)

    def take(self, sequence: Sequence) -> Call:
        """Return one of the packed sequences as a call of its own."""
        q, k, v = sequence.take(self.q, sequence.rows), *(sequence.take(t, sequence.keys) for t in (self.k, self.v))
        shape = replace(self.shape, batch=1, q_len=len(sequence.rows), kv_len=len(sequence.keys))
        return replace(self, q=q, k=k, v=v, shape=shape, cu_q=None, cu_k=None)

    @property
    def packed(self) -> bool:
        """True if the sequences are packed."""
        return self.cu_q is not None

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        assert self.scoring.scale is not None
        return self.scoring.scale

    @property
    def cap(self) -> float:
        """The constant CAP of a kernel: the soft cap of scores in base 2, 0 for none."""
        return 0.0 if self.scoring.softcap is None else self.scoring.softcap * math.log2(math.e)

    @cached_property
    def tables(self) -> HeadTables:
        """The settings of its heads on its device."""
        return make_head_tables(self.config, self.q.device)

    @property
    def starts(self) -> Starts:
        """The argument STARTS of a kernel."""
        return Starts(self.kv_start, self.cu_q, self.cu_k)

    @property
    def paging(self) -> dict[str, Tensor | int | None]:
        """The arguments of a kernel for PAGED."""
        table, shift, rows = self.pages or (None, 0, 0)
        stride = 0 if table is None else table.stride(0)
        return {"PAGES": table, "page_shift": shift, "page_rows": rows, "stride_pb": stride}


@lru_cache(maxsize=4096)
def make_head_tables(config: LayerConfig, device: torch.device) -> HeadTables:
    """Make the tables of a layer on a device; they are kept for the calls to come."""
    ranked = [head for head in config.heads if head.mode == "s2o"]
    dense_heads = config.num_heads - len(ranked)

    def table(value: Callable[[HeadConfig], float], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor([value(head) for head in config.heads], dtype=dtype).to(device)

    order = sorted(range(config.num_heads), key=lambda head: config.heads[head].mode != "dense")
    return HeadTables(
        tau=table(lambda head: head.tau, torch.float32),
        segment=table(lambda head: head.segment if head.mode == "s2o" else 0),
        flags=table(lambda head: int(head.stop_rule) | TAIL * (head.tail == "mean")),
        representatives=table(lambda head: head.representatives),
        launch_order=torch.tensor(order, dtype=torch.int32).to(device),
        works_unevenly=bool(config.last_rows or (ranked and dense_heads)),
        dense_heads=dense_heads,
        s2o_heads=len(ranked),
        representative_counts=tuple(sorted({head.representatives for head in ranked})),
        shortest_segment=config.shortest_segment,
        min_rows_per_representative=min((head.segment // head.representatives for head in ranked), default=0),
        row_multiple=math.lcm(*(head.segment for head in ranked)),
        tail=config.has_tail,
    )
