"""The public attention ops: causal attention that computes only the part of the prefix that counts."""

from __future__ import annotations

from contextlib import nullcontext
from operator import index
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from s2o_runtime.attention import torch_op
from s2o_runtime.attention.backend import Backend, BackendChoice, choose_backend, is_decode
from s2o_runtime.attention.compute import Attention, AttentionStats, compute
from s2o_runtime.attention.replay import Answer, Inputs, RepeatedCall, repeated_call
from s2o_runtime.call import Call, Scoring, ScoringOptions, without_gradients
from s2o_runtime.config import LayerConfig
from s2o_runtime.errors import InputError
from s2o_runtime.sequences import Packed

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from s2o_runtime.kernels.plan import Recorder


class PackedOptions(ScoringOptions, total=False):
    """The optional arguments of `s2o_attention_varlen` that do not change the type of its result."""

    backend: Backend


class Options(PackedOptions, total=False):
    """The optional arguments of `s2o_attention` that do not change the type of its result."""

    kv_start: Tensor | None


@overload
def s2o_attention(q: Tensor, k: Tensor, v: Tensor, config: LayerConfig, **options: Unpack[Options]) -> Tensor: ...
@overload
def s2o_attention(
    q: Tensor, k: Tensor, v: Tensor, config: LayerConfig,
    *, return_stats: Literal[True], return_lse: bool = ..., **options: Unpack[Options],
) -> Attention: ...  # fmt: skip
@overload
def s2o_attention(
    q: Tensor, k: Tensor, v: Tensor, config: LayerConfig, *, return_lse: Literal[True], **options: Unpack[Options]
) -> Attention: ...
def s2o_attention(
    q: Tensor, k: Tensor, v: Tensor, config: LayerConfig,
    *, scale: float | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    kv_start: Tensor | None = None, backend: Backend = "auto", return_stats: bool = False, return_lse: bool = False,
    **unknown: object,
) -> Tensor | Attention:  # fmt: skip
    """Causal attention that computes only the part of the prefix that counts.

    Query i stands at position Lk - Lq + i, and query head h reads KV head h // (Hq / Hkv).

    Args:
        q: [B, Hq, Lq, D], any floating type of at least 16 bits.
        k: [B, Hkv, Lk, D] in the type and on the device of q; Lq <= Lk, and Hkv divides Hq.
        v: [B, Hkv, Lk, Dv], like k; Dv may differ from D.
        config: one `HeadConfig` for each query head; with tau = 0 the result is dense attention.
        scale: multiplies the scores; positive, D ** -0.5 by default.
        softcap: bounds the scores, softcap * tanh(score / softcap), as Gemma 2 has them; positive, no bound by default.
        sinks: [Hq], any floating type: a score without a value that every row of a head attends to, as in gpt-oss. It
            is part of the softmax's denominator, and so of what a gain is relative to; none by default.
        kv_start: int32 or int64 [B], the first key of each sequence that counts (left padding); 0 by default.
        backend: "triton", "reference" (plain torch, any device), "dense" (torch's SDPA), or "auto": the first of them
            that can do the call and is worth it.
        return_stats: return what the call did as well.
        return_lse: return the log-sum-exps as well.

    Returns:
        The output alone, a tensor [B, Hq, Lq, Dv] in the type of q; rows before `kv_start` are zero. With
        `return_stats` or `return_lse` an `Attention(out, lse, stats)`, always of three fields: `lse` is float32
        [B, Hq, Lq], the log-sum-exp of the scores that each row computed and of its sink, -inf before `kv_start`; a
        field not asked for is None.

    Raises:
        InputError: the arguments do not fit one another or the config, or the backend asked for cannot do the call.
            What `kv_start` holds is checked on a CPU alone: a GPU would have to be waited for.
        ConfigError: the config is illegal.

    Source: S2O, Algorithms 1 to 3, made definite in DESIGN.md.

    >>> q, k, v = (torch.randn(1, heads, 256, 64) for heads in (4, 2, 2))
    >>> config = LayerConfig.uniform(4, tau=0.5, segment=128)
    >>> s2o_attention(q, k, v, config).shape
    torch.Size([1, 4, 256, 64])
    >>> s2o_attention(q, k, v, config, return_stats=True).stats.backend
    'reference'
    """
    refuse(unknown, "s2o_attention")
    sinks = without_gradients(sinks)
    repeated, inputs = None, (q, k, v, kv_start, sinks)
    if not torch.compiler.is_compiling():
        scale, softcap = numbers(scale, softcap)
        options = (scale, softcap, backend, return_stats, return_lse)
        plain = backend == "auto" and softcap is None and not (return_stats or return_lse)
        repeated = repeated_call(inputs, config, options, plain and is_decode(q, k))
    elif not (return_stats or return_lse):
        scale = q.shape[3] ** -0.5 if scale is None else scale
        return torch_op.node("attention", q, k, v, kv_start, sinks, config.as_text(), backend, scale, softcap)
    if repeated is None or (answer := repeated.replay(inputs)) is None:
        scoring = Scoring(scale, softcap, sinks)
        call = Call.of(q, k, v, config, scoring=scoring, kv_start=kv_start, with_lse=return_lse)
        answer = computed(call, choose_backend(call, backend), return_stats, repeated, recording(repeated, inputs))
    choice, shape, (out, visited, lse) = answer
    if not (return_stats or return_lse):
        return out
    stats = AttentionStats(*choice, config, shape, kv_start, visited) if return_stats else None
    return Attention(out, lse, stats)


