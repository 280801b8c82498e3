#!/usr/bin/env python3
"""Find the setting of each baseline at which a model's answers are as far from dense's as with a profile of S2O.

    python -m scripts.bench.equal_answers --data MODEL --profile FILE [--length 32768] [--methods pbs sparge ...]

A baseline has one number, between the ends of its ladder in scripts/bench/methods.py; it is searched for until the KL
of answers behind a finished prefill (`calibrate.proof.answers`) is S2O's. Last rows are as exact as S2O's. A row says
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
from functools import cache, partial
from pathlib import Path

import torch
from scipy import optimize

from calibrate.evaluation.plan import RETRIEVAL, EvaluationPlan
from calibrate.evaluation.run import Variant, list_variants, run_as
from calibrate.model.models import LoadedModel, load
from calibrate.prompts.documents import make_held_out_prompts
from calibrate.proof.answers import answer_densely, compare_answers
from s2o_runtime.errors import InputError
from scripts.bench import common
from scripts.bench.baselines.settings import BASELINES, parse
from scripts.bench.methods import LADDERS

# of the two tasks together 640
QUESTIONS = f"--tasks {','.join(RETRIEVAL)} --num-prompts 10 --num-needles 32 --out-dir build/eval"
CLOSE, SEED = 0.001, 1234  # of a number's logarithm, where the search ends; of the prompts


def parser() -> common.Parser:
    out, add = common.bench_parser("scripts.bench.equal_answers", __doc__)
    add("--data", "demo", "the model", metavar="MODEL")
    out.add_argument("--profile", type=Path, required=True, help="of the model")
    add("--length", 32768, "tokens of a prompt", type=int, metavar="N")
    add("--prompts", 4, "held-out prompts, each with a question about every eighth of it", type=int, metavar="N")
    add("--methods", tuple(BASELINES), "baselines", nargs="+", metavar="NAME", choices=BASELINES)
    common.add_machine(add, "equal_answers.json")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    return common.run_command(parser(), argv, measure, "a shorter --length or fewer --prompts")


def measure(args: argparse.Namespace) -> None:
    """Print S2O's KL, each baseline's setting with its KL, and the command that asks all of them."""
    common.check_device(args)
    loaded = load(args.data, args.device, resident=True)
    plan = EvaluationPlan(args.data, Path("build/eval"), (args.length,), profiles=(args.profile,))
    _, profile = list_variants(plan, loaded)
    measure_kl = prepare(loaded, args.length, args.prompts)
    target = measure_kl(profile)
    if not target:
        raise InputError(f"{args.profile} moves no answer at {args.length} tokens: give a length at which it runs S2O")
    print(f"{args.length} tokens, nats per token of answers: S2O {target:.2e}", flush=True)
    words = f"s2o-eval --model {args.data} --lengths {args.length} --profile {args.profile} {QUESTIONS}".split()
    rows = []
    for method in args.methods:
        setting, kl = find_setting(measure_kl, method, target)
        rows.append({"setting": setting, "kl": kl, "s2o": target})
        words += ["--setting", setting]
        print(f"  {setting:40} {kl:.2e}, {kl / target:.2f} times S2O's", flush=True)
    print(f"answers by: {shlex.join(words)}")
    machine = common.machine(torch.device(args.device))
    args.out.write_text(json.dumps({"length": args.length, "results": rows, **machine}, indent=1), encoding="utf-8")


def prepare(loaded: LoadedModel, length: int, count: int) -> Callable[[Variant], float]:
    """Let the dense model answer, and return the function that measures a variant's KL in nats per token."""
    prompts = make_held_out_prompts(loaded.tokenizer, length, count, SEED)
    asked = [(prompt, answer_densely(loaded, prompt)) for prompt in prompts]

    def measure_kl(variant: Variant) -> float:
        patch = partial(run_as, loaded.model, variant)
        return statistics.fmean(compare_answers(loaded, *answers, patch).kl for answers in asked)

    return measure_kl


def find_setting(measure_kl: Callable[[Variant], float], method: str, target: float) -> tuple[str, float]:
    """Return the setting of a baseline whose KL is nearest to the target, and that KL."""
    (form, *_), numbers = LADDERS[method]

    @cache
    def distance(power: float) -> float:
        baseline = parse(form.format(math.exp(power)))
        return math.log(max(measure_kl(Variant("", "", baseline=baseline)), 1e-12) / target)

    powers = [math.log(numbers[0]), math.log(numbers[-1])]
    if math.prod(map(distance, powers)) < 0:  # else one end is the nearest there is
        powers.append(optimize.brentq(distance, *powers, xtol=CLOSE))
    nearest = min(powers, key=lambda power: abs(distance(power)))
    return form.format(math.exp(nearest)), target * math.exp(distance(nearest))


if __name__ == "__main__":
    raise SystemExit(main())
