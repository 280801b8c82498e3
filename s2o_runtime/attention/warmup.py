"""Compile the kernels of a config before the first request needs them."""

from __future__ import annotations

import torch

from ..config import LayerConfig
from ..errors import InputError, get_first_line
from ..sequences import check_config
from .api import refuse, s2o_attention

SEGMENTS = 1, 4, 16, 64  # in a call, for each form of the scores' and the tail's kernels
THREADS = 8  # that compile: about a tenth of the work is Python's own, and no two threads run Python at once
SPLIT_CALL = (16, 8192)  # queries and keys of a call whose keys are split (kernels/splits.py)


def warmup(
    config: LayerConfig,
    *,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    padded: bool = False,
    softcap: float | None = None,
    sinks: torch.dtype | None = None,
    value_dim: int | None = None,
    **unknown: object,
) -> None:
    """Run small prefills, so that no later call with this config's tile compiles anything.

    The tensors are laid out as transformers hands them over. Later calls may have any length, tau and segment; another
    tile, head layout, type or soft cap compiles again. A config without S2O heads compiles nothing. Returns when the
    device is done.

    Args:
        config, kv_heads, head_dim, dtype, softcap: of the calls to come.
        device: the GPU.
        padded: compile for left-padded batches (`kv_start`) as well.
        sinks: the type of their learned sinks, None for none.
        value_dim: the head dimension of their values, None for that of keys.

    Raises:
        InputError: the kernels cannot run such calls here, or there is no such device.
        ConfigError: the config is illegal.

    >>> warmup(LayerConfig.uniform(8, mode="dense"), kv_heads=2, head_dim=64)  # no S2O head, nothing to compile
    """
    refuse(list(unknown), "warmup")
    segments = [head.segment for head in check_config(config).heads if head.mode == "s2o"]
    if not segments:
        return
    try:
        torch.zeros(kv_heads, head_dim, dtype=dtype, device=device)
    except (AssertionError, RuntimeError, TypeError) as error:
        raise InputError(
            f"warmup cannot run on {device} ({get_first_line(error)}): give the GPU of the calls"
        ) from error
    sink_values = None if sinks is None else torch.zeros(config.num_heads, dtype=sinks, device=device)
    calls = [(count * min(segments),) * 2 for count in SEGMENTS]
    for queries, keys in [*calls, SPLIT_CALL]:
        q, k, v = (
            torch.zeros(1, length, heads, dim, dtype=dtype, device=device).transpose(1, 2)
            for length, heads, dim in (
                (queries, config.num_heads, head_dim),
                (keys, kv_heads, head_dim),
                (keys, kv_heads, value_dim or head_dim),
            )
        )
        for kv_start in (None, torch.zeros(1, dtype=torch.int64, device=device))[: 1 + padded]:
            s2o_attention(
                q, k, v, config,
                kv_start=kv_start, softcap=softcap, sinks=sink_values, backend="triton",
            )  # fmt: skip
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
