"""Attention as torch.compile sees it: two ops, each one node of a graph, each with a fake implementation.

While torch.compile traces, it cannot follow the choice of a backend and the launches of kernels. Eager calls do not go
through these ops. A node holds what it needs besides tensors as text and numbers, because graphs are cached.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from ..config import HeadConfig, LayerConfig, StopRule, TileConfig

Op = Literal["attention", "layer_attention"]
_OPS = {
    "attention": "(Tensor q, Tensor k, Tensor v, Tensor? kv_start, Tensor? sinks, str config, str backend, "
    "float scale, float? softcap) -> Tensor",
    "layer_attention": "(Tensor q, Tensor k, Tensor v, Tensor mask, Tensor? sinks, str layer, "
    "float scale, float? softcap) -> Tensor",
}
# the package's own, because a process may hold it under two names: as installed, and as a kernel of the Hub
NAMESPACE = __name__.partition(".")[0]
_library = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]


def call_node(op: Op, *arguments: object) -> Tensor:
    """Call an op, which is one node of a graph: its arguments in the order of its schema, its output [B, Hq, Lq, Dv].

    The output is laid out [B, Lq, Hq, Dv]. `scale` is filled in; `config` is as `LayerConfig.as_text` writes it; `mask`
    is what `huggingface.hf.prefill_mask` makes; `layer` is the key of the layer's state.
    """
    out: Tensor = getattr(getattr(torch.ops, NAMESPACE), op)(*arguments)
    return out


def register_node(op: Op, run: Callable[..., Tensor]) -> None:
    """Make `run` what the op does: it gets the op's arguments in their order and returns [B, Hq, Lq, Dv]."""

    def implementation(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Tensor:
        with torch.no_grad():
            out = run(q, k, v, *arguments)
        as_kernels = _make_empty_output(q, k, v)
        return out if out.stride() == as_kernels.stride() else as_kernels.copy_(out)

    _library.impl(op, implementation, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


def _make_empty_output(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    """Make an empty output in the layout that the kernels write; the fake implementation of both ops."""
    batch, heads, length = q.shape[:3]
    return q.new_empty(batch, length, heads, v.shape[3]).transpose(1, 2)


for _op, _schema in _OPS.items():
    _library.define(_op + _schema)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{_op}", _make_empty_output, lib=_library)


@lru_cache(maxsize=1024)
def read_config(text: str) -> LayerConfig:
    """Read the config that `LayerConfig.as_text` wrote. Raises ConfigError if it is illegal."""
    fields = json.loads(text)
    distinct = [HeadConfig(**head | {"stop_rule": StopRule(head["stop_rule"])}) for head in fields["heads"]]
    heads = tuple(distinct[index] for index in fields["head"])
    tile = TileConfig(**fields["tile"])
    return LayerConfig(heads, tile, fields["lookback"], fields["last_rows"]).validate()
