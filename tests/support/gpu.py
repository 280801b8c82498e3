"""Inputs for the compiled kernels."""

import torch


def inputs(batch, heads, kv_heads, q_len, kv_len, head_dim, dtype):
    """Clustered keys and drifting queries, so that a ranking has something to find."""
    generator = torch.Generator("cuda").manual_seed(q_len + kv_len + heads)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    topics = normal(16, head_dim)
    k = normal(batch, kv_heads, kv_len, head_dim) * 0.6 + topics[torch.arange(kv_len, device="cuda") // 7 % 16]
    q = normal(batch, heads, q_len, head_dim) * 0.6 + topics[torch.arange(q_len, device="cuda") // 256 % 16] * 0.8
    v = normal(batch, kv_heads, kv_len, head_dim)
    return q.to(dtype), k.to(dtype), v.to(dtype)
