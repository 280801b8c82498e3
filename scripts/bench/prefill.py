#!/usr/bin/env python3
"""Time to first token of whole models with random weights: dense against S2O at given densities.

    python -m scripts.bench.prefill [--models llama-3.1-8b,qwen2.5-7b] [--lengths 32768,131072] [--densities 0.25,0.1]

Times do not depend on the weights' values, but densities do, and random weights attend evenly. So each head's tau is
bisected, on the q, k, v of the first layer, until the head computes the wanted share of the causal pairs; a profile
of a trained model says which densities its budget allows. What is left beside attention bounds every gain, so the
share of attention is given too: the layers' attention on the first layer's q, k, v, over the whole prefill.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from calibrate.evaluation.run import Variant, collect_run_stats, repeat_config, run_as
from calibrate.model.layers import capture_layers
from calibrate.model.logits import time_prefill
from calibrate.model.models import LoadedModel, load
from calibrate.tables import Table, open_console, print_table
from calibrate.timing import measure_medians
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.config import LayerConfig
from s2o_runtime.reference.dense import dense_attention
from scripts.bench.calls import bisect, device_tile
from scripts.bench.common import Parser, add_machine, bench_parser, float_list, int_list, machine, run_command, spread
from scripts.bench.inputs import QKV
from scripts.bench.schema import PrefillEntry, PrefillFile, PrefillRow, write

DENSE_CUDNN = "dense, cuDNN"
SEGMENT = 1024  # queries that share a ranking


def parser() -> Parser:
    out, add = bench_parser("scripts.bench.prefill", __doc__)
    add("--models", "llama-3.1-8b,qwen2.5-7b", "aliases of s2o-calibrate", type=lambda text: text.split(","))
    add("--lengths", "32768,131072", type=int_list("32768,131072"), metavar="N,N")
    add("--densities", "0.25,0.1", type=float_list("0.25,0.1"), metavar="X,X")
    add("--rounds", 3, "turns that are timed, after one that is not", type=int, metavar="N")
    add_machine(add, "bench_prefill.json")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(parser(), argv, measure, "shorter --lengths or smaller --models")


@torch.no_grad()
def measure(args: argparse.Namespace) -> None:
    """Measure every model and length, and write what there is so far to --out."""
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    file = PrefillFile(settings=settings, results=[], **machine(torch.device(args.device)))
    for name in args.models:
        loaded = load(name, args.device, random_weights=True, resident=True)
        for length in args.lengths:
            file.results.append(bench(loaded, name, length, args))
            print_entry(file.results[-1])
            write(args.out, file)
        del loaded


def bench(loaded: LoadedModel, name: str, length: int, args: argparse.Namespace) -> PrefillEntry:
    """One model at one length: a row for each form of attention."""
    device, layers = loaded.weights.device, loaded.geometry.layers
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(loaded.model.config.vocab_size, (length,), generator=rng)
    captures = capture_layers(loaded, [ids])
    captured = next(next(captures))
    qkv = captured.q, captured.k, captured.v
    del captures  # the model has its own attention again
    configs = {f"S2O, density {density:g}": config_of(qkv, density, loaded) for density in args.densities}

    attention: dict[str, Callable[[], Any]] = {DENSE_CUDNN: partial(dense_attention, *qkv)}
    attention |= {form: partial(s2o_attention, *qkv, config) for form, config in configs.items()}
    forms = {DENSE_CUDNN: LayerConfig.uniform(loaded.geometry.query_heads, mode="dense"), **configs}
    attention_seconds = measure_medians(attention, device, args.rounds)
    rows = []
    for form, config in forms.items():
        rounds = [timed(loaded, ids, config) for _ in range(args.rounds + 1)][1:]
        seconds, alone = spread([taken for taken, _ in rounds]), layers * attention_seconds[form]
        rows.append(PrefillRow(form, rounds[-1][1], seconds, alone, alone / seconds.median))
    peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return PrefillEntry(name, length, rows, peak_bytes)


def config_of(qkv: QKV, density: float, loaded: LoadedModel) -> LayerConfig:
    """The configuration whose every head computes about this share of the pairs."""
    tile = device_tile(qkv[0].shape[3], qkv[0].device)
    heads = loaded.geometry.query_heads
    never_stop = LayerConfig.uniform(heads, segment=SEGMENT, tail="mean", tile=tile)

    def reached(config: LayerConfig) -> Tensor:
        return s2o_attention(*qkv, config, return_stats=True).density.cpu()

    return bisect(never_stop, density, reached)


def timed(loaded: LoadedModel, ids: Tensor, config: LayerConfig) -> tuple[float, float]:
    """Seconds of a prefill, and the layers' mean density."""
    run = Variant("", "", repeat_config(config, loaded.geometry.layers))
    with run_as(loaded.model, run):
        return time_prefill(loaded.model, ids, use_cache=False), collect_run_stats(run)["density"]


def print_entry(entry: PrefillEntry) -> None:
    dense = entry.rows[0].seconds.median
    columns: dict[str, Callable[[PrefillRow], str]] = {
        "attention": lambda row: row.name,
        "seconds": lambda row: f"{row.seconds.median:.3f}",
        "against dense": lambda row: f"{dense / row.seconds.median:.2f}x",
        "density": lambda row: f"{row.density:.3f}",
        "attention's share": lambda row: f"{row.share:.0%}",
    }
    title = f"{entry.model}, random weights, {entry.length} tokens"
    print_table(Table.from_rows(entry.rows, columns, title, align="lr"), open_console())


if __name__ == "__main__":
    sys.exit(main())
