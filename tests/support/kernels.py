"""Inputs and calls for the kernels in Triton's interpreter."""

from functools import partial

import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder

from s2o_runtime.call import Call, Scoring
from s2o_runtime.config import KEY_BLOCK, HeadConfig, LayerConfig, StopRule, TileConfig
from s2o_runtime.kernels.keys import read_keys
from s2o_runtime.kernels.prefill import Ranker, run_prefill
from s2o_runtime.kernels.rank.order import BUCKETS
from s2o_runtime.kernels.tail import EDGES
from s2o_runtime.reference.attention import s2o_attention_reference
from s2o_runtime.reference.ranking import RankedPrefix

TILE = TileConfig(block_m=64, block_n=32, chunk=2, num_warps=4, num_stages=1)


def inputs(batch, heads, kv_heads, q_len, kv_len, head_dim, dtype=torch.float32):
    """Random q, k and v [B, H, L, D]; queries are longer than keys, so that the scores differ."""
    q = (torch.randn(batch, heads, q_len, head_dim) * 2).to(dtype)
    k, v = (torch.randn(batch, kv_heads, kv_len, head_dim).to(dtype) for _ in range(2))
    return q, k, v


def drawn(shape, dtype=torch.float32):
    """`inputs` of the sizes of a shape, and where its sequences start, its last entry: None, or a number for each."""
    *sizes, starts = shape
    return *inputs(*sizes, dtype), None if starts is None else torch.tensor(starts)


def call_of(q, k, v, config, kv_start=None, scale=0.125, lse=False, **features):
    """What the kernels are launched with for these tensors."""
    return Call.from_tensors(q, k, v, config, scoring=Scoring(scale, **features), kv_start=kv_start, with_lse=lse)


def kernel_ranking(call):
    """The ranking of a whole call by the kernels, and its tail sums."""
    return Ranker(call, read_keys(call)).rank(range(call.shape.q_len))


def mixed_config(heads, tau, stop_rule=StopRule.REST, tile=TILE):
    kinds = (
        HeadConfig(tau, 64, stop_rule=stop_rule, representatives=16, tail="mean"),
        HeadConfig(tau / 2, 128, stop_rule=stop_rule),
        HeadConfig(tau, 64, mode="dense"),
        HeadConfig(tau, 128, stop_rule=stop_rule, representatives=16),
    )
    return LayerConfig(tuple(kinds[h % 4] for h in range(heads)), tile)


def prefix_of(call, b, h, n):
    """(first key that counts, first key of the window) of a segment."""
    start = 0 if call.kv_start is None else int(call.kv_start[b])
    begin = max(call.shape.offset + n * call.config.heads[h].segment, start)
    return start, begin - (begin - start) % call.config.tile.block_n


def ranking_of(call, ranking, tail, b, h, n):
    """What the kernels made of a segment's ranking, as the reference wants it."""
    start, first = prefix_of(call, b, h, n)
    steps = (first - start) // KEY_BLOCK
    order = ranking.order[b, h, n, :steps].long()[:, None] + torch.arange(KEY_BLOCK)
    mass, values = torch.zeros(steps + 1), torch.zeros(steps + 1, call.shape.head_dim)
    if call.config.heads[h].tail == "mean":
        begins = [*tail.first[b, h, n, :: BUCKETS // EDGES].tolist(), steps]
        masses = torch.cat([tail.mass[b, h, n], torch.zeros(1)])
        sums = torch.cat([tail.values[b, h, n], torch.zeros(1, call.shape.head_dim)])
        for at in range(steps):  # between two edges the rest shrinks evenly
            edge = max(e for e in range(EDGES) if begins[e] <= at)
            share = (begins[edge + 1] - at) / (begins[edge + 1] - begins[edge])
            mass[at] = masses[edge + 1] + share * (masses[edge] - masses[edge + 1])
            values[at] = sums[edge + 1] + share * (sums[edge] - sums[edge + 1])
    return RankedPrefix(order.flatten(), mass, values, KEY_BLOCK)


def run_both(q, k, v, config, kv_start=None, scale=None, lse=True, **features):
    """The kernels, and the reference following the ranking that the kernels made."""
    call = call_of(q, k, v, config, kv_start, scale, lse, **features)
    ranking = None if config.is_dense else partial(ranking_of, call, *kernel_ranking(call))
    expected = s2o_attention_reference(q, k, v, config, kv_start=kv_start, scale=scale, ranking_of=ranking, **features)
    return run_prefill(call), expected


def agree(ours, expected, rtol=1e-4, atol=1e-5):
    out, visited, lse = ours
    torch.testing.assert_close(out, expected.out, rtol=rtol, atol=atol)
    if lse is not None:
        torch.testing.assert_close(lse, expected.lse, rtol=rtol, atol=10 * atol)
    assert torch.equal(visited, expected.visited)


def fuse_products(monkeypatch):
    """Make the interpreter round a float32 product and a sum or difference with it once, as compilers for GPUs do.

    LLVM and ptxas contract `a * b - c` into a fused multiply-add wherever they see it, also where the product is used
    elsewhere too; there it is rounded by itself.
    """
    multiply, add, subtract = (getattr(InterpreterBuilder, f"create_f{name}") for name in ("mul", "add", "sub"))

    def exact(handle):
        factors = handle.attr.get("factors") or (handle.data, np.ones_like(handle.data))
        return factors[0].astype(np.longdouble) * factors[1].astype(np.longdouble)

    def product(builder, lhs, rhs):
        result = multiply(builder, lhs, rhs)
        if result.data.dtype == np.float32:
            result.set_attr("factors", (lhs.data, rhs.data))
        return result

    def fused(unfused, operation):
        def combined(builder, lhs, rhs):
            result = unfused(builder, lhs, rhs)
            if lhs.attr.get("factors") or rhs.attr.get("factors"):
                result.data = operation(exact(lhs), exact(rhs)).astype(np.float32)
            return result

        return combined

    monkeypatch.setattr(InterpreterBuilder, "create_fmul", product)
    monkeypatch.setattr(InterpreterBuilder, "create_fadd", fused(add, np.add))
    monkeypatch.setattr(InterpreterBuilder, "create_fsub", fused(subtract, np.subtract))
