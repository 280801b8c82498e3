"""The attention op as torch sees it: one node of a compiled graph, with a fake implementation.

`torch.compile` cannot follow what picks a backend and launches kernels, and need not. While it traces,
`s2o_attention` and patched models call `torch.ops.s2o.attention`; in eager mode nothing goes through here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Run = Callable[..., Tensor]

_runs: list[Run] = []
_handles: dict[Any, int] = {}

_library = torch.library.Library("s2o", "DEF")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "attention(Tensor q, Tensor k, Tensor v, Tensor? where, int handle, float scale) -> Tensor"
)


Function = TypeVar("Function", bound=Callable[..., Any])


def constant_when_traced(function: Function) -> Function:
    """`torch.compiler.assume_constant_result`, without the second that importing torch._dynamo takes."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def register(key: Any, run: Run) -> int:
    """A number that stands for `run(q, k, v, where, scale)` in a graph; the same for equal keys.

    where: what else the call needs as a tensor, such as kv_start, or None.
    """
    if key not in _handles:
        _handles[key] = len(_runs)
        _runs.append(run)
    return _handles[key]


def attention(q: Tensor, k: Tensor, v: Tensor, where: Tensor | None, handle: int, scale: float) -> Tensor:
    """Call what is registered under `handle`, through torch's dispatcher: [B, Hq, Lq, D], laid out [B, Lq, Hq, D]."""
    out: Tensor = torch.ops.s2o.attention(q, k, v, where, handle, scale)
    return out


def _like_kernels(q: Tensor) -> Tensor:
    """An empty output in the layout the kernels write."""
    batch, heads, length, head_dim = q.shape
    return q.new_empty(batch, length, heads, head_dim).transpose(1, 2)


def _attention(q: Tensor, k: Tensor, v: Tensor, where: Tensor | None, handle: int, scale: float) -> Tensor:
    with torch.no_grad():
        out = _runs[handle](q, k, v, where, scale)
    laid_out = _like_kernels(q)
    if out.stride() == laid_out.stride() and out.data_ptr() not in (q.data_ptr(), v.data_ptr()):
        return out
    return laid_out.copy_(out)


def _fake(q: Tensor, k: Tensor, v: Tensor, where: Tensor | None, handle: int, scale: float) -> Tensor:
    return _like_kernels(q)


_library.impl("attention", _attention, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("s2o::attention", _fake, lib=_library)
