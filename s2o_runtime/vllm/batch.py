"""One batch of a server: its requests, and the tensors that S2O's calls and the stock backend's parts of it need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from s2o_runtime.lengths import shared_bound
from s2o_runtime.pages import packed_starts
from s2o_runtime.vllm.fit import LayerFit
from s2o_runtime.vllm.plan import Plan, Run, plan

EDGES = ("query_start_loc", "query_start_loc_cpu")  # fields with one entry more than there are requests
OF_TOKENS = ("slot_mapping", "positions")  # fields with one entry for each query row
LENGTHS = ("seq_lens_cpu_upper_bound", "_seq_lens_cpu")  # keys on the host, exact for prompts; newest name first
# What a part of a batch cannot have: such batches are the stock backend's as a whole.
WHOLE_ONLY = {
    "mm_req_doc_ranges": "rows of an image see one another",
    "rswa_prefix_lens": "the model has reference sliding windows",
    "encoder_seq_lens": "the layer attends to an encoder",
    "dcp_local_seq_lens": "the context is shared by several ranks",
    "logits_indices_padded": "the prompt's last layers are skipped (fast prefill)",
}


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


class Batch:
    """One batch, as a metadata builder was given it.

    What depends on a layer only through the requests that it computes itself is made once and kept: the plan, the
    tensors of sparse runs, and the stock backend's metadata for the runs between them.

    Args:
        common: vLLM's `CommonAttentionMetadata`.
        build_part: makes the stock backend's metadata of a part of it.
        max_keys: of one sparse run.
    """

    def __init__(self, common: Any, build_part: Callable[[Any], Any], max_keys: int) -> None:
        self._common, self._build_part, self._max_keys = common, build_part, max_keys
        self._starts: list[int] = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        self._lengths: list[int] = lengths_on_host(common)[: common.num_reqs].tolist()
        self._plans: dict[object, Plan] = {}
        self._calls: dict[Run, SparseCall] = {}
        self._parts: dict[Run, Any] = {}

    def plan(self, layer: LayerFit) -> Plan:
        """What becomes of the batch's requests in a layer."""
        if layer.kind not in self._plans:
            self._plans[layer.kind] = plan(self._starts, self._lengths, layer.why_dense, self._max_keys)
        return self._plans[layer.kind]

    def sparse_call(self, run: Run, page_size: int) -> SparseCall:
        """The arguments of a sparse run, whose cache has pages of so many tokens."""
        if run not in self._calls:
            common, edges = self._common, slice(run.first, run.last + 1)
            seq_lens = common.seq_lens[run.requests].int()
            cu_q = common.query_start_loc[edges] - run.begin  # a copy: the server writes its next batch there
            table = common.block_table_tensor[run.requests]
            max_q, max_k = shared_bounds(run.max_q, run.max_k, table.shape[1] * page_size)
            self._calls[run] = SparseCall(
                cu_q=cu_q,
                cu_k=cu_q if run.total_k == run.end - run.begin else packed_starts(seq_lens),
                seq_lens=seq_lens,
                block_table=table.clone() if table.data_ptr() & 15 else table,  # plans are of aligned tensors
                max_q=max_q,
                max_k=max_k,
                total_k=max_k if run.last == run.first + 1 else max(max_k, shared_bound(run.total_k)),
            )
        return self._calls[run]

    def part(self, run: Run) -> Any:
        """The stock backend's metadata of a run."""
        if run not in self._parts:
            self._parts[run] = self._build_part(part_of(self._common, run))
        return self._parts[run]

    def with_block_table(self, block_table: Tensor, slot_mapping: Tensor) -> Batch:
        """The same batch of another group of layers, whose keys lie in other pages."""
        common = replace(self._common, block_table_tensor=block_table, slot_mapping=slot_mapping)
        batch = Batch.__new__(Batch)
        batch._common, batch._build_part, batch._max_keys = common, self._build_part, self._max_keys
        batch._starts, batch._lengths, batch._plans = self._starts, self._lengths, self._plans
        batch._calls, batch._parts = {}, {}
        return batch


def shared_bounds(max_q: int, max_k: int, room: int) -> tuple[int, int]:
    """Bounds of queries and keys that other runs share, not above the room; equal only if the numbers are."""
    behind = int(max_k > max_q)
    q_bound = min(shared_bound(max_q), room - behind)
    return q_bound, min(max(shared_bound(max_k), q_bound + behind), room)


def lengths_on_host(common: Any) -> Tensor:
    """The keys of each request, on the host; asking the device for them is the last resort, because it waits."""
    for name in LENGTHS:
        lengths = getattr(common, name, None)
        if isinstance(lengths, Tensor):
            return lengths
    return torch.as_tensor(common.seq_lens).cpu()


def whole_only(common: Any) -> str | None:
    """Why a batch is the stock backend's as a whole, whatever its requests; None if it may be shared."""
    if common.causal is not True:
        return "the batch is not causal"
    return next((reason for name, reason in WHOLE_ONLY.items() if getattr(common, name, None) is not None), None)


def part_of(common: Any, run: Run) -> Any:
    """The `CommonAttentionMetadata` of some neighbouring requests, as if the batch had no others."""
    changes: dict[str, Any] = {
        "num_reqs": run.last - run.first,
        "num_actual_tokens": run.end - run.begin,
        "max_query_len": run.max_q,
        "max_seq_len": run.max_k,
    }
    for field in fields(common):
        value = getattr(common, field.name)
        if field.name.endswith("_cache"):
            changes[field.name] = None  # what the whole batch computed once
        elif field.name in EDGES:
            changes[field.name] = value[run.first : run.last + 1] - run.begin
        elif field.name in OF_TOKENS:
            changes[field.name] = None if value is None else value[..., run.rows]  # of M-RoPE there are three rows
        elif field.name not in changes and hasattr(value, "shape") and len(value.shape) > 0:
            changes[field.name] = value[run.requests]
    return replace(common, **changes)
