"""An attention backend of vLLM, made out of a stock one: S2O computes long prompts, the stock backend all else.

`mix_in` derives the three classes that vLLM wants, backend, builder and implementation, from those of the stock
backend. Whatever they do not say here they inherit: the layout of the cache and how it is written, decode batches and
their CUDA graphs, what is supported. Nothing in this file imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from s2o_runtime.errors import InputError
from s2o_runtime.sequences import FP8_TYPES, page_obstacle
from s2o_runtime.serving.attend import LayerCall, attend
from s2o_runtime.serving.calls import cache_obstacle, layer_obstacle, say_once, scales_obstacle
from s2o_runtime.serving.fit import LayerFit
from s2o_runtime.serving.plan import Run
from s2o_runtime.serving.server import Server
from s2o_runtime.vllm.batch import VllmBatch, key_and_value_pages, whole_only
from s2o_runtime.vllm.compat import INIT

BATCH = "s2o_batch"  # attribute of the stock backend's metadata: the batch, or why S2O has no part in it


@dataclass(frozen=True)
class VllmApi:
    """What the classes ask of the vLLM around them.

    Attributes:
        server: gives the profile of this process, which is loaded when the first layer is made.
        layer_index: gives a layer's index in the whole model by its name.
        left: gives the tokens of its prompt behind a request of so many queries and keys; None if that is not known.
        adapted: says whether a request of so many queries and keys may have a LoRA adapter.
    """

    server: Callable[[], Server]
    layer_index: Callable[[str], int]
    left: Callable[[int, int], int | None]
    adapted: Callable[[int, int], bool] = lambda *_: False


def mix_in(stock: type, name: str, api: VllmApi) -> type:
    """The class of S2O's backend on top of a stock one, which names those of its builder and implementation.

    Args:
        stock: a subclass of vLLM's AttentionBackend, such as FlashAttentionBackend.
        name: what vLLM's registry calls the new backend.
        api: the vLLM around it.
    """
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


def number_of(api: VllmApi, name: str) -> int:
    """A layer's number, by its name in the model; -1 for a part that is no decoder."""
    try:
        return api.layer_index(name)
    except (AssertionError, ValueError):  # a name with several numbers
        return -1


class _Builder:
    """Adds the batch to the stock backend's metadata where a request may be long enough for S2O."""

    s2o_api: VllmApi
    s2o_layers: tuple[int, ...] | None = None
    layer_names: list[str]

    @classmethod
    def get_cudagraph_support(cls, *arguments: Any, **named: Any) -> Any:
        """At most the graphs of batches whose requests are all alike, which are decode."""
        support = super().get_cudagraph_support(*arguments, **named)  # type: ignore[misc]
        return min(support, type(support).UNIFORM_BATCH, key=lambda level: level.value)

    def use_cascade_attention(self, *arguments: Any, **named: Any) -> bool:
        return False  # a batch with cascade attention cannot be cut into parts

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        stock_build = super().build  # type: ignore[misc]
        metadata = stock_build(common_prefix_len, common_attn_metadata, fast_build)
        server = self.s2o_api.server()
        if common_attn_metadata.max_query_len < server.fit.min_queries:
            return metadata
        reason = server.fit.why_whole(common_attn_metadata.max_query_len, common_attn_metadata.max_seq_len)
        if reason := reason or whole_only(common_attn_metadata):
            return self._left(metadata, reason)
        # fast: no schedule in buffers that the whole batch's metadata uses
        build_part = partial(stock_build, 0, fast_build=True)
        left = self.s2o_api.left

        def last_rows(queries: int, keys: int) -> int:
            return server.fit.last_rows(queries, keys, left(queries, keys))

        batch = VllmBatch(common_attn_metadata, build_part, server.max_keys, last_rows, self.s2o_api.adapted)
        setattr(metadata, BATCH, batch)
        return metadata

    def _left(self, metadata: Any, reason: str) -> Any:
        """A batch's metadata, counted for all of the builder's layers as the stock backend's: that is all S2O does."""
        if self.s2o_layers is None:
            self.s2o_layers = tuple(number_of(self.s2o_api, name) for name in self.layer_names)
        self.s2o_api.server().counters.count_stock_batch(self.s2o_layers, reason, metadata.num_actual_tokens)
        setattr(metadata, BATCH, reason)
        return metadata

    def update_block_table(self, metadata: Any, blk_table: Tensor, slot_mapping: Tensor) -> Any:
        updated = super().update_block_table(metadata, blk_table, slot_mapping)  # type: ignore[misc]
        batch: VllmBatch | str | None = getattr(metadata, BATCH, None)
        if isinstance(batch, str):
            return self._left(updated, batch)
        if batch is not None:
            setattr(updated, BATCH, batch.with_block_table(blk_table, slot_mapping))
        return updated


