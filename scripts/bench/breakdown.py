#!/usr/bin/env python3
"""Time the parts of a profile's attention: each layer's kernels, on prompts that chose nothing.

    python -m scripts.bench.breakdown --data MODEL --profile FILE [--lengths 8192,32768]

A layer is one call. "total" and "dense" (cuDNN) are medians with a cold L2, in turns. The parts are the kernels' own
times, as torch's profiler has them: "rank" averages and orders, "far" sums what is skipped, "pairs" computes the
window and the keys that are visited, "other" is anything else, and "gaps" is the total less all parts. "even" is what
the pairs would take at cuDNN's rate, of which "window" is inside the segments. "host" is the Python and launch time of
a call that was seen before. All times are in milliseconds. Layers that run dense have no parts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from calibrate.tables import Table, open_console, print_table
from calibrate.timing import measure_medians
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.profile import load_profile
from s2o_runtime.reference.dense import dense_attention
from scripts.bench.common import Parser, add_machine, bench_parser, check_device, int_list, run_command
from scripts.bench.inputs import QKV, model_qkv
from scripts.bench.methods import FLUSHES

PARTS = {  # the kernels' names, as they begin
    "rank": ("_means", "_scores", "_order"),
    "far": ("_tail",),
    "pairs": ("_prefill", "_prefill_hopper", "_combine", "cudnn"),
}
CALLS = 3  # that the profiler sees
HOST_CALLS = 20
SEED = 1234  # of the prompts


def parser() -> Parser:
    out, add = bench_parser("scripts.bench.breakdown", __doc__)
    add("--lengths", "8192,32768", type=int_list("8192,32768"), metavar="N,N")
    add("--data", "demo", "the model of the profile")
    out.add_argument("--profile", type=Path, required=True)
    add("--rounds", 3, "turns that are timed, after one that is not", type=int, metavar="N")
    add_machine(add, "breakdown.txt")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(parser(), argv, measure, "shorter --lengths")


@torch.no_grad()
def measure(args: argparse.Namespace) -> None:
    """Measure every layer at every length; print the tables, and write the numbers to --out."""
    check_device(args)
    device, kept = torch.device(args.device), load_profile(args.profile)
    lines = []
    for length in args.lengths:
        rows = [
            layer_row(qkv, partial(s2o_attention, *qkv, kept.layer_config(layer, length)), args.rounds)
            for layer, qkv in enumerate(model_qkv(args.data, length, 1, SEED, device))
        ]
        sums = {name: sum(row[name] for row in rows) for name in rows[0]}
        sums["density"] /= len(rows)
        labelled = [*((str(layer), row) for layer, row in enumerate(rows)), ("all", sums)]
        cells = [(label, *(f"{value:.3f}" for value in row.values())) for label, row in labelled]
        names = ("layer", *sums)
        print_table(Table(names, cells, f"{length} tokens, milliseconds"), open_console())
        lines += ["\t".join((str(length), *row)) for row in cells]
        args.out.write_text("\n".join(["\t".join(("length", *names)), *lines]) + "\n", encoding="utf-8")


def layer_row(qkv: QKV, call: Callable[..., Any], rounds: int) -> dict[str, float]:
    """One layer's times in milliseconds, and the density of all causal pairs.

    Args:
        qkv: q [1, Hq, L, D], k and v [1, Hkv, L, D].
        call: its attention, which takes `return_stats`.
        rounds: turns that are timed.
    """
    q = qkv[0]
    stats = call(return_stats=True).stats
    dense = partial(dense_attention, *qkv)
    seconds = measure_medians({"total": call, "dense": dense}, q.device, rounds, FLUSHES)
    host = host_seconds(call)  # before the profiler, which leaves launches slower behind it
    parts = {} if stats.visited is None else kernel_seconds(call, q.device)
    density = float(stats.density.mean())
    length, segment = q.shape[2], stats.config.segment
    pairs = length * (length + 1) / 2
    inside = sum(n * (n + 1) / 2 for n in [segment] * (length // segment) + [length % segment]) / pairs
    even = density * seconds["dense"]
    times = {name: parts.get(name, 0.0) for name in (*PARTS, "other")}
    row = {
        "dense": seconds["dense"],
        "total": seconds["total"],
        **times,
        "gaps": seconds["total"] - sum(times.values()) if parts else 0.0,
        "even": even,
        "window": min(inside * seconds["dense"], even),
        "host": host,
    }
    return {name: value * 1e3 for name, value in row.items()} | {"density": density}


def kernel_seconds(call: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """The seconds that the kernels of one call take, by part; on a CPU none."""
    if device.type != "cuda":
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    sums = dict.fromkeys((*PARTS, "other"), 0.0)
    for event in profiler.key_averages():
        part = next((name for name, begins in PARTS.items() if event.key.startswith(begins)), "other")
        sums[part] += event.self_device_time_total / CALLS / 1e6
    return sums


def host_seconds(call: Callable[[], Any]) -> float:
    """The time until a call returns, while the device may still be at work."""
    taken = []
    for _ in range(HOST_CALLS):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return statistics.median(taken)


if __name__ == "__main__":
    sys.exit(main())
