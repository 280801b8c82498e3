"""The surroundings of S2O's backend in SGLang, without SGLang: requests with a cache, and a stock backend.

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

from s2o_runtime.call import Scoring
from s2o_runtime.sglang.backend import SglangApi, mix_in, remember_prompts
from support.fake_server import Request, Requests, take
from support.vllm_plain import attend_densely, write_rows

NOWHERE = 1 << 28  # a slot that is not there: whoever reads a token behind a request's end, fails


class Mode(Enum):
    """SGLang's ForwardMode."""

    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4
    TARGET_VERIFY = 5

    def is_decode_or_idle(self) -> bool:
        return self in (Mode.DECODE, Mode.IDLE)


class Capture(Enum):
    """SGLang's CaptureHiddenMode."""

    NULL = 0
    LAST = 1
    FULL = 2

    def is_full(self) -> bool:
        return self is Capture.FULL


@dataclass
class ForwardBatch:
    """SGLang's ForwardBatch, as far as backends of text models read it."""

    forward_mode: Mode
    batch_size: int
    input_ids: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor
    out_cache_loc: Tensor
    seq_lens_sum: int
    seq_lens_cpu: Tensor
    positions: Tensor
    extend_num_tokens: int
    extend_seq_lens: Tensor
    extend_prefix_lens: Tensor
    extend_seq_lens_cpu: list[int] | None
    extend_prefix_lens_cpu: list[int] | None
    orig_seq_lens: Tensor | None = None
    lora_ids: list[str | None] | None = None
    rids: list[str] | None = None
    return_logprob: bool = False
    extend_logprob_start_lens_cpu: list[int] | None = None
    token_indices_to_pool: list[Tensor] | None = None
    spec_algorithm: Any = None
    capture_hidden_mode: Capture = Capture.NULL
    encoder_lens: Tensor | None = None
    mha_return_lse: bool | None = None
    _attn_output: Tensor | None = None


class Pool:
    """A KV cache of NaN, [slots, Hkv, D] for each layer, of which there is one here."""

    def __init__(self, *shape: int, **like: Any) -> None:
        self.k, self.v = (torch.full(shape, float("nan"), **like) for _ in range(2))

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        return self.k, self.v

    def write(self, batch: ForwardBatch, keys: Tensor, values: Tensor) -> None:
        write_rows(self.k, batch.out_cache_loc, keys)
        write_rows(self.v, batch.out_cache_loc, values)


class Stock:
    """A stock backend: dense, by what it made of the batch that was announced last."""

    def __init__(self, runner: Any) -> None:
        self.req_to_token_pool, self.token_to_kv_pool = runner.req_to_token_pool, runner.token_to_kv_pool
        self.forward_metadata: Any = None
        self.announced: list[ForwardBatch] = []
        self.stock_rows = 0

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        batch = forward_batch
        self.announced.append(batch)
        counts = batch.extend_seq_lens_cpu or [0]
        self.forward_metadata = SimpleNamespace(
            page_table=self.req_to_token_pool.req_to_token[batch.req_pool_indices],
            cache_seqlens=batch.seq_lens.int(),
            cu_seqlens_q=torch.tensor([0, *counts], device=batch.seq_lens.device).cumsum(0).int(),
            longest=(max(counts), int(batch.seq_lens_cpu.max())),
        )

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **named: Any,
    ) -> Tensor:
        self.stock_rows += len(q)
        assert len(q) == forward_batch.extend_num_tokens
        if save_kv_cache:
            self.token_to_kv_pool.write(forward_batch, k, v)
        metadata, pages = self.forward_metadata, self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        return attend_densely(
            q.unflatten(1, (layer.tp_q_head_num, layer.qk_head_dim)),
            *(slots[:, None] for slots in pages),
            metadata.cu_seqlens_q,
            metadata.cache_seqlens,
            metadata.page_table,
            *metadata.longest,
            Scoring(layer.scaling, layer.logit_cap or None, named.get("sinks")),
        ).reshape(len(q), -1)

    def forward_decode(self, *arguments: Any) -> str:
        return "decoded"


