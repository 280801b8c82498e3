"""Compile the kernels of a config before the first request needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import torch

from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.config import LayerConfig

if TYPE_CHECKING:
    from typing_extensions import Unpack

# segments in a call, one number for each form of the ranking kernels (`scores.segments_at_once`, `tail.tail_segments`)
SEGMENTS = (2, 20, 64)
THREADS = 8  # that compile: about a tenth of the work is Python's own, and no two threads run Python at once
SPLIT_CALL = (16, 8192)  # queries and keys of a call whose dense heads are split over keys (kernels/shares.py)


class Features(TypedDict, total=False):
    """What only some calls have.

    padded: compile for left-padded batches (`kv_start`) as well; softcap: of their scores, None for none; sinks: the
    type of their learned sinks, None for none; value_dim: the head dimension of their values, None for that of keys.
    """

    padded: bool
    softcap: float | None
    sinks: torch.dtype | None
    value_dim: int | None


def warmup(
    config: LayerConfig,
    *,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    **features: Unpack[Features],
) -> None:
    """Run small prefills, so that no later call with this config's tile compiles anything.

    The tensors are laid out as transformers hands them over. Later calls may have any length, tau and segment; another
    tile, head layout, type or soft cap compiles again. A config without S2O heads compiles nothing. Returns when the
    device is done.

    Args:
        config: the config of the calls to come.
        kv_heads: their KV heads.
        head_dim: their head dimension.
        dtype: the type of their q, k and v.
        device: the GPU.
        features: what few models have, as in `Features`.

    Raises:
        InputError: the kernels cannot run such calls here.
        ConfigError: the config is illegal.

    >>> warmup(LayerConfig.uniform(8, mode="dense"), kv_heads=2, head_dim=64)  # no S2O head, nothing to compile
    """
    segments = [head.segment for head in config.validate().heads if head.mode == "s2o"]
    if not segments:
        return
    sinks = features.get("sinks")
    sink_values = None if sinks is None else torch.zeros(config.num_heads, dtype=sinks, device=device)
    calls = [(count * min(segments),) * 2 for count in SEGMENTS]
    for queries, keys in calls + split_calls(config):
        q, k, v = (
            torch.zeros(1, length, heads, dim, dtype=dtype, device=device).transpose(1, 2)
            for length, heads, dim in (
                (queries, config.num_heads, head_dim),
                (keys, kv_heads, head_dim),
                (keys, kv_heads, features.get("value_dim") or head_dim),
            )
        )
        for kv_start in (None, torch.zeros(1, dtype=torch.int64, device=device))[: 1 + features.get("padded", False)]:
            s2o_attention(
                q, k, v, config,
                kv_start=kv_start, softcap=features.get("softcap"), sinks=sink_values, backend="triton",
            )  # fmt: skip
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def split_calls(config: LayerConfig) -> list[tuple[int, int]]:
    """The queries and keys of a call that compiles the kernel of split dense heads; none if a layer never needs it."""
    return [SPLIT_CALL] if {"dense", "s2o"} <= {head.mode for head in config.heads} else []
