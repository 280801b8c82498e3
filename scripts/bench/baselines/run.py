"""Running a baseline over a layer: its key blocks (`select`), attention over them (`attend`), and both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from s2o_runtime.call import validate_scale
from s2o_runtime.devices import find_tensor_obstacle, get_capability, is_interpreted, launch_on
from s2o_runtime.errors import InputError
from s2o_runtime.sequences import call_shape, lay_out, needs_gradients
from s2o_runtime.tiles import MIN_CAPABILITY, get_family
from scripts.bench.baselines import flash_prefill, flex_prefill, pbs, sparge, xattention
from scripts.bench.baselines.pooling import block_means
from scripts.bench.baselines.reference import attend_reference
from scripts.bench.baselines.selection import Grid, Selection
from scripts.bench.baselines.settings import (
    PBS,
    Antidiagonal,
    Baseline,
    FlashPrefill,
    FlashPrefillV2,
    FlexPrefill,
    Sparge,
)
from scripts.bench.baselines.tiles import BLOCK_SPARSE_HEAD_DIMS

Backend = Literal["auto", "triton", "reference"]
HEAD_DIM = BLOCK_SPARSE_HEAD_DIMS[-1]  # the largest of the kernel
SELECTORS: dict[type, Callable[..., Selection]] = {  # called with q, k and the settings; scale by name
    FlashPrefill: flash_prefill.select,
    FlashPrefillV2: flash_prefill.select,
    FlexPrefill: flex_prefill.select,
    PBS: pbs.select,
    Sparge: sparge.select,
    Antidiagonal: xattention.select,
}


class BaselineStats(NamedTuple):
    """The statistics of one call.

    Attributes:
        grid: where the blocks lie.
        counts: int32 [B, Hq / packed, row blocks], the key blocks that each row block computed.
    """

    grid: Grid
    counts: Tensor

    @property
    def density(self) -> Tensor:
        """Query-key pairs computed over causal pairs, float64 [Hq]; 1.0 is dense. Of the diagonal causal pairs count.

        What means stand for does not count. Heads that share row blocks have the mean of theirs.
        """
        grid, device = self.grid, self.counts.device
        full = grid.full(device)
        chosen = (self.counts - (grid.visible(device) - full)) * grid.block_n
        unlisted = full * grid.block_n - chosen  # of the keys that all rows of a block see
        causal = len(self.counts) * (grid.kv_len * (grid.kv_len + 1) - grid.offset * (grid.offset + 1)) / 2
        left_out = (unlisted * grid.rows_of(device)).double().sum((0, 2)) / grid.packed
        return (causal - left_out.repeat_interleave(grid.packed)) / causal


def baseline_attention(
    q: Tensor, k: Tensor, v: Tensor, settings: Baseline, *, scale: float | None = None, backend: Backend = "auto"
) -> tuple[Tensor, BaselineStats]:
    """Causal attention of a layer over the key blocks that a baseline selects.

    Query i stands at position Lk - Lq + i, and query head h reads KV head h // (Hq / Hkv).

    Args:
        q: [B, Hq, Lq, D], any floating type.
        k, v: [B, Hkv, Lk, D] in the type and on the device of q; Lq <= Lk, and Hkv divides Hq.
        settings: of the baseline.
        scale: multiplies the scores; positive, D ** -0.5 by default.
        backend: "triton", "reference" (plain torch, any device), or "auto", which takes the kernel if it can.

    Returns:
        The output [B, Hq, Lq, D] in the type of q, and what was done.

    Raises:
        InputError: the tensors do not fit one another, or the kernel that is asked for cannot do the call.
        ConfigError: the settings are out of their range.

    >>> q, k, v = (torch.randn(1, heads, 512, 64) for heads in (4, 2, 2))
    >>> out, stats = baseline_attention(q, k, v, PBS(keep=0.5))
    >>> stats.density.shape
    torch.Size([4])
    """
    selection = select(q, k, settings, scale=scale)
    out = attend(q, k, v, selection, scale=scale, backend=backend)
    return out, BaselineStats(selection.grid, selection.counts)


def select(q: Tensor, k: Tensor, settings: Baseline, *, scale: float | None = None) -> Selection:
    """The key blocks that a baseline chooses for a layer.

    Args:
        q: [B, Hq, Lq, D], any floating type.
        k: [B, Hkv, Lk, D] in the type and on the device of q.
        settings: of the baseline.
        scale: multiplies the scores; positive, D ** -0.5 by default.

    Raises:
        InputError: the tensors do not fit one another.
        ConfigError: the settings are out of their range.
    """
    scale = validate_scale(scale, call_shape(q, k, k).head_dim)
    settings.validate()
    with launch_on(q.device):
        return SELECTORS[type(settings)](q, k, settings, scale=scale)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    *,
    scale: float | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attention of a layer over the keys selected for it.

    Args:
        q: [B, Hq, Lq, D]; k, v: [B, Hkv, Lk, D]; as for `select`.
        scale: multiplies the scores; positive, D ** -0.5 by default.
        backend: as for `baseline_attention`.

    Returns:
        The output [B, Hq, Lq, D] in the type of q.

    Raises:
        InputError: the tensors do not fit one another or the selection, or the kernel that is asked for cannot do the
            call.
    """
    shape = call_shape(q, k, v)
    if shape.value_dim != shape.head_dim:
        raise InputError(f"v has head_dim {shape.value_dim} but k {shape.head_dim}: baselines need one for both")
    scale = validate_scale(scale, shape.head_dim)
    if (shape.q_len, shape.kv_len) != (selection.grid.q_len, selection.grid.kv_len):
        raise InputError(
            f"the selection is for {selection.grid.q_len} queries and {selection.grid.kv_len} keys but there are "
            f"{shape.q_len} and {shape.kv_len}: select again"
        )
    out, obstacle = torch.empty_like(q), _kernel_obstacle(q, k, v)
    if backend == "triton" and obstacle:
        raise InputError(f'{obstacle}: run with backend="reference"')
    if backend == "reference" or obstacle or (backend == "auto" and q.device.type == "cpu"):
        attend_reference(q, k, v, selection, scale=scale, out=out)
        return out
    from scripts.bench.baselines.kernels.block_sparse import block_sparse_attention

    head_dim = next(size for size in BLOCK_SPARSE_HEAD_DIMS if shape.head_dim <= size)
    keys = k if selection.keys is None else selection.keys
    values = v if selection.key_order is None else pbs.permuted(v, selection.key_order)
    fits = shape.head_dim == head_dim and out.stride(3) == 1
    target = out if fits else q.new_empty(*q.shape[:3], head_dim)
    with launch_on(q.device):
        queries, keys, values = (lay_out(tensor, head_dim) for tensor in (q, keys, values))
        means = None
        if selection.mean_keys is not None:
            mean_values = block_means(v, selection.grid.block_n).to(v.dtype)
            mean_keys, mean_values = (lay_out(x, head_dim).contiguous() for x in (selection.mean_keys, mean_values))
            means = mean_keys, mean_values
        block_sparse_attention(queries, keys, values, means, selection, scale, target)
    return out if fits else target[..., : shape.head_dim]


def _kernel_obstacle(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return why the kernel cannot do a call, or None if it can."""
    if needs_gradients(q, k, v):
        return "the kernel has no backward pass and gradients are enabled"
    if q.shape[3] > HEAD_DIM:
        return f"head_dim {q.shape[3]} is not supported by the block-sparse kernel (up to {HEAD_DIM})"
    if is_interpreted():
        return None
    if obstacle := find_tensor_obstacle(q):
        return obstacle
    here = get_capability(q.device)
    if here < MIN_CAPABILITY or get_family(here) is None:
        return f"compute capability {here[0]}.{here[1]} has no block-sparse kernel"
    return None