@overload
def s2o_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    config: LayerConfig, **options: Unpack[PackedOptions],
) -> Tensor: ...  # fmt: skip
@overload
def s2o_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    config: LayerConfig, *, return_stats: Literal[True], return_lse: bool = ..., **options: Unpack[PackedOptions],
) -> Attention: ...  # fmt: skip
@overload
def s2o_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    config: LayerConfig, *, return_lse: Literal[True], **options: Unpack[PackedOptions],
) -> Attention: ...  # fmt: skip
def s2o_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    config: LayerConfig,
    *, scale: float | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    backend: Backend = "auto", return_stats: bool = False, return_lse: bool = False, **unknown: object,
) -> Tensor | Attention:  # fmt: skip
    """`s2o_attention` for sequences of different lengths, packed one behind another.

    A sequence has at most as many queries as keys, its queries stand at its last positions, and it may be empty.

    Args:
        q: [Tq, Hq, D], any floating type of at least 16 bits.
        k: [Tk, Hkv, D] in the type and on the device of q; Hkv divides Hq.
        v: [Tk, Hkv, Dv], like k; Dv may differ from D.
        cu_seqlens_q: int32 [N + 1] on the device of q, where the queries of each sequence begin, from 0 to Tq.
        cu_seqlens_k: int32 [N + 1] on the device of q, where the keys of each sequence begin, from 0 to Tk.
        max_seqlen_q: queries, at least as many as the longest sequence has.
        max_seqlen_k: keys, at least as many as the longest sequence has, and at least `max_seqlen_q`.
        config: one `HeadConfig` for each query head.
        scale, softcap, sinks: as for `s2o_attention`.
        backend: as for `s2o_attention`; "reference" and "dense" run the sequences one by one and wait for the device.
        return_stats: return what the call did as well.
        return_lse: return the log-sum-exps as well.

    Returns:
        The output alone, a tensor [Tq, Hq, Dv] in the type of q. With `return_stats` or `return_lse` an
        `Attention(out, lse, stats)`, always of three fields: `lse` is float32 [Hq, Tq], the log-sum-exp of the scores
        that each row computed and of its sink; a field not asked for is None.

    Raises:
        InputError: the arguments do not fit one another or the config, or the backend asked for cannot do the call.
            What `cu_seqlens_q` and `cu_seqlens_k` hold is checked where the sequences run one by one: all else would
            have to wait for the device.
        ConfigError: the config is illegal.

    >>> q, k, v = (torch.randn(500, heads, 64) for heads in (4, 2, 2))
    >>> starts = torch.tensor([0, 300, 500], dtype=torch.int32)  # two prompts, of 300 and of 200 tokens
    >>> config = LayerConfig.uniform(4, tau=0.5, segment=128)
    >>> s2o_attention_varlen(q, k, v, starts, starts, 300, 300, config).shape
    torch.Size([500, 4, 64])
    """
    refuse(unknown, "s2o_attention_varlen")
    sinks = without_gradients(sinks)
    repeated = None
    packed = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    inputs = (q, k, v, packed.cu_q, None if packed.cu_k is packed.cu_q else packed.cu_k, sinks)
    if not torch.compiler.is_compiling():
        scale, softcap = numbers(scale, softcap)
        options = (scale, softcap, backend, return_stats, return_lse, *whole_numbers(max_seqlen_q, max_seqlen_k))
        repeated = repeated_call(inputs, config, options)
    if repeated is None or (answer := repeated.replay(inputs)) is None:
        scoring = Scoring(scale, softcap, sinks)
        call = Call.of_packed(q, k, v, config, packed, scoring=scoring, with_lse=return_lse)
        answer = computed(call, choose_backend(call, backend), return_stats, repeated, recording(repeated, inputs))
    choice, shape, (out, visited, lse) = answer
    if not (return_stats or return_lse):
        return out
    stats = None
    if return_stats:
        stats = AttentionStats(*choice, config, shape, None, visited, packed.cu_q, packed.cu_k)
    return Attention(out, lse, stats)


