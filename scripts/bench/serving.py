#!/usr/bin/env python3
"""Time to the first token and throughput of a server, or, without one, the attention of a modelled one.

    python -m scripts.bench.serving [--lengths 8192,32768,131072] [--chunks 2048,8192,16384] [--densities 0.25,0.1]
    python -m scripts.bench.serving --url http://localhost:8000/v1 --model NAME --label S2O [--concurrency 1,4]

With --url prompts of random words are sent to an OpenAI-compatible server, some of whose tokens it has in its prefix
cache; no prompt is of an earlier run. Run it once against a server with S2O and once against one without; chunks are
the server's. A kind of prompt that the server refuses, such as one longer than it takes, is said and left out. --out is
written after each kind.

Without, one layer's attention is timed as vLLM would call it: S2O's backend with the real kernels, between a fake of
vLLM's classes (scripts/bench/fake_vllm.py), over all chunks of a prompt behind what is cached of it. What a server does
besides is not in these times. Two times stand for the stock backend: torch's dense attention of the same chunks, whose
FlashAttention 2 is slow on a Hopper GPU, and what they would take at the rate of one whole prompt in cuDNN, which
FlashAttention 3 in a server comes near.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from calibrate.search.crossover import with_crossover
from calibrate.timing import medians
from s2o_runtime.attention.api import s2o_attention
from s2o_runtime.config import LayerConfig
from s2o_runtime.devices import identify
from s2o_runtime.errors import ConfigError, InputError
from s2o_runtime.identity import Geometry
from s2o_runtime.profile import Profile
from s2o_runtime.reference.dense import dense_attention
from s2o_runtime.serving.fit import Rank
from s2o_runtime.shapes import CallShape
from scripts.bench.common import (
    Parser,
    add_op_options,
    bench_parser,
    check_device,
    check_least,
    float_list,
    int_list,
    machine,
    print_table,
    run_command,
)
from scripts.bench.fake_vllm import FakeEngine, FakeServer
from scripts.bench.inputs import QKV, random_qkv
from scripts.bench.schema import ResultFile, write
from scripts.bench.tails import config_of, last

NAME = "scripts.bench.serving"
PAGE = 16  # tokens
KEY_VARIABLE = "OPENAI_API_KEY"
SHOWN = 300  # characters of what a server says of an error


@dataclass(frozen=True)
class ModelledPrompt:
    """One layer's attention over a prompt; seconds of all its chunks together.

    s2o_seconds: S2O's backend. dense_seconds: dense attention of the same calls. at_whole_rate_seconds: what their
    query-key pairs take dense at the rate of one whole prompt of the same length.
    """

    length: int
    chunk: int
    cached: float
    density: float
    s2o_seconds: float
    dense_seconds: float
    at_whole_rate_seconds: float


@dataclass(frozen=True)
class ServedPrompts:
    """What a server did with some prompts: the median time to the first token, and prompt tokens per second."""

    label: str
    length: int
    cached: float
    concurrency: int
    first_token_seconds: float
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class ServingFile(ResultFile):
    """settings: the options. modelled: without a server; served: with one."""

    program: ClassVar[str] = f"python -m {NAME}"

    format: str = "s2o-bench-serving/1"
    settings: dict[str, Any]
    modelled: list[ModelledPrompt]
    served: list[ServedPrompts]


def parser() -> Parser:
    out, add = bench_parser(NAME, __doc__)
    add("--lengths", "8192,32768,131072", "tokens of a prompt", type=int_list("8192,131072"), metavar="N,N")
    add("--hits", "0,0.5,0.99", "shares of a prompt that are cached", type=float_list("0,0.5"), metavar="X,X")
    add("--chunks", "2048,8192,16384", "tokens of a server's batch", type=int_list("2048,8192"), metavar="N,N")
    add("--densities", "0.25,0.1", "of a whole prompt", type=float_list("0.25,0.1"), metavar="X,X")
    add("--heads", "32,8", "query heads and KV heads of a rank", metavar="N,N")
    add("--head-dim", 128, type=int, metavar="N")
    add_op_options(out, add, rounds=3)
    add("--url", None, "of an OpenAI-compatible server, up to /v1", metavar="URL")
    add("--model", None, "what the server calls its model", metavar="NAME")
    add("--api-key", None, f"that the server asks for; by default the variable {KEY_VARIABLE}", metavar="KEY")
    add("--label", "S2O", "what the server runs, for the result", metavar="TEXT")
    add("--concurrency", "1,4", "prompts at a time", type=int_list("1,4"), metavar="N,N")
    add("--prompts", 4, "prompts of each kind that are sent", type=int, metavar="N")
    add("--out", Path("build/bench_serving.json"), type=Path, metavar="FILE")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run_command(NAME, args.out, lambda: measure(args), "shorter --lengths or fewer --heads")


@torch.no_grad()
def measure(args: argparse.Namespace) -> None:
    """Measure, print and write --out."""
    check(args)
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "keys", "api_key")}
    on = machine(torch.device(args.device))
    file = ServingFile(settings=settings, modelled=[], served=[], **on)
    refused: list[InputError] = []
    for row in served_prompts(args, refused) if args.url else modelled_prompts(args):
        if isinstance(row, ServedPrompts):
            file.served.append(row)
        else:
            file.modelled.append(row)
        write(args.out, file)
    report(file)
    if refused and not file.served:
        raise refused[0]
    if refused:
        raise InputError(f"{len(refused)} kinds of prompts failed, {args.out} has the others: {refused[0]}")


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError for what can be known before anything is measured."""
    check_device(args)
    check_least(args, 1, "prompts")
    if not 0 <= args.hits[0] <= args.hits[-1] <= 1:
        raise ConfigError(f"--hits are {', '.join(map(str, args.hits))}: use shares from 0 to 1")
    if min(args.lengths[0], args.chunks[0], args.concurrency[0]) < 1:
        raise ConfigError("--lengths, --chunks and --concurrency need numbers of at least 1")
    if args.url and not args.model:
        raise ConfigError("--url needs the model's name: give --model")
    if args.url and args.prompts < args.concurrency[-1]:
        raise ConfigError(f"--prompts {args.prompts} cannot be {args.concurrency[-1]} at a time: use at least as many")


