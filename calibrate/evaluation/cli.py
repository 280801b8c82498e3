"""s2o-eval: flags -> Plan -> results. Nothing heavy is imported before the flags are known to be good."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from calibrate.cli import DEFAULT_LENGTHS, OK, Parser, exit_code, named_device
from calibrate.evaluation.plan import PROMPTS, TASKS, Plan
from calibrate.evaluation.settings import EXAMPLE
from s2o_runtime import __version__
from s2o_runtime.errors import ConfigError

OUTPUT = ("dry_run", "json", "quiet", "verbose")

Flags = Mapping[str, Any]  # the flags that were given, by their name with underscores


def parser() -> Parser:
    """The flags. What is not given is left out of the namespace; the defaults are those of `Plan`."""
    out = Parser(
        prog="s2o-eval",
        argument_default=argparse.SUPPRESS,
        description="Measure what sparse attention does to a model: retrieval, perplexity, agreement, time, memory.",
        epilog="Exit codes: 0 done, 2 bad input, 130 interrupted. A run that was interrupted continues when the same "
        "command is run again.",
    )
    what = out.add_argument_group("what to compare").add_argument
    what("--model", help="an alias such as demo or qwen2.5-7b, a local folder, or a hub id")
    what("--profile", type=Path, action="append", metavar="FILE", help="a profile to compare with dense; repeatable")
    what("--setting", action="append", metavar="TEXT", help=f"one setting for all heads, {EXAMPLE}; repeatable")
    what("--random-weights", action="store_true", help="the model's architecture without its weights: times only")
    what("--device", metavar="NAME", help="cuda, cuda:1 or cpu (default: a GPU if there is one)")

    on = out.add_argument_group("on what").add_argument
    lengths = ", ".join(f"{','.join(map(str, each))} on {kind}" for kind, each in DEFAULT_LENGTHS.items())
    on("--lengths", type=_integers, metavar="N,N", help=f"prompt lengths in tokens (default {lengths})")
    on("--tasks", type=_words, metavar="NAME,NAME", help=f"some of {','.join(TASKS)} (default all)")
    on("--prompts", type=Path, metavar="FILE.jsonl", help='your prompts: "prompt" or "messages", and "answer" a line')
    on("--depths", type=int, metavar="N", help=f"places of a needle (default {Plan.depths})")
    on("--samples", type=int, metavar="N", help=f"prompts of each task, length and depth (default {Plan.samples})")
    on("--needles", type=int, metavar="N", help=f"facts in a prompt of the task multi (default {Plan.needles})")
    on("--repeats", type=int, metavar="N", help=f"timed prefills, after one that is not (default {Plan.repeats})")
    on("--seed", type=int, metavar="N", help=f"the same seed makes the same prompts (default {Plan.seed})")

    output = out.add_argument_group("output").add_argument
    output("--out", type=Path, metavar="FOLDER", help="where results, report and pictures go")
    output("--dry-run", action="store_true", help="print the plan and stop")
    output("--json", action="store_true", help="print plan or summary as JSON")
    output("--quiet", action="store_true", help="no progress bar")
    output("--verbose", action="store_true", help="log decisions to stderr")
    output("--version", action="version", version=f"s2o {__version__}")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    flags = vars(parser().parse_args(argv))
    return exit_code("s2o-eval", flags, _run, "run the same command to continue: what was measured is kept")


def _run(flags: Flags) -> int:
    draft = _draft(flags)

    from calibrate.models import load_config, load_tokenizer
    from s2o_runtime.identity import geometry
    from s2o_runtime.profile import load_profile

    for path in draft.profiles:
        load_profile(path)  # a bad one is found before a large model is loaded
    config = load_config(draft.model, random_weights=draft.random_weights)
    device, identity = named_device(flags.get("device"))
    plan = _plan(flags, {"device": device, "lengths": flags.get("lengths", DEFAULT_LENGTHS[identity.kind])})
    limit = int(config.max_position_embeddings)
    plan.check_limit(limit)

    from rich.console import Console

    from calibrate.evaluation import own, report, tasks

    tokenizer = load_tokenizer(plan.model, random_weights=plan.random_weights)
    tasks.check(plan, tokenizer)
    asked = [] if plan.prompts is None else own.read(plan.prompts, tokenizer, limit)
    lines = report.plan_lines(plan, str(geometry(config)), str(identity), len(tasks.cases(plan, asked)))
    console = Console(stderr="json" in flags, width=None if sys.stdout.isatty() else 120)
    if "dry_run" in flags and "json" in flags:
        print(json.dumps(lines, indent=1))
        return OK
    report.print_plan(lines, console)
    if "dry_run" in flags:
        return OK

    from calibrate.evaluation.results import open_journal, summary
    from calibrate.evaluation.run import evaluate
    from calibrate.evaluation.variants import variants
    from calibrate.journal import write_failure
    from calibrate.models import load
    from calibrate.versions import now

    loaded = load(plan.model, plan.device, random_weights=plan.random_weights, seed=plan.seed, resident=True)
    compared = variants(plan, loaded)
    with open_journal(plan, loaded) as journal:
        evaluate(plan, loaded, compared, asked, journal, progress="quiet" not in flags)
        found = summary(plan, loaded, compared, asked, journal)
    found |= {"date": now(), "command": shlex.join(["s2o-eval", *sys.argv[1:]])}
    try:
        files = report.write_report(found, plan)
    except OSError as error:
        raise write_failure(error.filename or plan.out, error) from error
    if "json" in flags:
        print(json.dumps(found, indent=1))
    else:
        report.print_tables(found, console)
    console.print(f"wrote {', '.join(files)} to {plan.out}", highlight=False, soft_wrap=True)
    return OK


def _draft(flags: Flags) -> Plan:
    """The plan as far as it is known without torch, validated, its files checked."""
    if "model" not in flags:
        raise ConfigError("--model is missing: give an alias such as demo, a local folder, or a hub id")
    if "out" not in flags:
        raise ConfigError("--out is missing: give a folder for results, report and pictures")
    if flags["out"].exists() and not flags["out"].is_dir():
        raise ConfigError(f"--out {flags['out']} is a file: give a folder")
    return _plan(flags, {"lengths": flags.get("lengths", DEFAULT_LENGTHS["cuda"])})


def _plan(flags: Flags, known: Mapping[str, Any]) -> Plan:
    """The validated plan. Tasks are done in one order; a file of prompts brings its task along."""
    fields = {name: value for name, value in flags.items() if name not in OUTPUT}
    fields["profiles"] = tuple(fields.pop("profile", ()))
    fields["settings"] = tuple(fields.pop("setting", ()))
    named = fields.get("tasks", TASKS) + ((PROMPTS,) if "prompts" in fields else ())
    order = {name: place for place, name in enumerate((*TASKS, PROMPTS))}
    fields["tasks"] = tuple(sorted(dict.fromkeys(named), key=lambda name: order.get(name, len(order))))
    return Plan(**fields | dict(known)).validate()


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of lengths: try 8192,32768") from None


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


if __name__ == "__main__":
    sys.exit(main())
