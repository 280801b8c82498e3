"""An attention backend of SGLang, made out of a stock one: S2O computes long prompts, the stock backend all else.

Whatever `mix_in`'s class does not say it inherits: decoding and its CUDA graphs, how the cache is laid out, what is
supported. Nothing in this file imports SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import add
from typing import Any

from torch import Tensor

from s2o_runtime.serving.attend import LayerCall, attend
from s2o_runtime.serving.calls import FP8_CACHES, cache_obstacle, layer_obstacle, say_once, scales_obstacle
from s2o_runtime.serving.fit import LayerFit
from s2o_runtime.serving.plan import Run
from s2o_runtime.serving.server import Server
from s2o_runtime.sglang.batch import SglangBatch, whole_only


@dataclass(frozen=True)
class SglangApi:
    """What the backend asks of the SGLang around it.

    Attributes:
        server: the profile on this rank.
        obstacle: why nothing in this process runs S2O; None if something may.
        kv_cache_dtype: the type of the cache's entries, as torch spells it without "torch.".
        is_split: whether a batch's context is shared by several ranks.
        write: writes the keys and values of a batch's rows into the cache, for (layer, batch, keys, values).
    """

    server: Server
    obstacle: str | None
    kv_cache_dtype: str
    is_split: Callable[[Any], bool]
    write: Callable[[Any, Any, Tensor, Tensor], None]


def mix_in(stock: type, api: SglangApi) -> type:
    """The class of S2O's backend on top of a stock one.

    Args:
        stock: a subclass of SGLang's AttentionBackend that keeps what it makes of a batch in `forward_metadata`, and
            the pools in `req_to_token_pool` and `token_to_kv_pool`.
        api: the SGLang around it.
    """

    class S2OAttnBackend(_Backend, stock):  # type: ignore[misc]
        s2o_api = api

    return S2OAttnBackend


class _Backend:
    """Computes the sparse runs of batches of prompts, and calls the stock backend for the others."""

    s2o_api: SglangApi
    forward_metadata: Any
    req_to_token_pool: Any
    token_to_kv_pool: Any

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.s2o_batch: SglangBatch | str | None = None  # of the batch that was announced last, or why it has none
        self.s2o_layers: dict[int, LayerFit | str] = {}

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """SGLang announces a batch, before its layers are called."""
        super().init_forward_metadata(forward_batch)  # type: ignore[misc]
        if forward_batch.forward_mode.is_decode_or_idle():
            self.s2o_batch = None
        elif reason := whole_only(forward_batch) or self._why_whole(forward_batch):
            self.s2o_batch = reason
        elif self.s2o_api.is_split(forward_batch):
            self.s2o_batch = "the context is shared by several ranks"
        else:
            slots, max_keys = self.req_to_token_pool.req_to_token, self.s2o_api.server.max_keys
            ends = getattr(forward_batch, "contains_last_prefill_chunk", False)  # of which requests it does not say
            last_rows = partial(self.s2o_api.server.fit.last_rows, left=0 if ends else None)
            self.s2o_batch = SglangBatch(forward_batch, slots, max_keys, self._part, last_rows)

    def _why_whole(self, forward_batch: Any) -> str | None:
        """Why a batch is the stock backend's as a whole, by its largest numbers of queries and keys."""
        new, cached = forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu
        most_new, most_keys = max(new, default=0), max(map(add, new, cached), default=0)
        return self.s2o_api.server.fit.why_whole(int(most_new), int(most_keys))

    def forward_extend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, **named: Any,
    ) -> Any:  # fmt: skip
        """SGLang's call of one layer for rows of prompts; see its AttentionBackend."""
        stock = super().forward_extend  # type: ignore[misc]
        pool, rows, heads, head_dim = self.token_to_kv_pool, q.shape[0], layer.tp_q_head_num, layer.qk_head_dim
        batch = self._sharable(q, forward_batch, named)
        written = not save_kv_cache

        def pages() -> tuple[Tensor, Tensor]:
            if not written and k is not None and v is not None:
                self.s2o_api.write(layer, forward_batch, k, v)
            k_slots, v_slots = pool.get_kv_buffer(layer.layer_id)
            return k_slots[:, None], v_slots[:, None]

        def whole() -> Any:
            nonlocal written
            written = True
            return stock(q, k, v, layer, forward_batch, save_kv_cache, **named)

        def part(run: Run, out: Tensor) -> None:
            assert isinstance(batch, SglangBatch)
            keys, values = (None if tensor is None else tensor[run.rows] for tensor in (k, v))
            source, metadata = batch.part(run)
            kept, self.forward_metadata = self.forward_metadata, metadata
            try:
                answer = stock(q[run.rows], keys, values, layer, source, False, **named)
            finally:
                self.forward_metadata = kept
            out.copy_(answer.view(out.shape))

        def output() -> tuple[Tensor, Tensor]:
            out = q.new_empty(rows, heads * head_dim)
            return out, out.view(rows, heads, head_dim)

        fit = self._layer(layer)
        query = q if isinstance(fit, str) else q.view(rows, heads, head_dim)
        call = LayerCall(layer.layer_id, fit, batch, query, layer.scaling, pages, whole, part, output)
        return attend(call, rows, self.s2o_api.server.counters)

    def _sharable(self, q: Tensor, forward_batch: Any, named: dict[str, Any]) -> SglangBatch | str:
        """The batch that a call is of, or why the call is the stock backend's as a whole."""
        batch = self.s2o_batch
        if isinstance(batch, str):
            return batch
        if batch is None or batch.source is not forward_batch or len(q) != batch.rows:
            return "the call's rows are not those of the announced batch"
        if getattr(self.forward_metadata, "image_token_ranges", None) is not None:
            return "rows of an image see one another"
        given = sorted(name for name, value in named.items() if value is not None and value is not False)
        return f"the layer is called with {', '.join(given)}" if given else batch

    def _layer(self, layer: Any) -> LayerFit | str:
        """The profile's layer, or why there is none."""
        index = layer.layer_id
        if index not in self.s2o_layers:
            api, skips = self.s2o_api, getattr(self, "fa_skip_kv_cache", False)  # FlashAttention's, for embeddings
            obstacle = (
                api.obstacle
                or ("keys are not written into the cache" if skips else None)
                or attention_obstacle(layer)
                or cache_obstacle(api.kv_cache_dtype, api.server.fit.made_for)
                or (scales_obstacle(layer.k_scale, layer.v_scale) if api.kv_cache_dtype in FP8_CACHES else None)
            )
            self.s2o_layers[index] = say_once(obstacle) or api.server.fit.layer(
                index, layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim
            )
        return self.s2o_layers[index]

    def _part(self, part: Any) -> tuple[Any, Any]:
        """The ForwardBatch of a run, and the stock backend's metadata of it."""
        kept = self.forward_metadata
        super().init_forward_metadata(part)  # type: ignore[misc]
        metadata, self.forward_metadata = self.forward_metadata, kept
        return part, metadata


def attention_obstacle(layer: Any) -> str | None:
    """Why a layer never runs S2O, by its RadixAttention; None if it may."""
    window = layer.sliding_window_size
    obstacle = layer_obstacle(
        alibi=False,
        sliding_window=window if window is not None and window > -1 else None,
        soft_cap=layer.logit_cap,
        attn_type="cross" if layer.is_cross_attention else str(layer.attn_type.value),
        sinks=False,  # are given to each call
    )
    if obstacle is not None:
        return obstacle
    if layer.qk_head_dim != layer.v_head_dim:
        return f"keys have {layer.qk_head_dim} numbers and values {layer.v_head_dim}"
    if layer.use_irope:
        return "the layer sees chunks of the context"
    if layer.xai_temperature_len > 0:
        return "the scores are scaled by their position"
    return None
