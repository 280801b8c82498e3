#!/usr/bin/env python3
"""Few queries behind many keys: the op as a server would call it ("auto") against dense attention.

    python -m scripts.bench.tails [--heads 32,8] [--density 0.25] [--representatives 1] [--no-tail]

Each point of the grid is one call of a layer: so many queries, the last of so many keys. Three things are timed in
turns: dense attention, S2O's kernels whatever the number of queries, and the op with `backend="auto"`, which goes dense
below `min_queries` and `dense_below`. Those two are measured first, as calibration does, unless --default-tile keeps
the GPU's defaults. A last table has a whole prompt fed in chunks, against the prompt at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from calibrate.search.crossover import with_crossover
from calibrate.timing import medians
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.config import LayerConfig, TileConfig
from s2o_runtime.identity import Geometry
from s2o_runtime.reference.dense import dense_attention
from s2o_runtime.shapes import CallShape
from s2o_runtime.tiles import DECODE
from scripts.bench.calls import bisect, device_tile
from scripts.bench.common import (
    Parser,
    add_op_options,
    bench_parser,
    check_device,
    check_least,
    int_list,
    machine,
    print_table,
    run_command,
)
from scripts.bench.inputs import QKV, random_qkv
from scripts.bench.schema import ResultFile, write

NAME = "scripts.bench.tails"
QUERIES = ",".join(str(1 << power) for power in range(16))
KEYS = ",".join(str(1 << power) for power in range(11, 18))
TIE = 0.98  # of dense attention's speed: less is slower than it
WHOLE = 32768  # keys at most of the prompt on which the taus are chosen


@dataclass(frozen=True)
class Point:
    """One call. The three times are medians in seconds; kernel_seconds is None for a decode step."""

    queries: int
    keys: int
    dense_seconds: float
    auto_seconds: float
    kernel_seconds: float | None
    backend: str

    @property
    def ratio(self) -> float:
        """Dense attention's time over the op's."""
        return self.dense_seconds / self.auto_seconds

    @property
    def kernel_ratio(self) -> float:
        """Dense attention's time over the kernels'; 0 where they do not run."""
        return self.dense_seconds / self.kernel_seconds if self.kernel_seconds else 0.0


@dataclass(frozen=True)
class Chunked:
    """A prompt of `keys` tokens fed in chunks: all its calls together, in seconds, with the op and dense."""

    keys: int
    chunk: int
    auto_seconds: float
    dense_seconds: float


@dataclass(frozen=True, kw_only=True)
class TailsFile(ResultFile):
    """tile: as it was measured. needed: the fewest queries from which on the kernels tie with dense on this grid."""

    program: ClassVar[str] = f"python -m {NAME}"

    format: str = "s2o-bench-tails/1"
    settings: dict[str, Any]
    tile: dict[str, Any]
    points: list[Point]
    chunks: list[Chunked]
    needed: int


def parser() -> Parser:
    out, add = bench_parser(NAME, __doc__)
    add("--queries", QUERIES, type=int_list("1,256,8192"), metavar="N,N")
    add("--keys", KEYS, type=int_list("2048,131072"), metavar="N,N")
    add("--chunks", "2048,8192,32768", type=int_list("2048,8192"), metavar="N,N")
    add("--heads", "32,8", "query heads and KV heads", metavar="N,N")
    add("--head-dim", 128, type=int, metavar="N")
    add("--density", 0.25, "share of the causal pairs that a whole prompt computes", type=float, metavar="X")
    out.add_argument("--default-tile", action="store_true", help="keep the GPU's default min_queries")
    add_op_options(out, add, rounds=8)  # even, so that each call comes as often before another as after it
    add("--out", Path("build/bench_tails.json"), type=Path, metavar="FILE")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run_command(NAME, args.out, lambda: measure(args), "fewer --keys or --heads")


@torch.no_grad()
def measure(args: argparse.Namespace) -> None:
    """Time the grid and the chunks, print them and write --out."""
    check_device(args)
    check_least(args, 1, "rounds", "steps")
    device = torch.device(args.device)
    query_heads, kv_heads = (int(part) for part in args.heads.split(","))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    longest = random_qkv(
        length=args.keys[-1],
        batch=1,
        heads=(query_heads, kv_heads),
        head_dim=args.head_dim,
        dtype=dtype,
        seed=args.seed,
        device=device,
    )
    config = config_of(longest, args)
    if not args.default_tile:
        geometry = Geometry("bench", 1, query_heads, kv_heads, args.head_dim)
        config = config.with_tile(with_crossover(config, geometry, device, args.density))
    points = [
        timed(longest, config, queries, keys, args.rounds)
        for keys in args.keys
        for queries in args.queries
        if queries <= keys
    ]
    whole = args.keys[-1]
    chunks = [chunked(longest, config, chunk, args.rounds) for chunk in {*args.chunks, whole} if chunk <= whole]
    needed = fewest_that_tie(points, config.tile)
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    file = TailsFile(
        settings=settings,
        tile=asdict(config.tile),
        points=points,
        chunks=sorted(chunks, key=lambda entry: entry.chunk),
        needed=needed,
        **machine(device),
    )
    report(file)
    write(args.out, file)


def config_of(longest: QKV, args: argparse.Namespace) -> LayerConfig:
    """The layer whose every head computes about --density of a whole prompt's pairs."""
    prompt = last(longest, min(WHOLE, args.keys[-1]), min(WHOLE, args.keys[-1]))
    never_stop = LayerConfig.uniform(
        prompt[0].shape[1],
        segment=args.segment,
        grain=args.grain,
        tail=args.tail,
        representatives=args.representatives,
        tile=device_tile(args.head_dim, prompt[0].device),
    )

    def reached(config: LayerConfig) -> Tensor:
        return s2o_attention(*prompt, config, return_stats=True).density.cpu()

    return bisect(never_stop, args.density, args.steps, reached)


