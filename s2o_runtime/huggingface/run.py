"""s2o-run: start a program whose transformers models run S2O, without editing it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from s2o_runtime.command_line import BAD_INPUT, Parser, add_information, exit_code, exit_codes
from s2o_runtime.errors import InputError, ProfileError

PROGRAM = "s2o-run"
SITE = Path(__file__).parent / "site"
DESCRIPTION = """\
Run COMMAND so that the transformers models which it starts in Python with SDPA attention, the default, run S2O where
the profile fits them. Other models, and all that S2O is not for, run as without s2o-run.
"""
EPILOG = f"The exit code is the command's. If it is not started: {exit_codes(BAD_INPUT).removeprefix('Exit codes: ')}"
EXAMPLES = (
    ("Run a program with a profile", "--profile p.safetensors python answer.py"),
    ("See what ran and why", "--profile p.safetensors --explain python answer.py"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Become the command. Returns an exit code only if there is no profile that can be used, or no such command."""
    args = parser().parse_args(arguments)
    return exit_code(PROGRAM, lambda: _become(args))


def parser() -> Parser:
    """The flags before the command, and the command with its own."""
    out = Parser(PROGRAM, description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False, examples=EXAMPLES)
    out.add_argument(
        "--profile",
        metavar="FILE",
        help="default: what the environment variable S2O_PROFILE names, "
        "or for each model the one that is found in the folders of S2O_PROFILES, in profiles/ or in S2O's catalogue",
    )
    out.add_argument(
        "--beyond",
        choices=("dense", "warn", "s2o"),
        help="what prompts of more than 1.5 times the longest calibrated length run; default: S2O_BEYOND, or dense",
    )
    out.add_argument(
        "--drift",
        choices=("auto", "off", "warn", "dense"),
        help="what happens when a layer's sampled errors are past what the profile allows; default: S2O_DRIFT, or "
        "auto: warn if the profile says what it allows",
    )
    out.add_argument("--explain", action="store_true", help="print what every layer did when a process ends")
    add_information(out)
    out.add_argument("command", metavar="COMMAND", help="such as python, or a script that is one")
    out.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="the command's own")
    return out


def _become(args: argparse.Namespace) -> int:
    flags = {"S2O_PROFILE": args.profile, "S2O_BEYOND": args.beyond, "S2O_DRIFT": args.drift}
    os.environ.update({variable: value for variable, value in flags.items() if value is not None})
    from s2o_runtime.huggingface.environment import STARTED, VARIABLE, available  # imports torch
    from s2o_runtime.profile.find import VARIABLE as FOLDERS
    from s2o_runtime.profile.find import folders

    try:
        available()
    except ProfileError as error:
        if args.profile is None:
            raise
        raise ProfileError(f"--profile: {error.__cause__}") from error
    environment = dict(os.environ) | {FOLDERS: os.pathsep.join(map(str, folders()))}  # the command may go elsewhere
    if os.environ.get(VARIABLE):
        environment[VARIABLE] = os.path.abspath(os.environ[VARIABLE])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH"))))
    environment[STARTED] = str(os.getpid())  # which the command keeps
    if args.explain:
        environment["S2O_EXPLAIN"] = "1"
    try:
        os.execvpe(args.command, [args.command, *args.arguments], environment)
    except OSError as error:
        raise InputError(f"{args.command} cannot be run ({error.strerror}): check the command") from error


if __name__ == "__main__":
    sys.exit(main())