class _Implementation:
    """Computes the sparse runs of a batch, and calls the stock backend for the others."""

    s2o_api: VllmApi
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        given = {**dict(zip(INIT, arguments, strict=False)), **named}
        self.s2o_server = self.s2o_api.server()
        self.s2o_layers: dict[str, tuple[int, LayerFit | str]] = {}
        self.s2o_obstacle = say_once(layer_obstacle(
            alibi=given.get("alibi_slopes") is not None,
            sliding_window=given.get("sliding_window"),
            soft_cap=given.get("logits_soft_cap"),
            attn_type=str(getattr(given.get("attn_type"), "value", given.get("attn_type", "decoder"))),
            sinks=named.get("sinks") is not None or any(isinstance(extra, Tensor) for extra in arguments[len(INIT) :]),
        ) or cache_obstacle(given.get("kv_cache_dtype", "auto"), self.s2o_server.fit.made_for))  # fmt: skip

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, *scales: Any, **named: Any,
    ) -> Any:  # fmt: skip
        """vLLM's call of one layer; see its AttentionImpl."""
        stock = super().forward  # type: ignore[misc]
        given = layer, query, key, value, kv_cache, attn_metadata, output, *scales
        batch: VllmBatch | str | None = getattr(attn_metadata, BATCH, None)
        if batch is None or isinstance(batch, str):
            if attn_metadata is None:
                self.s2o_server.reserve(query)
            return stock(*given, **named)

        def whole() -> Any:
            return stock(*given, **named)

        def part(run: Run, out: Tensor) -> None:
            q, k, v = (None if tensor is None else tensor[run.rows] for tensor in (query, key, value))
            stock(layer, q, k, v, kv_cache, batch.part(run), output[run.rows], *scales, **named)

        call = LayerCall(
            *self._layer(layer, kv_cache), batch, query, self.scale,
            pages=lambda: key_and_value_pages(kv_cache, self.num_kv_heads, self.head_size),
            whole=whole,
            part=part,
            output=lambda: (output, output.view(-1, self.num_heads, self.head_size)),
        )  # fmt: skip
        return attend(call, attn_metadata.num_actual_tokens, self.s2o_server.counters)

    def _layer(self, layer: Any, kv_cache: Tensor) -> tuple[int, LayerFit | str]:
        """The decoder layer's number, -1 for a part that is no decoder; the profile's layer, or why there is none."""
        name = layer.layer_name
        if name not in self.s2o_layers:
            number = number_of(self.s2o_api, name)
            sizes = self.num_heads, self.num_kv_heads, self.head_size
            fit = self.s2o_obstacle or self.s2o_server.fit.layer(number, *sizes)
            if not isinstance(fit, str):
                fit = self._cache_obstacle(layer, kv_cache) or fit
            self.s2o_layers[name] = number, fit
        return self.s2o_layers[name]

    def _cache_obstacle(self, layer: Any, kv_cache: Tensor) -> str | None:
        """Why S2O cannot read a layer's cache, or take its queries with it; None if it can."""
        try:
            k, _ = key_and_value_pages(kv_cache, self.num_kv_heads, self.head_size)
        except InputError as error:
            return str(error)
        if k.dtype not in FP8_TYPES:
            return page_obstacle(k.shape[1])
        if getattr(self, "supports_quant_query_input", True):
            return "queries are rounded to fp8, which the profile was not made for"
        if not hasattr(layer, "_k_scale") or not hasattr(layer, "_v_scale"):
            return "the scales of the fp8 cache are not where they are expected"
        return page_obstacle(k.shape[1]) or scales_obstacle(layer._k_scale, layer._v_scale)
