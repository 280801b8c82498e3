"""The attention op as torch sees it: one node of a compiled graph, with a fake implementation.

`torch.compile` cannot follow what picks a backend and launches kernels, and need not. While it traces,
`s2o_attention` and patched models call `torch.ops.s2o.attention`; in eager mode nothing goes through here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Run = Callable[..., Tensor]

_runs: list[Run] = []

_library = torch.library.Library("s2o", "DEF")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "attention(Tensor q, Tensor k, Tensor v, Tensor? where, int run, int number, float scale) -> Tensor"
)


def register(run: Run) -> int:
    """A number that stands for `run(q, k, v, where, number, scale)` in a graph; `run` is kept for good.

    where: what else the call needs as a tensor, such as kv_start, or None; number: what it needs as a number.
    """
    _runs.append(run)
    return len(_runs) - 1


def attention(q: Tensor, k: Tensor, v: Tensor, where: Tensor | None, run: int, number: int, scale: float) -> Tensor:
    """Call what is registered as `run`, through torch's dispatcher: [B, Hq, Lq, D], laid out [B, Lq, Hq, D]."""
    out: Tensor = torch.ops.s2o.attention(q, k, v, where, run, number, scale)
    return out


def _like_kernels(q: Tensor) -> Tensor:
    """An empty output in the layout the kernels write."""
    batch, heads, length, head_dim = q.shape
    return q.new_empty(batch, length, heads, head_dim).transpose(1, 2)


def _attention(q: Tensor, k: Tensor, v: Tensor, where: Tensor | None, run: int, number: int, scale: float) -> Tensor:
    with torch.no_grad():
        out = _runs[run](q, k, v, where, number, scale)
    laid_out = _like_kernels(q)
    return out if out.stride() == laid_out.stride() else laid_out.copy_(out)


def _fake(q: Tensor, k: Tensor, v: Tensor, where: Tensor | None, run: int, number: int, scale: float) -> Tensor:
    return _like_kernels(q)


_library.impl("attention", _attention, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("s2o::attention", _fake, lib=_library)
