"""An attention backend of vLLM, made out of a stock one: S2O computes long prompts, the stock backend all else.

`mix_in` derives the three classes that vLLM wants, backend, builder and implementation, from those of the stock
backend. Whatever they do not say here they inherit: the layout of the cache and how it is written, decode batches and
their CUDA graphs, what is supported. Nothing in this file imports vLLM.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import Scoring
from ..dense_reason import DenseReason
from ..errors import InputError
from ..sequences import FP8_TYPES, find_page_obstacle
from ..serving import fit
from ..serving.attend import LayerCall, attend
from ..serving.batch import Batch, BatchSlice, SplitRequests
from ..serving.fit import Request, ServedLayer
from ..serving.server import Server
from .compat import INIT

EDGES = ("query_start_loc", "query_start_loc_cpu")  # fields with one entry more than there are requests
OF_TOKENS = ("slot_mapping", "positions")  # fields with one entry for each query row
OF_WHOLE = ("_cache", "req_idx")  # ends of the names of fields that parts go without
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

BATCH = "s2o_batch"  # attribute of the stock backend's metadata: the batch, or why S2O has no part in it


class RequestPart(NamedTuple):
    """A request's part of a step."""

    name: str | None = None  # of the request, None where it is not known
    left: int | None = None  # tokens of its prompt behind the part
    reason: DenseReason | None = None  # `Request.own_reason`


@dataclass(frozen=True)
class VllmApi:
    """The vLLM around S2O's classes, as functions."""

    get_server: Callable[[], Server]  # which is made when the first layer is
    get_layer_index: Callable[[str], int]  # in the whole model, by a layer's name
    find_part: Callable[[int, int], RequestPart]  # of this step, with so many queries and keys

    def get_layer_number(self, name: str) -> int:
        """Return a layer's number, by its name in the model; -1 for a part that is no decoder."""
        try:
            return self.get_layer_index(name)
        except (AssertionError, ValueError):  # a name with several numbers
            return -1


def mix_in(stock: type, name: str, api: VllmApi) -> type:
    """Mix S2O into a stock backend, such as FlashAttentionBackend; vLLM's registry has the new class by this name."""
    stock_builder, stock_implementation = stock.get_builder_cls(), stock.get_impl_cls()  # type: ignore[attr-defined]

    class S2OMetadataBuilder(_Builder, stock_builder):  # type: ignore[misc, valid-type]
        s2o_api = api

    class S2OImpl(_Implementation, stock_implementation):  # type: ignore[misc, valid-type]
        s2o_api = api

    class S2OBackend(stock):  # type: ignore[misc]
        @staticmethod
        def get_name() -> str:
            return name

        @staticmethod
        def get_impl_cls() -> type:
            return S2OImpl

        @staticmethod
        def get_builder_cls() -> type:
            return S2OMetadataBuilder

        @classmethod
        def supports_batch_invariance(cls) -> bool:
            return False  # how a prompt is cut into chunks moves its segments

        @classmethod
        def supports_device_cpu_query_lens_mismatch(cls) -> bool:
            return False  # a batch is planned and cut by the query lengths on the host; vLLM asks since 0.33

    return S2OBackend


class _Builder:
    """Adds the batch to the stock backend's metadata where a request may be long enough for S2O."""

    s2o_api: VllmApi
    s2o_layers: tuple[int, ...] | None = None
    layer_names: list[str]

    @classmethod
    def get_cudagraph_support(cls, *arguments: Any, **named: Any) -> Any:
        """Return at most the graphs of batches whose requests are all alike, which are decode."""
        support = super().get_cudagraph_support(*arguments, **named)  # type: ignore[misc]
        return min(support, type(support).UNIFORM_BATCH, key=lambda level: level.value)

    def use_cascade_attention(self, *arguments: Any, **named: Any) -> bool:
        return False  # a batch with cascade attention cannot be cut into parts

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        stock_build = super().build  # type: ignore[misc]
        metadata = stock_build(common_prefix_len, common_attn_metadata, fast_build)
        server, common = self.s2o_api.get_server(), common_attn_metadata
        if common.max_query_len < server.fit.min_queries:  # decoding: nothing is counted, either
            return metadata
        largest = Request(common.max_query_len, common.max_seq_len)
        if reason := server.fit.batch_reason(largest) or find_batch_obstacle(common):
            return self._leave(metadata, reason)
        # fast: no schedule in buffers that the whole batch's metadata uses
        build_part = partial(stock_build, 0, fast_build=True)
        try:
            setattr(metadata, BATCH, VllmBatch(common, build_part, server, self.s2o_api.find_part))
        except Exception as error:  # nothing of S2O's ends a server
            return self._leave(metadata, server.counters.count_fault(-1, error))
        return metadata

    def _leave(self, metadata: Any, reason: str) -> Any:
        """Leave a batch to the stock backend: count it for all of the builder's layers, and do no more."""
        if self.s2o_layers is None:
            self.s2o_layers = tuple(map(self.s2o_api.get_layer_number, self.layer_names))
        self.s2o_api.get_server().counters.count_stock_batch(self.s2o_layers, reason, metadata.num_actual_tokens)
        setattr(metadata, BATCH, reason)
        return metadata

    def update_block_table(self, metadata: Any, blk_table: Tensor, slot_mapping: Tensor) -> Any:
        updated = super().update_block_table(metadata, blk_table, slot_mapping)  # type: ignore[misc]
        batch: VllmBatch | str | None = getattr(metadata, BATCH, None)
        if isinstance(batch, str):
            return self._leave(updated, batch)
        if batch is not None:
            setattr(updated, BATCH, batch.with_block_table(blk_table, slot_mapping))
        return updated


