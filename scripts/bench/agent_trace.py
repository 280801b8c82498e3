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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from s2o_runtime.errors import ConfigError
from scripts.bench import common
from scripts.bench.first_token import S2O, OpenLoop, Remote, Text, parser, settings_of, start_engines
from scripts.bench.schema import ResultFile, write

NAME = "scripts.bench.agent_trace"
NEW = (512, 4096)  # tokens of a turn


@dataclass(frozen=True, kw_only=True)
class AgentTraceFile(ResultFile):
    """Every run of both engines. requests_per_second: the highest rate of each engine within the limit, or 0."""

    program: ClassVar[str] = f"python -m {NAME}"

    format: str = "s2o-bench-agent-trace/1"
    runs: list[OpenLoop]
    requests_per_second: dict[str, float]
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
    args = out.parse_args(argv)
    return common.run_command(NAME, args.out, lambda: measure(args), "shorter --lengths or fewer --sessions")


def measure(args: argparse.Namespace) -> None:
    """Search for each engine's rate, print the table and write --out."""
    common.check_least(args, 1, "sessions", "requests", "tokens", "steps")
    if len(args.lengths) != 2 or args.lengths[1] - args.lengths[0] < NEW[1] or min(args.limit, args.rate) <= 0:
        raise ConfigError(f"use two --lengths, {NEW[1]} or more apart, and a --limit and a --rate above 0")
    with start_engines(args) as engines:
        cached, prompts, arrivals = make_trace(Text(args), args)
        runs: list[OpenLoop] = []
        best: dict[str, float] = {}
        for name, engine in engines.items():

            def run(rate: float, engine: Remote = engine) -> OpenLoop:
                times = [time / rate for time in arrivals]
                return engine.call("open_loop", rate, prompts, times, cached, args.tokens)  # type: ignore[no-any-return]

            of_engine = find_rate(run, args)
            best[name] = max((run.rate for run in of_engine if run.first_p99 <= args.limit), default=0.0)
            runs += of_engine
        known: dict[str, Any] = engines[S2O].call("seen")
    write(args.out, AgentTraceFile(settings=settings_of(args), runs=runs, requests_per_second=best, **known))
    names = ("engine", "requests / s", "first p50, ms", "first p99, ms", "between p50, ms", "between p99, ms")
    cells = [
        [run.engine, f"{run.rate:.3g}"]
        + [f"{t * 1e3:.1f}" for t in (run.first_median, run.first_p99, run.between_median, run.between_p99)]
        for run in runs
    ]
    common.print_table(f"{args.sessions} agents, first token within {args.limit:g} s for 99%", names, cells)
    print(f"requests a second: {', '.join(f'{name} {rate:.3g}' for name, rate in best.items())}")


def make_trace(text: Text, args: argparse.Namespace) -> tuple[list[list[int]], list[list[int]], list[float]]:
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


def find_rate(run: Callable[[float], OpenLoop], args: argparse.Namespace) -> list[OpenLoop]:
    """Run the trace at rates that come nearer and nearer to the highest one whose first tokens are in time."""
    rate, step, runs = args.rate, 2.0, list[OpenLoop]()
    run(rate)  # does not count: it may include compiling
    for _ in range(args.steps):
        runs.append(run(rate))
        in_time = [one.first_p99 <= args.limit for one in runs]
        step = step if len(set(in_time)) == 1 else step**0.5
        rate *= step if in_time[-1] else 1 / step
    return runs


if __name__ == "__main__":
    sys.exit(main())
