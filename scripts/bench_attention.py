#!/usr/bin/env python3
"""S2O attention against cuDNN's dense attention on one device: time, density and error as a table, JSON or plot.

    python scripts/bench_attention.py [--lengths 8192,32768] [--tile 128x64x4:8:3 ...] [--out FILE.json]
    python scripts/bench_attention.py --plot FILE.json ... --out FILE.svg
    python scripts/bench_attention.py --methods [NAME ...]    S2O and its rivals on a model's q, k, v (bench_methods.py)

For every length and tile, tau is bisected for each head until the head computes the wanted share of the causal
pairs. All times of a table come from one run on the same tensors, taking turns, each with a cold L2. The rate is
density x dense time / time: 1 means that a computed pair costs what it costs cuDNN.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from benching import (
    ATTENTION,
    bench_parser,
    bisect,
    exact_rows,
    exit_code,
    machine,
    numbers,
    parsed,
    rel_mse,
    spread,
    with_taus,
)

from calibrate.cli import Parser
from calibrate.timing import samples
from s2o_runtime.attention import s2o_attention
from s2o_runtime.config import MAX_TAU, LayerConfig, TileConfig
from s2o_runtime.dense import FASTEST_FIRST, dense_attention
from s2o_runtime.errors import ConfigError, InputError
from s2o_runtime.gpu import default_tile, identify
from s2o_runtime.shapes import call_shape

if TYPE_CHECKING:
    from s2o_runtime.kernels.rank import Ranked
    from s2o_runtime.kernels.tail import Tail

DIRECTIONS = 4  # what the random queries and keys of a KV head have in common
SHARP = (6.0, 10.0)  # how strongly the first and the last query head look along them
WANDER = 2048  # queries after which a head looks along another direction
TARGET_RATE = 0.75
PLOT_TYPES = (".svg", ".png", ".pdf")

Job = Callable[[], Any]


def parser() -> Parser:
    out, add = bench_parser("bench_attention", __doc__)
    lengths, densities = (partial(numbers, number) for number in (int, float))
    add("--lengths", "8192,32768,131072", type=parsed(lengths, "8192,32768"), metavar="N,N")
    add("--densities", "0.02,0.05,0.1,0.2,0.5", type=parsed(densities, "0.05,0.2"), metavar="X,X")
    add("--batch", 1, type=int, metavar="N")
    heads = parsed(lambda text: tuple(map(int, text.split("/"))), "32/8")
    add("--heads", "32/8", "query heads / KV heads", type=heads, metavar="N/N")
    add("--head-dim", 128, type=int, metavar="N")
    add("--dtype", "bfloat16", choices=("bfloat16", "float16", "float32"))
    add("--segment", 1024, "queries that share a ranking", type=int, metavar="N")
    add("--representatives", 1, "means of so many parts of a segment rank its keys", type=int, metavar="N")
    add("--grain", 4, "adjacent keys that are ranked and visited together", type=int, metavar="N")
    out.add_argument("--tail", action="store_true", help="estimate what the skipped keys bring")
    add("--data", "random", "random, or a model (demo, an alias, a folder) to capture q, k, v of", metavar="NAME")
    add("--rounds", 7, "turns that are timed, after one that is not", type=int, metavar="N")
    add("--steps", 10, "bisection steps for tau", type=int, metavar="N")
    sampled = "query rows, at random over the sequence, where errors against float32 dense attention are measured"
    add("--error-rows", 256, sampled, type=int, metavar="N")
    add("--seed", 0, type=int, metavar="N")
    add("--device", "cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    out.add_argument("--backend", choices=("triton", "reference"), help="default triton on a GPU, reference on a CPU")
    tile, form = parsed(tile_of, "128x64x4:8:3 or 64x64x4:4:3:ws"), "BMxBNxCHUNK:WARPS:STAGES[:ws]"
    out.add_argument("--tile", type=tile, action="append", metavar=form, help="repeatable; default by the GPU")
    out.add_argument("--plot", nargs="+", type=Path, metavar="FILE.json", help="plot time against density instead")
    out.add_argument("--out", type=Path, metavar="FILE", help="default build/bench_attention.json (--plot: .svg)")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if any(word.partition("=")[0] == "--methods" for word in words):
        import bench_methods

        return bench_methods.main(words)
    args = parser().parse_args(argv)
    out = args.out or Path("build/bench_attention").with_suffix(".svg" if args.plot else ".json")
    work = (lambda: plot([read(path) for path in args.plot], out)) if args.plot else (lambda: measure(args, out))
    return exit_code("bench_attention", out, work, "shorter --lengths or fewer --heads")


@torch.no_grad()
def measure(args: argparse.Namespace, out: Path) -> None:
    """Measure every length and tile, print a table for each, and write what there is so far to `out`."""
    device = torch.device(args.device)
    args.backend = args.backend or ("triton" if device.type == "cuda" else "reference")
    tiles = args.tile or [default_tile(args.head_dim, identify(device).capability)]
    _check(args)
    ranking = {name: getattr(args, name) for name in ("segment", "representatives", "grain", "tail")}
    configs = [LayerConfig.uniform(args.heads[0], tile=tile, **ranking) for tile in tiles]
    record: dict[str, Any] = {
        "format": ATTENTION,
        **machine(device),
        "settings": {name: value for name, value in vars(args).items() if name not in ("plot", "out", "tile")},
        "cold_l2": device.type == "cuda",
        "threshold": configs[0].heads[0].threshold,
        "error": "rel_mse on error_rows query rows of all heads, one at random in each equal part of the sequence, "
        "against float32 dense attention on the same q, k, v",
        "results": [],
    }
    for length in args.lengths:
        q, k, v = (made if args.data == "random" else captured)(args, length, device)
        rows, exact = exact_rows(q, k, v, args.error_rows, args.seed)
        for config in configs:
            entry = {"length": length, "tile": asdict(config.tile), "tile_name": str(config.tile)}
            record["results"].append(entry | bench(args, q, k, v, config, rows, exact))
            print_table(record["results"][-1])
            out.write_text(json.dumps(record, indent=1) + "\n")


def bench(
    args: argparse.Namespace, q: Tensor, k: Tensor, v: Tensor, never_stop: LayerConfig, rows: Tensor, exact: Tensor
) -> dict[str, Any]:
    """Dense, ranking, and a row for each density, of one length and tile. Times are in seconds.

    A row's target is a density, "never stop" (tau = 0), or "lowest" if window and first chunk are more than asked for.
    """

    def density(config: LayerConfig) -> Tensor:
        return s2o_attention(q, k, v, config, backend=args.backend, return_stats=True)[1].density.cpu()

    lowest = with_taus(never_stop, [MAX_TAU] * never_stop.num_heads)
    floor = float(density(lowest).mean())
    found: list[tuple[float | str, LayerConfig]] = [("never stop", never_stop)]
    for target in sorted(args.densities, reverse=True):
        if target > floor:
            found.append((target, bisect(never_stop, target, args.steps, density)))
    if min(args.densities) <= floor:
        found.append(("lowest", lowest))

    jobs: dict[str, Job] = {"dense": partial(dense_attention, q, k, v)}
    for i, (_, config) in enumerate(found):
        jobs[f"s2o {i}"] = partial(s2o_attention, q, k, v, config, backend=args.backend)
    if args.backend == "triton":
        jobs |= kernel_parts(q, k, v, [config for _, config in found])
    seconds = {name: spread(taken) for name, taken in samples(jobs, q.device, args.rounds).items()}

    dense, rank = seconds["dense"], seconds.get("rank")
    table = []
    for i, (target, config) in enumerate(found):
        whole, prefill, of_heads = seconds[f"s2o {i}"], seconds.get(f"prefill {i}"), density(config)
        work = float(of_heads.mean()) * dense["median"]
        row: dict[str, Any] = {
            "target": target,
            "density": float(of_heads.mean()),
            "seconds": whole,
            "prefill_seconds": prefill,
        }
        row |= {"rate": work / whole["median"], "prefill_rate": work / prefill["median"] if prefill else None}
        row |= {"rel_mse": rel_mse(jobs[f"s2o {i}"]()[:, :, rows], exact), "density_of_heads": of_heads.tolist()}
        table.append(row | {"tau_of_heads": [head.tau for head in config.heads]})
    error = rel_mse(jobs["dense"]()[:, :, rows], exact)
    return {
        "dense": {"backend": _dense_backend(q, k, v), "seconds": dense, "rel_mse": error},
        "rank": {"seconds": rank, "share_of_dense": rank["median"] / dense["median"]} if rank else None,
        "rows": table,
    }


def kernel_parts(q: Tensor, k: Tensor, v: Tensor, configs: list[LayerConfig]) -> dict[str, Job]:
    """The steps of `kernels.prefill.s2o_prefill` as jobs of their own: "rank", and "prefill i" for each config.

    The configs differ in tau only, which the ranking does not know, so they share one.
    """
    from s2o_runtime.kernels import prefill as kernel
    from s2o_runtime.kernels.call import Call, head_tables

    shape, scale = call_shape(q, k, v), q.shape[-1] ** -0.5
    calls = [Call(config, shape, scale, head_tables(config, q.device)) for config in configs]
    slices = kernel.row_slices(calls[0], kernel.WORKSPACE_BYTES)
    out = q.new_empty(shape.batch, shape.q_len, shape.query_heads, shape.head_dim).transpose(1, 2)
    tiles = shape.row_tiles(configs[0].tile.block_m)
    visited = torch.empty(shape.batch, shape.query_heads, tiles, dtype=torch.int32, device=q.device)

    def rankings_of() -> Iterator[tuple[Ranked, Tail | None]]:
        ranker = kernel.Ranker(q, k, v, calls[0])
        for rows in slices:
            yield ranker.rank(rows)

    rankings = list(rankings_of())

    def prefill(call: Call) -> Tensor:
        for rows, ranking in zip(slices, rankings, strict=True):
            kernel.prefill(q, k, v, ranking, out, visited, call, rows)
        return out

    parts: dict[str, Job] = {
        "rank": lambda: deque(rankings_of(), maxlen=0)
    }  # keeps no ranking longer than a real call does
    return parts | {f"prefill {i}": partial(prefill, call) for i, call in enumerate(calls)}


def made(args: argparse.Namespace, length: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v: noise, and a few directions per KV head that its keys share and its queries wander among.

    A segment's queries thus agree on what counts, weights fall off smoothly, and density is smooth in tau.
    """
    (query_heads, kv_heads), rng = args.heads, torch.Generator(device).manual_seed(args.seed)
    normal = partial(torch.randn, generator=rng, device=device)
    empty = partial(torch.empty, dtype=getattr(torch, args.dtype), device=device)
    q, k, v = (empty(args.batch, heads, length, args.head_dim) for heads in (query_heads, kv_heads, kv_heads))
    for b in range(args.batch):
        for h, sharp in enumerate(torch.linspace(*SHARP, query_heads).tolist()):
            kv, member = divmod(h, query_heads // kv_heads)
            if member == 0:
                shared = torch.linalg.qr(normal(args.head_dim, DIRECTIONS))[0].T
                along = args.head_dim**0.25 * normal(length, DIRECTIONS)
                k[b, kv], v[b, kv] = normal(length, args.head_dim) + along @ shared, normal(length, args.head_dim)
            turns = normal(1, DIRECTIONS, length // WANDER + 2)
            mix = F.normalize(F.interpolate(turns, length, mode="linear", align_corners=True)[0].T, dim=1)
            q[b, h] = normal(length, args.head_dim) + sharp * mix @ shared
    return q, k, v


def captured(args: argparse.Namespace, length: int, device: torch.device) -> tuple[Tensor, ...]:
    """q, k, v of a model reading standard library sources: its layers' heads one after another, repeated if too few."""
    from calibrate.capture import layers
    from calibrate.models import load, load_config
    from calibrate.prompts import source_text

    limit = int(load_config(args.data).max_position_embeddings)
    if length > limit:
        raise ConfigError(f"length {length} is beyond the model's limit of {limit}: use a shorter one")
    loaded = load(args.data, args.device)
    has, (query_heads, kv_heads) = loaded.geometry, args.heads
    if (has.query_heads * kv_heads, has.head_dim) != (query_heads * has.kv_heads, args.head_dim):
        sizes = f"{has.query_heads}/{has.kv_heads} heads of {has.head_dim}"
        raise ConfigError(f"{args.data} has {sizes}: use --heads of that ratio and that --head-dim")
    ids = [torch.tensor(source_text(loaded.tokenizer, length, random.Random(args.seed + b))) for b in range(args.batch)]
    parts: dict[str, list[Tensor]] = {name: [] for name in "qkv"}
    for _, prompts in zip(range(-(-kv_heads // has.kv_heads)), layers(loaded, ids), strict=False):
        batch = list(prompts)
        for name, tensors in parts.items():
            tensors.append(torch.cat([getattr(prompt, name) for prompt in batch]).to(getattr(torch, args.dtype)))
    heads = {"q": query_heads, "k": kv_heads, "v": kv_heads}
    whole = {name: torch.cat(tensors, 1) for name, tensors in parts.items()}
    return tuple(t[:, torch.arange(heads[name], device=device) % t.shape[1]] for name, t in whole.items())


def print_table(entry: dict[str, Any]) -> None:
    """One length and tile; aligned if rich is there."""
    dense, rank = entry["dense"], entry["rank"]
    title = f"{entry['length']} tokens, tile {entry['tile_name']}: {dense['backend']} {_ms(dense['seconds'])} ms, "
    title += f"rel_mse {dense['rel_mse']:.1e}"
    if rank:
        title += f"; ranking {_ms(rank['seconds'])} ms, {rank['share_of_dense']:.1%} of dense"
    lines = [("target", "density", "tau", "ms (p25-p75)", "vs dense", "rate", "without ranking", "rate", "rel_mse")]
    for row in entry["rows"]:
        taus, alone = row["tau_of_heads"], row["prefill_seconds"]
        lines.append((
            str(row["target"]), f"{row['density']:.3f}", f"{min(taus):.2g} .. {max(taus):.2g}", _ms(row["seconds"]),
            f"{dense['seconds']['median'] / row['seconds']['median']:.2f}x", f"{row['rate']:.2f}",
            _ms(alone) if alone else "-", f"{row['prefill_rate']:.2f}" if alone else "-", f"{row['rel_mse']:.1e}",
        ))  # fmt: skip
    try:
        from rich.console import Console
        from rich.table import Column, Table
    except ModuleNotFoundError:
        print(title, *("\t".join(line) for line in lines), sep="\n")
        return
    table = Table(*(Column(name, justify="right", no_wrap=True) for name in lines[0]))
    for line in lines[1:]:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 150).print(title, table, sep="\n", highlight=False, soft_wrap=True)


def _ms(seconds: dict[str, float]) -> str:
    return "{median:.3f} ({p25:.3f}-{p75:.3f})".format(**{name: 1e3 * value for name, value in seconds.items()})


def read(path: Path) -> dict[str, Any]:
    """A record that `measure` wrote."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise InputError(f"{path} cannot be read ({reason}): give files this script wrote") from None
    if not isinstance(record, dict) or record.get("format") != ATTENTION:
        raise InputError(f"{path} is not of format {ATTENTION}: give files this script wrote")
    return record


def plot(records: list[dict[str, Any]], out: Path) -> None:
    """Time against density: one panel for each length and setting, one colour for each tile and segment."""
    from matplotlib.figure import Figure

    if out.suffix not in PLOT_TYPES:
        raise ConfigError(f"--out {out} is not a picture: end it in one of {PLOT_TYPES}")
    panels: dict[tuple[int, str], list[tuple[str, dict[str, Any]]]] = {}
    for record in records:
        of, device = record["settings"], record["device"]["name"]
        setting = f"{device}, {of['data']} data\n"
        setting += "{heads[0]}/{heads[1]} heads of {head_dim}, batch {batch}, {dtype}".format(**of)
        for entry in record["results"]:
            series = f"{entry['tile_name']}, segment {of['segment']}"
            panels.setdefault((entry["length"], setting), []).append((series, entry))
    if not panels:
        raise InputError("the files hold no results: measure first")
    figure = Figure(figsize=(max(5.0 * len(panels), 7.0), 5.2), layout="constrained")
    legend: dict[str, Any] = {}
    colours: dict[str, str] = {}
    for index, ((length, setting), entries) in enumerate(sorted(panels.items()), 1):
        axes = figure.add_subplot(1, len(panels), index)
        _panel(axes, entries, colours)
        axes.set_title(f"{length} tokens\n{setting}", fontsize="medium")
        handles, names = axes.get_legend_handles_labels()
        legend |= dict(zip(names, handles, strict=True))
    figure.legend(list(legend.values()), list(legend), loc="outside lower center", ncols=min(3, len(legend)))
    figure.savefig(out, dpi=120)


def _panel(axes: Any, entries: list[tuple[str, dict[str, Any]]], colours: dict[str, str]) -> None:
    """Dense, ideal and target lines, and every series with its spread, on logarithmic axes."""
    from matplotlib.ticker import LogLocator

    dense = statistics.median(1e3 * entry["dense"]["seconds"]["median"] for _, entry in entries)
    lowest = min(row["density"] for _, entry in entries for row in entry["rows"])
    axes.axhline(dense, color="black", lw=1.2, label=f"dense ({entries[0][1]['dense']['backend']})")
    for rate, style, name in ((1.0, "--", "ideal"), (TARGET_RATE, "-.", "target")):
        ends = [lowest * dense / rate, dense / rate]
        axes.plot([lowest, 1], ends, style, color="grey", label=f"{name}: {rate:.0%} of dense's rate")
    for series, entry in entries:
        colour = colours.setdefault(series, f"C{len(colours)}")
        for key, name, look in (("seconds", series, "o-"), ("prefill_seconds", f"{series}, without ranking", "x:")):
            rows = sorted((row for row in entry["rows"] if row[key]), key=lambda row: row["density"])
            low, middle, high = (torch.tensor([1e3 * row[key][at] for row in rows]) for at in ("p25", "median", "p75"))
            if rows:
                x, bars = [row["density"] for row in rows], torch.stack((middle - low, high - middle)).numpy()
                axes.errorbar(x, middle.numpy(), bars, fmt=look, color=colour, ms=5, lw=1.3, label=name)
    axes.set(xscale="log", yscale="log", xlabel="density", ylabel="ms (median; bars: p25 to p75)")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    axes.grid(alpha=0.3)


def _dense_backend(q: Tensor, k: Tensor, v: Tensor) -> str:
    """The SDPA backend that `dense_attention` runs on."""
    with sdpa_kernel(FASTEST_FIRST, set_priority=True):
        choice = torch._fused_sdp_choice(q, k, v, None, 0.0, True, scale=None, enable_gqa=q.shape[1] != k.shape[1])
    return str(SDPBackend(choice).name)


def _check(args: argparse.Namespace) -> None:
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda is not here: use --device cpu")
    for name in ("batch", "head_dim", "rounds", "steps", "error_rows"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}: use at least 1")
    if len(args.heads) != 2 or min(args.heads) < 1 or args.heads[0] % args.heads[1]:
        raise ConfigError(f"--heads {args.heads} are not query heads and KV heads, the first a multiple: try 32/8")
    if min(args.lengths) <= args.segment:
        raise ConfigError(f"length {min(args.lengths)} is no longer than --segment {args.segment}: use a longer one")
    for density in args.densities:
        if not 0 < density < 1:
            raise ConfigError(f"density {density:g} is out of range: use shares above 0 and below 1")


def tile_of(text: str) -> TileConfig:
    shape, warps, stages, *kind = text.split(":")
    if kind not in ([], ["ws"]):
        raise ValueError
    block_m, block_n, chunk = map(int, shape.split("x"))
    return TileConfig(block_m, block_n, chunk, int(warps), int(stages), specialized=bool(kind))


if __name__ == "__main__":
    sys.exit(main())
