"""An attention backend of SGLang, made out of a stock one: S2O computes long prompts, the stock backend all else.

Whatever `mix_in`'s class does not say it inherits: decoding and its CUDA graphs, how the cache is laid out, what is
supported. Nothing in this file imports SGLang.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add, sub
from typing import Any

import torch
from torch import Tensor

from ..call import Scoring
from ..dense_reason import DenseReason
from ..logs import log_once
from ..serving import fit
from ..serving.attend import LayerCall, attend
from ..serving.batch import Batch, BatchSlice, SplitRequests
from ..serving.fit import Request, ServedLayer
from ..serving.server import Server
from .compat import OF_REQUESTS, OF_TOKENS, PROMPTS, WHOLE_ONLY

# of the batches that were made last, the list of new tokens, which copies of a batch share, and the tokens of each
# request's prompt
_prompt_lengths: deque[tuple[list[int], list[int]]] = deque(maxlen=8)


@dataclass(frozen=True)
class SglangApi:
    """The SGLang around S2O's backend."""

    server: Server
    obstacle: str | None  # to all in this process
    kv_cache_dtype: str  # as torch spells it without "torch."
    find_reason: Callable[[Any], str | None]  # why the stock backend computes a batch, by what SGLang does with it
    write: Callable[[Any, Any, Tensor, Tensor], None]  # layer, batch, and what goes into the cache: keys, values


def mix_in(stock: type, api: SglangApi) -> type:
    """Mix S2O into a stock backend of SGLang; return the new class.

    It keeps its data of a batch in `forward_metadata`, the pools in `req_to_token_pool` and `token_to_kv_pool`.
    """

    class S2OAttnBackend(_Backend, stock):  # type: ignore[misc]
        s2o_api = api

    return S2OAttnBackend


