"""Measure curves with the trace kernel: one launch for a ranking and a tile height, all thresholds and strides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch
import triton
from torch import Tensor

from calibrate.curves.curves import (
    TAUS,
    Curve,
    Curves,
    RankingConfig,
    Shape,
    compute_head_norms,
    count_pairs,
    count_window_pairs,
    place_taus,
    select_worst,
)
from calibrate.model.layers import Captured
from calibrate.recipe import SAMPLED_ROWS
from s2o_runtime.call import Call
from s2o_runtime.config import HEAD_DIMS, LayerConfig, find_first_dense_row
from s2o_runtime.devices import get_capability
from s2o_runtime.sequences import lay_out
from s2o_runtime.tiles import MIN_CAPABILITY, make_trace_tile, pad_head_dim

WINDOW = 1024  # rows of a window of a sample, or one segment where that is longer
FIRST_TRITON_FOR_SM_100 = 3, 9  # older ones fail to compile the kernel there


def supports(prompt: Captured) -> bool:
    """Return True if the kernel can measure this prompt here."""
    if not prompt.q.is_cuda or prompt.q.dtype == torch.float32 or _get_head_dim(prompt) > HEAD_DIMS[-1]:
        return False
    here = get_capability(prompt.q.device)
    return here >= MIN_CAPABILITY and may_compile(here, triton.__version__)


def _get_head_dim(prompt: Captured) -> int:
    """Return the larger head dim of keys and values: the kernel pads both up to one that it is compiled for."""
    return max(prompt.q.shape[3], prompt.v.shape[3])


def may_compile(capability: tuple[int, int], triton_version: str) -> bool:
    """Return True if this Triton can compile the kernel for such a GPU."""
    version = tuple(int(part) for part in triton_version.split(".")[:2])
    return capability[0] not in (10, 11) or version >= FIRST_TRITON_FOR_SM_100


@torch.no_grad()
def measure(prompt: Captured, rankings: Sequence[RankingConfig], shapes: Sequence[Shape], last_rows: int = 0) -> Curves:
    """Measure as torch_pass.measure does, with the order that the kernels make."""
    dense = prompt.truth()
    norms = compute_head_norms(dense)
    curves: dict[tuple[RankingConfig, Shape], Curve] = {}
    for ranking in rankings:
        for block_m in sorted({shape.block_m for shape in shapes}):
            same_height = [shape for shape in shapes if shape.block_m == block_m]
            curves |= trace_ranking(prompt, ranking, same_height, dense, norms, last_rows)
    return curves


def trace_ranking(
    prompt: Captured, ranking: RankingConfig, shapes: Sequence[Shape], dense: Tensor, norms: Tensor, last_rows: int = 0
) -> Curves:
    """Measure the curves of one ranking, for shapes of one height, whose strides are a power of 2 apart.

    dense: the dense output [1, Hq, L, Dv]; norms: its `compute_head_norms`; last_rows: as in `torch_pass.measure`.
    """
    from s2o_runtime.kernels.trace import STRIDES, trace

    heads, length, value_dim = prompt.q.shape[1], *prompt.v.shape[2:]
    head_dim = _get_head_dim(prompt)
    padded = pad_head_dim(head_dim)
    first = min(shape.stride for shape in shapes)
    spacings = {shape.stride: (shape.stride // first).bit_length() - 1 for shape in shapes}
    assert all(first << spacing == stride for stride, spacing in spacings.items())
    assert max(spacings.values()) < STRIDES
    tile = make_trace_tile(head_dim, get_capability(prompt.q.device), shapes[0].block_m, first)
    config = LayerConfig.uniform(heads, tail="mean", tile=tile, **asdict(ranking))
    q, k, v, truth = (lay_out(tensor, padded) for tensor in (prompt.q, prompt.k, prompt.v, dense))
    sinks = None if prompt.sinks is None else prompt.sinks.contiguous()
    call = Call.from_tensors(q, k, v, config, scoring=prompt.scoring._replace(sinks=sinks))
    sums = torch.zeros(3, STRIDES, heads, len(TAUS), dtype=torch.float64, device=q.device)
    worst = []
    sample = sample_rows(length, ranking.segment, prompt.prompt)
    sparse = find_first_dense_row(length, last_rows, tile.block_m)
    for part in trace(call, truth, norms, place_taus(q.device), sample):
        edges = torch.arange(part.rows.start, part.rows.stop, tile.block_m, device=q.device)
        count = (part.rows.stop - edges).clamp_max(tile.block_m)[:, None]
        kept = (edges < sparse)[:, None]
        for total, per_tile in zip(sums, (part.squared, part.tail_squared, part.visited * count), strict=True):
            total += torch.where(kept, per_tile, 0).double().sum(2)
        worst.append(torch.where(kept, torch.stack([part.worst, part.tail_worst]), 0))
    row, tail_row = select_worst(torch.cat(worst, 3), -2).sqrt().cpu()
    squared, tail_squared, visited = sums.cpu()
    rows = [range(part.start, min(part.stop, sparse)) for part in sample or [range(length)] if part.start < sparse]
    windows = sum(count_window_pairs(part, ranking, tile.block_n) for part in rows)
    causal = sum(count_pairs(part.start, part.stop) for part in rows)
    sparse_pairs = (visited + windows) * (count_pairs(0, sparse) / max(causal, 1))
    density = (sparse_pairs + count_pairs(sparse, length)) / count_pairs(0, length)
    measured_rows = sum(map(len, rows))
    values = max(measured_rows, 1) * value_dim * (length / max(sparse, 1))
    power = float(norms.mean()) / value_dim
    return {
        (ranking, shape): Curve(squared[i] / values, tail_squared[i] / values, row[i], tail_row[i], density[i], power)
        for shape in shapes
        for i in (spacings[shape.stride],)
    }


def sample_rows(length: int, segment: int, number: int = 0) -> list[range] | None:
    """Choose windows of whole segments, evenly over a long prompt, to stand for all its rows; None for all rows.

    number: of the prompt; windows of the next prompt come next.
    """
    every = length // SAMPLED_ROWS
    if every < 2:
        return None
    window = segment * max(1, WINDOW // segment)
    begins = range((every // 2 + number) % every * window, length, every * window)
    return [range(begin, min(begin + window, length)) for begin in begins]
