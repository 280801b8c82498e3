"""The public attention ops: they check the call, pick a backend, and say why."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from s2o_runtime import ops
from s2o_runtime.config import HEAD_DIMS, LayerConfig, numbered_config
from s2o_runtime.dense import dense_attention, log_sum_exp
from s2o_runtime.errors import InputError
from s2o_runtime.gpu import MIN_CAPABILITY, candidate_tiles, capability, interpreted, launching_on, padded_head_dim
from s2o_runtime.reference import Attended, s2o_attention_reference
from s2o_runtime.shapes import CallShape, call_shape, check_heads, density, packed_shape, pairs

if TYPE_CHECKING:
    from s2o_runtime.kernels.plan import Plan, Recorder

Backend = Literal["auto", "triton", "reference", "dense"]
KERNEL_TYPES = (torch.bfloat16, torch.float16)
BLOCK = 128  # rows that a head of another method selects keys for
PLANS = 1024  # kinds of calls remembered, such as 32 layers at 32 lengths

log = logging.getLogger("s2o_runtime")


class Choice(NamedTuple):
    """A backend and the reason it was picked."""

    backend: str
    reason: str


@dataclass(frozen=True)
class AttentionStats:
    """What one call did.

    backend, reason: which code ran, and why it was chosen.
    visited: int32 [B, Hq, row tiles], prefix keys each row tile computed; None when the call was dense.
    kv_start, cu_q, cu_k: where the sequences lie, as they were given.
    """

    backend: str
    reason: str
    config: LayerConfig
    shape: CallShape
    kv_start: Tensor | None
    visited: Tensor | None
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None

    @property
    def density(self) -> Tensor:
        """Query-key pairs computed over causal pairs, window included: float64 [Hq]; dense is 1.0."""
        if self.visited is None:
            return torch.ones(self.shape.query_heads, dtype=torch.float64)
        if self.cu_q is None or self.cu_k is None:
            return density(self.visited, self.config, self.shape, self.kv_start)
        zero = torch.zeros(1, dtype=torch.int64, device=self.visited.device)
        computed, causal = torch.zeros(self.shape.query_heads).double().to(zero.device), zero.double()[0]
        for b, (rows, keys) in enumerate(_sequences(self.cu_q, self.cu_k)):
            part, of = pairs(self.visited[b : b + 1], self.config, len(rows), len(keys) - len(rows), zero)
            computed, causal = computed + part, causal + of
        return computed / causal.clamp_min(1.0)


Output = Tensor | tuple[Tensor, AttentionStats] | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, AttentionStats]


@overload
def s2o_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: LayerConfig,
    *,
    scale: float | None = ...,
    kv_start: Tensor | None = ...,
    backend: Backend = ...,
    return_stats: Literal[False] = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def s2o_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: LayerConfig,
    *,
    scale: float | None = ...,
    kv_start: Tensor | None = ...,
    backend: Backend = ...,
    return_stats: Literal[True],
    return_lse: Literal[False] = ...,
) -> tuple[Tensor, AttentionStats]: ...
@overload
def s2o_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: LayerConfig,
    *,
    scale: float | None = ...,
    kv_start: Tensor | None = ...,
    backend: Backend = ...,
    return_stats: bool = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, AttentionStats]: ...
def s2o_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: LayerConfig,
    *,
    scale: float | None = None,
    kv_start: Tensor | None = None,
    backend: Backend = "auto",
    return_stats: bool = False,
    return_lse: bool = False,
) -> Output:
    """Causal attention that computes only the part of the prefix that counts.

    q: [B, Hq, Lq, D]; k, v: [B, Hkv, Lk, D] with Lq <= Lk, one floating type, one device; query i stands at
        position Lk - Lq + i, and query head h reads KV head h // (Hq / Hkv).
    config: one `HeadConfig` per query head; with tau = 0 the result is dense attention.
    scale: multiplies the scores; default D ** -0.5, must be positive.
    kv_start: integers [B], the first key of each sequence that counts (left padding).
    backend: "triton", "reference" (plain torch, any device), "dense", or "auto", which picks the first that
        can do the call and keeps the reason in the stats.
    Returns the output [B, Hq, Lq, D] in q's dtype, rows before `kv_start` zero; with `return_lse` then the
    log-sum-exp of the scores each row computed, float32 [B, Hq, Lq], -inf before `kv_start`; with `return_stats`
    then an `AttentionStats`. Raises InputError for tensors that do not fit, ConfigError for an illegal config.

    >>> q, k, v = (torch.randn(1, heads, 256, 64) for heads in (4, 2, 2))
    >>> s2o_attention(q, k, v, LayerConfig.uniform(4, tau=0.5, segment=128)).shape
    torch.Size([1, 4, 256, 64])
    """
    compiling = torch.compiler.is_compiling()
    if compiling and not (return_stats or return_lse):
        scale = q.shape[3] ** -0.5 if scale is None else scale
        return ops.attention(q, k, v, kv_start, _RUNS[backend], config.number, scale)
    inputs = (q, k, v, kv_start)
    kind = None if compiling else _kind_of(inputs, config, scale, backend, return_stats, return_lse)
    if kind is not None and (done := kind.repeat(inputs)) is not None:
        choice, shape, (out, visited, lse) = done
    else:
        shape = call_shape(q, k, v, kv_start)
        scale = _checked_scale(scale, config, shape)
        choice = choose_backend(q, k, v, config, shape, backend, return_lse)
        if choice.backend == "triton":
            with _recording(kind, inputs) as recorder:
                out, visited, lse = _kernel(q, k, v, config, shape, scale, kv_start, None, None, return_lse)
            if kind is not None and recorder is not None:
                kind.keep(recorder, choice, shape, (out, visited if return_stats else None, lse))
        else:
            out, visited, lse = _plain(q, k, v, config, scale, kv_start, choice.backend, return_lse)
        if config.block_heads and visited is not None:
            _add_blocks(q, k, v, config, shape, scale, kv_start, choice.backend, out, visited)
    stats = AttentionStats(*choice, config, shape, kv_start, visited) if return_stats else None
    return _answer(out, lse, stats)


def s2o_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    config: LayerConfig,
    *,
    scale: float | None = None,
    backend: Backend = "auto",
    return_stats: bool = False,
    return_lse: bool = False,
) -> Output:
    """`s2o_attention` for sequences of different lengths, packed one behind another.

    q: [Tq, Hq, D]; k, v: [Tk, Hkv, D]; cu_seqlens_q, cu_seqlens_k: int32 [N + 1], where each sequence begins, from
    0 to Tq and Tk; max_seqlen_q, max_seqlen_k: at least the longest sequence. A sequence has at most as many
    queries as keys, its queries are its last positions, and it may be empty.
    Returns the output [Tq, Hq, D], with `return_lse` then float32 [Hq, Tq], with `return_stats` then the stats.
    """
    inputs = (q, k, v, cu_seqlens_q, None if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k)
    kind = None
    if not torch.compiler.is_compiling():
        lengths = index(max_seqlen_q), index(max_seqlen_k)
        kind = _kind_of(inputs, config, scale, backend, return_stats, return_lse, lengths)
    if kind is not None and (done := kind.repeat(inputs)) is not None:
        choice, shape, (out, visited, lse) = done
    else:
        shape = packed_shape(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        scale = _checked_scale(scale, config, shape)
        choice = choose_backend(q, k, v, config, shape, backend, return_lse, packed=True)
        with _recording(kind if choice.backend == "triton" else None, inputs) as recorder:
            out, visited, lse = _packed(
                q, k, v, config, shape, scale, cu_seqlens_q, cu_seqlens_k, choice.backend, return_lse
            )
        if kind is not None and recorder is not None:
            kind.keep(recorder, choice, shape, (out, visited if return_stats else None, lse))
    stats = None
    if return_stats:
        stats = AttentionStats(*choice, config, shape, None, visited, cu_seqlens_q, cu_seqlens_k)
    return _answer(out, lse, stats)


def _compiled_run(backend: Backend) -> ops.Run:
    def run(q: Tensor, k: Tensor, v: Tensor, kv_start: Tensor | None, number: int, scale: float) -> Tensor:
        return s2o_attention(q, k, v, numbered_config(number), scale=scale, kv_start=kv_start, backend=backend)

    return run


_RUNS = {backend: ops.register(_compiled_run(backend)) for backend in get_args(Backend)}


_Inputs = tuple[Tensor | None, ...]
_Answers = tuple[Tensor, Tensor | None, Tensor | None]  # output, visited, lse


class _Kind:
    """Calls alike in all but the contents and the addresses of their tensors, and their plan once there is one.

    The first call compiles kernels and fills caches; the ones after it are recorded, three if need be.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._known: tuple[Plan, Choice, CallShape] | None = None

    def repeat(self, inputs: _Inputs) -> tuple[Choice, CallShape, _Answers] | None:
        """What such a call does, as the plan has it; None if it must be done the long way."""
        if self._known is None:
            return None
        plan, choice, shape = self._known
        answers = plan.replay(inputs)
        if answers is None:
            return None
        out, visited, lse = answers
        return choice, shape, (out, visited, lse)

    def recorder(self, inputs: _Inputs) -> Recorder | None:
        """What the next call is to be recorded with, if it is."""
        self._calls += 1
        if self._known is not None or not 2 <= self._calls <= 4:
            return None
        from s2o_runtime.kernels.plan import Recorder  # imports triton

        return Recorder(inputs)

    def keep(self, recorder: Recorder, choice: Choice, shape: CallShape, answers: _Answers) -> None:
        plan = recorder.plan(answers)
        if plan is not None:
            self._known = plan, choice, shape


