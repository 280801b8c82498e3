"""Inputs for the compiled kernels."""

import pytest
import torch

SHAPES = [
    pytest.param((1, 4, 2, 1000, 1000, 128, None), id="B1-H4-L1000-D128"),
    pytest.param((1, 2, 2, 2049, 2049, 64, None), id="B1-H2-L2049-D64"),
    pytest.param((1, 8, 1, 7, 7, 128, None), id="L7"),
    pytest.param((1, 1, 1, 1, 1500, 128, None), id="one-query"),
    pytest.param((2, 4, 2, 700, 1999, 128, None), id="q700-kv1999"),
    pytest.param((3, 4, 2, 900, 900, 64, [0, 333, 899]), id="left-padded"),
    pytest.param((2, 3, 1, 500, 1100, 128, [1100, 650]), id="padded-chunk"),
    pytest.param((1, 32, 8, 4096, 4096, 128, None), id="B1-H32-L4096-D128"),
]
SHAPES_256 = [
    pytest.param((1, 4, 1, 1333, 1333, 256, None), id="H4-L1333-D256"),
    pytest.param((2, 6, 2, 701, 1999, 256, None), id="q701-kv1999-D256"),
    pytest.param((3, 4, 2, 900, 900, 256, [0, 333, 899]), id="left-padded-D256"),
    pytest.param((1, 1, 1, 1, 1500, 256, None), id="one-query-D256"),
    pytest.param((1, 8, 2, 4097, 4097, 256, None), id="H8-L4097-D256"),
]


def inputs(batch, heads, kv_heads, q_len, kv_len, head_dim, dtype=torch.bfloat16):
    """Clustered keys and drifting queries, so that a ranking has something to find."""
    generator = torch.Generator("cuda").manual_seed(q_len + kv_len + heads)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    topics = normal(16, head_dim)
    k = normal(batch, kv_heads, kv_len, head_dim) * 0.6 + topics[torch.arange(kv_len, device="cuda") // 7 % 16]
    q = normal(batch, heads, q_len, head_dim) * 0.6 + topics[torch.arange(q_len, device="cuda") // 256 % 16] * 0.8
    v = normal(batch, kv_heads, kv_len, head_dim)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def drawn(shape, dtype=torch.bfloat16):
    """`inputs` of the sizes of a shape, and where its sequences start, its last entry: None, or a number for each."""
    *sizes, starts = shape
    return *inputs(*sizes, dtype), starts_of(starts)


def starts_of(starts):
    """Where sequences start, on the GPU."""
    return None if starts is None else torch.tensor(starts, device="cuda")


def laid_out(length, heads=8, kv_heads=2, batch=1, seed=0):
    """q, k and v of 128 dimensions in bf16, laid out as transformers hands them over."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.randn(batch, length, n, 128, generator=generator, device="cuda").bfloat16().transpose(1, 2)
        for n in (heads, kv_heads, kv_heads)
    ]


def relative_error(out, truth):
    """|out - truth| / |truth|"""
    return float((out.float() - truth).norm() / truth.norm().clamp_min(1e-6))
