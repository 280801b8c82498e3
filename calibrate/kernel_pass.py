"""The trace kernel's way to measure curves: one launch for a ranking and a tile height, all thresholds and strides."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
from torch import Tensor

from calibrate.capture import Captured
from calibrate.curves import TAUS, Curve, Method, Shape, head_norms, window_pairs, worst_of
from s2o_runtime.config import HEAD_DIMS, LayerConfig, TileConfig
from s2o_runtime.dense import dense_attention
from s2o_runtime.gpu import MIN_CAPABILITY, capability, padded_head_dim

FIRST_TRITON_FOR_SM_100 = 3, 9  # older ones fail to compile the kernel there


def supports(prompt: Captured) -> bool:
    """Whether the kernel can measure this prompt here."""
    if not prompt.q.is_cuda or prompt.q.dtype == torch.float32 or prompt.q.shape[3] > HEAD_DIMS[-1]:
        return False
    here = capability(prompt.q.device)
    return here >= MIN_CAPABILITY and compiles(here, triton.__version__)


def compiles(capability: tuple[int, int], triton_version: str) -> bool:
    """Whether this Triton can compile the kernel for such a GPU."""
    version = tuple(int(part) for part in triton_version.split(".")[:2])
    return capability[0] not in (10, 11) or version >= FIRST_TRITON_FOR_SM_100


def trace_tile(head_dim: int, capability: tuple[int, int], block_m: int, stride: int) -> TileConfig:
    """The tile that the trace kernel runs with for rows of `block_m` and checks every `stride` keys."""
    wide = capability[0] == 9 and head_dim <= 128
    block_n = 64 if wide else 32
    warps = 4 if wide and block_m == 64 else 8
    stages = 3 if block_m == 128 and head_dim <= 128 else 2
    return TileConfig(block_m, block_n, stride // block_n, warps, stages).validate()


@torch.no_grad()
def measure(prompt: Captured, methods: Sequence[Method], shapes: Sequence[Shape]) -> dict[tuple[Method, Shape], Curve]:
    """As plain_pass.measure, with the order that the kernels make."""
    dense = dense_attention(prompt.q, prompt.k, prompt.v, scale=prompt.scale)
    norms = head_norms(dense)
    curves: dict[tuple[Method, Shape], Curve] = {}
    for method in methods:
        for block_m in sorted({shape.block_m for shape in shapes}):
            curves |= traced(prompt, method, [s for s in shapes if s.block_m == block_m], dense, norms)
    return curves


def traced(
    prompt: Captured, method: Method, shapes: Sequence[Shape], dense: Tensor, norms: Tensor
) -> dict[tuple[Method, Shape], Curve]:
    """The curves of one ranking, for shapes of one height, whose strides are a power of 2 apart.

    dense: the dense output [1, Hq, L, D]; norms: its heads' mean squared row norms [Hq].
    """
    from s2o_runtime.attention import laid_out
    from s2o_runtime.kernels.call import Call, head_tables
    from s2o_runtime.kernels.trace import STRIDES, trace
    from s2o_runtime.shapes import call_shape

    heads, length, head_dim = prompt.q.shape[1:]
    padded = padded_head_dim(head_dim)
    first = min(shape.stride for shape in shapes)
    places = {shape.stride: (shape.stride // first).bit_length() - 1 for shape in shapes}
    assert all(first << place == stride for stride, place in places.items())
    assert max(places.values()) < STRIDES
    tile = trace_tile(head_dim, capability(prompt.q.device), shapes[0].block_m, first)
    config = LayerConfig.uniform(
        heads, segment=method.segment, representatives=method.representatives, tail=True, tile=tile, grain=method.grain
    )
    q, k, v, truth = (laid_out(each, padded) for each in (prompt.q, prompt.k, prompt.v, dense))
    call = Call(config, call_shape(q, k, v), prompt.scale, head_tables(config, q.device))
    sums = torch.zeros(3, STRIDES, heads, len(TAUS), dtype=torch.float64, device=q.device)
    worst = []
    for part in trace(q, k, v, truth, norms, _taus(q.device), call):
        edges = torch.arange(part.rows.start, part.rows.stop, tile.block_m, device=q.device)
        count = (part.rows.stop - edges).clamp_max(tile.block_m)[:, None]
        for total, each in zip(sums, (part.squared, part.tail_squared, part.visited * count), strict=True):
            total += each.double().sum(2)
        worst.append(torch.stack([part.worst, part.tail_worst]))
    row, tail_row = worst_of(torch.cat(worst, 3)).cpu()
    squared, tail_squared, visited = sums.cpu()
    density = (visited + window_pairs(length, method.segment, tile.block_n)) / (length * (length + 1) / 2)
    values, power = length * head_dim, float(norms.mean()) / head_dim
    return {
        (method, shape): Curve(
            squared[place] / values, tail_squared[place] / values, row[place], tail_row[place], density[place], power
        )
        for shape in shapes
        for place in (places[shape.stride],)
    }


@lru_cache(maxsize=8)
def _taus(device: torch.device) -> Tensor:
    return torch.tensor(TAUS, dtype=torch.float32, device=device)
