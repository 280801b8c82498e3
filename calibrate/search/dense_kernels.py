"""Dense attention behind a prefix by the fastest kernels, which S2O is timed against."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from s2o_runtime.reference.dense import dense_attention, use_sdpa_backend

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
AttentionPart = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]


def list_dense_kernels(device: torch.device) -> list[Attention]:
    """Return dense causal attention by each kernel that is here: of cuDNN, FlashAttention 2 and 3, in this order.

    Shapes are as in `s2o_attention`. They take queries behind a prefix too. A CPU has torch's alone.
    """
    if device.type != "cuda":
        return [dense_attention]
    return [cudnn_attention, flash_attention, *[flash_attention_3] * bool(find_spec("flash_attn_interface"))]


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute dense causal attention with FlashAttention-2, through SDPA, which splits long keys of few queries."""
    with use_sdpa_backend(SDPBackend.FLASH_ATTENTION):
        return dense_attention(q, k, v)


def flash_attention_3(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute dense causal attention with FlashAttention-3, whose mask ends at the last key as S2O's does."""
    package = import_module("flash_attn_interface")
    answer = package.flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=True)
    out: Tensor = answer[0] if isinstance(answer, tuple) else answer  # by version, with the log-sum-exp
    return out.transpose(1, 2)


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute dense causal attention with cuDNN, behind a prefix in parts that keep all multiprocessors busy."""
    (batch, heads, queries, _), prefix = q.shape, k.shape[2] - q.shape[2]
    if not prefix:
        return dense_attention(q, k, v)
    programs = batch * heads * -(-queries // 128)
    busy = torch.cuda.get_device_properties(q.device).multi_processor_count // programs
    return attend_in_parts(q, k, v, math.gcd(prefix, 1 << busy.bit_length()), run_cudnn)


def run_cudnn(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Run cuDNN and no other kernel: the output, and the log-sum-exp of each row in float32."""
    out, log_sum, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal, False)
    return out, log_sum


def attend_in_parts(q: Tensor, k: Tensor, v: Tensor, parts: int, run: AttentionPart) -> Tensor:
    """Compute dense causal attention behind a prefix by a kernel whose causal mask begins at the first key.

    The prefix, which all queries see, and their own keys are calls of their own, joined by the log-sum-exps. `parts`
    divides the prefix; its parts are a batch of one call.
    """
    batch, queries = len(q), q.shape[2]
    prefix = k.shape[2] - queries
    outs, log_sums = run(q, k[:, :, prefix:], v[:, :, prefix:], True)
    keys, values = (
        t[:, :, :prefix].reshape(batch, -1, parts, prefix // parts, t.shape[3]).transpose(1, 2).flatten(0, 1)
        for t in (k, v)
    )
    others = run(q.repeat_interleave(parts, 0), keys, values, False)
    of_prefix, their_sums = (t.reshape(batch, parts, *q.shape[1:3], -1) for t in others)
    outs = torch.cat([outs[:, None], of_prefix], 1)
    weights = torch.cat([log_sums.reshape(batch, 1, *q.shape[1:3], 1), their_sums], 1).softmax(1)
    return (weights * outs).sum(1).to(q.dtype)
