#!/usr/bin/env python3
"""What heads would cost with linear tails, and with an order by exact weights of every row, at the same error.

    python -m scripts.study.tails [--model demo] [--lengths 8192,32768] [--segments 1024,2048] [--layers 0,5]

Each layer's error is spent over its heads as the calibrator spends it (`calibrate.search.allocate`), on one prompt, and
costs are predicted, so that no GPU is needed: the share of dense attention's time, 1 where a layer would be dense.
"today" is S2O with 1 or 32 representatives, with or without a tail; "linear" lets heads have a linear tail too;
"two passes" is a floor: each row tile orders its keys by the exact weights of all its rows, which int8 scores of every
pair would give for a quarter of dense attention's time, and ordering and the tail are free. --errors prints what linear
tails in every head of a layer err by instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

import torch

from calibrate.curves import linear_pass
from calibrate.curves.costs import fixed_cost, linear_cost, overhead
from calibrate.curves.curves import Curve, Ranking, Shape
from calibrate.curves.passes import measure
from calibrate.model.capture import Captured
from calibrate.search.allocate import Allocation, Allowed, allocate
from s2o_runtime.errors import S2OError
from scripts.bench.common import (
    BAD_INPUT,
    OK,
    Parser,
    add_device,
    bench_parser,
    check_device,
    float_list,
    int_list,
    print_table,
)
from scripts.bench.inputs import model_qkv

NAME = "scripts.study.tails"
SHAPE = Shape(64, 512)
GRAIN = 4
REPRESENTATIVES = (1, 32)
ROW_TILE = 64  # whose rows have an order of their own in "two passes"
SCORING = 0.25  # of dense attention's time: scores are half of its products, and int8 is twice as fast
WORST_ROWS = 0.7
WAYS = ("today", "linear", "two passes")


class Outcome(NamedTuple):
    """One way at one budget in one layer.

    cost: over dense attention's time, predicted; density: the share of pairs that is computed; linear: how many heads
    have linear tails.
    """

    cost: float
    density: float
    linear: int

    @classmethod
    def of(cls, allocation: Allocation) -> Outcome:
        if allocation.cost >= 1.0:
            return cls(1.0, 1.0, 0)
        return cls(allocation.cost, allocation.density, sum(head.linear for head in allocation.heads))


def parser() -> Parser:
    out, add = bench_parser(NAME, __doc__)
    add("--model", "demo", "an alias, a local folder, or a hub id", metavar="NAME")
    add("--lengths", "8192", type=int_list("8192,32768"), metavar="N,N")
    add("--segments", "512,1024,2048", "the cheapest one counts for each layer", type=int_list("1024"), metavar="N,N")
    add("--budgets", "1e-3,1e-2", "rel_mse of a layer", type=float_list("1e-3"), metavar="X,X")
    add("--layers", None, "layers of full attention, all by default", type=int_list("0,5"), metavar="N,N")
    out.add_argument("--errors", action="store_true", help="the rel_mse of linear tails in every head alone")
    add("--seed", 1234, type=int, metavar="N")
    add_device(add)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        check_device(args)
        for length in args.lengths:
            (errors if args.errors else study)(args, length)
    except S2OError as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return BAD_INPUT
    return OK


@torch.no_grad()
def study(args: argparse.Namespace, length: int) -> None:
    """Print a table of one length: a row for each layer, and their means."""
    names = [f"{way} {budget:g}" for budget in args.budgets for way in WAYS]
    rows: list[dict[str, Outcome]] = []
    cells = []
    for layer, prompt in layers_of(args, length):
        rows.append(outcomes(prompt, args.segments, args.budgets))
        cells.append([str(layer), *(shown(rows[-1][name]) for name in names)])
        print(" ".join(cells[-1]), file=sys.stderr, flush=True)
    cells.append(["mean", *(shown(mean([row[name] for row in rows])) for name in names)])
    title = f"{args.model}, {length} tokens: cost over dense attention's, predicted (density; heads with linear tails)"
    print_table(title, ["layer", *names], cells)


@torch.no_grad()
def errors(args: argparse.Namespace, length: int) -> None:
    """Print a table of one length: a row for each layer, with the error and the density at each segment."""
    segments = [segment for segment in args.segments if segment < length]
    cells = []
    for layer, prompt in layers_of(args, length):
        row = []
        for segment in segments:
            (curve,) = linear_pass.measure(prompt, [Ranking(segment, grain=GRAIN, linear=True)], [SHAPE]).values()
            row.append(f"{float(curve.mse.mean()) / curve.dense_power:.1e} ({float(curve.density.mean()):.3f})")
        cells.append([str(layer), *row])
    title = f"{args.model}, {length} tokens: rel_mse of linear tails in every head (density)"
    print_table(title, ["layer", *(f"segments of {segment}" for segment in segments)], cells)


def layers_of(args: argparse.Namespace, length: int) -> Iterator[tuple[int, Captured]]:
    """The layers that --layers names and their inputs."""
    for layer, qkv in enumerate(model_qkv(args.model, length, 1, args.seed, torch.device(args.device))):
        if args.layers is None or layer in args.layers:
            yield layer, Captured(*qkv, scale=qkv[0].shape[3] ** -0.5)
        if args.layers is not None and layer == args.layers[-1]:
            return  # further layers need not run


def mean(layers: Sequence[Outcome]) -> Outcome:
    """Of costs and densities the mean, of heads the number."""
    costs, densities, heads = zip(*layers, strict=True)
    return Outcome(fmean(costs), fmean(densities), sum(heads))


def shown(outcome: Outcome) -> str:
    linear = f"; {outcome.linear}" if outcome.linear else ""
    return f"{outcome.cost:.3f} ({outcome.density:.3f}{linear})"


def outcomes(prompt: Captured, segments: Sequence[int], budgets: Sequence[float]) -> dict[str, Outcome]:
    """Every way at every budget in one layer, with the segment at which it is cheapest."""
    best: dict[str, Outcome] = {}
    for way, curves in ways(prompt, segments):
        tails = (True,) if way == "two passes" else (False, True)
        power = next(iter(curves.values())).dense_power
        for budget in budgets:
            name = f"{way} {budget:g}"
            found = Outcome.of(allocate(curves, budget * power, Allowed(tails, WORST_ROWS)))
            best[name] = min(best.get(name, found), found)
    return best


def ways(prompt: Captured, segments: Sequence[int]) -> Iterator[tuple[str, Mapping[Ranking, Curve]]]:
    """The curves that heads choose among, for every way and, where it has one, every segment."""
    length = prompt.q.shape[2]
    for segment in segments:
        if segment < length:
            rankings = [Ranking(segment, count, GRAIN) for count in REPRESENTATIVES]
            today = measure(prompt, rankings, [SHAPE])
            linear = linear_pass.measure(prompt, [Ranking(segment, grain=GRAIN, linear=True)], [SHAPE])
            yield "today", _methods(today, length)
            yield "linear", _methods(today | linear, length)
    exact = Ranking(ROW_TILE, ROW_TILE, GRAIN)
    curve = measure(prompt, [exact], [SHAPE])[exact, SHAPE]
    yield "two passes", {exact: replace(curve, fixed_cost=SCORING - overhead(exact, tail=True))}


def _methods(curves: Mapping[tuple[Ranking, Shape], Curve], length: int) -> dict[Ranking, Curve]:
    return {
        ranking: replace(curve, fixed_cost=fixed_cost(length) + linear_cost(length) * ranking.linear)
        for (ranking, _), curve in curves.items()
    }


if __name__ == "__main__":
    sys.exit(main())
