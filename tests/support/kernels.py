"""Inputs and calls for the kernels in Triton's interpreter."""

import torch

from s2o_runtime.kernels.call import Call, head_tables
from s2o_runtime.shapes import call_shape


def inputs(batch, heads, kv_heads, q_len, kv_len, head_dim, dtype=torch.float32):
    """Random q, k and v [B, H, L, D]; queries are longer than keys, so that the scores differ."""
    q = (torch.randn(batch, heads, q_len, head_dim) * 2).to(dtype)
    k, v = (torch.randn(batch, kv_heads, kv_len, head_dim).to(dtype) for _ in range(2))
    return q, k, v


def call_of(q, k, config, kv_start=None, scale=0.125):
    """What the kernels are launched with for these tensors."""
    return Call(config, call_shape(q, k, k, kv_start), scale, head_tables(config, q.device), kv_start)
