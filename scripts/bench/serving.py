#!/usr/bin/env python3
"""Time to the first token and throughput of a server.

    python -m scripts.bench.serving --url http://localhost:8000/v1 --model NAME --label S2O [--concurrency 1,4]

Prompts of random words are sent to an OpenAI-compatible server, some of whose tokens it has in its prefix cache; no
prompt is of an earlier run. Run it once against a server with S2O and once against one without. A kind of prompt that
the server refuses, such as one longer than it takes, is said and left out. --out is written after each kind.
`scripts.bench.first_token` compares vLLM's engine with and without S2O without a server.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from calibrate.versions import now
from s2o_runtime.errors import ConfigError, InputError
from scripts.bench.common import Parser, bench_parser, check_least, float_list, int_list, print_table, run_command
from scripts.bench.schema import ResultFile, write

NAME = "scripts.bench.serving"
KEY_VARIABLE = "OPENAI_API_KEY"
SHOWN = 300  # characters of what a server says of an error
FRESH = 16  # words
WORDS = ("the", "of", "and", "to", "in", "is", "it", "you", "that", "he", "was", "for", "on", "are", "with", "as")


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
    """settings: the options. device, versions: of the machine that sent the prompts, which may not be the server's."""

    program: ClassVar[str] = f"python -m {NAME}"

    format: str = "s2o-bench-serving/2"
    settings: dict[str, Any]
    served: list[ServedPrompts]


def parser() -> Parser:
    out, add = bench_parser(NAME, __doc__)
    out.add_argument("--url", required=True, metavar="URL", help="of an OpenAI-compatible server, up to /v1")
    out.add_argument("--model", required=True, metavar="NAME", help="what the server calls its model")
    add("--label", "S2O", "what the server runs, for the result", metavar="TEXT")
    add("--api-key", None, f"that the server asks for; by default the variable {KEY_VARIABLE}", metavar="KEY")
    add("--lengths", "8192,32768,131072", "tokens of a prompt", type=int_list("8192,131072"), metavar="N,N")
    add("--hits", "0,0.5,0.99", "shares of a prompt that are cached", type=float_list("0,0.5"), metavar="X,X")
    add("--concurrency", "1,4", "prompts at a time", type=int_list("1,4"), metavar="N,N")
    add("--prompts", 4, "prompts of each kind that are sent", type=int, metavar="N")
    add("--seed", 0, type=int, metavar="N")
    add("--out", Path("build/bench_serving.json"), type=Path, metavar="FILE")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run_command(NAME, args.out, lambda: measure(args), "shorter --lengths")


def measure(args: argparse.Namespace) -> None:
    """Send every kind of prompt, print the table and write --out."""
    check(args)
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "api_key")}
    file = ServingFile(settings=settings, served=[], device=platform.node(), versions={}, date=now())
    refused: list[InputError] = []
    for row in served_prompts(args, refused):
        file.served.append(row)
        write(args.out, file)
    if refused and not file.served:
        raise refused[0]
    report(file)
    if refused:
        raise InputError(f"{len(refused)} kinds of prompts failed, {args.out} has the others: {refused[0]}")


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError for what can be known before anything is sent."""
    check_least(args, 1, "prompts")
    if not 0 <= args.hits[0] <= args.hits[-1] <= 1:
        raise ConfigError(f"--hits are {', '.join(map(str, args.hits))}: use shares from 0 to 1")
    if min(args.lengths[0], args.concurrency[0]) < 1:
        raise ConfigError("--lengths and --concurrency need numbers of at least 1")
    if args.prompts < args.concurrency[-1]:
        raise ConfigError(f"--prompts {args.prompts} cannot be {args.concurrency[-1]} at a time: use at least as many")


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
    rows = []
    for row in file.served:
        milliseconds, rate = f"{row.first_token_seconds * 1e3:.0f}", f"{row.tokens_per_second:.0f}"
        rows.append([row.label, str(row.length), f"{row.cached:.0%}", str(row.concurrency), milliseconds, rate])
    names = ["server", "length", "cached", "at a time", "first token, ms", "tokens / s"]
    print_table("a server", names, rows)


if __name__ == "__main__":
    sys.exit(main())
