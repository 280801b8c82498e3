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
from s2o_runtime.serving import calls
from s2o_runtime.serving.plan import Pieces, Run

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


class VllmBatch(calls.Batch):
    """One batch, as a metadata builder was given it.

    Args:
        common: vLLM's `CommonAttentionMetadata`.
        build_part: makes the stock backend's metadata of a part of it.
        max_keys: of one sparse run.
        last_rows: how many of a request's queries are a prompt's last rows, by its queries and keys.
        adapted: whether a request may have a LoRA adapter, by the same.
    """

    def __init__(
        self, common: Any, build_part: Callable[[Any], Any], max_keys: int, last_rows: Callable[[int, int], int],
        adapted: Callable[[int, int], bool] = lambda *_: False,
    ) -> None:  # fmt: skip
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        lengths = lengths_on_host(common)[: common.num_reqs].tolist()
        pieces = Pieces.of(starts, lengths, last_rows)
        edges = pairwise(starts)
        with_adapter = [adapted(end - begin, keys) for keys, (begin, end) in zip(lengths, edges, strict=True)]
        self._common = common = common if pieces.are_requests else in_pieces(common, pieces)
        self._build = build_part
        super().__init__(pieces, max_keys, lambda run: build_part(part_of(common, run)), with_adapter)

    def tensors_of(self, run: Run) -> tuple[Tensor, Tensor, Tensor]:
        """Where queries begin, how many keys there are, and their pages."""
        common = self._common
        edges = common.query_start_loc[run.first : run.last + 1]
        return edges, common.seq_lens[run.requests].int(), common.block_table_tensor[run.requests]

    def with_block_table(self, block_table: Tensor, slot_mapping: Tensor) -> VllmBatch:
        """The same batch of another group of layers, whose keys lie in other pages."""
        if not self.pieces.are_requests:
            block_table = of_pieces(block_table, self.pieces)
        common = replace(self._common, block_table_tensor=block_table, slot_mapping=slot_mapping)
        other, build_part = copy.copy(self), self._build
        other._common, other._build_part = common, lambda run: build_part(part_of(common, run))
        other._calls, other._parts = {}, {}
        return other


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


def of_pieces(values: Any, pieces: Pieces) -> Any:
    """Of a tensor or an array with an entry for each request, one with those of each piece's request."""
    index = torch.tensor(pieces.requests)
    return values[index.to(values.device, non_blocking=True) if isinstance(values, Tensor) else index.numpy()]


def in_pieces(common: Any, pieces: Pieces) -> Any:
    """The `CommonAttentionMetadata` whose requests are the pieces of a batch's requests."""

    def numbers(values: Sequence[int], like: Tensor) -> Tensor:
        return torch.tensor(values, dtype=like.dtype).to(like.device, non_blocking=True)

    changes: dict[str, Any] = {"num_reqs": len(pieces.requests), "max_query_len": max(pieces.queries)}
    for field in fields(common):
        value = getattr(common, field.name)
        if field.name.endswith("_cache"):
            changes[field.name] = None
        elif field.name in EDGES:
            changes[field.name] = numbers(pieces.starts, value)
        elif field.name not in OF_TOKENS and hasattr(value, "shape") and len(value.shape) > 0:
            changes[field.name] = of_pieces(value, pieces)
            if field.name in KEYS:
                changes[field.name] -= numbers(pieces.later, value)
            elif field.name == COMPUTED:
                changes[field.name] += numbers(pieces.earlier, value)
    return replace(common, **changes)


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


def key_and_value_pages(cache: Tensor, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """The keys and the values of one layer's cache: k and v, [pages, page size, Hkv, D] views.

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
