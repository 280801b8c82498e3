"""s2o-eval: flags -> EvaluationPlan -> results. Nothing heavy is imported before the flags are known to be good."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from calibrate.commands.common import Flags, add_output_flags, print_json, run_command
from calibrate.evaluation.plan import ALL_TASKS, FILES, OPTIONS, OUTPUT, PROMPTS, TASKS, EvaluationPlan
from calibrate.machine import check_output, resolve_device, wrap_write_errors
from calibrate.options import add_flags
from calibrate.recipe import DEFAULT_LENGTHS, check_limit
from s2o_runtime.command_line import (
    BAD_INPUT,
    INTERRUPTED,
    NO_RESOURCE,
    OK,
    Parser,
    add_information,
    describe_exit_codes,
)
from s2o_runtime.errors import ConfigError

if TYPE_CHECKING:
    from calibrate.evaluation.results import Summary
    from calibrate.prompts.prompt import Prompt

PROGRAM = "s2o-eval"
FIRST = ("--model", "--profile", "--setting", "--lengths", "--tasks", "--prompts", "--out-dir", "--dry-run")
EXAMPLES = (
    ("compare a profile with dense attention", "--model demo --profile p.safetensors --out-dir results"),
    (
        "compare answers only, many of them, at two lengths",
        "--model demo --profile p.safetensors --tasks needles,questions "
        "--lengths 8192,32768 --num-prompts 8 --num-needles 32 --out-dir results",
    ),
    (
        "compare on RULER's tasks",
        "--model demo --profile p.safetensors --tasks ruler --lengths 8192 --num-ruler 8 --out-dir results",
    ),
    (
        "compare one setting for all heads, without a profile",
        "--model demo --setting tau=0.3,segment=1024 --out-dir results",
    ),
    ("score your own questions", "--model demo --profile p.safetensors --prompts questions.jsonl --out-dir results"),
)


def build_parser() -> Parser:
    """Build the parser. Flags that are not given are left out; the defaults are those of `EvaluationPlan`."""
    out = Parser(
        prog=PROGRAM,
        argument_default=argparse.SUPPRESS,
        description="Measure what sparse attention does to a model: its answers, predictions, time and memory.",
        epilog=f"{describe_exit_codes(OK, BAD_INPUT, NO_RESOURCE, INTERRUPTED)} A run that was interrupted continues "
        "when the same command is run again.",
        examples=EXAMPLES,
        first=FIRST,
    )
    output = add_flags(out, OPTIONS.values())[OUTPUT]
    output.add_argument("--dry-run", action="store_true", help="print the plan and stop, with --json as JSON")
    add_output_flags(output)
    add_information(output)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    flags = vars(build_parser().parse_args(argv))
    return run_command(PROGRAM, flags, run, "run the same command to continue: what was measured is kept")


def run(flags: Flags) -> int:
    """Measure what the flags ask for, write the report and return the exit code."""
    if "model" not in flags:
        raise ConfigError("--model is missing: give an alias such as demo, a local folder, or a hub id")
    if "out_dir" not in flags:
        raise ConfigError("--out-dir is missing: give a folder for results and report")
    if flags["out_dir"].exists() and not flags["out_dir"].is_dir():
        raise ConfigError(f"--out-dir {flags['out_dir']} is a file: give a folder")
    for name in FILES:
        check_output("--out-dir", flags["out_dir"] / name, flags.get("prompts") or ())
    # until torch is imported, which takes seconds, placeholders stand for what depends on the device
    draft = _make_plan(flags, lengths=flags.get("lengths", DEFAULT_LENGTHS["cuda"]))

    from calibrate.model.models import load_config, load_tokenizer
    from calibrate.profiles.stored import check_sizes
    from s2o_runtime.identity import geometry
    from s2o_runtime.layer_kinds import get_max_positions
    from s2o_runtime.profile import load_profile

    # the sizes and the tokenizer that ship suffice for a plan, unless it counts the tokens of the user's prompts
    loading = draft.loading | {"random_weights": draft.random_weights or ("dry_run" in flags and not draft.prompts)}
    profiles = {path: load_profile(path) for path in draft.profiles}  # a bad one is found before a model is loaded
    config = load_config(draft.model, **{name: loading[name] for name in ("random_weights", "trust_remote_code")})
    for path, profile in profiles.items():
        check_sizes(profile, path, draft.model, geometry(config))
    device, identity = resolve_device(flags.get("device"))
    plan = _make_plan(flags, device=device, lengths=flags.get("lengths", DEFAULT_LENGTHS[identity.kind]))
    limit = get_max_positions(config)
    check_limit(plan.lengths[-1], limit)

    from calibrate.evaluation import report, tasks
    from calibrate.tables import open_console, print_lines

    tokenizer = load_tokenizer(plan.model, **loading)
    tasks.check_lengths(plan, tokenizer)
    user_prompts = [] if plan.prompts is None else tasks.read_user_prompts(plan.prompts, tokenizer, limit)
    lines = report.plan_lines(plan, str(geometry(config)), str(identity), len(tasks.list_cases(plan, user_prompts)))
    console = open_console(stderr="json" in flags)
    if "dry_run" in flags and "json" in flags:
        return print_json(lines)
    if "quiet" not in flags or "dry_run" in flags:
        report.print_plan(lines, console)
    if "dry_run" in flags:
        return OK
    outcome = _measure(plan, user_prompts, progress="quiet" not in flags)
    with wrap_write_errors(plan.out):
        report.write_report(outcome, plan)
    if "json" in flags:
        print_json(outcome)
    else:
        report.print_summary(outcome, console)
    print_lines([f"wrote {', '.join(FILES)} to {plan.out}"], console)
    return OK


def _measure(plan: EvaluationPlan, user_prompts: Sequence[Prompt], progress: bool) -> Summary:
    """Return the summary of the plan's measurements: those of its journal, and those that are made now."""
    from calibrate.evaluation.results import open_journal, summarise
    from calibrate.evaluation.run import Evaluation, evaluate, list_variants
    from calibrate.model.models import load
    from calibrate.progress import PhaseClock
    from calibrate.versions import format_now

    with PhaseClock().time_phase("loading the model", progress):
        loaded = load(plan.model, plan.device, seed=plan.seed, resident=True, **plan.loading)
    compared = list_variants(plan, loaded)
    with open_journal(plan, loaded) as journal:
        evaluation = Evaluation(plan, loaded, compared, user_prompts, journal)
        evaluate(evaluation, progress=progress)
        outcome = summarise(evaluation)
    return outcome | {"date": format_now(), "command": shlex.join([PROGRAM, *sys.argv[1:]])}


def _make_plan(flags: Flags, **known: Any) -> EvaluationPlan:
    """Return the validated plan of the options among the flags, and of fields that are `known`.

    Tasks are done in one order; a file of prompts brings its task along.
    """
    fields = {option.field: option.read(flags[name]) for name, option in OPTIONS.items() if name in flags}
    tasks = {*fields.get("tasks", TASKS), *([PROMPTS] if "prompts" in fields else [])}
    unknown = tasks.difference(ALL_TASKS)
    fields["tasks"] = tuple(task for task in ALL_TASKS if task in tasks) + tuple(sorted(unknown))
    return EvaluationPlan(**fields | known).validate()


if __name__ == "__main__":
    sys.exit(main())
