"""s2o-calibrate: flags -> Recipe -> profile. Nothing heavy is imported before the flags are known to be good."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from calibrate.api import log, make_plan, run
from calibrate.commands.common import Flags, add_output_flags, print_json, run_command
from calibrate.evaluation.plan import RULER
from calibrate.options import add_flags, format_value, read_path
from calibrate.recipe import INPUT, OPTIONS, OUTPUT, Recipe, load_yaml, merge_options
from s2o_runtime.command_line import (
    INTERRUPTED,
    NOT_PROVEN,
    OK,
    Parser,
    add_information,
    describe_exit_codes,
    report_failure,
)
from s2o_runtime.errors import ConfigError

if TYPE_CHECKING:
    from calibrate.proof.state import Problem

PROGRAM = "s2o-calibrate"
RULER_LENGTH = 8192  # tokens; in 4096 the words of some tokenizers find no room
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
    ("write it where patch, vLLM and SGLang find it", "--model FOLDER --out-in-model"),
    ("calibrate, certify, score RULER and make a folder to publish", "--model my/model --publish to-publish"),
)


def build_parser() -> Parser:
    """Build the parser. Flags that are not given are left out of the namespace; the defaults are those of `Recipe`."""
    out = Parser(
        prog=PROGRAM,
        argument_default=argparse.SUPPRESS,
        description="Calibrate S2O sparse attention for a model on this machine and write a profile.",
        epilog=f"{describe_exit_codes()} A run that was interrupted "
        "continues when the same command is run again. For another budget or another GPU, a profile is changed with "
        f"s2o-profile rebudget or retile. {PROGRAM} {DOCTOR} says whether this machine is ready.",
        examples=EXAMPLES,
        first=FIRST,
    )
    groups = add_flags(out, OPTIONS.values())
    groups[INPUT].add_argument(
        "--recipe", type=read_path, metavar="FILE.yaml", help="options by the names of these flags, which override them"
    )
    output = groups[OUTPUT]
    output.add_argument(
        "--out-in-model", action="store_true", help="write into s2o/ of the model's own folder, where it is found"
    )
    output.add_argument(
        "--publish", type=read_path, metavar="FOLDER", help="score RULER too, and fill a folder to publish"
    )
    output.add_argument("--name", metavar="ORG/MODEL", help="with --publish: the model's hub id (default --model)")
    output.add_argument("--dry-run", action="store_true", help="print the plan and stop, with --json as JSON")
    output.add_argument("--yaml", action="store_true", help="with --dry-run: print the plan as a file for --recipe")
    output.add_argument("--list-models", action="store_true", help="print the aliases of models and stop")
    add_output_flags(output)
    add_information(output)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == [DOCTOR]:
        from calibrate.commands import doctor

        return doctor.main(arguments[1:], f"{PROGRAM} {DOCTOR}")
    return run_command(PROGRAM, vars(build_parser().parse_args(arguments)), _run, "nothing was written")


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
    if "name" in flags and "publish" not in flags:
        raise ConfigError("--name is what --publish calls the model: give both")
    file = load_yaml(flags["recipe"]) if "recipe" in flags else {}
    options = merge_options(file, {name: value for name, value in flags.items() if name in OPTIONS})
    dry_run, progress = "dry_run" in flags, "quiet" not in flags
    recipe, device, preflight, estimate, prompts = make_plan(
        options, dry_run=dry_run, progress=progress, in_model="out_in_model" in flags
    )
    if "publish" in flags:
        _check_publishable(recipe, flags)
    if "yaml" in flags:
        print(recipe.to_yaml(), end="")
        return OK

    from calibrate.report.page import patch_call, print_report
    from calibrate.report.plan import describe_load, plan, select_lines
    from calibrate.report.sections import is_worthwhile
    from calibrate.tables import open_console, print_fields, print_lines

    console = open_console(stderr="json" in flags)
    lines = plan(recipe, preflight, estimate, device, frozenset(options), rehearsed=dry_run, prompts=prompts)
    if dry_run and "json" in flags:
        return print_json(lines)
    if progress or dry_run:
        print_fields((lines if "verbose" in flags else select_lines(lines, options)) | describe_load(device), console)
    if dry_run:
        return OK
    command = shlex.join([PROGRAM, *sys.argv[1:]])
    try:
        result = run(recipe, progress=progress, command=command, estimate=estimate)
    except KeyboardInterrupt:
        if not recipe.journal_path.exists():
            raise
        remedy = "run the same command to continue: everything measured so far is kept in"
        return report_failure(PROGRAM, INTERRUPTED, f"interrupted; {remedy} {recipe.journal_path}")
    if result.report is not None and "json" in flags:
        print_json(result.report.to_json())
    elif result.report is not None:
        print_report(result.report, console)
    if result.written:
        is_gain = result.report is None or is_worthwhile(result.report)
        print_lines(
            [
                f"wrote {result.recipe.out} in {time.monotonic() - start:.0f} s",
                *(f"wrote the report {path}" for path in result.report_files[-1:]),
                f"look at it: s2o-profile show {shlex.quote(str(result.recipe.out))}",
                *([f"deploy it: {patch_call(str(result.recipe.out))}"] if is_gain else []),
            ],
            console,
        )
    if result.report_failure:
        log.warning("%s", result.report_failure)
    if result.written:
        if "publish" in flags:
            _publish(result.recipe, flags)
        return OK
    remedy = f"{give_advice(result.problems)}, or write it all the same with --allow-regression"
    return report_failure(
        PROGRAM, NOT_PROVEN, f"the proof failed, so no profile was written ({result.problems[0]}): {remedy}"
    )


def _check_publishable(recipe: Recipe, flags: Flags) -> None:
    """Raise ConfigError or InputError if a profile of the recipe cannot be scored on RULER or published."""
    from calibrate.evaluation.ruler import load_generators
    from calibrate.report.publish import check_publishable

    if recipe.random_weights or "json" in flags:
        raise ConfigError("--publish needs trained weights and prints tables: leave --random-weights and --json out")
    if not _list_ruler_lengths(recipe):
        raise ConfigError(
            f"--lengths {format_value(recipe.lengths)} has none that --publish scores RULER at, of {RULER_LENGTH} "
            "tokens or more and a quarter above the shortest: add a longer one"
        )
    check_publishable(flags.get("name", recipe.model), flags["publish"], "--publish")
    load_generators()


def _list_ruler_lengths(recipe: Recipe) -> tuple[int, ...]:
    # RULER's prompts are up to a seventh shorter than asked for, and below the shortest length all is dense
    least = max(RULER_LENGTH, 1.25 * recipe.lengths[0])
    return tuple(length for length in recipe.lengths if length >= least)


def _publish(recipe: Recipe, flags: Flags) -> None:
    """Score the profile of a recipe on RULER, beside it, and write the folder to publish."""
    from calibrate.commands import evaluate, profile

    scores = recipe.out.with_suffix(".ruler")
    measured = {"model": recipe.model, "profile": [recipe.out], "device": recipe.device, "out_dir": scores}
    evaluate.run(measured | recipe.loading | {"tasks": [RULER], "lengths": _list_ruler_lengths(recipe)})
    published = {"profile": recipe.out, "evaluation": scores / "summary.json", "out_dir": flags["publish"]}
    profile.publish(published | {"name": flags.get("name")})


def give_advice(problems: Sequence[Problem]) -> str:
    """Return the remedy for each kind of problem of a failed proof, once."""
    from calibrate.proof.state import ProblemKind

    kinds = {problem.kind for problem in problems}
    if ProblemKind.LOST_NEEDLES in kinds:  # the advice for the limit is more error, which would lose more needles
        kinds.discard(ProblemKind.OVER_LIMIT)
    return "; ".join(kind.value for kind in ProblemKind if kind in kinds)


if __name__ == "__main__":
    sys.exit(main())
