"""Calls of the op for the runs of a batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from s2o_runtime.attention.paged import gathered, s2o_attention_paged
from s2o_runtime.call import Scoring
from s2o_runtime.config import KvCacheDtype
from s2o_runtime.layer_kinds import sees_window
from s2o_runtime.lengths import shared_bound
from s2o_runtime.monitor.counters import Counters
from s2o_runtime.sequences import PagedKeys, packed_starts
from s2o_runtime.serving.fit import LayerFit
from s2o_runtime.serving.plan import BatchPlan, Pieces, Run, plan

PLAIN_CACHES = ("auto", "float16", "bfloat16", "float32")  # of the types that queries have
FP8_CACHES = ("fp8", "fp8_e4m3", "float8_e4m3fn")

log = logging.getLogger("s2o_runtime")


@dataclass(frozen=True)
class SparseCall:
    """What `s2o_attention_paged` takes of one sparse run: the same for all layers of a cache group.

    The three numbers are bounds that runs of other lengths share (`lengths.shared_bound`), and with them their plans.
    """

    cu_q: Tensor
    cu_k: Tensor
    seq_lens: Tensor
    block_table: Tensor
    max_q: int
    max_k: int
    total_k: int

    @classmethod
    def of(cls, run: Run, edges: Tensor, seq_lens: Tensor, block_table: Tensor, page_size: int) -> SparseCall:
        """The call of a run.

        Args:
            run: with requests that S2O computes.
            edges: int32 [n + 1], where the queries of its requests begin in the batch; copied.
            seq_lens: int32 [n], the keys of its requests.
            block_table: int32 [n, M], their pages.
            page_size: tokens of a page.
        """
        cu_q = edges - run.begin  # a copy: the server writes its next batch there
        max_q, max_k = shared_bounds(run.max_q, run.max_k, block_table.shape[1] * page_size)
        return cls(
            cu_q=cu_q,
            cu_k=cu_q if run.total_k == run.end - run.begin else packed_starts(seq_lens),
            seq_lens=seq_lens,
            block_table=block_table.clone() if block_table.data_ptr() & 15 else block_table,  # plans want aligned
            max_q=max_q,
            max_k=max_k,
            total_k=max_k if run.last == run.first + 1 else max(max_k, shared_bound(run.total_k)),
        )


def shared_bounds(max_q: int, max_k: int, room: int) -> tuple[int, int]:
    """Bounds of queries and keys that other runs share, not above the room; equal only if the numbers are."""
    behind = int(max_k > max_q)
    q_bound = min(shared_bound(max_q), room - behind)
    return q_bound, min(max(shared_bound(max_k), q_bound + behind), room)


def compute(
    run: Run,
    call: SparseCall,
    layer: LayerFit,
    counters: Counters,
    *,
    query: Tensor,
    pages: tuple[Tensor, Tensor],
    scale: float,
    out: Tensor,
) -> None:
    """Compute one run with S2O, and count what it did; a sampled call's density is kept, and its error checked.

    Args:
        run, call: the run, and what the op takes of it.
        layer: whose configuration it is.
        query: [T, Hq, D], the rows of the run.
        pages: keys and values, [pages, page size, Hkv, D], the layer's cache.
        scale: of the scores.
        out: [T, Hq, D], written.
    """
    sample = counters.begin(layer.layer, "s2o", query.device)
    attention = s2o_attention_paged(
        query, *pages, layer.config(run.max_k),
        cu_q=call.cu_q, seq_lens=call.seq_lens, block_table=call.block_table, max_q=call.max_q, max_k=call.max_k,
        total_k=call.total_k, cu_k=call.cu_k, scale=scale, out=out, return_stats=True,
    )  # fmt: skip
    stats = attention.stats
    assert stats is not None
    path = "dense" if stats.backend == "dense" else "s2o"
    counters.end(layer.layer, path, sample, query.device)
    counters.add(layer.layer, path, stats.reason, run.end - run.begin)
    if stats.backend != "dense" and counters.is_sampled(layer.layer, 2 * run.max_q >= run.max_k):
        counters.store_sample(layer.layer, stats)
        if layer.drift is not None and run.last == run.first + 1:
            cache = PagedKeys(*pages, call.block_table, call.cu_k, max_k=run.max_k, total_k=run.total_k)
            packed = (query, *gathered(cache, query.dtype), out)
            q, keys, values, output = (tensor.transpose(0, 1)[None] for tensor in packed)
            layer.drift.see(q, keys, values, output, Scoring(scale), None)


def layer_obstacle(
    *, alibi: bool, sliding_window: int | None, soft_cap: float | None, attn_type: str, sinks: bool
) -> str | None:
    """Why a layer never runs S2O, by what a server makes it with; None if it may."""
    if attn_type != "decoder":
        return f"the layer's attention is of type {attn_type}"
    if sliding_window is not None:
        return sees_window(sliding_window)
    if soft_cap:
        return f"the scores are soft-capped at {soft_cap:g}"
    if sinks:
        return "the layer has attention sinks"
    if alibi:
        return "the layer has ALiBi slopes"
    return None


@lru_cache(maxsize=64)
def say_once(obstacle: str | None) -> str | None:
    """Log why layers are the stock backend's, each reason once in a process; returns the reason."""
    if obstacle is not None:
        log.info("S2O: layers go to the stock backend as a whole: %s", obstacle)
    return obstacle


