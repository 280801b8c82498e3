#!/usr/bin/env python3
"""Requests a second that vLLM's engine answers to agents at a fixed time to the first token: stock against S2O.

    python -m scripts.bench.agent_trace --model demo --profile profiles/demo/nvidia-h200/rel-mse-0.001.safetensors

--sessions conversations go on side by side. A request is the next turn of one of them, drawn at random: all that was
said before, which the prefix cache may hold, and 512 to 4096 new tokens. Sessions are between the first and the last of
--lengths long; one that would become longer ends, and another begins with the first. What the sessions have at the
beginning is read beforehand. Requests arrive at random times (a Poisson process), whether or not earlier ones are
answered, and generate --tokens each. Turns, texts and times are the same for both engines, the times by the rate.

The rate is doubled while the 99th percentile of the time to the first token, from arrival on, is at most --limit, and
searched for in shorter and shorter steps from then on. Engines run one after the other.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from s2o_runtime.errors import ConfigError
from scripts.bench import common
from scripts.bench.first_token import S2O, OpenLoop, Remote, Text, parser, settings_of, start_engines
from scripts.bench.schema import ResultFile, write

NAME = "scripts.bench.agent_trace"
NEW = (512, 4096)  # tokens of a turn
Trace = tuple[list[list[int]], list[list[int]], list[float]]  # prefixes, prompts and their arrivals


@dataclass(frozen=True, kw_only=True)
class AgentTraceFile(ResultFile):
    """Every run of both engines; the other fields are `FirstTokenFile`'s."""

    program: ClassVar[str] = f"python -m {NAME}"

    format: str = "s2o-bench-agent-trace/1"
    runs: list[OpenLoop]
    summary: str
    density: dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    out = parser(NAME, __doc__)
    for flag, default, kind in (
        ("sessions", 8, int), ("requests", 300, int), ("tokens", 64, int), ("limit", 2.0, float), ("rate", 0.5, float),
        ("steps", 8, int), ("seed", 0, int),
    ):  # fmt: skip
        out.add_argument(f"--{flag}", type=kind, default=default, metavar="N", help="default %(default)s")
    out.set_defaults(lengths=(16384, 131072))
    return common.run_command(out, argv, measure, "shorter --lengths or fewer --sessions")


def measure(args: argparse.Namespace) -> None:
    """Search for each engine's rate, print it and write --out."""
    common.check_least(args, 1, "sessions", "requests", "tokens", "steps")
    if len(args.lengths) != 2 or args.lengths[1] - args.lengths[0] < NEW[1] or min(args.limit, args.rate) <= 0:
        raise ConfigError(f"use two --lengths, {NEW[1]} or more apart, and a --limit and a --rate above 0")
    with start_engines(args) as engines:
        trace = make_trace(Text(args), args)
        runs = [run for engine in engines.values() for run in find_rate(engine, trace, args)]
        write(args.out, AgentTraceFile(settings=settings_of(args), runs=runs, **engines[S2O].call("seen")))
    for name in engines:
        kept = [run for run in runs if run.engine == name and run.first_p99 <= args.limit]
        best = max(kept, key=lambda run: run.rate, default=None)
        print(f"{name}, the highest rate with 99% of first tokens within {args.limit:g} s: {best or 'none'}")


def make_trace(text: Text, args: argparse.Namespace) -> Trace:
    """Return what the sessions have at first, the prompt of every turn, and arrivals at one request a second."""
    (shortest, longest), rng = args.lengths, random.Random(args.seed)
    sessions = [(text.tokens(longest), rng.randint(shortest, longest - NEW[1])) for _ in range(args.sessions)]
    cached = [tokens[:length] for tokens, length in sessions]
    prompts, arrivals = [], list(accumulate(rng.expovariate(1.0) for _ in range(args.requests)))
    for _ in arrivals:
        session = rng.randrange(args.sessions)
        tokens, length = sessions[session]
        length += rng.randint(*NEW)
        if length + args.tokens > longest:
            tokens, length = text.tokens(longest), shortest
        sessions[session] = tokens, length
        prompts.append(tokens[:length])
    return cached, prompts, arrivals


def find_rate(engine: Remote, trace: Trace, args: argparse.Namespace) -> list[OpenLoop]:
    """Run the trace at rates that come nearer and nearer to the highest one whose first tokens are in time."""
    (cached, prompts, arrivals), rate, step, runs = trace, args.rate, 2.0, list[OpenLoop]()
    for _ in range(1 + args.steps):
        times = [time / rate for time in arrivals]
        runs.append(engine.call("open_loop", rate, prompts, times, cached, args.tokens))
        in_time = [run.first_p99 <= args.limit for run in runs[1:]]  # the first run may include compiling
        if in_time:
            step = step if len(set(in_time)) == 1 else step**0.5
            rate *= step if in_time[-1] else 1 / step
    return runs[1:]


if __name__ == "__main__":
    sys.exit(main())
