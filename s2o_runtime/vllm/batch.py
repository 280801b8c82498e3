"""One batch of a server: its requests, and the tensors that S2O's calls and the stock backend's parts of it need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from s2o_runtime.serving.calls import SparseCall
from s2o_runtime.serving.fit import LayerFit
from s2o_runtime.serving.plan import Plan, Run, plan

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
            common = self._common
            edges = common.query_start_loc[run.first : run.last + 1]
            seq_lens, table = common.seq_lens[run.requests].int(), common.block_table_tensor[run.requests]
            self._calls[run] = SparseCall.of(run, edges, seq_lens, table, page_size)
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
