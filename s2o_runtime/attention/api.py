"""The public attention ops: causal attention that computes only the part of the prefix that counts."""

from __future__ import annotations

from functools import cache
from operator import index
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from ..call import Call, Scoring, ScoringOptions, without_gradients
from ..config import LayerConfig
from ..errors import InputError
from ..sequences import Packed, Starts
from . import torch_op
from .backend import Backend, BackendChoice, choose_backend, is_decode
from .compute import Attention
from .replay import OpOptions, run_call

if TYPE_CHECKING:
    from typing_extensions import Unpack


RESULTS = {"return_stats", "return_lse"}  # arguments of every op that change the type of its result


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
def s2o_attention(q: Tensor, k: Tensor, v: Tensor, config: LayerConfig, **options: Any) -> Tensor | Attention:
    """Compute causal attention over only the part of the prefix that counts.

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

    Source: S2O, Algorithms 1 to 3, made definite in docs/how-it-works.md.

    >>> q, k, v = (torch.randn(1, heads, 256, 64) for heads in (4, 2, 2))
    >>> config = LayerConfig.uniform(4, tau=0.5, segment=128)
    >>> s2o_attention(q, k, v, config).shape
    torch.Size([1, 4, 256, 64])
    >>> s2o_attention(q, k, v, config, return_stats=True).stats.backend
    'reference'
    """
    chosen = read_options("s2o_attention", Options, options)
    kv_start, (scale, softcap, sinks) = options.get("kv_start"), chosen.scoring
    if torch.compiler.is_compiling() and not chosen.keeps_more:
        scale = q.shape[3] ** -0.5 if scale is None else scale
        arguments = (q, k, v, kv_start, sinks, config.as_text(), chosen.backend, scale, softcap)
        return torch_op.call_node("attention", *arguments)

    def prepare(_: object) -> tuple[Call, BackendChoice]:
        call = Call.from_tensors(q, k, v, config, scoring=chosen.scoring, kv_start=kv_start, with_lse=chosen.return_lse)
        return call, choose_backend(call, chosen.backend)

    plain = chosen.backend == "auto" and softcap is None and not chosen.keeps_more
    starts = Starts(kv_start=kv_start)
    return run_call((q, k, v, kv_start, sinks), config, chosen, prepare, starts, is_decode=plain and is_decode(q, k))


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
    config: LayerConfig, **options: Any,
) -> Tensor | Attention:  # fmt: skip
    """Compute `s2o_attention` for sequences of different lengths, packed one behind another.

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
    chosen = read_options("s2o_attention_varlen", PackedOptions, options)
    packed = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)

    def prepare(_: object) -> tuple[Call, BackendChoice]:
        call = Call.from_tensors(q, k, v, config, packed, scoring=chosen.scoring, with_lse=chosen.return_lse)
        return call, choose_backend(call, chosen.backend)

    edges = (cu_seqlens_q, None if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k)
    lengths = read_lengths(max_seqlen_q, max_seqlen_k)
    inputs = (q, k, v, *edges, chosen.scoring.sinks)
    return run_call(inputs, config, chosen, prepare, packed.starts, lengths=lengths)


def read_options(function: str, accepted: type, given: dict[str, Any]) -> OpOptions:
    """Return the optional arguments that the ops share, with numbers as numbers, so that equal ones are one plan's key.

    accepted: the TypedDict of the op's optional arguments; `return_stats` and `return_lse` come on top. Raises
    InputError if an argument is unknown, or the scale or the cap is no number.
    """
    names = get_option_names(accepted)
    if not given.keys() <= names:
        refuse(sorted(given.keys() - names), function)
    scale, softcap = given.get("scale"), given.get("softcap")
    is_number = scale is not None or softcap is not None
    if is_number and not torch.compiler.is_compiling():  # graphs hold symbols in place of numbers
        try:  # the products refuse texts, which float() would read
            scale = None if scale is None else float(scale * 1.0)
            softcap = None if softcap is None else float(softcap * 1.0)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(f"scale is {scale!r} and softcap {softcap!r}: expected numbers or None") from None
    sinks = given.get("sinks")
    scoring = Scoring(scale, softcap, None if sinks is None else without_gradients(sinks))
    asked = given.get("backend", "auto"), given.get("return_stats", False), given.get("return_lse", False)
    return OpOptions(scoring, *asked, given.get("out"))


@cache
def get_option_names(accepted: type) -> frozenset[str]:
    """Return the names of an op's optional arguments."""
    return frozenset(accepted.__annotations__) | RESULTS


def read_lengths(*values: int) -> tuple[int, ...]:
    """Return counts of tokens as integers. Raises InputError for what is none."""
    if torch.compiler.is_compiling():
        return values
    try:
        return tuple(map(index, values))
    except TypeError:
        raise InputError(f"the lengths are {', '.join(map(repr, values))}: expected whole numbers") from None


def refuse(unknown: list[str], function: str) -> None:
    """Raise InputError if there are arguments that a function of the package does not have."""
    if unknown:
        raise InputError(f"{function}() has no argument {', '.join(unknown)}: help({function}) lists those that it has")


def run_node(
    q: Tensor, k: Tensor, v: Tensor, kv_start: Tensor | None, sinks: Tensor | None, config: str, backend: Backend,
    scale: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Run the node of a compiled graph; the arguments are those of `torch.ops.s2o_runtime.attention`."""
    options: Options = {"scale": scale, "softcap": softcap, "sinks": sinks, "kv_start": kv_start, "backend": backend}
    return s2o_attention(q, k, v, torch_op.read_config(config), **options)


torch_op.register_node("attention", run_node)
