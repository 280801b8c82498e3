"""The common part of both servers' fakes: a server with a profile, and random prompts that share a cache."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from s2o_runtime.monitor.counters import Counters
from s2o_runtime.serving.batch import BatchSlice
from s2o_runtime.serving.fit import Rank, RankProfile
from s2o_runtime.serving.server import ServerContext


class FakeServer:
    """A server with a profile, which reserves nothing. tested: whether its layers have passed their self-test."""

    def __init__(self, profile: Any, rank: Rank, device: Any, max_keys: int, tested: bool = True) -> None:
        self.fit, self.max_keys, self.counters = RankProfile(profile, rank, torch.device(device)), max_keys, Counters()
        for layer in self.fit.layers:
            layer.tested = tested
        self.reserved = 0

    def reserve(self, query: Tensor, scoring: Any) -> None:
        self.reserved += 1


def context(model_config: Any, **changes: Any) -> ServerContext:
    """Return where a vLLM on a CPU would serve a model of this configuration."""
    known = {
        "engine": "vLLM 0.32.0",
        "stock": "STOCK",
        "model_config": model_config,
        "checkpoint": None,
        "rank": Rank(),
        "device": torch.device("cpu"),
        "max_keys": 4096,
        "chunk": 512,
    }
    return ServerContext(**{**known, **changes})


@dataclass
class Request:
    """A prompt, and how much of it the cache holds. pages: of the cache; slots of one token in SGLang's.

    adapter: the name of its LoRA adapter; logprobs: whether the log-probabilities of its tokens are asked for;
    scoring: the layers' soft cap and sinks.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    pages: list[int]
    done: int = 0
    fed: int = 0  # at last
    adapter: str | None = None
    logprobs: bool = False
    scoring: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.keys)


class Layout(NamedTuple):
    """A batch: of each request its new tokens, those before, and all; of each row its position and its slot."""

    counts: list[int]
    starts: list[int]
    lengths: list[int]
    positions: Tensor
    slots: Tensor


@dataclass
class Requests:
    """Prompts of random queries, keys and values that share a cache, fed batch by batch to one layer.

    Each server's fake has its skin on top: the batch as the server describes it, and its call of a layer.
    """

    server: Any  # with the profile
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    kv_cache_dtype: str | None = None
    ends: bool = False  # whether prompts end with their tokens
    scoring: dict[str, Any] = field(default_factory=dict)  # the layers' soft cap and sinks
    requests: list[Request] = field(default_factory=list)

    page_size: ClassVar[int]
    last_batch: ClassVar[Any]
    stock_rows: ClassVar[int]  # that the stock backend computed

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Query heads and KV heads of this rank, and the head dim."""
        fit = self.server.fit
        return len(fit.heads), len(fit.kv_heads), fit.profile.geometry.head_dim

    def add(self, length: int) -> Request:
        """A new prompt of random numbers, with its pages, which lie anywhere."""
        heads, kv_heads, head_dim = self.sizes

        def normal(count: int) -> Tensor:
            return torch.randn(length, count, head_dim, device=self.device).to(self.dtype)

        return self.add_prompt(normal(heads) * 2, normal(kv_heads), normal(kv_heads))

    def add_prompt(self, queries: Tensor, keys: Tensor, values: Tensor) -> Request:
        """A new prompt of these queries [L, Hq, D], keys and values [L, Hkv, D], with its pages."""
        pages = [self.free.pop() for _ in range(-(-len(keys) // self.page_size))]
        self.requests.append(Request(keys, values, queries, pages, scoring=self.scoring))
        return self.requests[-1]

    def lay_out(self, parts: list[tuple[Request, int]]) -> Layout:
        """Return where the next so many tokens of each request are."""
        counts, starts = [count for _, count in parts], [request.done for request, _ in parts]
        lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        positions = [torch.arange(start, end) for start, end in zip(starts, lengths, strict=True)]
        size = self.page_size
        slots = [
            torch.tensor(request.pages)[tokens // size] * size + tokens % size
            for (request, _), tokens in zip(parts, positions, strict=True)
        ]
        return Layout(counts, starts, lengths, torch.cat(positions).to(self.device), torch.cat(slots).to(self.device))

    def outputs(self, parts: list[tuple[Request, int]], layer: int = 0, padding: int = 0) -> Tensor:
        """Feed so many tokens of each request; returns their outputs [T, Hq, D]."""
        raise NotImplementedError

    def slices(self) -> tuple[BatchSlice, ...]:
        """Those of the last batch in the first layer."""
        return self.last_batch.plan(self.server.fit.layers[0]).slices

    def counted(self) -> dict[tuple[str, str], int]:
        """Query rows by path and reason, up to its first comma, over all layers."""
        rows: Counter[tuple[str, str]] = Counter()
        for (_, path, reason), count in self.server.counters.rows.items():
            rows[path, reason.split(",")[0]] += count
        return dict(rows)


def take(parts: list[tuple[Request, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """The next so many rows of each request, [T, Hq, D] and twice [T, Hkv, D], which count as fed from now on."""
    new = [(request, slice(request.done, request.done + count)) for request, count in parts]
    query, key, value = (
        torch.cat([getattr(request, name)[tokens] for request, tokens in new]) for name in ("queries", "keys", "values")
    )
    for request, count in parts:
        request.done, request.fed = request.done + count, count
    return query, key, value
