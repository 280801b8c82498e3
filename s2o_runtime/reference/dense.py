"""Dense causal attention: the fallback, and (in float32) the ground truth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..call import Scoring, ScoringOptions, cap_scores
from ..sequences import CallShape, Starts, call_shape, list_sequences

if TYPE_CHECKING:
    from typing_extensions import Unpack

FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
ORDER = [int(backend) for backend in FASTEST_FIRST]  # type: ignore[call-overload]
EXACT_ROWS = 1024  # rows computed together
_preferred: ContextVar[SDPBackend | None] = ContextVar("preferred", default=None)
SINK_TERMS = 8  # of a sink's score in dense attention: bfloat16 needs 3, and backends want head dims that 8 divides


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, *, kv_start: Tensor | None = None, **options: Unpack[ScoringOptions]
) -> Tensor:
    """Compute causal attention through torch's SDPA, with the fastest of its backends that takes the call.

    Query i stands at position Lk - Lq + i. SDPA knows no soft cap: scores with one are computed as `exact_attention`
    computes them, in float32 and many times slower.

    Args:
        q: [B, Hq, Lq, D], any floating type; k: [B, Hkv, Lk, D] and v: [B, Hkv, Lk, Dv], like it.
        options: as in `call.Scoring`.
        kv_start: int32 or int64 [B], the first key of each sequence that counts; reading it waits for the device.

    Returns:
        [B, Hq, Lq, Dv] in the type of q; rows before `kv_start` are zero. Raises InputError for tensors that do not
        fit one another.
    """
    shape = call_shape(q, k, v, kv_start)
    scoring = Scoring(**options).checked(shape, q)
    if scoring.softcap is not None:
        return exact_attention(q, k, v, **scoring.arguments(), kv_start=kv_start).to(q.dtype)
    if kv_start is None:
        return _attend_causally(q, k, v, scoring)
    out = q.new_zeros(*q.shape[:3], shape.value_dim)
    for sequence in list_sequences(Starts(kv_start), shape):
        keys, values = (sequence.take(tensor, sequence.keys) for tensor in (k, v))
        sequence.take(out, sequence.rows).copy_(
            _attend_causally(sequence.take(q, sequence.rows), keys, values, scoring)
        )
    return out


@contextmanager
def use_sdpa_backend(backend: SDPBackend) -> Iterator[None]:
    """Run dense attention inside the block by this backend of SDPA, or a slower one that takes the call.

    No kernel of S2O's is used either, so what differs from dense attention outside the block is rounding alone.
    """
    token = _preferred.set(backend)
    try:
        yield
    finally:
        _preferred.reset(token)


def get_preferred_backend() -> SDPBackend | None:
    """Return the backend of the `use_sdpa_backend` block around this, if there is one."""
    return _preferred.get()


def _attend_causally(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """Run SDPA on one batch without padding. Its fast backends want one head dim: the smaller is filled with zeros."""
    scale, _, sinks = scoring
    assert scale is not None
    if sinks is not None:
        q, k, v = with_sink_key(q, k, v, sinks, scale)
    return run_sdpa(q, k, v, scale)


def run_sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Compute `dense_attention` of tensors that are known to fit, without anything that SDPA does not know."""
    head_dim = q.shape[3]
    value_dim = v.shape[3]
    if head_dim == value_dim:
        return _run_in_order(q, k, v, scale)
    widest = max(head_dim, value_dim)
    q, k, v = (F.pad(t, (0, widest - t.shape[3])) if t.shape[3] < widest else t for t in (q, k, v))
    return _run_in_order(q, k, v, scale)[..., :value_dim]


