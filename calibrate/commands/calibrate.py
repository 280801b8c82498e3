"""s2o-calibrate: flags -> Recipe -> profile. Nothing heavy is imported before the flags are known to be good."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calibrate.api import finished, planned, warned
from calibrate.commands.common import Flags, add_output_flags, print_json, run
from calibrate.options import add_flags
from calibrate.recipe import INPUT, OPTIONS, OUTPUT, load_yaml, merged
from s2o_runtime.command_line import (
    BAD_INPUT,
    INTERRUPTED,
    NO_RESOURCE,
    NOT_PROVEN,
    OK,
    Parser,
    add_information,
    exit_codes,
    failed,
)
from s2o_runtime.errors import ConfigError

if TYPE_CHECKING:
    from calibrate.proof.state import Problem

PROGRAM = "s2o-calibrate"
DOCTOR = "doctor"  # the one command beside calibrating: s2o-doctor
FIRST = ("--model", "--prompts", "--lengths", "--budget-mse", "--budget-rel-mse", "--out", "--gpus", "--dry-run")
EXAMPLES = (
    ("see whether this machine is ready", DOCTOR),
    ("see the plan for a model on a GPU that is not here", "--model qwen2.5-7b --dry-run --target-gpu H100"),
    ("calibrate the demo model with the default budget", "--model demo"),
    ("calibrate for long prompts", "--model qwen2.5-7b --lengths 32768"),
    ("calibrate on your own prompts", "--model my/model --prompts mine.jsonl,manuals/ --budget-rel-mse 1e-3"),
    ("rehearse a model's sizes without its weights", "--model llama-3.1-70b --random-weights --num-certify 0"),
    ("prove what a server runs that feeds prompts in chunks", "--model my/model --chunk 8192"),
)


def parser() -> Parser:
    """The flags. What is not given is left out of the namespace; the defaults are those of `Recipe`."""
    out = Parser(
        prog=PROGRAM,
        argument_default=argparse.SUPPRESS,
        description="Calibrate S2O sparse attention for a model on this machine and write a profile.",
        epilog=f"{exit_codes(OK, BAD_INPUT, NOT_PROVEN, NO_RESOURCE, INTERRUPTED)} A run that was interrupted "
        "continues when the same command is run again. For another budget or another GPU, a profile is changed with "
        f"s2o-profile rebudget or retile. {PROGRAM} {DOCTOR} says whether this machine is ready.",
        examples=EXAMPLES,
        first=FIRST,
    )
    groups = add_flags(out, OPTIONS.values())
    groups[INPUT].add_argument(
        "--recipe", type=Path, metavar="FILE.yaml", help="options by the names of these flags, which override them"
    )
    output = groups[OUTPUT]
    output.add_argument("--dry-run", action="store_true", help="print the plan and stop, with --json as JSON")
    output.add_argument("--yaml", action="store_true", help="with --dry-run: print the plan as a file for --recipe")
    output.add_argument("--list-models", action="store_true", help="print the aliases of models and stop")
    add_output_flags(output)
    add_information(output)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == [DOCTOR]:
        from calibrate.commands import doctor

        return doctor.main(arguments[1:], f"{PROGRAM} {DOCTOR}")
    return run(PROGRAM, vars(parser().parse_args(arguments)), _run, "nothing was written")


def _run(flags: Flags) -> int:
    start = time.monotonic()
    if "list_models" in flags:
        from calibrate.model.models import ALIASES, in_full

        if "json" in flags:
            return print_json(ALIASES)
        print("\n".join(map(in_full, ALIASES)))
        return OK
    if "yaml" in flags and "dry_run" not in flags:
        raise ConfigError("--yaml prints what --dry-run would run: give both")
    file = load_yaml(flags["recipe"]) if "recipe" in flags else {}
    options = merged(file, {name: value for name, value in flags.items() if name in OPTIONS})
    recipe, device, preflight, estimate, prompts = planned(
        options, rehearsed="dry_run" in flags, progress="quiet" not in flags
    )
    if "yaml" in flags:
        print(recipe.to_yaml(), end="")
        return OK

    from calibrate.report.page import patch_call, print_report
    from calibrate.report.plan import busy_line, in_short, plan
    from calibrate.report.sections import is_worthwhile
    from calibrate.tables import print_fields, print_lines, terminal

    console = terminal(stderr="json" in flags)
    plan_lines = plan(
        recipe, preflight, estimate, device, frozenset(options), rehearsed="dry_run" in flags, prompts=prompts
    )
    if "dry_run" in flags and "json" in flags:
        return print_json(plan_lines)
    if "quiet" not in flags or "dry_run" in flags:
        shown = plan_lines if "verbose" in flags else in_short(plan_lines, options)
        print_fields(shown | busy_line(device), console)
    if "dry_run" in flags:
        return OK
    try:
        result = finished(
            recipe, progress="quiet" not in flags, command=shlex.join([PROGRAM, *sys.argv[1:]]), estimate=estimate
        )
    except KeyboardInterrupt:
        if not recipe.journal_path.exists():
            raise
        return failed(
            PROGRAM,
            INTERRUPTED,
            "interrupted; run the same command to continue: everything measured so far is kept in "
            f"{recipe.journal_path}",
        )
    if result.report is not None:
        if "json" in flags:
            print_json(result.report.to_json())
        else:
            print_report(result.report, console)
    if result.written:
        is_gain = result.report is None or is_worthwhile(result.report)
        print_lines(
            [
                f"wrote {recipe.out} in {time.monotonic() - start:.0f} s",
                *(f"wrote the report {path}" for path in result.report_files[-1:]),
                f"look at it: s2o-profile show {shlex.quote(str(recipe.out))}",
                *([f"deploy it: {patch_call(str(recipe.out))}"] if is_gain else []),
            ],
            console,
        )
    warned(result)
    if result.written:
        return OK
    return failed(
        PROGRAM,
        NOT_PROVEN,
        f"the proof failed, so no profile was written ({result.problems[0]}): {advice(result.problems)}, or write "
        "it all the same with --allow-regression",
    )


def advice(problems: Sequence[Problem]) -> str:
    """What to change after a failed proof.

    Args:
        problems: `Result.problems`.

    Returns:
        What helps against each kind of problem, once. Where layers are over their limit and needles are lost too, only
        the advice about needles is given: less error is no help for the limit, and more error would lose more needles.
    """
    from calibrate.proof.state import ProblemKind

    kinds = {problem.kind for problem in problems}
    if ProblemKind.LOST_NEEDLES in kinds:
        kinds.discard(ProblemKind.OVER_LIMIT)
    return "; ".join(kind.value for kind in ProblemKind if kind in kinds)


if __name__ == "__main__":
    sys.exit(main())