class _Backend:
    """Computes the sparse slices of batches of prompts, and calls the stock backend for the others."""

    s2o_api: SglangApi
    forward_metadata: Any
    req_to_token_pool: Any
    token_to_kv_pool: Any

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.s2o_batch: SglangBatch | str | None = None  # of the batch that was announced last, or why it has none
        self.s2o_layers: dict[int, ServedLayer | str] = {}

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Announce a batch, as SGLang does before its layers are called."""
        super().init_forward_metadata(forward_batch)  # type: ignore[misc]
        if forward_batch.forward_mode.is_decode_or_idle():
            self.s2o_batch = None
        elif reason := find_batch_obstacle(forward_batch) or self._find_batch_reason(forward_batch):
            self.s2o_batch = reason
        else:
            slots = self.req_to_token_pool.req_to_token
            try:
                self.s2o_batch = SglangBatch(forward_batch, slots, self._build_part, self.s2o_api.server)
            except Exception as error:  # nothing of S2O's ends a server
                self.s2o_batch = self.s2o_api.server.counters.count_fault(-1, error)

    def _find_batch_reason(self, forward_batch: Any) -> str | None:
        """Return the reason why the stock backend computes a batch as a whole, by its sizes and ranks, or None."""
        new, cached = forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu
        largest = Request(int(max(new, default=0)), int(max(map(add, new, cached), default=0)))
        served = self.s2o_api.server.fit
        if reason := served.batch_reason(largest):
            return reason
        if served.reads == "answers" and (reason := find_reader(forward_batch)):
            return reason
        return self.s2o_api.find_reason(forward_batch)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **named: Any,
    ) -> Any:
        """Compute one layer for rows of prompts, as SGLang's AttentionBackend does."""
        stock = super().forward_extend  # type: ignore[misc]
        pool, rows, heads, head_dim = self.token_to_kv_pool, q.shape[0], layer.tp_q_head_num, layer.qk_head_dim
        batch = self._find_batch(q, forward_batch, named)
        is_written = not save_kv_cache

        def read_pages() -> tuple[Tensor, Tensor]:
            if not is_written and k is not None and v is not None:
                self.s2o_api.write(layer, forward_batch, k, v)
            k_slots, v_slots = pool.get_kv_buffer(layer.layer_id)
            return k_slots[:, None], v_slots[:, None]

        def run_stock() -> Any:
            nonlocal is_written
            is_written = True
            return stock(q, k, v, layer, forward_batch, save_kv_cache, **named)

        def run_stock_slice(span: BatchSlice, out: Tensor) -> None:
            assert isinstance(batch, SglangBatch)
            keys, values = (None if tensor is None else tensor[span.rows] for tensor in (k, v))
            source, metadata = batch.get_part(span)
            announced, self.forward_metadata = self.forward_metadata, metadata
            try:
                answer = stock(q[span.rows], keys, values, layer, source, False, **named)
            finally:
                self.forward_metadata = announced
            out.copy_(answer.view(out.shape))

        def make_output() -> tuple[Tensor, Tensor]:
            out = q.new_empty(rows, heads * head_dim)
            return out, out.view(rows, heads, head_dim)

        served = self._find_layer(layer)
        query = q if isinstance(served, str) else q.view(rows, heads, head_dim)
        scoring = Scoring(layer.scaling, layer.logit_cap or None, named.get("sinks"))
        call = LayerCall(
            layer.layer_id, served, batch, query, scoring, rows, self.s2o_api.server.counters,
            read_pages, run_stock, run_stock_slice, make_output,
        )  # fmt: skip
        return attend(call)

    def _find_batch(self, q: Tensor, forward_batch: Any, named: dict[str, Any]) -> SglangBatch | str:
        """Return the batch of a call, or the reason why the stock backend computes the call as a whole."""
        batch = self.s2o_batch
        if isinstance(batch, str):
            return batch
        # a breakable CUDA graph calls with a batch of its own, which has the announced one's lists
        lengths = None if batch is None else batch.source.extend_seq_lens_cpu
        if batch is None or forward_batch.extend_seq_lens_cpu is not lengths or len(q) != batch.rows:
            return "the call's rows are not those of the announced batch"
        if getattr(self.forward_metadata, "image_token_ranges", None) is not None:
            return "rows of an image see one another"
        given = sorted({name for name, value in named.items() if value is not None and value is not False} - {"sinks"})
        return f"the layer is called with {', '.join(given)}" if given else batch

    def _find_layer(self, layer: Any) -> ServedLayer | str:
        """Return the profile's layer, or the reason why there is none."""
        index = layer.layer_id
        if index not in self.s2o_layers:
            api, skips = self.s2o_api, getattr(self, "fa_skip_kv_cache", False)  # FlashAttention's, for embeddings
            scales = (layer.k_scale, layer.v_scale) if api.kv_cache_dtype in fit.FP8_CACHES else ()
            obstacle = (
                api.obstacle
                or ("keys are not written into the cache" if skips else None)
                or find_attention_obstacle(layer)
                or fit.find_cache_obstacle(api.kv_cache_dtype, api.server.fit.made_for)
                or fit.find_scales_obstacle(*scales)
            )
            self.s2o_layers[index] = fit.log_obstacle(obstacle) or api.server.fit.find_layer(
                index, layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim
            )
        return self.s2o_layers[index]

    def _build_part(self, source: Any) -> tuple[Any, Any]:
        """Return the ForwardBatch of a slice, and the stock backend's metadata of it."""
        announced = self.forward_metadata
        super().init_forward_metadata(source)  # type: ignore[misc]
        metadata, self.forward_metadata = self.forward_metadata, announced
        return source, metadata