def cache_obstacle(kv_cache_dtype: str, made_for: KvCacheDtype = "auto") -> str | None:
    """Why no layer whose keys are in a server's cache runs S2O, by the cache's type; None if layers may.

    A profile that was made for an fp8 cache keeps to its errors in one that does not round, too.

    Args:
        kv_cache_dtype: as the server calls it.
        made_for: what the profile was made for.
    """
    if kv_cache_dtype in PLAIN_CACHES or (kv_cache_dtype in FP8_CACHES and made_for == "fp8"):
        return None
    hint = ", which the profile was not made for" if kv_cache_dtype in FP8_CACHES else ""
    return f"the KV cache is {kv_cache_dtype}{hint}"


def scales_obstacle(*scales: float | Tensor | None) -> str | None:
    """Why a layer with an fp8 cache runs no S2O, by what its numbers are multiplied by; None if by 1.

    With a scale of 1 the calibrator rounds. Reading those of a tensor waits for the device.
    """
    for scale in scales:
        numbers = torch.as_tensor(1.0 if scale is None else scale)
        if not bool((numbers == 1).all()):
            return f"the fp8 cache has scales up to {float(numbers.max()):g}, the profile was made for 1"
    return None


class Batch:
    """A batch, some of whose requests S2O may compute.

    What depends on a layer only through the requests that it computes itself is made once and kept: the plan, the
    tensors of sparse runs, and what the stock backend made of the runs between them.

    Args:
        pieces: its requests, or the pieces of them; wherever requests are spoken of here, they are meant.
        max_keys: of one sparse run.
        build_part: makes what the stock backend needs of a run.
        adapted: whether each request of the server's batch has a LoRA adapter, and is dense; empty if none has.
    """

    def __init__(
        self, pieces: Pieces, max_keys: int, build_part: Callable[[Run], Any], adapted: Sequence[bool] = ()
    ) -> None:
        self.pieces, self._max_keys, self._build_part = pieces, max_keys, build_part
        self._adapted = adapted
        self._plans: dict[object, BatchPlan] = {}
        self._calls: dict[Run, SparseCall] = {}
        self._parts: dict[Run, Any] = {}

    @property
    def rows(self) -> int:
        """Query rows of all requests."""
        return self.pieces.starts[-1]

    def plan(self, layer: LayerFit) -> BatchPlan:
        """What becomes of the batch's requests in a layer."""
        kind = layer.kind
        if kind not in self._plans:
            self._plans[kind] = plan(self.pieces, layer.why_dense, self._max_keys, self._adapted)
        return self._plans[kind]

    def sparse_call(self, run: Run, page_size: int = 1) -> SparseCall:
        """The arguments of a sparse run, whose cache has pages of so many tokens."""
        call = self._calls.get(run)
        if call is None:
            call = self._calls[run] = SparseCall.of(run, *self.tensors_of(run), page_size)
        return call

    def tensors_of(self, run: Run) -> tuple[Tensor, Tensor, Tensor]:
        """What `SparseCall.of` takes of a run: where queries begin, how many keys there are, and their pages."""
        raise NotImplementedError

    def part(self, run: Run) -> Any:
        """What the stock backend needs of a run."""
        if run not in self._parts:
            self._parts[run] = self._build_part(run)
        return self._parts[run]
