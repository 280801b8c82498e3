"""One batch of vLLM: the tensors that S2O's calls and the stock backend's parts of it need, and the cache."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from s2o_runtime.errors import InputError
from s2o_runtime.serving.batch import Batch, BatchSlice, SplitRequests
from s2o_runtime.serving.server import Server

EDGES = ("query_start_loc", "query_start_loc_cpu")  # fields with one entry more than there are requests
OF_TOKENS = ("slot_mapping", "positions")  # fields with one entry for each query row
COMPUTED = "_num_computed_tokens_cpu"  # field with those of its keys that are not of its queries
LENGTHS = ("seq_lens_cpu_upper_bound", "_seq_lens_cpu")  # keys on the host, exact for prompts; newest name first
KEYS = ("seq_lens", *LENGTHS)  # fields with each request's keys
# What a part of a batch cannot have: such batches are the stock backend's as a whole.
WHOLE_ONLY = {
    "mm_req_doc_ranges": "rows of an image see one another",
    "rswa_prefix_lens": "the model has reference sliding windows",
    "encoder_seq_lens": "the layer attends to an encoder",
    "dcp_local_seq_lens": "the context is shared by several ranks",
    "logits_indices_padded": "the prompt's last layers are skipped (fast prefill)",
}


class VllmBatch(Batch):
    """One batch, as a metadata builder was given it in vLLM's `CommonAttentionMetadata`.

    build: makes the stock backend's metadata of a part of it; count_left, has_adapter: those of `VllmApi`.
    """

    def __init__(
        self, common: Any, build: Callable[[Any], Any], server: Server,
        count_left: Callable[[int, int], int | None], has_adapter: Callable[[int, int], bool],
    ) -> None:  # fmt: skip
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        lengths = read_lengths(common)[: common.num_reqs].tolist()
        queries = [end - begin for begin, end in pairwise(starts)]

        def count_last_rows(queries: int, keys: int) -> int:
            return server.fit.count_last_rows(queries, keys, count_left(queries, keys))

        split = SplitRequests.from_batch(starts, lengths, list(map(has_adapter, queries, lengths)), count_last_rows)
        self._common = common if split.are_whole else split_batch(common, split)
        self._build = build
        super().__init__(split, server.fit, server.max_keys, lambda span: build(slice_batch(self._common, span)))

    def get_tensors(self, span: BatchSlice) -> tuple[Tensor, Tensor, Tensor]:
        common = self._common
        edges = common.query_start_loc[span.first : span.last + 1]
        return edges, common.seq_lens[span.requests].int(), common.block_table_tensor[span.requests]

    def with_block_table(self, block_table: Tensor, slot_mapping: Tensor) -> VllmBatch:
        """Return the same batch of another group of layers, whose keys lie in other pages."""
        if not self.split.are_whole:
            block_table = index_by_request(block_table, self.split)
        other, build = copy.copy(self), self._build
        other._common = replace(self._common, block_table_tensor=block_table, slot_mapping=slot_mapping)
        other._build_part = lambda span: build(slice_batch(other._common, span))
        other._calls, other._parts = {}, {}  # the plans stay
        return other


def read_lengths(common: Any) -> Tensor:
    """Read the keys of each request on the host; asking the device for them is the last resort, because it waits."""
    for name in LENGTHS:
        lengths = getattr(common, name, None)
        if isinstance(lengths, Tensor):
            return lengths
    return torch.as_tensor(common.seq_lens).cpu()


def find_batch_obstacle(common: Any) -> str | None:
    """Return the reason why the stock backend computes a batch as a whole, whatever its requests, or None."""
    if common.causal is not True:
        return "the batch is not causal"
    return next((reason for name, reason in WHOLE_ONLY.items() if getattr(common, name, None) is not None), None)


def index_by_request(values: Any, split: SplitRequests) -> Any:
    """Return an entry for each split request, of values that have one for each of the server's requests."""
    if isinstance(values, Tensor):
        return values[torch.tensor(split.indices).to(values.device, non_blocking=True)]
    return values[list(split.indices)]  # of numpy


def split_batch(common: Any, split: SplitRequests) -> Any:
    """Return the `CommonAttentionMetadata` whose requests are split."""

    def numbers(values: Sequence[int], like: Tensor) -> Tensor:
        return torch.tensor(values, dtype=like.dtype).to(like.device, non_blocking=True)

    changes: dict[str, Any] = {"num_reqs": len(split.requests), "max_query_len": max(split.sizes[0])}
    for name in (field.name for field in fields(common)):
        value = getattr(common, name)
        if name.endswith("_cache"):
            changes[name] = None
        elif name in EDGES:
            changes[name] = numbers(split.starts, value)
        elif name not in OF_TOKENS and getattr(value, "shape", None):  # one entry a request
            changes[name] = index_by_request(value, split)
            if name in KEYS:
                changes[name] -= numbers(split.later, value)
            elif name == COMPUTED:
                changes[name] += numbers(split.earlier, value)
    return replace(common, **changes)


def slice_batch(common: Any, span: BatchSlice) -> Any:
    """Return the `CommonAttentionMetadata` of some neighbouring requests, as if the batch had no others."""
    changes: dict[str, Any] = {
        "num_reqs": span.last - span.first,
        "num_actual_tokens": span.end - span.begin,
        "max_query_len": span.max_q,
        "max_seq_len": span.max_k,
    }
    for name in (field.name for field in fields(common)):
        value = getattr(common, name)
        if name.endswith("_cache"):
            changes[name] = None  # the whole batch's, computed once
        elif name in EDGES:
            changes[name] = value[span.first : span.last + 1] - span.begin
        elif name in OF_TOKENS:
            changes[name] = None if value is None else value[..., span.rows]  # of M-RoPE there are three rows
        elif name not in changes and getattr(value, "shape", None):
            changes[name] = value[span.requests]
    return replace(common, **changes)


def get_pages(cache: Tensor, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return the keys and the values of one layer's cache: k and v, [pages, page size, Hkv, D] views.

    Args:
        cache: [pages, 2, page size, Hkv, D] as up to 0.28, or [pages, Hkv, page size, 2 D], keys before values, as from
            0.29 on. Strides are a matter of settings too; a view keeps them.
        kv_heads, head_dim: Hkv and D.

    Raises:
        InputError: the cache has another shape.
    """
    if cache.ndim == 5 and cache.shape[1] == 2 and cache.shape[3:] == (kv_heads, head_dim):
        k, v = cache.unbind(1)
    elif cache.ndim == 4 and (cache.shape[1], cache.shape[3]) == (kv_heads, 2 * head_dim):
        k, v = cache.transpose(1, 2).chunk(2, 3)
    else:
        raise InputError(
            f"the KV cache has shape {tuple(cache.shape)}: expected [pages, {kv_heads}, page size, {2 * head_dim}] or "
            f"[pages, 2, page size, {kv_heads}, {head_dim}]"
        )
    if cache.dtype == torch.uint8:  # how vLLM stores fp8
        k, v = k.view(torch.float8_e4m3fn), v.view(torch.float8_e4m3fn)
    return k, v
