"""What fakes of both servers have: a server with a profile, and random prompts that share a cache."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from s2o_runtime.monitor.counters import Counters
from s2o_runtime.serving.fit import ProfileFit, Rank
from s2o_runtime.serving.server import ServerContext


class FakeServer:
    """A server with a profile, which reserves nothing. tested: whether its layers have passed their self-test."""

    def __init__(self, profile: Any, rank: Rank, device: Any, max_keys: int, tested: bool = True) -> None:
        self.fit, self.max_keys, self.counters = ProfileFit(profile, rank, torch.device(device)), max_keys, Counters()
        for layer in self.fit.layers:
            layer.tested = tested
        self.reserved = 0

    def reserve(self, query: Tensor) -> None:
        self.reserved += 1


def context(model_config: Any, **changes: Any) -> ServerContext:
    """Where a vLLM on a CPU would serve a model of this configuration."""
    known = {
        "engine": "vLLM 0.32.0", "stock": "STOCK", "model_config": model_config, "checkpoint": None, "rank": Rank(),
        "device": torch.device("cpu"), "max_keys": 4096,
    }  # fmt: skip
    return ServerContext(**{**known, **changes})


@dataclass
class Request:
    """A prompt, and how much of it the cache holds. pages: of the cache; slots of one token in SGLang's.

    adapter: the name of its LoRA adapter.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    pages: list[int]
    done: int = 0
    fed: int = 0  # at last
    adapter: str | None = None

    def __len__(self) -> int:
        return len(self.keys)


class Requests:
    """Prompts of random queries, keys and values, fed batch by batch to one layer."""

    server: Any
    dtype: torch.dtype
    device: str
    page_size: int
    requests: list[Request]
    free: list[int]

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
        self.requests.append(Request(keys, values, queries, pages))
        return self.requests[-1]

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
