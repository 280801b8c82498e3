"""The surroundings of S2O's backend in vLLM, without vLLM: requests with a cache, classes on the plain backend.

On a GPU the same classes drive the real kernels.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from s2o_runtime.dense_reason import DenseReason
from s2o_runtime.vllm.backend import BATCH, RequestPart, VllmApi, mix_in
from support.fake_server import Request, Requests, take
from support.server_batches import FEWEST
from support.vllm_plain import PlainBuilder, PlainImpl

Graphs = Enum("Graphs", {"ALWAYS": 3, "UNIFORM_BATCH": 2, "NEVER": 0})  # vLLM's AttentionCGSupport


@dataclass
class Common:
    """vLLM's CommonAttentionMetadata, as far as backends of text models read it."""

    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    causal: Any = True
    positions: Tensor | None = None
    is_prefilling: Tensor | None = None
    seq_lens_cpu_upper_bound: Tensor | None = None
    mm_req_doc_ranges: Any = None
    req_idx: Any = None
    _num_computed_tokens_cache: Tensor | None = None


class StockBuilder(PlainBuilder):
    """Keeps what it builds metadata of."""

    def __init__(self) -> None:
        self.built: list[Common] = []

    @classmethod
    def get_cudagraph_support(cls) -> Graphs:
        return Graphs.ALWAYS

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        self.built.append(common_attn_metadata)
        return super().build(common_prefix_len, common_attn_metadata, fast_build)

    def update_block_table(self, metadata: Any, blk_table: Tensor, slot_mapping: Tensor) -> Any:
        changed = copy.copy(metadata)
        vars(changed).pop(BATCH, None)
        changed.block_table_tensor, changed.slot_mapping = blk_table, slot_mapping
        return changed


class StockImpl(PlainImpl):
    """Counts the rows that it computes."""

    stock_rows = 0

    def forward(self, layer: Any, query: Tensor, *arguments: Any, **named: Any) -> Tensor:
        self.stock_rows += len(query)
        return super().forward(layer, query, *arguments, **named)


class Stock:
    """A stock backend."""

    supports_device_cpu_query_lens_mismatch = staticmethod(lambda: True)
    get_impl_cls = staticmethod(lambda: StockImpl)
    get_builder_cls = staticmethod(lambda: StockBuilder)


def fake_backend(server: Any, find_part: Any = lambda queries, keys: RequestPart()) -> Any:
    """S2O's backend on the stock one, for a server; layers are named "layers.N". find_part: `VllmApi`'s."""
    return mix_in(Stock, "S2O", VllmApi(lambda: server, lambda name: int(name.rpartition(".")[2]), find_part))


@dataclass
class FakeEngine(Requests):
    """vLLM's skin. layout: of the cache, "side by side" or "pages of two"; page_size: tokens of a page."""

    adapters_by_sizes, uncounted_below = True, FEWEST

    layout: str = "side by side"
    page_size: int = 16
    pages: int = 256

    def __post_init__(self) -> None:
        heads, kv_heads, head_dim = self.sizes
        backend = fake_backend(self.server, self.find_part)
        self.builder = backend.get_builder_cls()()
        kv_cache_dtype = self.kv_cache_dtype or "auto"
        cap, sinks = self.scoring.get("softcap"), self.scoring.get("sinks")
        layer = heads, head_dim, head_dim**-0.5, kv_heads, None, None, kv_cache_dtype, cap
        self.impl = backend.get_impl_cls()(*layer, sinks=sinks)
        by_two = (self.pages, 2, self.page_size, kv_heads, head_dim)
        shape = by_two if self.layout == "pages of two" else (self.pages, kv_heads, self.page_size, 2 * head_dim)
        fp8 = kv_cache_dtype == "fp8"
        dtype = torch.float8_e4m3fn if fp8 else self.dtype
        cache = torch.full(shape, float("nan"), dtype=dtype, device=self.device)
        self.cache = cache.view(torch.uint8) if fp8 else cache
        self.free = torch.randperm(self.pages).tolist()

    def feed(self, parts: list[tuple[Request, int]], layer: int = 0, padding: int = 0) -> tuple[Tensor, Any]:
        """Feed so many tokens of each request; returns their outputs [T, Hq, D] and the batch's metadata.

        padding: requests without queries at the end, and as many rows, as a CUDA graph's batch has them.
        """
        prepared = self.prepare(parts, padding, layer)
        return prepared.forward(layer)[: sum(count for _, count in parts)], prepared.metadata

    def outputs(self, parts: list[tuple[Request, int]], layer: int = 0, padding: int = 0) -> Tensor:
        out, self.metadata = self.feed(parts, layer, padding)
        return out

    @property
    def last_batch(self) -> Any:
        return getattr(self.metadata, BATCH)

    @property
    def stock_rows(self) -> int:
        return self.impl.stock_rows

    def find_part(self, queries: int, keys: int) -> RequestPart:
        """Find fed requests by their queries and keys, by which alone vLLM's backends know them."""
        found = [request for request in self.requests if (request.fed, request.done) == (queries, keys)]
        left = min((len(request) - keys for request in found), default=None) if self.ends else None
        reason = DenseReason.PROMPT_LOGPROBS if any(request.logprobs for request in found) else None
        adapted = any(request.adapter for request in found)
        return RequestPart(str(id(found[0])) if found else None, left, DenseReason.ADAPTER if adapted else reason)

    def prepare(self, parts: list[tuple[Request, int]], padding: int = 0, layer: int = 0) -> Prepared:
        """Write the keys of so many tokens of each request, and build the batch's metadata for one layer."""
        self.builder.layer_names, self.builder.s2o_layers = [f"model.layers.{layer}"], None
        for request in self.requests:  # those of an earlier batch are none of this one's
            request.fed = 0
        layout = self.lay_out(parts)
        counts, lengths = (torch.tensor(sizes + [0] * padding).int() for sizes in (layout.counts, layout.lengths))
        table = torch.zeros(len(counts), max(len(request.pages) for request, _ in parts), dtype=torch.int32)
        for index, (request, _) in enumerate(parts):
            table[index, : len(request.pages)] = torch.tensor(request.pages)
        edges = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        common = Common(
            edges.to(self.device),
            edges,
            lengths.to(self.device),
            len(counts),
            int(edges[-1]),
            int(counts.max()),
            int(lengths.max()),
            table.to(self.device),
            layout.slots,
            positions=layout.positions,
            is_prefilling=torch.tensor([True] * len(counts)),
            seq_lens_cpu_upper_bound=lengths,
            req_idx=torch.arange(len(parts)),
        )
        query, key, value = take(parts)
        self.impl.do_kv_cache_update(None, key, value, self.cache, common.slot_mapping)
        query = torch.cat([query, query.new_full((padding, *query.shape[1:]), float("nan"))])
        return Prepared(self, self.builder.build(0, common), query, key, value)


@dataclass
class Prepared:
    """A batch whose keys are in the cache: its metadata, and its rows [T, Hq, D] and twice [T, Hkv, D]."""

    engine: FakeEngine
    metadata: Any
    query: Tensor
    key: Tensor
    value: Tensor

    def forward(self, layer: int = 0) -> Tensor:
        """vLLM's call of a layer; returns its output, which was NaN before."""
        output = torch.full_like(self.query, float("nan"))
        module = SimpleNamespace(layer_name=f"model.layers.{layer}", _k_scale=1.0, _v_scale=1.0)
        engine = self.engine
        engine.impl.forward(module, self.query, self.key, self.value, engine.cache, self.metadata, output)
        return output
