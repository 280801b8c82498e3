"""Dense causal attention: the fallback, and (in float32) the ground truth."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from s2o_runtime.shapes import call_shape

FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
EXACT_ROWS = 1024  # rows computed together


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, kv_start: Tensor | None = None
) -> Tensor:
    """Causal attention through torch's SDPA, with the fastest of its backends that takes the call.

    Query i stands at position Lk - Lq + i.

    Args:
        q: [B, Hq, Lq, D], any floating type; k, v: [B, Hkv, Lk, D], like it.
        scale: multiplies the scores; D ** -0.5 by default.
        kv_start: int32 or int64 [B], the first key of each sequence that counts; reading it waits for the device.

    Returns:
        [B, Hq, Lq, D] in the type of q; rows before `kv_start` are zero.

    Raises:
        InputError: the tensors do not fit one another.
    """
    shape = call_shape(q, k, v, kv_start)
    if kv_start is None:
        return _causal(q, k, v, scale)
    out = torch.zeros_like(q)
    for b, start in enumerate(kv_start.tolist()):  # a left-padded sequence is a shorter sequence
        row = max(0, start - shape.offset)
        if row < shape.q_len:
            sequence = slice(b, b + 1)
            out[sequence, :, row:] = _causal(
                q[sequence, :, row:], k[sequence, :, start:], v[sequence, :, start:], scale
            )
    return out


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    if q.is_cuda:
        _settle_default_order(q.device)
    with sdpa_kernel(FASTEST_FIRST, set_priority=True):
        if q.shape[2] == k.shape[2]:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        if q.shape[2] == 1:
            return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=grouped)
        from torch.nn.attention.bias import causal_lower_right  # brings in torch.compile, nearly a second

        mask = causal_lower_right(q.shape[2], k.shape[2])
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
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, kv_start: Tensor | None = None
) -> Tensor:
    """`dense_attention` in float32 (float64 for float64 inputs): the ground truth that errors are measured against.

    Memory grows with `EXACT_ROWS * Lk`, not with `Lq * Lk`.

    Args:
        q, k, v, scale, kv_start: as for `dense_attention`.

    Returns:
        [B, Hq, Lq, D] in float32 or float64.

    Raises:
        InputError: the tensors do not fit one another.
    """
    shape = call_shape(q, k, v, kv_start)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = shape.head_dim**-0.5 if scale is None else scale
    start = torch.zeros(shape.batch, dtype=torch.int64, device=q.device) if kv_start is None else kv_start
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    key = torch.arange(shape.kv_len, device=q.device)
    for h in range(shape.query_heads):
        keys, values = (t[:, h // shape.group].to(dtype) for t in (k, v))
        for begin in range(0, shape.q_len, EXACT_ROWS):
            rows = q[:, h, begin : begin + EXACT_ROWS].to(dtype) * scale
            last = shape.offset + begin + rows.shape[1]
            position = torch.arange(last - rows.shape[1], last, device=q.device)
            visible = (key[:last] <= position[:, None]) & (key[:last] >= start[:, None, None])
            scores = (rows @ keys[:, :last].transpose(1, 2)).masked_fill(~visible, float("-inf"))
            weights = torch.where(visible.any(-1, keepdim=True), scores.softmax(-1), 0.0)
            out[:, h, begin : begin + EXACT_ROWS] = weights @ values[:, :last]
    return out


def log_sum_exp(q: Tensor, k: Tensor, *, scale: float | None = None, kv_start: Tensor | None = None) -> Tensor:
    """The log-sum-exp of the scores that each row sees, in plain torch: SDPA does not return it.

    Args:
        q, k, scale, kv_start: as for `dense_attention`.

    Returns:
        float32 [B, Hq, Lq]; -inf for rows before `kv_start`.

    Raises:
        InputError: the tensors do not fit one another.
    """
    shape = call_shape(q, k, k, kv_start)
    scale = shape.head_dim**-0.5 if scale is None else scale
    start = torch.zeros(shape.batch, dtype=torch.int64, device=q.device) if kv_start is None else kv_start
    out = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    key = torch.arange(shape.kv_len, device=q.device)
    for h in range(shape.query_heads):
        keys = k[:, h // shape.group].float()
        for begin in range(0, shape.q_len, EXACT_ROWS):
            rows = q[:, h, begin : begin + EXACT_ROWS].float() * scale
            last = shape.offset + begin + rows.shape[1]
            position = torch.arange(last - rows.shape[1], last, device=q.device)
            visible = (key[:last] <= position[:, None]) & (key[:last] >= start[:, None, None])
            scores = (rows @ keys[:, :last].transpose(1, 2)).masked_fill(~visible, float("-inf"))
            out[:, h, begin : begin + EXACT_ROWS] = scores.logsumexp(-1)
    return out
