"""A stock backend in plain torch: what S2O's backend is mixed into where vLLM's own cannot be.

vLLM's CPU engine keeps its cache in an order of its kernels, so tests on it run this backend instead; and tests
without vLLM build their fake of its classes on it. It is dense, exact and slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from s2o_runtime.attention.api import s2o_attention_varlen
from s2o_runtime.config import LayerConfig
from s2o_runtime.sequences import PagedKeys, make_packed_starts
from s2o_runtime.vllm.batch import get_pages


@dataclass
class PlainMetadata:
    """One batch, or a part of it.

    Attributes:
        num_actual_tokens: query rows, without those that fill up a CUDA graph.
        query_start_loc: int32 [N + 1]; seq_lens: int32 [N]; block_table: int32 [N, M]; slot_mapping: int64 [T].
        max_query_len, max_seq_len: of the longest request.
    """

    num_actual_tokens: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    max_query_len: int
    max_seq_len: int


class PlainBuilder:
    """Makes `PlainMetadata` of vLLM's `CommonAttentionMetadata`."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PlainMetadata:
        common = common_attn_metadata
        return PlainMetadata(
            common.num_actual_tokens,
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
            common.slot_mapping,
            common.max_query_len,
            common.max_seq_len,
        )


class PlainImpl:
    """Writes the cache and attends to it densely."""

    supports_quant_query_input = False

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None, *more: Any, **named: Any
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = named.get("kv_cache_dtype", more[2] if len(more) > 2 else "auto")

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the keys and values of a batch's rows to the slots that the server gave them."""
        k, v = get_pages(kv_cache, self.num_kv_heads, self.head_size)
        rows = len(slot_mapping)
        page, slot = slot_mapping // k.shape[1], slot_mapping % k.shape[1]
        for pages, new in ((k, key[:rows]), (v, value[:rows])):
            if pages.dtype.itemsize == 1:  # indexing knows no fp8
                pages.view(torch.uint8)[page, slot] = new.to(pages.dtype).view(torch.uint8)
            else:
                pages[page, slot] = new

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        attn_metadata: PlainMetadata | None, output: Tensor, *scales: Any, **named: Any,
    ) -> Tensor:  # fmt: skip
        """vLLM's call of one layer; see its AttentionImpl."""
        if attn_metadata is None:
            return output.fill_(0)
        batch, rows = attn_metadata, attn_metadata.num_actual_tokens
        k_pages, v_pages = get_pages(kv_cache, self.num_kv_heads, self.head_size)
        cu_k, total_k = make_packed_starts(batch.seq_lens.int()), int(batch.seq_lens.sum())
        pages = PagedKeys(k_pages, v_pages, batch.block_table, cu_k, batch.max_seq_len, total_k)
        k, v = pages.gathered(query.dtype)  # of pages of any size, as stock backends take them
        out = s2o_attention_varlen(
            query[:rows], k, v, batch.query_start_loc, cu_k, batch.max_query_len, batch.max_seq_len,
            LayerConfig.uniform(self.num_heads, mode="dense"), scale=self.scale, backend="dense",
        )  # fmt: skip
        output[:rows].view(-1, self.num_heads, self.head_size).copy_(out)
        return output