def modelled_prompts(args: argparse.Namespace) -> Iterator[ModelledPrompt]:
    """Every density, length, chunk and share of the cache, one layer each."""
    device = torch.device(args.device)
    query_heads, kv_heads = (int(part) for part in args.heads.split(","))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    args.keys = args.lengths
    longest = random_qkv(
        length=args.lengths[-1],
        batch=1,
        heads=(query_heads, kv_heads),
        head_dim=args.head_dim,
        dtype=dtype,
        seed=args.seed,
        device=device,
    )
    geometry = Geometry("bench", 1, query_heads, kv_heads, args.head_dim)
    for density in args.densities:
        config = config_of(longest, argparse.Namespace(**{**vars(args), "density": density}))
        if device.type == "cuda":
            config = config.with_tile(with_crossover(config, geometry, device, density))
        for length in args.lengths:
            for chunk in args.chunks:
                for cached in args.hits:
                    yield modelled_prompt(last(longest, length, length), config, geometry, chunk, cached, args)


def modelled_prompt(
    qkv: QKV, config: LayerConfig, geometry: Geometry, chunk: int, cached: float, args: argparse.Namespace
) -> ModelledPrompt:
    """One prompt in chunks behind the share of it that is cached, whole pages of it, and at least one token new."""
    length, device = qkv[0].shape[2], qkv[0].device
    profile = Profile("bench", geometry, "", identify(device), (1, length), ((config,), (config,)))
    server = FakeServer(profile, Rank(), device, max_keys=length)
    pages = -(-length // PAGE)
    engine = FakeEngine(server, page_size=PAGE, pages=pages, dtype=qkv[0].dtype, device=str(device))
    request = engine.add_prompt(*(tensor[0].transpose(0, 1) for tensor in qkv))
    begin = min(int(cached * length), length - 1) // PAGE * PAGE
    if begin:
        engine.prepare([(request, begin)])
    prepared, calls = [], []
    while request.done < length:
        prepared.append(engine.prepare([(request, min(chunk, length - request.done))]))
        calls.append(last(qkv, len(prepared[-1].query), request.done))

    def forward() -> None:
        for batch in prepared:
            batch.forward()

    def dense() -> None:
        for call in calls:
            dense_attention(*call)

    jobs: dict[str, Callable[[], Any]] = {"s2o": forward, "dense": dense, "whole": partial(dense_attention, *qkv)}
    seconds = medians(jobs, device, args.rounds)
    share = sum(causal_pairs(*call) for call in calls) / causal_pairs(*qkv)
    return ModelledPrompt(
        length=length,
        chunk=chunk,
        cached=begin / length,
        density=density_of(calls, config),
        s2o_seconds=seconds["s2o"],
        dense_seconds=seconds["dense"],
        at_whole_rate_seconds=share * seconds["whole"],
    )


def causal_pairs(q: Tensor, k: Tensor, v: Tensor) -> int:
    """The query-key pairs of one head in a call."""
    return CallShape(1, 1, 1, q.shape[2], k.shape[2], 1, 1).causal_pairs


def density_of(calls: Sequence[QKV], config: LayerConfig) -> float:
    """The pairs that calls compute over their causal pairs, the mean over heads."""
    computed, causal = 0.0, 0
    for q, k, v in calls:
        pairs = causal_pairs(q, k, v)
        computed += pairs * float(s2o_attention(q, k, v, config, return_stats=True).density.mean())
        causal += pairs
    return computed / causal


def served_prompts(args: argparse.Namespace, refused: list[InputError]) -> Iterator[ServedPrompts]:
    """Every length, share of the cache and concurrency, sent to the server; what went wrong is printed and appended."""
    rng = random.Random(args.seed)
    for length, cached, concurrency in product(args.lengths, args.hits, args.concurrency):
        try:
            yield served_prompt(args, rng, length, cached, concurrency)
        except InputError as error:
            kind = f"{length} tokens, {cached:.0%} cached, {concurrency} at a time"
            print(f"{NAME}: {kind}: {error}", file=sys.stderr)
            refused.append(error)


def served_prompt(
    args: argparse.Namespace, rng: random.Random, length: int, cached: float, concurrency: int
) -> ServedPrompts:
    """Prompts of one kind, sent to the server after one that is not timed.

    Raises InputError as `first_token_seconds` does.
    """
    shared = _words(rng, int(cached * length))
    uncounted, *texts = [f"{shared} {_words(rng, length - int(cached * length))}" for _ in range(args.prompts + 1)]
    if shared:
        first_token_seconds(args, shared)  # fills the cache
    first_token_seconds(args, uncounted)  # what a server does for the first of its kind, such as compiling
    began = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        seconds = list(pool.map(partial(first_token_seconds, args), texts))
    took = time.perf_counter() - began
    rate = length * len(texts) / took
    return ServedPrompts(args.label, length, cached, concurrency, statistics.median(seconds), rate)


def _words(rng: random.Random, count: int) -> str:
    """So many random short words, nearly a token each.

    The first are of no seed, so that a server has them of no earlier run in its prefix cache, nor what follows them.
    """
    fresh = min(count, FRESH)
    return " ".join([*random.SystemRandom().choices(WORDS, k=fresh), *rng.choices(WORDS, k=count - fresh)])


FRESH = 16  # words
WORDS = ("the", "of", "and", "to", "in", "is", "it", "you", "that", "he", "was", "for", "on", "are", "with", "as")


def first_token_seconds(args: argparse.Namespace, prompt: str) -> float:
    """The time from sending a prompt to the first token of the answer.

    Raises:
        InputError: the server cannot be reached, refuses the prompt, or answers with something else than tokens.
    """
    body = {"model": args.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True}
    headers = {"Content-Type": "application/json"}
    if key := args.api_key or os.environ.get(KEY_VARIABLE):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(f"{args.url.rstrip('/')}/completions", json.dumps(body).encode(), headers)
    began = time.perf_counter()
    try:
        with urllib.request.urlopen(request) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    took = time.perf_counter() - began
                    if "error" in (event := json.loads(line.removeprefix(b"data: "))):
                        raise InputError(f"{args.url} answered with an error ({event['error']}): check its log")
                    return took
    except urllib.error.HTTPError as error:
        said = " ".join(error.read().decode(errors="replace").split())[:SHOWN]
        raise InputError(
            f"{args.url} refused a prompt ({error}: {said}): check --model, --lengths and --api-key"
        ) from error
    except (OSError, ValueError) as error:
        raise InputError(f"{args.url} did not answer ({error}): check --url and --model") from error
    raise InputError(f"{args.url} sent no tokens: expected the completions of an OpenAI-compatible server")


def report(file: ServingFile) -> None:
    """Print what was measured."""
    if file.modelled:
        rows = [
            [
                str(row.length),
                str(row.chunk),
                f"{row.cached:.0%}",
                f"{row.density:.3f}",
                f"{row.s2o_seconds * 1e3:.2f}",
                f"{row.dense_seconds * 1e3:.2f}",
                f"{row.at_whole_rate_seconds * 1e3:.2f}",
                f"{row.at_whole_rate_seconds / row.s2o_seconds:.2f}",
            ]
            for row in file.modelled
        ]
        names = [
            "length",
            "chunk",
            "cached",
            "density",
            "S2O, ms",
            "dense, ms",
            "dense at whole rate, ms",
            "that / S2O",
        ]
        print_table("attention of one layer, all chunks of a prompt", names, rows)
    if file.served:
        rows = [
            [
                row.label,
                str(row.length),
                f"{row.cached:.0%}",
                str(row.concurrency),
                f"{row.first_token_seconds * 1e3:.0f}",
                f"{row.tokens_per_second:.0f}",
            ]
            for row in file.served
        ]
        names = ["server", "length", "cached", "at a time", "first token, ms", "tokens / s"]
        print_table("a server", names, rows)


if __name__ == "__main__":
    sys.exit(main())
