"""The choice of the code that computes a call, and the reason for it."""

from __future__ import annotations

import logging
from typing import Literal, NamedTuple, get_args

from torch import Tensor

from ..call import Call
from ..config import HEAD_DIMS, LayerConfig
from ..dense_reason import DenseReason
from ..devices import find_tensor_obstacle, get_capability, is_interpreted
from ..errors import InputError
from ..logs import log_once
from ..sequences import CallShape, needs_gradients
from ..tiles import DECODE, MIN_CAPABILITY, Capability, find_tile_obstacle, get_fewest_queries

Backend = Literal["auto", "triton", "reference", "dense"]


class BackendChoice(NamedTuple):
    """The code that computes a call ("triton", "reference" or "dense") and the reason for it."""

    backend: str
    reason: str


def choose_backend(call: Call, backend: Backend) -> BackendChoice:
    """Choose a call's backend: the one asked for, or with "auto" the first that can do it and is not slower than dense.

    A choice of "auto" is logged once for each reason.

    Raises:
        InputError: the backend is not known or cannot do the call.
    """
    if backend not in get_args(Backend):
        raise InputError(f"backend {backend!r} is not known: use one of {get_args(Backend)}")
    if backend == "dense":
        return BackendChoice(backend, "asked for")
    obstacle = None if backend == "reference" else _find_kernel_obstacle(call)
    if backend != "auto":
        if obstacle:
            raise InputError(f'{obstacle}: run with backend="auto"')
        return BackendChoice(backend, "asked for")
    choice = _choose_automatically(call, obstacle)
    log_once(logging.INFO, "attention backend %s: %s", choice.backend, choice.reason)
    return choice


def _choose_automatically(call: Call, kernel_obstacle: str | None) -> BackendChoice:
    on_cpu = call.q.device.type == "cpu"
    is_decode = call.shape.offset > 0 and call.shape.q_len < DECODE
    if kernel_obstacle is None and not on_cpu and not is_decode:
        if call.with_lse:
            return BackendChoice("triton", "SDPA gives no log-sum-exp, the kernel does")
        if call.scoring.softcap is not None:
            return BackendChoice("triton", "SDPA cannot cap scores, the kernel can")
    if reason := find_dense_reason(call.config, call.shape, get_capability(call.q.device)):
        return BackendChoice("dense", reason)
    if on_cpu:
        return BackendChoice("reference", "reference backend, no GPU")
    if kernel_obstacle is None:
        return BackendChoice("triton", "the kernel supports this call")
    return BackendChoice("dense", kernel_obstacle)


def find_dense_reason(config: LayerConfig, shape: CallShape, gpu: Capability) -> str | None:
    """Return the reason why dense attention is better for calls of these sizes; None if S2O is.

    shape: for packed sequences each is to be asked about; gpu: (0, 0) for a CPU.
    """
    if config.is_dense:
        return DenseReason.NO_S2O_HEAD
    fewest = max(get_fewest_queries(config.tile, gpu), 2 * config.last_rows)  # fewer others save less than they cost
    if shape.offset > 0 and shape.q_len < fewest:
        return DenseReason.FEW_QUERIES.fill_in(fewest)
    if shape.offset == 0 and shape.q_len <= config.shortest_segment:  # no head has keys before a segment
        return DenseReason.ONE_SEGMENT
    if shape.is_little_for(config.tile):
        return DenseReason.LITTLE_WORK.fill_in(config.tile.dense_below)
    return None


def is_decode(q: Tensor, k: Tensor) -> bool:
    """Return whether "auto" runs a call dense whatever its layer: too few queries behind a prefix, not checked yet."""
    return getattr(q, "ndim", 0) == getattr(k, "ndim", 0) == 4 and q.shape[2] < DECODE <= k.shape[2]


def _find_kernel_obstacle(call: Call) -> str | None:
    """Return the reason why the kernel cannot do a call; None if it can."""
    q, tile, head_dim = call.q, call.config.tile, call.shape.widest
    sinks = () if call.scoring.sinks is None else (call.scoring.sinks,)
    if needs_gradients(call.q, call.k, call.v, *sinks):
        return "the kernel has no backward pass and gradients are enabled"
    if head_dim > HEAD_DIMS[-1]:  # no GPU has a tile for it, and the interpreter none either
        return find_tile_obstacle(tile, head_dim, MIN_CAPABILITY)
    if is_interpreted():
        return "the specialised kernel cannot be interpreted" if tile.specialized else None
    return find_tensor_obstacle(q) or find_tile_obstacle(tile, head_dim, get_capability(q.device))
