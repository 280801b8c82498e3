#!/usr/bin/env python3
"""What dense last rows cost, and that they are dense.

    python -m scripts.study.last_rows [--lengths 8192,32768,131072] [--heads 32/8 8/2]

First calls of all kinds are checked: with last rows, rows before them are what they were without, and they themselves
are off from float32 dense attention by no more than rounding. Then for each length, at a density that is usual there, a
layer is timed with 0, 128, 256 and 512 last rows, in turns, each with a cold L2, beside cuDNN.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from calibrate.timing import samples
from s2o_runtime.attention.api import s2o_attention, s2o_attention_varlen
from s2o_runtime.config import LAST_ROWS, HeadConfig, LayerConfig, TileConfig
from s2o_runtime.errors import S2OError
from s2o_runtime.reference.dense import dense_attention, exact_attention
from s2o_runtime.tiles import candidate_tiles
from scripts.bench.calls import bisect, device_tile
from scripts.bench.common import (
    BAD_INPUT,
    OK,
    Parser,
    add_device,
    bench_parser,
    check_device,
    checked,
    int_list,
    spread,
)
from scripts.bench.inputs import random_qkv, rel_mse

NAME = "scripts.study.last_rows"
DENSITIES = {8192: 0.45, 32768: 0.2, 131072: 0.12}  # of the demo model at rel_mse 1e-3, about
ROUNDING = 3e-5  # rel_mse of an output in bfloat16
SAME = 1e-7  # rel_mse of rows that are to be equal: where the order of equal keys is decided by atomics


def parser() -> Parser:
    out, add = bench_parser(NAME, __doc__)
    heads = checked(lambda text: tuple(map(int, text.split("/"))), "32/8")
    add("--lengths", tuple(DENSITIES), type=int_list("8192,32768"), metavar="N,N")
    add("--heads", [(32, 8), (8, 2)], "query heads / KV heads", type=heads, nargs="+", metavar="N/N")
    add("--segment", 1024, "queries that share a ranking", type=int, metavar="N")
    add("--rounds", 7, "turns that are timed, after one that is not", type=int, metavar="N")
    add_device(add)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        check_device(args)
        device = torch.device(args.device)
        with torch.no_grad():
            check(device)
            for heads in args.heads:
                for length in args.lengths:
                    price(args, heads, length, device)
    except S2OError as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return BAD_INPUT
    return OK


def tensors(heads: tuple[int, int], length: int, batch: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [B, H, L, 128] in bfloat16."""
    return random_qkv(
        length=length, batch=batch, heads=heads, head_dim=128, dtype=torch.bfloat16, seed=0, device=device
    )


def layers(device: torch.device) -> dict[str, LayerConfig]:
    """Layers with heads of every kind, for each kernel that the device has."""
    on_gpu = device.type == "cuda"
    tiles = {"torch": TileConfig(64, 64, 4)}
    if on_gpu:
        of_device = candidate_tiles(128, torch.cuda.get_device_capability(device))
        tiles = {"triton": TileConfig()} | {f"specialized {tile}": tile for tile in of_device if tile.specialized}
    kinds = {
        "heads of all modes": (
            HeadConfig(1e4, 512, tail="mean"), HeadConfig(1e4, 512, representatives=16), HeadConfig(mode="dense"),
            HeadConfig(1e4, 512, representatives=16, tail="mean"),
        ),
    }  # fmt: skip
    return {
        f"{name}, {kind}": LayerConfig(heads, tile).validate()
        for name, tile in tiles.items()
        for kind, heads in kinds.items()
    }


