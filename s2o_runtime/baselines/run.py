"""Running a baseline: its key blocks (`select`), attention over them (`attend`), and both for heads that differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from s2o_runtime.baselines import flash_prefill, minference, pbs, prism, skip_softmax, sparge, xattention
from s2o_runtime.baselines.reference import attend_reference
from s2o_runtime.baselines.selection import Selection, Tally, take
from s2o_runtime.baselines.settings import (
    PBS,
    Antidiagonal,
    AShape,
    FlashPrefill,
    Prism,
    SkipSoftmax,
    Sparge,
    VerticalSlash,
)
from s2o_runtime.config import BaselineSettings
from s2o_runtime.devices import capability, interpreted, launching_on
from s2o_runtime.errors import ConfigError, InputError
from s2o_runtime.scoring import checked_scale
from s2o_runtime.shapes import KERNEL_TYPES, CallShape, call_shape, laid_out, needs_gradients
from s2o_runtime.tiles import BLOCK_SPARSE_HEAD_DIMS, MIN_CAPABILITY, family

Backend = Literal["auto", "triton", "reference"]
HEAD_DIM = 128  # the largest of the kernel
INTERPRETED = (9, 0)  # the compute capability whose tiles the interpreter runs
SELECTORS: dict[type, Callable[..., Selection]] = {  # called with q, k and the settings; scale and heads by name
    FlashPrefill: flash_prefill.select,
    Prism: prism.select,
    PBS: pbs.select,
    Sparge: sparge.select,
    AShape: minference.select_a_shape,
    VerticalSlash: minference.select_vertical_slash,
    Antidiagonal: xattention.select,
    SkipSoftmax: skip_softmax.select,
}


@dataclass(frozen=True)
class BaselineStats:
    """What one call did.

    Attributes:
        backend: the code that ran: "triton" or "reference".
        reason: why this backend was chosen.
        heads: the n query heads that were computed.
        settings: the settings of each of them.
        tallies: for each selection the indices into `heads` that it is of, and how many keys it computes.
    """

    backend: str
    reason: str
    heads: tuple[int, ...]
    settings: tuple[BaselineSettings, ...]
    tallies: tuple[tuple[tuple[int, ...], Tally], ...]

    @property
    def computed(self) -> Tensor:
        """Query-key pairs computed, float64 [n], on the device of the call; half where only the score was."""
        device = self.tallies[0][1].counts.device if self.tallies else None
        pairs = torch.zeros(len(self.heads), dtype=torch.float64, device=device)
        for members, tally in self.tallies:
            pairs[list(members)] += tally.computed
        return pairs

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
    settings: BaselineSettings | Sequence[BaselineSettings],
    *,
    scale: float | None = None,
    kv_start: Tensor | None = None,
    out: Tensor | None = None,
    heads: Sequence[int] | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, BaselineStats]:
    """Causal attention over the key blocks that baselines select.

    Query i stands at position Lk - Lq + i, and query head h reads KV head h // (Hq / Hkv).

    Args:
        q: [B, Hq, Lq, D], any floating type.
        k, v: [B, Hkv, Lk, D] in the type and on the device of q; Lq <= Lk, and Hkv divides Hq.
        settings: one for all heads, or one for each; heads with equal settings are selected and computed together.
        scale: multiplies the scores; positive, D ** -0.5 by default.
        kv_start: int32 or int64 [B], the first key of each sequence that counts. A left-padded sequence is run by
            itself as the shorter one that it is; reading the starts waits for the device.
        out: [B, Hq, Lq, D] to write into. Heads that are not computed keep what they hold; without `out` they are zero.
        heads: the query heads to compute, all by default.
        backend: "triton", "reference" (plain torch, any device), or "auto", which takes the kernel if it can.

    Returns:
        The output [B, Hq, Lq, D] in the type of q, and what was done.

    Raises:
        InputError: the tensors, heads or settings do not fit one another, or the backend cannot do the call.
        ConfigError: settings are out of their range.

    >>> q, k, v = (torch.randn(1, heads, 512, 64) for heads in (4, 2, 2))
    >>> out, stats = baseline_attention(q, k, v, PBS(keep=0.5))
    >>> stats.density.shape
    torch.Size([4])
    """
    shape = _checked_shape(q, k, v, kv_start)
    heads = _checked_heads(heads, shape.query_heads)
    per_head = tuple(settings) if isinstance(settings, Sequence) else (settings,) * len(heads)
    if len(per_head) != len(heads):
        raise InputError(f"there are {len(per_head)} settings for {len(heads)} heads: give one per head or one for all")
    if out is None:
        complete = len(heads) == shape.query_heads and kv_start is None
        out = torch.empty_like(q) if complete else torch.zeros_like(q)
    elif out.shape != q.shape or out.dtype != q.dtype or out.device != q.device:
        raise InputError(f"out is {out.dtype} {tuple(out.shape)} on {out.device}: it must be like q")
    used_backend, reason = choose_backend(q, k, v, backend)
    tallies: list[tuple[tuple[int, ...], Tally]] = []
    for part_q, part_k, part_v, part_out in _without_padding(q, k, v, out, kv_start, heads):
        for distinct in dict.fromkeys(per_head):
            members = tuple(index for index, of_head in enumerate(per_head) if of_head == distinct)
            selection = select(part_q, part_k, distinct, scale=scale, heads=[heads[index] for index in members])
            left_out = None
            if selection.skip is not None:
                left_out = torch.zeros(len(members), dtype=torch.float64, device=q.device)
            attend(
                part_q, part_k, part_v, selection,
                scale=scale, out=part_out, left_out=left_out, backend=used_backend,
            )  # fmt: skip
            tallies.append((members, selection.tally._replace(left_out=left_out)))
    return out, BaselineStats(used_backend, reason, heads, per_head, tuple(tallies))


def select(
    q: Tensor, k: Tensor, settings: BaselineSettings, *, scale: float | None = None, heads: Sequence[int] | None = None
) -> Selection:
    """The key blocks that a baseline chooses.

    Args:
        q: [B, Hq, Lq, D], any floating type.
        k: [B, Hkv, Lk, D] in the type and on the device of q.
        scale: multiplies the scores; positive, D ** -0.5 by default.
        heads: the query heads to choose for, all by default.

    Raises:
        InputError: the tensors or heads do not fit one another.
        ConfigError: the settings are out of their range, or none of a baseline's.
    """
    shape = call_shape(q, k, k)
    heads = _checked_heads(heads, shape.query_heads)
    scale = checked_scale(scale, shape.head_dim)
    settings.validate()
    if type(settings) not in SELECTORS:
        raise ConfigError(f"{settings!r:.60} is no baseline's settings: use one of s2o_runtime.baselines.BASELINES")
    with launching_on(q.device):
        return SELECTORS[type(settings)](q, k, settings, scale=scale, heads=heads)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    *,
    scale: float | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    left_out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attention of the selection's heads over the keys selected for them.

    Args:
        q: [B, Hq, Lq, D]; k, v: [B, Hkv, Lk, D]; as for `select`.
        scale: multiplies the scores; positive, D ** -0.5 by default.
        out: [B, Hq, Lq, D] to write into. Other heads keep what they hold; without `out` they are zero.
        lse: float32 [B, Hq, Lq] to write the log-sum-exp of the computed scores into; of those in the denominator,
            if a skip leaves some out of it.
        left_out: float64 [n] to write into, for each of the selection's heads the pairs of blocks seen by whole row
            blocks that its skip left out of the product with v; 0 without a skip.
        backend: as for `baseline_attention`.

    Returns:
        The output [B, Hq, Lq, D] in the type of q.

    Raises:
        InputError: the tensors do not fit one another or the selection, or the backend cannot do the call.
    """
    shape = _checked_shape(q, k, v)
    scale = checked_scale(scale, shape.head_dim)
    if (shape.q_len, shape.kv_len) != (selection.grid.q_len, selection.grid.kv_len):
        raise InputError(
            f"the selection is for {selection.grid.q_len} queries and {selection.grid.kv_len} keys but there are "
            f"{shape.q_len} and {shape.kv_len}: select again"
        )
    if out is None:
        complete = len(selection.heads) == shape.query_heads
        out = torch.empty_like(q) if complete else torch.zeros_like(q)
    if choose_backend(q, k, v, backend)[0] == "reference":
        attend_reference(q, k, v, selection, scale=scale, out=out, lse=lse, left_out=left_out)
        return out
    from s2o_runtime.baselines.kernels.block_sparse import block_sparse_attention

    head_dim = next(size for size in BLOCK_SPARSE_HEAD_DIMS if shape.head_dim <= size)
    keys = take(k, selection.kv_heads) if selection.keys is None else selection.keys
    values = take(v, selection.kv_heads)
    if selection.key_order is not None:
        values = pbs.permuted(values, selection.key_order)
    fits = shape.head_dim == head_dim and out.stride(3) == 1
    target = out if fits else q.new_empty(*q.shape[:3], head_dim)
    with launching_on(q.device):
        queries, keys, values = (laid_out(tensor, head_dim) for tensor in (q, keys, values))
        here = INTERPRETED if interpreted() else capability(q.device)
        block_sparse_attention(queries, keys, values, selection, scale, target, lse, left_out, here)
    if not fits:
        for head in selection.heads:
            out[:, head] = target[:, head, :, : shape.head_dim]
    return out