def _kind_of(
    inputs: _Inputs,
    config: LayerConfig,
    scale: float | None,
    backend: str,
    return_stats: bool,
    return_lse: bool,
    lengths: tuple[int, int] | None = None,
) -> _Kind | None:
    """The kind of a call: everything that its checks, its backend and its launches follow from.

    None if it can have no plan. lengths: the maxima of packed sequences.
    """
    if inputs[0] is None or not inputs[0].is_cuda or config.block_heads:  # selecting blocks is torch's work
        return None
    scale = None if scale is None else float(scale)
    key: list[object] = [config.number, scale, backend, return_stats, return_lse, lengths]
    gradients = torch.is_grad_enabled()
    for tensor in inputs:
        if tensor is None:
            key.append(None)
        elif type(tensor) is not Tensor or (gradients and tensor.requires_grad):
            return None
        else:
            key += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    return _kind(tuple(key))


@lru_cache(maxsize=PLANS)
def _kind(key: tuple[object, ...]) -> _Kind:
    return _Kind()


def _recording(kind: _Kind | None, inputs: _Inputs) -> AbstractContextManager[Recorder | None]:
    recorder = None if kind is None else kind.recorder(inputs)
    return nullcontext() if recorder is None else recorder


def _checked_scale(scale: float | None, config: LayerConfig, shape: CallShape) -> float:
    check_heads(config.validate(), shape)
    if scale is None:
        return float(shape.head_dim**-0.5)
    if not scale > 0:
        raise InputError(f"scale is {scale}: expected a positive number")
    return scale


