"""Running a baseline: which blocks (`select`), their attention (`attend`), and both for a mix of heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from s2o_runtime.attention import KERNEL_TYPES, laid_out
from s2o_runtime.baselines import mean_pooling, minference, pbs, sparge, xattention
from s2o_runtime.baselines.reference import attend_reference
from s2o_runtime.baselines.selection import Selection, Tally, take
from s2o_runtime.baselines.settings import (
    PBS,
    Antidiagonal,
    AShape,
    Baseline,
    MeanPooling,
    Sparge,
    VerticalSlash,
)
from s2o_runtime.errors import ConfigError, InputError
from s2o_runtime.gpu import MIN_CAPABILITY, capability, interpreted, launching_on
from s2o_runtime.shapes import call_shape

Backend = Literal["auto", "triton", "reference"]
HEAD_DIM = 128  # the largest of the kernel
INTERPRETED = (9, 0)  # whose tiles the interpreter runs
CHOICES: dict[type[Baseline], Callable[..., Selection]] = {  # called with q, k, settings and scale and heads by name
    MeanPooling: mean_pooling.select,
    PBS: pbs.select,
    Sparge: sparge.select,
    AShape: minference.select_a_shape,
    VerticalSlash: minference.select_vertical_slash,
    Antidiagonal: xattention.select,
}


@dataclass(frozen=True)
class BaselineStats:
    """What one call did.

    backend, reason: which code ran, and why; heads: the query heads it computed;
    settings: of each; tallies: what each selection computes, for which entries of `heads`.
    """

    backend: str
    reason: str
    heads: tuple[int, ...]
    settings: tuple[Baseline, ...]
    tallies: tuple[tuple[tuple[int, ...], Tally], ...]

    @property
    def computed(self) -> Tensor:
        """Query-key pairs computed, float64 [n], on the device of the call."""
        device = self.tallies[0][1].counts.device if self.tallies else None
        found = torch.zeros(len(self.heads), dtype=torch.float64, device=device)
        for members, tally in self.tallies:
            found[list(members)] += tally.computed
        return found

    @property
    def causal(self) -> float:
        """All causal pairs of one head."""
        return sum(tally.causal for members, tally in self.tallies if 0 in members)

    @property
    def density(self) -> Tensor:
        """Query-key pairs computed over causal pairs, float64 [n]; 1.0 is dense."""
        return self.computed / max(self.causal, 1.0)


def baseline_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    settings: Baseline | Sequence[Baseline],
    *,
    scale: float | None = None,
    kv_start: Tensor | None = None,
    out: Tensor | None = None,
    heads: Sequence[int] | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, BaselineStats]:
    """Causal attention that computes the blocks a baseline selects.

    q: [B, Hq, Lq, D]; k, v: [B, Hkv, Lk, D] with Lq <= Lk; query i stands at position Lk - Lq + i.
    settings: for all heads, or one for each; heads with equal settings are selected and computed together.
    scale: multiplies the scores; default D ** -0.5.
    kv_start: integers [B], the first key of each sequence that counts. A left-padded sequence is run as the shorter
        one it is, by itself; the starts are read, which waits for the device.
    out: [B, Hq, Lq, D] to write into; heads: the query heads to compute, default all. Other heads of `out` are left
        as they are; without `out` they are zero.
    backend: "triton", "reference" (plain torch, any device), or "auto", which takes the kernel if it can.
    Returns the output and what was done. Raises InputError, ConfigError.

    >>> q, k, v = (torch.randn(1, heads, 512, 64) for heads in (4, 2, 2))
    >>> out, stats = baseline_attention(q, k, v, MeanPooling(keep=0.5))
    >>> stats.density.shape
    torch.Size([4])
    """
    shape = call_shape(q, k, v, kv_start)
    chosen = _checked_heads(heads, shape.query_heads)
    each = tuple(settings) if isinstance(settings, Sequence) else (settings,) * len(chosen)
    if len(each) != len(chosen):
        raise InputError(f"there are {len(each)} settings for {len(chosen)} heads: give one per head, or one for all")
    if out is None:
        everything = len(chosen) == shape.query_heads and kv_start is None
        out = torch.empty_like(q) if everything else torch.zeros_like(q)
    elif out.shape != q.shape or out.dtype != q.dtype or out.device != q.device:
        raise InputError(f"out is {out.dtype} {tuple(out.shape)} on {out.device}: it must be like q")
    ran, reason = choose_backend(q, k, v, backend)
    tallies: list[tuple[tuple[int, ...], Tally]] = []
    for part_q, part_k, part_v, part_out in _sequences(q, k, v, out, kv_start, chosen):
        for one in dict.fromkeys(each):
            members = tuple(i for i, other in enumerate(each) if other == one)
            selection = select(part_q, part_k, one, scale=scale, heads=[chosen[i] for i in members])
            attend(part_q, part_k, part_v, selection, scale=scale, out=part_out, backend=ran)
            tallies.append((members, selection.tally))
    return out, BaselineStats(ran, reason, chosen, each, tuple(tallies))


def select(
    q: Tensor, k: Tensor, settings: Baseline, *, scale: float | None = None, heads: Sequence[int] | None = None
) -> Selection:
    """The blocks that `settings` choose for some query heads, all if None.

    q: [B, Hq, Lq, D]; k: [B, Hkv, Lk, D].
    """
    shape = call_shape(q, k, k)
    chosen = _checked_heads(heads, shape.query_heads)
    scale = _checked_scale(scale, shape.head_dim)
    settings.validate()
    if type(settings) not in CHOICES:
        raise ConfigError(f"{settings!r:.60} is no baseline's settings: use one of s2o_runtime.baselines.BASELINES")
    with launching_on(q.device):
        return CHOICES[type(settings)](q, k, settings, scale=scale, heads=chosen)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    *,
    scale: float | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attention of the selection's heads over their blocks.

    out: [B, Hq, Lq, D] to write into, other heads are left as they are; without it they are zero.
    lse: float32 [B, Hq, Lq] to write the log-sum-exp of the computed scores into.
    """
    shape = call_shape(q, k, v)
    scale = _checked_scale(scale, shape.head_dim)
    if (shape.q_len, shape.kv_len) != (selection.grid.q_len, selection.grid.kv_len):
        raise InputError(
            f"the selection is for {selection.grid.q_len} queries and {selection.grid.kv_len} keys but there are "
            f"{shape.q_len} and {shape.kv_len}: select again"
        )
    if out is None:
        everything = len(selection.heads) == shape.query_heads
        out = torch.empty_like(q) if everything else torch.zeros_like(q)
    ran, _ = choose_backend(q, k, v, backend)
    if ran == "reference":
        attend_reference(q, k, v, selection, scale, out, lse)
        return out
    from s2o_runtime.kernels.block_sparse import HEAD_DIMS, block_sparse_attention

    head_dim = next(size for size in HEAD_DIMS if shape.head_dim <= size)
    keys = take(k, selection.kv_heads) if selection.keys is None else selection.keys
    values = take(v, selection.kv_heads)
    if selection.key_order is not None:
        values = pbs.permuted(values, selection.key_order)
    fits = shape.head_dim == head_dim and out.stride(3) == 1
    target = out if fits else q.new_empty(*q.shape[:3], head_dim)
    with launching_on(q.device):
        queries, keys, values = (laid_out(t, head_dim) for t in (q, keys, values))
        here = INTERPRETED if interpreted() else capability(q.device)
        block_sparse_attention(queries, keys, values, selection, scale, target, lse, here)
    if not fits:
        for head in selection.heads:
            out[:, head] = target[:, head, :, : shape.head_dim]
    return out


