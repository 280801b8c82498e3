#!/usr/bin/env python3
"""Chunks of a long prompt in a layer with dense heads: their keys split over several programs, and not.

    python -m scripts.bench.shares [--queries 2048] [--keys 131072] [--heads 8,2] [--dense 2] [--density 0.25]

Each row is one call of the kernels, ranking included: so many queries, the last of so many keys. It is timed unsplit,
with every number of shares, and with the one that `kernels.shares.key_shares` chooses, in turns: medians with a cold L2
cache. --dense heads are dense, spread over the layer; the others compute about --density of a whole prompt. The largest
relative difference of an output from the unsplit one stands beside the times.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor

from calibrate.timing import medians
from s2o_runtime.config import LayerConfig
from s2o_runtime.devices import identify, resources
from s2o_runtime.errors import S2OError
from s2o_runtime.shapes import call_shape
from scripts.bench.common import (
    BAD_INPUT,
    OK,
    Parser,
    add_op_options,
    bench_parser,
    check_device,
    check_least,
    int_list,
    print_table,
)
from scripts.bench.inputs import QKV, random_qkv
from scripts.bench.tails import config_of, last

if TYPE_CHECKING:
    from s2o_runtime.kernels.call import Call

NAME = "scripts.bench.shares"
FLUSHES = 32  # of the L2 cache ahead of a call, about 1 ms: the ranking and the prefill are launched one by one


def parser() -> Parser:
    out, add = bench_parser(NAME, __doc__)
    add("--queries", "2048", type=int_list("512,2048"), metavar="N,N")
    add("--keys", "131072", type=int_list("32768,131072"), metavar="N,N")
    add("--shares", "4,8,16", type=int_list("4,8"), metavar="N,N")
    add("--heads", "8,2", "query heads and KV heads", metavar="N,N")
    add("--dense", 2, "how many query heads are dense", type=int, metavar="N")
    add("--head-dim", 128, type=int, metavar="N")
    add("--density", 0.25, "share of the causal pairs that a whole prompt computes", type=float, metavar="X")
    add_op_options(out, add, rounds=20)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        measure(args)
    except S2OError as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return BAD_INPUT
    return OK


@torch.no_grad()
def measure(args: argparse.Namespace) -> None:
    """Time every call and print the table."""
    check_device(args)
    check_least(args, 1, "rounds", "steps", "dense")
    device = torch.device(args.device)
    query_heads, kv_heads = (int(part) for part in args.heads.split(","))
    longest = random_qkv(
        length=args.keys[-1],
        batch=1,
        heads=(query_heads, kv_heads),
        head_dim=args.head_dim,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        seed=args.seed,
        device=device,
    )
    config = with_dense(config_of(longest, args), args.dense)
    print(f"{identify(device)}, torch {torch.__version__}, tile {config.tile}, rounds {args.rounds}")
    rows = [
        [str(queries), str(keys), *cells(last(longest, queries, keys), config, args.shares, args.rounds)]
        for keys in args.keys
        for queries in args.queries
        if queries < keys
    ]
    names = ["queries", "keys", "unsplit, us", *(f"{count} shares, us" for count in args.shares)]
    title = f"{args.dense} of {query_heads} heads dense, the others at {args.density:g}"
    print_table(title, [*names, "chosen", "over unsplit", "difference"], rows)


def with_dense(config: LayerConfig, count: int) -> LayerConfig:
    """The layer with so many dense heads, the last one of each equal part of its heads."""
    dense = {(part + 1) * config.num_heads // count - 1 for part in range(count)}
    heads = (replace(head, mode="dense") if index in dense else head for index, head in enumerate(config.heads))
    return replace(config, heads=tuple(heads)).validate()


def cells(qkv: QKV, config: LayerConfig, counts: Sequence[int], rounds: int) -> list[str]:
    """The times of one call in microseconds, what is chosen for it and gained by that, and the largest difference."""
    from s2o_runtime.kernels.call import Call, head_tables
    from s2o_runtime.kernels.shares import key_shares

    q, k, v = qkv
    call = Call(config, call_shape(q, k, v), q.shape[-1] ** -0.5, head_tables(config, q.device))
    chosen = key_shares(call, -(-q.shape[2] // config.tile.rows), resources(q.device))
    jobs = {count: split_call(qkv, call, count) for count in sorted({1, *counts, chosen})}
    whole = jobs[1]().float()
    difference = max(float((job().float() - whole).norm() / whole.norm()) for job in jobs.values())
    names: dict[str, Callable[[], Any]] = {str(count): job for count, job in jobs.items()}
    seconds = medians(names, q.device, rounds, FLUSHES)
    times = [f"{seconds[str(count)] * 1e6:.0f}" for count in (1, *counts)]
    return [*times, str(chosen), f"{seconds['1'] / seconds[str(chosen)]:.2f}", f"{difference:.1e}"]


def split_call(qkv: QKV, call: Call, count: int) -> Callable[[], Tensor]:
    """A call of the kernels with so many shares, 1 for unsplit."""
    from s2o_runtime.kernels import prefill

    def run() -> Tensor:
        with mock.patch.object(prefill, "key_shares", return_value=count):
            return prefill.s2o_prefill(*qkv, call)[0]

    return run


if __name__ == "__main__":
    sys.exit(main())