def numbers(scale: float | None, softcap: float | None) -> tuple[float | None, float | None]:
    """The scale and the cap as a key of plans: given as an integer or a tensor they are the same numbers.

    Raises:
        InputError: one is no number.
    """
    try:  # the products refuse texts, which float() would read
        return None if scale is None else float(scale * 1.0), None if softcap is None else float(softcap * 1.0)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"scale is {scale!r} and softcap {softcap!r}: expected numbers or None") from None


def whole_numbers(*values: int) -> tuple[int, ...]:
    """Counts of tokens as integers. Raises InputError for what is none."""
    try:
        return tuple(map(index, values))
    except TypeError:
        raise InputError(f"the lengths are {', '.join(map(repr, values))}: expected whole numbers") from None


def refuse(unknown: dict[str, object], function: str) -> None:
    """Raise InputError if there are arguments that a function of the package does not have."""
    if unknown:
        raise InputError(f"{function}() has no argument {', '.join(unknown)}: help({function}) lists those that it has")


def recording(repeated: RepeatedCall | None, inputs: Inputs) -> Recorder | None:
    """What is to record a call; None if nothing is."""
    return None if repeated is None else repeated.recorder(inputs)


def computed(
    call: Call, choice: BackendChoice, keep_visited: bool, repeated: RepeatedCall | None,
    recorder: Recorder | None, out: Tensor | None = None,
) -> Answer:  # fmt: skip
    """Run the call; its launches are recorded if they are to be replayed for others like it.

    Args:
        call: the call.
        choice: the backend, as `choose_backend` gave it.
        keep_visited: whether the answer is to have what row tiles visited.
        repeated: the calls that are like this one, if such are kept.
        recorder: has recorded what this call launched before, and records the rest; None if nothing is recorded.
        out: of a packed call, a tensor that `takes_output`.
    """
    if repeated is not None and choice.backend == "dense":
        repeated.goes_dense(call, choice)
    if choice.backend != "triton":
        recorder = None
    with nullcontext() if recorder is None else recorder:
        result, visited, lse = compute(call, choice.backend, out)
    answer = choice, call.shape, (result, visited if keep_visited else None, lse)
    if repeated is not None and recorder is not None:
        repeated.keep(recorder, answer)
    return answer


def _compiled(
    q: Tensor, k: Tensor, v: Tensor, kv_start: Tensor | None, sinks: Tensor | None, config: str, backend: Backend,
    scale: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    """What the node of a compiled graph does."""
    layer = torch_op.config_from_text(config)
    return s2o_attention(
        q, k, v, layer, scale=scale, softcap=softcap, sinks=sinks, kv_start=kv_start, backend=backend
    )  # fmt: skip


torch_op.implement("attention", _compiled)