def check(device: torch.device) -> None:
    """Compare calls of all kinds with dense attention. Raises AssertionError."""
    backend: Any = "triton" if device.type == "cuda" else "reference"
    run = partial(s2o_attention, backend=backend)
    q, k, v = tensors((4, 2), 3333, 2, device)
    starts = torch.tensor([0, 1700], device=device)
    for name, config in layers(device).items():
        rows = replace(config, last_rows=256)
        for kind, call_q, start in (
            ("whole", q, None), ("padded", q, starts), ("chunk", q[:, :, -900:], None), ("short", q[:, :, -300:], None),
        ):  # fmt: skip
            truth = exact_attention(call_q, k, v, kv_start=start)
            ours, without = (run(call_q, k, v, layer, kv_start=start) for layer in (rows, config))
            compare(f"{name}, {kind}", ours, without, truth, rows.dense_from(call_q.shape[2]))
        edges = torch.tensor([0, 900, 3333], dtype=torch.int32, device=device)
        q_rows, k_rows, v_rows = (tensor[0].transpose(0, 1).contiguous() for tensor in (q, k, v))
        packed = s2o_attention_varlen(q_rows, k_rows, v_rows, edges, edges, 2433, 2433, rows, backend=backend)
        out = packed.transpose(0, 1)[None]
        for part in (slice(0, 900), slice(900, 3333)):
            alone = [tensor[:1, :, part] for tensor in (q, k, v)]
            first = rows.dense_from(part.stop - part.start)
            compare(f"{name}, packed", out[:, :, part], run(*alone, config), exact_attention(*alone), first)
        q_behind, *behind = tensors((4, 2), 16384, 1, device)  # where dense heads are split over keys
        q_behind = q_behind[:, :, -1000:]
        ours, without = (run(q_behind, *behind, layer) for layer in (rows, config))
        compare(f"{name}, behind", ours, without, exact_attention(q_behind, *behind), rows.dense_from(1000))
    print("checked: last rows are dense, all others what they were", flush=True)


def compare(name: str, ours: Tensor, without: Tensor, truth: Tensor, first: int) -> None:
    """Raise AssertionError where the rows from `first` on are not dense, or others have changed."""
    off = rel_mse(ours[:, :, first:], truth[:, :, first:].float())
    assert off < ROUNDING, f"{name}: the last rows are off by {off:.1e}"
    if first:
        moved = rel_mse(ours[:, :, :first], without[:, :, :first].float())
        assert moved <= SAME, f"{name}: rows before the last have changed by {moved:.1e}"
    sparse = rel_mse(without[:, :, first:], truth[:, :, first:].float())
    print(f"{name}: rel_mse of the last rows {off:.1e}, without {sparse:.1e}", flush=True)


def price(args: argparse.Namespace, heads: tuple[int, int], length: int, device: torch.device) -> None:
    """Print the times of a layer at one length."""
    q, k, v = tensors(heads, length, 1, device)
    never_stop = LayerConfig.uniform(
        heads[0], segment=args.segment, representatives=16, tail="mean", tile=device_tile(128, device)
    )

    def density(config: LayerConfig) -> Tensor:
        return s2o_attention(q, k, v, config, return_stats=True).density.cpu()

    target = DENSITIES[min(DENSITIES, key=lambda known: abs(known - length))]
    layer = bisect(never_stop, target, 8, density)
    configs = {rows: replace(layer, last_rows=rows) for rows in LAST_ROWS}
    jobs = {"cuDNN": partial(dense_attention, q, k, v)}
    jobs |= {f"{rows} last rows": partial(s2o_attention, q, k, v, config) for rows, config in configs.items()}
    seconds = {name: spread(times) for name, times in samples(jobs, device, args.rounds).items()}
    none, dense = seconds["0 last rows"].median, seconds["cuDNN"].median
    print(f"{length} tokens, {heads[0]}/{heads[1]} heads, tile {layer.tile}", flush=True)
    print(f"  cuDNN {1e3 * dense:.3f} ms", flush=True)
    for rows, config in configs.items():
        time = seconds[f"{rows} last rows"]
        print(
            f"  {rows:3} last rows: density {float(density(config).mean()):.3f}, {1e3 * time.median:.3f} ms "
            f"({1e3 * time.p25:.3f}-{1e3 * time.p75:.3f}), {time.median / none - 1:+.1%}, "
            f"{dense / time.median:.2f}x cuDNN",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