class _Implementation:
    """Computes the sparse slices of a batch, and calls the stock backend for the others."""

    s2o_api: VllmApi
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        given = {**dict(zip(INIT, arguments, strict=False)), **named}
        self.s2o_scoring = Scoring(self.scale, given.get("logits_soft_cap") or None, given.get("sinks"))
        self.s2o_server = self.s2o_api.get_server()
        self.s2o_layers: dict[str, tuple[int, ServedLayer | str]] = {}
        self.s2o_obstacle = fit.log_obstacle(fit.find_layer_obstacle(
            alibi=given.get("alibi_slopes") is not None,
            sliding_window=given.get("sliding_window"),
            attn_type=str(getattr(given.get("attn_type"), "value", given.get("attn_type", "decoder"))),
        ) or fit.find_cache_obstacle(given.get("kv_cache_dtype", "auto"), self.s2o_server.fit.made_for))  # fmt: skip

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *scales: Any,
        **named: Any,
    ) -> Any:
        """Compute one layer, as vLLM's AttentionImpl does."""
        stock = super().forward  # type: ignore[misc]
        batch: VllmBatch | str | None = getattr(attn_metadata, BATCH, None)

        def run_stock() -> Any:
            return stock(layer, query, key, value, kv_cache, attn_metadata, output, *scales, **named)

        if batch is None or isinstance(batch, str):  # counted when it was built, or decoding
            if attn_metadata is None and self.s2o_obstacle is None:  # vLLM's profiling run
                self.s2o_server.reserve(query, self.s2o_scoring)
            return run_stock()

        def run_stock_slice(span: BatchSlice, out: Tensor) -> None:
            q, k, v = (None if tensor is None else tensor[span.rows] for tensor in (query, key, value))
            stock(layer, q, k, v, kv_cache, batch.get_part(span), output[span.rows], *scales, **named)

        call = LayerCall(
            *self._find_layer(layer, kv_cache),
            batch,
            query,
            self.s2o_scoring,
            attn_metadata.num_actual_tokens,
            self.s2o_server.counters,
            read_pages=lambda: get_pages(kv_cache, self.num_kv_heads, self.head_size),
            run_stock=run_stock,
            run_stock_slice=run_stock_slice,
            make_output=lambda: (output, output.view(-1, self.num_heads, self.head_size)),
        )
        return attend(call)

    def _find_layer(self, layer: Any, kv_cache: Tensor) -> tuple[int, ServedLayer | str]:
        """Return the decoder layer's number, -1 for no decoder, with the profile's layer or why there is none."""
        name = layer.layer_name
        if name not in self.s2o_layers:
            number, sizes = self.s2o_api.get_layer_number(name), (self.num_heads, self.num_kv_heads, self.head_size)
            served = self.s2o_obstacle or self.s2o_server.fit.find_layer(number, *sizes)
            if not isinstance(served, str):
                served = self._find_cache_obstacle(layer, kv_cache) or served
            self.s2o_layers[name] = number, served
        return self.s2o_layers[name]

    def _find_cache_obstacle(self, layer: Any, kv_cache: Tensor) -> str | None:
        """Return the reason why S2O cannot read a layer's cache, or take its queries with it; None if it can."""
        try:
            k, _ = get_pages(kv_cache, self.num_kv_heads, self.head_size)
        except InputError as error:
            return str(error)
        if k.dtype not in FP8_TYPES:
            return find_page_obstacle(k.shape[1])
        if getattr(self, "supports_quant_query_input", True):
            return "queries are rounded to fp8, which the profile was not made for"
        if not hasattr(layer, "_k_scale") or not hasattr(layer, "_v_scale"):
            return "the scales of the fp8 cache are not where they are expected"
        return find_page_obstacle(k.shape[1]) or fit.find_scales_obstacle(layer._k_scale, layer._v_scale)


class VllmBatch(Batch):
    """One batch, as a metadata builder was given it in vLLM's `CommonAttentionMetadata`.

    build: makes the stock backend's metadata of a part of it; find_part: that of `VllmApi`.
    """

    def __init__(
        self,
        common: Any,
        build: Callable[[Any], Any],
        server: Server,
        find_part: Callable[[int, int], RequestPart],
    ) -> None:
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        lengths = read_lengths(common)[: common.num_reqs].tolist()
        queries = [end - begin for begin, end in pairwise(starts)]
        self.names, left, reasons = zip(*map(find_part, queries, lengths), strict=True)
        split = SplitRequests.from_batch(starts, lengths, reasons, left, server.fit.count_last_rows)
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
    numbers = getattr(common, "req_idx", None)  # of requests, without those that pad the batch
    if numbers is not None and len(set(numbers.tolist())) < len(numbers):
        return "several chunks share one context (prefill context parallelism)"
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
        if name.endswith(OF_WHOLE):
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
        if name.endswith(OF_WHOLE):
            changes[name] = None
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
