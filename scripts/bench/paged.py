#!/usr/bin/env python3
"""Keys and values in the pages of a cache: read where they lie, or copied out of them first.

    python -m scripts.bench.paged [--heads 32,8] [--page-size 16] [--density 0.25]

Each row is one call of a layer as a server makes it: so many queries, the last of so many keys, which lie in shuffled
pages. Three ways are timed in turns: the op as it is, the op where it is made to copy, and the op on keys that lie one
behind another, which no server has. Of the first two the outputs must be equal to the last bit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor

from calibrate.timing import medians
from s2o_runtime import s2o_attention_paged, s2o_attention_varlen
from s2o_runtime.attention import paged
from s2o_runtime.attention.backend import Backend
from s2o_runtime.config import LayerConfig
from s2o_runtime.errors import InputError
from s2o_runtime.tiles import DECODE
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
from scripts.bench.tails import config_of, last

NAME = "scripts.bench.paged"
SPARE = 1.25  # pages of the cache over those of the sequence


@dataclass(frozen=True)
class Point:
    """One call: medians in seconds, and what the copy takes of the device's memory, in bytes."""

    queries: int
    keys: int
    in_place_seconds: float
    copy_seconds: float
    contiguous_seconds: float
    copy_bytes: int


@dataclass(frozen=True, kw_only=True)
class PagedFile(ResultFile):
    program: ClassVar[str] = f"python -m {NAME}"

    format: str = "s2o-bench-paged/1"
    settings: dict[str, Any]
    points: list[Point]


def parser() -> Parser:
    out, add = bench_parser(NAME, __doc__)
    add("--queries", "512,2048,8192", type=int_list("2048,8192"), metavar="N,N")
    add("--keys", "8192,32768,131072", type=int_list("2048,131072"), metavar="N,N")
    add("--heads", "32,8", "query heads and KV heads", metavar="N,N")
    add("--head-dim", 128, type=int, metavar="N")
    add("--page-size", 16, "tokens of a page, a power of two", type=int, metavar="N")
    add("--density", 0.25, "share of the causal pairs that a whole prompt computes", type=float, metavar="X")
    add("--dense-heads", 0, "that visit every key, the first ones", type=int, metavar="N")
    add_op_options(out, add, rounds=8)
    add("--out", Path("build/bench_paged.json"), type=Path, metavar="FILE")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run_command(NAME, args.out, lambda: measure(args), "fewer --keys or --heads")


@torch.no_grad()
def measure(args: argparse.Namespace) -> None:
    """Time all calls, print them and write --out."""
    check_device(args)
    check_least(args, 1, "rounds", "steps", "page_size")
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
    config = with_dense_heads(config_of(longest, args), args.dense_heads)
    points = [
        timed(last(longest, queries, keys), config, args.page_size, args.rounds)
        for keys in args.keys
        for queries in sorted({*args.queries, keys})
        if queries <= keys
    ]
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    file = PagedFile(settings=settings, points=points, **machine(device))
    report(file)
    write(args.out, file)


def with_dense_heads(config: LayerConfig, count: int) -> LayerConfig:
    """The layer with its first heads dense, and for calls of every size."""
    heads = tuple(replace(head, mode="dense") if index < count else head for index, head in enumerate(config.heads))
    tile = replace(config.tile, dense_below=0, min_queries=DECODE, tail_keys=0)
    return replace(config, heads=heads, tile=tile)


def in_pages(k: Tensor, v: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """k and v [1, Hkv, L, D] in shuffled pages: k_cache and v_cache [pages, page size, Hkv, D], block_table [1, M]."""
    _, heads, length, head_dim = k.shape
    needed = -(-length // page_size)
    shuffled = torch.randperm(int(needed * SPARE) + 1, device=k.device)[:needed]
    cache = k.new_zeros(2, int(needed * SPARE) + 1, page_size, heads, head_dim)
    token = torch.arange(length, device=k.device)
    page, slot = shuffled[token // page_size], token % page_size
    for own, rows in zip(cache, (k, v), strict=True):
        own[page, slot] = rows[0].transpose(0, 1)
    return cache[0], cache[1], shuffled[None].to(torch.int32)


def timed(qkv: QKV, config: LayerConfig, page_size: int, rounds: int) -> Point:
    """One call in the three ways.

    Raises:
        InputError: reading in place gives another output than the copy.
    """
    q, k, v = qkv
    queries, keys, device = q.shape[2], k.shape[2], q.device
    k_cache, v_cache, table = in_pages(k, v, page_size)
    packed_q, packed_k, packed_v = (tensor[0].transpose(0, 1).contiguous() for tensor in qkv)
    cu_q, cu_k = (torch.tensor([0, length], dtype=torch.int32, device=device) for length in (queries, keys))
    backend: Backend = "triton" if device.type == "cuda" else "reference"
    of_pages: Callable[..., Tensor] = partial(
        s2o_attention_paged, packed_q, k_cache, v_cache, config, cu_q=cu_q, seq_lens=cu_k[1:].clone(),
        block_table=table, max_q=queries, max_k=keys, cu_k=cu_k, backend=backend,
    )  # fmt: skip

    def in_place() -> Tensor:
        return of_pages(total_k=keys)

    def copied() -> Tensor:  # another total_k, so that the calls of the two ways are not alike
        with patch.object(paged, "in_place_obstacle", lambda *_: "asked for"):
            return of_pages(total_k=keys + 1)

    def contiguous() -> Tensor:
        return s2o_attention_varlen(
            packed_q, packed_k, packed_v, cu_q, cu_k, queries, keys, config, backend=backend
        )  # fmt: skip

    if not torch.equal(in_place(), copied()):
        raise InputError(f"{queries} queries behind {keys} keys: read in place the output is not that of the copy")
    seconds = medians({"in place": in_place, "copy": copied, "contiguous": contiguous}, device, rounds)
    return Point(
        queries, keys, seconds["in place"], seconds["copy"], seconds["contiguous"], packed_k.nbytes + packed_v.nbytes
    )


def report(file: PagedFile) -> None:
    """Print one row a call."""
    rows = [
        [
            str(point.queries),
            str(point.keys),
            f"{point.in_place_seconds * 1e3:.3f}",
            f"{point.copy_seconds * 1e3:.3f}",
            f"{point.contiguous_seconds * 1e3:.3f}",
            f"{point.copy_seconds / point.in_place_seconds:.3f}",
            f"{point.copy_bytes / 1e6:.0f}",
        ]
        for point in file.points
    ]
    titles = ["queries", "keys", "in place, ms", "copy, ms", "contiguous, ms", "copy / in place", "copy, MB"]
    print_table(f"pages of {file.settings['page_size']} tokens", titles, rows)


if __name__ == "__main__":
    sys.exit(main())
