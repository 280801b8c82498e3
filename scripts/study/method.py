#!/usr/bin/env python3
"""What each extension of the paper's method is worth on a model.

    python -m scripts.study.method [--model demo] [--lengths 8192,32768,131072] [--out FILE.json]

Every variant of the method runs over a grid of taus, on one prompt of each length, in every layer. The tables say
what density each variant needs for the same error, and how far the error of one tau drifts over the lengths and over
the keys of a tile. How many needles a variant finds is measured by s2o-eval --tasks multi --setting TEXT.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.config import LayerConfig, RowReduce, TileConfig
from scripts.bench.attention import parse_tile
from scripts.bench.calls import device_tile
from scripts.bench.common import (
    Parser,
    add_device,
    bench_parser,
    check_device,
    check_least,
    check_lengths,
    checked,
    float_list,
    int_list,
    machine,
    print_table,
    run_command,
)
from scripts.bench.inputs import Inputs, model_qkv
from scripts.bench.schema import MethodStudyFile, VariantCurve, write
from scripts.study.curves import densities_at, drift_over_lengths, drift_over_tiles, nearest_drift

NAME = "scripts.study.method"
TARGETS = (1e-2, 1e-3, 1e-4)  # rel_mse at which densities are compared
DRIFT_TARGET = 1e-3  # rel_mse near which one tau's drift is printed
PAPER_TAUS, OTHER_TAUS = (1e-6, 10**1.5), (1e-3, 1e3)  # ends of the grids; the paper's tau must fall as prompts grow
CHECKED = ("paper", "rest", "all")  # variants that also run with other tiles
CHECKED_KEYS = (32, 64)  # keys of a tile (BN) there


@dataclass(frozen=True)
class Variant:
    """A form of S2O; the fields are those of HeadConfig and LayerConfig."""

    stop_rule: Literal["rest", "share", "raw"] = "rest"
    representatives: int = 1
    tail: bool = False
    grain: int = 1
    row_reduce: RowReduce = "mean"

    def config(self, heads: int, tau: float, segment: int, tile: TileConfig) -> LayerConfig:
        return LayerConfig.uniform(heads, tau=tau, segment=segment, tile=tile, **asdict(self))

    def taus(self, per_decade: int) -> tuple[float, ...]:
        """The grid, ascending; both ends belong to it."""
        low, high = (math.log10(end) for end in (PAPER_TAUS if self.stop_rule == "raw" else OTHER_TAUS))
        steps = round((high - low) * per_decade)
        return tuple(float(f"{10 ** (low + (high - low) * step / steps):.4g}") for step in range(steps + 1))


VARIANTS = {
    "paper": Variant(stop_rule="raw", row_reduce="max"),
    "share": Variant(stop_rule="share"),
    "rest": Variant(),
    "+r": Variant(representatives=32),
    "+tail": Variant(tail=True),
    "all": Variant(representatives=32, tail=True),
    "all, grain 4": Variant(representatives=32, tail=True, grain=4),
}


def parser() -> Parser:
    out, add = bench_parser(NAME, __doc__)
    add("--model", "demo", "an alias, a local folder, or a hub id", metavar="NAME")
    add("--lengths", "8192,32768,131072", type=int_list("8192,32768"), metavar="N,N")
    add("--variants", list(VARIANTS), nargs="+", choices=VARIANTS, metavar="NAME")
    add("--per-decade", 2, "taus in a decade of the grids", type=int, metavar="N")
    out.add_argument("--taus", type=float_list("1e-3,1,1e3"), metavar="X,X", help="these instead of the grids")
    add("--segment", 512, "queries that share a ranking", type=int, metavar="N")
    form = "BMxBNxCHUNK:WARPS:STAGES[:ws]"
    out.add_argument("--tile", type=checked(parse_tile, "128x64x4:8:3"), metavar=form, help="default by the GPU")
    add("--rows", 512, "query rows of a prompt where errors are measured", type=int, metavar="N")
    out.add_argument("--no-check", action="store_true", help="leave out other tiles")
    add("--seed", 0, "seed of the prompts and of the rows", type=int, metavar="N")
    add_device(add)
    add("--out", Path("build/study_method.json"), type=Path, metavar="FILE")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run_command(NAME, args.out, lambda: study(args), "shorter --lengths")


@torch.no_grad()
def study(args: argparse.Namespace) -> None:
    """Measure, print the tables, and write what there is so far to --out after each length."""
    check_device(args)
    check_least(args, 1, "per_decade", "rows")
    check_lengths(args, args.segment + 1)
    device = torch.device(args.device)
    args.variants = list(dict.fromkeys(args.variants))
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "tile")}
    curves: list[VariantCurve] = []
    for length in args.lengths:
        curves += measure(args, length, device)
        tile_name = curves[0].tile
        of_tile = [curve for curve in curves if curve.tile == tile_name]
        file = MethodStudyFile(
            model={"name": args.model},
            settings=settings,
            tile_name=tile_name,
            variants={name: asdict(VARIANTS[name]) for name in args.variants},
            curves=curves,
            density_at=densities_at(of_tile, TARGETS),
            drift=drift_over_lengths(of_tile),
            tiles=drift_over_tiles(curves),
            **machine(device),
        )
        write(args.out, file)
        print_densities(file, length)
    print_drift(file.drift, "length")
    print_drift(file.tiles, "tile")


def measure(args: argparse.Namespace, length: int, device: torch.device) -> list[VariantCurve]:
    """The curves of every variant and tile at one length; those of the main tile come first."""
    points: dict[tuple[str, TileConfig], list[tuple[Tensor, Tensor]]] = {}
    layers = model_qkv(args.model, length, 1, args.seed, device)
    for qkv in tqdm(layers, desc=f"{length} tokens", unit="layer", disable=not sys.stderr.isatty()):
        inputs = Inputs.of(qkv, args.rows, args.seed)
        heads, main = inputs.q.shape[1], args.tile or device_tile(inputs.q.shape[3], inputs.q.device)
        for name, tile in runs(args, length, main):
            configs = (VARIANTS[name].config(heads, tau, args.segment, tile) for tau in taus_of(args, name))
            of_taus = [measure_point(inputs, config) for config in configs]
            stacked = torch.stack([density for density, _ in of_taus]), torch.stack([error for _, error in of_taus])
            points.setdefault((name, tile), []).append(stacked)
    curves = []
    for (name, tile), of_layers in points.items():
        densities, errors = (rounded(torch.cat(tensors, 1)) for tensors in zip(*of_layers, strict=True))
        curves.append(VariantCurve(length, name, str(tile), list(taus_of(args, name)), densities, errors))
    return curves


def runs(args: argparse.Namespace, length: int, main: TileConfig) -> list[tuple[str, TileConfig]]:
    """The variants and tiles that run at a length; other tiles run at the shortest length only."""
    pairs = [(name, main) for name in args.variants]
    if args.no_check or length != args.lengths[0]:
        return pairs
    return pairs + [(name, tile) for name in args.variants if name in CHECKED for tile in other_tiles(main)]


def other_tiles(tile: TileConfig) -> list[TileConfig]:
    """Plain tiles that check their stop as often and for as many rows, with fewer keys in a tile."""
    plain = replace(tile, specialized=False, num_stages=2)
    tiles = (replace(plain, block_n=keys, chunk=tile.stride // keys) for keys in CHECKED_KEYS)
    return [other for other in tiles if other.block_n != tile.block_n and other.stride == tile.stride]


def taus_of(args: argparse.Namespace, name: str) -> tuple[float, ...]:
    return args.taus or VARIANTS[name].taus(args.per_decade)


def measure_point(inputs: Inputs, config: LayerConfig) -> tuple[Tensor, Tensor]:
    """Density and rel_mse of every head of a layer, float64 [Hq]."""
    backend: Literal["triton", "reference"] = "triton" if inputs.q.is_cuda else "reference"
    result = s2o_attention(inputs.q, inputs.k, inputs.v, config, backend=backend, return_stats=True)
    squared = (result.out[:, :, inputs.rows].float() - inputs.exact).square().mean((0, 2, 3))
    return result.density.double().cpu(), (squared / inputs.exact.square().mean((0, 2, 3))).double().cpu()


def rounded(numbers: Tensor) -> list[list[float]]:
    """Nested lists of numbers with five digits."""
    return [[float(f"{number:.5g}") for number in row] for row in numbers.tolist()]


def print_densities(file: MethodStudyFile, length: int) -> None:
    """The densities at equal error of one length."""
    rows = {(row["variant"], row["rel_mse"]): row for row in file.density_at if row["length"] == length}
    names = ("variant", *(f"rel_mse {target:.0e}" for target in TARGETS))
    title = f"{length} tokens, tile {file.tile_name}: mean density of all heads, its ratio to the paper's"
    title += "\n(!N: N heads never reach the error, _N: N are within it at the largest tau)"
    print_table(title, names, [(name, *(_density(rows[name, target]) for target in TARGETS)) for name in file.variants])


def _density(row: dict[str, Any]) -> str:
    text = f"{row['density']:.3f}" + (f" ({row['of_paper']:.2f}x)" if row["of_paper"] else "")
    return text + "".join(f" {mark}{row[name]}" for name, mark in (("unreached", "!"), ("lowest", "_")) if row[name])


def print_drift(drift: list[dict[str, Any]], over: str) -> None:
    """The drift of each variant's tau whose error is nearest to the target, if there is more than one point."""
    if not drift or len(drift[0]["at"]) < 2:
        return
    rows = []
    for name in dict.fromkeys(row["variant"] for row in drift):
        row = nearest_drift(drift, name, DRIFT_TARGET)
        errors = (f"{at['rel_mse']:.1e}" for at in row["at"])
        rows.append((name, f"{row['tau']:.2g}", *errors, f"{row['rel_mse_ratio']:.2f}", f"{row['density_ratio']:.2f}"))
    names = ("variant", "tau", *(str(at[over]) for at in drift[0]["at"]), "rel_mse ratio", "density ratio")
    print_table(f"rel_mse of one tau, that nearest to {DRIFT_TARGET:.0e}, by {over}", names, rows)


if __name__ == "__main__":
    sys.exit(main())