def last(longest: QKV, queries: int, keys: int) -> QKV:
    """The call of the last `queries` of the first `keys` positions."""
    q, k, v = longest
    return q[:, :, keys - queries : keys], k[:, :, :keys], v[:, :, :keys]


def timed(longest: QKV, config: LayerConfig, queries: int, keys: int, rounds: int) -> Point:
    """One point of the grid."""
    qkv = last(longest, queries, keys)
    stats = s2o_attention(*qkv, config, return_stats=True).stats
    backend = "" if stats is None else stats.backend
    always = config.with_tile(replace(config.tile, dense_below=0, min_queries=DECODE, tail_keys=0))
    dense, auto = partial(dense_attention, *qkv), partial(s2o_attention, *qkv, config)
    seconds = medians({"dense": dense, "auto": auto}, qkv[0].device, rounds)
    # not in turns with these two: after a kernel of another name, what both run would start with a cold code cache
    kernel = None
    if queries >= DECODE:
        kernel = medians({"kernel": partial(s2o_attention, *qkv, always)}, qkv[0].device, rounds)["kernel"]
    return Point(queries, keys, seconds["dense"], seconds["auto"], kernel, backend)


def chunked(longest: QKV, config: LayerConfig, chunk: int, rounds: int) -> Chunked:
    """The longest prompt fed in chunks."""
    keys = longest[0].shape[2]
    calls = [last(longest, min(chunk, end), end) for end in _ends(keys, chunk)]

    def run(attend: Callable[..., Any]) -> None:
        for qkv in calls:
            attend(*qkv)

    device = longest[0].device
    jobs = {"auto": partial(run, partial(_auto, config)), "dense": partial(run, dense_attention)}
    seconds = medians(jobs, device, rounds)
    return Chunked(keys, chunk, seconds["auto"], seconds["dense"])


def _auto(config: LayerConfig, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return s2o_attention(q, k, v, config)


def _ends(keys: int, chunk: int) -> Iterator[int]:
    return iter([*range(chunk, keys, chunk), keys])


def fewest_that_tie(points: Sequence[Point], tile: TileConfig) -> int:
    """The fewest queries from which on the kernels tie with dense behind every number of keys.

    Calls that are too little work for the tile go dense whatever `min_queries` is, and whole prompts are no tails:
    neither counts.
    """
    slower = [
        point.queries
        for point in points
        if point.queries < point.keys
        and not CallShape(1, 1, 1, point.queries, point.keys, 1, 1).is_little_for(tile)
        and point.kernel_ratio < TIE
    ]
    above = [point.queries for point in points if point.queries > max(slower, default=1)]
    return min(above, default=2 * max(point.queries for point in points))


def report(file: TailsFile) -> None:
    """Print the grid, the chunks, and what follows from them."""
    keys = sorted({point.keys for point in file.points})
    rows = []
    for queries in sorted({point.queries for point in file.points}):
        of_row = {point.keys: point for point in file.points if point.queries == queries}
        rows.append([str(queries), *(_cell(of_row.get(count)) for count in keys)])
    print_table("dense time / op's time (kernels'), by queries and keys", ["queries", *map(str, keys)], rows)
    worst = min(file.points, key=lambda point: point.ratio)
    print(f"least {worst.ratio:.2f}, at {worst.queries} queries and {worst.keys} keys ({worst.backend})")
    print(f"tile: dense_below {file.tile['dense_below']}, min_queries {file.tile['min_queries']}")
    print(f"the kernels tie with dense ({TIE:g}) from {file.needed} queries on, behind every number of keys")
    whole = file.chunks[-1]
    rows = [
        [
            str(entry.chunk),
            f"{entry.auto_seconds * 1e3:.2f}",
            f"{entry.auto_seconds / whole.auto_seconds:.2f}",
            f"{entry.dense_seconds * 1e3:.2f}",
        ]
        for entry in file.chunks
    ]
    print_table(f"{whole.keys} tokens in chunks", ["chunk", "S2O, ms", "over whole", "dense, ms"], rows)


def _cell(point: Point | None) -> str:
    return "" if point is None else f"{point.ratio:.2f} ({point.kernel_ratio:.2f})"


if __name__ == "__main__":
    sys.exit(main())
