"""Inputs and calls for the kernels on the device at hand: a GPU, or Triton's interpreter where there is none."""

import math
from functools import partial

import pytest
import torch

from s2o_runtime.call import Call, Scoring
from s2o_runtime.config import HeadConfig, LayerConfig, StopRule, TileConfig
from s2o_runtime.kernels.plan import LaunchPlan

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.bfloat16, torch.float16] if ON_GPU else [torch.float32, torch.float16]  # bf16 is wrong interpreted
DTYPE = DTYPES[0]

TILE = TileConfig(64, 32, 2, 4, 1)
HOPPER = TileConfig(64, 128, 2, 4, 2, specialized=True)
HOPPER_256 = TileConfig(64, 64, 2, 4, 2, specialized=True)
PLAIN = TileConfig(64, 64, 2, 4, 2) if ON_GPU else TILE
TILES = [
    pytest.param(tile, head_dim, id=f"{tile}-D{head_dim}".replace(" ", "-"))
    for tile, head_dim in (
        [(PLAIN, 128), (TileConfig(128, 32, 4, 8, 3), 64), (HOPPER, 128), (HOPPER, 64), (HOPPER_256, 256)]
        if ON_GPU
        else [(TILE, 64), (TileConfig(128, 64, 1, 8, 1), 64), (TileConfig(64, 128, 3, 4, 1), 128)]
    )
]
SHAPES = [  # batch, query heads, KV heads, queries, keys, first keys that count
    pytest.param(shape, id="B{}-H{}-KV{}-q{}-k{}-start{}".format(*shape).replace("-startNone", ""))
    for shape in (
        [(1, 4, 2, 1000, 1000, None), (2, 4, 2, 700, 1999, None), (3, 4, 2, 900, 900, [0, 333, 899])]
        + [
            (1, 8, 1, 7, 7, None),
            (1, 4, 4, 1, 1500, None),
            (2, 3, 1, 500, 1100, [1100, 650]),
            (1, 4, 2, 700, 9001, None),
            (1, 32, 8, 4096, 4096, None),
        ]
        if ON_GPU
        else [(1, 4, 2, 200, 200, None), (2, 4, 2, 100, 311, None), (3, 2, 1, 150, 150, [0, 67, 149])]
        + [(1, 3, 3, 257, 257, None), (1, 1, 1, 5, 5, None), (1, 1, 1, 1, 100, None), (2, 3, 1, 100, 171, [171, 33])]
    )
]


def inputs(batch, heads, kv_heads, q_len, kv_len, head_dim, dtype=DTYPE, device=DEVICE):
    """Random q, k and v [B, H, L, D]: clustered keys and drifting queries, so that a ranking has something to find."""
    generator = torch.Generator(device).manual_seed(q_len + kv_len + heads)
    normal = partial(torch.randn, generator=generator, device=device)
    topics = normal(16, head_dim)
    k = normal(batch, kv_heads, kv_len, head_dim) * 0.6 + topics[torch.arange(kv_len, device=device) // 7 % 16]
    q = normal(batch, heads, q_len, head_dim) * 0.6 + topics[torch.arange(q_len, device=device) // 256 % 16] * 0.8
    return q.to(dtype), k.to(dtype), normal(batch, kv_heads, kv_len, head_dim).to(dtype)


def drawn(shape, head_dim, dtype=DTYPE):
    """`inputs` of the sizes of a shape, and where its sequences start, its last entry: None, or a number for each."""
    *sizes, starts = shape
    return *inputs(*sizes, head_dim, dtype), starts_of(starts)


def starts_of(starts):
    """Return where sequences start, on the device."""
    return None if starts is None else torch.tensor(starts, device=DEVICE)


def mixed_config(heads, tau, stop_rule=StopRule.REST, tile=PLAIN, **layer):
    """Heads of four kinds in turn; segments of one and two times the rows of the tile, at least 64 and 128.

    The lookback is 64 unless it is given: the interpreter's prompts are short.
    """
    kinds = (
        HeadConfig(tau, tile.rows, stop_rule=stop_rule, representatives=16, tail="mean"),
        HeadConfig(tau / 2, 2 * tile.rows, stop_rule=stop_rule),
        HeadConfig(mode="dense"),
        HeadConfig(tau, 2 * tile.rows, stop_rule=stop_rule, representatives=16),
    )
    return LayerConfig(tuple(kinds[h % 4] for h in range(heads)), tile, **{"lookback": 64, **layer})


def call_of(q, k, v, config, kv_start=None, scale=None, lse=False, **features):
    """Return what the kernels are launched with for these tensors."""
    return Call.from_tensors(q, k, v, config, scoring=Scoring(scale, **features), kv_start=kv_start, with_lse=lse)


def prefix_of(call, b, h, n):
    """(first key that counts, first key of the window) of a segment."""
    start = 0 if call.kv_start is None else int(call.kv_start[b])
    begin = max(call.shape.offset + n * call.config.heads[h].segment - call.config.lookback, start)
    return start, begin - (begin - start) % call.config.tile.block_n


def agree(ours, expected, block_m, *, error=6e-3, lse_error=4e-3, apart=0.02, exact=None):
    """Hold (out, visited, lse) of a prefill against those of another one that visits the keys in the same order.

    In float32 only the order of sums differs: every row tile stops at the same chunk. In 16 bits weights and outputs
    are rounded, 2^-9 each, and a gain next to its threshold may fall to either side of it.

    Args:
        error, lse_error: of 16-bit outputs, relative to their norm, and of their log-sum-exps.
        apart: the share of row tiles of a 16-bit call that may stop elsewhere; the others' rows are compared.
        exact: compare as in float32; that of the output by default.
    """
    (out, visited, lse), (theirs, their_visited, their_lse) = ours, expected
    same = visited == their_visited
    assert out.dtype == theirs.dtype
    if (out.dtype == torch.float32) if exact is None else exact:
        assert same.all()
        torch.testing.assert_close(out, theirs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse, their_lse, rtol=1e-4, atol=1e-4)
        return
    assert int((~same).sum()) <= math.ceil(apart * same.numel())
    rows = same.repeat_interleave(block_m, 2)[:, :, : out.shape[2]]
    assert out.isfinite().all()
    assert relative_error(out[rows], theirs[rows].float()) <= error
    torch.testing.assert_close(lse[rows], their_lse[rows], rtol=0, atol=lse_error)


def relative_error(out, truth):
    """|out - truth| / |truth|"""
    return float((out.float() - truth).norm() / truth.norm().clamp_min(1e-6))


def count_replays(monkeypatch):
    """Collect, for every call that has a plan, whether the plan is used."""
    used, replay = [], LaunchPlan.replay

    def counted(plan, inputs):
        outputs = replay(plan, inputs)
        used.append(outputs is not None)
        return outputs

    monkeypatch.setattr(LaunchPlan, "replay", counted)
    return used
