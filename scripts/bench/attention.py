#!/usr/bin/env python3
"""S2O attention against cuDNN's dense attention on one device: time, density and error, as tables and JSON.

    python -m scripts.bench.attention [--lengths 8192,32768] [--out FILE.json]

At every length, the tau of each head is bisected until it computes the wanted share of the causal pairs.
Queries and keys are random. All times of a table come from one run on the same tensors, taking turns, each with a cold
L2. The rate is density x dense time / time: 1 means that a computed pair costs what it costs cuDNN.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import starmap

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from calibrate.tables import Table, open_console, print_table
from calibrate.timing import sample_times
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.config import MAX_TAU, LayerConfig
from s2o_runtime.errors import ConfigError
from s2o_runtime.reference.dense import FASTEST_FIRST, dense_attention
from scripts.bench import common
from scripts.bench.calls import Job, bisect, device_tile, kernel_parts, with_taus
from scripts.bench.inputs import SEED, Inputs, random_qkv, rel_mse
from scripts.bench.schema import AttentionEntry, AttentionFile, AttentionRow, DenseTime, RankTime, Spread, write


def parser() -> common.Parser:
    out, add = common.bench_parser("scripts.bench.attention", __doc__)
    add("--lengths", "8192,32768,131072", type=common.int_list("8192,32768"), metavar="N,N")
    add("--densities", "0.02,0.05,0.1,0.2,0.5", type=common.float_list("0.05,0.2"), metavar="X,X")
    heads = common.checked(lambda text: tuple(map(int, text.split("/"))), "32/8")
    add("--heads", "32/8", "query heads / KV heads", type=heads, metavar="N/N")
    add("--head-dim", 128, type=int, metavar="N")
    add("--dtype", "bfloat16", choices=("bfloat16", "float16", "float32"))
    add("--segment", 1024, "queries that share a ranking", type=int, metavar="N")
    add("--rounds", 7, "turns that are timed, after one that is not", type=int, metavar="N")
    common.add_machine(add, "bench_attention.json")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    return common.run_command(parser(), argv, measure, "shorter --lengths or fewer --heads")


@torch.no_grad()
def measure(args: argparse.Namespace) -> None:
    """Measure every length, print a table for each, and write what there is so far to --out."""
    check(args)
    device = torch.device(args.device)
    args.backend = "triton" if device.type == "cuda" else "reference"
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    never_stop = LayerConfig.uniform(args.heads[0], segment=args.segment, tile=device_tile(args.head_dim, device))
    file = AttentionFile(settings=settings, results=[], **common.machine(device))
    for length in args.lengths:
        qkv = random_qkv(length, args.heads, args.head_dim, getattr(torch, args.dtype), device)
        file.results.append(bench(args, Inputs.of(qkv, SEED), never_stop))
        print_entry(file.results[-1])
        write(args.out, file)


def bench(args: argparse.Namespace, inputs: Inputs, never_stop: LayerConfig) -> AttentionEntry:
    """Dense attention, the ranking, and a row for each density, at one length."""
    q, k, v = inputs.q, inputs.k, inputs.v

    def density(config: LayerConfig) -> Tensor:
        return s2o_attention(q, k, v, config, backend=args.backend, return_stats=True).density.cpu()

    points = points_of(args, never_stop, density)
    jobs: dict[str, Job] = {"dense": partial(dense_attention, q, k, v)}  # S2O's by what was aimed at
    for target, config in points.items():
        jobs[str(target)] = partial(s2o_attention, q, k, v, config, backend=args.backend)
    if args.backend == "triton":
        jobs["rank"], prefills = kernel_parts(q, k, v, list(points.values()))
        jobs |= {f"{target}, prefill": prefill for target, prefill in zip(points, prefills, strict=True)}
    seconds = {name: common.spread(times) for name, times in sample_times(jobs, q.device, args.rounds).items()}

    def row(target: float | str, config: LayerConfig) -> AttentionRow:
        of_heads, prefill = density(config), seconds.get(f"{target}, prefill")
        mean = float(of_heads.mean())
        work = mean * seconds["dense"].median
        return AttentionRow(
            target=target,
            density=mean,
            seconds=seconds[str(target)],
            prefill_seconds=prefill,
            rate=work / seconds[str(target)].median,
            prefill_rate=work / prefill.median if prefill else None,
            rel_mse=rel_mse(jobs[str(target)]()[:, :, inputs.rows], inputs.exact),
            density_of_heads=of_heads.tolist(),
            tau_of_heads=[head.tau for head in config.heads],
        )

    tile, rank = never_stop.tile, seconds.get("rank")
    error = rel_mse(jobs["dense"]()[:, :, inputs.rows], inputs.exact)
    return AttentionEntry(
        length=q.shape[2],
        tile=asdict(tile),
        tile_name=str(tile),
        dense=DenseTime(dense_backend(q, k, v), seconds["dense"], error),
        rank=RankTime(rank, rank.median / seconds["dense"].median) if rank else None,
        rows=list(starmap(row, points.items())),
    )


def points_of(
    args: argparse.Namespace, never_stop: LayerConfig, density: Callable[[LayerConfig], Tensor]
) -> dict[float | str, LayerConfig]:
    """Return what the rows aim at: no stop, every density that can be reached, else the lowest there is."""
    lowest = with_taus(never_stop, [MAX_TAU] * never_stop.num_heads)
    floor = float(density(lowest).mean())
    points: dict[float | str, LayerConfig] = {"never stop": never_stop}
    for target in sorted(args.densities, reverse=True):
        if target > floor:
            points[target] = bisect(never_stop, target, density)
    if min(args.densities) <= floor:
        points["lowest"] = lowest
    return points


def dense_backend(q: Tensor, k: Tensor, v: Tensor) -> str:
    """The SDPA backend that `dense_attention` runs on."""
    with sdpa_kernel(FASTEST_FIRST, set_priority=True):
        choice = torch._fused_sdp_choice(q, k, v, None, 0.0, True, scale=None, enable_gqa=q.shape[1] != k.shape[1])
    return str(SDPBackend(choice).name)


def print_entry(entry: AttentionEntry) -> None:
    """One length."""
    dense = entry.dense
    title = f"{entry.length} tokens, tile {entry.tile_name}: {dense.backend} {_ms(dense.seconds)} ms, "
    title += f"rel_mse {dense.rel_mse:.1e}"
    if entry.rank:
        title += f", ranking {_ms(entry.rank.seconds)} ms, {entry.rank.share_of_dense:.1%} of dense"
    names = "target", "density", "tau", "ms (p25-p75)", "vs dense", "rate", "without ranking", "rate", "rel_mse"
    lines = []
    for row in entry.rows:
        taus = row.tau_of_heads
        alone = (_ms(row.prefill_seconds), f"{row.prefill_rate:.2f}") if row.prefill_seconds else ("-", "-")
        lines.append((
            str(row.target), f"{row.density:.3f}", f"{min(taus):.2g} .. {max(taus):.2g}", _ms(row.seconds),
            f"{dense.seconds.median / row.seconds.median:.2f}x", f"{row.rate:.2f}", *alone, f"{row.rel_mse:.1e}",
        ))  # fmt: skip
    print_table(Table(names, lines, title, "lr"), open_console())


def _ms(seconds: Spread) -> str:
    return f"{1e3 * seconds.median:.3f} ({1e3 * seconds.p25:.3f}-{1e3 * seconds.p75:.3f})"


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError if an option is out of range."""
    common.check_device(args)
    common.check_least(args, 1, "head_dim", "rounds")
    if len(args.heads) != 2 or min(args.heads) < 1 or args.heads[0] % args.heads[1]:
        raise ConfigError(f"--heads {args.heads} are not query heads and KV heads, the first a multiple: try 32/8")
    if min(args.lengths) <= args.segment:
        raise ConfigError(
            f"length {min(args.lengths)} is too short for --segment {args.segment}: try {args.segment + 1}"
        )
    for density in args.densities:
        if not 0 < density < 1:
            raise ConfigError(f"density {density:g} is out of range: use shares above 0 and below 1")


if __name__ == "__main__":
    sys.exit(main())