def find_attention_obstacle(layer: Any) -> str | None:
    """Return the reason why a layer never runs S2O, by its RadixAttention; None if it may."""
    window = layer.sliding_window_size
    obstacle = fit.find_layer_obstacle(
        sliding_window=window if window is not None and window > -1 else None,
        attn_type="cross" if layer.is_cross_attention else str(layer.attn_type.value),
    )
    if obstacle is not None:
        return obstacle
    if layer.qk_head_dim != layer.v_head_dim:
        return f"keys have {layer.qk_head_dim} numbers and values {layer.v_head_dim}"
    if layer.use_irope:
        return "the layer sees chunks of the context"
    return "the scores are scaled by their position" if layer.xai_temperature_len > 0 else None


def watch_prompts(batches: Any) -> None:
    """Remember how long the prompts of each batch of SGLang's class ForwardBatch are; the class is changed.

    SGLang's scheduler knows it on the host; its backends are told where a chunk ends, not where its prompt does.
    """
    create = batches.init_new

    def init_new(batch: Any, *arguments: Any, **named: Any) -> Any:
        forward_batch = create(batch, *arguments, **named)
        try:
            remember_prompts(forward_batch, [len(request.full_untruncated_fill_ids) for request in batch.reqs])
        except (AttributeError, TypeError) as error:
            message = (
                "S2O: this SGLang does not say how long prompts are (%r): chunks run the settings of the keys so far"
            )
            log_once(logging.WARNING, message, error)
        return forward_batch

    batches.init_new = init_new


def remember_prompts(batch: Any, lengths: list[int]) -> None:
    """Remember the tokens of the prompt of each request of a ForwardBatch, and of its copies."""
    if batch.extend_seq_lens_cpu is not None:  # else it decodes
        _prompt_lengths.append((batch.extend_seq_lens_cpu, lengths))


def get_prompt_lengths(batch: Any) -> list[int]:
    """Return what was remembered of a ForwardBatch; empty if nothing was."""
    return next((lengths for new, lengths in reversed(_prompt_lengths) if new is batch.extend_seq_lens_cpu), [])


def find_reader(source: Any) -> DenseReason | None:
    """Return why hidden states of more than last rows are read of a ForwardBatch; None if they are not."""
    if source.token_indices_to_pool is not None:
        return DenseReason.POOLING
    # a drafter captures them too, which costs it guesses, not answers
    drafts = source.spec_algorithm is not None and source.spec_algorithm.is_speculative()
    return DenseReason.HIDDEN_STATES if not drafts and source.capture_hidden_mode.is_full() else None


class SglangBatch(Batch):
    """A ForwardBatch of prompts, some of which S2O may compute.

    req_to_token: int32 [requests, N], the slots of the cache where each request's tokens are; build_part: makes the
    stock backend's data for the ForwardBatch of a slice.
    """

    def __init__(self, source: Any, req_to_token: Tensor, build_part: Callable[[Any], Any], server: Server) -> None:
        queries = [int(count) for count in source.extend_seq_lens_cpu]
        lengths = [int(prefix) + count for prefix, count in zip(source.extend_prefix_lens_cpu, queries, strict=True)]
        adapters: list[str | None] = getattr(source, "lora_ids", None) or [None] * len(queries)
        unread = queries  # rows of each request whose log-probabilities nothing reads
        if server.fit.reads == "answers" and source.return_logprob:
            unread = source.extend_logprob_start_lens_cpu
        own_reasons = [
            DenseReason.ADAPTER if adapter is not None else DenseReason.PROMPT_LOGPROBS if start < count - 1 else None
            for adapter, count, start in zip(adapters, queries, unread, strict=True)
        ]
        whole = get_prompt_lengths(source)
        left = list(map(sub, whole, lengths)) if len(whole) == len(lengths) else []
        starts = [0, *accumulate(queries)]
        split = SplitRequests.from_batch(starts, lengths, own_reasons, left, server.fit.count_last_rows)
        self._batch = batch = source if split.are_whole else split_batch(source, split)
        super().__init__(
            split, server.fit, server.max_keys, lambda span: build_part(slice_batch(batch, split.requests, span))
        )
        self.source, self._req_to_token = source, req_to_token
        self.names = source.rids or ()
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
