#!/usr/bin/env python3
"""Time to first token of whole models with random weights: dense against S2O at given densities.

    python scripts/bench_prefill.py [--models llama-3.1-8b,qwen2.5-7b] [--lengths 32768,131072] [--densities 0.25,0.1]

Times do not depend on what weights hold, but densities do, and random weights attend evenly. So each head's tau is
bisected, on the q, k, v of the first layer, until the head computes the wanted share of the causal pairs; a profile
of a trained model says which densities its budget allows. What is left beside attention bounds every gain, so the
share of attention is given too: the layers' attention on the first layer's q, k, v, over the whole prefill.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from benching import PREFILL, bench_parser, bisect, exit_code, machine, numbers, parsed, spread

from calibrate.cli import Parser
from calibrate.evaluation.variants import Variant, ran, running, uniform_states
from calibrate.models import LoadedModel, load
from calibrate.streams import attention_implementation
from calibrate.timing import medians
from calibrate.verify import prefill
from s2o_runtime.attention import s2o_attention
from s2o_runtime.config import LayerConfig, TileConfig
from s2o_runtime.dense import dense_attention
from s2o_runtime.gpu import default_tile, identify

Inputs = tuple[Tensor, Tensor, Tensor]


def parser() -> Parser:
    out, add = bench_parser("bench_prefill", __doc__)
    lengths, densities = (parsed(partial(numbers, number), "N,N") for number in (int, float))
    add("--models", "llama-3.1-8b,qwen2.5-7b", "aliases of s2o-calibrate", type=lambda text: text.split(","))
    add("--lengths", "32768,131072", type=lengths, metavar="N,N")
    add("--densities", "0.25,0.1", type=densities, metavar="X,X")
    add("--segment", 1024, "queries that share a ranking", type=int, metavar="N")
    add("--grain", 4, "adjacent keys that are ranked and visited together", type=int, metavar="N")
    add("--rounds", 3, "turns that are timed, after one that is not", type=int, metavar="N")
    add("--steps", 10, "bisection steps for tau", type=int, metavar="N")
    add("--seed", 0, type=int, metavar="N")
    add("--device", "cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    add("--out", Path("build/bench_prefill.json"), type=Path, metavar="FILE")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return exit_code("bench_prefill", args.out, lambda: measure(args), "shorter --lengths or smaller --models")


@torch.no_grad()
def measure(args: argparse.Namespace) -> None:
    """Measure every model and length, and write what there is so far."""
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    record: dict[str, Any] = {
        "format": PREFILL,
        **machine(torch.device(args.device)),
        "settings": settings,
        "results": [],
    }
    for name in args.models:
        loaded = load(name, args.device, random_weights=True, seed=args.seed, resident=True)
        for length in args.lengths:
            entry = {"model": name, "length": length, **bench(loaded, length, args)}
            record["results"].append(entry)
            print_table(entry)
            args.out.write_text(json.dumps(record, indent=1) + "\n")
        del loaded


def bench(loaded: LoadedModel, length: int, args: argparse.Namespace) -> dict[str, Any]:
    """One model at one length: a row for each way to attend. Times in seconds."""
    device, layers = loaded.weights.device, loaded.geometry.layers
    rng = torch.Generator().manual_seed(args.seed)
    ids = torch.randint(loaded.model.config.vocab_size, (length,), generator=rng)
    inputs = first_layer(loaded, ids)
    configs = {f"S2O, density {density:g}": config_of(inputs, density, loaded, args) for density in args.densities}

    attention: dict[str, Callable[[], Any]] = {"dense, cuDNN": partial(dense_attention, *inputs)}
    attention |= {name: partial(s2o_attention, *inputs, config) for name, config in configs.items()}
    runs: dict[str, LayerConfig | None] = {
        "dense, cuDNN": LayerConfig.uniform(loaded.geometry.query_heads, mode="dense")
    }
    if device.type == "cuda":
        attention["dense, FlashAttention-2"] = partial(flash_attention, *inputs)
        runs["dense, FlashAttention-2"] = None
    runs |= configs
    of_attention = medians(attention, device, args.rounds)
    rounds = {name: [timed(loaded, ids, run) for _ in range(args.rounds + 1)][1:] for name, run in runs.items()}
    rows = []
    for name, taken in rounds.items():
        seconds, alone = spread([one for one, _ in taken]), layers * of_attention[name]
        row = {"name": name, "density": taken[-1][1], "seconds": seconds, "attention_seconds": alone}
        rows.append(row | {"share": alone / seconds["median"]})
    return {"rows": rows, "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None}


def first_layer(loaded: LoadedModel, ids: Tensor) -> Inputs:
    """q, k, v of the first layer."""
    kept: list[Inputs] = []

    def keep(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None, out: Tensor) -> None:
        kept.append((q, k, v))

    dense = variant(loaded, LayerConfig.uniform(loaded.geometry.query_heads, mode="dense"))
    dense.states[0].observer = keep
    with running(loaded.model, dense):
        prefill(loaded.model, ids)
    return kept[0]


def config_of(inputs: Inputs, density: float, loaded: LoadedModel, args: argparse.Namespace) -> LayerConfig:
    """The configuration whose every head computes about this share of the pairs."""
    heads, head_dim = loaded.geometry.query_heads, loaded.geometry.head_dim
    on_gpu = inputs[0].is_cuda
    tile = default_tile(head_dim, identify(inputs[0].device).capability) if on_gpu else TileConfig()
    start = LayerConfig.uniform(heads, segment=args.segment, grain=args.grain, tail=True, tile=tile)

    def reached(config: LayerConfig) -> Tensor:
        return s2o_attention(*inputs, config, return_stats=True)[1].density.cpu()

    return bisect(start, density, args.steps, reached)


def variant(loaded: LoadedModel, config: LayerConfig) -> Variant:
    """The model with this configuration in every layer."""
    return Variant("", "", uniform_states(config, loaded.geometry.layers))


@contextmanager
def flash(loaded: LoadedModel) -> Iterator[None]:
    """The model as transformers runs it through SDPA, on FlashAttention-2."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), attention_implementation(loaded.model, "sdpa"):
        yield


def timed(loaded: LoadedModel, ids: Tensor, config: LayerConfig | None) -> tuple[float, float]:
    """Seconds of a prefill, and the layers' mean density; None is `flash`."""
    one = Variant("", "") if config is None else variant(loaded, config)
    with flash(loaded) if config is None else running(loaded.model, one):
        wait(loaded.weights.device)
        began = time.perf_counter()
        prefill(loaded.model, ids)
        wait(loaded.weights.device)
        return time.perf_counter() - began, ran(one).density


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def print_table(entry: dict[str, Any]) -> None:
    dense = entry["rows"][0]["seconds"]["median"]
    print(f"{entry['model']}, random weights, {entry['length']} tokens")
    for row in entry["rows"]:
        seconds = row["seconds"]["median"]
        print(
            f"  {row['name']:26} {seconds:8.3f} s  {dense / seconds:5.2f}x  density {row['density']:.3f}, "
            f"attention {row['share']:4.0%} of it",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