def with_sink_key(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v with one more key in front, without a value, whose score in every row is its head's sink.

    The key is 1 in dimensions that are 0 in all others; there queries have sink / scale, as a sum of terms, because the
    type of q rounds one of them too much.
    """
    most = torch.finfo(q.dtype).max
    rest = (sinks.to(torch.float64) / scale).clamp(-most, most)
    terms: list[Tensor] = []
    for _ in range(SINK_TERMS):
        terms.append(rest.to(q.dtype))
        rest = rest - terms[-1]
    added = torch.stack(terms, -1)[None, :, None].expand(*q.shape[:3], -1)
    key = F.pad(k.new_ones(*k.shape[:2], 1, SINK_TERMS), (k.shape[3], 0))
    keys = torch.cat([key, F.pad(k, (0, SINK_TERMS))], 2)
    return torch.cat([q, added], 3), keys, F.pad(v, (0, 0, 1, 0))


def _run_in_order(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Run SDPA with its backends in the order of `FASTEST_FIRST`, or from the preferred one on.

    `sdpa_kernel` takes 16 us of the host, as long as a short call takes the GPU. So where all backends are enabled, as
    they are by default, only their order is set, and where it is this one anyway nothing is.
    """
    if torch.compiler.is_compiling():
        with _enable_backends(get_preferred_backend()):
            return _call_sdpa(q, k, v, scale)
    on_gpu = q.is_cuda
    if on_gpu:
        _settle_default_order(q.device)
    preferred, order = get_preferred_backend(), torch._C._get_sdp_priority_order()
    all_enabled = (  # nobody disabled a backend of SDPA's; those are enabled for dense attention all the same
        torch._C._get_cudnn_sdp_enabled()
        and torch._C._get_flash_sdp_enabled()
        and torch._C._get_mem_efficient_sdp_enabled()
        and torch._C._get_math_sdp_enabled()
    )
    if preferred is not None or not all_enabled:
        try:
            with _enable_backends(preferred):
                return _call_sdpa(q, k, v, scale)
        finally:  # torch puts those that were disabled last
            torch._C._set_sdp_priority_order(order)
    if not on_gpu or order[: len(ORDER)] == ORDER:  # on a CPU there is no order
        return _call_sdpa(q, k, v, scale)
    torch._C._set_sdp_priority_order([*ORDER, *(backend for backend in order if backend not in ORDER)])
    try:
        return _call_sdpa(q, k, v, scale)
    finally:
        torch._C._set_sdp_priority_order(order)


def _enable_backends(preferred: SDPBackend | None) -> AbstractContextManager[object]:
    """Enable the backends of `FASTEST_FIRST` in their order, from this one on."""
    first = 0 if preferred is None else FASTEST_FIRST.index(preferred)
    context: AbstractContextManager[object] = sdpa_kernel(FASTEST_FIRST[first:], set_priority=True)
    return context


def _call_sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Call SDPA with the mask that the shapes ask for."""
    queries, keys = q.shape[2], k.shape[2]
    grouped = q.shape[1] != k.shape[1]
    if queries == keys:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    if queries == 1:
        return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=grouped)
    from torch.nn.attention.bias import causal_lower_right  # brings in torch.compile, nearly a second

    mask = causal_lower_right(queries, keys)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


@lru_cache(maxsize=8)
def _settle_default_order(device: torch.device) -> None:
    """Make torch pick its default order of SDPA backends, which it does at the first plain call.

    `sdpa_kernel(set_priority=True)` before that would restore an order that has cuDNN last, and slow down all dense
    attention of the process from then on.
    """
    q = torch.zeros(1, 1, 16, 64, dtype=torch.float16, device=device)
    F.scaled_dot_product_attention(q, q, q)


def exact_attention(
    q: Tensor, k: Tensor, v: Tensor, *, kv_start: Tensor | None = None, **options: Unpack[ScoringOptions]
) -> Tensor:
    """Compute `dense_attention` in float32 (float64 for float64 inputs): the ground truth for errors.

    Memory grows with `EXACT_ROWS * Lk`, not with `Lq * Lk`.
    """
    shape = call_shape(q, k, v, kv_start)
    scoring = Scoring(**options).checked(shape, q)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.zeros(*q.shape[:3], shape.value_dim, dtype=dtype, device=q.device)
    for h, rows, last, scores in _iterate_scores(q, k, scoring, kv_start, shape):
        values = v[:, h // shape.group, :last].to(dtype)
        sees_nothing = scores.amax(-1, keepdim=True) == float("-inf")
        weights = torch.where(sees_nothing, 0.0, scores.softmax(-1))
        out[:, h, rows] = weights[..., -last:] @ values
    return out


def log_sum_exp(q: Tensor, k: Tensor, *, kv_start: Tensor | None = None, **options: Unpack[ScoringOptions]) -> Tensor:
    """Compute the log-sum-exp of the scores that each row of `dense_attention` sees, its sink among them.

    It is float32 [B, Hq, Lq]; -inf for rows before `kv_start`.
    """
    shape = call_shape(q, k, k, kv_start)
    scoring = Scoring(**options).checked(shape, q)
    out = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for h, rows, _, scores in _iterate_scores(q, k, scoring, kv_start, shape):
        out[:, h, rows] = scores.logsumexp(-1).to(out.dtype)
    return out


def _iterate_scores(
    q: Tensor, k: Tensor, scoring: Scoring, kv_start: Tensor | None, shape: CallShape
) -> Iterator[tuple[int, slice, int, Tensor]]:
    """Yield the scores of every head, `EXACT_ROWS` rows at a time, in float32 (float64 for float64 inputs).

    They are the query head; its rows; L, how many keys the last of them sees; and their scores [B, rows, L], those of
    hidden keys -inf. With sinks, each row's sink stands in front of them: [B, rows, 1 + L].
    """
    scale, softcap, sinks = scoring
    assert scale is not None
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    start = torch.zeros(shape.batch, dtype=torch.int64, device=q.device) if kv_start is None else kv_start
    key = torch.arange(shape.kv_len, device=q.device)
    for h in range(shape.query_heads):
        keys = k[:, h // shape.group].to(dtype)
        for begin in range(0, shape.q_len, EXACT_ROWS):
            rows = slice(begin, min(begin + EXACT_ROWS, shape.q_len))
            last = shape.offset + rows.stop
            position = torch.arange(shape.offset + begin, last, device=q.device)
            visible = (key[:last] <= position[:, None]) & (key[:last] >= start[:, None, None])
            products = (q[:, h, rows].to(dtype) * scale) @ keys[:, :last].transpose(1, 2)
            scores = cap_scores(products, softcap).masked_fill(~visible, float("-inf"))
            if sinks is not None:
                of_rows = torch.where(visible.any(-1, keepdim=True), sinks[h].to(dtype), float("-inf"))
                scores = torch.cat([of_rows, scores], -1)
            yield h, rows, last, scores