def choose_backend(q: Tensor, k: Tensor, v: Tensor, backend: Backend) -> tuple[Literal["triton", "reference"], str]:
    """The backend of a call, and why. Raises InputError if the one asked for cannot do it."""
    if backend not in get_args(Backend):
        raise InputError(f"backend {backend!r} is not known: use one of {get_args(Backend)}")
    if backend == "reference":
        return "reference", "asked for"
    obstacle = _obstacle(q, k, v)
    if backend == "triton":
        if obstacle:
            raise InputError(f'{obstacle}: run with backend="reference"')
        return "triton", "asked for"
    if q.device.type == "cpu":
        return "reference", "the tensors are on the cpu, the kernel needs a GPU"
    return ("triton", "the kernel supports this call") if obstacle is None else ("reference", obstacle)


def _obstacle(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the kernel cannot do a call, or None if it can."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return "the kernel has no backward pass and gradients are enabled"
    if q.shape[3] > HEAD_DIM:
        return f"head_dim {q.shape[3]} is not supported by the block-sparse kernel (up to {HEAD_DIM})"
    if interpreted():
        return None
    if q.device.type != "cuda":
        return f"the tensors are on {q.device.type}, the kernel needs a GPU"
    if q.dtype not in KERNEL_TYPES:
        return f"{q.dtype} is not supported by the kernel (bfloat16, float16)"
    from s2o_runtime.kernels.block_sparse import family

    here = capability(q.device)
    if here < MIN_CAPABILITY or family(here) is None:
        return f"compute capability {here[0]}.{here[1]} has no block-sparse kernel"
    return None


def _sequences(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, kv_start: Tensor | None, heads: tuple[int, ...]
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The call in parts without padding; rows of `out` that stand in the padding become zero."""
    if kv_start is None:
        return [(q, k, v, out)]
    offset = k.shape[2] - q.shape[2]
    found = []
    for b, start in enumerate(kv_start.tolist()):
        row = max(0, start - offset)
        one = slice(b, b + 1)
        for head in heads:
            out[b, head, :row] = 0
        if row < q.shape[2]:
            found.append((q[one, :, row:], k[one, :, start:], v[one, :, start:], out[one, :, row:]))
    return found


def _checked_heads(heads: Sequence[int] | None, query_heads: int) -> tuple[int, ...]:
    chosen = tuple(range(query_heads)) if heads is None else tuple(heads)
    if not chosen or len(set(chosen)) != len(chosen) or not all(0 <= head < query_heads for head in chosen):
        raise InputError(f"heads are {chosen}: expected different numbers from 0 to {query_heads - 1}, at least one")
    return chosen


def _checked_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return float(head_dim**-0.5)
    if not scale > 0:
        raise InputError(f"scale is {scale}: expected a positive number")
    return scale
