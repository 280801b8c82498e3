"""One batch of SGLang: the tensors that S2O's calls and the stock backend's parts of it need."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from s2o_runtime.serving import calls
from s2o_runtime.serving.plan import Pieces, Run
from s2o_runtime.sglang.compat import OF_REQUESTS, OF_TOKENS, PROMPTS, WHOLE_ONLY


class SglangBatch(calls.Batch):
    """A ForwardBatch of prompts, some of which S2O may compute.

    Args:
        source: SGLang's `ForwardBatch`; an attribute too.
        req_to_token: int32 [requests, N], the slots of the cache where each request's tokens are.
        max_keys: of one sparse run.
        build_part: makes what the stock backend needs of the ForwardBatch of a run.
        last_rows: how many of a request's queries are a prompt's last rows, by its queries and keys.
    """

    def __init__(
        self, source: Any, req_to_token: Tensor, max_keys: int, build_part: Callable[[Any], Any],
        last_rows: Callable[[int, int], int],
    ) -> None:  # fmt: skip
        queries = [int(count) for count in source.extend_seq_lens_cpu]
        prefixes = [int(count) for count in source.extend_prefix_lens_cpu]
        lengths = [prefix + count for prefix, count in zip(prefixes, queries, strict=True)]
        pieces = Pieces.of([0, *accumulate(queries)], lengths, last_rows)
        self._pieces = parted = source if pieces.are_requests else in_pieces(source, pieces)
        adapted = [adapter is not None for adapter in getattr(source, "lora_ids", None) or ()]
        super().__init__(pieces, max_keys, lambda run: build_part(part_of(parted, pieces.lengths, run)), adapted)
        self.source, self._req_to_token = source, req_to_token
        self._edges: Tensor | None = None

    def tensors_of(self, run: Run) -> tuple[Tensor, Tensor, Tensor]:
        """Where queries begin, how many keys there are, and their slots, which are pages of one token."""
        if self._edges is None:
            counts = self._pieces.extend_seq_lens
            self._edges = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        edges, seq_lens = self._edges[run.first : run.last + 1], self._pieces.seq_lens[run.requests].int()
        return edges, seq_lens, self._req_to_token[self._pieces.req_pool_indices[run.requests]].int()


def in_pieces(source: Any, pieces: Pieces) -> Any:
    """The ForwardBatch whose requests are the pieces of a batch's requests."""
    parted = copy.copy(source)
    queries = pieces.queries
    lengths = {"extend_seq_lens": queries, "seq_lens": pieces.lengths}
    lengths["extend_prefix_lens"] = [keys - count for keys, count in zip(pieces.lengths, queries, strict=True)]
    for name in OF_REQUESTS:
        whole = getattr(source, name, None)
        numbers = lengths.get(name.removesuffix("_cpu"))
        if isinstance(whole, Tensor):
            given = pieces.requests if numbers is None else numbers
            entries = torch.tensor(given).to(whole.device, non_blocking=True)
            setattr(parted, name, whole[entries] if numbers is None else entries.to(whole.dtype))
        elif whole is not None:
            setattr(parted, name, [whole[request] for request in pieces.requests] if numbers is None else numbers)
    parted.batch_size = len(queries)
    return parted


def part_of(source: Any, lengths: Sequence[int], run: Run) -> Any:
    """The ForwardBatch of a run, as if the batch had no other requests.

    Args:
        source: the whole ForwardBatch.
        lengths: the keys of each of its requests.
        run: neighbouring requests.
    """
    part = copy.copy(source)
    for name in (*OF_REQUESTS, *OF_TOKENS):
        whole = getattr(source, name, None)
        if whole is not None:
            setattr(part, name, whole[run.requests if name in OF_REQUESTS else run.rows])
    part.batch_size = run.last - run.first
    part.extend_num_tokens = run.end - run.begin
    part.seq_lens_sum = sum(lengths[run.requests])
    return part


def whole_only(source: Any) -> str | None:
    """Why a ForwardBatch is the stock backend's as a whole, whatever its requests; None if it may be shared."""
    if source.forward_mode.name not in PROMPTS:
        return f"the batch is of mode {source.forward_mode.name}"  # such as the verification of speculated tokens
    if source.extend_seq_lens_cpu is None or source.extend_prefix_lens_cpu is None:
        return "the lengths of the batch are not known on the host"
    return next((reason for name, reason in WHOLE_ONLY.items() if getattr(source, name, None) is not None), None)
