"""Tensors laid out otherwise: sequences packed one behind another, and views of what transformers hands over."""

import itertools

import torch

from support.kernels import DEVICE, inputs


def pack(q_lens, k_lens, heads, kv_heads, head_dim):
    """(parts, (q, k, v, cu_q, cu_k)): sequences on their own, without the empty ones, and packed."""
    parts = [inputs(1, heads, kv_heads, n, m, head_dim) for n, m in zip(q_lens, k_lens, strict=True) if n]
    tensors = [torch.cat([part[i][0].transpose(0, 1) for part in parts]) for i in range(3)]
    return parts, (*tensors, *(edges_of(lengths) for lengths in (q_lens, k_lens)))


def edges_of(lengths):
    """Return where packed sequences of these lengths begin and end."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)


def unpacked(parts, out):
    """The output [Hq, L, D] of each part, of a packed output [T, Hq, D]; its log-sum-exp, likewise, of one [Hq, T]."""
    return (out.transpose(0, 1) if out.ndim == 3 else out).split([part[0].shape[2] for part in parts], 1)


def as_transformers(*tensors):
    """The same tensors [B, H, L, D] as views of [B, L, H, D], as transformers hands them over."""
    return [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