def choose_backend(q: Tensor, k: Tensor, v: Tensor, backend: Backend) -> tuple[Literal["triton", "reference"], str]:
    """The backend of a call, and why.

    Raises:
        InputError: the backend is not known or cannot do the call.
    """
    if backend not in get_args(Backend):
        raise InputError(f"backend {backend!r} is not known: use one of {get_args(Backend)}")
    if backend == "reference":
        return "reference", "asked for"
    obstacle = _kernel_obstacle(q, k, v)
    if backend == "triton":
        if obstacle:
            raise InputError(f'{obstacle}: run with backend="reference"')
        return "triton", "asked for"
    if q.device.type == "cpu":
        return "reference", "the tensors are on the cpu, the kernel needs a GPU"
    return ("triton", "the kernel supports this call") if obstacle is None else ("reference", obstacle)


def _kernel_obstacle(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the kernel cannot do a call, or None if it can."""
    if needs_gradients(q, k, v):
        return "the kernel has no backward pass and gradients are enabled"
    if q.shape[3] > HEAD_DIM:
        return f"head_dim {q.shape[3]} is not supported by the block-sparse kernel (up to {HEAD_DIM})"
    if interpreted():
        return None
    if q.device.type != "cuda":
        return f"the tensors are on {q.device.type}, the kernel needs a GPU"
    if q.dtype not in KERNEL_TYPES:
        return f"{q.dtype} is not supported by the kernel (bfloat16, float16)"
    here = capability(q.device)
    if here < MIN_CAPABILITY or family(here) is None:
        return f"compute capability {here[0]}.{here[1]} has no block-sparse kernel"
    return None


def _without_padding(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, kv_start: Tensor | None, heads: tuple[int, ...]
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The call in parts without padding; rows of `out` that stand in the padding become zero."""
    if kv_start is None:
        yield q, k, v, out
        return
    offset = k.shape[2] - q.shape[2]
    for b, start in enumerate(kv_start.tolist()):
        row = max(0, start - offset)
        sequence = slice(b, b + 1)
        for head in heads:
            out[b, head, :row] = 0
        if row < q.shape[2]:
            yield q[sequence, :, row:], k[sequence, :, start:], v[sequence, :, start:], out[sequence, :, row:]


def _checked_shape(q: Tensor, k: Tensor, v: Tensor, kv_start: Tensor | None = None) -> CallShape:
    """The sizes of a call. Raises InputError: the tensors do not fit one another, or v has a head dim of its own."""
    shape = call_shape(q, k, v, kv_start)
    if shape.value_dim != shape.head_dim:
        raise InputError(f"v has head_dim {shape.value_dim} but k {shape.head_dim}: baselines need one for both")
    return shape


def _checked_heads(heads: Sequence[int] | None, query_heads: int) -> tuple[int, ...]:
    """The query heads to compute. Raises InputError."""
    checked = tuple(range(query_heads)) if heads is None else tuple(heads)
    if not checked or len(set(checked)) != len(checked) or not all(0 <= head < query_heads for head in checked):
        raise InputError(f"heads are {checked}: expected different numbers from 0 to {query_heads - 1}, at least one")
    return checked
