"""One batch of SGLang: the tensors that S2O's calls and the stock backend's parts of it need."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from s2o_runtime.serving.batch import Batch, BatchSlice, SplitRequests
from s2o_runtime.serving.fit import Request
from s2o_runtime.serving.server import Server
from s2o_runtime.sglang.compat import OF_REQUESTS, OF_TOKENS, PROMPTS, WHOLE_ONLY


class SglangBatch(Batch):
    """A ForwardBatch of prompts, some of which S2O may compute.

    req_to_token: int32 [requests, N], the slots of the cache where each request's tokens are; build_part: makes the
    stock backend's data for the ForwardBatch of a slice.
    """

    def __init__(self, source: Any, req_to_token: Tensor, build_part: Callable[[Any], Any], server: Server) -> None:
        queries = [int(count) for count in source.extend_seq_lens_cpu]
        lengths = [int(prefix) + count for prefix, count in zip(source.extend_prefix_lens_cpu, queries, strict=True)]
        adapters = [adapter is not None for adapter in getattr(source, "lora_ids", None) or ()]
        # SGLang says whether prompts end in a batch, not which of them
        left = 0 if getattr(source, "contains_last_prefill_chunk", False) else None
        count_last_rows = partial(server.fit.count_last_rows, left=left)
        split = SplitRequests.from_batch([0, *accumulate(queries)], lengths, adapters, count_last_rows)
        self._batch = batch = source if split.are_whole else split_batch(source, split)
        super().__init__(
            split, server.fit, server.max_keys, lambda span: build_part(slice_batch(batch, split.requests, span))
        )
        self.source, self._req_to_token = source, req_to_token
        self._edges: Tensor | None = None

    def get_tensors(self, span: BatchSlice) -> tuple[Tensor, Tensor, Tensor]:
        if self._edges is None:
            counts = self._batch.extend_seq_lens
            self._edges = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        edges, seq_lens = self._edges[span.first : span.last + 1], self._batch.seq_lens[span.requests].int()
        # slots of the cache are pages of one token
        return edges, seq_lens, self._req_to_token[self._batch.req_pool_indices[span.requests]].int()


def split_batch(source: Any, split: SplitRequests) -> Any:
    """Return the ForwardBatch whose requests are split."""
    batch, (queries, lengths) = copy.copy(source), split.sizes
    prefixes = [keys - count for keys, count in zip(lengths, queries, strict=True)]
    numbers = {"extend_seq_lens": queries, "seq_lens": lengths, "extend_prefix_lens": prefixes}
    for name in OF_REQUESTS:
        values, new = getattr(source, name, None), numbers.get(name.removesuffix("_cpu"))
        if isinstance(values, Tensor):
            entries = torch.tensor(split.indices if new is None else new).to(values.device, non_blocking=True)
            setattr(batch, name, values[entries] if new is None else entries.to(values.dtype))
        elif values is not None:
            setattr(batch, name, [values[index] for index in split.indices] if new is None else new)
    batch.batch_size = len(queries)
    return batch


def slice_batch(source: Any, requests: Sequence[Request], span: BatchSlice) -> Any:
    """Return the ForwardBatch of a slice, as if the batch had no other requests."""
    batch = copy.copy(source)
    for name in (*OF_REQUESTS, *OF_TOKENS):
        values = getattr(source, name, None)
        if values is not None:
            setattr(batch, name, values[span.requests if name in OF_REQUESTS else span.rows])
    batch.batch_size = span.last - span.first
    batch.extend_num_tokens = span.end - span.begin
    batch.seq_lens_sum = sum(request.keys for request in requests[span.requests])
    return batch


def find_batch_obstacle(source: Any) -> str | None:
    """Return the reason why the stock backend computes a ForwardBatch as a whole, whatever its requests, or None."""
    if source.forward_mode.name not in PROMPTS:
        return f"the batch is of mode {source.forward_mode.name}"  # such as the verification of speculated tokens
    if source.extend_seq_lens_cpu is None or source.extend_prefix_lens_cpu is None:
        return "the lengths of the batch are not known on the host"
    return next((reason for name, reason in WHOLE_ONLY.items() if getattr(source, name, None) is not None), None)
