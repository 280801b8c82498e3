"""Error and density of a head at every threshold, and what its ranking costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from s2o_runtime.config import KEY_BLOCK, LOOKBACK, Tail, TileConfig

TAUS = tuple(float(f"{10.0 ** (exponent / 5):.4g}") for exponent in range(-15, 16))  # 1e-3 .. 1e3, five a decade


@lru_cache(maxsize=8)
def place_taus(device: torch.device) -> Tensor:
    """Return `TAUS` as float32 on a device."""
    return torch.tensor(TAUS, dtype=torch.float32, device=device)


@dataclass(frozen=True)
class RankingConfig:
    """Settings that decide the order in which a head visits its keys; fields of HeadConfig and LayerConfig."""

    segment: int
    representatives: int = 1
    lookback: int = LOOKBACK


@dataclass(frozen=True)
class Shape:
    """The part of a tile that decides, beside tau, where a head stops."""

    block_m: int  # rows, which stop together
    stride: int  # keys between two stop checks

    @classmethod
    def from_tile(cls, tile: TileConfig) -> Shape:
        """Return the shape of a tile."""
        return cls(tile.block_m, tile.stride)


@dataclass(frozen=True)
class Curve:
    """Errors and density of every head at every threshold of `TAUS`, float64 [Hq, len(TAUS)].

    Thresholds are those of the stop rule "rest", and a tile's gain is the mean over its rows. The tail does not change
    where a head stops, so one density belongs to both errors.

    Attributes:
        mse, tail_mse: mean squared error without and with a tail.
        worst, tail_worst: `select_worst`, over row tiles, of the largest of a tile's `compute_row_errors`.
        density: computed query-key pairs over causal pairs.
        dense_power: mean square of the layer's dense output.
        fixed_cost: time of its ranking at this length beside `overhead`, over a head's dense time.
    """

    mse: Tensor
    tail_mse: Tensor
    worst: Tensor
    tail_worst: Tensor
    density: Tensor
    dense_power: float
    fixed_cost: float = 0.0

    def errors(self, tail: Tail) -> tuple[Tensor, Tensor]:
        """Return the mean squared error and the worst-row error with this `HeadConfig.tail`."""
        return (self.mse, self.worst) if tail == "none" else (self.tail_mse, self.tail_worst)

    def stacked(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return errors and density in the order of the fields, in this type: [5, Hq, len(TAUS)]."""
        return torch.stack([self.mse, self.tail_mse, self.worst, self.tail_worst, self.density]).to(dtype)


Curves = Mapping[tuple[RankingConfig, Shape], Curve]  # of one layer at one length


def select_rankings(curves: Curves, segment: int, shape: Shape, lookback: int = LOOKBACK) -> dict[RankingConfig, Curve]:
    """Return the curves that heads choose among once segment, tile shape and lookback are fixed.

    A lookback that was not measured has the curves of the next shorter one: its layer errs less.
    """
    alike = {
        ranking: curve
        for (ranking, curve_shape), curve in curves.items()
        if (ranking.segment, curve_shape) == (segment, shape)
    }
    nearest = max((ranking.lookback for ranking in alike if ranking.lookback <= lookback), default=None)
    return {ranking: curve for ranking, curve in alike.items() if ranking.lookback == nearest}


def combine_curves(curves: Sequence[Curve]) -> Curve:
    """Return the curve of several prompts: mean densities, powers and errors, and the largest worst-row errors."""
    stacked = torch.stack([curve.stacked(torch.float64) for curve in curves])
    # plus one standard deviation, so that heads whose error depends on the prompt keep to their budget on others
    mse, tail_mse = stacked[:, :2].mean(0) + stacked[:, :2].std(0, correction=0)
    worst, tail_worst = stacked[:, 2:4].amax(0)
    power = sum(curve.dense_power for curve in curves) / len(curves)
    return Curve(mse, tail_mse, worst, tail_worst, stacked[:, 4].mean(0), power)


def dense_power(curves_of_layer: Mapping[Any, Curve]) -> float:
    """Return the mean square of a layer's dense output, which all its curves name."""
    return next(iter(curves_of_layer.values())).dense_power


def compute_head_norms(dense: Tensor) -> Tensor:
    """Return the mean squared norm of each head's rows, float32 [Hq], of a dense output [1, Hq, L, D]."""
    return torch.stack([head.float().square().sum(-1).mean() for head in dense[0]])


def count_pairs(row: int, length: int) -> int:
    """Return the number of causal pairs of a head's rows from this one on."""
    return (length * (length + 1) - row * (row + 1)) // 2


def count_window_pairs(rows: range, ranking: RankingConfig, step: int) -> int:
    """Return the causal pairs in windows of whole segments of rows, which begin at multiples of `step` keys."""
    total = 0
    for begin in range(rows.start, rows.stop, ranking.segment):
        size = min(ranking.segment, rows.stop - begin)
        total += size * (size + 1) // 2 + size * (begin - find_prefix_end(begin, ranking, step))
    return total