def _answer(out: Tensor, lse: Tensor | None, stats: AttentionStats | None) -> Output:
    if lse is None:
        return out if stats is None else (out, stats)
    return (out, lse) if stats is None else (out, lse, stats)


def _sequences(cu_q: Tensor, cu_k: Tensor) -> Iterator[tuple[range, range]]:
    """The rows and the keys of each packed sequence; waits for the device."""
    q_edges, k_edges = cu_q.tolist(), cu_k.tolist()
    for b in range(len(q_edges) - 1):
        yield range(q_edges[b], q_edges[b + 1]), range(k_edges[b], k_edges[b + 1])


def _slice(rows: range) -> slice:
    return slice(rows.start, rows.stop)


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: LayerConfig,
    scale: float,
    kv_start: Tensor | None,
    backend: str,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The output, visited and lse of the backends that need no kernel."""
    if backend == "reference":
        result: Attended = s2o_attention_reference(q, k, v, config, scale=scale, kv_start=kv_start)
        return result.out, result.visited, result.lse.float() if with_lse else None
    out = dense_attention(q, k, v, scale=scale, kv_start=kv_start)
    return out, None, log_sum_exp(q, k, scale=scale, kv_start=kv_start) if with_lse else None


def _add_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: LayerConfig,
    shape: CallShape,
    scale: float,
    kv_start: Tensor | None,
    backend: str,
    out: Tensor,
    visited: Tensor,
) -> None:
    """Compute the heads that other methods compute; of each, `visited` is what a row computes on average."""
    from s2o_runtime.baselines.run import baseline_attention

    methods = [head.blocks for head in config.heads if head.blocks is not None]
    ran: Literal["triton", "reference"] = "triton" if backend == "triton" else "reference"
    _, stats = baseline_attention(
        q, k, v, methods, scale=scale, kv_start=kv_start, out=out, heads=config.block_heads, backend=ran
    )
    starts = torch.zeros(shape.batch, dtype=torch.int64, device=q.device) if kv_start is None else kv_start
    rows = (shape.kv_len - starts).clamp(0, shape.q_len).sum()
    keys = (stats.computed / rows.clamp_min(1)).round().to(visited.dtype)
    visited[:, config.block_heads] = keys[:, None].expand(-1, visited.shape[2])


def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: LayerConfig,
    shape: CallShape,
    scale: float,
    cu_q: Tensor,
    cu_k: Tensor,
    backend: str,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The output, visited and lse of packed sequences; all but the kernels take them one by one."""
    q4, k4, v4 = (t.transpose(0, 1)[None] for t in (q, k, v))
    visited: Tensor | None = None
    if backend == "triton":
        q4, k4, v4 = (t.expand(shape.batch, -1, -1, -1) for t in (q4, k4, v4))
        out, visited, lse = _kernel(q4, k4, v4, config, shape, scale, None, cu_q, cu_k, with_lse)
    else:
        out = torch.zeros_like(q4)
        lse = q.new_zeros(1, *q4.shape[1:3], dtype=torch.float32) if with_lse else None
        if backend == "reference":
            tiles = (shape.batch, shape.query_heads, shape.row_tiles(config.tile.block_m))
            visited = torch.zeros(tiles, dtype=torch.int32, device=q.device)
        for b, (rows, keys) in enumerate(_sequences(cu_q, cu_k)):
            if not len(rows):
                continue
            part_q, part_k, part_v = q4[:, :, _slice(rows)], k4[:, :, _slice(keys)], v4[:, :, _slice(keys)]
            part = _plain(part_q, part_k, part_v, config, scale, None, backend, with_lse)
            out[:, :, _slice(rows)] = part[0]
            if visited is not None and part[1] is not None:
                visited[b, :, : part[1].shape[2]] = part[1][0]
            if lse is not None and part[2] is not None:
                lse[:, :, _slice(rows)] = part[2]
    return out[0].transpose(0, 1), visited, None if lse is None else lse[0]