@dataclass
class FakeEngine(Requests):
    """SGLang's skin: slots of the cache, which are pages of one token, and the width of the table of requests."""

    adapters_by_sizes, uncounted_below = False, 0

    slots: int = 4096
    width: int = 2064
    obstacle: str | None = None
    reason: str | None = None
    writes: int = 0
    page_size: int = 1

    def __post_init__(self) -> None:
        name = self.kv_cache_dtype or "bfloat16"
        kv_cache_dtype, dtype = ("float8_e4m3fn", torch.float8_e4m3fn) if name == "fp8" else (name, self.dtype)
        self.pool = Pool(self.slots, *self.sizes[1:], dtype=dtype, device=self.device)
        self.table = torch.full((16, self.width), NOWHERE, dtype=torch.int32, device=self.device)
        runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=self.table), token_to_kv_pool=self.pool)

        def written(layer: Any, batch: ForwardBatch, keys: Tensor, values: Tensor) -> None:
            self.writes += 1
            self.pool.write(batch, keys, values)

        api = SglangApi(self.server, self.obstacle, kv_cache_dtype, lambda batch: self.reason, written)
        self.backend: Any = mix_in(Stock, api)(runner)
        self.free = torch.randperm(self.slots).tolist()
        self.rows: dict[int, int] = {}  # of the table, by the request's id

    def outputs(self, parts: list[tuple[Request, int]], layer: int = 0, padding: int = 0) -> Tensor:
        return self.feed(parts, Mode.MIXED, layer={"layer_id": layer})

    @property
    def last_batch(self) -> Any:
        return self.backend.s2o_batch

    @property
    def stock_rows(self) -> int:
        return self.backend.stock_rows

    def add_prompt(self, queries: Tensor, keys: Tensor, values: Tensor) -> Request:
        """A new prompt, with its slots."""
        request = super().add_prompt(queries, keys, values)
        row = self.rows[id(request)] = len(self.requests)
        self.table[row, : len(request)] = torch.tensor(request.pages, dtype=torch.int32)
        return request

    def layer(self, **changes: Any) -> Any:
        """SGLang's RadixAttention of the only layer."""
        heads, kv_heads, head_dim = self.sizes
        known = {
            "layer_id": 0,
            "tp_q_head_num": heads,
            "tp_k_head_num": kv_heads,
            "qk_head_dim": head_dim,
            "v_head_dim": head_dim,
            "scaling": head_dim**-0.5,
            "logit_cap": self.scoring.get("softcap", 0.0),
            "sliding_window_size": -1,
            "is_cross_attention": False,
            "attn_type": SimpleNamespace(value="decoder"),
            "use_irope": False,
            "xai_temperature_len": -1,
            "k_scale": None,
            "v_scale": None,
        }
        return SimpleNamespace(**{**known, **changes})

    def batch(self, parts: list[tuple[Request, int]], mode: Mode = Mode.EXTEND) -> ForwardBatch:
        """The batch of so many tokens of each request."""
        counts, starts, lengths, positions, slots = self.lay_out(parts)
        rows = [self.rows[id(request)] for request, _ in parts]
        indices, seq_lens, extend, prefixes = (
            torch.tensor(numbers).to(self.device) for numbers in (rows, lengths, counts, starts)
        )
        batch = ForwardBatch(
            mode,
            len(parts),
            positions,
            indices,
            seq_lens,
            slots,
            sum(lengths),
            torch.tensor(lengths),
            positions,
            sum(counts),
            extend,
            prefixes,
            counts,
            starts,
            lora_ids=[request.adapter for request, _ in parts],
            rids=[str(id(request)) for request, _ in parts],
            return_logprob=any(request.logprobs for request, _ in parts),
            extend_logprob_start_lens_cpu=[0 if request.logprobs else count for request, count in parts],
        )
        if self.ends:
            remember_prompts(batch, [len(request) for request, _ in parts])
        return copy.copy(batch)  # as SGLang's runner hands one on

    def feed(self, parts: list[tuple[Request, int]], mode: Mode = Mode.EXTEND, **call: Any) -> Tensor:
        """Feed so many tokens of each request; returns their outputs [T, Hq, D].

        call: fields of the batch, attributes of the layer in `layer`, and keywords of the call in `named`.
        """
        layer, named = self.layer(**call.pop("layer", {})), {"sinks": self.scoring.get("sinks")} | call.pop("named", {})
        batch = self.batch(parts, mode)
        vars(batch).update(call)
        query, key, value = take(parts)
        self.backend.init_forward_metadata(batch)
        heads, _, head_dim = self.sizes
        # as models split them off their projections: rows lie further apart than they are long
        wide = torch.cat([query.flatten(1), torch.full_like(query.flatten(1), float("nan"))], 1)
        out = self.backend.forward_extend(wide[:, : heads * head_dim], key, value, layer, batch, **named)
        return out.view(-1, heads, head_dim)