def find_prefix_end(begin: int, ranking: RankingConfig, step: int) -> int:
    """Return `sequences.find_window_start` of the segment at `begin` in a prompt, with tiles of `step` keys."""
    return max(begin - ranking.lookback, 0) // step * step


def pack(curves: Curves, dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    """Return curves as a journal keeps them: JSON that holds tensors of this type."""
    return [
        {
            "power": curve.dense_power,
            "curve": curve.stacked(dtype),
            "ranking": astuple(ranking),
            "shape": astuple(shape),
        }
        for (ranking, shape), curve in curves.items()
    ]


def unpack(entries: Sequence[Mapping[str, Any]], cost: float = 0.0) -> Curves:
    """Return the curves that `pack` packed. cost: their `Curve.fixed_cost`, which a journal keeps apart."""
    curves = {}
    for entry in entries:
        mse, tail_mse, worst, tail_worst, density = entry["curve"].double()
        power = float(entry["power"])
        key = RankingConfig(*entry["ranking"]), Shape(*entry["shape"])
        curves[key] = Curve(mse, tail_mse, worst, tail_worst, density, power, cost)
    return curves


# Measured on an H200 at 131072 tokens (docs/results/ranking-h200.txt).
READING = 0.003  # reading queries and keys and writing scores once for every 1024 queries
SCORING_RATE = 0.75  # of dense attention's rate at matrix products: scoring reads each key for few rows
ORDER = 0.017  # ordering a prefix for every 1024 queries, key by key
UNIT_SEGMENT = 1024
TAIL = 24.0  # summing the values once for every segment, as if that many queries attended to them

# Measured on an H200 for 32 heads: "selecting" of S2O with one tau, less `overhead`, in docs/results, of
# bench-methods-rivals-8k-h200.json (10% of dense attention's time) and bench-methods-rivals-32k-h200.json (2.4%). At
# 131072 tokens they then give 1.6%, where bench-methods-rivals-128k-h200.json has 1.3% for 8 heads: the shares of
# `overhead`, which are nearly all of it there, are of older kernels.
LINEAR = 225.0  # tokens
QUADRATIC = 2036.0  # tokens
RECORDED = 8192  # the shortest length that these are from: shorter ones are taken to have its share


def estimate_overhead(ranking: RankingConfig, tail: Tail) -> float:
    """Return the time of a head's ranking, and of its tail if it has one, over the head's dense time."""
    scoring = ranking.representatives / (2 * ranking.segment) / SCORING_RATE  # q k only, half of dense's products
    passes = (READING + ORDER / KEY_BLOCK) * UNIT_SEGMENT / ranking.segment
    sums = TAIL / (ranking.segment * KEY_BLOCK) if tail == "mean" else 0.0
    return scoring + passes + sums


def fixed_cost(length: int) -> float:
    """Estimate the time of ranking beside `overhead` at this length, in tokens, over a head's dense time."""
    tokens = max(length, RECORDED)
    return LINEAR / tokens + (QUADRATIC / tokens) ** 2


WORST = 0.99  # the quantile of the errors, of rows or of row tiles, that stands for the worst rows


def compute_row_errors(out: Tensor, truth: Tensor) -> Tensor:
    """Return the relative error of every row of outputs [B, H, L, D], |out - truth| / |truth|, float32 [B, H, L].

    Where the root mean square of |truth| in the head is larger than a row's own norm, it is the divisor, so that a row
    whose values cancel out is not taken for a bad one.
    """
    truth = truth.float()
    return compute_relative_errors((out.float() - truth).square().sum(-1), truth.square().sum(-1))


def compute_relative_errors(squared: Tensor, power: Tensor) -> Tensor:
    """Return `compute_row_errors` from each row's squared error and squared norm of the truth, float32 [..., L]."""
    scale = power.maximum(power.mean(-1, keepdim=True)).clamp(min=1e-30)
    return (squared / scale).sqrt()


def select_worst(errors: Tensor, dim: int = -1) -> Tensor:
    """Return the `WORST` quantile of errors along `dim` by the nearest rank, float64 without that dimension.

    It is one of the errors, so a root may be taken after it. NaN counts as the largest.
    """
    count = errors.shape[dim]
    rank = min(count, int(WORST * (count - 1) + 0.5) + 1)  # kthvalue counts from 1
    return errors.kthvalue(rank, dim).values.double()


def tile_worst(errors: Tensor, block: int = 64) -> Tensor:
    """Return the largest of each `block` adjacent row errors: [..., L] -> [..., ceil(L / block)]."""
    padded = F.pad(errors, (0, -errors.shape[-1] % block))
    return padded.view(*padded.shape[:-1], -1, block).amax(-1)
