#!/usr/bin/env python3
"""Find the setting of each baseline at which a model's answers are as far from dense's as with a profile of S2O.

    python -m scripts.bench.equal_answers --data MODEL --profile FILE [--length 32768] [--methods pbs sparge ...]

A baseline has one number, between the ends of its ladder in scripts/bench/methods.py; it is bisected until the KL of
answers behind a finished prefill (`calibrate.proof.answers`) is S2O's. Last rows are as exact as S2O's. A row says
which KL was reached, which is another than S2O's where the ladder ends or steps are coarse; the last line asks the same
questions of all.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from calibrate.evaluation.plan import RETRIEVAL, EvaluationPlan
from calibrate.evaluation.run import Variant, list_variants, run_as
from calibrate.model.models import LoadedModel, load
from calibrate.prompts.documents import make_held_out_prompts
from calibrate.proof.answers import answer_densely, compare_answers
from s2o_runtime.errors import InputError
from scripts.bench import common
from scripts.bench.baselines.settings import BASELINES, parse
from scripts.bench.methods import LADDERS

NAME = "scripts.bench.equal_answers"
# of the two tasks together 640
QUESTIONS = f"--tasks {','.join(RETRIEVAL)} --num-prompts 10 --num-needles 32 --out-dir build/eval"
CLOSE, STEPS = 1.02, 8  # times S2O's KL, at which a setting is as good; bisections at most


def parser() -> common.Parser:
    out, add = common.bench_parser(NAME, __doc__)
    add("--data", "demo", "the model", metavar="MODEL")
    out.add_argument("--profile", type=Path, required=True, help="of the model")
    add("--length", 32768, "tokens of a prompt", type=int, metavar="N")
    add("--prompts", 4, "held-out prompts, each with a question about every eighth of it", type=int, metavar="N")
    add("--methods", tuple(BASELINES), "baselines", nargs="+", metavar="NAME", choices=BASELINES)
    add("--seed", 1234, type=int, metavar="N")
    common.add_machine(add, "equal_answers.json")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return common.run_command(NAME, args.out, lambda: measure(args), "a shorter --length or fewer --prompts")


def measure(args: argparse.Namespace) -> None:
    """Print S2O's KL, each baseline's setting with its KL, and the command that asks all of them."""
    common.check_device(args)
    loaded = load(args.data, args.device, resident=True)
    plan = EvaluationPlan(args.data, Path("build/eval"), (args.length,), profiles=(args.profile,))
    _, profile = list_variants(plan, loaded)
    measure_kl = prepare(loaded, args.length, args.prompts, args.seed)
    target = measure_kl(profile)
    if not target:
        raise InputError(f"{args.profile} moves no answer at {args.length} tokens: give a length at which it runs S2O")
    print(f"{args.length} tokens, nats per token of answers: S2O {target:.2e}", flush=True)
    rows: list[dict[str, Any]] = []
    words = f"s2o-eval --model {args.data} --lengths {args.length} --profile {args.profile} {QUESTIONS}".split()
    for method in args.methods:
        (form, *_), numbers = LADDERS[method]
        number, kl = find_setting(partial(measure_baseline, measure_kl, form), numbers, target)
        rows.append({"setting": form.format(number), "kl": kl, "s2o": target})
        words += ["--setting", rows[-1]["setting"]]
        print(f"  {rows[-1]['setting']:40} {kl:.2e}, {kl / target:.2f} times S2O's", flush=True)
    print(f"answers by: {shlex.join(words)}")
    machine = common.machine(torch.device(args.device))
    args.out.write_text(json.dumps({"length": args.length, "results": rows, **machine}, indent=1), encoding="utf-8")


def measure_baseline(measure_kl: Callable[[Variant], float], form: str, number: float) -> float:
    """Return the KL of a baseline with this number in its setting."""
    return measure_kl(Variant("", "", baseline=parse(form.format(number))))


def prepare(loaded: LoadedModel, length: int, count: int, seed: int) -> Callable[[Variant], float]:
    """Let the dense model answer, and return the function that measures a variant's KL in nats per token."""
    prompts = make_held_out_prompts(loaded.tokenizer, length, count, seed)
    asked = [(prompt, answer_densely(loaded, prompt)) for prompt in prompts]

    def measure_kl(variant: Variant) -> float:
        patch = partial(run_as, loaded.model, variant)
        return statistics.fmean(compare_answers(loaded, *answers, patch).kl for answers in asked)

    return measure_kl


def find_setting(measure_kl: Callable[[float], float], numbers: Sequence[float], target: float) -> tuple[float, float]:
    """Return the number between a ladder's ends whose KL is nearest to the target, and that KL."""
    ends = numbers[0], numbers[-1]
    measured = {number: measure_kl(number) for number in ends}
    exact, loose = sorted(measured, key=measured.__getitem__)
    for _ in range(STEPS):
        if not measured[exact] * CLOSE < target < measured[loose] / CLOSE:
            break  # an end is as close, or the nearest there is
        middle = math.sqrt(exact * loose)
        measured[middle] = measure_kl(middle)
        exact, loose = (middle, loose) if measured[middle] < target else (exact, middle)

    def distance(number: float) -> float:
        return abs(math.log(max(measured[number], 1e-12) / target))

    nearest = min(measured, key=distance)
    return nearest, measured[nearest]


if __name__ == "__main__":
    raise SystemExit(main())
