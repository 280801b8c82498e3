#!/usr/bin/env python3
"""Int8 scores against scores in the inputs' type: checked against the reference, then timed beside cuDNN.

    python -m scripts.bench.int8 [--lengths 8192,32768,131072] [--shapes 32/8/128,8/2/128,32/8/64] [--out FILE.json]

The kernels are first checked: short calls against the plain-torch reference that follows the same rule, for every tile.
Then, for every shape and length, tau is bisected for the wanted densities with scores in the inputs' type, and both
kinds of scores are timed with these taus. All times of a table come from one run on the same tensors, taking turns,
each with a cold L2: the whole call, its ranking (which counts what rounding the keys costs) and the rest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from calibrate.timing import FAILURES, medians, reason
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.attention.backend import Backend
from s2o_runtime.config import HeadConfig, LayerConfig, Scores, TileConfig
from s2o_runtime.devices import identify
from s2o_runtime.errors import ConfigError
from s2o_runtime.reference.dense import dense_attention
from s2o_runtime.shapes import call_shape
from s2o_runtime.tiles import candidate_tiles, default_tile
from scripts.bench.attention import parse_tile
from scripts.bench.calls import CPU_TILE, Job, bisect, kernel_parts
from scripts.bench.common import (
    Parser,
    add_op_options,
    bench_parser,
    check_device,
    check_least,
    check_lengths,
    checked,
    float_list,
    int_list,
    machine,
    run_command,
)
from scripts.bench.inputs import Inputs, random_qkv, rel_mse
from scripts.bench.schema import Int8Entry, Int8File, Int8Row, write

NAME = "scripts.bench.int8"
SCORES: tuple[Scores, ...] = ("input", "int8")
CHECKED = (  # heads, KV heads, queries, keys, head dim, first keys that count: short, and nothing is a multiple
    (4, 2, 1000, 1000, 128, None),
    (2, 2, 2049, 2049, 64, None),
    (4, 2, 700, 1999, 128, None),
    (4, 1, 900, 900, 64, (333,)),
)
MOST_OFF = 0.02  # |kernel - reference| / |reference|: bf16 weights and output, and entries that round to another level


def parser() -> Parser:
    out, add = bench_parser(NAME, __doc__)
    add("--lengths", "8192,32768,131072", type=int_list("8192,32768"), metavar="N,N")
    add("--densities", "0.02,0.06,0.3", type=float_list("0.05,0.2"), metavar="X,X")
    shapes = checked(lambda text: [tuple(map(int, part.split("/"))) for part in text.split(",")], "32/8/128,8/2/64")
    add("--shapes", "32/8/128,8/2/128,32/8/64", "query heads / KV heads / head dim", type=shapes, metavar="N/N/N,..")
    add_op_options(out, add, 5)
    add("--error-rows", 128, "query rows where errors against float32 attention are measured", type=int, metavar="N")
    tile = checked(parse_tile, "128x64x4:8:3 or 64x128x4:4:3:ws")
    out.add_argument("--tile", type=tile, help="of both kinds of scores; default by the GPU", metavar="TILE")
    out.add_argument("--int8-tile", type=tile, action="append", help="of int8 scores; repeatable", metavar="TILE")
    out.add_argument("--only-check", action="store_true", help="compare with the reference and time nothing")
    add("--out", Path("build/bench_int8.json"), type=Path, metavar="FILE")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run_command(NAME, args.out, lambda: measure(args), "shorter --lengths")


@torch.no_grad()
def measure(args: argparse.Namespace) -> None:
    """Check, then measure every shape and length. What there is so far is in --out after every row.

    Raises:
        ConfigError: an option is out of range; at the end, if a check or a measurement failed, which one.
    """
    check_device(args)
    check_least(args, 1, "rounds", "steps", "error_rows")
    check_lengths(args, args.segment + 1)
    device = torch.device(args.device)
    settings = {name: str(value) for name, value in vars(args).items() if name != "out"}
    file = Int8File(settings=settings, checks={}, results=[], failures={}, **machine(device))
    for name, check in checks(device):
        with remembered(file.failures, name):
            file.checks[name] = check()
            if not file.checks[name] <= MOST_OFF:
                file.failures[name] = f"is off the reference by {file.checks[name]:.1e}, more than {MOST_OFF}"
        print(f"{name}: {file.checks[name]:.1e} off" if name in file.checks else name, flush=True)
        write(args.out, file)
    for heads, kv_heads, head_dim in [] if args.only_check else args.shapes:
        for length in args.lengths:
            with remembered(file.failures, f"{length} tokens, {heads}/{kv_heads} heads of {head_dim}"):
                qkv = random_qkv(
                    length=length, batch=1, heads=(heads, kv_heads), head_dim=head_dim, dtype=torch.bfloat16,
                    seed=args.seed, device=device,
                )  # fmt: skip
                bench(args, Inputs.of(qkv, args.error_rows, args.seed), file)
    write(args.out, file)
    if file.failures:
        name, problem = next(iter(file.failures.items()))
        raise ConfigError(f"{len(file.failures)} of the checks and measurements failed, first {name}: {problem}")


@contextmanager
def remembered(failures: dict[str, str], name: str) -> Iterator[None]:
    """Keep what a GPU cannot do, by its name, and go on."""
    try:
        yield
    except FAILURES as failure:
        failures[name] = reason(failure)
        print(f"{name} failed: {failures[name]}", file=sys.stderr, flush=True)


def tiles_of(head_dim: int, device: torch.device) -> list[TileConfig]:
    """Every tile that ships for the device, with checks of the stop two tiles apart."""
    if device.type == "cpu":
        return [CPU_TILE]
    tiles = candidate_tiles(head_dim, identify(device).capability)
    return sorted({replace(tile, chunk=2) for tile in tiles}, key=str)


def checks(device: torch.device) -> Iterator[tuple[str, Callable[[], float]]]:
    """|kernel - reference| / |reference| of short int8 calls that never stop: their names, and what computes it."""
    generator = torch.Generator(device).manual_seed(0)
    for heads, kv_heads, q_len, kv_len, head_dim, starts in CHECKED:
        q, k, v = (
            torch.randn(1, count, length, head_dim, generator=generator, device=device).bfloat16()
            for count, length in ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
        )
        q, k = 2 * q, k + 3 * torch.randn(head_dim, generator=generator, device=device).bfloat16()
        kv_start = None if starts is None else torch.tensor(starts, device=device)
        for tile in tiles_of(head_dim, device):
            kinds = (HeadConfig(0.0, 256, representatives=8, tail=True), HeadConfig(0.0, 512), HeadConfig(mode="dense"))
            config = LayerConfig(tuple(kinds[h % 3] for h in range(heads)), tile, grain=4, scores="int8")
            name = f"{heads}/{kv_heads} heads of {head_dim}, {q_len} of {kv_len}, from {starts}, {tile}"
            yield name, partial(off_the_reference, q, k, v, config, kv_start)


def off_the_reference(q: Tensor, k: Tensor, v: Tensor, config: LayerConfig, kv_start: Tensor | None) -> float:
    """|kernel - reference| / |reference| of a call."""
    expected = s2o_attention(q, k, v, config, kv_start=kv_start, backend="reference").float()
    ours = s2o_attention(q, k, v, config, kv_start=kv_start, backend=kernel_backend(q.device)).float()
    return float((ours - expected).norm() / expected.norm())


def kernel_backend(device: torch.device) -> Backend:
    return "triton" if device.type == "cuda" else "reference"


def bench(args: argparse.Namespace, inputs: Inputs, file: Int8File) -> None:
    """One shape and length: cuDNN, and for every density a row of each kind of scores and tile, which take turns."""
    q, k, v = inputs.q, inputs.k, inputs.v
    backend, shape = kernel_backend(q.device), call_shape(q, k, v)
    tile = args.tile or (default_tile(shape.head_dim, identify(q.device).capability) if q.is_cuda else CPU_TILE)
    ranking = {name: getattr(args, name) for name in ("segment", "representatives", "grain", "tail")}
    never_stop = LayerConfig.uniform(shape.query_heads, tile=tile, **ranking)
    forms: list[tuple[Scores, TileConfig]] = [("input", tile), ("int8", tile)]
    forms += [("int8", other) for other in args.int8_tile or []]
    dense = partial(dense_attention, q, k, v)
    entry = Int8Entry(
        length=shape.q_len,
        heads=[shape.query_heads, shape.kv_heads],
        head_dim=shape.head_dim,
        dense_seconds=medians({"": dense}, q.device, args.rounds)[""],
        dense_rel_mse=rel_mse(dense()[:, :, inputs.rows], inputs.exact),
        rank_seconds={},
        keys_seconds={},
        rows=[],
    )
    file.results.append(entry)
    print(
        f"{entry.length} tokens, {entry.heads[0]}/{entry.heads[1]} heads of {entry.head_dim}: "
        f"cuDNN {1e3 * entry.dense_seconds:.3f} ms, rel_mse {entry.dense_rel_mse:.1e}",
        flush=True,
    )

    def density(config: LayerConfig) -> Tensor:
        of_heads: Tensor = s2o_attention(q, k, v, config, backend=backend, return_stats=True).density
        return of_heads.cpu()

    wanted: dict[str, Callable[[], LayerConfig]] = {"dense": never_stop.as_dense, "never stop": lambda: never_stop}
    wanted |= {
        f"{target:g}": partial(bisect, never_stop, target, args.steps, density)
        for target in sorted(args.densities, reverse=True)
    }
    for target, config_of in wanted.items():
        config = config_of()
        jobs: dict[str, Job] = {"cuDNN": dense}
        configs: dict[str, LayerConfig] = {}
        for scores, of_form in forms:
            name = f"{scores} {of_form}"
            with remembered(file.failures, f"{entry.length} tokens, {name}, {target}"):
                of_scores = replace(config, tile=of_form, scores=scores).validate()
                job = partial(s2o_attention, q, k, v, of_scores, backend=backend)
                job()  # compiles, or fails
                configs[name], jobs[name] = of_scores, job
                if backend == "triton" and not config.is_dense:
                    rank, (jobs[f"{name}, prefill"],) = kernel_parts(q, k, v, [of_scores])
                    if name not in entry.rank_seconds:
                        jobs[f"{name}, rank"] = rank
                        if scores == "int8":
                            jobs[f"{name}, keys"] = rounding(q, k, of_scores)
        seconds = medians(jobs, q.device, args.rounds)
        for name, of_scores in configs.items():
            of_heads = density(of_scores)
            row = Int8Row(
                scores=of_scores.scores,
                tile=str(of_scores.tile),
                target=target,
                density=float(of_heads.mean()),
                dense_seconds=seconds["cuDNN"],
                seconds=seconds[name],
                prefill_seconds=seconds.get(f"{name}, prefill"),
                rate=float(of_heads.mean()) * seconds["cuDNN"] / seconds[name],
                rel_mse=rel_mse(jobs[name]()[:, :, inputs.rows], inputs.exact),
            )
            entry.rows.append(row)
            print_row(row)
            for of_entry, part in ((entry.rank_seconds, "rank"), (entry.keys_seconds, "keys")):
                if f"{name}, {part}" in seconds:
                    of_entry[name] = seconds[f"{name}, {part}"]
                    print(f"  {name}: {part} {1e3 * of_entry[name]:.3f} ms", flush=True)
        write(Path(args.out), file)


def rounding(q: Tensor, k: Tensor, config: LayerConfig) -> Job:
    """Rounding the keys to 8 bits, which is part of the ranking."""
    from s2o_runtime.kernels.call import Call, head_tables
    from s2o_runtime.kernels.keys import keys_of

    return partial(keys_of, k, Call(config, call_shape(q, k, k), q.shape[-1] ** -0.5, head_tables(config, q.device)))


def print_row(row: Int8Row) -> None:
    alone = f"{1e3 * row.prefill_seconds:9.3f}" if row.prefill_seconds else "        -"
    print(
        f"  {row.scores:5} {row.tile:18} {row.target:>10}: density {row.density:.4f}, {1e3 * row.seconds:9.3f} ms, "
        f"{alone} without ranking, {row.dense_seconds / row.seconds:6.2f}x of cuDNN, rate {row.rate:.2f}, "
        f"rel_mse {row.rel_mse:.1e}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
