"""One batch of SGLang: its requests, and what S2O's calls and the stock backend's parts of it need."""

from __future__ import annotations

import copy
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from s2o_runtime.serving.calls import SparseCall
from s2o_runtime.serving.fit import LayerFit
from s2o_runtime.serving.plan import Plan, Run, plan
from s2o_runtime.sglang.fields import OF_REQUESTS, OF_TOKENS, PROMPTS, WHOLE_ONLY


class Batch:
    """A ForwardBatch of prompts, some of which S2O may compute.

    What depends on a layer only through the requests that it computes itself is made once and kept: the plan, the
    tensors of sparse runs, and what the stock backend made of the runs between them.

    Args:
        source: SGLang's `ForwardBatch`.
        req_to_token: int32 [requests, N], the slots of the cache where each request's tokens are.
        max_keys: of one sparse run.

    Attributes:
        source: as given.
        parts: the stock backend's batch and metadata of each run that it computes.
    """

    def __init__(self, source: Any, req_to_token: Tensor, max_keys: int) -> None:
        self.source, self._req_to_token, self._max_keys = source, req_to_token, max_keys
        queries = [int(count) for count in source.extend_seq_lens_cpu]
        prefixes = [int(count) for count in source.extend_prefix_lens_cpu]
        self._starts = [0, *accumulate(queries)]
        self._lengths = [prefix + count for prefix, count in zip(prefixes, queries, strict=True)]
        self._edges: Tensor | None = None
        self._plans: dict[object, Plan] = {}
        self._calls: dict[Run, SparseCall] = {}
        self.parts: dict[Run, tuple[Any, Any]] = {}

    @property
    def rows(self) -> int:
        """Query rows of all requests."""
        return self._starts[-1]

    def plan(self, layer: LayerFit) -> Plan:
        """What becomes of the batch's requests in a layer."""
        if layer.kind not in self._plans:
            self._plans[layer.kind] = plan(self._starts, self._lengths, layer.why_dense, self._max_keys)
        return self._plans[layer.kind]

    def sparse_call(self, run: Run) -> SparseCall:
        """The arguments of a sparse run, over a cache with pages of one token."""
        if run not in self._calls:
            if self._edges is None:
                counts = self.source.extend_seq_lens
                self._edges = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
            edges, seq_lens = self._edges[run.first : run.last + 1], self.source.seq_lens[run.requests].int()
            slots = self._req_to_token[self.source.req_pool_indices[run.requests]]
            self._calls[run] = SparseCall.of(run, edges, seq_lens, slots.int(), 1)
        return self._calls[run]

    def part_of(self, run: Run) -> Any:
        """The ForwardBatch of a run, as if the batch had no other requests."""
        part = copy.copy(self.source)
        for name in (*OF_REQUESTS, *OF_TOKENS):
            whole = getattr(self.source, name, None)
            if whole is not None:
                setattr(part, name, whole[run.requests if name in OF_REQUESTS else run.rows])
        part.batch_size = run.last - run.first
        part.extend_num_tokens = run.end - run.begin
        part.seq_lens_sum = sum(self._lengths[run.requests])
        return part


def whole_only(source: Any) -> str | None:
    """Why a ForwardBatch is the stock backend's as a whole, whatever its requests; None if it may be shared."""
    if source.forward_mode.name not in PROMPTS:
        return f"the batch is of mode {source.forward_mode.name}"  # such as the verification of speculated tokens
    if source.extend_seq_lens_cpu is None or source.extend_prefix_lens_cpu is None:
        return "the lengths of the batch are not known on the host"
    return next((reason for name, reason in WHOLE_ONLY.items() if getattr(source, name, None) is not None), None)
