"""A stock backend in plain torch: what S2O's backend is mixed into where vLLM's own cannot be.

vLLM's CPU engine keeps its cache in an order of its kernels, so tests on it run this backend instead; and tests
without a server build their fakes of both on it. It is dense, exact and slow.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from s2o_runtime.attention.api import s2o_attention_varlen
from s2o_runtime.attention.compute import window_attention
from s2o_runtime.call import Scoring
from s2o_runtime.config import LayerConfig
from s2o_runtime.sequences import PagedKeys, make_packed_starts
from s2o_runtime.vllm.backend import get_pages


@dataclass
class PlainMetadata:
    """The fields of vLLM's `CommonAttentionMetadata` that the backend reads."""

    num_actual_tokens: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table_tensor: Tensor
    slot_mapping: Tensor
    max_query_len: int
    max_seq_len: int


class PlainBuilder:
    """Makes `PlainMetadata` of vLLM's `CommonAttentionMetadata`."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PlainMetadata:
        return PlainMetadata(*(getattr(common_attn_metadata, field.name) for field in fields(PlainMetadata)))


class PlainImpl:
    """Writes the cache and attends to it densely."""

    supports_quant_query_input = False

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None, alibi_slopes: Any = None,
        sliding_window: int | None = None, kv_cache_dtype: str = "auto", logits_soft_cap: float | None = None,
        *more: Any, sinks: Tensor | None = None, **named: Any,
    ) -> None:  # fmt: skip
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.window = kv_cache_dtype, sliding_window
        self.scoring = Scoring(self.scale, logits_soft_cap or None, sinks)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the keys and values of a batch's rows to the slots that the server gave them."""
        rows = len(slot_mapping)
        for pages, new in zip(get_pages(kv_cache, self.num_kv_heads, self.head_size), (key, value), strict=True):
            write_rows(pages, (slot_mapping // pages.shape[1], slot_mapping % pages.shape[1]), new[:rows])

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        attn_metadata: PlainMetadata | None, output: Tensor, *scales: Any, **named: Any,
    ) -> Tensor:  # fmt: skip
        """vLLM's call of one layer; see its AttentionImpl."""
        if attn_metadata is None:
            return output.fill_(0)
        batch, rows = attn_metadata, attn_metadata.num_actual_tokens
        out = attend_densely(
            query[:rows],
            *get_pages(kv_cache, self.num_kv_heads, self.head_size),
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_table_tensor,
            batch.max_query_len,
            batch.max_seq_len,
            self.scoring,
            self.window,
        )
        output[:rows].view(-1, self.num_heads, self.head_size).copy_(out)
        return output


def write_rows(cache: Tensor, index: Any, rows: Tensor) -> None:
    """Write rows into a cache in its own type; indexing knows no fp8."""
    if cache.dtype.itemsize == 1:
        cache.view(torch.uint8)[index] = rows.to(cache.dtype).view(torch.uint8)
    else:
        cache[index] = rows


def attend_densely(
    query: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    cu_q: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    max_q: int,
    max_k: int,
    scoring: Scoring,
    window: int | None = None,
) -> Tensor:
    """Dense attention of packed rows over pages of any size, as stock backends take them: [T, Hq, D]."""
    cu_k = make_packed_starts(seq_lens.int())
    k, v = PagedKeys(k_pages, v_pages, table, cu_k, max_k, int(seq_lens.sum())).gathered(query.dtype)
    if window is not None:
        edges, of_keys = (starts[1:-1].long().cpu() for starts in (cu_q, cu_k))
        requests = zip(*map(torch.tensor_split, (query, k, v), (edges, of_keys, of_keys)), strict=True)
        parts = ([rows.transpose(0, 1)[None] for rows in request] for request in requests if len(request[0]))
        return torch.cat([window_attention(*part, window, scoring)[0].transpose(0, 1) for part in parts])
    dense = LayerConfig.uniform(query.shape[1], mode="dense")
    return s2o_attention_varlen(query, k, v, cu_q, cu_k, max_q, max_k, dense, **scoring.arguments(), backend="dense")