def _kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: LayerConfig,
    shape: CallShape,
    scale: float,
    kv_start: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    with_lse: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The output, visited and lse of the kernels; other head dims run as the next larger one, filled with zeros."""
    from s2o_runtime.kernels.call import Call, head_tables  # these import triton
    from s2o_runtime.kernels.prefill import s2o_prefill

    head_dim = shape.head_dim
    shape = shape.with_head_dim(padded_head_dim(head_dim))
    q, k, v = (laid_out(t, shape.head_dim, cu_q is not None) for t in (q, k, v))
    # such as the column of a mask: kernels take one entry after the other
    kv_start, cu_q, cu_k = (None if t is None else t.contiguous() for t in (kv_start, cu_q, cu_k))
    call = Call(config, shape, scale, head_tables(config, q.device), kv_start, cu_q, cu_k)
    with launching_on(q.device):
        out, visited, lse = s2o_prefill(q, k, v, call, with_lse)
    return out if shape.head_dim == head_dim else out[..., :head_dim], visited, lse


def laid_out(t: Tensor, head_dim: int, packed: bool = False) -> Tensor:
    """The tensor with its last dimension filled up to head_dim and contiguous; packed ones stay one batch entry."""
    if t.shape[3] == head_dim and t.stride(3) == 1:
        return t
    batch = t.shape[0]
    t = t[:1] if packed else t
    t = F.pad(t, (0, head_dim - t.shape[3])) if t.shape[3] < head_dim else t.contiguous()
    return t.expand(batch, -1, -1, -1)


def choose_backend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: LayerConfig,
    shape: CallShape,
    backend: Backend,
    with_lse: bool = False,
    packed: bool = False,
) -> Choice:
    """The backend for a call, and why. Raises InputError if the one asked for cannot do it."""
    if backend not in get_args(Backend):
        raise InputError(f"backend {backend!r} is not known: use one of {get_args(Backend)}")
    if backend == "dense":
        return Choice(backend, "asked for")
    blocked = _blocks_obstacle(config, shape, with_lse, packed)
    obstacle = blocked or (None if backend == "reference" else _kernel_obstacle(q, k, v, config, shape))
    if backend != "auto":
        if obstacle:
            raise InputError(f'{obstacle}: run with backend="auto"')
        return Choice(backend, "asked for")
    choice = Choice("dense", blocked) if blocked else _automatic(q, config, shape, obstacle, with_lse)
    _log_once(choice)
    return choice


def _automatic(q: Tensor, config: LayerConfig, shape: CallShape, obstacle: str | None, with_lse: bool) -> Choice:
    if with_lse and obstacle is None and q.device.type != "cpu":
        return Choice("triton", "SDPA gives no log-sum-exp, the kernel does")
    if config.is_dense:
        return Choice("dense", "every head of the layer is dense")
    if not has_prefix(config, shape):
        return Choice("dense", "the whole prompt fits one segment")
    if shape.kv_len < config.tile.dense_below:
        return Choice("dense", f"shorter than {config.tile.dense_below} keys, where dense is faster on this GPU")
    if q.device.type == "cpu":
        return Choice("reference", "the tensors are on the cpu, the kernel needs a GPU")
    if obstacle is None:
        return Choice("triton", "the kernel supports this call")
    return Choice("dense", obstacle)


def has_prefix(config: LayerConfig, shape: CallShape) -> bool:
    """Whether any segment of any head, or block of rows, has keys before it."""
    units = [BLOCK if head.mode == "blocks" else head.segment for head in config.heads if head.mode != "dense"]
    shortest = min(units, default=shape.q_len)
    return shape.offset > 0 or shape.q_len > shortest


def _blocks_obstacle(config: LayerConfig, shape: CallShape, with_lse: bool, packed: bool) -> str | None:
    """Why the heads of other methods cannot do a call, or None if they can or there are none."""
    if not config.block_heads:
        return None
    if packed or with_lse:
        what = "packed sequences" if packed else "the log-sum-exp"
        return f"{what} cannot be done by {config.heads[config.block_heads[0]].blocks}"
    from s2o_runtime.baselines.run import HEAD_DIM

    if shape.head_dim > HEAD_DIM:
        return f"head_dim {shape.head_dim} is not supported by block-sparse methods (up to {HEAD_DIM})"
    return None


def _kernel_obstacle(q: Tensor, k: Tensor, v: Tensor, config: LayerConfig, shape: CallShape) -> str | None:
    """Why the kernel cannot do a call, or None if it can."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return "the kernel has no backward pass and gradients are enabled"
    if shape.head_dim > HEAD_DIMS[-1]:
        return f"head_dim {shape.head_dim} is not supported by the kernel (up to {HEAD_DIMS[-1]})"
    if interpreted():
        return "the specialised kernel cannot be interpreted" if config.tile.specialized else None
    if q.device.type != "cuda":
        return f"the tensors are on {q.device.type}, the kernel needs a GPU"
    if q.dtype not in KERNEL_TYPES:
        return f"{q.dtype} is not supported by the kernel (bfloat16, float16)"
    here = capability(q.device)
    if here < MIN_CAPABILITY:
        return f"compute capability {here[0]}.{here[1]} is older than 8.0"
    if config.tile.specialized and here != (9, 0):
        return f"tile {config.tile} is for sm_90, this GPU is sm_{here[0]}{here[1]}"
    if not candidate_tiles(shape.head_dim, here):
        return f"head_dim {shape.head_dim} has no tile on sm_{here[0]}{here[1]}"
    if config.tile.specialized and shape.head_dim > 128:
        return f"tile {config.tile} has no specialised kernel for head_dim {shape.head_dim}"
    return None


@lru_cache(maxsize=64)
def _log_once(choice: Choice) -> None:
    log.info("attention backend %s: %s", choice.backend, choice.reason)
